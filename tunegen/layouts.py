"""Where the rows of a tensor lie: at a common distance, or nested, as those of transposed heads do."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MOST_ROWS = 2**31 - 1
"""Nested rows are counted in 32 bits."""

GUARD_GROUPS = 2
"""As many rows as the tallest tile has, about; an even number keeps what lies behind them aligned to 16 bytes."""


class Nested(NamedTuple):
    """Row r of a tensor is (r // inner // middle, r // inner % middle, r % inner), with a stride of each, in elements;
    its columns are adjacent (1) or one and the same element (0)."""

    middle: int
    inner: int
    outer_stride: int
    middle_stride: int
    inner_stride: int
    col_stride: int

    def arguments(self, name: str) -> dict[str, int]:
        """What a kernel must know of the layout of the tensor `name`, by the names of its parameters."""
        return {f"{name}_{field}": value for field, value in self._asdict().items()}


class Rows(NamedTuple):
    """A tensor whose rows a kernel can read, and how they lie: `row_stride` elements apart unless they are nested."""

    tensor: Tensor
    row_stride: int
    nested: Nested | None = None

    def arguments(self, name: str) -> dict[str, int]:
        """What a kernel must know of the layout, by the names of its parameters."""
        return {f"{name}_row_stride": self.row_stride} if self.nested is None else self.nested.arguments(name)


def rows_of(tensor: Tensor, nest: bool = True) -> Rows:
    """The rows of a tensor (..., N), in place where strides allow it, else of a copy: leading axes must fold into three
    at most (into one without `nest`), columns be adjacent or a single repeated one."""
    hidden = tensor.shape[-1]
    if tensor.stride(-1) == 1 or hidden == 1:
        if tensor.dim() == 2:
            return Rows(tensor, tensor.stride(0))
        if tensor.is_contiguous():
            return Rows(tensor, hidden)
    nested = _nested(tensor)
    if nested is not None and nested.middle == nested.inner == nested.col_stride == 1:
        return Rows(tensor, nested.outer_stride)
    return Rows(tensor, 0, nested) if nested is not None and nest else Rows(tensor.contiguous(), hidden)


def in_standard_layout(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, contiguous and 16-byte aligned: kernels compiled for others add in another order."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def nested_copy(tensor: Tensor) -> tuple[Rows, Tensor]:
    """A copy of a tensor (M, N) that lies as `like_heads`, and the whole buffer in the order of its rows: behind M come
    those that fill the last group, before and behind them GUARD_GROUPS groups, all NaN."""
    rows, hidden = tensor.shape
    nested = like_heads(hidden)
    group = nested.middle * nested.inner
    groups = -(-rows // group) + 2 * GUARD_GROUPS
    ordered = tensor.new_full((groups * group, hidden), math.nan)
    ordered[GUARD_GROUPS * group :][:rows] = tensor
    copy = ordered.view(groups, nested.middle, nested.inner, hidden).transpose(1, 2).contiguous()
    return Rows(copy[GUARD_GROUPS:], 0, nested), copy.transpose(1, 2)


def copied_back(buffer: Tensor, rows: int) -> Tensor:
    """The first `rows` rows of what `nested_copy` returned, as they are now; NaN, all of them, if anything was written
    around them."""
    first = GUARD_GROUPS * buffer.shape[1] * buffer.shape[2]
    ordered = buffer.reshape(-1, buffer.shape[-1])
    whole = ordered[:first].isnan().all() & ordered[first + rows :].isnan().all()
    return torch.where(whole, ordered[first : first + rows], math.nan)


def like_heads(hidden: int) -> Nested:
    """The layout of four heads over three positions, transposed: the one that kernels are verified with."""
    middle, inner = 3, 4
    return Nested(middle, inner, middle * inner * hidden, hidden, middle * hidden, 1)


def is_copied(tensor: Tensor, nest: bool = True) -> bool:
    """Whether `rows_of` copies a tensor like this one; asked of one without memory."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return rows_of(like, nest).tensor is not like


def _nested(tensor: Tensor) -> Nested | None:
    """The layout with leading axes folded, None if they do not fold into three."""
    hidden, col_stride = tensor.shape[-1], tensor.stride(-1)
    if hidden == 1:
        col_stride = 1
    if col_stride not in (0, 1) or tensor.numel() // hidden > MOST_ROWS:
        return None
    folded = _folded(tensor.shape[:-1], tensor.stride()[:-1])
    if len(folded) > 3:
        return None
    (_, outer), (middle, middle_stride), (inner, inner_stride) = [*folded, (1, 0), (1, 0)][:3]
    return Nested(middle, inner, outer, middle_stride, inner_stride, col_stride)


def _folded(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(size, stride) of the axes that are left when those of size 1 are dropped and neighbours joined where they lie
    as one; one axis at least."""
    folded: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if folded and folded[-1][1] == size * stride:
            folded[-1] = folded[-1][0] * size, stride
        else:
            folded.append((size, stride))
    return folded or [(1, 0)]
