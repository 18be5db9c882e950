"""The norm classes of an architecture of Hugging Face transformers, found in its modeling module."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import nn

from ..errors import UnknownNormError, installs
from .recognition import PROBE_HIDDEN, Contract, is_ligers, recognised


def modeling(architecture: str) -> ModuleType:
    """Its modeling module. Raises ValueError for a name that transformers does not have, such as the id of a model on
    the Hub, ImportError without transformers."""
    try:
        models = importlib.import_module("transformers.models")
    except ImportError as error:
        message = f"transformers is not installed: {installs('qwen3')}, or pass a model in place of its name"
        raise ImportError(message) from error
    if any(character in architecture for character in "/\\."):
        raise ValueError(
            f"{architecture!r} is no architecture; of a model on the Hub or on a disk load it, and give the model or "
            "its model.config.model_type, such as 'qwen3'"
        )
    name = architecture.replace("-", "_").lower()
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError as error:
        known = sorted(entry.name for entry in pkgutil.iter_modules(models.__path__) if entry.ispkg)
        near = difflib.get_close_matches(name, known, 5) or ["qwen3", "llama", "gemma3"]
        message = f"transformers has no architecture {architecture!r}, but {len(known)} others such as"
        raise ValueError(f"{message} {', '.join(near)}") from error
    return module


def norm_classes(module: ModuleType) -> Iterator[tuple[str, type[nn.Module]]]:
    """`(name in the module, class)` of everything called a norm there, Liger's classes in place of its own included."""
    for key, value in sorted(vars(module).items()):
        if "norm" in key.lower() and isinstance(value, type) and issubclass(value, nn.Module):
            yield key, value


def instance_of(cls: type[nn.Module]) -> nn.Module:
    """A small module of a norm class, as its constructor makes it by default.

    Raises UnknownNormError where it cannot be made of a hidden size alone, or where a switch of its constructor changes
    what it computes: a class is patched for all its modules at once.
    """
    try:
        found = _make(cls)
    except Exception as error:
        raise UnknownNormError("it cannot be constructed of a hidden size alone") from error
    if is_ligers(found):
        return found  # what it computes stands in its attributes
    contract = _contract(found)
    _, *options = inspect.signature(cls).parameters.values()
    for name, default in ((p.name, p.default) for p in options if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)):
        if isinstance(default, bool):
            changes = _contract(_make(cls, **{name: not default})) not in (contract, None)
        else:
            changes = "eps" not in name and name not in ("dtype", "device")
        if changes:
            raise UnknownNormError(f"its {name} may change what it computes: patch the model in place of the class")
    return found


def _make(cls: type[nn.Module], **switches: bool) -> nn.Module:
    with torch.device("cpu"):
        return cls(PROBE_HIDDEN, **switches)


def _contract(module: nn.Module) -> Contract | None:
    try:
        return recognised(module)[1]
    except UnknownNormError:
        return None
