"""What the commands do; imported when one runs, so that `tunegen --help` loads little."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from . import paths, report, silicon, step_report
from .cli_options import check_family, devices_of, new_folder
from .dispatch import digest_today, stored_choices
from .early import Early
from .errors import TunegenError
from .evaluate import COMPILED
from .fleet import sweep_gpus
from .model import RMS_NORM, TORCH_FAMILY, Config, Problem, Silicon, Trial, TrialState
from .policies import FASTEST
from .progress import SweepProgress
from .records import problem_of, typed
from .silicon import kind_of
from .store import Store
from .sweep import SweepResult, sweep_gpu, together
from .sweep_target import sweep_target
from .ties import winner
from .worker import Worker

USUAL = {"op": RMS_NORM, "weight": "", "casting": "fp32", "policy": FASTEST}
"""Columns that are not shown where all rows have this; of the weight that is x's dtype."""


def run_sweep(
    problems: Sequence[Problem],
    console: Console,
    options: dict[str, Any],
    counts: Mapping[Problem, int] | None = None,
    early: Early | None = None,
) -> None:
    """Sweep on the GPU at hand, or compile and rank for a target where there is none or one is named; `counts` are the
    calls of a recorded step, `early` is what has been started for one GPU."""
    target = target_of(options["arch"])
    devices = devices_of(options["gpus"]) if target is None or options["gpus"] else []
    arguments = {k: str(v) for k, v in options.items()}
    budget, seed = options["budget"], options["seed"]
    if paths.interpreted():
        raise TunegenError("TRITON_INTERPRET is set: kernels cannot be compiled in this process; unset it to sweep")
    began = time.monotonic()
    folder = new_folder(options["db"])
    with Store.open(options["db"]) as store, SweepProgress(console) as progress:
        _told_first(console, folder, target)
        try:
            if target is not None:
                trials = sweep_target(store, problems, target, seed, progress, arguments, early and early.pool)
            elif len(devices) == 1:
                worker, pool = early or (Worker(devices[0], seed), None)
                results = [sweep_gpu(store, problems, budget, seed, progress, arguments, worker, pool=pool)]
            else:
                results = sweep_gpus(options["db"], problems, budget, seed, progress, arguments, devices)
        except KeyboardInterrupt:
            console.print(f"interrupted; what was done is in {options['db']}, the same command goes on from there")
            raise
    found = (
        _by_silicon(options["db"], problems, results, console, counts)
        if target is None
        else _estimated(trials, target, console)
    )
    seconds = time.monotonic() - began
    if target is None:
        found |= _told(results, seconds, console)
    _end(found, progress.failures, seconds, console, options)


def _told_first(console: Console, folder: str, target: Silicon | None) -> None:
    """Print what someone may not expect of the sweep that begins; `folder` is what `new_folder` says."""
    if folder:
        console.print(folder, soft_wrap=True)
    given = click.get_current_context().get_parameter_source("budget")
    if target is not None and given is ParameterSource.COMMANDLINE:
        console.print("--budget counts on a GPU; all candidates are compiled", soft_wrap=True)


def _told(results: Sequence[SweepResult], seconds: float, console: Console) -> dict[str, Any]:
    """Print what was left out and what the time was spent on, and return it for JSON."""
    left_out = list(dict.fromkeys(line for result in results for line in report.left_out_lines(result.left_out)))
    spent = together(results).seconds
    for line in (*left_out, report.time_line(spent, seconds, len(results))):
        console.print(line, soft_wrap=True)
    return {"left_out": left_out, "seconds_spent": {what: round(value, 2) for what, value in spent.items()}}


def _end(
    found: dict[str, Any],
    failures: Sequence[Trial],
    seconds: float,
    console: Console,
    options: dict[str, Any],
) -> None:
    """What failed, the summary and where it is all kept; or all of it as JSON."""
    show = paths.on_database("tunegen show trials --state ...", options["db"])
    for line in report.failure_lines(failures, show):
        console.print(line, soft_wrap=True)
    database = str(options["db"].absolute())
    if options["as_json"]:
        rest = {"database": database, "seconds": round(seconds, 1), "failures": report.failures_as_json(failures)}
        click.echo(json.dumps({**found, **rest}, indent=2))
        return
    console.print(f"{found['summary']} {seconds:.0f} s.", soft_wrap=True)
    console.print(f"database: {database}", soft_wrap=True)


def target_of(arch: str | None) -> Silicon | None:
    """The silicon to compile for, None for the GPU at hand. Raises click.UsageError for an unknown name."""
    import torch

    if arch is None and torch.cuda.is_available() and torch.version.hip is None:
        return None
    try:
        return silicon.of_arch(arch or "sm_90")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error


def _by_silicon(
    db: Path,
    problems: Sequence[Problem],
    results: Sequence[SweepResult],
    console: Console,
    counts: Mapping[Problem, int] | None,
) -> dict[str, Any]:
    """Print what was found on each kind of GPU, and return it for JSON."""
    kinds = list(dict.fromkeys(kind_of(result.silicon) for result in results))
    groups = [together([result for result in results if kind_of(result.silicon) == kind]) for kind in kinds]
    found = [_measured(db, problems, group, console, counts) for group in groups]
    return found[0] if len(found) == 1 else {"summary": " ".join(one["summary"] for one in found), "by_gpu": found}


def _measured(
    db: Path,
    problems: Sequence[Problem],
    result: SweepResult,
    console: Console,
    counts: Mapping[Problem, int] | None,
) -> dict[str, Any]:
    """Print what a sweep on a GPU found, and return it for JSON."""
    winners = {}
    for problem in problems:
        own = [t for t in result.finals if t.problem == problem and t.kind == "measured"]
        choices = stored_choices(db, problem, result.silicon)
        best = next((config for config, stored in choices if stored.rows == problem.rows), None)
        if own and best not in [t.config for t in own]:  # another sweep's, or the file is busy: what was found here
            best = winner(own)
        if best is not None:
            winners[problem] = best
    found = report.lines(result.finals, winners, result.silicon)
    console.print(report.table(found, console.width))
    peak = f"at most {result.peak_bytes / 1e9:.2f} GB of its memory in use"
    console.print(f"GPU: {result.silicon.name}, {result.versions}, {peak}", soft_wrap=True)
    machine = {"gpu": result.silicon.name, "versions": result.versions, "peak_memory_bytes": result.peak_bytes}
    summary = {"machine": machine, "results": report.as_json(found), "summary": report.sentence(found)}
    if counts is None:
        return summary
    step = step_report.step(counts, result.finals, winners, result.silicon)
    console.print(step_report.sentence(step), soft_wrap=True)
    return {**summary, "step": step_report.as_json(step)}


def _estimated(trials: Sequence[Trial], target: Silicon, console: Console) -> dict[str, Any]:
    """Print what a sweep without a GPU found, and return it for JSON."""
    console.print(report.estimated_table(trials, console.width))
    families = {(t.problem.direction, t.config.family) for t in trials}
    good = sum(t.state is TrialState.OK for t in trials)
    distinct = len({(t.problem.direction, t.config) for t in trials})
    text = (
        f"No GPU: {distinct} candidates of {len(families)} families compiled for {target.arch} ({good} of "
        f"{len(trials)} pairs of candidate and problem are valid), ranked by an estimate; nothing was timed."
    )
    ranked = [
        {
            "op": t.problem.op,
            "direction": t.problem.direction,
            "rows": t.problem.rows,
            "hidden": t.problem.hidden,
            "candidate": t.config.label(),
            "estimate_us": t.estimate_us,
        }
        for t in sorted(
            (t for t in trials if t.kind == "estimated" and t.estimate_us), key=lambda t: t.estimate_us or 0.0
        )
    ]
    return {"machine": {"arch": target.arch}, "results": ranked, "summary": text}


def show_rows(what: str, db: Path, console: Console | None, filters: dict[str, Any]) -> None:
    """Print winners or trials as a table, or as JSON without a console."""
    with Store.read(db) as store:
        check_family(store, filters)
        rows = typed(store.winners(**filters) if what == "winners" else store.trials(**filters))
        counts = {name: store.rows(f"SELECT count(*) AS n FROM {name}", {})[0]["n"] for name in ("winners", "trials")}
    if console is None:
        click.echo(json.dumps(rows, indent=2))
        return
    if (policy := paths.policy()) and "policy" not in filters:
        explain = paths.on_database("tunegen explain", db)
        told = f"they also use what was tuned under fastest, less what theirs forbids: `{explain}` says what answers"
        click.echo(f"TUNEGEN_POLICY is {policy}, which calls are under; {told}.", err=True)
    if not rows:
        console.print(_no_rows(what, db, counts), soft_wrap=True)
        return
    cells = [_cells(row) for row in rows]
    for name, usual in USUAL.items():
        if all(one[name] == (usual or one["dtype"]) for one in cells):
            cells = [{key: text for key, text in one.items() if key != name} for one in cells]
    console.print(report.stored_table(cells, console.width))


def _no_rows(what: str, db: Path, counts: Mapping[str, int]) -> str:
    """What to say where no rows match, of those that are there."""
    others = f"; others there: {counts[what]}" if counts[what] else ""
    trials = paths.on_database("tunegen show trials", db)
    more = f"; every candidate, failed ones too: `{trials}`" if counts["trials"] > 0 else ""
    return f"no {what} match in {db}{others}{more if what == 'winners' else ''}"


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """A row of the database as text, by column; a column that is empty in all rows is not shown."""
    numbers = {name: "" if row[name] is None else f"{row[name]:.3f}" for name in ("us", "score", "estimate_us")}
    plain = {name: str(row.get(name, "")) for name in ("state", "stage", "reason")} if "place" not in row else {}
    half = {"of half a sweep": "yes" if row.get("half") else ""}
    gain = {"gain": "" if row["gains"] is None else "yes" if row["gains"] else "none"}
    problem, config = problem_of(row), _config(row)
    kernel = row["family"] not in (TORCH_FAMILY, COMPILED.family)
    stale = kernel and (config is None or row["digest"] != digest_today(problem, config))
    return {
        **{name: str(row[name]) for name in ("direction", "rows", "hidden")},
        "dtype": row["x_dtype"],
        **_asked(problem),
        "config": config.label() if config else f"{row['family']} {row['parameters']}",
        "kind": row["kind"],
        **numbers,
        **plain,
        **half,
        **gain,
        "stale": "yes" if stale else "",
        "silicon": _silicon(row),
    }


def _asked(problem: Problem) -> dict[str, str]:
    """What a problem is beside its size and the dtype of x, in the words of the options that ask for it."""
    dx_only = problem.direction == "backward" and not problem.weight_grad
    marks = {"offset": problem.offset, "sum in fp32": problem.sum_in_fp32, "dx only": dx_only}
    return {
        "op": problem.op,
        "weight": problem.weight_dtype or "none",
        "casting": problem.casting,
        **{name: "yes" if marked else "" for name, marked in marks.items()},
        "policy": problem.policy,
    }


def _silicon(row: Mapping[str, Any]) -> str:
    """The GPU that a row was measured on; of an estimate that it is a target, since no GPU was there."""
    compiled = row["kind"] == "estimated" or row["estimate_us"] is not None  # baselines of such a sweep too
    return f"compiled for sm_{row['capability']} ({row['silicon']})" if compiled else str(row["silicon"])


def _config(row: dict[str, Any]) -> Config | None:
    """The config of a row of the database; None where its parameters are none."""
    with suppress(ValueError):
        return Config.read(row["family"], row["parameters"])
    return None
