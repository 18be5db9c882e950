"""The float64 gate: a candidate that has not passed it has no time.

The reference is computed in float64 and rounded only where the contract rounds. Errors are counted in ulp of the
output's dtype at max(|reference|, mean |reference|), so that cancellation near zero does not blow them up and a wide
tolerance does not hide behind large elements. Allowed is 1.5 x the error that plain torch makes on inputs upcast to
fp32, and one ulp at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import Argument, Variant
from .model import OpSpec, Problem, Scratch
from .model import Tensor as Shape
from .reference import DTYPES

MANTISSA_BITS = {"bf16": 7, "fp16": 10, "fp32": 23, "fp64": 52}
GUARD = 64
"""NaN elements before and after each output: 128 bytes at least, so that the output between them stays aligned."""

BUDGET_FACTOR = 1.5
FP64_FLOOR_ULP = 16.0
"""For fp64 outputs the reference has no higher precision to hide in: its own sums are off by a few ulp too."""

CHUNK_ELEMENTS = 1 << 24

Runner = Callable[[Problem, Mapping[str, Tensor]], None]
"""Computes an op: reads the input tensors of the mapping, writes its outputs in place."""


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate passed, its largest error in ulp, and the reason if it did not."""

    ok: bool
    error_ulp: float
    reason: str = ""


@dataclass(frozen=True)
class _Expected:
    value: Tensor
    slack: Tensor | None
    budget: float


class Gate:
    """Inputs, references and budgets of one problem, made once and used for every candidate."""

    def __init__(self, spec: OpSpec, problem: Problem, device: torch.device, seed: int = 0) -> None:
        self.spec, self.device = spec, device
        self.cases = [self._case(_with_rows(problem, rows), seed + rows) for rows in checked_rows(problem.rows)]

    def _case(self, problem: Problem, seed: int) -> tuple[Problem, dict[str, Tensor], dict[str, _Expected]]:
        given = self.spec.inputs(problem, self.device, seed)
        truth = self.spec.expected(problem, given, torch.float64)
        plain_dtype = DTYPES[problem.accumulate]
        plain = self.spec.expected(problem, given, plain_dtype)
        outputs = self.spec.tensors(problem)
        found = {}
        for name, (value, slack) in truth.items():
            dtype = outputs[name].dtype
            off = error_ulp(plain[name][0].to(DTYPES[dtype]), value, slack, dtype)
            floor = FP64_FLOOR_ULP if dtype == "fp64" else outputs[name].floor_ulp
            found[name] = _Expected(value, slack, max(floor, BUDGET_FACTOR * off))
        return problem, given, found

    def check(self, run: Runner, outputs: frozenset[str]) -> Verdict:
        """Run a candidate that writes `outputs` on every case, each time into its own buffers filled with NaN."""
        worst = 0.0
        for problem, given, truth in self.cases:
            verdict = self._check_case(run, problem, given, {n: truth[n] for n in sorted(outputs)})
            worst = max(worst, verdict.error_ulp)
            if not verdict.ok:
                return Verdict(False, worst, verdict.reason)
        return Verdict(True, worst)

    def _check_case(
        self, run: Runner, problem: Problem, given: Mapping[str, Tensor], truth: Mapping[str, _Expected]
    ) -> Verdict:
        shapes = self.spec.tensors(problem)
        padded = {name: _padded(shapes[name], self.device) for name in truth}
        run(problem, {**given, **{name: inner for name, (_, inner) in padded.items()}})
        worst = 0.0
        where = f"at {problem.rows}x{problem.hidden}"
        for name, (buffer, inner) in padded.items():
            if not bool(torch.cat([buffer[:GUARD], buffer[-GUARD:]]).isnan().all()):
                return Verdict(False, math.inf, f"{name} {where}: written outside of the tensor")
            off = error_ulp(inner, truth[name].value, truth[name].slack, shapes[name].dtype)
            worst = max(worst, off)
            if not off <= truth[name].budget:
                unwritten = math.isnan(off)
                text = (
                    "NaN or unwritten elements"
                    if unwritten
                    else f"off by {off:.3g} ulp, allowed {truth[name].budget:.3g}"
                )
                return Verdict(False, math.inf if unwritten else worst, f"{name} {where}: {text}")
        return Verdict(True, worst)


def checked_rows(rows: int) -> list[int]:
    """The row counts that a problem is checked at: its own, and odd ones up to 1031 that no tile or grid divides."""
    return sorted({min(rows, 3), min(rows, 1031), rows})


def error_ulp(got: Tensor, want: Tensor, slack: Tensor | None, dtype: str) -> float:
    """Largest |got - want| in ulp of `dtype` at max(|want|, mean |want|), after taking off `slack`; NaN if any
    element is NaN."""
    mean = float(want.abs().mean())
    step = max(1, CHUNK_ELEMENTS // max(want[0].numel(), 1))
    errors = []
    for start in range(0, len(want), step):
        part = slice(start, start + step)
        errors.append(_chunk_error(got[part], want[part], None if slack is None else slack[part], mean, dtype))
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _chunk_error(got: Tensor, want: Tensor, slack: Tensor | None, mean: float, dtype: str) -> float:
    finfo, bits = torch.finfo(DTYPES[dtype]), MANTISSA_BITS[dtype]
    exponent = torch.frexp(want.abs().clamp_min(max(mean, finfo.smallest_normal))).exponent
    ulp = torch.ldexp(torch.ones_like(want), exponent - 1 - bits)
    off = (got.to(torch.float64) - want).abs()
    if slack is not None:
        off = (off - slack).clamp_min(0.0)
    return float((off / ulp).max())


def variant_runner(spec: OpSpec, variant: Variant) -> Runner:
    """A Runner that launches `variant` with its workspace filled with NaN."""

    def poisoned(_: str, scratch: Scratch) -> Tensor:
        fill = 0.0 if scratch.zero else math.nan
        return torch.full(scratch.shape, fill, dtype=DTYPES[scratch.dtype], device=variant.device)

    def run(problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        arguments: dict[str, Argument] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
        variant(problem.rows, {**arguments, **spec.scalars(problem)}, poisoned)

    return run


def _padded(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    size = math.prod(shape.shape)
    buffer = torch.full((size + 2 * GUARD,), math.nan, dtype=DTYPES[shape.dtype], device=device)
    return buffer, buffer[GUARD : GUARD + size].view(shape.shape)


def _with_rows(problem: Problem, rows: int) -> Problem:
    from dataclasses import replace

    return replace(problem, rows=rows)
