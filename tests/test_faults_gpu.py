"""Candidates that break the GPU's context or never end, in a real sweep: they cost themselves only (H24)."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch
from fake_gpu import H200, template_of

from tunegen import paths, pool, worker
from tunegen.evaluate import TORCH
from tunegen.model import Config, Problem, Resources
from tunegen.space import load_space
from tunegen.store import Store
from tunegen.sweep import sweep_gpu
from tunegen.worker import Worker

PROBLEM = Problem("rms_norm", "forward", 1024, 64)
SPACE = """\
forward:
  good:
    about: as it ships
    parameters: {BLOCK_SIZE: 1024, ROWS: 1, num_warps: [1, 2, 4, 8]}
  wild:
    about: stores 2**34 elements behind the output
    parameters: {BLOCK_SIZE: 1024, ROWS: 1, num_warps: 4}
  endless:
    about: never ends
    parameters: {BLOCK_SIZE: 1024, ROWS: 1, num_warps: 4}
defaults:
  forward:
    any:
      - {family: good, BLOCK_SIZE: 1024, ROWS: 1, num_warps: 4}
"""
STORE = "    tl.store(y_ptr + rows[:, None] * N"
WILD = "    tl.store(y_ptr + (tl.cast(2**34, tl.int64) + rows), rstd.to(y_ptr.dtype.element_ty))\n"
ENDLESS = """\
    turn = tl.cast(0, tl.int32)
    while turn < 2:  # x is never that large, but who knows that
        turn = tl.where(tl.load(x_ptr, volatile=True).to(tl.float32) < 1e30, 1, 2).to(tl.int32)
"""
BEFORE_THE_STORE = {"good": "", "wild": WILD, "endless": ENDLESS}
GOOD = [Config.of("good", {"BLOCK_SIZE": 1024, "ROWS": 1, "num_warps": warps}) for warps in (1, 2, 4, 8)]
BAD = {family: Config.of(family, {"BLOCK_SIZE": 1024, "ROWS": 1, "num_warps": 4}) for family in ("wild", "endless")}


class Silent:
    def stage(self, text, total):
        pass

    def trial(self, trial):
        pass


def serve_there(package: str, connection, device: int, seed: int) -> None:
    """The measuring process, with the search space and the templates of this test."""
    paths.PACKAGE = Path(package)
    worker.serve(connection, device, seed)


def compile_there(package: str, problem, config, silicon) -> Resources:
    """A compiling process, likewise."""
    paths.PACKAGE = Path(package)
    return pool.compile_candidate(problem, config, silicon)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Real templates, and copies of one of them with a fault each."""
    folder = tmp_path / "package"
    text = template_of(Config("single_block"), paths.PACKAGE.parent).read_text()
    shutil.copytree(paths.resource("templates"), folder / "templates")
    (folder / "search_spaces").mkdir()
    (folder / "search_spaces" / "rms_norm.yaml").write_text(SPACE)
    assert text.count(STORE) == 1
    for family, lines in BEFORE_THE_STORE.items():
        changed = text.replace("forward_single_block", f"forward_{family}").replace(STORE, lines + STORE)
        template_of(Config(family), folder).write_text(changed)
    monkeypatch.setattr(paths, "PACKAGE", folder)
    return str(folder)


@pytest.mark.compiler
def test_the_faulty_candidates_are_such_as_a_sweep_would_measure(package):
    """They compile: what is wrong with them shows on a GPU only."""
    for config in (GOOD[0], BAD["wild"], BAD["endless"]):
        assert load_space("rms_norm").check(PROBLEM, H200, config) is None
        assert isinstance(compile_there(package, PROBLEM, config, H200), Resources)


@pytest.mark.gpu
def test_h24_illegal_access_and_hang_cost_their_candidates_only(package, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "SCREEN_SECONDS", 15.0)
    measuring = Worker(0, 0, functools.partial(serve_there, package))
    with Store.open(tmp_path / "tune.db") as store:
        compile_one = functools.partial(compile_there, package)
        result = sweep_gpu(store, [PROBLEM], 50, 0, Silent(), {}, measuring, compile_one)
        rows = store.trials(stage="screen")
        (winner,) = store.winners(kind="measured")
    found = {(row["family"], row["parameters"]): (row["state"], row["reason"]) for row in rows}
    for config in (*GOOD, TORCH):
        assert found.pop((config.family, config.to_json())) == ("ok", "")
    state, reason = found.pop(("wild", BAD["wild"].to_json()))
    assert (state, "illegal memory access" in reason) == ("crashed", True), reason
    assert found.pop(("endless", BAD["endless"].to_json())) == ("timeout", "no answer within 15 s")
    assert found == {}
    assert winner["family"] in ("good", "torch")
    assert winner["half"] == 0
    assert {t.config for t in result.finals} >= {GOOD[2], TORCH}
    assert torch.ones(4, device=torch.device("cuda", 0)).sum().item() == 4, "this process has a context of its own"
