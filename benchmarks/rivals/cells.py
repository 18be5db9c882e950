"""What is measured: cells of (op, rows, hidden, direction, dtype), in the order in which a run takes them."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from tunegen.model import DIRECTIONS, DTYPE_BYTES, Problem

NORM, ADD_NORM = "rms_norm", "add_rms_norm"
STREAMS = {(NORM, "forward"): 2, (NORM, "backward"): 3, (ADD_NORM, "forward"): 4, (ADD_NORM, "backward"): 4}
"""Tensors of rows x hidden that a call must read or write. The sum is written forward, and read backward beside both
gradients."""


class Cell(NamedTuple):
    """One contest. The weight has x's dtype."""

    op: str
    rows: int
    hidden: int
    direction: str
    dtype: str

    @property
    def shape(self) -> str:
        """Such as 16384x4096."""
        return f"{self.rows}x{self.hidden}"

    @property
    def streams(self) -> int:
        """See STREAMS."""
        return STREAMS[self.op, self.direction]

    @property
    def bytes_moved(self) -> int:
        """Of one call, without the weight."""
        return self.streams * self.rows * self.hidden * DTYPE_BYTES[self.dtype]

    def problem(self) -> Problem:
        """The same, as the rest of tunegen names it; backward computes dw too."""
        return Problem(
            self.op,
            self.direction,
            self.hidden,
            self.rows,
            self.dtype,
            self.dtype,
            weight_grad=self.direction == "backward",
        )

    def label(self) -> str:
        """For people."""
        return f"{'add + ' if self.op == ADD_NORM else ''}{self.direction} {self.shape} {self.dtype}"


MAIN = "16384x4096 8192x5120 131072x128 16x4096"
LARGE = (
    "32768x1024 16384x2048 16384x2560 8192x7168 8192x8192 4096x12288 4096x16384 2048x32768 1024x65536 512x131072 "
    "524288x128 1048576x64"
)
SMALL = "1x4096 4x4096 64x5120 128x4096 256x8192 512x5120 1024x4096"
OTHER_DTYPES = "16384x4096 8192x5120"
FUSED, MORE_FUSED = "16384x4096", "8192x5120 4096x16384 1024x4096 16x4096 1x4096"


def _cells(op: str, shapes: str, *dtypes: str) -> list[Cell]:
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes.split()]
    return [
        Cell(op, *size, direction, dtype)
        for size, dtype in itertools.product(sizes, dtypes)
        for direction in DIRECTIONS
    ]


QUICK = _cells(NORM, MAIN, "bf16") + _cells(ADD_NORM, FUSED, "bf16")
CELLS = [
    *QUICK,
    *_cells(NORM, LARGE, "bf16"),
    *_cells(NORM, SMALL, "bf16"),
    *_cells(NORM, OTHER_DTYPES, "fp16", "fp32"),
    *_cells(ADD_NORM, MORE_FUSED, "bf16"),
]


def chosen(text: str) -> list[Cell]:
    """The cells that a comma-separated list names: numbers from 1 on (`3`, `1-10`), or shapes, each for all of its
    cells. Raises ValueError at a word that names none."""
    found: list[Cell] = []
    for word in text.split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", word):
            first, last = int(match[1]), int(match[2] or match[1])
            named = CELLS[first - 1 : last] if first else []
        else:
            named = [cell for cell in CELLS if cell.shape == word]
        if not named:
            raise ValueError(f"{word!r} names no cell; they are 1-{len(CELLS)}, or shapes such as {CELLS[0].shape}")
        found += [cell for cell in named if cell not in found]
    return found
