"""What `host_time.py` times: norms without and with a gradient, the parts of a call, compiled graphs; and the entries
that calls leave behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tunegen import RMSNorm, dispatch, prepared, rms_norm
from tunegen.model import rows_bucket
from tunegen.ops import quick, registered

EPS = 1e-6
NORMS = 20
"""Of a compiled graph."""
MODES = ("default", "reduce-overhead")
"""Of torch.compile."""
WAYS = {"traced": registered.TRACE, "operators": registered.OPERATOR}
"""What our norms become in a graph, and the value of TUNEGEN_COMPILE that asks for it; the first is the default."""

Call = Callable[[], object]


class Tensors(NamedTuple):
    """x (M, N), the weight (N) and dy (M, N); `leaf` and `parameter` are the first two, with a gradient."""

    x: Tensor
    weight: Tensor
    dy: Tensor
    leaf: Tensor
    parameter: Tensor


def tensors(rows: int, hidden: int) -> Tensors:
    """In bf16, on the GPU."""
    x, dy = (torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    return Tensors(x, weight, dy, x.clone().requires_grad_(), weight.clone().requires_grad_())


def functional(x: Tensor, weight: Tensor) -> Tensor:
    """torch's own."""
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def plain(norm: Callable[[Tensor, Tensor], Tensor], given: Tensors) -> Tensor:
    """Without a gradient."""
    return norm(given.x, given.weight)


def both(norm: Callable[[Tensor, Tensor], Tensor], given: Tensors) -> tuple[Tensor, ...]:
    """Forward and backward."""
    return torch.autograd.grad(norm(given.leaf, given.parameter), (given.leaf, given.parameter), given.dy)


def contenders(given: Tensors) -> tuple[dict[str, Call], dict[str, str], dict[str, str]]:
    """Calls by name; whom each is compared with; and who is not measured, with the reason."""
    hidden = given.x.shape[-1]
    modules = {"RMSNorm": RMSNorm(hidden, EPS), "torch.nn.RMSNorm": torch.nn.RMSNorm(hidden, EPS)}
    calls: dict[str, Call] = {}
    for name, norm in {"rms_norm": rms_norm, "F.rms_norm": functional}.items():
        calls[f"{name}, no gradient"] = partial(plain, norm, given)
        calls[f"{name}, forward + backward"] = partial(both, norm, given)
    for name, module in modules.items():
        module.to(given.x)
        frozen = copy.deepcopy(module).requires_grad_(False)
        calls[f"{name}, no gradient"] = partial(frozen, given.x)
        own = given._replace(parameter=next(module.parameters()))
        calls[f"{name}, forward + backward"] = partial(both, lambda x, w, module=module: module(x), own)
    rivals = {
        f"{name}, {what}": f"{rival}, {what}"
        for name, rival in (("rms_norm", "F.rms_norm"), ("RMSNorm", "torch.nn.RMSNorm"))
        for what in ("no gradient", "forward + backward")
    }
    absent = {}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def liger(x: Tensor, weight: Tensor) -> Tensor:
            y: Tensor = LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)
            return y

        calls["Liger, forward + backward"] = partial(both, liger, given)
    except ImportError as error:
        absent["Liger, forward + backward"] = str(error)
    return calls, rivals, absent


class Nothing(torch.autograd.Function):
    """Saves and allocates what the norm does, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: object) -> Tensor:
        """A tensor like x."""
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Tensors like the inputs."""
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None, None


class Launching(torch.autograd.Function):
    """`Nothing` with a launch in each direction, of the kernel of `call`: the least that a norm in Python takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: prepared.Call) -> Tensor:
        """The norm of x."""
        ctx.save_for_backward(x, weight)
        ctx.call, y = call, prepared.empty(call.size, call.strides, call.dtype)
        call.run(x.data_ptr(), weight.data_ptr(), y.data_ptr(), 0, EPS)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Tensors like the inputs."""
        (x, weight), call = ctx.saved_tensors, ctx.call
        dx = prepared.empty(call.size, call.strides, call.dtype)
        dw = prepared.empty(call.width, prepared.ONE, weight.dtype)
        call.run(x.data_ptr(), weight.data_ptr(), dx.data_ptr(), 0, EPS)
        return dx, dw, None


def parts(given: Tensors) -> dict[str, Call]:
    """What a call without a gradient consists of, and what autograd adds; without the launch where another way than the
    short one is taken here."""
    usual = (given.x, given.weight, EPS, 0.0, "fp32", None)
    rms_norm(given.x, given.weight, EPS)
    quick.find(*usual)  # from its kind it makes the call
    _, call = quick.find(*usual)
    found: dict[str, Call] = {
        "checks, key, look-up": lambda: quick.find(*usual),
        "torch.empty_like": lambda: torch.empty_like(given.x),
        "autograd": partial(both, lambda x, w: Nothing.apply(x, w, EPS, None), given),
    }
    if call is not None:
        y = torch.empty_like(given.x)
        values = (given.x.data_ptr(), given.weight.data_ptr(), y.data_ptr(), 0, EPS)
        found["fits alone"] = lambda: call.fits(given.x, given.weight)
        found["allocation"] = lambda: prepared.empty(call.size, call.strides, call.dtype)
        found["launch"] = lambda: (call.run(*values), y)
        found["autograd and launches"] = partial(both, lambda x, w: Launching.apply(x, w, call), given)
    return found


def compiled_kernels() -> int:
    """How many this process keeps."""
    variants = [variant for choice in dispatch._choices.values() for variant in choice._variants.values()]
    return sum(len(variant.compiled) for variant in variants)


def many_rows(call: Callable[[int], object], counts: Sequence[int]) -> dict[str, int]:
    """What is left of a call with each row count, from nothing."""
    dispatch.forget()
    seen: set[int] = set()
    late: set[int] = set()
    for rows in counts:
        before = compiled_kernels()
        call(rows)
        if compiled_kernels() > before and rows_bucket(rows) in seen:
            late.add(rows_bucket(rows))
        seen.add(rows_bucket(rows))
    return {
        "row_counts": len(counts),
        "buckets": len(seen),
        "entries": len(dispatch.quick),
        "compiled_kernels": compiled_kernels(),
        "buckets_compiled_behind_their_first_call": len(late),
    }


def row_counts(hidden: int, most: int) -> dict[str, dict[str, int]]:
    """The same of forward without a gradient, and of forward and backward."""
    x = torch.zeros(most, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    parameter, counts = weight.clone().requires_grad_(), range(1, most + 1)

    def train(rows: int) -> None:
        leaf = x[:rows].requires_grad_()
        torch.autograd.grad(rms_norm(leaf, parameter), (leaf, parameter), x[:rows])

    return {
        "no gradient": many_rows(lambda rows: rms_norm(x[:rows], weight), counts),
        "forward + backward": many_rows(train, counts),
    }


@contextmanager
def compiled_as(mode: str) -> Iterator[None]:
    """What TUNEGEN_COMPILE sets at import. A graph is guarded by it, and is to be called inside too."""
    before, registered.MODE = registered.MODE, mode
    try:
        yield
    finally:
        registered.MODE = before


def graph_of(norm: Callable[[Tensor, Tensor], Tensor], mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A compiled chain of norms."""

    def chain(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(NORMS):
            x = norm(x, weight)
        return x

    options = {} if mode == "default" else {"mode": mode}
    step: Callable[[Tensor, Tensor], Tensor] = torch.compile(chain, fullgraph=True, **options)
    return step


def graph_calls(given: Tensors, mode: str) -> dict[str, Call]:
    """Compiled chains by name, which have run before: compiled, warmed up, recorded. To be called in `compiled_as`."""
    steps = {"rms_norm": graph_of(rms_norm, mode), "F.rms_norm": graph_of(functional, mode)}
    calls: dict[str, Call] = {name: partial(step, given.x, given.weight) for name, step in steps.items()}
    for call in calls.values():
        for _ in range(3):
            call()
    return calls
