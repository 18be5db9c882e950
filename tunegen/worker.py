"""The measuring process: a child that owns the GPU, with a deadline for every request. An illegal access, a hang or
an abort costs the candidate and this child, never the sweep; the parent never touches CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from .child import Answer, Facts, following, serve, serve_later
from .errors import WorkerError
from .model import Config, Problem, Resources, Trial, TrialState
from .processes import kill_group, launch
from .spending import Spent

START_SECONDS = 180.0
OPEN_SECONDS = 120.0
SCREEN_SECONDS = 60.0
FINAL_SECONDS = 300.0
STOP_SECONDS = 10.0
KILL_SECONDS = 10.0
"""A process that waits in the driver for a GPU that no longer answers cannot be killed: it is given up."""


@dataclass
class _Spare:
    """A child that is started ahead, and how many answers it owes."""

    process: Any
    connection: Connection
    owed: int = 0


class Worker:
    """A measuring process for one GPU, started on first use and replaced when it dies. `seconds` says what time was
    spent on.

    `target(connection, device, seed)` is what the child runs; tests put a stand-in there.
    """

    def __init__(self, device: int, seed: int, target: Any = None) -> None:
        self.device, self.seed, self.target = device, seed, target or serve
        self.problem: Problem | None = None
        self.facts: Facts | None = None
        self.peak_bytes = 0
        self.seconds = Spent()
        self._opened: Problem | None = None
        self._opening: Problem | None = None  # was sent for, not answered yet
        self._process: Any = None
        self._connection: Connection | None = None
        self._spare: _Spare | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(STOP_SECONDS if kind is None else 0.0)
        if self._spare is not None:
            spare, self._spare = self._spare, None
            spare.connection.close()
            _end(spare.process, 0.0)

    def launch(self) -> None:
        """Begin to start the child, if there is none; `start` waits until it is there. Raises WorkerError if none can
        be had."""
        if self._process is None:
            self._ahead(self.target)

    def prepare(self) -> None:
        """Begin to start a child for later, while another one works: the next `start` then takes that, if one could
        be had."""
        with contextlib.suppress(WorkerError):
            self._ahead(serve_later if self.target is serve else self.target)

    def _ahead(self, target: Any) -> None:
        if self._spare is None:
            self._spare = _Spare(*self._launch(target))

    def foresee(self, problem: Problem) -> None:
        """Have the child that is for later compile what the finals of `problem` need, while this one measures."""
        if self._spare is not None:
            with contextlib.suppress(OSError):  # it has ended: another one is started when it is needed
                self._spare.connection.send(("foresee", (problem,)))
                self._spare.owed += 1

    def _launch(self, target: Any) -> tuple[Any, Connection]:
        try:
            return launch(following, target, self.device, self.seed)
        except OSError as error:
            raise WorkerError(f"the measuring process cannot be started (cuda:{self.device}): {error}") from error

    def start(self) -> Facts:
        """Start the child if need be and return its facts. Raises WorkerError if it does not come up."""
        if self._process is None:
            spare, self._spare, self._opened = self._spare, None, None
            beside = spare is not None and self.facts is not None  # it was started while another one worked
            child = spare or _Spare(*self._launch(self.target))
            self._process, self._connection = child.process, child.connection
            try:
                with self.seconds.on("starting processes"):
                    self.facts = self._receive(START_SECONDS)
                with self.seconds.on("compiling the plain formula"):
                    for _ in range(child.owed):
                        self._receive(OPEN_SECONDS)
            except (EOFError, OSError, WorkerError) as error:  # TimeoutError is an OSError
                self.stop()
                if beside:  # it may have been refused for that one, which has ended by now
                    return self.start()
                if isinstance(error, WorkerError):
                    raise
                what = "says nothing" if isinstance(error, TimeoutError) else "ended"
                raise WorkerError(f"the measuring process {what} at its start (cuda:{self.device})") from error
        assert self.facts is not None
        return self.facts

    def open(self, problem: Problem) -> None:
        """Make `problem` the one that `screen` and `finals` speak of."""
        self.problem = problem

    def begin(self) -> None:
        """Have a child that runs begin to open the problem, while the caller prepares what it will ask for."""
        if self._connection is not None and self._opened != self.problem and self._opening is None:
            with contextlib.suppress(OSError):  # it has ended: whatever is asked for next says so
                self._connection.send(("open", (self.problem,)))
                self._opening = self.problem

    def screen(self, config: Config, resources: Resources | None) -> Trial:
        """Verify and time one config. Whatever happens to the child, a trial comes back."""
        (trial,) = self.screens([(config, resources)])
        return trial

    def screens(self, wanted: Sequence[tuple[Config, Resources | None]]) -> Iterator[Trial]:
        """The same for several, in their order. The child is at the next one while the caller stores a trial."""
        assert self.problem is not None
        under_way = False
        try:
            for number, (config, resources) in enumerate(wanted):
                if not under_way:
                    self._ready()
                    self._send("screen", (config, resources))
                found, under_way = self._outcome(SCREEN_SECONDS), False
                if number + 1 < len(wanted) and self._process is not None:
                    self._send("screen", wanted[number + 1])
                    under_way = True
                if isinstance(found, Trial):
                    yield found
                else:
                    yield Trial(self.problem, config, found[0], reason=found[1], resources=resources)
        finally:
            if under_way:  # nobody will read the answer
                self.stop()

    def finals(self, trials: Sequence[Trial]) -> list[Trial]:
        """Time finalists side by side; those that fail the gate this time are left out. If the child dies of it, one by
        one, the culprits with what became of them."""
        found = self._guarded("finals", (list(trials),), FINAL_SECONDS)
        if isinstance(found, list):
            return found
        if len(trials) == 1:
            state, reason = found
            return [replace(trials[0], state=state, reason=reason, measurement=None)]
        # Timed one after the other: they share no rounds, so that nothing can be said of ties.
        found = [trial for one in trials for trial in self.finals([one])]
        return [replace(t, measurement=t.measurement and replace(t.measurement, rounds=())) for t in found]

    def stop(self, patience: float = 0.0) -> None:
        """End the child; with `patience` it may finish by itself in that many seconds, once the connection is
        closed."""
        if self._process is not None:
            assert self._connection is not None
            self._connection.close()
            _end(self._process, patience)
            self._process = self._connection = self._opening = None

    def _guarded(self, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        self._ready()
        self._send(method, arguments)
        return self._outcome(seconds)

    def _ready(self) -> None:
        """Have a child that runs and has the problem open. Raises WorkerError."""
        try:
            self.start()
            with self.seconds.on("opening problems"):
                self._finish_opening()
        except (EOFError, OSError, WorkerError) as error:
            self.stop()
            reason = str(error) or type(error).__name__
            raise WorkerError(f"cannot measure {self.problem and self.problem.label()}: {reason}") from error

    def _outcome(self, seconds: float) -> Any:
        """What the child answers, or what has become of it."""
        try:
            answer = Answer(*self._receive(seconds))
        except TimeoutError:
            self.stop()
            return TrialState.TIMEOUT, f"no answer within {seconds:g} s"
        except (EOFError, OSError):
            assert self._process is not None
            self._process.join(10)
            code = self._process.exitcode
            self.stop()
            return TrialState.CRASHED, f"ended its process, exit code {code}"
        self.peak_bytes = max(self.peak_bytes, answer.peak_bytes)
        self.seconds.add(answer.seconds)
        if answer.poisoned:
            self.stop()
        return answer.result

    def _finish_opening(self) -> None:
        if self._opening is not None:
            opening, self._opening, self._opened = self._opening, None, None
            try:
                self._receive(OPEN_SECONDS)
                self._opened = opening
            except WorkerError:
                if opening == self.problem:
                    raise
                self.start()  # the error of a problem that is not wanted any more has ended the child
        if self._opened != self.problem:
            self._send("open", (self.problem,))
            self._receive(OPEN_SECONDS)
            self._opened = self.problem

    def _send(self, method: str, arguments: tuple[Any, ...]) -> None:
        assert self._connection is not None
        with contextlib.suppress(OSError):  # it has ended: reading the answer says so
            self._connection.send((method, arguments))

    def _receive(self, seconds: float) -> Any:
        assert self._connection is not None
        if not self._connection.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:g} s")
        answer = self._connection.recv()
        if isinstance(answer, WorkerError):
            self.stop()
            raise answer
        return answer


def _end(process: Any, patience: float) -> None:
    process.join(patience)
    kill_group(process)
    process.join(KILL_SECONDS)
