"""Distributed tensors: torch.distributed.tensor.DTensor. A norm needs whole rows, so that those that lie here are
computed here and nothing is gathered. Imported where the first one is met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .notes import note_layout

Placements = Sequence[Placement]


def by_shards(
    function: Callable[..., Sequence[Tensor]], rows: Sequence[Tensor], weight: Tensor | None
) -> list[Tensor] | None:
    """`function(*rows, weight)` of the parts that lie here, its results put together as the first of `rows` is.

    `rows` (..., N) are sharded over axes of rows or replicated, all alike, and the weight (N) is replicated. Its
    gradient is then a sum that is still to be made over the shards of rows (`Partial`), as that of torch's own norms.
    None for every other layout, of which a note is given once.
    """
    x, here = rows[0], parts_here(rows, weight)
    if here is None:
        if not torch.compiler.is_compiling():
            note_layout(", ".join(_laid_out(t) for t in (*rows, weight) if t is not None))
        return None
    assert isinstance(x, DTensor)
    return [_Whole.apply(y, x.device_mesh, x.placements, x.shape) for y in function(*here)]


def parts_here(rows: Sequence[Tensor], weight: Tensor | None) -> list[Tensor | None] | None:
    """The plain tensors that `by_shards` computes with, the weight last; None for a layout that torch answers."""
    x = rows[0]
    if not isinstance(x, DTensor) or not _rows_lie_here(x, rows[1:], weight):
        return None
    summed = [Partial() if placement.is_shard() else Replicate() for placement in x.placements]
    of_weight = None if weight is None else _Here.apply(weight, summed, False)
    return [*(_Here.apply(t, x.placements, t.is_leaf) for t in rows), of_weight]


def _rows_lie_here(x: DTensor, others: Sequence[Tensor], weight: Tensor | None) -> bool:
    mesh, last = x.device_mesh, x.dim() - 1
    return (
        mesh.get_coordinate() is not None  # this process has a part of it
        and all(type(p) is Replicate or (type(p) is Shard and p.dim != last) for p in x.placements)
        and all(isinstance(t, DTensor) and (t.device_mesh, t.placements) == (mesh, x.placements) for t in others)
        and (weight is None or (isinstance(weight, DTensor) and weight.device_mesh == mesh and _is_whole(weight)))
    )


def _is_whole(tensor: DTensor) -> bool:
    return all(type(placement) is Replicate for placement in tensor.placements)


def _laid_out(tensor: Tensor) -> str:
    """Such as "(4, 512) as (Shard(dim=1),)"."""
    return f"{tuple(tensor.shape)} as {tensor.placements if isinstance(tensor, DTensor) else 'a plain tensor'}"


# Each of the two is the other's backward. `to_local` and `from_local` would do but for a part that is still on its way
# (AsyncCollectiveTensor), which kernels cannot wait for.


class _Here(torch.autograd.Function):
    """The part of a distributed tensor that lies here."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, of_gradient: Placements, own: bool) -> Tensor:
        ctx.layout = tensor.device_mesh, of_gradient, tensor.shape
        ctx.own = own
        ctx.set_materialize_grads(False)
        part = tensor.to_local()
        part = part.wait() if isinstance(part, AsyncCollectiveTensor) else part
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        # Autograd sees a new tensor each time, and would let two leaves keep the memory of one gradient.
        return _Whole.apply(gradient.clone() if ctx.own else gradient, *ctx.layout), None, None


class _Whole(torch.autograd.Function):
    """The distributed tensor of which `part` lies here; shards may be of different sizes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> Tensor:
        ctx.placements = [Replicate() if placement.is_partial() else placement for placement in placements]
        ctx.set_materialize_grads(False)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        placed = gradient.redistribute(placements=ctx.placements)
        return _Here.apply(placed, ctx.placements, False), None, None, None
