"""`patch` puts `rms_norm` in the place of a model's own norms; `unpatch` takes it out again.

A name ("qwen3") patches the classes of that architecture in Hugging Face transformers, for models built before or
after. A model is patched norm by norm, whatever wrote them. Only `forward` is replaced: parameters, state dicts, hooks
and classes stay.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .. import paths
from ..errors import UnknownNormError
from ..ops.rms_norm import rms_norm
from .architectures import instance_of, module_name, norm_classes
from .eager_backward import rms_norm_eager_backward
from .hub_kernels import offer, withdraw
from .patch_report import Left, PatchReport, Replaced
from .recognition import Contract, Reader, is_candidate, is_ligers, recognise

Norm = Callable[[Tensor, Tensor | None, Contract], Tensor]
"""Computes a norm under a contract: x (..., N), weight (N) or None."""

BACKWARDS = ("tuned", "eager")
ORIGINAL = "_tunegen_original"
"""The attribute of a patched class or module that keeps what was in the place of ours, None if nothing, in a tuple."""


def patch(target: str | nn.Module, *, backward: str = "tuned") -> PatchReport:
    """Let `rms_norm` compute the norms of a model or of an architecture.

    Args:
        target: a model, each of whose norms that computes an RMSNorm is patched (see `recognition`); or the name of an
            architecture of Hugging Face transformers ("qwen3", "llama", "gemma3", ...), whose classes are patched, for
            models that exist and for those built later.
        backward: "tuned", or "eager" for torch's operators in backward (the forward-only tier).

    Returns:
        What was replaced, under which contract, what was left and why. A norm keeps the dtype of its result: where that
        is not x's (Llama's promotes fp32 weight and bf16 x), the result is rounded to x's dtype and then converted.

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
        return _unpatch_classes(target)
    if not isinstance(target, nn.Module):
        raise TypeError(f"the target must be a model or the name of an architecture, got {type(target).__name__}")
    return sum(_restore(module) for module in target.modules() if ORIGINAL in vars(module))


def _tuned(x: Tensor, weight: Tensor | None, contract: Contract) -> Tensor:
    return rms_norm(x, weight, contract.eps, offset=contract.offset, casting=contract.casting)


def _eager(x: Tensor, weight: Tensor | None, contract: Contract) -> Tensor:
    return rms_norm_eager_backward(x, weight, contract.eps, offset=contract.offset, casting=contract.casting)


def _forward(norm: Norm, read: Reader, original: Callable[..., Any], owner: type | None = None) -> Callable[..., Any]:
    """The `forward` that takes the place of `original`. Where it is that of a class, `owner`, modules of its subclasses
    keep the original: what they inherit may call methods of their own."""

    def forward(self: Any, *args: Tensor, **named: Tensor) -> Any:
        (x,) = (*args, *named.values())  # whatever the original calls it
        contract = read(self) if owner is None or type(self) is owner else None
        if contract is None:
            return original(self, x)
        weight = getattr(self, "weight", None)
        y = norm(x, weight, contract)
        dtype = contract.dtype(x.dtype, None if weight is None else weight.dtype)
        return y if y.dtype == dtype else y.to(dtype)

    _OURS.add(forward)
    return forward


_OURS: WeakSet[Callable[..., Any]] = WeakSet()
"""Every forward made here, so that one of others around it is not taken for it."""


def _patch_modules(model: nn.Module, norm: Norm) -> PatchReport:
    notes = []
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        notes.append(COMPILED)
    if paths.disabled():
        notes.append("TUNEGEN_DISABLE is set: torch computes every call until it is unset")
    found, left = [], []
    for name, module in model.named_modules():
        if ORIGINAL in vars(module):
            _restore(module)
        if not is_candidate(module):
            continue
        try:
            forward = _forward_of(module)
            found.append((name, module, forward, recognise(module, forward)))
        except UnknownNormError as error:
            left.append(Left(name, type(module).__name__, str(error)))
    replaced = []
    for name, module, original, read in found:
        # accelerate's hooks wrap the forward that they found: it is the inner one that is replaced.
        slot = next(slot for slot in SLOTS if slot in vars(module) or slot == "forward")
        setattr(module, ORIGINAL, (vars(module).get(slot),))
        setattr(module, slot, MethodType(_forward(norm, read, original), module))
        contract = read(module)
        assert contract is not None
        replaced.append(Replaced(name, type(module).__name__, _width(module), contract))
    return PatchReport(tuple(replaced), tuple(left), tuple(notes))


SLOTS = ("_old_forward", "forward")
"""Attributes of a module where its forward may lie: accelerate's, and torch's."""

COMPILED = (
    "the model is compiled: torch.compile sees the norms as torch operators and makes its own kernels of them, so that "
    "tunegen changes nothing there"
)


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The function that says what a module computes: its class's, unless others put another on the module.

    Liger and the `kernels` library put kernels there that run on a GPU alone, for what the class computes. Raises
    UnknownNormError for what is no method of the module.
    """
    here = next((vars(module)[slot] for slot in SLOTS if slot in vars(module)), None)
    if here is None or is_ligers(here) or hasattr(type(module), "kernel_layer_name"):
        return own_forward(type(module))
    if getattr(here, "__self__", None) is not module:
        raise UnknownNormError("others replaced its forward by what is no method of it")
    function: Callable[..., Any] = here.__func__
    return own_forward(type(module)) if function in _OURS else function


_claims: dict[type[nn.Module], set[str]] = {}
"""Patched classes, and the architectures that they were patched for: some share a class."""


def _patch_classes(architecture: str, norm: Norm) -> PatchReport:
    replaced, left, notes = [], [], []
    home = module_name(architecture)
    for name, cls in norm_classes(architecture):
        if ORIGINAL in vars(cls):
            _restore(cls)
        try:
            module = instance_of(cls)
            read = recognise(module)
        except UnknownNormError as error:
            left.append(Left(name, cls.__name__, str(error)))
            continue
        setattr(cls, ORIGINAL, (vars(cls).get("forward"),))
        cls.forward = _forward(norm, read, cls.forward, cls)
        offer(cls)
        _claims.setdefault(cls, set()).add(home)
        contract = read(module)
        assert contract is not None
        replaced.append(Replaced(name, cls.__name__, None, contract))
        if cls.__module__ != home:
            notes.append(f"{cls.__name__} belongs to {cls.__module__}: other models that use it change too")
    return PatchReport(tuple(replaced), tuple(left), tuple(notes))


def _unpatch_classes(architecture: str) -> int:
    """Restore the classes that were patched for this architecture, and for no other that is still patched."""
    home, restored = module_name(architecture), 0
    for cls in [cls for cls, homes in _claims.items() if home in homes]:
        _claims[cls].discard(home)
        if not _claims[cls]:
            del _claims[cls]
            restored += ORIGINAL in vars(cls) and _restore(cls)
    return restored


def own_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """What a class computes, patched or not."""
    for base in cls.__mro__:
        if ORIGINAL in vars(base) and vars(base)[ORIGINAL][0] is not None:
            found: Callable[..., Any] = vars(base)[ORIGINAL][0]
            return found
        if "forward" in vars(base):
            break
    return cls.forward


def _width(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return None if weight is None else weight.shape[0]


def _restore(owner: Any) -> bool:
    """Give a module or class its own forward back, wherever ours is by now; whether it still was anywhere."""
    (original,) = vars(owner)[ORIGINAL]
    delattr(owner, ORIGINAL)
    if isinstance(owner, type):
        withdraw(owner)
    places = [slot for slot in SLOTS if getattr(vars(owner).get(slot), "__func__", vars(owner).get(slot)) in _OURS]
    for slot in places:
        if original is None and slot == "forward":
            delattr(owner, slot)
        else:
            setattr(owner, slot, original or MethodType(type(owner).forward, owner))
    return bool(places)
