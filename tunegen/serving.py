"""What the measuring process does with a request; only imported there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from . import silicon
from .ahead import NICE, Ahead, load_autograd_quietly, load_compiler
from .bench import WARM_UP_SECONDS, tensors_of
from .child import Answer, Facts, installed_versions
from .errors import first_line
from .evaluate import Form, Known, Session, compiled_form
from .model import Config, Problem, Resources, Trial, TrialState
from .ops import op_spec

KEPT_BYTES = 1 << 30
"""Freed memory that is kept for the next candidate, at most."""
WARM_UP_AGAIN = 0.02
"""Seconds of warm-up where another problem was measured just before: references and inputs are computed on the GPU too,
and a score is a share of a sentinel that has the same clocks."""


class Server:
    """Holds the open session; every answer tells whether the CUDA context still works."""

    def __init__(self, device: int, seed: int, spare: bool) -> None:
        """A `spare` server is for later and has time to load the compiler of the baselines meanwhile."""
        self.device, self.seed = torch.device("cuda", device), seed
        torch.cuda.set_device(self.device)
        self.facts = Facts(silicon.query(device), versions(device))
        self.session: Session | None = None
        self.forms: dict[Problem, Form] = {}
        self.known: Known = {}
        self.warm = False
        self.ahead = Ahead(load_compiler, NICE) if spare else Ahead(load_autograd_quietly)

    def foresee(self, problem: Problem) -> None:
        """Compile the baseline of `problem`, for its finals. It runs once, on inputs that are then dropped: a few
        kernels beside what another process measures. A failure comes up again in the finals, with its reason."""
        self.ahead.join()
        with suppress(Exception):
            self.forms[problem] = self._compiled(problem)
        torch.cuda.empty_cache()

    def _compiled(self, problem: Problem) -> Form:
        spec = op_spec(problem.op)
        return compiled_form(spec, problem, tensors_of(spec, problem, self.device, self.seed))

    def open(self, problem: Problem) -> None:
        """Drop the session in hand and make the inputs, references and sentinel of `problem`."""
        self.ahead.join()
        self.session = None
        torch.cuda.empty_cache()
        warm_up = WARM_UP_AGAIN if self.warm else WARM_UP_SECONDS
        form = self.forms.pop(problem, None)
        self.session = Session(problem, self.facts.silicon, self.device, self.seed, warm_up, form, self.known)
        self.warm = True
        torch.cuda.empty_cache()

    def screen(self, config: Config, resources: Resources | None) -> Answer:
        """One trial."""
        assert self.session is not None
        session = self.session
        return self._answer(lambda: session.screen(config, resources))

    def finals(self, trials: list[Trial]) -> Answer:
        """The finalists that are still right, timed."""
        assert self.session is not None
        session = self.session
        return self._answer(lambda: session.finals(trials))

    def _answer(self, work: Callable[[], Any]) -> Answer:
        poisoned = False
        try:
            found = work()
            torch.cuda.synchronize()
        except Exception as error:  # whatever a candidate does to CUDA is a result, with its reason
            found = TrialState.RUNTIME, first_line(error)
            try:
                torch.cuda.synchronize()
            except Exception as fault:
                found, poisoned = (TrialState.CRASHED, first_line(fault)), True
        # Buffers that could not be allocated anew leave a session without any.
        poisoned = poisoned or (self.session is not None and not hasattr(self.session, "bench"))
        if poisoned:
            return Answer(found, 0, poisoned)
        peak = torch.cuda.max_memory_reserved()
        # What a candidate's buffers leave behind seldom fits the next one's: kept, it added up to half as much again.
        # Given back after every one of them, it took 1.4 s of a sweep (H200), and each had to ask for its memory anew.
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > KEPT_BYTES:
            torch.cuda.empty_cache()
        assert self.session is not None
        return Answer(found, peak, poisoned, self.session.seconds.taken())


def versions(device: int) -> dict[str, str]:
    """Versions that a result depends on."""
    found = {"gpu": torch.cuda.get_device_name(device), **installed_versions()}
    found["torch"] = torch.__version__
    found["driver"] = _driver()
    return found


def _driver() -> str:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""
