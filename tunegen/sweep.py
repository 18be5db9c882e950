"""The main job: search every problem, time the finalists again in a fresh process, store each trial at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

from .dispatch import digest_today, triton_minor
from .errors import StoreError, WorkerError
from .evaluate import COMPILED, TORCH
from .guide import make_sampler
from .model import PROTOCOL, Config, Problem, Resources, Silicon, Trial, TrialState
from .ops import op_spec
from .pool import Compile, CompilePool, compile_candidate
from .records import StoredTrial
from .sampler import Sampler
from .space import load_space
from .spending import Spent
from .standing import is_current, shortlist
from .store import VERSIONS, Store
from .ties import judged
from .worker import STOP_SECONDS, Worker

BATCH = 16
AHEAD = 4
"""Compilations that may wait for each process of the pool, beside the batch; the slowest seen takes 6 s."""

SPILLS = 32
"""Bytes a thread. So few are spilled outside of loops, or once in them: at 524288x128 backward a `persistent_atomic`
that spills 8 takes .2 % longer than the fastest, which spills nothing (H200)."""

WRONG_AGAIN = "passed the gate when it was screened, failed it in the finals"


class Listener(Protocol):
    """Is told what happens, to show it."""

    def stage(self, text: str, total: int) -> None:
        """Something begins that takes at most `total` trials."""

    def trial(self, trial: Trial) -> None:
        """A candidate is done, or was stored by an earlier sweep."""


@dataclass
class Context:
    """What the steps of a sweep share."""

    store: Store
    sweep_id: int
    silicon: Silicon
    versions: Mapping[str, str]
    pool: CompilePool
    listener: Listener
    seed: int
    budget: int
    then: Mapping[Problem, Problem] = field(default_factory=dict)
    """The problem that is likely behind each one, where that is known; it may grow."""
    _certain: dict[Problem, list[Config]] = field(default_factory=dict)

    def save(self, trial: Trial) -> Trial:
        """Store a trial in a transaction of its own and show it."""
        return self.save_all([trial])[0]

    def save_all(self, trials: Sequence[Trial]) -> list[Trial]:
        """The same for trials that belong together: all are stored or none."""
        self.store.add_all(self.sweep_id, trials, PROTOCOL, triton_minor(), self.versions.get("torch", ""))
        for trial in trials:
            self.listener.trial(trial)
        return list(trials)

    def sampler(self, problem: Problem, standing: Sequence[Trial]) -> Sampler:
        """That of a problem, whose trials in `standing` it goes on from."""
        return make_sampler(self.store, problem, self.silicon, self.seed, self.budget, standing)

    def ask(self, problem: Problem, sampler: Sampler) -> list[Config]:
        """The next batch, which begins to compile, and behind it what will be asked for later in any case, that of the
        problem behind too: compilers that wait for the next batch would make the GPU wait afterwards. Before they went
        on to the problem behind, it waited 59 of the 310 s that 66 problems took (H200, 16 cores)."""
        batch, room = sampler.ask(BATCH), AHEAD * self.pool.workers
        certain = sampler.certain()[:room]
        self.pool.begin(problem, [*batch, *certain])
        if len(certain) == sampler.left and (behind := self.then.get(problem)):
            self.pool.begin(behind, self._certain_of(behind)[: room - len(certain)])
        return batch

    def _certain_of(self, problem: Problem) -> list[Config]:
        if problem not in self._certain:
            self._certain[problem] = self.sampler(problem, self.standing(problem, adopt=False)).certain()
        return self._certain[problem]

    def standing(self, problem: Problem, adopt: bool = True) -> list[Trial]:
        """Trials of this problem in the database that stand; those of unfinished sweeps become part of this sweep,
        unless another GPU may yet be given the problem."""
        found: dict[Any, StoredTrial] = {}
        for kind in ("measured", "baseline"):
            found |= self.store.seen(self.silicon, problem, triton_minor(), PROTOCOL, kind)
        if adopt:
            self.store.adopt(self.sweep_id, found.values())
        torch = self.versions.get("torch", "")
        return [trial for trial in found.values() if is_current(trial, self.silicon, torch)]


@dataclass(frozen=True)
class SweepResult:
    """What a sweep on a GPU found: the trials of the finals, the GPU, versions, the peak of its memory in use, what the
    seconds were spent on, and which problems were left out and why."""

    finals: list[Trial]
    silicon: Silicon
    versions: str
    peak_bytes: int
    seconds: dict[str, float]
    left_out: dict[Problem, str]


def together(results: Sequence[SweepResult]) -> SweepResult:
    """What several GPUs of one kind found, as one result; the peak is that of one GPU."""
    seconds = Spent()
    for result in results:
        seconds.add(result.seconds)
    finals = [trial for result in results for trial in result.finals]
    done = {trial.problem for trial in finals}
    left_out = {p: why for result in results for p, why in result.left_out.items() if p not in done}
    peak = max(result.peak_bytes for result in results)
    return replace(results[0], finals=finals, peak_bytes=peak, seconds=dict(seconds), left_out=left_out)


def sweep_gpu(
    store: Store,
    problems: Iterable[Problem],
    budget: int,
    seed: int,
    listener: Listener,
    arguments: dict[str, Any],
    worker: Worker | None = None,
    compile_one: Compile = compile_candidate,
    pool: CompilePool | None = None,
    then: Mapping[Problem, Problem] = MappingProxyType({}),
) -> SweepResult:
    """Tune `problems` on the first GPU, or that of `worker`, compiling on all cores, or in `pool`. Where they are
    given one by one, `then` says which is likely behind each, by the time that it is given. An interrupt loses at most
    the trial that is running; the sweep is then stored as interrupted, as are the trials of a problem that had to be
    left out half done."""
    with worker or Worker(0, seed) as worker, pool or CompilePool(None, None, compile_one) as pool:
        listener.stage("starting the measuring process", 0)
        worker.launch()
        pool.prepare()
        facts = worker.start()
        pool.silicon = facts.silicon
        worker.prepare()  # for the finals, which are timed in a fresh process
        silicon, versions = facts.silicon, {k: v for k, v in facts.versions.items() if k in VERSIONS}
        taken: list[Problem] = []
        left_out: dict[Problem, str] = {}
        with sweep_row(store, silicon, arguments, versions, seed) as sweep_id:
            then = dict(pairwise(problems)) if isinstance(problems, Sequence) else then
            context = Context(store, sweep_id, silicon, facts.versions, pool, listener, seed, budget, then)
            shortlists = per_problem(noted(problems, taken), listener, lambda p: search(context, worker, p), left_out)
            worker.stop(STOP_SECONDS)
            finals = per_problem(shortlists, listener, lambda p: final(context, worker, p, shortlists[p]), left_out)
            for problem in set(taken) - finals.keys():
                store.set_apart(sweep_id, problem)
        shown = ", ".join(f"{name} {value}" for name, value in versions.items())
        found = [trial for trials in finals.values() for trial in trials]
        seconds = {"waiting for the compiler": pool.waited, **worker.seconds}
        return SweepResult(found, silicon, shown, worker.peak_bytes, seconds, left_out)


def noted(problems: Iterable[Problem], taken: list[Problem]) -> Iterator[Problem]:
    """The problems, each put into `taken` as it is given out: they may be drawn from a list that others draw from."""
    for problem in problems:
        taken.append(problem)
        yield problem


@contextmanager
def sweep_row(
    store: Store, silicon: Silicon, arguments: dict[str, Any], versions: Mapping[str, str], seed: int
) -> Iterator[int]:
    """A row of `sweeps` that says how it ended; if that cannot be written the next sweep will, and this one ends with
    its own error."""
    sweep_id = store.begin_sweep(silicon, arguments, versions, seed)
    try:
        yield sweep_id
        store.finish_sweep(sweep_id, "finished")
    except BaseException:
        with suppress(StoreError):
            store.finish_sweep(sweep_id, "interrupted")
        raise


def per_problem(
    problems: Iterable[Problem],
    listener: Listener,
    work: Callable[[Problem], list[Trial]],
    left_out: dict[Problem, str],
) -> dict[Problem, list[Trial]]:
    """Do the work for each problem; one that the measuring process cannot open, for want of memory say, is said and
    left out, with its reason. Raises the WorkerError if that is so for all of them."""
    found: dict[Problem, list[Trial]] = {}
    failure: WorkerError | None = None
    for problem in problems:
        try:
            found[problem] = work(problem)
        except WorkerError as error:
            failure, left_out[problem] = error, str(error)
            listener.stage(f"left out: {error}", 0)
    if failure is not None and not found:
        raise failure
    return found


def search(context: Context, worker: Worker, problem: Problem) -> list[Trial]:
    """Screen one problem's candidates; returns the shortlist, best first, torch and the built-in default included."""
    worker.open(problem)
    standing = context.standing(problem)
    if not any(trial.config == TORCH and trial.stage == "screen" for trial in standing):
        worker.begin()  # it will be needed: meanwhile candidates are found, ranked and begin to compile
    if not any(trial.config == COMPILED for trial in standing):
        worker.foresee(problem)
    sampler = context.sampler(problem, standing)
    done = {trial.config: trial for trial in standing if trial.stage == "screen"}
    context.listener.stage(problem.label(), sampler.total + (TORCH not in done))
    spill_free = {c.family for c, t in done.items() if t.resources and not t.resources.spill_bytes}
    batch = context.ask(problem, sampler)
    if TORCH not in done:
        done[TORCH] = context.save(worker.screen(TORCH, None))
    while batch:
        # One batch ahead: it compiles on all cores while the GPU measures this one.
        following = context.ask(problem, sampler)
        for config, trial in screen_batch(context, worker, problem, batch, spill_free):
            done[config] = context.save(trial)
            sampler.tell(config, trial.measurement.score if trial.measurement else None)
        batch = following
    finalists = shortlist(list(done.values()), load_space(problem.op).default(problem, context.silicon))
    timed = {trial.config for trial in standing if trial.stage == "final"}
    if op_spec(problem.op).nestable(problem) and not {trial.config for trial in finalists} <= timed:
        # What they are verified with in the finals beside what was screened: the measuring process would compile it.
        templated = [trial.config for trial in finalists if trial.config != TORCH]
        context.pool.begin(replace(problem, layout="nested"), templated)
    return finalists


def screen_batch(
    context: Context, worker: Worker, problem: Problem, batch: Sequence[Config], spill_free: set[str]
) -> Iterator[tuple[Config, Trial]]:
    """Compile a batch on all cores, drop what cannot win, measure the rest one by one. `spill_free` are the families of
    which a config is known that does not spill; more are added."""
    digests = {config: digest_today(problem, config) for config in batch}  # before a crash, say, while they compile
    outcomes = dict(context.pool.compile(problem, batch))
    # Within a family: at N = 16384 every `persistent_partials` spills, and is timed.
    spill_free |= {c.family for c, o in outcomes.items() if isinstance(o, Resources) and not o.spill_bytes}
    wanted: list[tuple[Config, Resources]] = []
    for config in batch:
        outcome = outcomes[config]
        if not isinstance(outcome, Resources):
            yield config, Trial(problem, config, outcome[0], digest=digests[config], reason=outcome[1])
        elif (outcome.spill_bytes or 0) > SPILLS and config.family in spill_free:
            reason = f"spills {outcome.spill_bytes} bytes a thread where others of its family do not"
            state, digest = TrialState.CONSTRAINT, digests[config]
            yield config, Trial(problem, config, state, digest=digest, reason=reason, resources=outcome)
        else:
            wanted.append((config, outcome))
    for trial in worker.screens(wanted):
        family = load_space(problem.op).family(problem.direction, trial.config.family)
        kind = "baseline" if family is not None and family.baseline else trial.kind
        yield trial.config, replace(trial, digest=trial.digest or digests[trial.config], kind=kind)


def final(context: Context, worker: Worker, problem: Problem, finalists: Sequence[Trial]) -> list[Trial]:
    """Time the shortlist side by side, `torch.compile` of the plain formula as a baseline beside it.

    A finalist that fails this time loses the time of its screening too: it is right or whole by luck. A time of another
    finished sweep gives way to what the gate says, and to no other failure (see `records.REPLACED_BY`).
    """
    done = {trial.config: trial for trial in context.standing(problem) if trial.stage == "final"}
    if {t.config for t in finalists} <= done.keys():
        return list(done.values())
    context.listener.stage(f"finals of {problem.label()}", len(finalists) + 1)
    worker.open(problem)
    compiled = Trial(problem, COMPILED, TrialState.OK, kind="baseline")
    found = {trial.config: trial for trial in worker.finals([*finalists, compiled])}
    for trial in finalists:
        found.setdefault(trial.config, replace(trial, state=TrialState.INCORRECT, reason=WRONG_AGAIN))
    for trial in found.values():
        if trial.state is not TrialState.OK:
            for stage in ("screen", "final"):
                context.save(replace(trial, stage=stage, measurement=None))
    rivals = [config for config in (load_space(problem.op).default(problem, context.silicon), TORCH) if config]
    good = [trial for trial in found.values() if trial.state is TrialState.OK]
    return context.save_all(judged(good, rivals, op_spec(problem.op).bytes_moved(problem)))
