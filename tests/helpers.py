"""What tests of the operator share: inputs, float64 results by a formula of their own, errors, where the op runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tunegen import dispatch, rms_norm
from tunegen.model import Silicon

OP_MODULE = sys.modules["tunegen.ops.rms_norm"]
SMALL_GPU = Silicon("interpreter", 89, 4, 2**20, 0, 0, 227 * 1024)
"""Few multiprocessors, so that persistent kernels walk; an interpreted program takes a millisecond or so."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CASTINGS = ("fp32", "llama")
ARITHMETIC = 16
"""Units of rounding that sums of squares, rsqrt and products may take, a sum over a few dozen rows included."""

MARKS = {"cpu": (), "interpreter": (pytest.mark.interpreter,), "cuda": (pytest.mark.gpu,)}


class Place(NamedTuple):
    """Where the op runs: torch operators on the CPU, kernels in Triton's interpreter, kernels on a GPU."""

    name: str

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.name == "cuda" else torch.device("cpu")

    def rounding(self, dtype: torch.dtype) -> float:
        """The relative error of one rounding. The interpreter truncates bf16, which is twice as far off."""
        truncates = self.name == "interpreter" and dtype == torch.bfloat16
        return torch.finfo(dtype).eps * (1.0 if truncates else 0.5)

    def allowed(self, dtype: torch.dtype, x_dtype: torch.dtype) -> float:
        """The largest `error` of a result that is computed in fp32 (fp64 for fp64 x) and rounded once."""
        accumulate = torch.float64 if x_dtype == torch.float64 else torch.float32
        return self.rounding(dtype) + ARITHMETIC * torch.finfo(accumulate).eps


CPU = Place("cpu")


def places(*names: str) -> Any:
    """A fixture `place`, for a module that names it so: each test runs at each of the places that exist here."""
    params = [pytest.param(name, marks=MARKS[name]) for name in names or tuple(MARKS)]

    @pytest.fixture(params=params)
    def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
        if request.param == "interpreter":
            interpret_kernels(monkeypatch)
        yield Place(request.param)
        if request.param == "interpreter":
            dispatch.forget()

    return place


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rms_norm` launches kernels for CPU tensors, as if they were on a small GPU; TRITON_INTERPRET must be set."""
    key, choice = OP_MODULE.key_of, dispatch.Choice
    cpu = torch.device("cpu")
    monkeypatch.setattr(OP_MODULE, "has_kernels", lambda x, *others: x.numel() > 0)
    monkeypatch.setattr(OP_MODULE, "key_of", lambda *args, **named: key(*args, **named)._replace(device=0))
    monkeypatch.setattr(dispatch, "Choice", lambda p, config, why, device, stored: choice(p, config, why, cpu, stored))
    monkeypatch.setattr(dispatch, "silicon_of", lambda index: SMALL_GPU)
    dispatch.forget()


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, place: Place = CPU) -> Tensor:
    """Normal numbers, the same at every place."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(place.device)


def weight_of(hidden: int, dtype: torch.dtype = torch.float32, place: Place = CPU) -> Tensor:
    """1 + 0.1 x normal numbers."""
    return (1 + 0.1 * draw(hidden, seed=1)).to(dtype).to(place.device)


class Results(NamedTuple):
    y: Tensor
    dx: Tensor
    dw: Tensor | None


def formula(
    x: Tensor, w: Tensor | None, eps: float = 1e-6, offset: float = 0.0, round_to: torch.dtype | None = None
) -> Tensor:
    """RMSNorm as the papers print it, in the dtype at hand; x-hat rounded to `round_to`, its gradient passed on."""
    xhat = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    if round_to is not None:
        xhat = xhat + (xhat.detach().to(round_to).to(x.dtype) - xhat.detach())
    return xhat if w is None else xhat * (w + offset)


def exact(
    x: Tensor, w: Tensor | None, dy: Tensor, eps: float = 1e-6, offset: float = 0.0, casting: str = "fp32"
) -> Results:
    """The right values: float64, gradients by autograd."""
    wide = x.detach().double().requires_grad_()
    weight = None if w is None else w.detach().double().requires_grad_()
    y = formula(wide, weight, eps, offset, x.dtype if casting == "llama" else None)
    y.backward(dy.double())
    return Results(y.detach(), wide.grad, None if weight is None else weight.grad)


def run(
    x: Tensor, w: Tensor | None, dy: Tensor, eps: float = 1e-6, norm: Callable[..., Tensor] = rms_norm, **contract: Any
) -> Results:
    """The results of `norm` for the same; x and w keep their strides and get no gradient themselves."""
    x = x.detach().requires_grad_()
    weight = None if w is None else w.detach().requires_grad_()
    y = norm(x, weight, eps, **contract)
    y.backward(dy)
    return Results(y.detach(), x.grad, None if weight is None else weight.grad)


def error(got: Tensor, right: Tensor) -> float:
    """max of |got - right| / (|right| + mean |right|); NaN if any element is."""
    size = right.abs()
    return float(((got.double() - right).abs() / (size + size.mean())).max())


def assert_right(got: Results, right: Results, x: Tensor, w: Tensor | None, place: Place = CPU) -> None:
    """Shapes, dtypes and errors of all results; x's dtype says how accurate the arithmetic is."""
    for name, value, want, like in zip(Results._fields, got, right, (x, x, w), strict=True):
        if like is None:
            assert value is None, name
            continue
        assert (value.shape, value.dtype, value.device.type) == (like.shape, like.dtype, like.device.type), name
        off, allowed = error(value, want), place.allowed(like.dtype, x.dtype)
        assert off <= allowed, f"{name} is off by {off:.3g}, allowed {allowed:.3g}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every element; NaN differs from all."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
