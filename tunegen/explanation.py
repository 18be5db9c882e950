"""Why a call gets the kernel that it gets: the ladder of `dispatch`, told instead of climbed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import paths
from .dispatch import ROWS_REACH, Rung, policy_of, remembered, rungs, silicon_of, standing
from .key import Key
from .model import RMS_NORM, TORCH_FAMILY, Problem, Silicon
from .ops import op_spec
from .policies import FASTEST, INVARIANT
from .silicon import same_silicon
from .uncounted import why_uncounted

if TYPE_CHECKING:
    from torch import Tensor

LATENCY_BYTES = 10_000_000
"""Below about that many bytes a call takes the time of its launches, whatever its rows."""

NESTED = "rows at no common distance, such as transposed heads, are"
COPIED_UNVERIFIED = f"{NESTED} copied first: this trial was screened, and only finals verify the kernel that reads them"
COPIED_BROKEN = f"{NESTED} copied first: the kernel that reads them does not run here"
UNVERIFIED = f"{NESTED} read in place; tunegen's own tests verify that of this family, no sweep on this machine has"


@dataclass(frozen=True)
class Explanation:
    """What answers a call and why.

    `bucket` is what its rows are looked up by. Of a measured answer: `trial` in the database, `measured_rows`, how many
    times more or fewer rows those are (`apart`), and microseconds there; `expected_us` is the same scaled to the
    call's bytes, where those are more than latency. `layouts` says what becomes of rows at no common distance, where no
    finals have verified the kernel that reads them in place. `runner_up` would answer if the answer did not run.
    `remedy` says how to get a measured answer where there is none.
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
    runner_up_us: float | None = None
    remedy: str | None = None
    layouts: str | None = None

    def __str__(self) -> str:
        return "\n".join([self.problem.label(), *(f"  {name:<10}{text}" for name, text in self.facts())])

    def facts(self) -> list[tuple[str, str]]:
        """Names and values for people."""
        found = [("answer", self.answer), ("because", self.why)]
        if self.measured_us is not None:
            near = "" if self.apart == 1 else f", {self.apart:g} x away from {self.bucket}"
            found.append(("measured", f"{self.measured_us:.2f} us at {self.measured_rows} rows{near}"))
        if self.expected_us is not None:
            found.append(("expected", f"{self.expected_us:.2f} us for {self.problem.rows} rows, by its bytes"))
        elif self.remedy is not None:
            found.append(("expected", f"unknown; {self.remedy}"))
        if self.layouts is not None:
            found.append(("layouts", self.layouts))
        if self.runner_up is not None:
            took = "" if self.runner_up_us is None else f", {self.runner_up_us:.2f} us there"
            found.append(("next", f"{self.runner_up}: {self.runner_up_why}{took}"))
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Explanations(tuple[Explanation, ...]):
    """Those of one call, forward first; printed, they are text for people."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def explain_problem(path: Path, problem: Problem, silicon: Silicon, key: Key | None = None) -> Explanation:
    """What answers calls of `problem` on `silicon`, from the database at `path`. Nothing is compiled or launched.

    With `key`, what this process has done with such calls so far counts: a choice that it has made stays made, and
    what did not run is left out.
    """
    bucket = problem.rows_bucket
    ladder = rungs(path, replace(problem, rows=bucket), silicon)
    first, *others = islice(_distinct(ladder if key is None else _lived(key, ladder)), 2)
    found = Explanation(problem, bucket, _name(first), first.why, layouts=_layouts(problem, first, key))
    if others:
        second = others[0].stored
        found = replace(
            found,
            runner_up=_name(others[0]),
            runner_up_why=others[0].why,
            runner_up_us=None if second is None else second.us,
        )
    if first.stored is None:
        return replace(found, remedy=_remedy(path, problem, silicon, here=key is not None or _is_here(silicon)))
    rows, us = first.stored.rows, first.stored.us
    return replace(
        found,
        trial=first.stored.trial_id,
        measured_rows=rows,
        apart=max(rows / bucket, bucket / rows),
        measured_us=us,
        expected_us=us * _growth(problem, rows),
    )


def _layouts(problem: Problem, rung: Rung, key: Key | None) -> str | None:
    """What becomes of rows at no common distance, None where there is nothing to be said of it."""
    if rung.config is None or problem.policy == INVARIANT or not op_spec(problem.op).nestable(problem):
        return None
    if rung.stored is not None and not rung.stored.final:
        return COPIED_UNVERIFIED
    made = None if key is None else remembered(key)
    if made is not None and made.config == rung.config and not made.nests:
        return COPIED_BROKEN
    return UNVERIFIED if rung.stored is None else None


def _remedy(path: Path, problem: Problem, silicon: Silicon, *, here: bool) -> str:
    """Why there is no measured answer, and the command that makes one."""
    bucket = problem.rows_bucket
    why = why_uncounted(path, replace(problem, rows=bucket), silicon)
    none = f"no valid measurement within {ROWS_REACH} x of {bucket} rows{f' ({why})' if why else ''}"
    return f"{none}: {'' if here else f'on an {silicon.name}: '}{paths.on_database(_sweep(problem), path)}"


def _is_here(silicon: Silicon) -> bool:
    return any(same_silicon(silicon_of(index), silicon) for index in range(torch.cuda.device_count()))


def _sweep(problem: Problem) -> str:
    """The command that measures this problem."""
    rows = f" --rows {problem.rows}" * (problem.policy != INVARIANT)
    words = ["tunegen sweep", *[f"--op {problem.op}"] * (problem.op != RMS_NORM)]
    words += [f"--hidden {problem.hidden}{rows} --direction {problem.direction}"]
    words += [f"--dtype {problem.x_dtype}"] * (problem.x_dtype != "bf16")
    words += [f"--weight-dtype {problem.weight_dtype or 'none'}"] * (problem.weight_dtype != problem.x_dtype)
    words += [f"--casting {problem.casting}"] * (problem.casting != "fp32") + ["--offset"] * problem.offset
    words += ["--sum-in-fp32"] * problem.sum_in_fp32
    words += [f"--policy {problem.policy}"] * (problem.policy != FASTEST)
    frozen = problem.direction == "backward" and problem.weight_dtype is not None and not problem.weight_grad
    return " ".join([*words, *["--frozen-weight"] * frozen])


def explain(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    casting: str = "fp32",
    sum_in_fp32: bool = False,
    policy: str | None = None,
) -> Explanations:
    """What `rms_norm`, or with a residual `add_rms_norm`, with the same arguments would run here and now: forward, and
    backward where a gradient is wanted and `torch.no_grad` is not in force.

    Args and errors are those of `tunegen.rms_norm` and `tunegen.add_rms_norm`. Nothing is computed, compiled or
    remembered.
    """
    from .ops.arguments import check, check_like, is_distributed
    from .ops.rms_norm import has_kernels, no_kernels_because

    check(x, weight, 1e-6, offset, casting)
    if residual is not None:
        check_like("residual", residual, x)
    if is_distributed(x, weight, residual):
        x, residual, weight = _here(x, residual, weight)
    policy = policy_of(policy)
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, residual))
    directions = ["forward", *(["backward"] if training else [])]
    found = []
    for direction in directions:
        key = _key(direction, x, weight, residual, offset, casting, sum_in_fp32, policy)
        problem = replace(key.problem(), rows=x.numel() // x.shape[-1])
        if has_kernels(x, weight, residual):
            found.append(explain_problem(paths.database(), problem, silicon_of(key.device), key))
        else:
            found.append(Explanation(problem, key.rows, "torch operators", no_kernels_because(x, weight, residual)))
    return Explanations(with_torch_backward(found, training=training))


def _here(x: Tensor, residual: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same, or of distributed tensors the parts that lie here, where these are computed with."""
    from .ops.distributed import parts_here

    parts = parts_here((x,) if residual is None else (x, residual), weight)
    if parts is None:
        return x, residual, weight
    here, *others, of_weight = parts
    assert here is not None
    return here, others[0] if others else None, of_weight


def _key(
    direction: str,
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    offset: float,
    casting: str,
    sum_in_fp32: bool,
    policy: str,
) -> Key:
    from .ops import add_rms_norm, rms_norm

    backward = direction == "backward"
    weight_grad = backward and weight is not None and weight.requires_grad
    if residual is None:
        return rms_norm.key_of(direction, x, weight, offset, casting, weight_grad, policy=policy)
    apart = not backward and add_rms_norm.reads_another_sum(x, sum_in_fp32)
    op = rms_norm.ADD_RMS_NORM
    return rms_norm.key_of(direction, x, weight, offset, casting, weight_grad, op, apart, policy=policy)


def with_torch_backward(found: Sequence[Explanation], *, training: bool) -> list[Explanation]:
    """Its saved tensors are its own: where torch's backward wins, its forward runs too, in `training`; else that is
    added as a remark."""
    told = {one.problem.direction: one for one in found}
    forward, backward = told.get("forward"), told.get("backward")
    if forward is None or backward is None or backward.answer != TORCH_FAMILY or forward.answer == TORCH_FAMILY:
        return list(found)
    if training:
        forward = Explanation(forward.problem, forward.bucket, TORCH_FAMILY, "torch's own op answers backward")
    else:
        remark = "without a gradient; with one torch answers, as it does backward"
        forward = replace(forward, why=f"{forward.why}, {remark}")
    return [forward if one.problem.direction == "forward" else one for one in found]


def _lived(key: Key, ladder: Iterable[Rung]) -> Iterator[Rung]:
    """The ladder as it is for this process by now."""
    choice, standing_rungs = remembered(key), standing(key, ladder)
    if choice is None:
        yield from standing_rungs
        return
    first = next(standing_rungs)
    if (first.config, first.why) != (choice.config, choice.rung):
        yield Rung(choice.config, f"{choice.rung}, as it was when this process first asked", choice.stored)
    yield first
    yield from standing_rungs


def _distinct(ladder: Iterable[Rung]) -> Iterator[Rung]:
    """The rungs that differ in their answer."""
    seen = set()
    for rung in ladder:
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
