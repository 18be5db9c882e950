"""The database for those who write it: schema, keys, winners, several processes, and death at any point."""

import json
import multiprocessing
import os
import platform
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlite_utils import Database, Migrations
from stored import nobody

from tunegen import liveness, migrations
from tunegen.errors import StoreError
from tunegen.model import Conditions, Config, Measurement, Problem, Resources, Silicon, Trial, TrialState
from tunegen.silicon import of_arch
from tunegen.store import Store

HERE = of_arch("sm_90")
PROBLEM = Problem("rms_norm", "forward", 4096, 1000)
OTHER = {
    "op": "add_rms_norm",
    "direction": "backward",
    "hidden": 4097,
    "rows": 1001,
    "x_dtype": "fp16",
    "weight_dtype": None,
    "casting": "llama",
    "offset": True,
    "weight_grad": True,
    "residual": True,
    "sum_in_fp32": True,
    "layout": "strided",
    "policy": "deterministic",
    "regime": "warm",
}
VERSIONS = {"tunegen": "0.1", "torch": "2.14", "triton": "3.8", "driver": "580"}
SPAWN = multiprocessing.get_context("spawn")


def measured(us, problem=PROBLEM, family="single_block", state=TrialState.OK, spills=0, sentinel=10.0, **changes):
    """A trial whose columns all follow from `us`, so that a row made of two shows."""
    parameters = changes.pop("parameters", {"num_warps": 4, "ROWS": 1})
    return Trial(
        problem,
        Config.of(family, parameters),
        state,
        digest=changes.pop("digest", "d1"),
        resources=Resources(32, spills, 1024, "bin"),
        measurement=Measurement(us, us / sentinel, sentinel, (us, us + 0.25, us + 0.5), (sentinel,) * 3),
        **changes,
    )


def begin(store, silicon=HERE):
    return store.begin_sweep(silicon, {"hidden": 4096}, VERSIONS, seed=7)


def add(store, sweep, trial):
    return store.add_all(sweep, [trial], 1, "3.8", "2.14")[0]


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "new" / "tune.db") as opened:
        yield opened


def sound(path):
    with sqlite3.connect(path) as connection:
        result = connection.execute("PRAGMA integrity_check").fetchone()[0]
    connection.close()
    return result == "ok"


def assert_whole(store):
    """Each trial has its own numbers and samples, and no sample is without a trial."""
    rows = store.trials()
    read = store._connection.execute(
        "SELECT trial_id, us, sentinel_us FROM samples ORDER BY trial_id, block"
    ).fetchall()
    for row in rows:
        us = row["us"]
        assert row["score"] == us / 10.0
        assert row["reason"] == str(us)
        assert [(s[1], s[2]) for s in read if s[0] == row["id"]] == [(us, 10.0), (us + 0.25, 10.0), (us + 0.5, 10.0)]
    assert len(read) == 3 * len(rows)


# Trials and their keys


def test_samples_have_clocks_power_and_temperature_where_they_are_known(store):
    known = Conditions(1980.0, 3201.0, 600.0, 70.0)
    trial = measured(12.0)
    trial = replace(trial, measurement=replace(trial.measurement, conditions=(known, None, known)))
    add(store, begin(store), trial)
    columns = "sm_mhz, memory_mhz, watts, celsius"
    found = store._connection.execute(f"SELECT {columns} FROM samples ORDER BY block").fetchall()
    assert found == [tuple(known), (None,) * 4, tuple(known)]


def test_rounds_and_blocks_that_do_not_count_are_stored(store):
    trial = measured(12.0)
    known = replace(trial.measurement, kept=(True, False, True), round_of=(0, 0, 1))
    add(store, begin(store), replace(trial, measurement=known))
    found = store._connection.execute("SELECT round, kept FROM samples ORDER BY block").fetchall()
    assert found == [(0, 1), (0, 0), (1, 1)]
    (back,) = store.seen(HERE, PROBLEM, "3.8", 1, "measured").values()
    assert back.measurement == known


def final(us, tied, **changes):
    return measured(us, stage="final", band=0.01, tied=tied, gains=tied, **changes)


def test_tied_finalists_win_by_the_rule_and_torch_comes_last_of_them(store):
    sweep = begin(store)
    torch = final(8.0, True, family="torch", parameters={})
    trials = [torch, final(8.1, True, parameters={"num_warps": 8}), final(8.05, False, parameters={"num_warps": 1})]
    store.add_all(sweep, trials, 1, "3.8", "2.14")
    (winner,) = store.winners()
    assert winner["parameters"] == '{"num_warps": 8}'
    assert (winner["band"], winner["tied"], winner["gains"]) == (0.01, 1, 1)


def test_later_finals_end_the_ties_of_earlier_ones(store):
    sweep = begin(store)
    old, new = (final(us, True, parameters={"num_warps": warps}) for us, warps in ((8.0, 1), (8.1, 4)))
    other = final(8.0, True, problem=replace(PROBLEM, rows=7))
    store.add_all(sweep, [old], 1, "3.8", "2.14")
    store.add_all(sweep, [other], 1, "3.8", "2.14")
    store.add_all(sweep, [new], 1, "3.8", "2.14")
    assert {(r["rows"], r["parameters"]): (r["tied"], r["gains"]) for r in store.trials()} == {
        (PROBLEM.rows, old.config.to_json()): (0, 0),
        (PROBLEM.rows, new.config.to_json()): (1, 1),
        (7, other.config.to_json()): (1, 1),
    }


def test_later_finals_without_ties_end_them_too(store):
    """Those that were timed one by one, as one of them ended the process. Else an earlier one would win for ever."""
    sweep = begin(store)
    old, new = (final(us, True, parameters={"num_warps": warps}) for us, warps in ((8.1, 1), (8.0, 4)))
    store.add_all(sweep, [old], 1, "3.8", "2.14")
    store.add_all(sweep, [replace(new, band=None, tied=None, gains=None)], 1, "3.8", "2.14")
    (winner,) = store.winners()
    assert winner["parameters"] == new.config.to_json()


def test_trials_that_belong_together_are_stored_together_or_not_at_all(store):
    with pytest.raises(StoreError, match="CHECK"):
        store.add_all(begin(store), [final(8.0, True), replace(final(9.0, False), stage="semifinal")], 1, "3.8", "2.14")
    assert store.trials() == []


def test_database_of_the_first_schema_is_brought_up_to_date(tmp_path):
    """H23: with its trials, which then have no ties."""
    path = tmp_path / "tune.db"
    with sqlite3.connect(path) as connection:
        database = Database(connection)
        first = Migrations("tunegen")
        first()(migrations.m001_initial)
        first.apply(database)
        connection.execute("INSERT INTO silicon VALUES (1, 'H', 90, 132, 1, 1, 1, 1, 1)")
        sweep = "1, 1, 'now', 'now', 'finished', '{}', 'h', 1, 'p', '', '', '', '', 0"
        connection.execute(f"INSERT INTO sweeps VALUES ({sweep})")
        problem = ("rms_norm", "forward", 4096, 1024, 1024, "bf16", "bf16", "fp32", 0, 0, 0, "contiguous", "fastest")
        kind = ("cold_graph", "tile", '{"num_warps": 4}', "d", "final", "measured", "ok", "")
        numbers = (32, 0, 0, "b", 0, 0.5, 8.0, 0.8, 10.0, None, "now")
        row = (1, 1, 1, "3.8", "2.14", 1, *problem, *kind, *numbers)
        connection.execute(f"INSERT INTO trials VALUES ({', '.join('?' * len(row))})", row)
        connection.execute("INSERT INTO samples VALUES (1, 0, 8.0, 10.0)")
    connection.close()
    with Store.open(path) as opened:
        (winner,) = opened.winners()
        assert (winner["us"], winner["tied"], winner["gains"], winner["tie"]) == (8.0, None, None, 0)
        assert winner["sum_in_fp32"] == 0
        add(opened, begin(opened), final(7.0, True))
        assert [row["us"] for row in opened.trials()] == [8.0, 7.0]
        assert opened._connection.execute("SELECT round, kept FROM samples WHERE us = 8").fetchall() == [(None, 1)]


def test_trial_comes_back_as_it_went_in(store):
    problem = replace(PROBLEM, weight_dtype=None, residual=True)
    trial = replace(measured(12.5, problem), reason="why", scratch_bytes=64, error_ulp=0.5, stage="final")
    trial_id = add(store, begin(store), trial)
    found = store.seen(HERE, problem, "3.8", 1, "measured")
    key = ("single_block", '{"ROWS": 1, "num_warps": 4}', "d1", "final")
    assert list(found) == [key]
    assert found[key].id == trial_id
    assert all(getattr(found[key], f.name) == getattr(trial, f.name) for f in fields(Trial))


def test_failed_and_estimated_trials_come_back(store):
    sweep = begin(store)
    failed = Trial(PROBLEM, Config.of("a", {}), TrialState.COMPILE, reason="no \udcff register left")
    estimated = Trial(PROBLEM, Config.of("a", {}), TrialState.OK, kind="estimated", estimate_us=3.5)
    add(store, sweep, failed)
    add(store, sweep, estimated)
    (back,) = store.seen(HERE, PROBLEM, "3.8", 1, "measured").values()
    assert (back.state, back.reason, back.measurement) == (TrialState.COMPILE, "no ? register left", None)
    (back,) = store.seen(HERE, PROBLEM, "3.8", 1, "estimated").values()
    assert (back.estimate_us, back.resources) == (3.5, None)


def test_repeated_trial_replaces_row_and_samples_and_keeps_its_id(store):
    first, second = begin(store), begin(store)
    trial_id = add(store, first, measured(20.0, reason="20.0"))
    assert add(store, second, measured(15.0, reason="15.0")) == trial_id
    (row,) = store.trials()
    assert (row["us"], row["sweep_id"]) == (15.0, second)
    assert_whole(store)


OF_THE_SWEEP = [s for s in TrialState if s not in (TrialState.OK, TrialState.INCORRECT)]


@pytest.fixture
def two(tmp_path):
    """Two sweeps of one file at the same time, each with a connection of its own."""
    with Store.open(tmp_path / "tune.db") as one, Store.open(tmp_path / "tune.db") as other:
        yield (one, begin(one)), (other, begin(other))


def failed(state):
    return replace(measured(20.0, state=state, reason=state.value), measurement=None)


@pytest.mark.parametrize("state", OF_THE_SWEEP)
def test_a_failure_of_another_sweep_leaves_a_time_alone(two, state):
    """No memory, no time left, or another config timed in its place: nothing of that is the kernel's."""
    trial_id = add(*two[0], measured(20.0, reason="20.0"))
    assert add(*two[1], failed(state)) == trial_id
    for store, _ in two:
        (row,) = store.trials()
        assert (row["state"], row["us"], row["sweep_id"]) == ("ok", 20.0, two[0][1])
        assert_whole(store)
    assert add(*two[1], measured(15.0, reason="15.0")) == trial_id, "a time replaces a time"
    assert [(row["us"], row["sweep_id"]) for row in two[0][0].trials()] == [(15.0, two[1][1])]


@pytest.mark.parametrize("state", OF_THE_SWEEP)
def test_a_failure_takes_the_time_of_its_own_sweep(two, state):
    """Right or whole by luck, as it turned out in the finals."""
    add(*two[0], measured(20.0))
    add(*two[0], failed(state))
    assert [(row["state"], row["us"]) for row in two[1][0].trials()] == [(state.value, None)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_the_gate_found_wrong_in_one_sweep_is_wrong_whatever_another_says(two, order):
    trials = measured(20.0), failed(TrialState.INCORRECT)
    for which in order:
        add(*two[which], trials[which])
    add(*two[0], failed(TrialState.TIMEOUT))
    assert [(row["state"], row["us"]) for row in two[0][0].trials()] == [("incorrect", None)]
    assert two[1][0].winners() == []


@pytest.mark.parametrize("name", [f.name for f in fields(Problem)])
def test_every_field_of_a_problem_is_part_of_the_key(store, name):
    sweep, other = begin(store), replace(PROBLEM, **{name: OTHER[name]})
    add(store, sweep, measured(20.0))
    add(store, sweep, measured(10.0, other))
    assert len(store.trials()) == 2
    assert [t.measurement.us for t in store.seen(HERE, PROBLEM, "3.8", 1, "measured").values()] == [20.0]
    assert [t.problem for t in store.seen(HERE, other, "3.8", 1, "measured").values()] == [other]
    assert len(store.winners()) == 2


def test_gpu_triton_protocol_and_kind_are_part_of_the_key(store):
    elsewhere = replace(HERE, sms=HERE.sms - 1)
    sweep = begin(store)
    add(store, sweep, measured(20.0))
    store.add_all(sweep, [measured(20.0)], 2, "3.8", "2.14")
    store.add_all(sweep, [measured(20.0)], 1, "3.6", "2.14")
    add(store, sweep, measured(20.0, kind="baseline"))
    add(store, begin(store, elsewhere), measured(20.0))
    assert len(store.trials()) == 5
    for silicon, triton, protocol, kind in [
        (HERE, "3.8", 1, "measured"),
        (HERE, "3.8", 2, "measured"),
        (HERE, "3.6", 1, "measured"),
        (HERE, "3.8", 1, "baseline"),
        (elsewhere, "3.8", 1, "measured"),
    ]:
        assert len(store.seen(silicon, PROBLEM, triton, protocol, kind)) == 1
    assert store.seen(replace(HERE, name="NVIDIA H100"), PROBLEM, "3.8", 1, "measured") == {}


def test_silicon_has_one_row_whatever_its_driver_says_of_its_memory(store):
    assert store.silicon_id(HERE) == store.silicon_id(replace(HERE, memory_bytes=HERE.memory_bytes - 1))
    assert store.silicon_id(HERE) != store.silicon_id(replace(HERE, name="NVIDIA H200 NVL"))
    assert store.silicon_id(HERE) != store.silicon_id(replace(HERE, l2_bytes=1))


def test_samples_without_their_sentinels_are_refused_and_leave_nothing(store):
    torn = replace(measured(20.0), measurement=Measurement(20.0, 2.0, 10.0, (20.0, 20.5), (10.0,)))
    with pytest.raises(StoreError, match="2 samples and 1 of the sentinel"):
        add(store, begin(store), torn)
    assert store.trials() == []


def test_failure_within_a_transaction_leaves_nothing(store):
    sweep = begin(store)
    no_number = replace(measured(20.0), measurement=Measurement(20.0, 2.0, 10.0, (20.0, float("nan")), (10.0, 10.0)))
    with pytest.raises(StoreError, match="NOT NULL"):
        add(store, sweep, no_number)
    assert store.trials() == []
    add(store, sweep, measured(20.0, reason="20.0"))
    assert_whole(store)


def test_unknown_sweep_state_and_version_are_refused(store):
    with pytest.raises(StoreError, match="no sweep 99"):
        add(store, 99, measured(20.0))
    with pytest.raises(StoreError, match="no sweep 99"):
        store.finish_sweep(99)
    with pytest.raises(StoreError, match="CHECK"):
        store.finish_sweep(begin(store), "nearly")
    with pytest.raises(StoreError, match=r"'cuda'.*tunegen, torch, triton, driver"):
        store.begin_sweep(HERE, {}, {"cuda": "13"}, 0)


# Winners


def winner(store, **filters):
    (row,) = store.winners(**filters)
    return row


def test_lowest_score_wins_whatever_its_time(store):
    sweep = begin(store)
    add(store, sweep, measured(20.0, sentinel=10.0, family="slow_clock"))
    add(store, sweep, measured(19.0, sentinel=5.0, family="fast_clock"))
    assert winner(store)["family"] == "slow_clock"


def test_final_stage_beats_a_faster_screen(store):
    sweep = begin(store)
    add(store, sweep, measured(10.0, family="lucky"))
    assert winner(store)["family"] == "lucky"
    add(store, sweep, measured(12.0, family="lucky", stage="final"))
    add(store, sweep, measured(11.0, family="steady", stage="final"))
    assert winner(store)["family"] == "steady"


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"spills": 0, "parameters": {"num_warps": 16}}, {"spills": 8, "parameters": {"num_warps": 4}}),
        ({"parameters": {"A": 2, "num_warps": 8}}, {"parameters": {"A": 1, "num_warps": 16}}),
        ({"parameters": {"A": 1, "num_warps": 8}}, {"parameters": {"A": 2, "num_warps": 8}}),
    ],
)
def test_ties_are_broken_by_spills_then_warps_then_parameters(store, better, worse):
    sweep = begin(store)
    add(store, sweep, measured(10.0, **worse))
    add(store, sweep, measured(10.0, **better))
    assert winner(store)["parameters"] == json.dumps(better["parameters"], sort_keys=True)


@pytest.mark.parametrize("state", [state for state in TrialState if state is not TrialState.OK])
def test_failed_trials_never_win(store, state):
    add(store, begin(store), measured(1.0, state=state))
    assert store.winners() == []


def test_baselines_never_win_and_estimates_only_among_themselves(store):
    sweep = begin(store)
    add(store, sweep, measured(1.0, kind="baseline"))
    for family, us in (("a", 4.0), ("b", 3.0)):
        estimated = Trial(PROBLEM, Config.of(family, {}), TrialState.OK, kind="estimated", estimate_us=us)
        add(store, sweep, estimated)
    add(store, sweep, measured(10.0, family="c"))
    assert {row["kind"]: row["family"] for row in store.winners()} == {"measured": "c", "estimated": "b"}


def test_unreadable_parameters_cost_one_row(store):
    sweep = begin(store)
    add(store, sweep, measured(10.0, family="broken", parameters={"A": 1}))
    add(store, sweep, measured(11.0, family="sound", parameters={"A": 1}))
    for text in ("{", "[1]", b"\xff\xfe{"):
        store._connection.execute("UPDATE trials SET parameters = CAST(? AS TEXT) WHERE family = 'broken'", (text,))
        assert winner(store)["family"] == "sound"
        assert [key[0] for key in store.seen(HERE, PROBLEM, "3.8", 1, "measured")] == ["sound"]
        assert len(store.trials()) == 2
    for text in ('{"A": [1]}', '{"A": null}', '{"A": 1.5}'):
        store._connection.execute("UPDATE trials SET parameters = ? WHERE family = 'broken'", (text,))
        assert [key[0] for key in store.seen(HERE, PROBLEM, "3.8", 1, "measured")] == ["sound"]


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        *(("trials", column, "fast") for column in ("us", "score", "sentinel_us", "registers", "error_ulp")),
        *(("trials", column, b"\xff") for column in ("us", "digest", "reason", "parameters")),
        ("trials", "score", None),
        ("samples", "us", "fast"),
        ("samples", "sentinel_us", b"\xff"),
    ],
)
def test_value_of_another_type_costs_its_row(store, table, column, value):
    """A sweep would else compare text with numbers."""
    sweep = begin(store)
    broken = add(store, sweep, measured(10.0, family="broken"))
    add(store, sweep, measured(11.0, family="sound"))
    where = "id" if table == "trials" else "trial_id"
    store._connection.execute(f"UPDATE {table} SET {column} = ? WHERE {where} = ?", (value, broken))
    assert [key[0] for key in store.seen(HERE, PROBLEM, "3.8", 1, "measured")] == ["sound"]


def test_filters_take_columns_and_python_values(store):
    sweep = begin(store)
    add(store, sweep, measured(10.0))
    add(store, sweep, measured(11.0, replace(PROBLEM, weight_dtype=None, offset=True), state=TrialState.TIMEOUT))
    assert [row["us"] for row in store.trials(offset=False)] == [10.0]
    assert [row["us"] for row in store.trials(weight_dtype=None)] == [11.0]
    assert [row["us"] for row in store.trials(state=TrialState.TIMEOUT, hidden=4096)] == [11.0]
    assert [row["us"] for row in store.winners(silicon="NVIDIA H200", capability=90)] == [10.0]
    assert store.winners(silicon="NVIDIA B200") == []
    assert store.trials()[0]["silicon"] == "NVIDIA H200"
    with pytest.raises(StoreError, match=r"'width'; allowed are .*hidden"):
        store.trials(width=4096)
    with pytest.raises(StoreError, match="1=1"):
        store.winners(**{"1=1 --": 1})


# Sweeps that end early (H20)


def half_a_sweep(path, candidates):
    with Store.open(path) as store:
        sweep = begin(store)
        for i in range(candidates):
            add(store, sweep, measured(10.0 + i, parameters={"A": i}))
        os.kill(os.getpid(), signal.SIGKILL)


def test_h20_killed_sweep_keeps_its_trials_and_is_resumed(tmp_path):
    path = tmp_path / "tune.db"
    child = SPAWN.Process(target=half_a_sweep, args=(path, 5))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with Store.open(path) as store:
        assert winner(store)["half"] == 1
        sweep = begin(store)
        states = store._connection.execute("SELECT state FROM sweeps ORDER BY id").fetchall()
        assert states == [("interrupted",), ("running",)]
        seen = store.seen(HERE, PROBLEM, "3.8", 1, "measured")
        assert sorted(trial.config["A"] for trial in seen.values()) == [0, 1, 2, 3, 4]
        store.adopt(sweep, seen.values())
        for i in range(5, 20):
            add(store, sweep, measured(10.0 + i, parameters={"A": i}))
        assert winner(store)["half"] == 1
        store.finish_sweep(sweep)
        assert len(store.trials(sweep_id=sweep)) == 20
        assert (winner(store)["us"], winner(store)["half"]) == (10.0, 0)


def test_adoption_leaves_finished_sweeps_alone(store):
    finished = begin(store)
    add(store, finished, measured(10.0))
    store.finish_sweep(finished)
    store.adopt(begin(store), store.seen(HERE, PROBLEM, "3.8", 1, "measured").values())
    assert (winner(store)["sweep_id"], winner(store)["half"]) == (finished, 0)


def test_adoption_leaves_running_sweeps_alone(store):
    """Two sweeps side by side: the one that is still running keeps its trials, and its winner counts as half a
    sweep's until it ends."""
    running, ended = begin(store), begin(store)
    add(store, running, measured(10.0, parameters={"A": 1}))
    add(store, ended, measured(11.0, parameters={"A": 2}))
    store.finish_sweep(ended, "interrupted")
    adopting = begin(store)
    store.adopt(adopting, store.seen(HERE, PROBLEM, "3.8", 1, "measured").values())
    store.finish_sweep(adopting)
    assert {row["us"]: row["sweep_id"] for row in store.trials()} == {10.0: running, 11.0: adopting}
    assert (winner(store)["us"], winner(store)["half"]) == (10.0, 1)
    store.finish_sweep(running)
    assert winner(store)["half"] == 0


def test_adoption_sees_who_was_killed_meanwhile(store):
    """A sweep beside this one that is killed: what it left is not half a sweep's for ever."""
    killed, adopting = begin(store), begin(store)
    add(store, killed, measured(10.0))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store._connection.execute("UPDATE sweeps SET pid = ? WHERE id = ?", (ended.pid, killed))
    store.adopt(adopting, store.seen(HERE, PROBLEM, "3.8", 1, "measured").values())
    store.finish_sweep(adopting)
    assert (winner(store)["sweep_id"], winner(store)["half"]) == (adopting, 0)


def states(store):
    return [row[0] for row in store._connection.execute("SELECT state FROM sweeps ORDER BY id")]


@pytest.mark.parametrize(
    ("started", "stored", "state"), [(2, None, "interrupted"), (2, 0.9, "running"), (0, None, "running")]
)
def test_silent_sweep_of_another_host_is_interrupted_after_a_day(store, started, stored, state):
    """In a container that is no more, say: nobody else can tell that its process has ended."""

    def ago(days):
        return (datetime.now(timezone.utc) - timedelta(days=days)).isoformat(timespec="seconds")

    sweep = begin(store)
    store._connection.execute("UPDATE sweeps SET host = 'gone', started = ?", (ago(started),))
    if stored is not None:
        add(store, sweep, measured(10.0))
        store._connection.execute("UPDATE trials SET created = ?", (ago(stored),))
    begin(store)
    assert states(store) == [state, "running"]


def test_trials_of_a_problem_set_apart_are_half_a_sweeps(store):
    other = replace(PROBLEM, rows=7)
    sweep = begin(store)
    add(store, sweep, measured(10.0))
    add(store, sweep, measured(10.0, other))
    for problem in (other, replace(PROBLEM, rows=8)):  # the second has no trials
        store.set_apart(sweep, problem)
    store.finish_sweep(sweep)
    assert states(store) == ["finished", "interrupted"]
    assert {row["rows"]: row["half"] for row in store.winners()} == {PROBLEM.rows: 0, other.rows: 1}
    columns = "silicon_id, started, arguments, host, pid, process, tunegen, torch, triton, driver, seed"
    assert store._connection.execute(f"SELECT count(*) FROM (SELECT DISTINCT {columns} FROM sweeps)").fetchone() == (1,)


def test_finished_sweep_stays_finished(store):
    """An interrupt that comes as a sweep ends."""
    sweep = begin(store)
    store.finish_sweep(sweep)
    with pytest.raises(StoreError, match=f"no sweep {sweep} to finish"):
        store.finish_sweep(sweep, "interrupted")
    assert states(store) == ["finished"]


def test_only_sweeps_of_dead_processes_of_this_host_are_interrupted(store):
    own = begin(store)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    cases = {
        "interrupted": [(platform.node(), ended.pid, "1"), (platform.node(), os.getpid(), "0")],
        "running": [("another-host", ended.pid, "1")],
    }
    for owners in cases.values():
        for owner in owners:
            store._connection.execute("UPDATE sweeps SET host = ?, pid = ?, process = ? WHERE id = ?", (*owner, own))
            own = begin(store)
    begin(store)
    states = [row[0] for row in store._connection.execute("SELECT state FROM sweeps ORDER BY id")]
    assert states == ["interrupted", "interrupted", "running", "running", "running"]


# Transactions and several processes (H19)


def test_interrupt_as_a_transaction_begins_leaves_none_open(store, monkeypatch):
    """Ctrl-C while BEGIN IMMEDIATE waits for another writer is raised when it has begun."""
    sweep, connection = begin(store), store._connection

    class Interrupted:
        def __getattr__(self, name):
            return getattr(connection, name)

        def execute(self, sql, *values):
            found = connection.execute(sql, *values)
            if sql == "BEGIN IMMEDIATE":
                raise KeyboardInterrupt
            return found

    monkeypatch.setattr(store, "_connection", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        add(store, sweep, measured(10.0))
    monkeypatch.undo()
    store.finish_sweep(sweep, "interrupted")
    assert (states(store), store.trials()) == (["interrupted"], [])


def test_every_write_is_inside_begin_immediate(tmp_path, monkeypatch):
    statements, connect = [], sqlite3.connect

    def traced(*args, **kwargs):
        connection = connect(*args, **kwargs)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    with Store.open(tmp_path / "tune.db") as store:
        sweep = begin(store)
        add(store, sweep, measured(10.0))
        add(store, sweep, measured(11.0))
        store.adopt(sweep, store.seen(HERE, PROBLEM, "3.8", 1, "measured").values())
        store.silicon_id(of_arch("sm_80"))
        store.finish_sweep(sweep)
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    inside, written = False, 0
    for statement in (s.split(None, 1)[0] if s.strip() != "BEGIN IMMEDIATE" else s for s in statements):
        assert statement != "BEGIN"
        if statement in ("CREATE", "INSERT", "UPDATE", "DELETE", "SAVEPOINT"):
            assert inside
            written += 1
        inside = statement == "BEGIN IMMEDIATE" or (inside and statement not in ("COMMIT", "ROLLBACK"))
    assert written > 20
    assert statements.count("BEGIN IMMEDIATE") == 7


def write_fifty(path, worker, barrier, failures):
    try:
        barrier.wait(60)
        with Store.open(path) as store:
            sweep = begin(store)
            for i in range(50):
                us = 1000.0 * worker + i + 1
                key = {"A": i} if i % 2 else {"A": i, "worker": worker}
                add(store, sweep, measured(us, reason=str(us), parameters=key))
            store.finish_sweep(sweep)
    except BaseException as error:
        failures.put(repr(error))
        raise


def test_h19_eight_processes_share_a_new_file(tmp_path):
    path, barrier, failures = tmp_path / "tune.db", SPAWN.Barrier(8), SPAWN.Queue()
    workers = [SPAWN.Process(target=write_fifty, args=(path, i, barrier, failures)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 8, failures.get(timeout=1)
    assert sound(path)
    with Store.open(path) as store:
        wanted = {json.dumps({"A": i}) for i in range(1, 50, 2)}
        wanted |= {json.dumps({"A": i, "worker": w}) for i in range(0, 50, 2) for w in range(8)}
        rows = [row["parameters"] for row in store.trials()]
        assert len(rows) == 25 + 8 * 25
        assert set(rows) == wanted
        assert_whole(store)
        assert store._connection.execute("SELECT count(*) FROM silicon").fetchone() == (1,)
        assert store._connection.execute("SELECT DISTINCT state FROM sweeps").fetchall() == [("finished",)]


# Death at any point


def write_for_ever(path, worker, written):
    with Store.open(path) as store:
        sweep = begin(store)
        while True:
            us = 1000.0 * worker + written.value + 1
            add(store, sweep, measured(us, reason=str(us), parameters={"A": written.value % 7, "worker": worker}))
            written.value += 1
            time.sleep(0.001)  # SQLite's waiting is not fair: two writers without a pause can starve a third


@pytest.mark.parametrize("round_", range(2))
def test_killed_writers_leave_only_whole_trials(tmp_path, round_):
    path, chance = tmp_path / "tune.db", random.Random(round_)
    counters = [SPAWN.Value("i", 0, lock=False) for _ in range(3)]
    writers = [SPAWN.Process(target=write_for_ever, args=(path, i, n)) for i, n in enumerate(counters)]
    for writer in writers:
        writer.start()
    deadline = time.monotonic() + 60
    while min(counter.value for counter in counters) < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    for writer in writers:
        time.sleep(chance.uniform(0, 0.03))
        writer.kill()
        writer.join()
    with Store.open(path) as store:
        assert len(store.trials()) >= 9
        assert_whole(store)
        begin(store)
        states = store._connection.execute("SELECT state FROM sweeps ORDER BY id").fetchall()
        assert states == [("interrupted",)] * 3 + [("running",)]
    assert sound(path)


def die_while_pages_are_written(path):
    store = Store.open(path)
    connection = store._connection
    connection.execute("PRAGMA cache_size = 1")  # spill: changed pages reach the file before the commit
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE trials SET reason = hex(zeroblob(4000)), us = -1")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("opener", [Store.open, Store.read])
def test_half_written_pages_are_rolled_back(tmp_path, opener):
    path = tmp_path / "tune.db"
    with Store.open(path) as store:
        sweep = begin(store)
        for i in range(30):
            add(store, sweep, measured(10.0 + i, reason=str(10.0 + i), parameters={"A": i}))
    before = path.read_bytes()
    child = SPAWN.Process(target=die_while_pages_are_written, args=(path,))
    child.start()
    child.join()
    assert path.read_bytes() != before
    assert path.with_name("tune.db-journal").stat().st_size > 0
    with opener(path) as store:
        assert len(store.trials()) == 30
        assert_whole(store)
    assert sound(path)


# Files that cannot be used


@pytest.mark.parametrize("content", [b"hello\n", b"notes\n" * 1000, random.Random(0).randbytes(8192)])
def test_foreign_files_are_left_alone(tmp_path, content):
    path = tmp_path / "tune.db"
    path.write_bytes(content)
    for opener in (Store.open, Store.read):
        with pytest.raises(StoreError, match=r"tune\.db.*not a database.*TUNEGEN_DB"):
            opener(path)
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["tune.db"]


def test_half_a_database_is_left_alone(tmp_path):
    path = tmp_path / "tune.db"
    Store.open(path).close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"malformed.*move it away"):
        Store.open(path)
    assert path.read_bytes() == before


def test_databases_of_other_programs_and_of_later_versions_are_left_alone(tmp_path):
    other, later = tmp_path / "other.db", tmp_path / "later.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE trials (id INTEGER)")
    connection.commit()
    connection.close()
    with Store.open(later) as store:
        store._connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('tunegen', 'm999_wow', '')"
        )
    before = other.read_bytes(), later.read_bytes()
    for path, message in ((other, "another program's"), (later, "m999_wow.*upgrade")):
        for opener in (Store.open, Store.read):
            with pytest.raises(StoreError, match=message):
                opener(path)
    assert (other.read_bytes(), later.read_bytes()) == before


def of_schema(path, step):
    """A database as it was before that step."""
    database = Database(path)
    migrations.migrations.apply(database, stop_before=step)
    database.conn.commit()
    return database.conn


RUNNING = "INSERT INTO sweeps VALUES (NULL, 1, ?, NULL, 'running', '{}', ?, ?, ?, '', '', '', '', 0)"


@pytest.mark.parametrize(
    ("host", "started", "process", "refused"),
    [
        ("here", "2026-01-01", "own", True),
        ("here", "2026-01-01", "of an earlier one with its pid", False),
        ("elsewhere", "9999-01-01", "1", True),
        ("elsewhere", "2026-01-01", "1", False),
    ],
)
def test_older_schema_is_not_upgraded_under_a_running_sweep(tmp_path, host, started, process, refused):
    """It upserts by the key that it knows."""
    path, pid = tmp_path / "tune.db", os.getppid()
    host = platform.node() if host == "here" else host
    connection = of_schema(path, "m004_sum")
    connection.execute("INSERT INTO silicon VALUES (1, 'H', 90, 132, 1, 1, 1, 1, 1)")
    connection.execute(RUNNING, (started, host, pid, liveness.process_identity(pid) if process == "own" else process))
    connection.commit()
    if refused:
        with pytest.raises(StoreError, match=rf"sweep 1 still runs \(pid {pid} on {host}\).*wait.*TUNEGEN_DB"):
            Store.open(path)
        connection.execute("SELECT 1 FROM trials ORDER BY id").fetchall()
        assert "sum_in_fp32" not in {row[1] for row in connection.execute("PRAGMA table_info(trials)")}
        connection.execute("UPDATE sweeps SET state = 'finished'")
        connection.commit()
    connection.close()
    Store.open(path).close()
    with Store.read(path) as opened:
        assert opened.trials() == []


def test_own_sweep_and_a_file_that_is_up_to_date_are_no_obstacle(tmp_path):
    path = tmp_path / "tune.db"
    connection = of_schema(path, "m004_sum")
    connection.execute("INSERT INTO silicon VALUES (1, 'H', 90, 132, 1, 1, 1, 1, 1)")
    own = ("2026-01-01", platform.node(), os.getpid(), liveness.process_identity(os.getpid()))
    connection.execute(RUNNING, own)
    connection.commit()
    Store.open(path).close()
    pid = os.getppid()
    connection.execute(RUNNING, ("2026-01-01", platform.node(), pid, liveness.process_identity(pid)))
    connection.commit()
    connection.close()
    Store.open(path).close()


def test_an_empty_file_becomes_a_database(tmp_path):
    path = tmp_path / "tune.db"
    path.touch()
    with Store.open(path) as store:
        assert store.trials() == []


def test_folders_are_refused(tmp_path):
    with pytest.raises(StoreError, match=r"no plain file.*TUNEGEN_DB"):
        Store.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot make.*TUNEGEN_DB"):
        Store.open(tmp_path / "file" / "tune.db")
    with pytest.raises(StoreError, match=r"cannot make.*TUNEGEN_DB"):
        Store.open(Path("/proc/nowhere/tune.db"))


@pytest.mark.parametrize(("file_mode", "folder_mode"), [(0o444, 0o777), (0o666, 0o555), (None, 0o555)])
def test_places_without_permission_are_refused(file_mode, folder_mode):
    with tempfile.TemporaryDirectory() as name:  # not tmp_path: its parents are closed to others
        folder, path = Path(name), Path(name) / "tune.db"
        if file_mode is not None:
            Store.open(path).close()
            path.chmod(file_mode)
        folder.chmod(folder_mode)
        refused = path if file_mode == 0o444 else folder
        with nobody(), pytest.raises(StoreError, match=rf"{refused} may not be written.*TUNEGEN_DB"):
            Store.open(path)
        if file_mode is not None:
            with nobody(), Store.read(path) as store:
                assert store.trials() == []
        folder.chmod(0o777)
        path.unlink(missing_ok=True)
        with nobody(), Store.open(path) as store:
            assert store.trials() == []


def test_reading_neither_makes_nor_changes_a_file(tmp_path):
    with pytest.raises(StoreError, match=r"no database at .*tunegen sweep"):
        Store.read(tmp_path / "tune.db")
    assert list(tmp_path.iterdir()) == []
    with Store.open(tmp_path / "tune.db") as store:
        add(store, begin(store), measured(10.0))
    with Store.read(tmp_path / "tune.db") as store:
        assert [row["us"] for row in store.winners()] == [10.0]
        with pytest.raises(StoreError, match="readonly"):
            begin(store)


def test_a_closed_store_and_a_locked_file_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tunegen.store.BUSY_SECONDS", 0.05)
    path = tmp_path / "tune.db"
    with Store.open(path) as first, Store.open(path) as second:
        first._connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"tune\.db.*locked.*another process"):
            second.silicon_id(Silicon("x", 1, 1, 1, 1, 1, 1))
    with pytest.raises(StoreError, match="closed"):
        second.trials()


def test_other_readers_need_no_tunegen(tmp_path):
    """The view as `sqlite3` on the command line or Datasette sees it."""
    with Store.open(tmp_path / "tune.db") as store:
        add(store, begin(store), measured(10.0))
    connection = sqlite3.connect(tmp_path / "tune.db")
    assert connection.execute("SELECT silicon, family, us, half FROM winners").fetchall() == [
        ("NVIDIA H200", "single_block", 10.0, 1)
    ]
    plan = connection.execute(
        "EXPLAIN QUERY PLAN SELECT * FROM winners WHERE silicon_id = 1 AND triton = '3.8' AND protocol = 1 AND op = 'x'"
    ).fetchall()
    connection.close()
    assert any("trials_key (silicon_id=? AND triton=? AND protocol=? AND op=?" in row[3] for row in plan)
