"""transformers' own kernel hook: `use_kernels=True` of a patched architecture takes tunegen's norm.

The `kernels` library gives a layer the forward of a repository that is registered for the layer's name, and would so
undo a patched class. A patched class therefore gets a layer name of its own, registered with a repository that is
nothing but this module; nothing is downloaded.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

NAME, OWN_NAME = "kernel_layer_name", "_tunegen_kernel_layer_name"


def offer(cls: type[nn.Module]) -> None:
    """Register a patched class, if the `kernels` library decorated it."""
    name = vars(cls).get(NAME)
    library: Any = sys.modules.get("kernels")
    if name is None or library is None:
        return
    layer = type(f"Tunegen{cls.__name__}", (nn.Module,), {"forward": cls.forward, **ABILITIES})
    setattr(cls, OWN_NAME, name)
    setattr(cls, NAME, f"tunegen.{cls.__module__}.{cls.__qualname__}")
    library.register_kernel_mapping({getattr(cls, NAME): {"cuda": {mode: _Repository(layer) for mode in _modes(library)}}})


ABILITIES = {"has_backward": True, "can_torch_compile": True}


def withdraw(cls: type[nn.Module]) -> None:
    """Give a class the layer name back that it had."""
    if OWN_NAME in vars(cls):
        setattr(cls, NAME, vars(cls)[OWN_NAME])
        delattr(cls, OWN_NAME)


def _modes(library: Any) -> list[Any]:
    mode = library.Mode
    return [both | more for both in (mode.TRAINING, mode.INFERENCE) for more in (mode.TORCH_COMPILE, both)]


class _Repository:
    """What `kernels` takes for a place to load a layer from."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer_name, self._layer = layer.__name__, layer

    def load(self) -> type[nn.Module]:
        """The layer, whose forward a module is given."""
        return self._layer

    def __str__(self) -> str:
        return "tunegen"
