"""What a candidate might take: the model that ranks candidates on a machine without a GPU, and ahead of measurements.

A kernel is a number of programs; each multiprocessor holds some of them at a time and each walks over some tiles. Four
things bound it, and the kernel takes about as long as the slowest of them:

- memory: the bytes moved, at the rate of a copy;
- latency (Little's law): a tile takes the memory's latency and the time to add up and store it; the tiles that the
  resident programs have under way together are all that hides it. Prefetch hides it further, up to the processing;
- instructions: what the multiprocessor issues for all tiles it handles, sums that go through shared memory included;
- starts: a multiprocessor starts one program at a time.

Each wave of programs fills and drains once; each further kernel costs a launch and reads what the one before left.
Parameters count by their meaning in `templates/README.md`; a family that has none of them is a program's share of the
elements as one tile. The constants were fitted to sweeps of an H200 at N = 4096 (benchmarks/cost_model.py prints how
well the model ranks those and other problems): they rank, and do not predict microseconds to better than a factor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .model import DTYPE_BYTES, Config, OpSpec, Plan, Problem, Resources, Silicon

COPY_SHARE = 0.88
"""Share of the memory's nominal bandwidth that a copy reaches: 4.2 of 4.8 TB/s on an H200."""
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD = 255
WARPS_PER_SM = 64
PROGRAMS_PER_SM = 32

L1_BYTES = 196608
"""Of a multiprocessor's first cache, shared memory aside: what it loaded last is still there."""
VECTOR = 16
"""Bytes that a thread loads at once."""

# Fitted; times in nanoseconds.
LATENCY = 500.0
"""From a load to its data, in an idle machine."""
BUSY = 1400.0
"""The same while all multiprocessors load."""
L2_LATENCY = 500.0
"""Of what another read has brought there."""
THREAD_ELEMENT = 2.8
"""Of a tile's processing, for each element that a thread loads or stores: a thread's own instructions are serial."""
REDUCTION = 110.0
"""A sum over the warps of a program: shuffles, shared memory, barriers."""
REDUCTION_WARP = 8.0
"""Its share for each warp that has to arrive."""
ISSUE = 0.02
"""An element loaded or stored, of the multiprocessor's issue slots."""
SUM = 50.0
"""Each row of a tile that a thread sums beside others."""
FOLD = 1.05
"""A column's value that a warp passes on through shared memory, where the rows of a tile lie in several warps and
columns are summed too."""
START = 80.0
"""Starting one program: rows of 128 elements, one a program, take this long at any number of warps."""
LAUNCH = 700.0
"""A kernel after another, or a fill with zeros."""
ROUND = 30.0
"""Another tile of the same program in a loop that the compiler unrolls: its loads are under way already."""
CONGESTION = 0.08
"""Lost for each time that more bytes are under way than CROWD, where the traffic reaches the memory at all."""
CROWD = 55000
"""Bytes under way on a multiprocessor beyond which they only queue."""
CLOSING_BYTES = 8192
"""Bytes under way of one program of a closing kernel."""
ATOMIC = 0.004
"""An addition to memory, when all multiprocessors add."""
SHARPNESS = 7.0
"""How nearly the slowest bound decides alone: the exponent of a norm over them."""


class Tile(NamedTuple):
    """What a program handles at a time: rows and columns that exist, and how many tiles the problem has."""

    rows: int
    columns: int
    total: int


class Pass(NamedTuple):
    """A kernel that goes over the op's tensors: its programs, bytes it moves, tensors of whole rows read and written.
    rows or columns that a tile adds up."""

    problem: Problem
    config: Config
    tile: Tile
    programs: int
    moved: float
    reads: int
    writes: int

    @property
    def tile_elements(self) -> int:
        """Of one tensor."""
        return self.tile.rows * self.tile.columns

    @property
    def tile_bytes(self) -> int:
        """Of one tensor."""
        return self.tile_elements * DTYPE_BYTES[self.problem.x_dtype]


def bandwidth(silicon: Silicon) -> float:
    """Bytes a second of the memory by clock (double data rate) and bus width, times COPY_SHARE."""
    return 2 * silicon.memory_clock_khz * 1e3 * silicon.memory_bus_bits / 8 * COPY_SHARE


def streams(spec: OpSpec, problem: Problem) -> tuple[int, int]:
    """How many tensors of whole rows are read, and how many written."""
    roles = [t.role for t in spec.tensors(problem).values() if t.shape == (problem.rows, problem.hidden)]
    return roles.count("input"), roles.count("output")


def tile_of(problem: Problem, config: Config, programs: int) -> Tile:
    """The tile by the config's own words; without any, a program's share."""
    numbers = config.numbers
    width = numbers.get("BLOCK_SIZE") or numbers.get("CHUNK")
    if width is None and "ROWS" not in numbers:
        return Tile(1, max(1, problem.rows * problem.hidden // programs), programs)
    rows, columns = min(numbers.get("ROWS", 1), problem.rows), min(width or problem.hidden, problem.hidden)
    return Tile(rows, columns, math.ceil(problem.rows / rows) * math.ceil(problem.hidden / columns))


def guess_resources(spec: OpSpec, problem: Problem, config: Config) -> Resources:
    """What the compiler might spend, before it is asked: a thread holds its elements of every input, a product of each
    further one, and the weight and its gradient by columns; a loop with STAGES keeps tiles in shared memory."""
    tile = tile_of(problem, config, 1)
    threads = 32 * config.num_warps
    reads, _ = streams(spec, problem)
    by_column = (problem.weight_dtype is not None) + problem.weight_grad
    held = tile.rows * tile.columns * (2 * reads - 1) + tile.columns * by_column
    most = min(REGISTERS_PER_THREAD, REGISTERS_PER_SM // threads)
    ahead = max(config.numbers.get("STAGES", 1) - 1, 0)
    shared = ahead * reads * tile.rows * tile.columns * DTYPE_BYTES[problem.x_dtype]
    return Resources(min(16 + held // threads, most), 0, shared)


def resident_programs(resources: Resources, config: Config, silicon: Silicon) -> int:
    """Programs of the main kernel that one multiprocessor holds at a time, at least 1."""
    registers = math.ceil((resources.registers or 32) / 8) * 8  # they are given out by eight
    by_registers = REGISTERS_PER_SM // (registers * 32 * config.num_warps)
    # A multiprocessor has little more shared memory than one program may use; 1 KB a program is taken by the system.
    by_shared = silicon.shared_limit // (resources.shared_bytes + 1024)
    return max(1, min(by_registers, by_shared, WARPS_PER_SM // config.num_warps, PROGRAMS_PER_SM))


def folding(over: Pass) -> float:
    """Nanoseconds to add up a tile's columns where its rows lie in several warps."""
    warps_a_row = max(1, over.tile.columns * DTYPE_BYTES[over.problem.x_dtype] // (32 * VECTOR))
    sharing = min(over.tile.rows, over.config.num_warps // warps_a_row)
    return FOLD * over.tile.columns * sharing if over.problem.weight_grad and sharing > 1 else 0.0


def processing(over: Pass, elements: int) -> float:
    """Nanoseconds from the data of a tile, `elements` of each tensor, in a program to its results on their way."""
    warps = over.config.num_warps
    sums = 2 if over.config.structure.get("RSTD") == "recomputed" else 1
    across = REDUCTION + REDUCTION_WARP * warps if warps > 1 else 0.5 * REDUCTION
    rows_a_thread = min(over.tile.rows, over.tile_bytes / VECTOR / (32 * warps))
    serial = elements * (over.reads + over.writes) / (32 * warps) * THREAD_ELEMENT
    return serial + sums * (across + SUM * rows_a_thread) + folding(over)


def kernel_ns(over: Pass, resources: Resources, silicon: Silicon) -> float:
    """Nanoseconds of a pass, without its launch."""
    each = math.ceil(over.programs / silicon.sms)
    beside = min(resident_programs(resources, over.config, silicon), each)
    walked = math.ceil(over.tile.total / over.programs)
    process = processing(over, over.tile_elements)
    issue = over.tile_elements * (over.reads + over.writes) * ISSUE + folding(over)
    first = LATENCY + process
    if "CHUNK" in over.config.numbers:  # the row in an unrolled loop, then again, as the sum must be known first
        row = over.problem.hidden
        again = L2_LATENCY if beside * row * DTYPE_BYTES[over.problem.x_dtype] > L1_BYTES else 0.0
        first = LATENCY + again + 2 * walked * ROUND + processing(over, 2 * row)
        issue *= 2 * row / over.tile_elements
        walked = 1
    ahead = max(over.config.numbers.get("STAGES", 1) - 1, 0) if walked > 1 else 0
    step = max(process, (BUSY - LATENCY + first) / max(ahead, 1))
    fills = math.ceil(each / beside) if ahead else 1
    crowd = max(0.0, beside * max(ahead, 1) * over.reads * over.tile_bytes / CROWD - 1) if walked > 1 else 0.0
    past_l2 = max(0.0, 1 - silicon.l2_bytes / over.moved)
    bounds = (
        over.moved / bandwidth(silicon) * 1e9 * (1 + CONGESTION * crowd * past_l2),
        (math.ceil(each / beside) * walked - fills) * step,
        each * walked * issue,
        each * START,
    )
    slowest = sum(bound**SHARPNESS for bound in bounds) ** (1 / SHARPNESS)
    # Each spilled byte a thread is written and read through the caches for every tile.
    return float((1 + (resources.spill_bytes or 0) / 64) * slowest + fills * first)


def estimate_us(
    spec: OpSpec, problem: Problem, config: Config, plan: Plan, resources: Resources | None, silicon: Silicon
) -> float:
    """Microseconds a call by the model above; without `resources`, by a guess of them."""
    resources = resources or guess_resources(spec, problem, config)
    reads, writes = streams(spec, problem)
    scratch = plan.scratch_bytes()
    over_rows = [launch for launch in plan.launches if launch.num_warps is None]
    total = LAUNCH * len(plan.launches)
    for launch in plan.launches:
        programs = math.prod(launch.grid)
        if launch in over_rows:
            last = launch is over_rows[-1]  # of several, only this one writes
            moved = spec.bytes_moved(problem) * (1.0 if last else reads / (reads + writes)) + scratch
            tile = tile_of(problem, config, programs)
            over = Pass(problem, config, tile, programs, moved, reads, writes if last else 0)
            total += kernel_ns(over, resources, silicon)
        else:  # a closing kernel, over the workspace
            latency = L2_LATENCY if 2 * scratch < silicon.l2_bytes else BUSY
            total += LATENCY + scratch / programs / CLOSING_BYTES * latency
    for item in plan.scratch.values():
        if item.zero:  # filled by a kernel of its own, then added to by every program
            added = tile.columns if item.shape[-1] == problem.hidden else tile.rows
            total += LAUNCH + ATOMIC * added * over.programs
    return total / 1e3
