"""What a candidate might take: the model that ranks candidates on a machine without a GPU, and ahead of measurements.

A multiprocessor holds some of a kernel's programs at a time, and each walks over some tiles. The slowest of four things
decides:

- memory: the bytes moved, at the rate of a copy;
- latency (Little's law): a tile takes the memory's latency, and its processing; what hides them is the tiles that the
  resident programs have under way together, more of them with prefetch;
- instructions: what a multiprocessor issues for all its tiles, sums through shared memory included;
- starts: a multiprocessor starts one program at a time.

On top come the first tile of a wave of programs, and for each further kernel a launch and the workspace it reads.
Parameters count by their meaning in `templates/README.md`; without any, a program's share of the elements is one tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .model import DTYPE_BYTES, Config, Launch, Plan, Problem, Resources, Silicon
from .ops import row_tensors
from .silicon import REGISTERS_PER_SM, REGISTERS_PER_THREAD
from .spec import OpSpec

COPY_SHARE = 0.88
"""Share of the memory's nominal bandwidth that a copy reaches: 4.2 of 4.8 TB/s on an H200."""
WARPS_PER_SM = 64
PROGRAMS_PER_SM = 32

L1_BYTES = 196608
"""Of a multiprocessor's first cache, shared memory aside: what it loaded last is still there."""
VECTOR = 16
"""Bytes that a thread loads at once."""

# Nanoseconds, and what goes with them: fitted to sweeps of an H200 with Triton 3.6 at N = 4096 and 128 (START, SUM and
# FOLD show there), then to the ranks of the 83 problems in cache/h200.jsonl.xz, each within 1.4 of what it was.
# `benchmarks/cost_model.py` prints how well they rank. Nine times of ten they are within a fifth at N = 4096 and 128;
# elsewhere they rank, no more.
LATENCY = 540.0  # from a load to its data, in an idle machine
BUSY = 1400.0  # the same while all multiprocessors load
L2_LATENCY = 554.0  # of what another read or another kernel has left there
THREAD_ELEMENT = 2.8  # an element that a thread loads or stores: its own instructions are serial
REDUCTION = 77.0  # a sum over the warps of a program: shuffles, shared memory, barriers
REDUCTION_WARP = 8.8  # its share for each warp that has to arrive
SUM = 42.0  # each row of a tile that a thread sums beside others
FOLD = 0.98  # a column's sum that a warp hands on through shared memory, where a tile's rows lie in several warps
ISSUE = 0.0154  # an element loaded or stored, of the multiprocessor's issue slots
START = 80.0  # starting a program: rows of 128 elements, one a program, take this long at any number of warps
MEETING = 1090.0  # from a number that a program hands to others to their having read it, beside its step
ROUND = 23.0  # another chunk of an unrolled loop: its loads are under way already
LAUNCH = 700.0  # a kernel after another, or a fill with zeros
ATOMIC = 0.004  # an addition to memory, when all multiprocessors add
CROWD = 49500  # bytes under way on a multiprocessor beyond which they only queue
CONGESTION = 0.065  # bandwidth lost for each CROWD more, in as far as the traffic reaches the memory
CLOSING_BYTES = 8192  # bytes under way of one program of a closing kernel
CLOSING_REGISTERS = 48  # of a thread of one, as they are given out
EARLY = 300.0  # saved by a closing kernel whose programs wait beside the first kernel's
NO_ROOM = 800.0  # lost if they would, and find no room there
LITTLE_ROOM = 1500.0  # lost if some of them find room: the others start when those have ended
SHARPNESS = 6.3  # how nearly the slowest bound decides alone: the exponent of a norm over them


class Tile(NamedTuple):
    """What a program handles at a time: rows and columns that exist, and how many tiles the problem has."""

    rows: int
    columns: int
    total: int


class Pass(NamedTuple):
    """A kernel that goes over the op's tensors: its programs, bytes moved, tensors of whole rows read and written."""

    problem: Problem
    config: Config
    tile: Tile
    programs: int
    moved: float
    reads: int
    writes: int
    together: int | None = None
    """Programs that a multiprocessor runs at the same time for sure: they wait for each other."""

    @property
    def tile_elements(self) -> int:
        """Of one tensor."""
        return self.tile.rows * self.tile.columns


def bandwidth(silicon: Silicon) -> float:
    """Bytes a second of the memory by clock (double data rate) and bus width, times COPY_SHARE."""
    return 2 * silicon.memory_clock_khz * 1e3 * silicon.memory_bus_bits / 8 * COPY_SHARE


def streams(spec: OpSpec, problem: Problem) -> tuple[int, int]:
    """How many tensors of whole rows are read, and how many written."""
    reads, writes = row_tensors(spec, problem)
    return len(reads), len(writes)


def tile_of(problem: Problem, config: Config, programs: int) -> Tile:
    """The tile by the config's own words, a thread block's part of it; without any, a program's share."""
    numbers = config.numbers
    width = numbers.get("BLOCK_SIZE") or numbers.get("CHUNK")
    if width is None and "ROWS" not in numbers:
        return Tile(1, max(1, problem.rows * problem.hidden // programs), programs)
    # A template file may mean something else by these words: 0 and less are taken for 1.
    rows = max(1, min(numbers.get("ROWS", 1), problem.rows))
    columns = max(1, math.ceil(min(width or problem.hidden, problem.hidden) / config.num_ctas))
    return Tile(rows, columns, math.ceil(problem.rows / rows) * math.ceil(problem.hidden / columns))


def guess_resources(spec: OpSpec, problem: Problem, config: Config, together: int | None = None) -> Resources:
    """What the compiler might spend, before it is asked: a thread holds its elements of every input, a product of each
    further one, and the weight and its gradient by columns; a loop with STAGES keeps tiles in shared memory. With
    `together`, as many programs share the registers, and the tile that is worked on lies in shared memory too."""
    tile = tile_of(problem, config, 1)
    threads = 32 * config.num_warps
    reads, _ = streams(spec, problem)
    by_column = (problem.weight_dtype is not None) + problem.weight_grad
    held = tile.rows * tile.columns * (2 * reads - 1) + tile.columns * by_column
    most = min(REGISTERS_PER_THREAD, REGISTERS_PER_SM // (threads * (together or 1)) // 8 * 8)
    stages = config.numbers.get("STAGES", 1)
    kept = stages if together else max(stages - 1, 0)  # a loop's tile is worked on in registers
    shared = kept * reads * tile.rows * tile.columns * DTYPE_BYTES[problem.x_dtype]
    return Resources(min(16 + held // threads, most), 0, shared)


def registers_of(resources: Resources, config: Config) -> int:
    """Registers that a program of the main kernel takes of a multiprocessor; a thread is given them by eight."""
    return math.ceil((resources.registers or 32) / 8) * 8 * 32 * config.num_warps


def resident_programs(resources: Resources, config: Config, silicon: Silicon) -> int:
    """Programs of the main kernel that one multiprocessor holds at a time, at least 1."""
    by_registers = REGISTERS_PER_SM // registers_of(resources, config)
    # A multiprocessor has little more shared memory than one program may use; 1 KB a program is taken by the system.
    by_shared = silicon.shared_limit // (resources.shared_bytes + 1024)
    return max(1, min(by_registers, by_shared, WARPS_PER_SM // config.num_warps, PROGRAMS_PER_SM))


def running_programs(over: Pass, resources: Resources, silicon: Silicon) -> int:
    """Programs of a pass that a multiprocessor runs at a time."""
    each = math.ceil(over.programs / silicon.sms)
    return each if over.together else min(resident_programs(resources, over.config, silicon), each)


def folding(over: Pass) -> float:
    """Nanoseconds to add up a tile's columns where its rows lie in several warps."""
    warps_a_row = max(1, over.tile.columns * DTYPE_BYTES[over.problem.x_dtype] // (32 * VECTOR))
    sharing = min(over.tile.rows, over.config.num_warps // warps_a_row)
    return FOLD * over.tile.columns * sharing if over.problem.weight_grad and sharing > 1 else 0.0


def processing(over: Pass, elements: int) -> float:
    """Nanoseconds from the data of a tile, `elements` of each tensor, in a program to its results on their way."""
    warps, element = over.config.num_warps, DTYPE_BYTES[over.problem.x_dtype]
    sums = 2 if over.config.structure.get("RSTD") == "recomputed" else 1
    across = REDUCTION + REDUCTION_WARP * warps if warps > 1 else 0.5 * REDUCTION
    rows_a_thread = min(over.tile.rows, over.tile_elements * element / VECTOR / (32 * warps))
    serial = elements * (over.reads + over.writes) / (32 * warps) * THREAD_ELEMENT
    return serial + sums * (across + SUM * rows_a_thread) + folding(over)


def kernel_ns(over: Pass, resources: Resources, silicon: Silicon) -> float:
    """Nanoseconds of a pass, without its launch."""
    each, element = math.ceil(over.programs / silicon.sms), DTYPE_BYTES[over.problem.x_dtype]
    beside = running_programs(over, resources, silicon)
    walked = math.ceil(over.tile.total / over.programs)
    process = processing(over, over.tile_elements)
    issue = over.tile_elements * (over.reads + over.writes) * ISSUE + folding(over)
    first = LATENCY + process
    if "CHUNK" in over.config.numbers:  # the row in an unrolled loop, then again, as the sum must be known first
        row = over.problem.hidden
        again = L2_LATENCY if beside * row * element > L1_BYTES else 0.0
        first = LATENCY + again + 2 * walked * ROUND + processing(over, 2 * row)
        issue *= 2 * row / over.tile_elements
        walked = 1
    worked_on = 2 if over.together else 1  # a row's sum is handed over one step before the row is finished
    ahead = max(over.config.numbers.get("STAGES", 1) - worked_on, 0) if walked > 1 else 0
    step = max(process + (MEETING if over.together else 0.0), (BUSY - LATENCY + first) / max(ahead, 1))
    fills = math.ceil(each / beside) if ahead else 1
    under_way = beside * max(ahead, 1) * over.reads * over.tile_elements * element
    crowd = max(0.0, under_way / CROWD - 1) if walked > 1 else 0.0
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


def columns_ns(over: Pass, silicon: Silicon) -> float:
    """Nanoseconds of the programs that add COLS columns over all rows, DEPTH at a time, beside those of a pass. They
    wait for each step's data, which the pass brings to the second-level cache, and add their threads' sums at the
    end."""
    numbers, problem, warps = over.config.numbers, over.problem, over.config.num_warps
    columns, depth = numbers["COLS"], numbers["DEPTH"]
    each = math.ceil(problem.hidden / columns / silicon.sms)
    loaded = depth * columns * over.reads
    closing = REDUCTION_WARP * warps * columns / 32
    serial = L2_LATENCY + loaded / (32 * warps) * THREAD_ELEMENT
    steps = math.ceil(problem.rows / depth)
    return max(LATENCY + steps * serial + closing, each * steps * loaded * ISSUE)


def waiting_ns(over: Pass, resources: Resources, closing: Launch, silicon: Silicon) -> float:
    """Nanoseconds that a closing kernel costs, or saves if negative, by waiting beside the programs of a pass."""
    free = REGISTERS_PER_SM - running_programs(over, resources, silicon) * registers_of(resources, over.config)
    fitting = free // (32 * (closing.num_warps or over.config.num_warps) * CLOSING_REGISTERS)
    if fitting >= math.ceil(math.prod(closing.grid) / silicon.sms):
        return -EARLY
    if over.together:
        return EARLY  # programs that meet fill a multiprocessor, and end at the same time
    return LITTLE_ROOM if fitting > 0 else NO_ROOM


def estimate_us(
    spec: OpSpec, problem: Problem, config: Config, plan: Plan, resources: Resources | None, silicon: Silicon
) -> float:
    """Microseconds a call by the model above; without `resources`, by a guess of them."""
    reads, writes = streams(spec, problem)
    scratch = plan.scratch_bytes()
    over_rows = [launch for launch in plan.launches if launch.num_warps is None] or [plan.launches[0]]
    resources = resources or guess_resources(spec, problem, config, over_rows[-1].together)
    total = LAUNCH * len(plan.launches)
    # Closing kernels, wherever they stand, after the passes: they are asked beside which programs they wait.
    for launch in sorted(plan.launches, key=lambda launch: launch not in over_rows):
        programs = math.prod(launch.grid) * (config.num_ctas if launch in over_rows else 1)
        if launch in over_rows:
            last = launch is over_rows[-1]  # of several, only this one writes
            moved = spec.bytes_moved(problem) * (1.0 if last else reads / (reads + writes)) + scratch
            tile = tile_of(problem, config, programs)
            over = Pass(problem, config, tile, programs, moved, reads, writes if last else 0, launch.together)
            if all(map(config.numbers.get, ("COLS", "DEPTH"))):  # dw in programs of its own, at the same time
                over = over._replace(programs=tile.total)
                total += math.hypot(kernel_ns(over, resources, silicon), columns_ns(over, silicon))
            else:
                total += kernel_ns(over, resources, silicon)
        else:  # a closing kernel, over the workspace
            latency = L2_LATENCY if 2 * scratch < silicon.l2_bytes else BUSY
            total += LATENCY + scratch / programs / CLOSING_BYTES * latency
            if config.structure.get("PDL") == "early":
                total += waiting_ns(over, resources, launch, silicon)
    for item in plan.scratch.values():
        if item.zero:  # filled by a kernel of its own, then added to by every program
            added = tile.columns if [*item.shape][-1:] == [problem.hidden] else tile.rows
            total += LAUNCH + ATOMIC * added * over.programs
    return total / 1e3
