"""From config to trial in the measuring process, without a GPU: the digest that is stored, and what errors come to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import DEFAULT, H200, PROBLEM, make_resources, measurement, template_of

from tunegen import paths, render
from tunegen.errors import CompileError
from tunegen.evaluate import Session
from tunegen.model import Plan, Trial, TrialState
from tunegen.ops import op_spec
from tunegen.serving import Server
from tunegen.verify import Verdict

SPEC = op_spec("rms_norm")


class Here(Session):
    """A session in which nothing is launched: every config is right and takes 8 us."""

    def __init__(self):
        self.spec, self.problem, self.silicon = SPEC, PROBLEM, H200
        self.bench = SimpleNamespace(call=lambda variant: variant)
        self.verdict = Verdict(True, 0.5)

    def variants(self, config):
        return [SimpleNamespace(plan=lambda rows: Plan(()))]

    def verify(self, variants):
        return self.verdict

    def _timed(self, trials, calls, blocks):
        return [replace(trial, measurement=measurement(8.0)) for trial in trials]


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Of the text that this process launches for the default."""
    monkeypatch.setattr(paths, "PACKAGE", make_resources(tmp_path / "package"))
    template_of(DEFAULT, paths.PACKAGE).write_text("EDITED = {{ save_rstd }}\n")
    return render.combined_digest(PROBLEM, DEFAULT, SPEC)


def test_screened_trial_has_the_digest_of_what_was_launched(digest):
    trial = Here().screen(DEFAULT, None)
    assert (trial.state, trial.digest, trial.error_ulp) == (TrialState.OK, digest, 0.5)
    assert trial.measurement.us == 8.0


def test_wrong_trial_has_it_too(digest):
    session = Here()
    session.verdict = Verdict(False, float("inf"), "y: NaN")
    trial = session.screen(DEFAULT, None)
    assert (trial.state, trial.digest, trial.reason, trial.error_ulp) == (TrialState.INCORRECT, digest, "y: NaN", None)
    assert trial.measurement is None


def test_trial_that_does_not_compile_has_it_too(digest, monkeypatch):
    def fail(config):
        raise CompileError("tile: no registers left")

    session = Here()
    monkeypatch.setattr(session, "variants", fail)
    trial = session.screen(DEFAULT, None)
    assert (trial.state, trial.digest, trial.reason) == (TrialState.COMPILE, digest, "tile: no registers left")


def test_finalist_has_the_digest_of_what_was_launched_and_not_of_what_was_screened(digest):
    screened = Trial(PROBLEM, DEFAULT, TrialState.OK, digest="of an older text", measurement=measurement(9.0))
    (trial,) = Here().finals([screened])
    assert (trial.stage, trial.digest, trial.measurement.us) == ("final", digest, 8.0)


@pytest.fixture
def server(monkeypatch):
    """One whose CUDA context is whole as long as `faults` is empty."""
    faults = []

    def synchronize():
        if faults:
            raise RuntimeError(faults[0])

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = Server.__new__(Server)
    found.faults = faults
    return found


def fail(error):
    raise error


def test_what_a_template_raises_is_a_result_and_leaves_the_process_whole(server):
    """A kernel argument that nothing is bound to, say."""
    assert server._answer(lambda: fail(KeyError("gamma_ptr"))) == (
        (TrialState.RUNTIME, "KeyError: 'gamma_ptr'"),
        1000,
        False,
    )
    assert server._answer(lambda: "a trial") == ("a trial", 1000, False)


def test_what_breaks_the_context_is_a_result_and_the_process_is_to_be_replaced(server):
    def launch():
        server.faults.append("CUDA error: an illegal memory access was encountered")

    reason = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert server._answer(launch) == ((TrialState.CRASHED, reason), 0, True)
