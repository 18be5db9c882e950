"""A whole trial on a GPU, from config to time."""

from __future__ import annotations

import gc

import pytest
import torch

from tunegen.evaluate import TORCH, Session
from tunegen.model import Problem, Trial, TrialState
from tunegen.silicon import query
from tunegen.space import load_space

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


@pytest.fixture
def no_collector():
    """Cycles of references stay, as they do until the collector happens to run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_session_gives_back_all_memory(no_collector, direction):
    """The sentinel once held its bench, so that each problem stayed until the next few were measured: 7 GB for 4."""
    problem = Problem("rms_norm", direction, 4096, 1024, weight_grad=direction == "backward")
    silicon = query(0)
    default = load_space("rms_norm").default(problem, silicon)
    before = torch.cuda.memory_allocated()
    session = Session(problem, silicon, GPU, 0)
    trials = [session.screen(config, None) for config in (default, TORCH)]
    finals = session.finals(trials)
    inside = torch.cuda.memory_allocated()
    del session
    assert [trial.state for trial in [*trials, *finals]] == [TrialState.OK] * 4
    assert all(isinstance(trial, Trial) and trial.measurement is not None for trial in finals)
    assert inside - before > 2 * 1024 * 4096 * 2
    assert torch.cuda.memory_allocated() == before
