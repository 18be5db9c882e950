"""Every candidate of one family timed, in a process that is replaced where one hangs: what its search space is worth.

    python benchmarks/one_family.py split_row_meet --shape 4096x16384 2048x32768 1024x65536 512x131072

Of each candidate: microseconds, the sentinel's time over its own (a copy forward, an addition of the same bytes
backward; below 1 is slower than that), registers and spilled bytes, or why it has no time. A candidate has a minute.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from gpus import need_gpus
from sweeping import MakeWorker, first_gpu, record, write

from tunegen.model import DIRECTIONS, Config, Problem, Resources, Silicon, Trial
from tunegen.pool import Compile, compile_candidate
from tunegen.space import load_space


def compiled(
    problem: Problem, configs: list[Config], silicon: Silicon, compile_one: Compile
) -> dict[Config, Resources | None]:
    """What each needs; None where it does not compile. All cores fill Triton's cache for the measuring process."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {config: pool.submit(compile_one, problem, config, silicon) for config in configs}
    return {config: None if future.exception() else future.result() for config, future in futures.items()}


def measure(
    family: str, problem: Problem, make_worker: MakeWorker = first_gpu, compile_one: Compile = compile_candidate
) -> list[dict[str, Any]]:
    """The candidates of `family` for a problem, fastest first, those without a time last."""
    with make_worker(0) as worker:
        silicon = worker.start().silicon
        configs = load_space(problem.op).candidates(problem, silicon, family)
        needs = compiled(problem, configs, silicon, compile_one)
        worker.open(problem)
        trials = [worker.screen(config, needs[config]) for config in configs]
    return sorted((row_of(trial) for trial in trials), key=lambda row: row["us"] or float("inf"))


def row_of(trial: Trial) -> dict[str, Any]:
    """What a table says of a trial."""
    found, needs = trial.measurement, trial.resources
    return {
        "shape": f"{trial.problem.rows}x{trial.problem.hidden}",
        "config": trial.config.label(),
        "us": found and round(found.us, 2),
        "of_sentinel": found and round(1 / found.score, 4),
        "registers": needs and needs.registers,
        "spilled": needs and needs.spill_bytes,
        "state": trial.state.value,
        "reason": trial.reason,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("--shape", nargs="+", required=True, help="rows and hidden size, such as 4096x16384")
    parser.add_argument("--direction", choices=DIRECTIONS, default="backward")
    parser.add_argument("--op", default="rms_norm")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    options = parser.parse_args()
    need_gpus()
    rows: list[dict[str, Any]] = []
    for shape in options.shape:
        count, _, hidden = shape.partition("x")
        grad = options.direction == "backward" and options.family != "dx_only"
        problem = Problem(options.op, options.direction, int(hidden), int(count), weight_grad=grad)
        for row in measure(options.family, problem):
            time = f"{row['us']:9.2f} us {row['of_sentinel']:.3f}" if row["us"] else f"{row['state']}: {row['reason']}"
            print(f"{row['shape']:>12} {time}  {row['registers']} registers, {row['spilled']} spilled  {row['config']}")
            rows.append(row)
        write(options.out, record({"rows": rows}))


if __name__ == "__main__":
    main()
