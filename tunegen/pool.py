"""Compile candidates on all cores, in processes of their own: a compiler that aborts or hangs costs one candidate."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from .errors import CompileError
from .model import Config, Problem, Resources, Silicon, TrialState

COMPILE_SECONDS = 120.0
"""Deadline of one compilation; the slowest seen takes 6 s."""

Outcome = Resources | tuple[TrialState, str]
"""What a candidate needs, or why it does not compile."""

Compile = Callable[[Problem, Config, Silicon], Resources]


def compile_candidate(problem: Problem, config: Config, silicon: Silicon) -> Resources:
    """The real thing; runs in a worker process of the pool."""
    from . import compile as compiling
    from .ops import op_spec

    return compiling.compile_candidate(op_spec(problem.op), problem, config, silicon)


class CompilePool:
    """Compiles batches of configs and remembers them; what a config compiles to does not depend on the number of
    rows."""

    def __init__(
        self,
        silicon: Silicon,
        workers: int | None = None,
        compile_one: Compile = compile_candidate,
        deadline: float = COMPILE_SECONDS,
    ) -> None:
        self.silicon, self.compile_one, self.deadline = silicon, compile_one, deadline
        self.workers = workers or len(os.sched_getaffinity(0))
        self._known: dict[tuple[Problem, Config], Outcome] = {}
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._executor is not None:
            self._executor.shutdown()
        else:
            self._kill()

    def compile(self, problem: Problem, configs: Sequence[Config]) -> Iterator[tuple[Config, Outcome]]:
        """Yield each config with its outcome, in the order given, as soon as that is known."""
        key = replace(problem, rows=0)
        futures = {c: self._submit(problem, c) for c in configs if (key, c) not in self._known}
        for config in configs:
            if (key, config) not in self._known:
                outcome = self._wait(futures[config])
                if outcome is None:  # the pool broke, perhaps through another candidate: once more, alone
                    outcome = self._alone(problem, config)
                self._known[key, config] = outcome
            yield config, self._known[key, config]

    def _submit(self, problem: Problem, config: Config) -> Future[Resources]:
        if self._executor is None:
            # spawn: a forked child would inherit the parent's threads and, on a GPU machine, perhaps its CUDA context
            self._executor = ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"))
        try:
            return self._executor.submit(self.compile_one, problem, config, self.silicon)
        except BrokenProcessPool as error:
            broken: Future[Resources] = Future()
            broken.set_exception(error)
            return broken

    def _wait(self, future: Future[Resources]) -> Outcome | None:
        try:
            return future.result(self.deadline)
        except CompileError as error:
            return TrialState.COMPILE, str(error)
        except (BrokenProcessPool, TimeoutError):
            return None

    def _alone(self, problem: Problem, config: Config) -> Outcome:
        self._kill()
        future = self._submit(problem, config)
        outcome = self._wait(future)
        if outcome is not None:
            return outcome
        hung = not future.done()
        self._kill()
        if hung:
            return TrialState.TIMEOUT, f"did not compile within {self.deadline:g} s"
        return TrialState.CRASHED, "the compiler ended its process"

    def _kill(self) -> None:
        if self._executor is not None:
            processes = list((self._executor._processes or {}).values())
            self._executor.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            self._executor = None
