"""`patch` puts `rms_norm` in the place of a model's own norms; `unpatch` takes it out again.

A name ("qwen3") patches the classes of that architecture in Hugging Face transformers, for models built before or
after. A model is patched norm by norm, whatever wrote them. Only `forward` is replaced: parameters, state dicts, hooks
and classes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .. import paths
from ..errors import UnknownNormError
from ..ops.rms_norm import rms_norm
from .architectures import instance_of, norm_classes
from .eager_backward import rms_norm_eager_backward
from .hub_kernels import offer, withdraw
from .patch_report import Left, PatchReport, Replaced
from .recognition import Contract, Reader, is_candidate, recognise

Norm = Callable[[Tensor, Tensor | None, Contract], Tensor]
"""Computes a norm under a contract: x (..., N), weight (N) or None."""

BACKWARDS = ("tuned", "eager")
ORIGINAL = "_tunegen_original"
"""The attribute of a patched class or module that keeps what was there: (name of the attribute, its value or None)."""


def patch(target: str | nn.Module, *, backward: str = "tuned") -> PatchReport:
    """Let `rms_norm` compute the norms of a model or of an architecture.

    Args:
        target: a model, each of whose norms that computes an RMSNorm is patched (see `recognition`); or the name of an
            architecture of Hugging Face transformers ("qwen3", "llama", "gemma3", ...), whose classes are patched, for
            models that exist and for those built later.
        backward: "tuned", or "eager" for torch's operators in backward (the forward-only tier).

    Returns:
        What was replaced, under which contract, what was left and why. A norm keeps the dtype of its result: where one
        of the Llama kind promotes (fp32 weight, bf16 x), the result is rounded to x's dtype and then promoted.

    Raises:
        TypeError: target is neither a model nor a name.
        ValueError: an unknown architecture or backward; nothing in the target is a norm that tunegen computes.
        ImportError: a name is given and transformers is not installed.
    """
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {', '.join(BACKWARDS)}, got {backward!r}")
    report = replace(target, _tuned if backward == "tuned" else _eager)
    if not report.replaced:
        raise ValueError(f"nothing to patch: {report}")
    return report


def replace(target: str | nn.Module, norm: Norm) -> PatchReport:
    """As `patch`, with any `norm`; raises nothing where there is nothing to patch."""
    if isinstance(target, str):
        return _patch_classes(target, norm)
    if not isinstance(target, nn.Module):
        raise TypeError(f"the target must be a model or the name of an architecture, got {type(target).__name__}")
    return _patch_modules(target, norm)


def unpatch(target: str | nn.Module) -> int:
    """Undo `patch` for the same model or name; returns how many norms or classes got their forward back.

    A norm whose forward was replaced once more by others since then is left as they made it.
    """
    if isinstance(target, str):
        owners: Iterator[Any] = (cls for _, cls in norm_classes(target))
    elif isinstance(target, nn.Module):
        owners = target.modules()
    else:
        raise TypeError(f"the target must be a model or the name of an architecture, got {type(target).__name__}")
    return sum(_restore(owner) for owner in owners if ORIGINAL in vars(owner))


def _tuned(x: Tensor, weight: Tensor | None, contract: Contract) -> Tensor:
    return rms_norm(x, weight, contract.eps, offset=contract.offset, casting=contract.casting)


def _eager(x: Tensor, weight: Tensor | None, contract: Contract) -> Tensor:
    return rms_norm_eager_backward(x, weight, contract.eps, offset=contract.offset, casting=contract.casting)


def _forward(norm: Norm, read: Reader) -> Callable[..., Tensor]:
    """The `forward` that takes the place of a module's own."""

    def forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*args, *named.values())  # whatever the original calls it
        contract, weight = read(self), getattr(self, "weight", None)
        y = norm(x, weight, contract)
        if weight is not None and contract.casting == "llama" and weight.dtype != y.dtype:
            return y.to(torch.promote_types(weight.dtype, y.dtype))  # as weight * x-hat of the original does
        return y

    return forward


def _patch_modules(model: nn.Module, norm: Norm) -> PatchReport:
    replaced, left, notes = [], [], []
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        notes.append(COMPILED)
    if paths.disabled():
        notes.append("TUNEGEN_DISABLE is set: torch computes every call until it is unset")
    for name, module in model.named_modules():
        if ORIGINAL in vars(module):
            _restore(module)
        if not is_candidate(module):
            continue
        try:
            read = recognise(module, own_forward(type(module)))
        except UnknownNormError as error:
            left.append(Left(name, type(module).__name__, str(error)))
            continue
        # accelerate's hooks wrap the forward that they found: it is the inner one that is replaced.
        slot = "_old_forward" if "_old_forward" in vars(module) else "forward"
        setattr(module, ORIGINAL, (slot, vars(module).get(slot)))
        setattr(module, slot, MethodType(_forward(norm, read), module))
        replaced.append(Replaced(name, type(module).__name__, _width(module), read(module)))
    return PatchReport(tuple(replaced), tuple(left), tuple(notes))


COMPILED = (
    "the model is compiled: torch.compile sees the norms as torch operators and makes its own kernels of them, so that "
    "tunegen changes nothing there"
)


def _patch_classes(architecture: str, norm: Norm) -> PatchReport:
    replaced, left = [], []
    for name, cls in norm_classes(architecture):
        if ORIGINAL in vars(cls):
            _restore(cls)
        try:
            module = instance_of(cls)
            read = recognise(module)
        except UnknownNormError as error:
            left.append(Left(name, cls.__name__, str(error)))
            continue
        setattr(cls, ORIGINAL, ("forward", vars(cls).get("forward")))
        cls.forward = _forward(norm, read)
        offer(cls)
        replaced.append(Replaced(name, cls.__name__, None, read(module)))
    return PatchReport(tuple(replaced), tuple(left), ())


def own_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """What a class computes, patched or not."""
    for base in cls.__mro__:
        if ORIGINAL in vars(base) and vars(base)[ORIGINAL][1] is not None:
            found: Callable[..., Any] = vars(base)[ORIGINAL][1]
            return found
        if "forward" in vars(base):
            break
    return cls.forward


def _width(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return None if weight is None else weight.shape[0]


def _restore(owner: Any) -> bool:
    """Give a module or class its own forward back, if ours is still there."""
    slot, original = vars(owner)[ORIGINAL]
    delattr(owner, ORIGINAL)
    if isinstance(owner, type):
        withdraw(owner)
    if getattr(vars(owner).get(slot), "__module__", None) != __name__:
        return False
    if original is None:
        delattr(owner, slot)
    else:
        setattr(owner, slot, original)
    return True
