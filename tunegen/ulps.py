"""What verification asks of the buffers of a candidate, answered in numbers: how many ulp an output is off, whether two
tensors are the same, whether a guard is whole. Here in torch operators, for any device, and the reference of
`gate_kernels`, which answers the same on a GPU in one kernel a question.

The numbers of all questions are read at once, in `read`: on a GPU every reading waits for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .reference import DTYPES, Expected

MANTISSA_BITS = {"bf16": 7, "fp16": 10, "fp32": 23, "fp64": 52}
CHUNK_ELEMENTS = 1 << 24


class Deviation(NamedTuple):
    """How far an output is off, in ulp; both are NaN if any element is."""

    largest: float
    typical: float


class Found(NamedTuple):
    """The answer to one question. `largest` and `squares` (their sum) are errors in ulp, without those that are NaN;
    `nan` is 1 if any is. For the other questions `largest` is 1 where something differs, else 0."""

    largest: float
    squares: float = 0.0
    nan: float = 0.0

    def deviation(self, elements: int) -> Deviation:
        """Of an output with so many elements."""
        if self.nan or math.isnan(self.largest):
            return Deviation(math.nan, math.nan)
        return Deviation(self.largest, math.sqrt(self.squares / elements))


class Findings(Protocol):
    """Questions about buffers, and their answers in the same order."""

    def guards(self, buffer: Tensor, width: int, guard: Tensor) -> None:
        """Whether the first and last `width` elements of `buffer` are, bit by bit, the one element of `guard`."""

    def same(self, got: Tensor, want: Tensor) -> None:
        """Whether two contiguous tensors are the same bit by bit."""

    def deviation(self, got: Tensor, want: Expected, dtype: str) -> None:
        """How far `got`, contiguous and of `dtype`, is from `want`, which is `scaled`."""

    def read(self) -> list[Found]:
        """All answers so far."""


class Plain:
    """In torch operators."""

    def __init__(self) -> None:
        self._found: list[Found] = []

    def guards(self, buffer: Tensor, width: int, guard: Tensor) -> None:
        """See `Findings`."""
        both = bits(torch.cat([buffer[:width], buffer[-width:]]))
        self._found.append(Found(float((both != bits(guard)).any())))

    def same(self, got: Tensor, want: Tensor) -> None:
        """See `Findings`."""
        self._found.append(Found(float(not torch.equal(bits(got), bits(want)))))

    def deviation(self, got: Tensor, want: Expected, dtype: str) -> None:
        """See `Findings`."""
        self._found.append(found_deviation(got, want, dtype))

    def read(self) -> list[Found]:
        """See `Findings`."""
        return self._found


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: NaN is equal to itself, and 0 differs from -0."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def scaled(want: Expected) -> Expected:
    """`want` with its scale as non-negative numbers in float64, mean |value| where it has none."""
    scale = want.value.abs().mean() if want.scale is None else want.scale.abs()
    return want._replace(scale=scale.to(torch.float64))


def smallest(dtype: str) -> float:
    """The least size of which an ulp is counted; an ulp is a normal fp64 number even where all of a row is 0."""
    return max(torch.finfo(DTYPES[dtype]).smallest_normal, 1e-290)


def deviation(got: Tensor, want: Expected, dtype: str) -> Deviation:
    """|got - want| in ulp of `dtype` at max(|want|, scale), after taking off the slack."""
    return found_deviation(got, scaled(want), dtype).deviation(want.value.numel())


def found_deviation(got: Tensor, want: Expected, dtype: str) -> Found:
    """The same as an answer; chunk by chunk, since every step takes memory for its result."""
    assert want.scale is not None
    scale = want.scale.expand(want.value.shape)
    step = max(1, CHUNK_ELEMENTS // max(want.value[0].numel(), 1))
    largest, squares = 0.0, 0.0
    for start in range(0, len(want.value), step):
        part = slice(start, start + step)
        slack = None if want.slack is None else want.slack[part]
        off = _ulps(got[part], Expected(want.value[part], slack, scale[part]), dtype)
        chunk = float(off.max())
        if math.isnan(chunk):
            return Found(largest, squares, 1.0)
        largest = max(largest, chunk)
        squares += float(off.square().sum())
    return Found(largest, squares)


def _ulps(got: Tensor, want: Expected, dtype: str) -> Tensor:
    assert want.scale is not None
    size = want.value.abs().maximum(want.scale).clamp_min(smallest(dtype))
    ulp = torch.exp2((torch.frexp(size).exponent - 1 - MANTISSA_BITS[dtype]).to(torch.float64))
    off = (got.to(torch.float64) - want.value).abs()
    if want.slack is not None:
        off = (off - want.slack).clamp_min(0.0)
    return off / ulp
