"""The float64 gate: a candidate that has not passed it has no time.

The reference is computed in float64 and rounded only where the contract rounds. Errors are counted in ulp of the
output's dtype at max(|reference|, its scale, such as the mean of its row), so that cancellation near zero does not blow
them up and a wide tolerance does not hide behind large elements. Allowed is 1.5 x the error that plain torch makes on
inputs upcast to fp32, and one ulp at least.

A 16-bit output of fp32 arithmetic is rounded once, so a right kernel's bits are plain torch's but for a few. So where
no more than one ulp is allowed, the root mean square error may be 1.05 x plain's: that rejects what one ulp lets pass,
such as a second rounding or a factor of 0.999.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import Argument, Variant
from .layouts import copied_back, nested_copy
from .model import Problem, Scratch
from .reference import DTYPES, Expected
from .spec import OpSpec
from .spec import Tensor as Shape
from .ulps import Deviation, Findings, Found, Plain, deviation, scaled

GUARD_ROWS = 16
"""Rows of guard before and after each tensor, as many as the tallest tile has: whoever misses a mask lands there.
Around inputs it is NaN, so that what is read shows; around outputs a number, so that NaN written over it shows."""

GUARD_VALUE = 1536.0

REACH_ELEMENTS = 1 << 25
"""The gate goes no further beyond the row count of a problem than this many elements: 256 MB a tensor in float64."""

MIN_ROWS = 8
"""Rows that are looked at, at least, in all cases together: an op's inputs may differ in kind from row to row."""

BUDGET_FACTOR = 1.5
TYPICAL_FACTOR = 1.05
TYPICAL_FLOOR_ULP = 0.01
"""What fp32 arithmetic adds where every element happens to be exact in 16 bits."""

FP64_FLOOR_ULP = 16.0
"""For fp64 outputs the reference has no higher precision to hide in: its own sums are off by a few ulp too."""

Runner = Callable[[Problem, Mapping[str, Tensor]], None]
"""Computes an op: reads the input tensors of the mapping, writes its outputs in place."""


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate passed, its largest error in ulp, and the reason if it did not."""

    ok: bool
    error_ulp: float
    reason: str = ""


@dataclass(frozen=True)
class _Bound:
    """What is allowed, in ulp: the largest error, and the root mean square where that is one ulp."""

    want: Expected
    budget: float
    typical: float


class _Look(NamedTuple):
    """A question about a buffer that was asked of `Findings`: whether it has a fault, or, with a bound, how far it is
    off."""

    where: str
    fault: str = ""
    bound: _Bound | None = None

    def verdict(self, found: Found) -> Verdict:
        """What the answer comes to."""
        if self.bound is None:
            return Verdict(False, math.inf, f"{self.where}: {self.fault}") if found.largest else Verdict(True, 0.0)
        off = found.deviation(self.bound.want.value.numel())
        if objection := _objection(off, self.bound):
            return Verdict(False, math.inf if math.isnan(off.largest) else off.largest, f"{self.where}: {objection}")
        return Verdict(True, off.largest)


Case = tuple[Problem, dict[str, Tensor], dict[str, _Bound]]
"""A row count to be right at: the problem, its inputs, and what is allowed of each output."""


class Gate:
    """Inputs, references and budgets of one problem, made once and used for every candidate."""

    def __init__(self, spec: OpSpec, problem: Problem, device: torch.device, seed: int = 0, reach: int = 1) -> None:
        """`reach`: how many times its rows a candidate must be right for, since it may be launched for them."""
        self.spec, self.device = spec, device
        self._guards: dict[tuple[str, bool], Tensor] = {}
        self.cases = [self._case(replace(problem, rows=rows), seed) for rows, seed in checks(problem, seed, reach)]
        # How far plain torch is off on a few rows is a matter of luck: its worst over all of them counts for each.
        for name in self.cases[0][2]:
            budget = max(bounds[name].budget for _, _, bounds in self.cases)
            for _, _, bounds in self.cases:
                bounds[name] = replace(bounds[name], budget=budget)

    def _case(self, problem: Problem, seed: int) -> Case:
        given = self.spec.inputs(problem, self.device, seed)
        truth = {n: scaled(want) for n, want in self.spec.expected(problem, given, torch.float64).items()}
        # Added up from the other end too: a right kernel need not be as lucky as torch is with one order. One after the
        # other, since each is as large as all the inputs.
        plain = self._plain(problem, given, truth, mirrored=False)
        other = self._plain(problem, given, truth, mirrored=True)
        outputs = self.spec.tensors(problem)
        found = {}
        for name, want in truth.items():
            dtype = outputs[name].dtype
            largest = max(plain[name].largest, other[name].largest)
            floor = FP64_FLOOR_ULP if dtype == "fp64" else outputs[name].floor_ulp
            rounded = dtype in ("bf16", "fp16")
            typical = TYPICAL_FACTOR * plain[name].typical + TYPICAL_FLOOR_ULP if rounded else math.inf
            found[name] = _Bound(want, max(floor, BUDGET_FACTOR * largest), typical)
        return problem, given, found

    def _plain(
        self, problem: Problem, given: Mapping[str, Tensor], truth: Mapping[str, Expected], *, mirrored: bool
    ) -> dict[str, Deviation]:
        """How far plain torch is off in the accumulation dtype, rounded to that of each output."""
        outputs = self.spec.tensors(problem)
        inputs = {name: _mirror(tensor) for name, tensor in given.items()} if mirrored else dict(given)
        found = {}
        for name, got in self.spec.expected(problem, inputs, DTYPES[problem.accumulate]).items():
            value = got.value.to(DTYPES[outputs[name].dtype])
            found[name] = deviation(_mirror(value) if mirrored else value, truth[name], outputs[name].dtype)
        return found

    def check(self, run: Runner, outputs: frozenset[str]) -> Verdict:
        """Run a candidate that writes `outputs` on every case, each time with its own buffers: inputs between guards of
        NaN, outputs filled with NaN. The first fault decides."""
        worst = 0.0
        # On a GPU all cases are run before the numbers of any are read, which waits for it: once a candidate.
        batches = [self.cases] if self.device.type == "cuda" else [[case] for case in self.cases]
        for cases in batches:
            findings = self._findings()
            looks = [look for case in cases for look in self._looks(findings, run, case, outputs)]
            for look, found in zip(looks, findings.read(), strict=True):
                verdict = look.verdict(found)
                worst = max(worst, verdict.error_ulp)
                if not verdict.ok:
                    return replace(verdict, error_ulp=worst)
        return Verdict(True, worst)

    def _findings(self) -> Findings:
        if self.device.type != "cuda":
            return Plain()
        from .gate_kernels import InKernels

        questions = 2 * len(self.spec.tensors(self.cases[0][0]))
        return InKernels(self.device, questions * len(self.cases))

    def _guard(self, shape: Shape, value: float) -> Tensor:
        """One element of guard in the dtype of a tensor, made once."""
        key = shape.dtype, math.isnan(value)
        if key not in self._guards:
            self._guards[key] = torch.full((1,), value, dtype=DTYPES[shape.dtype], device=self.device)
        return self._guards[key]

    def _looks(self, findings: Findings, run: Runner, case: Case, outputs: frozenset[str]) -> Iterator[_Look]:
        """Run one case and ask what its buffers look like."""
        problem, given, bounds = case
        shapes = self.spec.tensors(problem)
        read = {
            name: _Guarded(shapes[name], self._guard(shapes[name], math.nan), tensor) for name, tensor in given.items()
        }
        written = {name: _Guarded(shapes[name], self._guard(shapes[name], GUARD_VALUE)) for name in sorted(outputs)}
        run(problem, {name: guarded.inner for name, guarded in {**read, **written}.items()})
        for name, guarded in {**read, **written}.items():
            where = f"{name} at {problem.rows}x{problem.hidden}"
            findings.guards(guarded.buffer, guarded.width, guarded.guard)
            yield _Look(where, "written outside of the tensor")
            if name in read:
                findings.same(guarded.inner, given[name])
                yield _Look(where, "an input was written")
        for name, guarded in written.items():
            findings.deviation(guarded.inner, bounds[name].want, shapes[name].dtype)
            yield _Look(f"{name} at {problem.rows}x{problem.hidden}", bound=bounds[name])


def _mirror(tensor: Tensor) -> Tensor:
    return tensor.flip(*range(tensor.dim()))


def _objection(off: Deviation, allowed: _Bound) -> str:
    if math.isnan(off.largest):
        return "NaN or unwritten elements"
    if not off.largest <= allowed.budget:
        return f"off by {off.largest:.3g} ulp, allowed {allowed.budget:.3g}"
    if allowed.budget <= 1.0 and not off.typical <= allowed.typical:
        return f"off by {off.typical:.3g} ulp in the root mean square, allowed {allowed.typical:.3g}"
    return ""


def checks(problem: Problem, seed: int, reach: int) -> list[tuple[int, int]]:
    """Row counts that a problem is checked at, each with a seed: its own, and odd ones that no tile or grid divides,
    3 and `reach` times its own (up to 1031, where that is too much); its own again until there are MIN_ROWS. Each
    seed goes on where the rows of the one before ended."""
    rows = problem.rows
    far = min(reach * rows, REACH_ELEMENTS // problem.hidden)
    counts = sorted({min(rows, 3), far | 1 if far > rows else min(rows, 1031), rows})
    counts += [rows] * -(-max(MIN_ROWS - sum(counts), 0) // rows)
    return list(zip(counts, itertools.accumulate(counts, initial=seed), strict=False))


def variant_runner(spec: OpSpec, variant: Variant) -> Runner:
    """A Runner that launches `variant` with its workspace filled with NaN, on copies with nested rows of the tensors
    that it expects so."""

    def poisoned(_: str, scratch: Scratch) -> Tensor:
        fill = 0.0 if scratch.zero else math.nan
        return torch.full(scratch.shape, fill, dtype=DTYPES[scratch.dtype], device=variant.device)

    def run(problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        arguments: dict[str, Argument] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
        arguments |= spec.scalars(problem)
        copies = {}
        for name in variant.source.flags["nested"]:
            rows, copies[name] = nested_copy(tensors[name])
            arguments |= {f"{name}_ptr": rows.tensor, **rows.arguments(name)}
        variant(problem.rows, arguments, poisoned)
        for name, copy in copies.items():  # so that the gate sees what was written there
            tensors[name].copy_(copied_back(copy, problem.rows))

    return run


class _Guarded:
    """A tensor within a larger buffer, whose other elements are that of `guard`; NaN itself unless there is content to
    copy."""

    def __init__(self, shape: Shape, guard: Tensor, content: Tensor | None = None) -> None:
        size = math.prod(shape.shape)
        self.width = 64 * -(-GUARD_ROWS * shape.shape[-1] // 64)  # a multiple of 64 keeps the tensor aligned
        self.guard = guard
        self.buffer = guard.repeat(size + 2 * self.width)
        self.inner = self.buffer[self.width : self.width + size].view(shape.shape)
        if content is None:
            self.inner.fill_(math.nan)
        else:
            self.inner.copy_(content)
