"""Compile candidates on all cores, in processes of their own: a compiler that aborts or hangs costs one candidate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .errors import CompileError, PlanError, RenderError, TunegenError, first_line
from .model import Config, Problem, Resources, Silicon, TrialState
from .processes import LateError, LostError, Processes

COMPILE_SECONDS = 120.0
"""Deadline of one compilation; the slowest seen takes 6 s."""

Outcome = Resources | tuple[TrialState, str]
"""What a candidate needs, or why it does not compile."""

Compile = Callable[[Problem, Config, Silicon], Resources]

Kernel = tuple[Problem, Config]
"""A config, and its problem at 0 rows."""


def compile_candidate(problem: Problem, config: Config, silicon: Silicon) -> Resources:
    """The real thing; runs in a worker process of the pool."""
    from . import compile as compiling
    from .ops import op_spec
    from .render import template_of

    try:
        return compiling.compile_candidate(op_spec(problem.op), problem, config, silicon)
    except (TunegenError, MemoryError):
        raise
    except Exception as error:  # whatever a template does when it is imported, planned or bound
        reason = first_line(error)
        raise CompileError(f"{template_of(problem, config)}: {reason}") from error


def import_compiler() -> None:
    """What the first compilation of a process loads, the hash of Triton's files in its cache key among it (1 s)."""
    from . import compile, render  # noqa: F401

    with suppress(Exception):  # a release that has it elsewhere computes it when it is needed
        from triton.runtime.cache import triton_key

        triton_key()


class CompilePool:
    """Compiles configs and remembers them; what a config compiles to does not depend on the number of rows. `waited`
    are the seconds that a caller spent waiting. The silicon may be set once it is known."""

    def __init__(
        self,
        silicon: Silicon | None,
        workers: int | None = None,
        compile_one: Compile = compile_candidate,
        deadline: float = COMPILE_SECONDS,
    ) -> None:
        self.silicon, self.compile_one, self.deadline = silicon, compile_one, deadline
        self.workers = workers or len(os.sched_getaffinity(0))
        self.waited = 0.0
        self._known: dict[Kernel, Outcome] = {}
        self._begun: dict[Kernel, tuple[int, Future[Resources]]] = {}
        self._loading: list[Future[None]] = []
        self._processes = Processes(self.workers)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # What runs still is of a problem that was left out: nobody waits for it, and it may never end.
        under_way: list[Future[Any]] = [*(future for _, future in self._begun.values()), *self._loading]
        if kind is None and all(future.done() for future in under_way):
            self._processes.close()
        else:
            self._processes.kill()

    def prepare(self) -> None:
        """Start the processes, which import what they need while the caller finds out what there is to compile."""
        if self.compile_one is compile_candidate and not self._loading:  # a stand-in needs none of that
            self._processes.start()
            self._loading = [self._processes.submit(self.deadline, import_compiler) for _ in range(self.workers)]

    def begin(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Start to compile configs that `compile` will be asked for, while the caller does something else."""
        for config in configs:
            kernel = replace(problem, rows=0), config
            if kernel not in self._known and kernel not in self._begun:
                self._begun[kernel] = problem.rows, self._submit(problem, config)

    def compile(self, problem: Problem, configs: Sequence[Config]) -> Iterator[tuple[Config, Outcome]]:
        """Yield each config with its outcome, in the order given, as soon as that is known."""
        self.begin(problem, configs)
        for config in configs:
            kernel = replace(problem, rows=0), config
            if kernel not in self._known:
                began = time.perf_counter()
                outcome, lasts = self._compiled(problem, config, *self._begun.pop(kernel))
                if lasts:
                    self._known[kernel] = outcome
                self.waited += time.perf_counter() - began
            else:
                outcome = self._known[kernel]
            yield config, outcome

    def _compiled(self, problem: Problem, config: Config, rows: int, future: Future[Resources]) -> tuple[Outcome, bool]:
        """What became of a config that was begun for `rows` rows, and whether that holds for others."""
        try:
            outcome = self._outcome(problem, config, future)
        except PlanError as error:  # of that number of rows alone
            if rows != problem.rows:
                return self._compiled(problem, config, problem.rows, self._submit(problem, config))
            return (TrialState.COMPILE, str(error)), False
        return outcome, isinstance(outcome, Resources) or outcome[0] is not TrialState.RUNTIME

    def _submit(self, problem: Problem, config: Config) -> Future[Resources]:
        assert self.silicon is not None
        return self._processes.submit(self.deadline, self.compile_one, problem, config, self.silicon)

    def _outcome(self, problem: Problem, config: Config, future: Future[Resources]) -> Outcome:
        """What became of it; raises PlanError."""
        try:
            try:
                return future.result()
            except LostError:  # once more: something else may have ended the process, for want of memory say
                return self._submit(problem, config).result()
        except PlanError:
            raise
        except (CompileError, RenderError) as error:
            return TrialState.COMPILE, str(error)
        except MemoryError:  # of this machine: nothing against the candidate
            return TrialState.RUNTIME, "out of memory while it was compiled"
        except LateError:
            return TrialState.TIMEOUT, f"did not compile within {self.deadline:g} s"
        except LostError as error:
            if isinstance(error.__cause__, OSError):
                return TrialState.RUNTIME, f"no process to compile in: {error.__cause__}"
            return TrialState.CRASHED, "the compiler ended its process"
