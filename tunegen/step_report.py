"""What a recorded step gains: times of its problems, weighed by how often each occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .evaluate import COMPILED, TORCH
from .model import Config, Problem, Silicon, Trial
from .space import load_space


class Step(NamedTuple):
    """Microseconds that the norms of one step take on the GPU, under each way to compute them; None where one of the
    problems has no time that way. `calls` are those with a measured winner, `missing` those without."""

    calls: int
    missing: int
    tuned: float
    default: float | None
    torch: float | None
    compiled: float | None


def step(
    counts: Mapping[Problem, int], finals: Sequence[Trial], winners: Mapping[Problem, Config], silicon: Silicon
) -> Step:
    """Sums over the problems of a recording; `winners` are those that will be dispatched."""
    times = {(t.problem, t.config): t.measurement.us for t in finals if t.measurement is not None}
    known = [p for p in counts if (p, winners.get(p)) in times]

    def total(config: Mapping[Problem, Config | None]) -> float | None:
        found = [times.get((p, choice)) if (choice := config[p]) is not None else None for p in known]
        whole = [us * counts[p] for p, us in zip(known, found, strict=True) if us is not None]
        return sum(whole) if len(whole) == len(known) else None

    defaults = {p: load_space(p.op).default(p, silicon) for p in known}
    calls = sum(counts[p] for p in known)
    return Step(
        calls=calls,
        missing=sum(counts.values()) - calls,
        tuned=total({p: winners[p] for p in known}) or 0.0,
        default=total(defaults),
        torch=total(dict.fromkeys(known, TORCH)),
        compiled=total(dict.fromkeys(known, COMPILED)),
    )


def sentence(found: Step) -> str:
    """What a step gains, in one sentence."""
    if not found.calls:
        return "No norm of the step has a measured winner."
    ways = (
        ("the built-in default", found.default),
        ("torch's own operators", found.torch),
        ("torch.compile of each norm alone", found.compiled),
    )
    others = [f"{us / 1e3:.2f} ms by {name} ({_gain(us - found.tuned)})" for name, us in ways if us is not None]
    text = f"A step makes {found.calls} of these norm calls, {found.tuned / 1e3:.2f} ms of GPU time tuned"
    missing = f" {found.missing} more calls have no measured winner and are not counted." if found.missing else ""
    return f"{text}; {', '.join(others)}.{missing}" if others else f"{text}.{missing}"


def _gain(us: float) -> str:
    return f"{us / 1e3:.2f} ms gained" if us >= 0 else f"{-us / 1e3:.2f} ms lost"


def as_json(found: Step) -> dict[str, Any]:
    """The same for `--json`, in microseconds."""
    return found._asdict()
