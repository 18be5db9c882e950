"""Compile candidates on all cores, in processes of their own: a compiler that aborts or hangs costs one candidate."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class than the builtin on Python 3.10
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker

from .errors import CompileError, RenderError, TunegenError, first_line
from .model import Config, Problem, Resources, Silicon, TrialState

COMPILE_SECONDS = 120.0
"""Deadline of one compilation; the slowest seen takes 6 s."""

PR_SET_PDEATHSIG = 1

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


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM, where they raise, wait for the end of the block: an import of torch, say, since numpy's start
    drops what they raise, and the sweep would go on as if nobody had asked it to stop."""
    came: list[int] = []
    raising = signal.default_int_handler  # a signal that is ignored, by nohup say, stays so
    here = threading.current_thread() is threading.main_thread()  # no other one has handlers
    held = [number for number in (signal.SIGINT, signal.SIGTERM) if here and signal.getsignal(number) is raising]
    for number in held:  # not blocked: other threads of this process would take it
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, raising)
        if came:
            raise KeyboardInterrupt


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started inside never get Ctrl-C, not even while they import: it is for the parent, who ends them. The
    parent itself is not interrupted half way: such a child would say that nobody told it what to do."""
    resource_tracker.ensure_running()  # started later, it would lift the block
    with interrupts_held():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """For child processes: end when the parent has ended, even by SIGKILL.

    A worker of an executor would else wait for work for ever: it holds both ends of its queue. Linux sends the signal
    also to one that hangs in C and lets no thread run; the thread is for other systems.
    """
    parent = multiprocessing.parent_process()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
        self._begun: dict[Kernel, Future[Resources]] = {}
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # What runs still is of a problem that was left out: nobody waits for it, and it may never end.
        if kind is None and self._executor is not None and all(future.done() for future in self._begun.values()):
            self._executor.shutdown()
        else:
            self._kill()

    def prepare(self) -> None:
        """Start the processes, which import what they need while the caller finds out what there is to compile."""
        if self.compile_one is not compile_candidate or self._executor is not None:
            return  # a stand-in needs none of that; nor does a pool that runs
        for _ in range(self.workers):
            with suppress(BrokenProcessPool, OSError), deaf_to_interrupts():
                self._running().submit(import_compiler)

    def begin(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Start to compile configs that `compile` will be asked for, while the caller does something else."""
        for config in configs:
            kernel = replace(problem, rows=0), config
            if kernel not in self._known and (kernel not in self._begun or _is_lost(self._begun[kernel])):
                self._begun[kernel] = self._submit(problem, config)

    def compile(self, problem: Problem, configs: Sequence[Config]) -> Iterator[tuple[Config, Outcome]]:
        """Yield each config with its outcome, in the order given, as soon as that is known."""
        self.begin(problem, configs)
        for i, config in enumerate(configs):
            kernel = replace(problem, rows=0), config
            if kernel not in self._known:
                began = time.perf_counter()
                outcome = self._wait(self._begun.pop(kernel))
                if outcome is None:  # the pool broke, perhaps through another candidate: once more, alone
                    outcome = self._alone(problem, config)
                    self.begin(problem, configs[i + 1 :])
                if isinstance(outcome, Resources) or outcome[0] is not TrialState.RUNTIME:
                    self._known[kernel] = outcome
                self.waited += time.perf_counter() - began
            else:
                outcome = self._known[kernel]
            yield config, outcome

    def _submit(self, problem: Problem, config: Config) -> Future[Resources]:
        assert self.silicon is not None
        try:
            with deaf_to_interrupts():
                return self._running().submit(self.compile_one, problem, config, self.silicon)
        except (BrokenProcessPool, OSError) as error:  # the latter of a pool that breaks at this moment, too
            broken: Future[Resources] = Future()
            lost = BrokenProcessPool(str(error))
            lost.__cause__ = error
            broken.set_exception(lost)
            return broken

    def _running(self) -> ProcessPoolExecutor:
        if self._executor is None:
            # spawn: a forked child would inherit the parent's threads and, on a GPU machine, perhaps its CUDA context
            spawn = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.workers, spawn, initializer=follow_parent)
        return self._executor

    def _wait(self, future: Future[Resources]) -> Outcome | None:
        try:
            return future.result(self.deadline)
        except (CompileError, RenderError) as error:
            return TrialState.COMPILE, str(error)
        except MemoryError:  # of this machine: nothing against the candidate
            return TrialState.RUNTIME, "out of memory while it was compiled"
        except (BrokenProcessPool, CancelledError, FutureTimeoutError):
            return None

    def _alone(self, problem: Problem, config: Config) -> Outcome:
        self._kill()
        future = self._submit(problem, config)
        outcome = self._wait(future)
        if outcome is not None:
            return outcome
        hung = not future.done()
        cause = None if hung or future.cancelled() else getattr(future.exception(), "__cause__", None)
        self._kill()
        if isinstance(cause, OSError):
            return TrialState.RUNTIME, f"no process to compile in: {cause}"
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


def _is_lost(future: Future[Resources]) -> bool:
    """Whether the future went down with its pool and is to be submitted again."""
    return future.cancelled() or (future.done() and isinstance(future.exception(), BrokenProcessPool))
