"""The `tunegen` command."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from . import __version__, paths
from .errors import TunegenError
from .model import CASTINGS, DIRECTIONS, DTYPE_BYTES, Config, Problem, Value
from .space import load_space

DEFAULT_ROWS = (1, 64, 1024, 4096, 16384)


class _Group(click.Group):
    """Turns an error of tunegen into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TunegenError as error:
            click.echo(f"tunegen: {error}", err=True)
            ctx.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Tune RMSNorm kernels for this GPU and look at what was found."""


def _database(ctx: click.Context, param: click.Parameter, value: str | None) -> Path:
    return Path(value).expanduser() if value else paths.database()


class _Numbers(click.ParamType[tuple[int, ...]]):
    """Positive integers, separated by commas."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no positive integer or list of them, such as 4096 or 4096,5120", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{min(numbers)} is below 1, the smallest size", param, ctx)
        if max(numbers) >= 2**31:
            self.fail(f"{max(numbers)} is above {2**31 - 1}, the largest size", param, ctx)
        return numbers


db_option = click.option("--db", callback=_database, help="Database file. [default: $TUNEGEN_DB, else cache/tune.db]")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@main.command()
@click.option(
    "--hidden", type=_Numbers(), required=True, multiple=True, help="Widths N; several with commas or repeated."
)
@click.option(
    "--rows", type=_Numbers(), multiple=True, help=f"Row counts M. [default: {','.join(map(str, DEFAULT_ROWS))}]"
)
@click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), multiple=True, default=["bf16"], show_default=True)
@click.option("--weight-dtype", type=click.Choice([*DTYPE_BYTES, "none"]), help="Of the weight. [default: as --dtype]")
@click.option("--direction", type=click.Choice(DIRECTIONS), multiple=True, default=DIRECTIONS, show_default=True)
@click.option("--casting", type=click.Choice(CASTINGS), multiple=True, default=["fp32"], show_default=True)
@click.option("--offset", is_flag=True, help="For norms that add to the weight (Gemma).")
@click.option("--frozen-weight", is_flag=True, help="Backward without the weight's gradient.")
@click.option(
    "--budget", type=click.IntRange(min=1), default=200, show_default=True, help="Candidates a problem, at most."
)
@click.option(
    "--arch", help="Compile and rank for this target, such as sm_90, without timing. [default where no GPU is: sm_90]"
)
@click.option("--seed", type=int, default=0, show_default=True)
@db_option
@json_option
def sweep(**options: Any) -> None:
    """Search, verify, time and store kernels for the given widths.

    Example: tunegen sweep --hidden 4096,5120 --direction forward
    """
    from .commands import run_sweep

    run_sweep(_problems(options), _console(options["as_json"]), options)


def _problems(options: dict[str, Any]) -> list[Problem]:
    hidden = [n for group in options["hidden"] for n in group]
    rows = [m for group in options["rows"] for m in group] or list(DEFAULT_ROWS)
    found = []
    for direction, dtype, casting, n, m in product(
        options["direction"], options["dtype"], options["casting"], hidden, rows
    ):
        weight = None if options["weight_dtype"] == "none" else options["weight_dtype"] or dtype
        trains = direction == "backward" and weight is not None and not options["frozen_weight"]
        offset = options["offset"] and weight is not None
        found.append(Problem("rms_norm", direction, n, m, dtype, weight, casting, offset, trains))
    return list(dict.fromkeys(found))


def _console(as_json: bool) -> Console:
    """Progress goes to standard error where standard output is for JSON."""
    console = Console(stderr=as_json)
    return console if console.is_terminal else Console(stderr=as_json, width=200)


@main.command()
@click.argument("what", type=click.Choice(["winners", "trials"]), default="winners")
@click.option("--hidden", type=int)
@click.option("--rows", type=int)
@click.option("--direction", type=click.Choice(DIRECTIONS))
@click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)))
@click.option("--family")
@click.option("--state")
@click.option("--kind", type=click.Choice(["measured", "estimated", "baseline"]))
@db_option
@json_option
def show(what: str, db: Path, as_json: bool, **filters: Any) -> None:
    """Winners or all trials in the database."""
    from .commands import show_rows

    filters["x_dtype"] = filters.pop("dtype")
    show_rows(what, db, as_json, {k: v for k, v in filters.items() if v is not None})


@main.command()
@click.argument("direction", type=click.Choice(DIRECTIONS))
@click.argument("family", required=False)
@click.argument("parameters", nargs=-1)
@click.option("--hidden", type=int, required=True)
@click.option("--rows", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), default="bf16", show_default=True)
@click.option("--casting", type=click.Choice(CASTINGS), default="fp32", show_default=True)
@click.option("--offset", is_flag=True)
@click.option("--save-rstd", is_flag=True, help="Forward as it runs when a gradient is wanted.")
@click.option("--arch", default="sm_90", show_default=True, help="For defaults where no GPU is.")
@db_option
def render(direction: str, family: str | None, parameters: tuple[str, ...], **options: Any) -> None:
    """Print the exact kernel text of the winner, or of FAMILY with PARAMETERS such as RSTD=saved.

    Example: tunegen render backward persistent_partials RSTD=saved --hidden 4096
    """
    from .commands import render_kernel

    trains = direction == "backward"
    problem = Problem(
        "rms_norm",
        direction,
        options["hidden"],
        options["rows"],
        options["dtype"],
        options["dtype"],
        options["casting"],
        options["offset"],
        trains,
    )
    given = Config.of(family, dict(_parameter(text) for text in parameters)) if family else None
    sys.stdout.write(render_kernel(problem, given, options["db"], options["arch"], options["save_rstd"]))


def _parameter(text: str) -> tuple[str, Value]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is no NAME=VALUE, such as num_warps=8 or RSTD=saved")
    return name, int(value) if value.lstrip("-").isdigit() else value


@main.command()
@json_option
def families(as_json: bool) -> None:
    """The algorithms that compete, with their parameters."""
    space = load_space("rms_norm")
    rows = [
        {"direction": direction, "family": name, "about": family.about, "baseline": family.baseline}
        for (direction, name), family in space.members.items()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['direction']:9}{row['family']:22}{row['about']}{' (baseline)' if row['baseline'] else ''}")


if __name__ == "__main__":
    main()
