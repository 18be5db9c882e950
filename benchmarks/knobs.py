"""Which choice made the fastest kernel of each problem, and what is lost when it is taken away.

    python benchmarks/knobs.py tune.db [more.db ...]

Reads what sweeps stored, or excerpts in JSON Lines. Knobs of a problem's fastest screened candidate are its family and
every parameter that the search space does not compute. Without one, the fastest candidate with another value of that
knob, everything else chosen anew, takes so much longer. Below one percent the screening of a sweep tells no difference.
A star: the largest value that the search space lists today. Candidates that were timed while something else had the
GPU are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from measured import Candidate, read

from tunegen.expressions import Rule
from tunegen.model import Problem, Value
from tunegen.space import load_space

NOTHING = 0.01
"""A loss that is none."""


class Knob(NamedTuple):
    """A knob of the fastest candidate: its value, the fraction of time that is lost without it, what is best then, and
    whether the search space has no larger value."""

    name: str
    value: Value
    loss: float
    instead: Value
    largest: bool

    def __str__(self) -> str:
        chosen = self.value if self.name == "family" else f"{self.name} {self.value}"
        return f"{chosen}{'*' * self.largest} (+{100 * self.loss:.0f} %: {self.instead})"


def value_of(candidate: Candidate, name: str) -> Value | None:
    """The family, or a parameter; None where a family has no such one."""
    config = candidate.config
    return config.family if name == "family" else dict(config.parameters).get(name)


def knobs(candidates: Sequence[Candidate]) -> tuple[Candidate, list[Knob]]:
    """The fastest of a problem's candidates, and what each of its knobs is worth, the greatest loss first. A knob that
    nobody has set otherwise is left out."""
    best = min(candidates, key=lambda c: c.score)
    domains = load_space(best.problem.op).family(best.problem.direction, best.config.family).parameters
    values = {name: domain for name, domain in domains.items() if not isinstance(domain, Rule)}
    found = []
    for name in ("family", *values):
        value = value_of(best, name)
        kin = candidates if name == "family" else [c for c in candidates if c.config.family == best.config.family]
        others = [c for c in kin if value_of(c, name) not in (value, None)]
        if value is not None and others:
            other = min(others, key=lambda c: c.score)
            largest = isinstance(value, int) and value == max(values[name])
            found.append(Knob(name, value, other.score / best.score - 1, value_of(other, name) or "", largest))
    return best, sorted(found, key=lambda knob: -knob.loss)


def row(problem: Problem, candidates: Sequence[Candidate]) -> str:
    """A line of a Markdown table."""
    best, found = knobs(candidates)
    won = [str(knob) for knob in found if knob.loss >= NOTHING][:3]
    return f"| {problem.label()} | {best.config.family} | {', '.join(won) or 'nothing by itself'} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("databases", nargs="+", type=Path)
    options = parser.parse_args()
    print("| problem | fastest | what won it (lost without it: what is best then) |\n|---|---|---|")
    for problem, candidates in read(options.databases).items():
        print(row(problem, candidates))


if __name__ == "__main__":
    main()
