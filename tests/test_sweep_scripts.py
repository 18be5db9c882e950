"""The scripts in benchmarks/ that sweep, on a GPU that is not there: what they compare and what they write."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_gpu import DEFAULT, H200, OLD, PROBLEM, REPLAYED, TILES, FakeGpu, make_resources, measurement, us_of

from tunegen import paths
from tunegen.evaluate import TORCH
from tunegen.model import Problem, Trial, TrialState
from tunegen.space import load_space

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import exhaustive
import first_call
import one_family
import repeat
import sweeping
import two_gpus

LARGE = replace(PROBLEM, rows=16384)


@pytest.fixture
def gpu(tmp_path):
    return FakeGpu(str(tmp_path / "log"))


@pytest.fixture
def small_space(tmp_path, monkeypatch):
    package = make_resources(tmp_path / "package")
    monkeypatch.setattr(paths, "PACKAGE", package)
    return package


# exhaustive.py


@pytest.fixture
def wide_space(monkeypatch):
    monkeypatch.setattr(paths, "resource", paths.resource)  # so that it is put back
    exhaustive.use_space(exhaustive.WIDE)


@pytest.mark.parametrize("hidden", [4096, 5120, 8192])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wide_space_is_wide(wide_space, direction, hidden):
    for rows in (16384, 4096, 1024):
        problem = Problem("rms_norm", direction, hidden, rows, weight_grad=direction == "backward")
        assert 300 <= exhaustive.size_of(problem, H200) < 1000
        assert load_space("rms_norm").default(problem, H200) is not None


def test_wide_space_has_every_usual_candidate_of_its_families(wide_space):
    """Else the best of the usual space might be missing in the wide one."""
    usual = load_space("rms_norm", paths.PACKAGE.parent / "search_spaces" / "rms_norm.yaml")
    wide = load_space("rms_norm")
    for direction, hidden, rows in itertools.product(("forward", "backward"), (4096, 5120, 8192), (16384, 4096, 1024)):
        problem = Problem("rms_norm", direction, hidden, rows, weight_grad=direction == "backward")
        for family in usual.families(problem, H200):
            if not family.baseline:
                missing = set(usual.candidates(problem, H200, family.name)) - set(
                    wide.candidates(problem, H200, family.name)
                )
                assert not missing, f"{problem.label()}: {next(iter(missing)).label()}"


def test_guided_sweep_is_held_against_all_candidates(wide_space, gpu, tmp_path):
    problem = Problem("rms_norm", "forward", 8192, 1024)
    found = exhaustive.measure(tmp_path / "databases", problem, 2, gpu.worker, gpu.compile)
    assert found["timed"] == found["candidates"] >= 300
    assert found["states"] == {"ok": found["candidates"]}
    assert found["budget_of_guided"] == int(0.15 * found["candidates"])
    best = min(
        us_of(problem, c)
        for f in load_space("rms_norm").families(problem, H200)
        for c in load_space("rms_norm").candidates(problem, H200, f.name)
    )
    assert found["fastest_us"] == pytest.approx(best)
    assert found["score_ratio_in_one_database"] == pytest.approx(found["guided_us"] / best, abs=1e-4)
    assert found["score_ratio_of_finals"] == pytest.approx(found["guided_us"] / best, abs=1e-4)
    assert found["replays"]["share"].keys() == {"random", "file", "model", "near"}
    assert {group["family"] for group in found["cost_model"]["compiled"]} >= {"persistent", "two_pass"}
    whole = exhaustive.summary([found])
    assert (whole["problems"], whole["fewest_timed"]) == (1, found["timed"])
    json.dumps(sweeping.record({"rows": [found], "summary": whole}))
    stored = json.loads((exhaustive.WIDE.parent / "results" / "h200_exhaustive.json").read_text())
    assert exhaustive.summary(stored["rows"]) == stored["summary"]
    assert {frozenset(row) for row in stored["rows"]} == {frozenset(found)}


# one_family.py


def test_every_candidate_of_a_family_is_timed(small_space, gpu):
    found = one_family.measure(TILES[0].family, PROBLEM, gpu.worker, gpu.compile)
    configs = load_space("rms_norm").candidates(PROBLEM, H200, TILES[0].family)
    assert {row["config"] for row in found} == {config.label() for config in configs}
    times = [us_of(PROBLEM, config) for config in configs]
    assert [row["us"] for row in found] == pytest.approx(sorted(times), abs=0.01)
    json.dumps(sweeping.record({"rows": found}))


# repeat.py


def test_sweeps_that_find_the_same_times_agree(small_space, gpu, tmp_path):
    found = repeat.measure(tmp_path, [PROBLEM, LARGE], 2, 200, gpu.worker, gpu.compile)
    assert (
        found["summary"]["same_winner"] == found["summary"]["same_winner_or_tied"] == found["summary"]["problems"] == 2
    )
    assert found["summary"]["60 MB and more"]["median_size"] >= 1
    assert sorted(path.name for path in tmp_path.glob("*.db")) == ["0.db", "1.db"]
    json.dumps(sweeping.record(found))


def final(config, us, tied, band=0.01):
    return Trial(LARGE, config, TrialState.OK, stage="final", measurement=measurement(us), tied=tied, band=band)


def test_other_winners_agree_if_each_is_tied_in_the_other_sweep():
    one = [final(TILES[0], 9.0, True), final(TILES[1], 9.05, True), final(TORCH, 30.0, False)]
    # The same times the other way round: the tie is broken by the rule, not by the time.
    same = [final(TILES[1], 9.0, True), final(TILES[0], 9.05, True)]
    other = [final(TILES[1], 8.0, True), final(TILES[0], 9.05, False)]
    row = repeat.row_of(LARGE, [one, same])
    assert row["same_winner"]
    assert row["same_winner_or_tied"]
    assert [one["width"] for one in row["sweeps"]] == [pytest.approx(9.05 / 9 - 1, abs=1e-5)] * 2
    row = repeat.row_of(LARGE, [one, same, other])
    assert not row["same_winner_or_tied"] or row["same_winner"]
    assert not repeat.row_of(LARGE, [one, []])["same_winner_or_tied"]


def test_ties_are_told_apart_by_size():
    rows = [
        repeat.row_of(p, [[final(TILES[0], 9.0, True), final(TILES[1], us, True)]])
        for p, us in ((LARGE, 9.09), (PROBLEM, 9.45))
    ]
    found = repeat.summary(rows)
    assert found["60 MB and more"]["widest"] == pytest.approx(0.01)
    assert found["below"]["widest"] == pytest.approx(0.05)
    assert found["below"]["median_size"] == 2


# first_call.py


def test_stored_timings_stay_and_kernels_go(tmp_path):
    for folder, files in {"a": ["k.autotune.json", "k.cubin"], "b": ["k.cubin", "k.json"], "c": []}.items():
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).write_text("")
    assert first_call.forget_kernels(tmp_path) == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["k.autotune.json"]


def test_each_kind_is_called_in_turn_and_stored_timings_are_asked_for_twice(monkeypatch):
    calls = []

    def run(kind, rows, hidden, folder, db):
        build, triton = folder / "build", folder / "triton" / "x"
        calls.append((kind, folder.name, (build / "index_0.json").exists(), triton.exists()))
        for path in (build, triton):
            path.mkdir(parents=True, exist_ok=True)
        for name in ("index_0.json", "triton_0.txt", "kernel_0.py"):
            (build / name).write_text("")
        (folder / "triton" / "x" / "k.autotune.json").write_text("")
        return {"seconds": float(len(calls)), "answer": kind}

    monkeypatch.setattr(first_call, "run", run)
    found = first_call.summary([first_call.kinds(4, 8, None) for _ in range(2)])
    assert calls[:7] == [
        ("tunegen", "own", False, False),
        ("tunegen, from its index", "own", True, True),
        ("tunegen, again", "own", False, True),
        ("tunegen, compiles", "own", True, False),
        ("autotune", "article", False, False),
        ("autotune, stored", "stored", False, False),
        ("autotune, stored", "stored", True, True),
    ]
    assert found["autotune, stored"]["seconds"] == [7.0, 14.0]  # the first of two leaves the timings
    assert found["tunegen"]["median"] == 4.5


def test_what_tunegen_remembers_is_removed_and_rendered_kernels_stay(tmp_path):
    for name in ("index_0.json", "triton_0.txt", "kernel_0.py"):
        (tmp_path / name).touch()
    assert first_call.forget_remembered(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kernel_0.py"]


@pytest.mark.interpreter
def test_kernel_of_the_article_is_right():
    import article_norm
    import triton

    x, w = torch.randn(5, 100), torch.randn(100)
    kernel = triton.jit(article_norm.rms_norm_fwd)
    got = article_norm.rms_norm(kernel, x, w)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (100,), w, 1e-6))
    assert len(article_norm.CONFIGS) == 24


@pytest.mark.compiler
def test_autotuned_kernel_of_the_article_can_be_made():
    import article_norm

    assert article_norm.tuned(False).configs == article_norm.CONFIGS
    assert article_norm.tuned(True) is None or article_norm.tuned(True).cache_results


# two_gpus.py


def test_one_gpu_is_held_against_all(small_space, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    arguments = ["--hidden", "4096", "--rows", "1024", "--direction", "forward"]
    one = two_gpus.run(gpu.command(small_space), arguments, "0", tmp_path / "new")
    assert one["timed"] == one["trials"] >= len(TILES)
    assert one["seconds_spent"]["measured replays"] == pytest.approx(REPLAYED * (len(TILES) + len(OLD) + 1))
    assert one["measured_share"] == pytest.approx(one["seconds_spent"]["measured replays"] / one["seconds"], abs=1e-3)
    both = {**one, "gpus": "all", "trials_per_second": 1.9 * one["trials_per_second"]}
    assert two_gpus.summary([one, both, one, both])["times"] == pytest.approx(1.9, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "sweep"),
    [
        ([], ["--hidden", "4096", "--hidden", "5120"]),
        (["--hidden", "64"], ["--hidden", "64"]),
        (["--from", "step.json"], ["--from", "step.json"]),
    ],
)
def test_two_gpus_sweep_widths_or_a_recording(monkeypatch, options, sweep):
    monkeypatch.setattr(sys, "argv", ["two_gpus.py", *options])
    assert two_gpus.asked().sweep == sweep


def test_two_gpus_sweep_not_both(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["two_gpus.py", "--hidden", "64", "--from", "step.json"])
    with pytest.raises(SystemExit, match="2"):
        two_gpus.asked()
    assert "not allowed with argument --hidden" in capsys.readouterr().err


def test_gpu_0_is_not_held_against_itself(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["two_gpus.py", "--gpus", "0"])
    monkeypatch.setattr(two_gpus, "run", None)
    with pytest.raises(SystemExit, match="2"):
        two_gpus.main()
    assert "--gpus: 0 is what it is held against" in capsys.readouterr().err


def test_winner_by_hand_is_the_default_of_a_tie():
    assert sweeping.winner([final(DEFAULT, 9.0, True), final(TILES[3], math.inf, False)]).config == DEFAULT
