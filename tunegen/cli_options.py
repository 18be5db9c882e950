"""Options that commands share, and what their values become."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console

from . import paths
from .model import CASTINGS, DIRECTIONS, DTYPE_BYTES, RMS_NORM, Problem, TrialState, Value
from .ops import OPS
from .policies import FASTEST, INVARIANT, INVARIANT_ROWS, POLICIES, checked
from .recorded import load_recording

if TYPE_CHECKING:
    from .store import Store

LARGEST = 2**31 - 1
FILTERS = ("hidden", "rows", "direction", "x_dtype", "op", "policy", "family", "state", "kind")
"""Columns of the database that commands filter by."""
PLAIN_WIDTH = 1000
"""Columns where no terminal is: a row of a table stays one line, for grep."""


def path_of(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """The path that an option names; `~` is the home folder."""
    try:
        return None if value is None else Path(value).expanduser()
    except RuntimeError as error:  # ~somebody
        raise click.BadParameter(f"{value}: {error}") from error


def database(ctx: click.Context, param: click.Parameter, value: str | None) -> Path:
    """The path that `--db` or the environment names."""
    return path_of(ctx, param, value or None) or paths.database()


def new_folder(path: Path, what: str = "the database") -> str:
    """What to say of a file that is made in a folder that is not there, which makes that too; else ""."""
    folder = path.absolute().parent
    return "" if folder.exists() else f"new folder for {what}: {folder}"


def numbers(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> list[int]:
    """Positive integers, separated by commas, the option given once or several times."""
    texts = (part.strip() for group in value for part in group.split(","))
    return [_size_of(text, "one or several, such as 4096 or 4096,5120") for text in texts]


def _size_of(text: str, wanted: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
        raise click.BadParameter(f"{text!r} is no integer; give {wanted}")
    if not 1 <= int(text) <= LARGEST:
        raise click.BadParameter(f"{int(text)} is not in the range from 1 to {LARGEST}")
    return int(text)


def size(value: str | int) -> int:
    """One width or row count, refused in the words of `numbers`."""
    return _size_of(str(value).strip(), "one number, such as 4096")


def policy_in_force(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    """The policy of `--policy`, else that of the environment, under which calls of the same shell are."""
    try:
        return value or checked(paths.policy() or FASTEST, "the variable TUNEGEN_POLICY")
    except ValueError as error:
        raise click.UsageError(str(error)) from error


dtypes = click.Choice(list(DTYPE_BYTES))
weight_option = click.option(
    "--weight-dtype", type=click.Choice([*DTYPE_BYTES, "none"]), help="Of the weight. [default: as --dtype]"
)
offset_option = click.option("--offset", is_flag=True, help="For norms that add to the weight (Gemma).")
op_option = click.option(
    "--op", type=click.Choice(list(OPS)), default=RMS_NORM, show_default=True, help="The operator."
)
sum_option = click.option(
    "--sum-in-fp32", is_flag=True, help="Forward add_rms_norm whose norm reads the sum before it is rounded."
)
policy_option = click.option(
    "--policy",
    type=click.Choice(POLICIES),
    callback=policy_in_force,
    help="What results must be beside right. [default: $TUNEGEN_POLICY, else fastest]",
)
frozen_option = click.option("--frozen-weight", is_flag=True, help="Backward without the weight's gradient.")


def problem_options(rows: int | None, *, required: bool = True) -> Callable[[Any], Any]:
    """The options that describe one problem; `rows` is the default of --rows, None if it must be given. Where no
    problem is `required`, --hidden and --rows may be None."""
    told = {"required": required} if rows is None else {"default": rows, "show_default": True}
    options = (
        click.option("--hidden", type=size, required=required, help="Width N."),
        click.option("--rows", type=size, help="Row count M.", **told),
        click.option("--dtype", type=dtypes, default="bf16", show_default=True, help="Of x."),
        weight_option,
        click.option(
            "--casting", type=click.Choice(CASTINGS), default="fp32", show_default=True, help="Where it rounds."
        ),
        offset_option,
        sum_option,
        frozen_option,
        policy_option,
    )

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def filter_options(command: Any) -> Any:
    """The options that say which rows of the database are meant; the command gets those given, by column, as keyword
    arguments."""
    options = (
        click.option("--hidden", type=size, help="Only this width."),
        click.option("--rows", type=size, help="Only this row count."),
        click.option("--direction", type=click.Choice(DIRECTIONS), help="Only this direction."),
        click.option("--dtype", "x_dtype", type=dtypes, help="Only this dtype of x."),
        click.option("--op", type=click.Choice(list(OPS)), help="Only this operator."),
        click.option("--policy", type=click.Choice(POLICIES), help="Only what was tuned under this policy."),
        click.option("--family", help="Only this algorithm."),
        click.option("--state", type=click.Choice([s.value for s in TrialState]), help="Only trials that ended so."),
        click.option(
            "--kind", type=click.Choice(["measured", "estimated", "baseline"]), help="Only results of this kind."
        ),
    )

    @functools.wraps(command)
    def filtered(**given: Any) -> Any:
        filters = {name: given.pop(name) for name in FILTERS}
        return command(**given, **{name: value for name, value in filters.items() if value is not None})

    for option in reversed(options):
        filtered = option(filtered)
    return filtered


def check_family(store: Store, filters: Mapping[str, object]) -> None:
    """Raise click.BadParameter for a family that neither the database, nor a search space, nor torch has."""
    name = filters.get("family")
    if name is None or store.rows("SELECT 1 FROM trials WHERE family = :name LIMIT 1", {"name": name}):
        return
    from .evaluate import COMPILED, TORCH
    from .space import load_space

    known = dict.fromkeys(family for op in OPS for _, family in load_space(op).members)
    if name not in (*known, TORCH.family, COMPILED.family):
        told = f"unknown family {name!r}; known are {', '.join([*known, TORCH.family, COMPILED.family])}"
        raise click.BadParameter(told, param_hint="--family")


db_option = click.option("--db", callback=database, help="Database file. [default: $TUNEGEN_DB, else cache/tune.db]")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


DESCRIBES_PROBLEMS = (
    *("op", "hidden", "rows", "dtype", "weight_dtype", "direction", "casting", "offset", "sum_in_fp32"),
    *("frozen_weight", "policy"),
)


def recorded(ctx: click.Context, path: Path) -> dict[Problem, int]:
    """The problems of a recording with their counts, if no option describes problems too."""
    for name in DESCRIBES_PROBLEMS:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--from and --{name.replace('_', '-')} both say what to tune; give one of them up")
    return load_recording(path).counts()


def problem_of(options: dict[str, Any]) -> Problem:
    """The problem that a command's options describe; `op`, `hidden`, `rows`, `direction`, `dtype` and `casting` are
    single values. Raises click.UsageError where they contradict each other."""
    weight = None if options["weight_dtype"] == "none" else options["weight_dtype"] or options["dtype"]
    if weight is None and (options["offset"] or options["frozen_weight"]):
        raise click.UsageError(
            "--weight-dtype none leaves nothing for --offset or --frozen-weight; give one of them up"
        )
    if options["sum_in_fp32"] and options["op"] == RMS_NORM:
        raise click.UsageError(f"--sum-in-fp32: {RMS_NORM} adds nothing; give --op add_rms_norm too, or leave it out")
    forward_16_bit = options["direction"] == "forward" and DTYPE_BYTES[options["dtype"]] == 2
    return Problem(
        op=options["op"],
        direction=options["direction"],
        hidden=options["hidden"],
        rows=options["rows"],
        x_dtype=options["dtype"],
        weight_dtype=weight,
        casting=options["casting"],
        offset=options["offset"],
        weight_grad=options["direction"] == "backward" and weight is not None and not options["frozen_weight"],
        sum_in_fp32=options["sum_in_fp32"] and forward_16_bit,  # elsewhere it makes no difference
        policy=options["policy"],
    )


def check_frozen(frozen: bool, directions: Sequence[str]) -> None:
    """Raises click.UsageError for --frozen-weight where it makes no difference."""
    if frozen and "backward" not in directions:
        raise click.UsageError("--frozen-weight: forward computes no gradient; take backward too, or leave it out")


def rows_to_sweep(rows: Sequence[int], policy: str, default: Sequence[int]) -> Sequence[int]:
    """The row counts of `--rows`; "invariant" is tuned at one. Raises click.UsageError where another is given."""
    if policy != INVARIANT:
        return rows or default
    if {*rows} - {INVARIANT_ROWS}:
        raise click.UsageError(
            f"--policy {INVARIANT} has one kernel for all row counts, tuned at {INVARIANT_ROWS}; leave --rows out"
        )
    return (INVARIANT_ROWS,)


def named_gpus(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """What `--gpus` gives, as it is: all, or numbers; whether they are there is for `devices_of`, which asks torch."""
    for part in [] if value in (None, "all") else str(value).split(","):
        if not re.fullmatch(r"[0-9]{1,4}", part.strip()):
            raise click.BadParameter(f"{part.strip()!r} is no number of a GPU; give all, or 0,1")
    return value


def devices_of(text: str | None) -> list[int]:
    """CUDA devices of what `named_gpus` returns: the first without it, all, or those that are named. Raises
    click.BadParameter for one that is not there."""
    import torch

    count = torch.cuda.device_count()
    if text == "all":
        return list(range(count))
    found = list(dict.fromkeys(int(part) for part in (text or "0").split(",")))
    if absent := [number for number in found if number >= count]:
        raise click.BadParameter(f"no GPU {absent[0]}: {count} are visible to torch", param_hint="--gpus")
    return found


def console_for(to_stderr: bool = False) -> Console:
    """For text; it goes to standard error where standard output is for JSON."""
    console = Console(
        stderr=to_stderr,
        force_terminal=False if paths.continuous_integration() else None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def parameters_of(texts: Sequence[str]) -> dict[str, Value]:
    """The parameters of NAME=VALUE, each given once. Raises click.BadParameter."""
    found: dict[str, Value] = {}
    for name, value in map(parameter_of, texts):
        if name in found:
            raise click.BadParameter(f"{name} is given twice, as {found[name]} and {value}; leave one out")
        found[name] = value
    return found


def parameter_of(text: str) -> tuple[str, Value]:
    """Name and value of NAME=VALUE. Raises click.BadParameter."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is no NAME=VALUE, such as num_warps=8 or RSTD=saved")
    return name, int(value) if re.fullmatch(r"-?[0-9]{1,20}", value) else value
