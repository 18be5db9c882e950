"""What a kernel that walks can reach: x + y of one block a program, and of as many programs as run at once, which walk.

    python benchmarks/walks.py --out benchmarks/results/h200_walks.json

A backward that sums dw in registers walks over rows. Its share of the memory's speed is told by an addition of the same
bytes with a program for each block; this says what an addition reaches that has to walk too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from gpus import need_gpus
from sweeping import record, write
from torch import Tensor

BLOCKS = ((2048, 4), (4096, 8), (8192, 8))
"""Elements of a block, and warps."""
WALKS = (
    (4096, 4, 2),
    (4096, 8, 2),
    (8192, 8, 1),
    (8192, 8, 2),
    (2048, 4, 4),
    (2048, 4, 8),
    (4096, 8, 16),
    (4096, 8, 32),
)
"""Elements, warps, programs a multiprocessor; of the last two more than run at once."""
STAGES = (1, 3)


@triton.jit
def add_blocks(
    x_ptr,  # [blocks * BLOCK_SIZE], as the others
    y_ptr,
    sum_ptr,
    BLOCK_SIZE: tl.constexpr,
):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    tl.store(sum_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@triton.jit
def add_walking(
    x_ptr,  # [blocks * BLOCK_SIZE], as the others
    y_ptr,
    sum_ptr,
    blocks,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(block, tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
        tl.store(sum_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


def microseconds(launch: Callable[[], Any]) -> float:
    """The median over replays of a CUDA graph."""
    return round(triton.testing.do_bench_cudagraph(launch, rep=50, return_mode="median") * 1e3, 2)


def rows(tensors: Sequence[Tensor], sms: int) -> Iterator[dict[str, Any]]:
    """The time of each addition, in microseconds; the tensors are x, y and their sum."""
    elements = tensors[0].numel()
    for block, warps in BLOCKS:
        programs = elements // block
        us = microseconds(partial(add_blocks[(programs,)], *tensors, block, num_warps=warps))
        yield {"block": block, "num_warps": warps, "programs": programs, "us": us}
    for (block, warps, each), stages in product(WALKS, STAGES):
        programs, arguments = each * sms, (elements // block, block, stages)
        us = microseconds(partial(add_walking[(programs,)], *tensors, *arguments, num_warps=warps))
        yield {"block": block, "num_warps": warps, "stages": stages, "programs": programs, "us": us}


def elements_of(text: str) -> int:
    """A number of elements of which every block size is a divisor: the kernels have no masks."""
    largest = max(block for block, *_ in (*BLOCKS, *WALKS))
    if not text.isdecimal() or int(text) == 0 or int(text) % largest:
        raise argparse.ArgumentTypeError(f"a multiple of {largest}, not {text}")
    return int(text)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=elements_of, default=16384 * 4096)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus()
    tensors = [torch.randn(options.elements, device="cuda").to(torch.bfloat16) for _ in range(3)]
    found = []
    for row in rows(tensors, torch.cuda.get_device_properties(0).multi_processor_count):
        found.append(row)
        print(row)
    write(options.out, record({"elements": options.elements, "rows": found}))


if __name__ == "__main__":
    main()
