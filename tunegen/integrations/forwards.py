"""The `forward` of a module or class of others: what it is without us, and putting ours in its place and out again."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import UnknownNormError
from .hub_kernels import unregister
from .recognition import is_ligers

ORIGINAL = "_tunegen_original"
"""The attribute of a patched class or module that keeps what was in the place of ours, None if nothing, in a tuple."""

SLOTS = ("_old_forward", "forward")
"""Attributes of a module where its forward may lie: accelerate's hooks move it to the first, and it is the inner one
that is replaced."""

REPLICATE = "_replicate_for_data_parallel"

OURS: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()
"""Every forward of ours, so that one of others around it is not taken for it, and the function in whose place it is."""


def own_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """What a class computes, patched or not."""
    found: Callable[..., Any] = cls.forward
    while found in OURS:
        found = OURS[found]
    return found


def forward_of(module: nn.Module) -> Callable[..., Any]:
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
    return own_forward(type(module)) if function in OURS else function


def put_on_class(cls: type[nn.Module], forward: Callable[..., Any]) -> None:
    """Replace the forward of a class, by one that stands in `OURS`."""
    setattr(cls, ORIGINAL, (vars(cls).get("forward"),))
    cls.forward = forward


def put_on_module(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of one module, by one that stands in `OURS`."""
    slot = next(slot for slot in SLOTS if slot in vars(module) or slot == "forward")
    setattr(module, ORIGINAL, (vars(module).get(slot),))
    setattr(module, slot, MethodType(forward, module))
    setattr(module, REPLICATE, MethodType(_replicate_for_data_parallel, module))


def restore(owner: Any) -> bool:
    """Give a module or class its own forward back, wherever ours is by now; whether it still was anywhere."""
    (original,) = vars(owner)[ORIGINAL]
    delattr(owner, ORIGINAL)
    if isinstance(owner, type):
        unregister(owner)
    else:
        vars(owner).pop(REPLICATE, None)
        if original is None and vars(owner).get("forward") == MethodType(type(owner).forward, owner):
            delattr(owner, "forward")  # loaded by pickle, which asks the module for methods of these names
    places = [slot for slot in SLOTS if _is_ours(vars(owner).get(slot))]
    for slot in places:
        if original is None and slot == "forward":
            delattr(owner, slot)
        else:
            setattr(owner, slot, original or MethodType(type(owner).forward, owner))
    return bool(places)


def _is_ours(found: Any) -> bool:
    return getattr(found, "__func__", found) in OURS


def _replicate_for_data_parallel(self: Any) -> Any:
    """The replica that nn.DataParallel runs, a copy of the module's attributes, with ours bound to it: bound to the
    original, it would take that one's weights. It has the name that pickle asks the loaded module for."""
    replica = getattr(type(self), REPLICATE)(self)
    for slot in SLOTS:
        if _is_ours(vars(replica).get(slot)):
            setattr(replica, slot, MethodType(vars(replica)[slot].__func__, replica))
    return replica
