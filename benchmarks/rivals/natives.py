"""Ours and torch's: each function makes the form of a cell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tunegen
from tunegen import dispatch, paths
from tunegen.key import Key
from tunegen.model import rows_bucket
from tunegen.ops.rms_norm_spec import EPS
from tunegen.reference import DTYPES

from .calls import Form, form_of
from .cells import Cell


def ours(cell: Cell) -> Form:
    """The public function."""
    return form_of(cell, tunegen.rms_norm)


def ours_add(cell: Cell) -> Form:
    """The public function."""
    return form_of(cell, tunegen.add_rms_norm)


def choice_of(cell: Cell) -> str:
    """Which of our configs answers such calls on the first GPU, and why."""
    dtype = DTYPES[cell.dtype]
    rows, trains = rows_bucket(cell.rows), cell.direction == "backward"
    choice = dispatch.choose(Key(cell.op, cell.direction, cell.hidden, rows, dtype, dtype, "fp32", False, trains, 0))
    rung = choice.rung.replace(str(paths.database()), paths.database().name)
    return f"{choice.config.label() if choice.config else 'torch'}; {rung}"


def hugging_face(x: Tensor, weight: Tensor) -> Tensor:
    """The formula of its Llama and Qwen3."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


def hugging_face_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A decoder layer's addition, then its norm."""
    total = x + residual
    return hugging_face(total, weight), total


def eager(cell: Cell) -> Form:
    """Operator by operator."""
    return form_of(cell, hugging_face)


def eager_add(cell: Cell) -> Form:
    """Operator by operator."""
    return form_of(cell, hugging_face_add)


def functional(cell: Cell) -> Form:
    """torch's fused op."""
    return form_of(cell, lambda x, w: F.rms_norm(x, (cell.hidden,), w, EPS))


def functional_add(cell: Cell) -> Form:
    """torch has no fused addition: its addition, then its fused op."""

    def norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (cell.hidden,), w, EPS), total

    return form_of(cell, norm)


def compiled(cell: Cell) -> Form:
    """Inductor as it comes."""
    return form_of(cell, _compile(hugging_face))


def compiled_add(cell: Cell) -> Form:
    """Inductor as it comes; it fuses the addition."""
    return form_of(cell, _compile(hugging_face_add))


MAX = {"max_autotune": True, "coordinate_descent_tuning": True}


def compiled_max(cell: Cell) -> Form:
    """Inductor, searching."""
    return form_of(cell, _compile(hugging_face, options=MAX))


def compiled_max_add(cell: Cell) -> Form:
    """Inductor, searching."""
    return form_of(cell, _compile(hugging_face_add, options=MAX))


def _compile(formula: Any, **options: Any) -> Any:
    """Shapes static: each process has one shape."""
    return torch.compile(formula, dynamic=False, **options)
