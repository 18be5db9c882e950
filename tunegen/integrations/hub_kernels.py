"""transformers' own kernel hook: `use_kernels=True` of a patched architecture takes tunegen's norm.

The `kernels` library gives a layer the forward of a repository that is registered for the layer's name, and would so
undo a patched class. A patched class therefore gets a layer name of its own, registered with a repository that is
nothing but this module; nothing is downloaded.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from torch import nn

NAME, OWN_NAME = "kernel_layer_name", "_tunegen_kernel_layer_name"
ABILITIES = {"has_backward": True, "can_torch_compile": True}


def register(cls: type[nn.Module]) -> None:
    """Register a patched class, if the `kernels` library decorated it."""
    name = vars(cls).get(NAME)
    library: Any = sys.modules.get("kernels")
    if name is None or library is None:
        return
    layer = type(f"Tunegen{cls.__name__}", (nn.Module,), {"forward": cls.forward, **ABILITIES})
    repository = _Repository(layer, whole=not hasattr(library, "FuncRepository"))
    setattr(cls, OWN_NAME, name)
    setattr(cls, NAME, f"tunegen.{cls.__module__}.{cls.__qualname__}")
    mode = library.Mode
    modes = [kind | more for kind in (mode.TRAINING, mode.INFERENCE) for more in (kind, mode.TORCH_COMPILE)]
    library.register_kernel_mapping({getattr(cls, NAME): {"cuda": dict.fromkeys(modes, repository)}})


def unregister(cls: type[nn.Module]) -> None:
    """Give a class the layer name back that it had."""
    if OWN_NAME in vars(cls):
        setattr(cls, NAME, vars(cls)[OWN_NAME])
        delattr(cls, OWN_NAME)


class _Repository:
    """What `kernels` takes for a place to load a layer from. Before its release 0.11 that is a module with `layers`
    (`whole`), since then the layer itself."""

    def __init__(self, layer: type[nn.Module], *, whole: bool) -> None:
        self.layer_name, self._layer, self._whole = layer.__name__, layer, whole

    def load(self) -> Any:
        """The layer, whose forward a module is given."""
        return SimpleNamespace(layers=SimpleNamespace(**{self.layer_name: self._layer})) if self._whole else self._layer

    def __str__(self) -> str:
        return "tunegen"
