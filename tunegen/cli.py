"""The `tunegen` command."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import click

from . import __version__, paths
from .cli_options import (
    check_frozen,
    console_for,
    db_option,
    dtypes,
    filter_options,
    frozen_option,
    json_option,
    named_gpus,
    numbers,
    offset_option,
    op_option,
    parameters_of,
    path_of,
    policy_option,
    problem_of,
    problem_options,
    recorded,
    rows_to_sweep,
    sum_option,
    weight_option,
)
from .early import started_early, stop_in_order
from .errors import TunegenError
from .exchange import export_command, import_command
from .families import families_command
from .model import CASTINGS, DIRECTIONS, Problem
from .ops import OPS
from .processes import interrupts_held

DEFAULT_ROWS = (1, 64, 1024, 4096, 16384)


class _Group(click.Group):
    """Turns an error of tunegen into one line and exit code 2, and an interrupt into 130: click would end with 1, which
    is the verdict of a norm that fails its gates."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if not paths.is_somewhere():
                raise TunegenError("the current folder has been deleted: change to one that is there")
            return super().invoke(ctx)
        except (TunegenError, UnicodeError) as error:  # an argument may hold bytes that are no text
            click.echo(f"tunegen: {' '.join(str(error).splitlines())}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("tunegen: interrupted", err=True)
            ctx.exit(130)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Tune RMSNorm kernels for this GPU and look at what was found."""


@main.command()
@click.option(
    "--hidden", callback=numbers, multiple=True, help="Widths N; several with commas or repeated. Or use --from."
)
@click.option("--from", "recording", callback=path_of, help="Tune the problems of a file by tunegen.record.")
@click.option(
    "--rows", callback=numbers, multiple=True, help=f"Row counts M. [default: {','.join(map(str, DEFAULT_ROWS))}]"
)
@click.option("--dtype", type=dtypes, multiple=True, default=["bf16"], show_default=True, help="Of x; may be repeated.")
@weight_option
@click.option(
    "--direction", type=click.Choice(DIRECTIONS), multiple=True, default=DIRECTIONS, show_default=True, help="Or one."
)
@click.option(
    "--casting",
    type=click.Choice(CASTINGS),
    multiple=True,
    default=["fp32"],
    show_default=True,
    help="Round once, at the end, or as Hugging Face's Llama; may be repeated.",
)
@offset_option
@op_option
@sum_option
@frozen_option
@policy_option
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Candidates a problem, at most, on a GPU.",
)
@click.option(
    "--gpus", callback=named_gpus, help="all, or numbers such as 0,1: several GPUs share the work. [default: 0]"
)
@click.option(
    "--arch", help="Compile and rank for this target, such as sm_90, without timing. [default where no GPU is: sm_90]"
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the inputs and the search."
)
@db_option
@json_option
@click.pass_context
def sweep(ctx: click.Context, /, **options: Any) -> None:
    """Search, verify, time and store kernels for the given widths.

    Example: tunegen sweep --hidden 4096,5120 --direction forward
    """
    if options["gpus"] is not None and options["arch"] is not None:
        raise click.UsageError("--arch compiles without a GPU, --gpus tunes on some; give one of them up")
    counts = None
    if options["recording"] is not None:
        counts = recorded(ctx, options["recording"])
        problems = list(counts)
    elif options["hidden"]:
        problems = _problems_of(options)
    else:
        raise click.UsageError(
            "give the widths to tune with --hidden, such as --hidden 4096, or a recording with --from"
        )
    stop_in_order()
    with started_early(options["gpus"], options["arch"], options["seed"]) as early:
        with interrupts_held():
            from .commands import run_sweep

        run_sweep(problems, console_for(options["as_json"]), options, counts, early)


def _problems_of(options: dict[str, Any]) -> list[Problem]:
    """Every combination of what may be given several times, once."""
    keys = ("direction", "dtype", "casting", "hidden", "rows")
    check_frozen(options["frozen_weight"], options["direction"])
    options["rows"] = rows_to_sweep(options["rows"], options["policy"], DEFAULT_ROWS)
    combined = product(*(options[key] for key in keys))
    return list(dict.fromkeys(problem_of(options | dict(zip(keys, values, strict=True))) for values in combined))


@main.command()
@click.argument("what", type=click.Choice(["winners", "trials"]), default="winners")
@filter_options
@db_option
@json_option
def show(what: str, db: Path, as_json: bool, **filters: Any) -> None:
    """Winners or all trials in the database, of all policies unless --policy names one.

    Example: tunegen show trials --state compile
    """
    from .commands import show_rows

    show_rows(what, db, None if as_json else console_for(), filters)


@main.command()
@click.argument("direction", type=click.Choice(DIRECTIONS))
@click.argument("family", required=False)
@click.argument("parameters", nargs=-1)
@op_option
@problem_options(rows=4096)
@click.option("--save-rstd", is_flag=True, help="Forward as it runs when a gradient is wanted.")
@click.option("--arch", help="Winner or default of this target. [default: this GPU's, else sm_90]")
@db_option
def render(family: str | None, parameters: tuple[str, ...], **options: Any) -> None:
    """Print the exact kernel text of the winner, or of FAMILY with PARAMETERS such as RSTD=saved.

    The winner is a measured one; without, it is the built-in default. The first line is a comment that says which one
    it is; the file that is launched begins behind it.

    Example: tunegen render backward persistent_partials RSTD=saved --hidden 4096
    """
    from .rendered import render_kernel

    check_frozen(options["frozen_weight"], (options["direction"],))
    given = (family, parameters_of(parameters)) if family else None
    origin, text = render_kernel(
        problem_of(options), given, options["db"], options["arch"], save_rstd=options["save_rstd"]
    )
    click.echo(f"# {' '.join(origin.split())}\n{text}", nl=False)


@main.command("try")
@click.argument("what")
@click.argument("family")
@click.argument("parameters", nargs=-1)
@problem_options(rows=4096)
@click.option("--arch", help="Compile for this target, such as sm_90, without timing. [default where no GPU is: sm_90]")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the inputs.")
@json_option
def try_config(what: str, family: str, parameters: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Render, compile, verify and time one config of WHAT, such as rms_norm.forward; nothing is stored.

    FAMILY is one of `tunegen families`, or the path of a template file. PARAMETERS are NAME=VALUE; what is not given
    comes from the built-in default. Ends with exit code 1 if the config is wrong; with 3 if it compiles and nothing was
    verified, for want of a GPU or since --arch names one.

    Example: tunegen try rms_norm.forward single_block --hidden 4096 --rows 16384 num_warps=8
    """
    from .single import try_one

    op, _, direction = what.partition(".")
    if op not in OPS or direction not in DIRECTIONS:
        known = [f"{name}.{way}" for name in OPS for way in DIRECTIONS]
        raise click.BadParameter(f"{what!r} is none of {', '.join(known)}", param_hint="WHAT")
    check_frozen(options["frozen_weight"], (direction,))
    given, problem = parameters_of(parameters), problem_of({**options, "op": op, "direction": direction})
    console = None if as_json else console_for()
    click.get_current_context().exit(try_one(problem, family, given, options["arch"], options["seed"], console))


@main.command()
@op_option
@problem_options(rows=None)
@click.option(
    "--direction", type=click.Choice(DIRECTIONS), multiple=True, default=DIRECTIONS, show_default=True, help="Or one."
)
@click.option("--arch", help="On this target. [default: this GPU, else sm_90]")
@db_option
@json_option
def explain(direction: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Which kernel answers a call, from which trial, how far away that was measured, and what would be next.

    Example: tunegen explain --hidden 5120 --rows 300
    """
    from .single import explain_problems

    check_frozen(options["frozen_weight"], direction)
    problems = [problem_of({**options, "direction": one}) for one in direction]
    explain_problems(problems, options["db"], options["arch"], None if as_json else console_for())


@main.command()
@click.option(
    "--steps", type=click.IntRange(100, 10**6), default=500, show_default=True, help="In each of five training runs."
)
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="Of the model trained."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of inputs and weights.")
@click.option("--device", help="Such as cuda:1, or cpu for torch's operators. [default: the GPU]")
@click.option("--out", callback=path_of, help="Folder for curves.png and gate.json. [default: none]")
@json_option
@click.pass_context
def gate(ctx: click.Context, /, **options: Any) -> None:
    """Three gates before anyone trains a Qwen3 with the norm: float64, bf16, loss curves.

    Gradients and values in float64; errors in bf16 beside those of Hugging Face's norm; and the loss curves of a small
    Qwen3 with random weights. Ends with exit code 1, and the reasons, if one of them fails; with 2 if they cannot run,
    or what they found cannot be saved; with 3 if they passed on torch's operators and no kernel was checked, for want
    of a GPU say, which --device cpu asks for and makes 0; with 130 if interrupted.

    Example: tunegen gate --steps 1000 --out gates
    """
    from .gates.command import run_gate

    ctx.exit(run_gate(console_for(options["as_json"]), __version__, **options))


main.add_command(export_command)
main.add_command(import_command)
main.add_command(families_command)

if __name__ == "__main__":
    main()
