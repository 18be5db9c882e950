"""`tunegen families`: the algorithms that compete, which problems each is for, and its parameters."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

from .cli_options import DESCRIBES_PROBLEMS, json_option, op_option, problem_of, problem_options
from .expressions import Rule
from .model import DIRECTIONS, Problem, Silicon
from .render import SUFFIX, templates
from .space import ALWAYS, MEANINGS, Family, SearchSpace, load_space

MARGIN = " " * 31


@click.command("families")
@op_option
@problem_options(rows=None, required=False)
@click.option("--arch", help="With --hidden and --rows: on this target. [default: this GPU, else sm_90]")
@json_option
@click.pass_context
def families_command(ctx: click.Context, /, op: str, arch: str | None, as_json: bool, **options: Any) -> None:
    """The algorithms that compete, the problems that each is for, and its parameters.

    With --hidden and --rows also how many candidates of each there are for that problem.

    Example: tunegen families --hidden 65536 --rows 1024
    """
    space, problems = load_space(op), _problems(ctx, {**options, "op": op})
    target = _target(arch) if problems else None
    rows = [_row(space, family, problems.get(family.direction), target) for family in space.members.values()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        _print(row, problems.get(row["direction"]), target)
    for name in sorted(set[str]().union(*map(_names, space.members.values())), key=[*MEANINGS].index):
        click.echo(f"{'where':9}{name:22}{MEANINGS[name]}")


def _problems(ctx: click.Context, options: dict[str, Any]) -> dict[str, Problem]:
    """The problem that is asked about, by direction; {} where none is. Raises click.UsageError for half of one."""
    if None not in (options["hidden"], options["rows"]):
        return {direction: problem_of({**options, "direction": direction}) for direction in DIRECTIONS}
    for name in (*DESCRIBES_PROBLEMS, "arch"):
        if name not in ("op", "direction") and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"--{name.replace('_', '-')} is of a problem, which takes --hidden and --rows; give both, or none of it"
            )
    return {}


def _target(arch: str | None) -> Silicon:
    from . import silicon
    from .commands import target_of

    return target_of(arch) or silicon.query(0)


def _row(space: SearchSpace, family: Family, problem: Problem | None, target: Silicon | None) -> dict[str, Any]:
    """What there is to say of a family, as plain values; of a problem whether it is for that, with how many configs."""
    row: dict[str, Any] = {
        "direction": family.direction,
        "family": family.name,
        "about": family.about,
        "baseline": family.baseline,
        "template": f"{space.op}/{family.template}{SUFFIX}" if family.template in templates(space.op) else None,
        "when": None if family.when is ALWAYS else family.when.expression.text,
        "parameters": {
            key: f"={domain.expression.text}" if isinstance(domain, Rule) else list(domain)
            for key, domain in family.parameters.items()
        },
    }
    if problem is not None and target is not None:
        row["applies"] = family in space.families(problem, target)
        row["candidates"] = len(space.candidates(problem, target, family.name))
    return row


def _print(row: dict[str, Any], problem: Problem | None, target: Silicon | None) -> None:
    click.echo(f"{row['direction']:9}{row['family']:22}{row['about']}{' (baseline)' if row['baseline'] else ''}")
    if row["template"] is None:
        click.echo(f"{MARGIN}NOT THERE: its template is missing, so no kernel of it can be made; reinstall tunegen")
    click.echo(f"{MARGIN}when: {row['when'] or 'always'}")
    if problem is not None and target is not None:
        none = "its constraints leave no candidate" if row["applies"] else "not for this problem"
        click.echo(f"{MARGIN}{problem.label()} on {target.arch}: {_counted(row['candidates']) or none}")
    for name, choices in row["parameters"].items():
        click.echo(f"{MARGIN}{name}: {choices if isinstance(choices, str) else ', '.join(map(str, choices))}")


def _counted(candidates: int) -> str:
    return f"{candidates} candidate{'s' * (candidates > 1)}" if candidates else ""


def _names(family: Family) -> set[str]:
    """What the printed expressions of a family use that needs a word."""
    rules = [family.when, *(domain for domain in family.parameters.values() if isinstance(domain, Rule))]
    return {name for rule in rules for name in rule.expression.names} & MEANINGS.keys()
