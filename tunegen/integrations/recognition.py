"""Which modules are an RMSNorm that `rms_norm` may stand in for, by what they compute rather than by their names.

A stand-in of the module with random weights runs on the CPU beside the formula: in fp32, where eps and offset show, and
in bf16, where the casting shows. Nothing of the module itself is run or changed, so weights may be on `meta`, sharded
or quantised by others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnknownNormError, first_line
from ..model import CASTINGS
from ..reference import rms_norm

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layernorm_epsilon")
OFFSETS = (0.0, 1.0)
LIGER_CASTINGS = {"llama": "llama", "gemma": "fp32"}
PROBE_HIDDEN = 64
"""N of a stand-in without a weight, whose size cannot be read, and of one that is made from a class."""
PROBE_ELEMENTS = 1 << 14
FP32_TOLERANCE = 2e-5
"""Of the largest element of a row: other orders of a sum are off by 1e-6 at most, a wrong eps by 3e-2 (rows of its own
size are probed), a wrong offset by 1."""
BF16_DIFFERENT = 0.01
"""Share of elements that may differ in bf16. Measured: 0 for each of the 200 norms of transformers 5.24 that pass (see
benchmarks/count_norms.py), .26 and more under the other casting, .18 and more for the five that round otherwise."""


class Contract(NamedTuple):
    """What a norm computes: `rms_norm(x, weight, eps, offset=offset, casting=casting)`. `result` says whose dtype the
    result has: "x", "weight", or "promoted" from both."""

    eps: float
    offset: float
    casting: str
    result: str = "x"

    def dtype(self, x: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
        """Of the result."""
        if weight is None or self.result == "x":
            return x
        return weight if self.result == "weight" else torch.promote_types(x, weight)


Reader = Callable[[Any], "Contract | None"]
"""The contract of a module, read from its attributes at each call: eps may be changed after construction. None where
they no longer say one that `rms_norm` has."""


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
    forward = forward or type(module).forward
    if not _takes_one(forward):
        raise UnknownNormError("its forward takes other arguments than one tensor")
    if is_ligers(module):
        return _liger_reader(module)
    if objection := _objection(module):
        raise UnknownNormError(objection)
    name = _eps_name(module)
    assert name is not None
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            probe = _stand_in(module)
            offset, casting, result = _formula(partial(forward, probe), probe, float(getattr(module, name)))
    except UnknownNormError:
        raise
    except Exception as error:  # it is other people's code, with whatever it needs
        raise UnknownNormError(f"its forward could not be tried: {first_line(error)}") from error
    return lambda self: Contract(float(getattr(self, name)), offset, casting, result)


def recognised(module: nn.Module, forward: Callable[..., Any] | None = None) -> tuple[Reader, Contract]:
    """`recognise`, and the contract as it is now; for attributes that say none UnknownNormError too."""
    read = recognise(module, forward)
    try:
        contract = read(module)
    except Exception as error:  # attributes of others may be anything, and properties run their code
        raise UnknownNormError(f"its contract cannot be read: {first_line(error)}") from error
    if contract is None:
        raise UnknownNormError("its attributes say no contract that rms_norm has")
    return read, contract


def is_ligers(module: object) -> bool:
    """Whether a module, or a function, is of Liger: its norms run on a GPU alone."""
    home = type(module).__module__ if isinstance(module, nn.Module) else getattr(module, "__module__", None)
    return str(home).startswith("liger_kernel.")


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
    if weight is not None and weight.shape[0] < 2:
        return f"its weight has {weight.shape[0]} elements, which says nothing of the width (is it sharded?)"
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


def _takes_one(forward: Callable[..., Any]) -> bool:
    """Whether it has one argument beside self, and no optional ones: a gate or a residual would be lost."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(forward).parameters.values())
    return len(parameters) == 2 and all(p.kind in positional and p.default is p.empty for p in parameters)


def _liger_reader(module: nn.Module) -> Reader:
    """Liger's modules carry their contract as attributes; their result has x's dtype."""

    def read(self: Any) -> Contract | None:
        casting = LIGER_CASTINGS.get(self.casting_mode)
        return None if casting is None else Contract(float(self.variance_epsilon), float(self.offset), casting)

    casting = getattr(module, "casting_mode", None)
    if casting not in LIGER_CASTINGS:
        raise UnknownNormError(f"Liger's casting {casting!r} is none of {', '.join(LIGER_CASTINGS)}")
    return read


def _stand_in(module: nn.Module) -> nn.Module:
    """A module of the same class and plain attributes, without hooks, with a random fp32 weight on the CPU."""
    probe: nn.Module = object.__new__(type(module))
    nn.Module.__init__(probe)
    internal = {*vars(probe), "forward", "weight"}
    vars(probe).update({k: v for k, v in vars(module).items() if k not in internal})
    probe.training = True  # where a dropout would show
    probe._parameters.update(dict.fromkeys(module._parameters))
    weight = getattr(module, "weight", None)
    # Not by `register_parameter`, which others replace while they make models without memory.
    probe._parameters["weight"] = None if weight is None else _parameter(0.5 * _random(weight.shape))
    return probe


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _random(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _formula(run: Callable[[Tensor], Any], probe: nn.Module, eps: float) -> tuple[float, str, str]:
    """Offset, casting and whose dtype the result has, of what `run` computes with the probe's weight."""
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
    result = "x" if weight is None else _result(run, probe, weight, x[:2])
    if weight is not None:
        probe._parameters["weight"] = _parameter(weight.bfloat16())
    return offset, _casting(run(x.bfloat16()), x.bfloat16(), weight, eps, offset), result


def _result(run: Callable[[Tensor], Any], probe: nn.Module, weight: Tensor, x: Tensor) -> str:
    """Whose dtype the result has where x and the weight differ; "x" where that cannot be run."""
    found = []
    for w_dtype, x_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        probe._parameters["weight"] = _parameter(weight.to(w_dtype))
        try:
            found.append(run(x.to(x_dtype)).dtype)
        except Exception:  # torch's own op, say, refuses some pairs
            return "x"
    rules = {(torch.float32, torch.bfloat16): "x", (torch.float32,) * 2: "promoted"}
    if tuple(found) == (torch.bfloat16, torch.float32):
        return "weight"
    if tuple(found) not in rules:
        raise UnknownNormError(f"it makes {found[0]} of fp32 x and bf16 weight, {found[1]} of the reverse")
    return rules[tuple(found)]


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
