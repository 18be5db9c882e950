"""The measuring process: a child that owns the GPU, with a deadline for every request. An illegal access, a hang or
an abort costs the candidate and this child, never the sweep; the parent never touches CUDA."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import Any

from .errors import WorkerError
from .model import Config, Problem, Resources, Silicon, Trial, TrialState

START_SECONDS = 180.0
OPEN_SECONDS = 120.0
SCREEN_SECONDS = 60.0
FINAL_SECONDS = 300.0


@dataclass(frozen=True)
class Facts:
    """What the measuring process is and runs on; `versions` names tunegen, torch, triton, driver."""

    silicon: Silicon
    versions: dict[str, str]


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on; one that is not installed is left out."""
    found = {}
    for name in ("tunegen", "torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class Worker:
    """A measuring process for one GPU, started on first use and replaced when it dies.

    `target(connection, device, seed)` is what the child runs; tests put a stand-in there.
    """

    def __init__(self, device: int, seed: int, target: Any = None) -> None:
        self.device, self.seed, self.target = device, seed, target or serve
        self.problem: Problem | None = None
        self.facts: Facts | None = None
        self.peak_bytes = 0
        self._opened: Problem | None = None
        self._process: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Facts:
        """Start the child if need be and return its facts. Raises WorkerError if it does not come up."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=self.target, args=(theirs, self.device, self.seed), daemon=True)
            self._process.start()
            theirs.close()
            self._opened = None
            self.facts = self._receive(START_SECONDS)
        assert self.facts is not None
        return self.facts

    def open(self, problem: Problem) -> None:
        """Make `problem` the one that `screen` and `finals` speak of."""
        self.problem = problem

    def screen(self, config: Config, resources: Resources | None) -> Trial:
        """Verify and time one config. Whatever happens to the child, a trial comes back."""
        assert self.problem is not None
        found = self._guarded("screen", (config, resources), SCREEN_SECONDS)
        if isinstance(found, Trial):
            return found
        state, reason = found
        return Trial(self.problem, config, state, reason=reason, resources=resources)

    def finals(self, trials: Sequence[Trial]) -> list[Trial]:
        """Time finalists side by side. If the child dies of it, one by one without the culprits."""
        found = self._guarded("finals", (list(trials),), FINAL_SECONDS)
        if isinstance(found, list):
            return found
        if len(trials) == 1:
            return []
        return [trial for one in trials for trial in self.finals([one])]

    def stop(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            assert self._connection is not None
            self._connection.close()
            self._process = self._connection = None

    def _guarded(self, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        try:
            self.start()
            if self._opened != self.problem:
                self._call("open", (self.problem,), OPEN_SECONDS)
                self._opened = self.problem
        except (TimeoutError, EOFError, OSError) as error:
            self.stop()
            raise WorkerError(
                f"the measuring process cannot open {self.problem and self.problem.label()}: {error!r}"
            ) from error
        try:
            found, peak, poisoned = self._call(method, arguments, seconds)
        except TimeoutError:
            self.stop()
            return TrialState.TIMEOUT, f"no answer within {seconds:g} s"
        except (EOFError, OSError):
            assert self._process is not None
            self._process.join(10)
            code = self._process.exitcode
            self.stop()
            return TrialState.CRASHED, f"ended its process, exit code {code}"
        self.peak_bytes = max(self.peak_bytes, peak)
        if poisoned:
            self.stop()
        return found

    def _call(self, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        assert self._connection is not None
        self._connection.send((method, arguments))
        return self._receive(seconds)

    def _receive(self, seconds: float) -> Any:
        assert self._connection is not None
        if not self._connection.poll(seconds):
            raise TimeoutError
        answer = self._connection.recv()
        if isinstance(answer, WorkerError):
            self.stop()
            raise answer
        return answer


def serve(connection: Connection, device: int, seed: int) -> None:
    """Body of the child: answer requests until the parent goes away."""
    from .serving import Server

    try:
        server = Server(device, seed)
    except Exception as error:
        connection.send(WorkerError(f"the measuring process cannot use cuda:{device}: {error}"))
        return
    connection.send(server.facts)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(server, method)(*arguments))
