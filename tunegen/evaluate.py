"""One candidate from config to trial: render, load, verify, time, in that order, always. Runs in the measuring
process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .ahead import compiling_here
from .bench import FINAL_BLOCKS, FINAL_ROUNDS, WARM_UP_SECONDS, Bench, Call, Timed
from .blocks import of_rounds
from .dispatch import LOG, ROWS_REACH
from .errors import CompileError, first_line
from .launch import Variant
from .model import TORCH_FAMILY, Config, KernelSource, Measurement, Plan, Problem, Resources, Silicon, Trial, TrialState
from .ops import op_spec
from .render import combined_digest, renderings
from .spec import OpSpec
from .spending import Spent
from .ties import may_win
from .verify import Gate, Verdict, variant_runner

TORCH = Config(TORCH_FAMILY)
COMPILED = Config("torch.compile")
"""Challengers without a template: torch's own op, which may be dispatched, and `torch.compile` of the formula, which
may not."""


Form = Callable[[dict[str, Tensor]], Callable[[], object]]
"""torch's own form of the op, or a compiled one: binds its input tensors."""

Make = Callable[[Bench], Call]
"""Calls of a candidate on the buffers of a bench."""

Known = dict[tuple[str, str, Config, Problem], Variant]
"""What a process has loaded, by the text of its kernels, what they were rendered with, the config, and the problem at 0
rows: to read them from Triton's cache and load them anew for each row count took 4 ms of the 33 that a candidate takes
(H200). A template that forgets rstd has one text with it and without, and is asked for it all the same."""

Machine = tuple[str, str]
"""What a candidate does, down to the machine: the digest of its binaries, and its grids and workspace as text."""


class Session:
    """A problem opened on a GPU: its gate and its bench, used for every candidate in turn. `seconds` says what it has
    spent them on."""

    def __init__(
        self,
        problem: Problem,
        silicon: Silicon,
        device: torch.device,
        seed: int,
        warm_up: float = WARM_UP_SECONDS,
        form: Form | None = None,
        known: Known | None = None,
    ) -> None:
        """`form` is the formula as `compiled_form` gave it, if that was compiled ahead; `known` is what other sessions
        of this process have loaded, and this one adds to it."""
        self.spec = op_spec(problem.op)
        self.problem, self.silicon, self.device, self.seed = problem, silicon, device, seed
        self.gate = Gate(self.spec, problem, device, seed, ROWS_REACH)
        torch.cuda.empty_cache()  # the references took twice what is left of them
        self.bench = self._bench(warm_up)
        self.form = form
        self.known: Known = {} if known is None else known
        self.best: Timed | None = None
        self.by_machine: dict[Machine, Config] = {}
        self.seconds = Spent()

    def _bench(self, warm_up: float) -> Bench:
        silicon = self.silicon
        return Bench(self.spec, self.problem, self.device, silicon.l2_bytes, silicon.sms, self.seed, warm_up)

    def variants(self, config: Config, nested: tuple[str, ...] = ()) -> list[Variant]:
        """Every rendering that may be launched for `config` where rows of the tensors `nested` lie at no common
        distance; the first is the one that is timed."""
        return [self._variant(source, config) for source in renderings(self.problem, config, self.spec, nested)]

    def _variant(self, source: KernelSource, config: Config) -> Variant:
        key = source.text, repr(source.flags), config, replace(self.problem, rows=0)
        if key not in self.known:
            constants = self.spec.constants(self.problem)
            accumulate, sms = self.problem.accumulate, self.silicon.sms
            self.known[key] = Variant(source, config, constants, accumulate, self.device, sms)
        return self.known[key]

    def screen(self, config: Config, resources: Resources | None) -> Trial:
        """Verify and time one config in a few blocks; what fails is a trial with its reason."""
        trial = Trial(self.problem, config, TrialState.OK, resources=resources)
        if config == TORCH:
            return self._screen_torch(trial)
        # Of the text that this process launches: the template may change while a sweep runs.
        trial = replace(trial, digest=combined_digest(self.problem, config, self.spec))
        try:
            variants = self.variants(config)
            plan = variants[0].plan(self.problem.rows)
            trial = replace(trial, scratch_bytes=plan.scratch_bytes())
            machine = (resources.binary if resources else "", work_of(plan))
            if machine in self.by_machine:
                reason = f"the same machine code and grid as {self.by_machine[machine].label()}, which was timed"
                return replace(trial, state=TrialState.DUPLICATE, reason=reason)
            verdict = self.verify(variants)
        except CompileError as error:
            return replace(trial, state=TrialState.COMPILE, reason=str(error))
        trial = replace(trial, error_ulp=_finite(verdict.error_ulp))
        if not verdict.ok:
            return replace(trial, state=TrialState.INCORRECT, reason=verdict.reason)
        trial = self._screened(trial, lambda bench: bench.call(variants[0]))
        if machine[0]:
            self.by_machine[machine] = config
        return trial

    def _screen_torch(self, trial: Trial) -> Trial:
        """torch's own op competes if it passes the gate; if not, it is timed as a baseline all the same."""
        verdict = self.gate.check(self._torch_runner, self._wanted(rstd=False))
        trial = replace(
            trial,
            error_ulp=_finite(verdict.error_ulp),
            reason=verdict.reason,
            kind="measured" if verdict.ok else "baseline",
        )
        return self._screened(trial, _calls_of(partial(self.spec.torch_call, self.problem)))

    def verify(self, variants: Sequence[Variant]) -> Verdict:
        """The gate over every rendering; the first failure decides."""
        worst = Verdict(True, 0.0)
        with self.seconds.on("verifying"):
            for variant in variants:
                outputs = self._wanted(rstd=variant.source.flags.get("save_rstd", False))
                verdict = self.gate.check(variant_runner(self.spec, variant), outputs)
                if not verdict.ok:
                    return verdict
                worst = max(worst, verdict, key=lambda v: v.error_ulp)
        return worst

    def finals(self, trials: Sequence[Trial]) -> list[Trial]:
        """Time finalists side by side in rounds of many blocks, each round on buffers of its own, until they have lost;
        they are verified again first, since this is another process."""
        good: list[Trial] = []
        makes: list[Make] = []
        for trial in trials:
            if trial.config == COMPILED:
                if (form := self._compiled_form()) is None:
                    continue
                makes.append(_calls_of(form))
            elif trial.config == TORCH:
                makes.append(_calls_of(partial(self.spec.torch_call, self.problem)))
            else:
                variants = self.variants(trial.config)
                others = [v for nested in self.spec.nestable(self.problem) for v in self.variants(trial.config, nested)]
                if not self.verify([*variants, *others]).ok:
                    continue
                trial = replace(trial, digest=combined_digest(self.problem, trial.config, self.spec))
                makes.append(partial(_calls_of_variant, variants[0]))
            good.append(replace(trial, stage="final"))
        rounds = self._rounds(makes, [trial.kind == "measured" for trial in good])
        return [replace(trial, measurement=of_rounds(own)) for trial, own in zip(good, rounds, strict=True)]

    def _rounds(self, makes: Sequence[Make], rivals: Sequence[bool]) -> list[list[Measurement]]:
        """The rounds of each finalist. The first is for all of them, side by side: scores of the screening are of
        other minutes. The others are for those of the `rivals` that may still win."""
        rounds: list[list[Measurement]] = [[] for _ in makes]
        playing = list(range(len(makes)))
        for number in range(FINAL_ROUNDS):
            if number == 1:
                scores = {i: rounds[i][0].score for i, rival in enumerate(rivals) if rival}
                playing = sorted(may_win(scores, self.spec.bytes_moved(self.problem)))
            if number and playing:
                self.renew()
            for i, measurement in zip(playing, self._round([makes[i] for i in playing]), strict=True):
                rounds[i].append(measurement)
        return rounds

    def _compiled_form(self) -> Form | None:
        """The plain formula, compiled; None where torch.compile makes nothing of it: the others go without it."""
        try:
            with self.seconds.on("compiling the plain formula"), torch.cuda.stream(self.bench.stream):
                self.form = self.form or compiled_form(self.spec, self.problem, self.bench.tensors[0])
        except Exception as error:
            LOG.warning("%s: no torch.compile beside it: %s", self.problem.label(), first_line(error))
        return self.form

    def renew(self) -> None:
        """Another bench, whose buffers lie elsewhere."""
        with self.seconds.on("opening problems"):
            del self.bench
            torch.cuda.empty_cache()
            self.bench = self._bench(warm_up=0.0)  # it is warm from the round before

    def _round(self, makes: Sequence[Make]) -> list[Measurement]:
        graphs = [self._captured(make) for make in makes]
        with self._timing():
            return self.bench.measure(graphs, FINAL_BLOCKS)

    def _screened(self, trial: Trial, make: Make) -> Trial:
        graph = self._captured(make)
        with self._timing():
            found = self.bench.screen(graph, self.best)
        if found.leads:
            self.best = graph
        return replace(trial, measurement=found.measurement)

    @contextmanager
    def _timing(self) -> Iterator[None]:
        """What the GPU spends in replays that are measured is told apart from what is spent around them."""
        before = self.bench.replayed
        with self.seconds.on("between replays"):
            yield
        spent = self.bench.replayed - before
        self.seconds.add({"measured replays": spent, "between replays": -spent})

    def _captured(self, make: Make) -> Timed:
        call = make(self.bench)
        with self.seconds.on("capturing graphs"):
            return self.bench.capture(call)

    def _torch_runner(self, problem: Problem, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.spec.torch_call(problem, dict(tensors))().items():
            tensors[name].copy_(value)

    def _wanted(self, rstd: bool) -> frozenset[str]:
        outputs = frozenset(n for n, t in self.spec.tensors(self.problem).items() if t.role == "output")
        return outputs if rstd else outputs - {"rstd"}


def compiled_form(spec: OpSpec, problem: Problem, tensors: dict[str, Tensor]) -> Form:
    """The plain formula of a problem, compiled for tensors like these. Raises whatever `torch.compile` raises."""
    with compiling_here():
        form = spec.compiled_call(problem)
        form(tensors)()
    return form


def work_of(plan: Plan) -> str:
    """Grids, arguments and workspace of a plan as text; kernels by name, since each rendering has its own."""
    launches = [(launch.kernel.__name__, *launch[1:]) for launch in plan.launches]
    return repr((launches, dict(plan.scratch)))


def _calls_of_variant(variant: Variant, bench: Bench) -> Call:
    return bench.call(variant)


def _calls_of(form: Form) -> Make:
    """Calls of a form of the op that binds its tensors."""

    def bind(bench: Bench) -> Call:
        with torch.cuda.stream(bench.stream):
            calls = [form(tensors) for tensors in bench.tensors]
        return lambda i: calls[i]()

    return bind


def _finite(error: float) -> float | None:
    """None for the infinite error of an output with NaN: neither SQLite nor JSON has a number for it."""
    return error if math.isfinite(error) else None
