"""What a candidate might take, from what the compiler spent on it: the model that ranks candidates on a machine
without a GPU.

A memory-bound kernel is as fast as the bytes it keeps in flight allow (Little's law): bandwidth = bytes in flight /
latency, up to what a copy reaches. Bytes in flight are those that the resident programs have asked for at a time;
registers, shared memory and threads limit how many programs are resident. Whole waves of programs, launches and
spilled registers cost extra. The constants are those of an H200 and rank candidates; they do not predict microseconds
to better than a factor.
"""

from __future__ import annotations

import math

from .model import DTYPE_BYTES, Config, OpSpec, Plan, Problem, Resources, Silicon

COPY_SHARE = 0.88
"""Share of the memory's nominal bandwidth that a copy reaches: 4.2 of 4.8 TB/s on an H200."""
LATENCY_SECONDS = 0.8e-6
LAUNCH_SECONDS = 2.5e-6
REGISTERS_PER_SM = 65536
WARPS_PER_SM = 64
PROGRAMS_PER_SM = 32


def bandwidth(silicon: Silicon) -> float:
    """Bytes a second of the memory by clock (double data rate) and bus width, times COPY_SHARE."""
    return 2 * silicon.memory_clock_khz * 1e3 * silicon.memory_bus_bits / 8 * COPY_SHARE


def resident_programs(resources: Resources, config: Config, silicon: Silicon) -> int:
    """Programs of the main kernel that one multiprocessor holds at a time, at least 1."""
    by_registers = REGISTERS_PER_SM // max((resources.registers or 32) * 32 * config.num_warps, 1)
    # A multiprocessor has little more shared memory than one program may use; 1 KB a program is taken by the system.
    by_shared = silicon.shared_limit // (resources.shared_bytes + 1024)
    return max(1, min(by_registers, by_shared, WARPS_PER_SM // config.num_warps, PROGRAMS_PER_SM))


def estimate_us(
    spec: OpSpec, problem: Problem, config: Config, plan: Plan, resources: Resources, silicon: Silicon
) -> float:
    """Microseconds a call by the model above."""
    moved = spec.bytes_moved(problem) + 2 * plan.scratch_bytes()
    programs = math.prod(plan.launches[0].grid)
    resident = resident_programs(resources, config, silicon)
    running = min(programs, resident * silicon.sms)
    numbers = config.numbers
    tile = min(numbers.get("ROWS", 1), problem.rows) * min(
        numbers.get("BLOCK_SIZE", numbers.get("CHUNK", problem.hidden)), problem.hidden
    )
    reads = 1 if problem.direction == "forward" else 2
    # A loop with STAGES > 1 has STAGES - 1 further tiles under way while it computes; without, half the time nothing
    # is.
    depth = max(numbers.get("STAGES", 1) - 1, 0.5)
    in_flight = running * tile * DTYPE_BYTES[problem.x_dtype] * reads * depth
    rate = min(bandwidth(silicon), in_flight / LATENCY_SECONDS)
    waves = programs / (resident * silicon.sms)
    tail = math.ceil(waves) / waves if waves > 1 else 1.0
    # Each spilled byte a thread is written and read through the caches for every tile.
    spill = 1.0 + (resources.spill_bytes or 0) / 64
    return (moved / rate * tail * spill + LATENCY_SECONDS + LAUNCH_SECONDS * len(plan.launches)) * 1e6
