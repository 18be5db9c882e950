"""What the scripts that sweep share: problems from the command line, sweeps in this process, a record with versions."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tunegen import ties
from tunegen.child import installed_versions
from tunegen.model import Config, Problem, Trial
from tunegen.pool import Compile, compile_candidate
from tunegen.store import Store
from tunegen.sweep import SweepResult, sweep_gpu
from tunegen.worker import Worker

MakeWorker = Callable[[int], Worker]
"""A measuring process for a seed; tests put a made-up one there."""


def first_gpu(seed: int) -> Worker:
    """The real one."""
    return Worker(0, seed)


class Said:
    """A sweep's listener: a line on stderr for each problem."""

    def stage(self, text: str, total: int) -> None:
        """Something begins."""
        print(f"{text}: {total}", file=sys.stderr, flush=True)

    def trial(self, trial: Trial) -> None:
        """Nothing: there are thousands."""


def problems_of(options: argparse.Namespace) -> list[Problem]:
    """Every combination of width, rows and direction, in bf16 with a weight."""
    return [
        Problem("rms_norm", direction, hidden, rows, weight_grad=direction == "backward")
        for hidden in options.hidden
        for direction in options.direction
        for rows in options.rows
    ]


def add_problems(parser: argparse.ArgumentParser, hidden: Sequence[int], rows: Sequence[int]) -> None:
    """Options for `problems_of`."""
    parser.add_argument("--hidden", type=int, nargs="+", default=list(hidden))
    parser.add_argument("--rows", type=int, nargs="+", default=list(rows))
    parser.add_argument("--direction", nargs="+", choices=["forward", "backward"], default=["forward", "backward"])


def sweep(
    db: Path,
    problems: Sequence[Problem],
    budget: int,
    seed: int,
    make_worker: MakeWorker = first_gpu,
    compile_one: Compile = compile_candidate,
) -> tuple[SweepResult, float]:
    """A sweep into the database `db`, and its seconds."""
    began = time.monotonic()
    with Store.open(db) as store:
        arguments = {"script": Path(sys.argv[0]).name, "budget": budget}
        result = sweep_gpu(store, problems, budget, seed, Said(), arguments, make_worker(seed), compile_one)
    return result, time.monotonic() - began


def finals_of(result: SweepResult, problem: Problem) -> list[Trial]:
    """Finalists of a problem that may win, fastest first."""
    found = [t for t in result.finals if t.problem == problem and t.kind == "measured" and t.measurement is not None]
    return sorted(found, key=score)


def score(trial: Trial) -> float:
    """Time over the sentinel's."""
    assert trial.measurement is not None
    return trial.measurement.score


def winner(finals: Sequence[Trial]) -> Trial:
    """The one that is dispatched."""
    config: Config = ties.winner(finals)
    return next(trial for trial in finals if trial.config == config)


def gpus() -> list[str]:
    """Name and driver of each GPU here, by nvidia-smi; none without it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def record(results: dict[str, Any], **versions: str) -> dict[str, Any]:
    """Results with what they were measured on."""
    return {
        "command": " ".join(["python", *(Path(a).name if a.endswith(".py") else a for a in sys.argv)]),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {**installed_versions(), **versions},
        "gpus": gpus(),
        **results,
    }


def write(path: Path | None, found: dict[str, Any]) -> None:
    """As JSON, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
