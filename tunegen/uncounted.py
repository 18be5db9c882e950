"""Why what a database holds of a problem answers no call here, in a few words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .dispatch import ROWS_REACH, counting, triton_minor
from .lookup import Other, database_exists, find_others
from .model import PROTOCOL, Problem, Silicon
from .silicon import FACTS

EDITED = "of kernels that the search space or a template no longer gives, or that the gate found wrong"


def why_uncounted(path: Path, problem: Problem, silicon: Silicon) -> str:
    """Why nothing in the database at `path` counts for `problem` on `silicon`, where nothing does: how many results
    there are within reach of its rows, and what they are of. "" where the database has none there; raises nothing."""
    if not database_exists(path):
        return f"no database at {path}"
    found = [other for one in counting(problem) for other in find_others(path, one)]
    near = [o for o in found if max(o.rows / problem.rows, problem.rows / o.rows) <= ROWS_REACH]
    estimates = sum(o.kind == "estimated" for o in near)
    groups = Counter(_of(o, silicon) for o in near if o.kind == "measured")
    told = [f"{_number(count, 'measurement of it is', 'measurements of it are')} {of}" for of, count in groups.items()]
    told += [_number(estimates, "estimate of it does not count", "estimates of it do not count")] * bool(estimates)
    return "; ".join(told)


def _number(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _of(other: Other, silicon: Silicon) -> str:
    """What a measurement is of that differs from what is here."""
    pairs = _chips(other.silicon, silicon)
    pairs += [(f"Triton {other.triton}", triton_minor())] * (other.triton != triton_minor())
    pairs += [(f"measuring protocol {other.protocol}", str(PROTOCOL))] * (other.protocol != PROTOCOL)
    if not pairs:
        return EDITED
    there, here = zip(*pairs, strict=True)
    return f"of {' and '.join(there)}, and this is {' and '.join(here)}"


def _chips(there: Silicon, here: Silicon) -> list[tuple[str, str]]:
    """Both by name, where they differ in a fact; where they have one name, with that fact."""
    fact = next((fact for fact in FACTS if getattr(there, fact) != getattr(here, fact)), None)
    if fact is None:
        return []
    if there.name != here.name:
        return [(there.name, here.name)]
    return [(f"{there.name} with {fact} {getattr(there, fact)}", f"one with {getattr(here, fact)}")]
