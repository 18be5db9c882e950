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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import Argument, Variant
from .layouts import nested_copy
from .model import OpSpec, Problem, Scratch
from .model import Tensor as Shape
from .reference import DTYPES, Expected

MANTISSA_BITS = {"bf16": 7, "fp16": 10, "fp32": 23, "fp64": 52}
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
class _Bound:
    """What is allowed, in ulp: the largest error, and the root mean square where that is one ulp."""

    want: Expected
    budget: float
    typical: float


class Deviation(NamedTuple):
    """How far an output is off, in ulp; both are NaN if any element is."""

    largest: float
    typical: float


class Gate:
    """Inputs, references and budgets of one problem, made once and used for every candidate."""

    def __init__(self, spec: OpSpec, problem: Problem, device: torch.device, seed: int = 0, reach: int = 1) -> None:
        """`reach`: how many times its rows a candidate must be right for, since it may be launched for them."""
        self.spec, self.device = spec, device
        self.cases = [self._case(replace(problem, rows=rows), seed) for rows, seed in checks(problem, seed, reach)]
        # How far plain torch is off on a few rows is a matter of luck: its worst over all of them counts for each.
        for name in self.cases[0][2]:
            budget = max(bounds[name].budget for _, _, bounds in self.cases)
            for _, _, bounds in self.cases:
                bounds[name] = replace(bounds[name], budget=budget)

    def _case(self, problem: Problem, seed: int) -> tuple[Problem, dict[str, Tensor], dict[str, _Bound]]:
        given = self.spec.inputs(problem, self.device, seed)
        truth = self.spec.expected(problem, given, torch.float64)
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
        NaN, outputs filled with NaN."""
        worst = 0.0
        for problem, given, truth in self.cases:
            verdict = self._check_case(run, problem, given, {n: truth[n] for n in sorted(outputs)})
            worst = max(worst, verdict.error_ulp)
            if not verdict.ok:
                return Verdict(False, worst, verdict.reason)
        return Verdict(True, worst)

    def _check_case(
        self, run: Runner, problem: Problem, given: Mapping[str, Tensor], truth: Mapping[str, _Bound]
    ) -> Verdict:
        shapes = self.spec.tensors(problem)
        read = {name: _Guarded(shapes[name], self.device, math.nan, tensor) for name, tensor in given.items()}
        written = {name: _Guarded(shapes[name], self.device, GUARD_VALUE) for name in truth}
        run(problem, {name: guarded.inner for name, guarded in {**read, **written}.items()})
        where = f"at {problem.rows}x{problem.hidden}"
        for name, guarded in {**read, **written}.items():
            if not guarded.whole():
                return Verdict(False, math.inf, f"{name} {where}: written outside of the tensor")
            if name in read and not torch.equal(guarded.inner, given[name]):
                return Verdict(False, math.inf, f"{name} {where}: an input was written")
        worst = 0.0
        for name, guarded in written.items():
            off = deviation(guarded.inner, truth[name].want, shapes[name].dtype)
            if objection := _objection(off, truth[name]):
                largest = math.inf if math.isnan(off.largest) else off.largest
                return Verdict(False, largest, f"{name} {where}: {objection}")
            worst = max(worst, off.largest)
        return Verdict(True, worst)


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


def deviation(got: Tensor, want: Expected, dtype: str) -> Deviation:
    """|got - want| in ulp of `dtype` at max(|want|, scale), after taking off the slack."""
    floor = want.value.abs().mean() if want.scale is None else want.scale.abs()
    floor = floor.expand(want.value.shape)
    step = max(1, CHUNK_ELEMENTS // max(want.value[0].numel(), 1))
    largest, squares = 0.0, 0.0
    for start in range(0, len(want.value), step):
        part = slice(start, start + step)
        slack = None if want.slack is None else want.slack[part]
        off = _ulps(got[part], Expected(want.value[part], slack, floor[part]), dtype)
        chunk = float(off.max())
        if math.isnan(chunk):
            return Deviation(math.nan, math.nan)
        largest = max(largest, chunk)
        squares += float(off.square().sum())
    return Deviation(largest, math.sqrt(squares / want.value.numel()))


def _ulps(got: Tensor, want: Expected, dtype: str) -> Tensor:
    assert want.scale is not None
    finfo, bits = torch.finfo(DTYPES[dtype]), MANTISSA_BITS[dtype]
    # An ulp is a normal fp64 number even where all of a row is 0.
    size = want.value.abs().maximum(want.scale.to(want.value.dtype)).clamp_min(max(finfo.smallest_normal, 1e-290))
    ulp = torch.exp2((torch.frexp(size).exponent - 1 - bits).to(torch.float64))
    off = (got.to(torch.float64) - want.value).abs()
    if want.slack is not None:
        off = (off - want.slack).clamp_min(0.0)
    return off / ulp


def variant_runner(spec: OpSpec, variant: Variant) -> Runner:
    """A Runner that launches `variant` with its workspace filled with NaN, on copies with nested rows of the tensors
    that it expects so."""

    def poisoned(_: str, scratch: Scratch) -> Tensor:
        fill = 0.0 if scratch.zero else math.nan
        return torch.full(scratch.shape, fill, dtype=DTYPES[scratch.dtype], device=variant.device)

    def run(problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        arguments: dict[str, Argument] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
        arguments |= spec.scalars(problem)
        for name in variant.source.flags["nested"]:
            rows = nested_copy(tensors[name])
            arguments |= {f"{name}_ptr": rows.tensor, **rows.arguments(name)}
        variant(problem.rows, arguments, poisoned)

    return run


class _Guarded:
    """A tensor within a larger buffer, `guard` before and after it; NaN itself unless there is content to copy."""

    def __init__(self, shape: Shape, device: torch.device, guard: float, content: Tensor | None = None) -> None:
        size = math.prod(shape.shape)
        self.width = 64 * -(-GUARD_ROWS * shape.shape[-1] // 64)  # a multiple of 64 keeps the tensor aligned
        self.guard = guard
        self.buffer = torch.full((size + 2 * self.width,), guard, dtype=DTYPES[shape.dtype], device=device)
        self.inner = self.buffer[self.width : self.width + size].view(shape.shape)
        if content is None:
            self.inner.fill_(math.nan)
        else:
            self.inner.copy_(content)

    def whole(self) -> bool:
        """Whether the guard is as it was."""
        guards = torch.cat([self.buffer[: self.width], self.buffer[-self.width :]])
        return bool(guards.isnan().all() if math.isnan(self.guard) else (guards == self.guard).all())
