"""What a search starts from: candidates by the model's estimate, and what won for neighbouring problems."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import NamedTuple

from .dispatch import triton_minor
from .estimate import estimate_us
from .model import PROTOCOL, Config, Problem, Silicon, Trial
from .ops import op_spec
from .plans import timed_plan
from .sampler import FamilySampler, Sampler
from .space import SearchSpace, load_space
from .store import Store

SIZE = ("rows", "hidden")
"""What neighbouring problems differ in."""
NEIGHBOURS = 3
"""Problems whose winners are tried first."""


class Winner(NamedTuple):
    """The best config of a problem of another size."""

    rows: int
    hidden: int
    config: Config


def ranked(problem: Problem, configs: Sequence[Config], silicon: Silicon) -> dict[Config, float]:
    """Microseconds by the model before anything is compiled; without those whose template cannot be planned."""
    spec = op_spec(problem.op)
    found: dict[Config, float] = {}
    for config in configs:
        with suppress(Exception):  # whatever a template does: compiling it will say why
            plan = timed_plan(spec, problem, config, silicon)
            found[config] = estimate_us(spec, problem, config, plan, None, silicon)
    return found


def neighbours(store: Store, problem: Problem, silicon: Silicon) -> list[Winner]:
    """What won on this GPU, with this Triton, for problems that differ in their size only."""
    same = {field.name: getattr(problem, field.name) for field in fields(problem) if field.name not in SIZE}
    key = {"silicon": silicon.name, "triton": triton_minor(), "protocol": PROTOCOL, "kind": "measured"}
    found = []
    for row in store.winners(**same, **key):
        size = row["rows"], row["hidden"]
        # One row of nonsense costs itself only: SQLite keeps what it is given.
        if all(type(n) is int and n > 0 for n in size) and size != (problem.rows, problem.hidden):
            with suppress(ValueError):
                found.append(Winner(*size, Config.read(row["family"], row["parameters"])))
    return found


def carried(space: SearchSpace, problem: Problem, silicon: Silicon, winners: Iterable[Winner]) -> list[Config]:
    """Winners of the nearest problems as configs of this one, the nearest first: values that follow from others are
    computed anew, and what is not valid here is left out."""

    def distance(winner: Winner) -> float:
        return abs(math.log2(winner.rows / problem.rows)) + abs(math.log2(winner.hidden / problem.hidden))

    known = {family.name for family in space.families(problem, silicon)}
    found: list[Config] = []
    for winner in sorted(winners, key=distance)[:NEIGHBOURS]:
        if winner.config.family in known:
            found += space.candidates(problem, silicon, winner.config.family, dict(winner.config.parameters))[:1]
    return list(dict.fromkeys(found))


def make_sampler(
    store: Store, problem: Problem, silicon: Silicon, seed: int, budget: int, standing: Sequence[Trial]
) -> Sampler:
    """The sampler of a problem, for `budget` candidates: it starts with the built-in default, winners of neighbouring
    problems, the model's ranks, and the trials that stand, which count as tried."""
    space = load_space(problem.op)
    leading = [*carried(space, problem, silicon, neighbours(store, problem, silicon)), space.default(problem, silicon)]
    seen = {t.config: t.measurement.score if t.measurement else None for t in standing}
    families: dict[str, FamilySampler] = {}
    for family in space.families(problem, silicon):
        candidates = space.candidates(problem, silicon, family.name)
        choices = space.choices(problem, silicon, family.name)
        own = {c: seen[c] for c in candidates if c in seen}
        first = [config for config in leading if config is not None and config.family == family.name]
        if candidates:
            ranks = ranked(problem, candidates, silicon)
            families[family.name] = FamilySampler(candidates, choices, seed, first, own, ranks)
    return Sampler(families, budget - sum(len(family.seen) for family in families.values()))
