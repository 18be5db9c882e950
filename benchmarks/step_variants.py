"""The ways to compute a model's norms that are compared; one model changes among them.

What each leaves on the modules and in the modeling module of transformers is kept, and put back when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

import tunegen

State = tuple[list[tuple[nn.Module, dict[str, Any]]], dict[str, Any]]


def look(model: nn.Module) -> State:
    """The attributes of every module, and the names of the modeling module."""
    from transformers.models.qwen3 import modeling_qwen3

    return [(module, dict(vars(module))) for module in model.modules()], dict(vars(modeling_qwen3))


def wear(state: State) -> None:
    """Make the model what it was when `look` looked."""
    from transformers.models.qwen3 import modeling_qwen3

    for module, attributes in state[0]:
        vars(module).clear()
        vars(module).update(attributes)
    for name, value in state[1].items():
        setattr(modeling_qwen3, name, value)


def liger(model: nn.Module, **parts: bool) -> None:
    """Liger's patch on this model, norms included unless `rms_norm` is False."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    apply_liger_kernel_to_qwen3(model=model, **parts)


def liger_norm(model: nn.Module) -> None:
    """Nothing of Liger but its norm."""
    liger(model, rope=False, swiglu=False, fused_linear_cross_entropy=False, rms_norm=True)


def liger_and_ours(model: nn.Module) -> None:
    """All of Liger, then our norms in place of its own."""
    liger(model)
    tunegen.patch(model)


VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "eager": lambda model: None,
    "eager again": lambda model: None,
    "ours, forward only": lambda model: tunegen.patch(model, backward="eager"),
    "ours": tunegen.patch,
    "ours, residual add fused": lambda model: tunegen.patch(model, fuse_residual=True),
    "Liger's norm alone": liger_norm,
    "all of Liger": liger,
    "all of Liger, our norms": liger_and_ours,
}


def dressed(model: nn.Module, names: Sequence[str]) -> dict[str, State]:
    """The state of the model under each variant; it ends as it was."""
    bare = look(model)
    found = {}
    for name in names:
        VARIANTS[name](model)
        found[name] = look(model)
        wear(bare)
    return found
