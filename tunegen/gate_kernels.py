"""What `ulps` asks, in one kernel a question, for tensors on a GPU: in torch operators an output takes some fifteen
passes over memory and two waits for the GPU, and verifying took about 30 ms a candidate (H200).

Triton is imported here, at the top, as its kernels need it: import this module in functions only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Expected
from .syntax import again
from .ulps import MANTISSA_BITS, Found, bits, smallest

TILE = 2048
"""Elements a program looks at: 16 a thread. fp64 numbers take two registers each."""
WIDEST = 1024
"""Columns of a tile, at most."""
NUMBERS = 4
"""Of a question: those of `Found`, and one more, so that all lie at multiples of 16 bytes."""


@triton.jit(do_not_specialize=["elements", "split", "gap", "stride"])  # type: ignore[untyped-decorator]
def differs(
    got_ptr: tl.tensor,
    want_ptr: tl.tensor,
    found_ptr: tl.tensor,
    elements: tl.tensor,  # to look at
    split: tl.tensor,  # after so many of them `gap` elements of got are left out
    gap: tl.tensor,
    stride: tl.tensor,  # of want: 1, or 0 for one element that stands for all
    TILE: tl.constexpr,
) -> None:
    """1 into found[0] where an element differs."""
    place = tl.cast(tl.program_id(0), tl.int64) * TILE + tl.arange(0, TILE)  # [TILE]
    mask = place < elements
    got = tl.load(got_ptr + place + tl.where(place < split, 0, gap), mask=mask, other=0)
    want = tl.load(want_ptr + place * stride, mask=mask, other=0)
    wrong = tl.max(((got != want) & mask).to(tl.int32), 0)
    tl.store(found_ptr, 1.0, mask=wrong != 0)


@triton.jit(do_not_specialize=["rows", "width", "across", "row_stride", "col_stride"])  # type: ignore[untyped-decorator]
def deviates(
    got_ptr: tl.tensor,  # [rows, width]
    want_ptr: tl.tensor,  # [rows, width], float64
    slack_ptr: tl.tensor,  # the same
    scale_ptr: tl.tensor,  # float64, with strides of its own
    found_ptr: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    across: tl.tensor,  # tiles beside each other
    row_stride: tl.tensor,
    col_stride: tl.tensor,
    SMALLEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_SLACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Largest error, sum of squared errors, 1 for any NaN, into found[0:3]. Atomics add the sum: its last bits
    vary."""
    tile = tl.cast(tl.program_id(0), tl.int64)
    row = tile // across * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    col = tile % across * COLS + tl.arange(0, COLS)[None, :]  # [1, COLS]
    mask = (row < rows) & (col < width)
    place = row * width + col
    want = tl.load(want_ptr + place, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + row * row_stride + col * col_stride, mask=mask, other=0.0)
    off = tl.abs(tl.load(got_ptr + place, mask=mask, other=0.0).to(tl.float64) - want)
    if HAS_SLACK:
        off -= tl.load(slack_ptr + place, mask=mask, other=0.0)
    nan = off != off
    off = tl.where(off > 0.0, off, 0.0)  # the slack may be larger; NaN becomes 0
    # The exponent's bits of an fp64 number give its power of two, and a power of two, exactly; log2 and exp2 may not.
    size = tl.maximum(tl.maximum(tl.abs(want), scale), tl.full([ROWS, COLS], SMALLEST, tl.float64))
    exponent = ((size.to(tl.int64, bitcast=True) >> 52) & 2047) - 1023
    off *= ((MANTISSA - exponent + 1023) << 52).to(tl.float64, bitcast=True)
    tl.atomic_max(found_ptr, tl.max(tl.max(off, 1), 0))
    tl.atomic_add(found_ptr + 1, tl.sum(tl.sum(off * off, 1), 0))
    tl.store(found_ptr + 2, 1.0, mask=tl.max(tl.max(nan.to(tl.int32), 1), 0) != 0)


class InKernels:
    """`ulps.Findings` in kernels, for at most `room` questions."""

    def __init__(self, device: torch.device, room: int) -> None:
        self._board = torch.zeros((room, NUMBERS), dtype=torch.float64, device=device)
        self._used = 0

    def guards(self, buffer: Tensor, width: int, guard: Tensor) -> None:
        """See `Findings`."""
        gap = buffer.numel() - 2 * width
        self._differs(buffer, guard, 2 * width, width, gap, 0)

    def same(self, got: Tensor, want: Tensor) -> None:
        """See `Findings`."""
        self._differs(got, want, got.numel(), got.numel(), 0, 1)

    def _differs(self, got: Tensor, want: Tensor, elements: int, split: int, gap: int, stride: int) -> None:
        programs = triton.cdiv(elements, TILE)
        given = bits(got), bits(want), self._place(), elements, split, gap, stride
        again(lambda: differs[(programs,)](*given, TILE=TILE))  # it parses before it launches

    def deviation(self, got: Tensor, want: Expected, dtype: str) -> None:
        """See `Findings`."""
        assert want.scale is not None
        width = want.value.shape[-1]
        rows = want.value.numel() // width
        scale = want.scale.expand(want.value.shape)
        strides = (scale.stride(0), scale.stride(1)) if scale.ndim == 2 else (0, scale.stride(0))
        cols = min(triton.next_power_of_2(width), WIDEST)
        across = triton.cdiv(width, cols)
        grid = (across * triton.cdiv(rows, TILE // cols),)
        value, slack = want.value.contiguous(), None if want.slack is None else want.slack.contiguous()
        tensors = got, value, value if slack is None else slack, want.scale, self._place()
        fixed = {
            "SMALLEST": smallest(dtype),
            "MANTISSA": MANTISSA_BITS[dtype],
            "HAS_SLACK": slack is not None,
            "ROWS": TILE // cols,
            "COLS": cols,
        }
        again(lambda: deviates[grid](*tensors, rows, width, across, *strides, **fixed))

    def _place(self) -> Tensor:
        """Where the kernel of the next question puts its numbers."""
        self._used += 1
        return self._board[self._used - 1]

    def read(self) -> list[Found]:
        """See `Findings`. Waits for the GPU, once."""
        rows: list[list[float]] = self._board[: self._used].tolist()
        return [Found(*row[: NUMBERS - 1]) for row in rows]
