"""One sweep on several GPUs of a host: a process for each, which takes problem after problem from a list that all GPUs
of the same kind share. GPUs that differ tune every problem for themselves, and never answer for each other.

A process that ends early, whatever the reason, costs its own work at most: its problems go to another GPU of its kind
that still takes some, and else stay for the next sweep; each trial is in the database already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from .errors import WorkerError
from .gpu_process import MakeWorker, Order, sweep_device
from .model import Problem, Silicon
from .pool import Compile, compile_candidate
from .processes import launch
from .silicon import kind_of
from .sweep import Listener, SweepResult
from .worker import STOP_SECONDS, Worker


class Listeners(Protocol):
    """Gives each GPU a listener of its own."""

    def of(self, name: str) -> Listener:
        """The listener of that GPU."""


@dataclass
class Member:
    """The process of one GPU, as its parent sees it."""

    device: int
    process: Any
    connection: Connection
    listener: Listener
    silicon: Silicon | None = None
    held: list[Problem] = field(default_factory=list)
    hinted: Problem | None = None
    """What it is likely given next: it may have begun to compile that. Another GPU that has nothing else gets it."""
    result: SweepResult | None = None
    failure: str = ""

    def compiled(self) -> set[Problem]:
        """The problems at 0 rows of which this process has compiled kernels, or may have begun to."""
        return {replace(problem, rows=0) for problem in (*self.held, self.hinted) if problem is not None}


def sweep_gpus(
    db: Path,
    problems: Sequence[Problem],
    budget: int,
    seed: int,
    listeners: Listeners,
    arguments: dict[str, Any],
    devices: Sequence[int],
    make_worker: MakeWorker = Worker,
    compile_one: Compile = compile_candidate,
) -> list[SweepResult]:
    """Tune `problems` on several GPUs at once; a result for each GPU that finished.

    Raises WorkerError with the reason of the first one if none did. An interrupt ends all of them; each loses the trial
    that is running at most.
    """
    cores = max(len(os.sched_getaffinity(0)) // len(devices), 1)
    order = Order(db, budget, seed, arguments, cores, make_worker, compile_one)
    members = [_start(device, order, listeners) for device in devices]
    try:
        _serve(members, problems)
    finally:
        for member in members:
            member.connection.close()  # whoever still sweeps ends at its next trial, stored as interrupted
        for member in members:
            member.process.join(STOP_SECONDS)
            member.process.kill()
    found = [member.result for member in members if member.result is not None]
    if not found:
        raise WorkerError(next(member.failure for member in members if member.failure))
    return [_with_lost(result, found, members, problems) for result in found]


def _with_lost(
    result: SweepResult, results: Sequence[SweepResult], members: Sequence[Member], problems: Sequence[Problem]
) -> SweepResult:
    """A result that names the problems which no GPU of its kind finished, with the reason of one that ended early."""
    alike = [other for other in results if kind_of(other.silicon) == kind_of(result.silicon)]
    known = {t.problem for other in alike for t in other.finals} | {p for other in alike for p in other.left_out}
    why = next((member.failure for member in members if member.failure), "no GPU took it")
    return replace(result, left_out={**result.left_out, **{p: why for p in problems if p not in known}})


def _start(device: int, order: Order, listeners: Listeners) -> Member:
    try:
        process, connection = launch(sweep_device, device, order, daemon=False)
    except OSError as error:
        raise WorkerError(f"the process of cuda:{device} cannot be started: {error}") from error
    return Member(device, process, connection, listeners.of(f"cuda:{device}"))


def _serve(members: Sequence[Member], problems: Sequence[Problem]) -> None:
    """Answer the processes until all of them have ended."""
    waiting: dict[Silicon, list[Problem]] = {}
    by_connection: dict[Any, Member] = {member.connection: member for member in members}
    while by_connection:
        for connection in wait(list(by_connection)):
            member = by_connection[connection]
            try:
                what, value = member.connection.recv()
            except (EOFError, OSError):
                del by_connection[connection]
                _ended(member, waiting)
                continue
            if what == "ready":
                member.silicon = value
                waiting.setdefault(kind_of(value), list(problems))
            elif what == "next":
                _give(member, members, waiting)
            elif what in ("stage", "trial"):
                getattr(member.listener, what)(*value)
            else:
                setattr(member, what, value)


def _next(left: Sequence[Problem], member: Member, members: Sequence[Member]) -> Problem:
    """The first problem with kernels that this process has compiled already, or that no other one has, or any."""
    own = member.compiled()
    others = set().union(*(other.compiled() for other in members if other is not member))

    def rank(problem: Problem) -> tuple[bool, bool]:
        kernels = replace(problem, rows=0)
        return kernels not in own, kernels in others

    return min(left, key=rank)


def _give(member: Member, members: Sequence[Member], waiting: dict[Silicon, list[Problem]]) -> None:
    """Send a process its next problem, None at the end, and what it would be given behind it, which stays free."""
    assert member.silicon is not None
    left = waiting[kind_of(member.silicon)]
    problem = _next(left, member, members) if left else None
    member.hinted = None
    if problem is not None:
        left.remove(problem)
        member.held.append(problem)
        member.hinted = _next(left, member, members) if left else None
    with contextlib.suppress(OSError):  # it has just ended; that is seen when its connection is
        member.connection.send((problem, member.hinted))


def _ended(member: Member, waiting: dict[Silicon, list[Problem]]) -> None:
    """Take back what a process did not finish."""
    if member.result is not None:
        return
    member.process.join(10)
    code = member.process.exitcode
    member.failure = member.failure or f"the process of cuda:{member.device} ended, exit code {code}"
    if member.silicon is not None:
        waiting[kind_of(member.silicon)].extend(member.held)
        member.held, member.hinted = [], None
    member.listener.stage(f"left out: {member.failure}", 0)
