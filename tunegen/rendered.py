"""`tunegen render`: the kernel of a config, and whether a call is ever answered by it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from . import silicon
from .commands import target_of
from .dispatch import rejected, rungs
from .domains import Domain, combinations
from .errors import StoreError, TunegenError
from .expressions import Rule, listed
from .lookup import database_exists
from .model import Config, Problem, Silicon, Value
from .ops import op_spec
from .space import Family, load_space, names_of
from .store import Store


def render_kernel(
    problem: Problem, given: tuple[str, dict[str, Value]] | None, db: Path, arch: str | None, *, save_rstd: bool
) -> tuple[str, str]:
    """What is rendered in one line, and the text of its kernel file: `given`, else what would be launched."""
    from .render import rendering

    named = target_of(arch)
    target = named or silicon.query(0)
    config, origin = _given(problem, *given, db, target) if given else _launched(problem, db, target)
    source = rendering(problem, config, op_spec(problem.op), save_rstd=save_rstd)
    here = f"; no GPU here, so for {target.arch}" if named and arch is None else ""
    return f"{problem.label()}: {config.label()} ({origin}{here})", source.text


def _given(problem: Problem, name: str, parameters: dict[str, Value], db: Path, target: Silicon) -> tuple[Config, str]:
    """The config as far as it is given, whole if that says all. The text depends on words: those that are not given are
    the first valid config's that has what is given, else the first choices of the search space."""
    space = load_space(problem.op)
    family = space.family(problem.direction, name)
    if family is None:
        raise TunegenError(space.unknown(problem.direction, name))
    names = names_of(problem, target)
    _check_given(family, parameters, names)
    choices = {key: domain for key, domain in family.parameters.items() if not isinstance(domain, Rule)}
    domains = {**family.parameters, **{key: (value,) for key, value in parameters.items()}}
    first = next(family.configs(domains, names), None) or Config.of(name, next(combinations(family.parameters, names)))
    words = {key: value for key, value in first.parameters if isinstance(value, str)}
    chosen = {**words, **parameters}
    domains = {**family.parameters, **{key: (value,) for key, value in chosen.items()}}
    whole = chosen.keys() >= choices.keys()
    config = Config.of(name, next(combinations(domains, names)) if whole else chosen)
    obstacle = _obstacle(problem, family, config, domains, db, target)
    return config, f"as given; never launched here: {obstacle}" if obstacle else "as given"


def _obstacle(
    problem: Problem, family: Family, config: Config, domains: Mapping[str, Domain], db: Path, target: Silicon
) -> str | None:
    """Why no call is answered by `config`, which may be a part of one; `domains` are its values, and choices of the
    rest."""
    names = names_of(problem, target)
    if not any(family.configs(domains, names)):
        part = family.when.holds(names) and len(config.parameters) < len(family.parameters)
        return "no valid config has that" if part else load_space(problem.op).check(problem, target, config)
    if family.baseline:
        return "it is a baseline"
    with suppress(StoreError):  # a database that is missing or no good knows nothing against it
        Store.read(db).close()
        if rejected(db, problem, target)(config):
            return "the gate found it wrong"
    return None


def _check_given(family: Family, parameters: dict[str, Value], names: Mapping[str, Value]) -> None:
    """Refuse a parameter that the family does not have, a value that it may not have, or a word where one is
    computed that is a number."""
    for name, value in parameters.items():
        if name not in family.parameters:
            raise TunegenError(f"{family.name} has no parameter {name!r}; it has {listed(family.parameters)}")
        domain = family.parameters[name]
        if isinstance(domain, Rule):
            computed = next(combinations(family.parameters, names))[name] if isinstance(value, str) else value
            if type(computed) is not type(value):
                rule = domain.expression.text
                raise TunegenError(f"{name} of {family.name} is {value!r}, but is computed, here {computed}: {rule}")
        elif value not in domain:
            raise TunegenError(f"{name} of {family.name} is {value!r}, but may be {listed(domain)}")


def _launched(problem: Problem, db: Path, target: Silicon) -> tuple[Config, str]:
    """What answers a call. Raises TunegenError where that is torch's own op."""
    if database_exists(db) or (db.exists() and not db.is_file()):
        Store.read(db).close()  # says what is wrong with it, and leaves it where it is
    bucket = replace(problem, rows=problem.rows_bucket)  # as a call looks it up
    config, why, _ = next(rungs(db, bucket, target))
    if config is None:
        raise TunegenError(f"{problem.label()} is answered by torch's own op ({why}); name a family to see its kernel")
    return config, why
