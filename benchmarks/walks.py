"""What a kernel that walks can reach: x + y of one block a program, and of as many programs as run at once, which walk.

    python benchmarks/walks.py --out benchmarks/results/h200_walks.json

A backward that sums dw in registers walks over rows. Its share of the memory's speed is told by an addition of the same
bytes with a program for each block; this says what an addition reaches that has to walk too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
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
def add_blocks(x_ptr, y_ptr, sum_ptr, BLOCK_SIZE: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(sum_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@triton.jit
def add_walking(x_ptr, y_ptr, sum_ptr, blocks, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr):
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(block, tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        tl.store(sum_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


def rows(tensors: list[Tensor], sms: int) -> Iterator[dict[str, Any]]:
    """The time of each addition, in microseconds."""
    elements = tensors[0].numel()

    def timed(**facts: Any) -> dict[str, Any]:
        grid, kernel, arguments = facts.pop("grid"), facts.pop("kernel"), facts.pop("arguments")
        ms = triton.testing.do_bench_cudagraph(
            lambda: kernel[(grid,)](*tensors, *arguments, num_warps=facts["num_warps"]), rep=50, return_mode="median"
        )
        return {**facts, "programs": grid, "us": round(ms * 1e3, 2)}

    for block, warps in BLOCKS:
        yield timed(grid=elements // block, kernel=add_blocks, arguments=(block,), block=block, num_warps=warps)
    for block, warps, each in WALKS:
        for stages in STAGES:
            arguments = (elements // block, block, stages)
            yield timed(
                grid=each * sms, kernel=add_walking, arguments=arguments, block=block, num_warps=warps, stages=stages
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=16384 * 4096)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_gpus()
    tensors = [torch.randn(options.elements, device="cuda").to(torch.bfloat16) for _ in range(3)]
    found = list(rows(tensors, torch.cuda.get_device_properties(0).multi_processor_count))
    for row in found:
        print(row)
    write(options.out, record({"elements": options.elements, "rows": found}))


if __name__ == "__main__":
    main()
