"""Whether tensors that are written to share memory with others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from .arguments import PLAIN_TENSORS

WEIGHT = "weight"
Axes = tuple[tuple[int, int], ...]
"""(stride, size) of each axis."""


def check_memory(outs: Mapping[str, Tensor], inputs: Mapping[str, Tensor | None]) -> None:
    """Raise ValueError where one of `outs` shares memory with another, or with one of `inputs`. It may be exactly one
    of these other than the weight, of which an element is read before its place is written."""
    if _lie_apart(outs, inputs) or any(out.numel() == 0 for out in outs.values()):
        return
    seen: list[tuple[str, Tensor]] = []
    for name, out in outs.items():
        for other, tensor in seen:
            if share_memory(out, tensor):
                raise ValueError(f"{other} and {name} {_how(out, tensor)}, where two results go; clone one of them")
        seen.append((name, out))
    for other, read in inputs.items():
        for name, out in seen:
            if read is None or (read is out and other != WEIGHT) or not share_memory(out, read):
                continue
            if other == WEIGHT or not _are_same(out, read):
                raise ValueError(f"{name} and {other} {_how(out, read)}, which is read later; clone one of them")


def _lie_apart(outs: Mapping[str, Tensor], inputs: Mapping[str, Tensor | None]) -> bool:
    """Whether no two span the same memory, which is all that most calls ask; False where it takes a closer look."""
    tensors = [*outs.values()]
    for name, tensor in inputs.items():
        if tensor is not None and (name == WEIGHT or not any(tensor is out for out in outs.values())):
            tensors.append(tensor)
    if not all(map(_has_memory, tensors)):
        return False
    spans = sorted([(start := tensor.data_ptr(), start + _span(tensor)) for tensor in tensors])
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether an element of one lies where an element of the other does. Of tensors without memory of their own, as
    fake ones and those of a transform of torch.func, that is known of one and the same object alone. Views of
    different strides count as what they span, from their first element to their last."""
    if one is other:
        return True
    if not (_has_memory(one) and _has_memory(other)):
        return False
    start, other_start = one.data_ptr(), other.data_ptr()
    if start + _span(one) <= other_start or other_start + _span(other) <= start:
        return False
    distance, rest = divmod(abs(start - other_start), one.element_size())
    axes = _axes(one)
    return bool(rest) or axes != _axes(other) or _is_reached(distance, axes)


def _has_memory(tensor: Tensor) -> bool:
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.device.type != "meta"
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _axes(tensor: Tensor) -> Axes:
    """Those of more than one element, the largest stride first."""
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(sorted(((stride, size) for stride, size in axes if size > 1), reverse=True))


def _is_reached(distance: int, axes: Axes) -> bool:
    """Whether two elements of such a tensor lie so far apart: two halves of a row span each other's memory, and share
    none. True as well where the axes do not lie within each other."""
    if not axes:
        return distance == 0
    (stride, size), *inner = axes
    if sum(inner_stride * (inner_size - 1) for inner_stride, inner_size in inner) >= stride:
        return True
    steps = distance // stride
    nearest = ((steps, distance - steps * stride), (steps + 1, (steps + 1) * stride - distance))
    return any(step < size and _is_reached(rest, tuple(inner)) for step, rest in nearest)


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether each element of one is the one of the other at the same place; strides of single elements say nothing."""
    if one is other:
        return True
    if (one.data_ptr(), one.dtype, one.shape) != (other.data_ptr(), other.dtype, other.shape):
        return False
    return all(a == b for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size > 1)


def _how(one: Tensor, other: Tensor) -> str:
    return "are the same memory" if _are_same(one, other) else "overlap in memory"
