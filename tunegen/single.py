"""Commands about one call or one config: explain and try."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from . import paths, silicon
from .attempt import attempt, config_of
from .commands import target_of
from .errors import TunegenError
from .explanation import explain_problem, with_torch_backward
from .lookup import database_exists
from .model import Problem, Value
from .render import SUFFIX
from .store import Store
from .worker import Worker

UNVERIFIED = 3
"""Exit code where a config compiles and nothing was verified, for want of a GPU say: no verdict, as that of `gate`."""

CPU_CHECK = "python -m tests tests/test_kernels_interpreted.py -k"
"""What runs a template on the CPU and compares its values with float64, in a checkout; the template's name follows."""


def explain_problems(problems: Sequence[Problem], db: Path, arch: str | None, console: Console | None) -> None:
    """Print what answers each problem, as text or, without a console, as JSON."""
    named = target_of(arch)
    target = named or silicon.query(0)
    if named and arch is None:
        click.echo(f"No GPU here: this is what would answer on {target.arch} ({target.name}).", err=True)
    if paths.disabled():
        click.echo("TUNEGEN_DISABLE is set: torch answers every call; this is what would answer without it.", err=True)
    if database_exists(db) or (db.exists() and not db.is_file()):
        Store.read(db).close()  # says what is wrong with it, and leaves it where it is
    found = with_torch_backward([explain_problem(db, problem, target) for problem in problems], training=False)
    if console is None:
        click.echo(json.dumps([one.as_json() for one in found], indent=2))
        return
    for one in found:
        click.echo(one.problem.label())
        _print_fields(console, one.facts())


def try_one(
    problem: Problem,
    family: str,
    given: Mapping[str, Value],
    arch: str | None,
    seed: int,
    console: Console | None,
) -> int:
    """Print what becomes of one config, as text or, without a console, as JSON; returns the exit code: 0 if it is
    right, 1 if not, UNVERIFIED if it was compiled alone."""
    target = target_of(arch)
    if paths.interpreted():
        raise TunegenError("TRITON_INTERPRET is set: kernels cannot be compiled in this process; unset it to try one")
    with ExitStack() as stack:
        worker = None if target is not None else stack.enter_context(Worker(0, seed))
        on = target if worker is None else worker.start().silicon
        assert on is not None
        found = attempt(problem, config_of(problem, family, given, on), on, worker)
    if console is None:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        _print_fields(console, ((name, _plain(value)) for name, value in found.facts().items()))
    if not found.ok or found.verified:
        return 0 if found.ok else 1
    how = "No GPU: c" if arch is None else "C"
    click.echo(f"{how}ompiled for {on.arch}, neither verified nor timed.", err=console is None)
    click.echo(_cpu_check(problem.direction, family), err=console is None)
    return UNVERIFIED


def _cpu_check(direction: str, family: str) -> str:
    """How values are checked without a GPU."""
    if not family.endswith(SUFFIX):
        return f"Its values on the CPU, in a checkout: {CPU_CHECK} {direction}_{family}"
    name = Path(family).name.removesuffix(SUFFIX)
    return f"Its values on the CPU, once it is in templates/ and in the search space: {CPU_CHECK} {name}"


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_fields(console: Console, fields: Iterable[tuple[str, str]]) -> None:
    """A name and a value a line; a long value goes on below its beginning, a long word stays whole."""
    known = [(name, value) for name, value in fields if value]
    margin = max(len(name) for name, _ in known) + 4
    for name, value in known:
        click.echo(
            textwrap.fill(
                value,
                max(console.width, margin + 20),
                initial_indent=f"  {name}".ljust(margin),
                subsequent_indent=" " * margin,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
