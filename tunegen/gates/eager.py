"""Hugging Face's arithmetic in torch operators with the reductions in another order: what is no fault, measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .checks import Norm

Order = Callable[[int], Tensor]
"""A permutation of 0 ... n - 1."""


def eager(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The arithmetic of Qwen3RMSNorm: its bits, gradients included, up to fp32; float64 stays wide where it rounds."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) if weight is None else weight * wide.to(x.dtype)


def reordered(rows: Order, columns: Order) -> Norm:
    """`eager` on rows and columns in another order: the mean of squares and the mean in dx are added up over columns,
    dw over rows."""

    def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        down, across = (order(n).to(x.device) for order, n in zip((rows, columns), flat.shape, strict=True))
        moved = flat.index_select(0, down).index_select(1, across)
        y = eager(moved, None if weight is None else weight.index_select(0, across), eps)
        return y.index_select(0, down.argsort()).index_select(1, across.argsort()).view(x.shape)

    return norm


def same(n: int) -> Tensor:
    return torch.arange(n)


def backward(n: int) -> Tensor:
    return torch.arange(n - 1, -1, -1)


def interleaved(n: int) -> Tensor:
    """0, 4, 8, ..., 1, 5, 9, ..."""
    return torch.cat([torch.arange(start, n, 4) for start in range(min(4, n))])


REORDERED = {
    "columns backward": reordered(same, backward),
    "rows backward": reordered(backward, same),
    "rows and columns interleaved": reordered(interleaved, interleaved),
}
