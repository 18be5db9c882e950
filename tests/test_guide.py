"""What a search starts from: the model's ranks before anything is compiled, and winners of neighbouring problems."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace

import pytest
from fake_gpu import measurement
from stored import keep

from tunegen.dispatch import triton_minor
from tunegen.guide import NEIGHBOURS, Winner, carried, neighbours, ranked
from tunegen.model import PROTOCOL, Config, Measurement, Problem, Trial, TrialState
from tunegen.silicon import of_arch
from tunegen.space import load_space
from tunegen.store import Store

H200 = of_arch("sm_90")
PROBLEM = Problem("rms_norm", "forward", 4096, 4096)
SPACE = load_space("rms_norm")
WIDE = Config.of("single_block", {"BLOCK_SIZE": 8192, "ROWS": 1, "num_warps": 8})
HERE = Config.of("single_block", {"BLOCK_SIZE": 4096, "ROWS": 1, "num_warps": 8})


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        replace(PROBLEM, hidden=131072, rows=512),
        replace(PROBLEM, hidden=64, rows=3, x_dtype="fp64", weight_dtype=None),
        Problem("rms_norm", "backward", 5120, 1024, weight_grad=True),
        Problem("rms_norm", "backward", 65536, 1024, "fp32", "fp32", weight_grad=True),
        Problem("rms_norm", "backward", 1000, 16384, weight_grad=False),
    ],
    ids=Problem.label,
)
def test_every_candidate_of_every_family_has_a_rank(problem):
    for family in SPACE.families(problem, H200):
        candidates = SPACE.candidates(problem, H200, family.name)
        ranks = ranked(problem, candidates, H200)
        assert list(ranks) == candidates
        assert all(0 < us < 1e6 for us in ranks.values())


def test_a_template_that_fails_costs_its_ranks_and_nothing_else():
    assert ranked(PROBLEM, [Config.of("no_such_family", {}), HERE], H200).keys() == {HERE}


@pytest.mark.parametrize("damage", ["rows = 'abc'", "hidden = 'x'", "rows = 0", "parameters = '[1]'"])
def test_h21_a_row_of_nonsense_costs_itself_only(tmp_path, damage):
    near, far = (Problem("rms_norm", "forward", 4096, rows) for rows in (1024, 16))
    path = tmp_path / "tune.db"
    keep(path, *(Trial(p, HERE, TrialState.OK, measurement=measurement(8.0)) for p in (near, far)))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE trials SET {damage} WHERE rows = 16")
    with Store.read(path) as store:
        found = neighbours(store, PROBLEM, H200)
    assert found == [Winner(1024, 4096, HERE)]
    assert carried(SPACE, PROBLEM, H200, found) == [HERE]


def test_a_winner_is_carried_to_another_width_with_what_follows_from_it():
    assert carried(SPACE, PROBLEM, H200, [Winner(4096, 5120, WIDE)]) == [HERE]


def test_what_is_not_valid_here_is_left_out():
    split = Config.of("split_row_partials", {"SPLITS": 4, "BLOCK_SIZE": 1024, "num_warps": 4})  # for few rows
    torch, unknown = Config.of("torch", {}), Config.of("gone", {"ROWS": 1})
    many = Config.of("single_block", {"BLOCK_SIZE": 128, "ROWS": 16, "num_warps": 1})
    winners = [Winner(1, 4096, split), Winner(2, 4096, torch), Winner(4, 4096, unknown), Winner(4096, 4096, many)]
    for winner in winners:
        assert carried(SPACE, PROBLEM, H200, [winner]) == []


def test_the_nearest_come_first_and_only_a_few():
    configs = [Config.of("single_block", {**dict(HERE.parameters), "num_warps": warps}) for warps in (2, 4, 8, 16)]
    winners = [Winner(4096 << (4 - place), 4096, config) for place, config in enumerate(configs)]
    assert carried(SPACE, PROBLEM, H200, winners) == configs[::-1][:NEIGHBOURS]


def test_neighbours_differ_in_size_only(tmp_path):
    measurement = Measurement(10.0, 1.0, 10.0, (10.0,), (10.0,))
    others = [
        replace(PROBLEM, rows=1024),
        replace(PROBLEM, hidden=5120),
        replace(PROBLEM, casting="llama", rows=2048),
        replace(PROBLEM, x_dtype="fp32", rows=2048),
        PROBLEM,
    ]
    with Store.open(tmp_path / "tune.db") as store:
        sweep = store.begin_sweep(H200, {}, {}, 0)
        for other in others:
            trial = Trial(other, HERE, TrialState.OK, digest="d", measurement=measurement)
            store.add_all(sweep, [trial], PROTOCOL, triton_minor(), "2.11")
        store.finish_sweep(sweep)
        found = neighbours(store, PROBLEM, H200)
    assert sorted(found) == [Winner(1024, 4096, HERE), Winner(4096, 5120, HERE)]
    with Store.open(tmp_path / "tune.db") as store:
        assert neighbours(store, PROBLEM, of_arch("sm_80")) == []
