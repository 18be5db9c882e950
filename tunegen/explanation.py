"""Why a call gets the kernel that it gets: the ladder of `dispatch`, told instead of climbed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import paths
from .dispatch import Rung, rungs, silicon_of
from .model import TORCH_FAMILY, Problem, Silicon
from .ops import op_spec

if TYPE_CHECKING:
    from torch import Tensor

LATENCY_BYTES = 10_000_000
"""Below about that many bytes a call takes the time of its launches, whatever its rows."""


@dataclass(frozen=True)
class Explanation:
    """What answers a call and why.

    `bucket` is what its rows are looked up by. Of a measured answer: `trial` in the database, `measured_rows`, how many
    times more or fewer rows those are (`apart`), and microseconds there; `expected_us` is the same scaled to the
    call's bytes, where those are more than latency. `runner_up` would answer next.
    """

    problem: Problem
    bucket: int
    answer: str
    why: str
    trial: int | None = None
    measured_rows: int | None = None
    apart: float | None = None
    measured_us: float | None = None
    expected_us: float | None = None
    runner_up: str | None = None
    runner_up_why: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.problem.label()}: {self.answer}", f"  because: {self.why}"]
        if self.measured_us is not None:
            near = "" if self.apart == 1 else f", {self.apart:g} x away from {self.bucket}"
            lines.append(f"  measured: {self.measured_us:.2f} us at {self.measured_rows} rows{near}")
        if self.expected_us is not None:
            lines.append(f"  expected: {self.expected_us:.2f} us for {self.problem.rows} rows")
        if self.runner_up is not None:
            lines.append(f"  next: {self.runner_up}, {self.runner_up_why}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def explain_problem(path: Path, problem: Problem, silicon: Silicon) -> Explanation:
    """What answers calls of `problem` on `silicon`, from the database at `path`. Nothing is compiled or launched."""
    bucket = problem.rows_bucket
    first, *others = islice(_distinct(path, replace(problem, rows=bucket), silicon), 2)
    found = Explanation(problem, bucket, _name(first), first.why)
    if others:
        found = replace(found, runner_up=_name(others[0]), runner_up_why=others[0].why)
    if first.stored is None:
        return found
    rows, us = first.stored.rows, first.stored.us
    return replace(
        found,
        trial=first.stored.trial_id,
        measured_rows=rows,
        apart=max(rows / bucket, bucket / rows),
        measured_us=us,
        expected_us=us * _growth(problem, rows),
    )


def explain(
    x: Tensor, weight: Tensor | None = None, *, offset: float = 0.0, casting: str = "fp32"
) -> tuple[Explanation, ...]:
    """What `rms_norm(x, weight, offset=offset, casting=casting)` would run: forward, and backward where a gradient is
    wanted.

    Args and errors are those of `tunegen.rms_norm`. Nothing is computed, compiled or remembered.
    """
    from .ops.rms_norm import check, has_kernels, key_of, no_kernels_because

    check(x, weight, 1e-6, offset, casting)
    weight_grad = weight is not None and weight.requires_grad
    directions = ["forward", *(["backward"] if x.requires_grad or weight_grad else [])]
    found = []
    for direction in directions:
        key = key_of(direction, x, weight, offset, casting, weight_grad and direction == "backward")
        problem = replace(key.problem(), rows=x.numel() // x.shape[-1])
        if has_kernels(x, weight):
            found.append(explain_problem(paths.database(), problem, silicon_of(key.device)))
        else:
            found.append(Explanation(problem, key.rows, "torch operators", no_kernels_because(x, weight)))
    if len(found) == 2 and found[1].answer == TORCH_FAMILY and found[0].answer != TORCH_FAMILY:
        # Its saved tensors are its own: where torch's backward wins, its forward runs too.
        found[0] = Explanation(found[0].problem, found[0].bucket, TORCH_FAMILY, "torch's own op answers backward")
    return tuple(found)


def _distinct(path: Path, problem: Problem, silicon: Silicon) -> Iterator[Rung]:
    """The rungs that differ in their answer."""
    seen = set()
    for rung in rungs(path, problem, silicon):
        if rung.config not in seen:
            seen.add(rung.config)
            yield rung


def _name(rung: Rung) -> str:
    return rung.config.label() if rung.config else TORCH_FAMILY


def _growth(problem: Problem, measured_rows: int) -> float:
    """How many times as long a call takes as at the measured rows, by its bytes."""
    spec = op_spec(problem.op)
    here, there = (max(spec.bytes_moved(p), LATENCY_BYTES) for p in (problem, replace(problem, rows=measured_rows)))
    return here / there
