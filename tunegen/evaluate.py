"""One candidate from config to trial: render, load, verify, time, in that order, always. Runs in the measuring
process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .bench import FINAL_BLOCKS, SCREEN_BLOCKS, Bench, Call, Timed
from .dispatch import ROWS_REACH
from .errors import CompileError
from .launch import Variant
from .model import TORCH_FAMILY, Config, Problem, Resources, Silicon, Trial, TrialState
from .ops import op_spec
from .render import combined_digest, renderings
from .verify import Gate, Verdict, variant_runner

TORCH = Config(TORCH_FAMILY)
COMPILED = Config("torch.compile")
"""Challengers without a template: torch's own op, which may be dispatched, and `torch.compile` of the formula, which
may not."""


class Session:
    """A problem opened on a GPU: its gate and its bench, used for every candidate in turn."""

    def __init__(self, problem: Problem, silicon: Silicon, device: torch.device, seed: int) -> None:
        self.spec = op_spec(problem.op)
        self.problem, self.silicon, self.device = problem, silicon, device
        self.gate = Gate(self.spec, problem, device, seed, ROWS_REACH)
        torch.cuda.empty_cache()  # the references took twice what is left of them
        self.bench = Bench(self.spec, problem, device, silicon.l2_bytes, silicon.sms, seed)

    def variants(self, config: Config) -> list[Variant]:
        """Every rendering that may be launched for `config`; the first is the one that is timed."""
        constants = self.spec.constants(self.problem)
        return [
            Variant(source, config, constants, self.problem.accumulate, self.device, self.silicon.sms)
            for source in renderings(self.problem, config, self.spec)
        ]

    def screen(self, config: Config, resources: Resources | None) -> Trial:
        """Verify and time one config in a few blocks; what fails is a trial with its reason."""
        trial = Trial(self.problem, config, TrialState.OK, resources=resources)
        if config == TORCH:
            return self._screen_torch(trial)
        # Of the text that this process launches: the template may change while a sweep runs.
        trial = replace(trial, digest=combined_digest(self.problem, config, self.spec))
        try:
            variants = self.variants(config)
            trial = replace(trial, scratch_bytes=variants[0].plan(self.problem.rows).scratch_bytes())
            verdict = self.verify(variants)
        except CompileError as error:
            return replace(trial, state=TrialState.COMPILE, reason=str(error))
        trial = replace(trial, error_ulp=_finite(verdict.error_ulp))
        if not verdict.ok:
            return replace(trial, state=TrialState.INCORRECT, reason=verdict.reason)
        return self._timed([trial], [self.bench.call(variants[0])], SCREEN_BLOCKS)[0]

    def _screen_torch(self, trial: Trial) -> Trial:
        """torch's own op competes if it passes the gate; if not, it is timed as a baseline all the same."""
        verdict = self.gate.check(self._torch_runner, self._wanted(rstd=False))
        trial = replace(
            trial,
            error_ulp=_finite(verdict.error_ulp),
            reason=verdict.reason,
            kind="measured" if verdict.ok else "baseline",
        )
        return self._timed([trial], [self._torch_bench(self.spec.torch_call)], SCREEN_BLOCKS)[0]

    def verify(self, variants: Sequence[Variant]) -> Verdict:
        """The gate over every rendering; the first failure decides."""
        worst = Verdict(True, 0.0)
        for variant in variants:
            outputs = self._wanted(rstd=variant.source.flags.get("save_rstd", False))
            verdict = self.gate.check(variant_runner(self.spec, variant), outputs)
            if not verdict.ok:
                return verdict
            worst = max(worst, verdict, key=lambda v: v.error_ulp)
        return worst

    def finals(self, trials: Sequence[Trial]) -> list[Trial]:
        """Time finalists side by side in many blocks; they are verified again first, since this is another process."""
        good: list[Trial] = []
        calls: list[Call] = []
        for trial in trials:
            if trial.config.family in (TORCH.family, COMPILED.family):
                make = self.spec.torch_call if trial.config == TORCH else self.spec.compiled_call
                calls.append(self._torch_bench(make))
            else:
                variants = self.variants(trial.config)
                if not self.verify(variants).ok:
                    continue
                trial = replace(trial, digest=combined_digest(self.problem, trial.config, self.spec))
                calls.append(self.bench.call(variants[0]))
            good.append(replace(trial, stage="final"))
        return self._timed(good, calls, FINAL_BLOCKS)

    def _timed(self, trials: Sequence[Trial], calls: Sequence[Call], blocks: int) -> list[Trial]:
        graphs: list[Timed] = [self.bench.capture(call) for call in calls]
        found = self.bench.measure(graphs, blocks)
        return [replace(t, measurement=m) for t, m in zip(trials, found, strict=True)]

    def _torch_bench(self, make: Callable[..., Callable[[], object]]) -> Call:
        with torch.cuda.stream(self.bench.stream):
            calls = [make(self.problem, tensors) for tensors in self.bench.tensors]
        return lambda i: calls[i]()

    def _torch_runner(self, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.spec.torch_call(problem, dict(tensors))().items():
            tensors[name].copy_(value)

    def _wanted(self, rstd: bool) -> frozenset[str]:
        outputs = frozenset(n for n, t in self.spec.tensors(self.problem).items() if t.role == "output")
        return outputs if rstd else outputs - {"rstd"}


def _finite(error: float) -> float | None:
    """None for the infinite error of an output with NaN: neither SQLite nor JSON has a number for it."""
    return error if math.isfinite(error) else None
