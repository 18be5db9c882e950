"""What the commands do; imported when one runs, so that `tunegen --help` loads little."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from . import report, silicon
from .dispatch import triton_minor
from .errors import StoreError, TunegenError
from .lookup import find_winners
from .model import PROTOCOL, Config, Problem, Silicon, Trial, TrialState
from .ops import op_spec
from .progress import SweepProgress
from .space import load_space
from .store import Store
from .sweep import SweepResult, sweep_gpu, sweep_target


def run_sweep(problems: Sequence[Problem], console: Console, options: dict[str, Any]) -> None:
    """Sweep on the GPU at hand, or compile and rank for a target where there is none or one is named."""
    target = _target(options["arch"])
    arguments = {k: str(v) for k, v in options.items()}
    began = time.monotonic()
    with Store.open(options["db"]) as store:
        with SweepProgress(console) as progress:
            if target is None:
                result = sweep_gpu(store, problems, options["budget"], options["seed"], progress, arguments)
                found, text = _measured(options["db"], problems, result, console)
            else:
                trials = sweep_target(store, problems, target, options["seed"], progress, arguments)
                found, text = _estimated(trials, target, console)
        _failures(progress, console)
    if options["as_json"]:
        click.echo(json.dumps({"database": str(options["db"]), "results": found, "summary": text}, indent=2))
        return
    console.print(f"{text} {time.monotonic() - began:.0f} s.", markup=False, highlight=False, soft_wrap=True)
    console.print(f"database: {Path(options['db']).absolute()}", markup=False, highlight=False, soft_wrap=True)


def _target(arch: str | None) -> Silicon | None:
    """The silicon to compile for, None for the GPU at hand. Raises click.UsageError for an unknown name."""
    import torch

    if arch is None and torch.cuda.is_available() and torch.version.hip is None:
        return None
    try:
        return silicon.of_arch(arch or "sm_90")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error


def _measured(
    db: Path, problems: Sequence[Problem], result: SweepResult, console: Console
) -> tuple[list[dict[str, Any]], str]:
    winners = {}
    for problem in problems:
        stored = find_winners(db, result.silicon, problem, triton_minor(), PROTOCOL)
        if best := next((row for row in stored if row.rows == problem.rows), None):
            winners[problem] = Config.of(best.family, best.parameters)
    found = report.lines(result.finals, winners, result.silicon)
    console.print(report.table(found))
    console.print(
        f"GPU: {result.silicon.name}, {result.versions}, at most {result.peak_bytes / 1e9:.2f} GB of its memory in use",
        markup=False,
        highlight=False,
    )
    return report.as_json(found), report.sentence(found)


def _estimated(trials: Sequence[Trial], target: Silicon, console: Console) -> tuple[list[dict[str, Any]], str]:
    console.print(report.estimated_table(trials))
    families = {(t.problem.direction, t.config.family) for t in trials}
    good = sum(t.state is TrialState.OK for t in trials)
    distinct = len({(t.problem.direction, t.config) for t in trials})
    text = (
        f"No GPU: {distinct} candidates of {len(families)} families compiled for {target.arch} ({good} of {len(trials)} "
        "pairs of candidate and problem are valid), ranked by an estimate; nothing was timed."
    )
    ranked = [
        {
            "direction": t.problem.direction,
            "rows": t.problem.rows,
            "hidden": t.problem.hidden,
            "candidate": t.config.label(),
            "estimate_us": t.estimate_us,
        }
        for t in sorted((t for t in trials if t.estimate_us), key=lambda t: t.estimate_us or 0.0)
    ]
    return ranked, text


def _failures(progress: SweepProgress, console: Console) -> None:
    if progress.failures:
        counts = ", ".join(f"{count} {state.value}" for state, count in sorted(progress.failures.items()))
        console.print(f"without a time: {counts} (tunegen show trials --state ... names the reasons)", markup=False)


def show_rows(what: str, db: Path, as_json: bool, filters: dict[str, Any]) -> None:
    """Print winners or trials."""
    with Store.read(db) as store:
        rows = store.winners(**filters) if what == "winners" else store.trials(**filters)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    console = Console()
    if not rows:
        console.print(f"no {what} match in {db}")
        return
    columns = ("direction", "rows", "hidden", "x_dtype", "family", "parameters", "kind", "us", "score", "estimate_us")
    shown = [*columns, *(("state", "stage", "reason") if what == "trials" else ()), "silicon"]
    table = Table(box=box.SIMPLE_HEAD)
    for name in shown:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in shown))
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def render_kernel(problem: Problem, given: Config | None, db: Path, arch: str, save_rstd: bool) -> str:
    """The text of the kernel file for `given`, else for the stored winner, else for the built-in default."""
    from .render import render

    spec, space = op_spec(problem.op), load_space(problem.op)
    config = given or _stored_winner(problem, db) or space.default(problem, silicon.of_arch(arch))
    if config is None or config.family == "torch":
        raise TunegenError(f"{problem.label()} is answered by torch's own op; name a family to see its kernel")
    renderings = spec.flags(problem, config)
    flags = next((f for f in renderings if f.get("save_rstd", save_rstd) == save_rstd), renderings[0])
    return render(problem.op, f"{problem.direction}_{config.family}", flags).text


def _stored_winner(problem: Problem, db: Path) -> Config | None:
    try:
        with Store.read(db) as store:
            rows = store.winners(
                direction=problem.direction,
                hidden=problem.hidden,
                rows=problem.rows,
                x_dtype=problem.x_dtype,
                casting=problem.casting,
                kind="measured",
            )
    except StoreError:
        return None
    return Config.of(rows[0]["family"], json.loads(rows[0]["parameters"])) if rows else None
