"""Processes that do what they are asked, one thing at a time each: one that ends or hangs costs what it was doing.

No executor of the standard library, in which the end of one process is the end of all and of what they were doing. Up
to Python 3.11 it is worse: its manager ends the others without the lock that `submit` holds, which may start one more
and so change the dict that the manager goes through, or add a task that nobody looks at any more.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from .errors import first_line

PR_SET_PDEATHSIG = 1
START_SECONDS = 180.0
STOP_SECONDS = 10.0
"""That a process which has nothing to do may take to end by itself."""


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

    Only who reads from a pipe sees that its other end is gone: one that compiles would go on. Linux sends the signal
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


def launch(target: Callable[..., None], *arguments: Any, daemon: bool = True) -> tuple[SpawnProcess, Connection]:
    """Start a process that runs `target` with its end of a pipe and the arguments; returns it and the other end. Raises
    OSError where none can be had."""
    # spawn: a forked child would inherit the parent's threads and, on a GPU machine, perhaps its CUDA context
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=daemon)
    try:
        with deaf_to_interrupts():
            process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def lead_group() -> None:
    """For child processes: what they start can be killed together with them."""
    os.setpgid(0, 0)


def kill_group(process: SpawnProcess) -> None:
    """Kill a process and what it has started: a ptxas that hangs would go on for ever."""
    if process.is_alive():  # else the number may be another's by now
        with suppress(ProcessLookupError):  # it has only just started, and leads no group yet
            os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()


class LostError(Exception):
    """The process ended; if the cause is an OSError, none could be had that came up."""


class LateError(Exception):
    """The process did not answer in time, and was ended."""


class Processes:
    """Up to `count` processes, each started when it is needed, if not before, and replaced when it has ended.

    Each belongs to a thread, which hands it one call after the other. Linux ends a process with the thread that started
    it (see `follow_parent`): the threads stay until all of this ends.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count)
        self._own = threading.local()
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._spare: list[_Child] = []
        self._ended = False

    def start(self) -> None:
        """Start all of them now, as far as they can be had. Threads would wait for this one, which imports torch next:
        the last of 16 was started .6 s later by them (two cores)."""
        with self._lock, suppress(LostError):
            while len(self._children) < self.count:
                self._spare.append(self._new())

    def submit(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a process call it, which may take so many seconds. The future raises what the call raises, LostError or
        LateError."""
        try:
            return self._threads.submit(self._ask, seconds, call, arguments)
        except RuntimeError as error:  # no thread can be had
            future: Future[Any] = Future()
            future.set_exception(_not_to_be_had(str(error)))
            return future

    def close(self) -> None:
        """End them in order; they have nothing to do any more."""
        for child in self._children:
            child.connection.close()
        for child in self._children:
            child.process.join(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End them, whatever they do; what was submitted is cancelled or lost."""
        with self._lock:
            self._ended = True
            for child in self._children:
                kill_group(child.process)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(self, seconds: float, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        child = self._mine()
        try:
            return child.ask(seconds, call, arguments)
        except (LostError, LateError):
            with self._lock:
                self._children.discard(child)
            del self._own.child
            child.end()
            raise

    def _mine(self) -> _Child:
        """The process of this thread."""
        if not hasattr(self._own, "child"):
            with self._lock:
                self._own.child = self._spare.pop() if self._spare else self._new()
        child: _Child = self._own.child
        return child

    def _new(self) -> _Child:
        if self._ended:
            raise LostError("the processes are being ended")
        try:
            child = _Child()
        except OSError as error:
            raise LostError(str(error)) from error
        self._children.add(child)
        return child


def _not_to_be_had(reason: str) -> LostError:
    error = LostError(reason)
    error.__cause__ = OSError(reason)
    return error


class _Child:
    """A process as its parent sees it."""

    def __init__(self) -> None:
        self.process, self.connection = launch(_serve)
        self.up = False

    def ask(self, seconds: float, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """What the call returns or raises there; the time that the process takes to come up is no part of it."""
        self._come_up()
        try:
            self.connection.send((call, arguments))
            if not self.connection.poll(seconds):
                raise LateError(f"no answer within {seconds:g} s")
            answer, error, where = self.connection.recv()
        except (EOFError, OSError):
            raise LostError("the process ended") from None
        if error is not None:
            raise error from RuntimeError(f"in a process of its own:\n{where}")
        return answer

    def _come_up(self) -> None:
        """Wait until it is there. If it ends before, for want of threads say, what it would be asked has no part in
        that."""
        if self.up:
            return
        reason = "it ended at its start"
        with suppress(EOFError, OSError):
            if self.connection.poll(START_SECONDS):
                self.up = self.connection.recv()
            else:
                reason = f"it says nothing for {START_SECONDS:g} s at its start"
        if not self.up:
            raise _not_to_be_had(reason)

    def end(self) -> None:
        """Leave nothing behind."""
        self.connection.close()
        kill_group(self.process)
        self.process.join(STOP_SECONDS)


def _serve(connection: Connection) -> None:
    """Body of a process: call what it is sent until the parent closes the connection."""
    lead_group()
    follow_parent()
    with suppress(EOFError, ConnectionError):
        connection.send(True)
        while True:
            call, arguments = connection.recv()
            try:
                answer = pickle.dumps((call(*arguments), None, ""))
            except Exception as error:
                answer = _failure(error, traceback.format_exc())
            connection.send_bytes(answer)


def _failure(error: Exception, where: str) -> bytes:
    """What is sent of an error: itself, if it can be."""
    try:
        sent = pickle.dumps((None, error, where))
        pickle.loads(sent)  # an error whose constructor takes other arguments cannot be read again
    except Exception:
        return pickle.dumps((None, RuntimeError(first_line(error)), where))
    return sent
