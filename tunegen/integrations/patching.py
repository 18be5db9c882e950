"""`patch` puts `rms_norm` in the place of a model's own norms; `unpatch` takes it out again.

A name ("qwen3") patches the classes of that architecture in Hugging Face transformers, for models built before or
after. A model is patched norm by norm, whatever wrote them. Only `forward` is replaced: parameters, state dicts, hooks
and the class of each module stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import paths
from ..errors import UnknownNormError
from ..ops.rms_norm import rms_norm
from .architectures import instance_of, modeling, norm_classes
from .eager_backward import rms_norm_eager_backward
from .forwards import ORIGINAL, OURS, forward_of, own_forward, put_on_class, put_on_module, restore
from .hub_kernels import register
from .patch_report import Left, PatchReport, Replaced
from .recognition import Contract, Reader, is_candidate, recognised

Norm = Callable[[Tensor, Tensor | None, Contract], Tensor]
"""Computes a norm under a contract: x (..., N), weight (N) or None."""

BACKWARDS = ("tuned", "eager")


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

    Raises:
        TypeError: target is neither a model nor a name.
        ValueError: an architecture that transformers does not have.
        ImportError: a name is given and transformers is not installed.
    """
    if isinstance(target, str):
        return _unpatch_classes(target)
    if not isinstance(target, nn.Module):
        raise TypeError(f"the target must be a model or the name of an architecture, got {type(target).__name__}")
    return sum(restore(module) for module in target.modules() if ORIGINAL in vars(module))


def _tuned(x: Tensor, weight: Tensor | None, contract: Contract) -> Tensor:
    return rms_norm(x, weight, contract.eps, offset=contract.offset, casting=contract.casting)


def _eager(x: Tensor, weight: Tensor | None, contract: Contract) -> Tensor:
    return rms_norm_eager_backward(x, weight, contract.eps, offset=contract.offset, casting=contract.casting)


def _forward(norm: Norm, read: Reader, original: Callable[..., Any], owner: type | None = None) -> Callable[..., Any]:
    """The `forward` that takes the place of `original`. Where it is that of a class, `owner`, modules of its subclasses
    keep the original: what they inherit may call methods of their own."""

    def forward(self: Any, *args: Tensor, **named: Tensor) -> Any:
        given = (*args, *named.values())  # whatever the original calls it
        contract = read(self) if len(given) == 1 and (owner is None or type(self) is owner) else None
        if contract is None:
            return original(self, *args, **named)
        (x,) = given
        weight = getattr(self, "weight", None)
        y = norm(x, weight, contract)
        dtype = contract.dtype(x.dtype, None if weight is None else weight.dtype)
        return y if y.dtype == dtype else y.to(dtype)

    OURS[forward] = original
    return forward


def _patch_modules(model: nn.Module, norm: Norm) -> PatchReport:
    notes = []
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        notes.append(COMPILED)
    if paths.disabled():
        notes.append("TUNEGEN_DISABLE is set: torch computes every call until it is unset")
    found, left = [], []
    for name, module in model.named_modules():
        if ORIGINAL in vars(module):
            restore(module)
        if not is_candidate(module):
            continue
        try:
            forward = forward_of(module)
            found.append((name, module, forward, *recognised(module, forward)))
        except UnknownNormError as error:
            left.append(Left(name, type(module).__name__, str(error)))
    replaced = []
    for name, module, original, read, contract in found:
        put_on_module(module, _forward(norm, read, original))
        replaced.append(Replaced(name, type(module).__name__, _width(module), contract))
    return PatchReport(tuple(replaced), tuple(left), tuple(notes))


COMPILED = (
    "the model is compiled: torch.compile sees the norms as torch operators and makes its own kernels of them, so that "
    "tunegen changes nothing there"
)


_claims: dict[type[nn.Module], set[str]] = {}
"""Patched classes, and the architectures that they were patched for: some share a class."""


def _patch_classes(architecture: str, norm: Norm) -> PatchReport:
    replaced, left, notes = [], [], []
    home = modeling(architecture)
    for name, cls in norm_classes(home):
        if ORIGINAL in vars(cls):
            restore(cls)
        try:
            module = instance_of(cls)
            original = own_forward(cls)
            read, contract = recognised(module, original)
        except UnknownNormError as error:
            left.append(Left(name, cls.__name__, str(error)))
            continue
        put_on_class(cls, _forward(norm, read, original, cls))
        register(cls)
        _claims.setdefault(cls, set()).add(home.__name__)
        replaced.append(Replaced(name, cls.__name__, None, contract))
        if cls.__module__ != home.__name__:
            notes.append(f"{cls.__name__} belongs to {cls.__module__}: other models that use it change too")
    return PatchReport(tuple(replaced), tuple(left), tuple(notes))


def _unpatch_classes(architecture: str) -> int:
    """Restore the classes that were patched for this architecture, and for no other that is still patched."""
    home, restored = modeling(architecture).__name__, 0
    for cls in [cls for cls, homes in _claims.items() if home in homes]:
        _claims[cls].discard(home)
        if not _claims[cls]:
            del _claims[cls]
            restored += ORIGINAL in vars(cls) and restore(cls)
    return restored


def _width(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return None if weight is None else weight.shape[0]
