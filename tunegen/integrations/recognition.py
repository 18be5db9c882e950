"""Which modules are an RMSNorm that `rms_norm` may stand in for, by what they compute rather than by their names.

A stand-in of the module with random weights runs on the CPU beside the formula: in fp32, where eps and offset show, and
in bf16, where the casting shows. Nothing of the module itself is run or changed, so weights may be on `meta`, sharded
or quantised by others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compile import first_line
from ..errors import UnknownNormError
from ..model import CASTINGS
from ..reference import rms_norm

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layernorm_epsilon")
OFFSETS = (0.0, 1.0)
LIGER_CASTINGS = {"llama": "llama", "gemma": "fp32"}
PROBE_HIDDEN = 64
"""N of a stand-in without a weight, whose size cannot be read."""
PROBE_ELEMENTS = 1 << 14
FP32_TOLERANCE = 2e-5
"""Of the largest element of a row: other orders of a sum are off by 1e-6 at most, a wrong eps by 3e-2 (rows of its own
size are probed), a wrong offset by 1."""
BF16_DIFFERENT = 0.01
"""Share of elements that may differ in bf16. Measured: 0 for each of the 198 norms of transformers 5.24 that pass, .26
under the other casting, .18 and more for the four that round otherwise."""


class Contract(NamedTuple):
    """What a norm computes: `rms_norm(x, weight, eps, offset=offset, casting=casting)`."""

    eps: float
    offset: float
    casting: str


Reader = Callable[[Any], Contract]
"""The contract of a module, read from its attributes at each call: eps may be changed after construction."""


def is_candidate(module: nn.Module) -> bool:
    """Whether it is worth a look: something called an RMSNorm, or a leaf with one vector of weights and an eps."""
    return "rms" in type(module).__name__.lower() or not _objection(module)


def recognise(module: nn.Module, forward: Callable[..., Any] | None = None) -> Reader:
    """The reader of a module's contract.

    Args:
        module: left as it is.
        forward: the function that defines what is computed, by default that of its class.

    Raises:
        UnknownNormError: it is no RMSNorm over the last axis that `rms_norm` computes; the message says why.
    """
    if type(module).__module__.startswith("liger_kernel."):
        return _liger_reader(module)
    if objection := _objection(module):
        raise UnknownNormError(objection)
    forward = forward or type(module).forward
    if len(list(_required(forward))) != 2:
        raise UnknownNormError("its forward takes other arguments than one tensor")
    name = _eps_name(module)
    assert name is not None
    probe = _stand_in(module)
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            offset, casting = _formula(lambda x: forward(probe, x), probe, float(getattr(module, name)))
    except UnknownNormError:
        raise
    except Exception as error:  # it is other people's code, with whatever it needs
        raise UnknownNormError(f"its forward could not be tried: {first_line(error)}") from error
    return lambda self: Contract(float(getattr(self, name)), offset, casting)


def _objection(module: nn.Module) -> str:
    """Why it cannot be one, by its attributes; empty if it can."""
    parameters = dict(module.named_parameters(recurse=False))
    if parameters.keys() - {"weight"}:
        return f"it has other parameters than a weight: {', '.join(sorted(parameters.keys() - {'weight'}))}"
    if any(True for _ in module.children()) or any(True for _ in module.buffers(recurse=False)):
        return "it has submodules or buffers"
    weight = getattr(module, "weight", None)
    if weight is not None and (not isinstance(weight, Tensor) or weight.dim() != 1):
        return "its weight is no vector"
    name = _eps_name(module)
    if name is None:
        return f"it has no attribute {', '.join(EPS_NAMES)}"
    eps = getattr(module, name)
    if eps is None:
        return "its eps is None, which torch takes for that of the dtype"
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        return f"its eps is a {type(eps).__name__} and no number"
    return ""


def _eps_name(module: nn.Module) -> str | None:
    return next((name for name in EPS_NAMES if hasattr(module, name)), None)


def _required(function: Callable[..., Any]) -> Iterable[str]:
    """Names of the arguments that a caller has to give, self among them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is inspect.Parameter.empty and parameter.kind in positional:
            yield name


def _liger_reader(module: nn.Module) -> Reader:
    """Liger's modules run on a GPU alone, and carry their contract as attributes."""
    casting = getattr(module, "casting_mode", None)
    if casting not in LIGER_CASTINGS:
        raise UnknownNormError(f"Liger's casting {casting!r} is none of {', '.join(LIGER_CASTINGS)}")
    return lambda self: Contract(float(self.variance_epsilon), float(self.offset), LIGER_CASTINGS[self.casting_mode])


def _stand_in(module: nn.Module) -> nn.Module:
    """A module of the same class and plain attributes, without hooks, with a random fp32 weight on the CPU."""
    probe: nn.Module = object.__new__(type(module))
    nn.Module.__init__(probe)
    internal = probe.__dict__.keys()
    probe.__dict__.update({k: v for k, v in vars(module).items() if k not in internal and k != "forward"})
    probe.training = module.training
    for name in module._parameters:
        probe.register_parameter(name, None)
    weight = getattr(module, "weight", None)
    random = None if weight is None else _random(weight.shape)
    probe.register_parameter("weight", None if random is None else nn.Parameter(0.5 * random, requires_grad=False))
    return probe


def _random(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _formula(run: Callable[[Tensor], Any], probe: nn.Module, eps: float) -> tuple[float, str]:
    """Offset and casting of what `run` computes with the probe's weight."""
    weight = probe.weight if isinstance(probe.weight, Tensor) else None
    hidden = PROBE_HIDDEN if weight is None else weight.shape[0]
    rows = max(8, PROBE_ELEMENTS // hidden) & ~1
    scales = torch.tensor([1.0, max(eps, 1e-12) ** 0.5, 30.0, 0.02], dtype=torch.float32).repeat(-(-rows // 4))
    x = scales[:rows, None] * _random((rows, hidden))
    # Four axes, so that one that norms over another axis than the last shows, or takes apart three.
    got = run(x.view(2, rows // 2, 1, hidden))
    if not isinstance(got, Tensor) or got.shape != (2, rows // 2, 1, hidden):
        raise UnknownNormError("its result has another shape than its input")
    offset = _offset(got.view(rows, hidden), x, weight, eps)
    if weight is not None:
        probe.weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
    return offset, _casting(run(x.bfloat16()), x.bfloat16(), weight, eps, offset)


def _offset(got: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> float:
    for offset in OFFSETS if weight is not None else OFFSETS[:1]:
        want = rms_norm(x, weight, eps, offset=offset)
        if bool(((got - want).abs() <= FP32_TOLERANCE * want.abs().amax(-1, keepdim=True)).all()):
            return offset
    raise UnknownNormError("it computes something else than an RMSNorm with weight or 1 + weight")


def _casting(got: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> str:
    if got.dtype != x.dtype:
        raise UnknownNormError(f"it makes {got.dtype} of {x.dtype}")
    weight = None if weight is None else weight.to(x.dtype)
    wants = {casting: rms_norm(x, weight, eps, offset=offset, casting=casting) for casting in CASTINGS}
    different = {casting: float((got != want).float().mean()) for casting, want in wants.items()}
    best = min(CASTINGS, key=lambda casting: different[casting])
    if not different[best] <= BF16_DIFFERENT:
        raise UnknownNormError(
            f"it rounds otherwise: {different[best]:.0%} of its bf16 elements differ, it may sum in bf16"
        )
    return best
