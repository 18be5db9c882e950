"""`patch` puts `rms_norm` in the place of a model's own norms; `unpatch` takes it out again.

A name ("qwen3") patches the classes of that architecture in Hugging Face transformers, for models built before or
after. A model is patched norm by norm, whatever wrote them. Only `forward` is replaced: parameters, state dicts, hooks
and the class of each module stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import paths
from ..errors import UnknownNormError
from ..ops.add_rms_norm import add_rms_norm
from ..ops.rms_norm import rms_norm
from .architectures import instance_of, modeling, norm_classes
from .eager_backward import rms_norm_eager_backward
from .forwards import ORIGINAL, OURS, forward_of, own_forward, put_on_class, put_on_module, restore
from .fusion import TAKES_RESIDUAL, fuse, is_layer
from .hub_kernels import register
from .patch_report import Fused, Left, PatchReport, Replaced, nothing_to_patch
from .recognition import Contract, Reader, is_candidate, recognised

Norm = Callable[[Tensor, Tensor | None, Contract], Tensor]
"""Computes a norm under a contract: x (..., N), weight (N) or None."""

AddNorm = Callable[[Tensor, Tensor, Tensor | None, Contract], tuple[Tensor, Tensor]]
"""The same of x + residual; returns that sum too."""

BACKWARDS = ("tuned", "eager")


def patch(target: str | nn.Module, *, backward: str = "tuned", fuse_residual: bool = False) -> PatchReport:
    """Let `rms_norm` compute the norms of a model or of an architecture.

    Args:
        target: a model, each of whose norms that computes an RMSNorm is patched (see `recognition`); or the name of an
            architecture of Hugging Face transformers ("qwen3", "llama", "gemma3", ...), whose classes are patched, for
            models that exist and for those built later.
        backward: "tuned", or "eager" for torch's operators in backward (the forward-only tier).
        fuse_residual: True lets `add_rms_norm` compute each residual add of a model's layers together with the norm
            right behind it (see `fusion`); layers whose forward has none stay as they are.

    Returns:
        What was replaced, under which contract, what was left and why. A norm keeps the dtype of its result: where that
        is not x's (Llama's promotes fp32 weight and bf16 x), the result is rounded to x's dtype and then converted.

    Raises:
        TypeError: target is neither a model nor a name.
        ValueError: an unknown architecture or backward; nothing in the target is a norm that tunegen computes;
            fuse_residual of a name, or with the eager backward.
        ImportError: a name is given and transformers is not installed.
    """
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {', '.join(BACKWARDS)}, got {backward!r}")
    if fuse_residual:
        _check_fusion(target, backward)
    report = replace(target, _tuned if backward == "tuned" else _eager, _tuned_sum if fuse_residual else None)
    if not report.replaced:
        raise ValueError(nothing_to_patch(report, _kinds(target)))
    return report


def _check_fusion(target: str | nn.Module, backward: str) -> None:
    if isinstance(target, str):
        why = f"rewrites the layers of a model, and {target!r} is a name: give the model"
    elif backward != "tuned":
        why = f"has no backward of torch's operators, and backward is {backward!r}: give backward='tuned'"
    else:
        return
    raise ValueError(f"fuse_residual=True {why}, or leave fuse_residual out")


def _kinds(target: str | nn.Module) -> Iterator[str]:
    """The class names of a model's modules, or of an architecture's norms."""
    if isinstance(target, str):
        return (cls.__name__ for _, cls in norm_classes(modeling(target)))
    return (type(module).__name__ for module in target.modules())


def replace(target: str | nn.Module, norm: Norm, add_norm: AddNorm | None = None) -> PatchReport:
    """As `patch`, with any `norm`, and of a model's layers any `add_norm`; raises nothing where there is nothing to
    patch."""
    if isinstance(target, str):
        return _patch_classes(target, norm)
    if not isinstance(target, nn.Module):
        raise TypeError(f"the target must be a model or the name of an architecture, got {type(target).__name__}")
    return _patch_modules(target, norm, add_norm)


def unpatch(target: str | nn.Module) -> int:
    """Undo `patch` for the same model or name; returns how many norms, layers or classes got their forward back.

    One whose forward was replaced once more by others since then is left as they made it.

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


def _tuned_sum(x: Tensor, residual: Tensor, weight: Tensor | None, contract: Contract) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, weight, contract.eps, offset=contract.offset, casting=contract.casting)


def _forward(
    norm: Norm,
    read: Reader,
    original: Callable[..., Any],
    owner: type | None = None,
    add_norm: AddNorm | None = None,
) -> Callable[..., Any]:
    """The `forward` that takes the place of `original`. Where it is that of a class, `owner`, modules of its subclasses
    keep the original: what they inherit may call methods of their own. With `add_norm` it takes a residual too."""

    def forward(self: Any, *args: Tensor, **named: Tensor) -> Any:
        if add_norm is not None and len(args) == 2:
            return with_residual(self, *args)
        given = (*args, *named.values())  # whatever the original calls it
        contract = read(self) if len(given) == 1 and (owner is None or type(self) is owner) else None
        if contract is None:
            return original(self, *args, **named)
        (x,) = given
        weight = getattr(self, "weight", None)
        return _promised(norm(x, weight, contract), weight, contract)

    def with_residual(self: Any, x: Tensor, residual: Tensor) -> tuple[Any, Tensor]:
        contract, alike = read(self), (x.dtype, x.shape, x.device) == (residual.dtype, residual.shape, residual.device)
        if contract is None or not alike:  # under autocast, say, the two differ in dtype
            total = residual + x
            return forward(self, total), total
        assert add_norm is not None
        weight = getattr(self, "weight", None)
        y, total = add_norm(x, residual, weight, contract)
        return _promised(y, weight, contract), total

    OURS[forward] = original
    if add_norm is not None:
        setattr(forward, TAKES_RESIDUAL, True)
    return forward


def _promised(y: Tensor, weight: Tensor | None, contract: Contract) -> Tensor:
    """y, which has x's dtype, in that of the module's result."""
    dtype = contract.dtype(y.dtype, None if weight is None else weight.dtype)
    return y if y.dtype == dtype else y.to(dtype)


def _patch_modules(model: nn.Module, norm: Norm, add_norm: AddNorm | None) -> PatchReport:
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
        put_on_module(module, _forward(norm, read, original, add_norm=add_norm))
        replaced.append(Replaced(name, type(module).__name__, _width(module), contract))
    layers = _fuse_layers(model, {module for _, module, *_ in found}) if add_norm else ((), ())
    return PatchReport(tuple(replaced), tuple(left), tuple(notes), *layers)


def _fuse_layers(model: nn.Module, patched: set[nn.Module]) -> tuple[tuple[Fused, ...], tuple[Left, ...]]:
    """Fuse what the layers of a model add with what they norm next, where that is one of the `patched` norms."""
    done, left = [], []
    for name, layer in model.named_modules():
        norms = frozenset(attribute for attribute, child in layer.named_children() if child in patched)
        if not norms or not is_layer(layer):
            continue
        try:
            forward, attributes = fuse(layer, norms)
        except UnknownNormError as error:
            left.append(Left(name, type(layer).__name__, str(error)))
            continue
        put_on_module(layer, forward)
        done.append(Fused(name, type(layer).__name__, attributes))
    return tuple(done), tuple(left)


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
