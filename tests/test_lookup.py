"""The running program's reader: what matches, what is a miss, and what a broken file costs."""

import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest

from tunegen import lookup
from tunegen.lookup import database_exists, find_rejected, find_winners
from tunegen.model import Config, Measurement, Problem, Resources, Silicon, StoredChoice, Trial, TrialState
from tunegen.silicon import of_arch
from tunegen.store import Store

HERE = of_arch("sm_90")
PROBLEM = Problem("rms_norm", "forward", 4096, 1000)
PROTOCOL, TRITON = 1, "3.8"
OTHER = {
    "op": "add_rms_norm",
    "direction": "backward",
    "hidden": 4097,
    "rows": 1001,
    "x_dtype": "fp32",
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


def trial(us=20.0, problem=PROBLEM, family="single_block", **changes):
    parameters = changes.pop("parameters", {"num_warps": 4, "order": "row"})
    return Trial(
        problem,
        Config.of(family, parameters),
        changes.pop("state", TrialState.OK),
        digest=changes.pop("digest", "d1"),
        resources=Resources(32, 0, 1024),
        measurement=Measurement(us, us / 10, 10.0, (us,), (10.0,)),
        **changes,
    )


def write(path, *trials, silicon=HERE, protocol=PROTOCOL, triton=TRITON, state="finished"):
    with Store.open(path) as store:
        sweep = store.begin_sweep(silicon, {}, {}, 0)
        for one in trials:
            store.add_all(sweep, [one], protocol, triton, "2.14")
        if state != "running":
            store.finish_sweep(sweep, state)


def find(path, problem=PROBLEM, silicon=HERE, triton=TRITON, protocol=PROTOCOL):
    return find_winners(path, silicon, problem, triton, protocol)


def first_of_each_row_count(choices):
    return [next(c for c in choices if c.rows == rows) for rows in dict.fromkeys(c.rows for c in choices)]


def change(path, sql, *values):
    connection = sqlite3.connect(path)
    connection.execute(sql, values)
    connection.commit()
    connection.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tune.db"


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch):
    monkeypatch.setattr(lookup, "_warned", set())


# What matches (H22, H23)


def test_a_stored_trial_is_found_whole(path):
    write(path, trial())
    values = {"num_warps": 4, "order": "row"}
    wanted = StoredChoice("single_block", values, "d1", 1000, 20.0, "NVIDIA H200", 1, half=False, final=False)
    assert find(path) == [wanted]
    write(path, trial(stage="final"))
    assert find(path) == [wanted._replace(trial_id=2, final=True), wanted]


@pytest.mark.parametrize("name", [f.name for f in fields(Problem)])
@pytest.mark.parametrize("swap", [False, True])
def test_h23_a_problem_that_differs_in_one_field_is_a_miss_unless_it_is_rows(path, name, swap):
    stored, wanted = PROBLEM, replace(PROBLEM, **{name: OTHER[name]})
    if swap:
        stored, wanted = wanted, stored
    write(path, trial(problem=stored))
    assert len(find(path, stored)) == 1
    assert [choice.rows for choice in find(path, wanted)] == ([stored.rows] if name == "rows" else [])


@pytest.mark.parametrize("name", [f.name for f in fields(Silicon)])
def test_h22_a_gpu_that_differs_in_one_fact_is_a_miss(path, name):
    value = getattr(HERE, name)
    other = replace(HERE, **{name: value + 1 if isinstance(value, int) else value + " NVL"})
    write(path, trial())
    assert len(find(path)) == 1
    assert len(find(path, silicon=other)) == (name in ("name", "memory_bytes"))


def test_h22_another_triton_or_protocol_is_a_miss(path):
    write(path, trial())
    assert len(find(path)) == 1
    assert find(path, triton="3.6") == []
    assert find(path, protocol=PROTOCOL + 1) == []


@pytest.mark.parametrize("changes", [{"kind": "baseline"}, {"state": TrialState.INCORRECT}])
def test_baselines_and_failures_are_never_found(path, changes):
    write(path, trial(us=1.0, family="better", **changes), trial())
    assert [choice.family for choice in find(path)] == ["single_block"]


def test_estimates_are_never_found(path):
    write(path, trial(1.0, kind="estimated", estimate_us=1.0))
    assert find(path) == []


def test_every_row_count_comes_with_its_winner(path):
    faster = {rows: replace(PROBLEM, rows=rows) for rows in (16, 4096, 1)}
    write(path, *(trial(us, p, f) for p in faster.values() for us, f in ((20.0, "slow"), (10.0, "fast"))))
    found = first_of_each_row_count(find(path))
    assert [(choice.rows, choice.family) for choice in found] == [(1, "fast"), (16, "fast"), (4096, "fast")]


def test_the_same_gpu_under_its_own_name_comes_first(path):
    write(path, trial(10.0, family="b"), silicon=replace(HERE, name="NVIDIA A-Name"))
    write(path, trial(20.0, family="a"))
    write(path, trial(10.0, family="c"), silicon=replace(HERE, name="NVIDIA Z-Name"))
    found = find(path)
    assert [(choice.silicon_name, choice.family) for choice in found] == [
        ("NVIDIA H200", "a"),
        ("NVIDIA A-Name", "b"),
        ("NVIDIA Z-Name", "c"),
    ]


@pytest.mark.parametrize("state", ["running", "interrupted", "finished"])
def test_h20_half_a_sweep_says_so(path, state):
    write(path, trial(), state=state)
    assert [choice.half for choice in find(path)] == [state != "finished"]


def test_all_others_follow_the_winner_best_first(path):
    write(
        path,
        trial(10.0, family="a", digest="edited since"),
        trial(11.0, family="a", digest="new", parameters={"A": 1}),
        trial(12.0, family="a", digest="new", parameters={"A": 2}),
        trial(10.5, family="b"),
        trial(13.0, family="c", stage="final"),
    )
    found = [(choice.family, choice.digest) for choice in find(path)]
    assert found == [("c", "d1"), ("a", "edited since"), ("b", "d1"), ("a", "new"), ("a", "new")]


def test_rejected_ones_are_known_whatever_the_row_count(path):
    wrong = replace(trial(problem=replace(PROBLEM, rows=8), family="a"), state=TrialState.INCORRECT, measurement=None)
    write(path, wrong, trial(family="b"))
    assert find_rejected(path, HERE, PROBLEM, TRITON, PROTOCOL) == {("a", wrong.config.to_json(), wrong.digest)}
    assert find_rejected(path, HERE, replace(PROBLEM, casting="llama"), TRITON, PROTOCOL) == set()


def test_reader_and_view_agree_on_winners(path):
    chance = random.Random(3)
    problems = [replace(PROBLEM, rows=rows) for rows in (1, 64, 4096)]
    trials = [
        trial(
            float(chance.randint(10, 13)),
            problem,
            chance.choice("abc"),
            parameters={"num_warps": chance.choice((1, 2, 4, 16)), "A": i},
            stage=chance.choice(("screen", "final")),
        )
        for problem in problems
        for i in range(40)
    ]
    write(path, *trials)
    with Store.open(path) as store:
        wanted = [(row["rows"], row["id"]) for row in store.winners()]
    assert len(wanted) == 3
    assert [(choice.rows, choice.trial_id) for choice in first_of_each_row_count(find(path))] == wanted


# Files that are not as they should be (H21)


def damage(path, how):
    content = path.read_bytes()
    if how == "random":
        content = random.Random(1).randbytes(len(content))
    elif how == "half":
        content = content[: len(content) // 2]
    elif how == "text":
        content = b"hello"
    elif how == "pages":
        content = content[:4096] + random.Random(1).randbytes(len(content) - 4096)
    path.write_bytes(content)
    return content


@pytest.mark.parametrize("how", ["random", "half", "text", "pages"])
def test_h21_a_damaged_file_is_moved_aside_once_and_the_next_sweep_works(path, how, caplog):
    write(path, trial())
    content = damage(path, how)
    assert find(path) == []
    assert find(path) == []
    (aside,) = path.parent.glob("tune.db.broken-*")
    assert aside.read_bytes() == content
    assert not path.exists()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("tunegen", logging.WARNING)
    assert str(path) in record.getMessage()
    assert str(aside) in record.getMessage()
    write(path, trial())
    assert len(find(path)) == 1


def test_the_journal_goes_with_a_damaged_file(path):
    write(path, trial())
    damage(path, "random")
    path.with_name("tune.db-journal").write_bytes(b"")
    assert find(path) == []
    aside, journal = sorted(file.name for file in path.parent.glob("tune.db.broken-*"))
    assert journal == f"{aside}-journal"
    assert sorted(file.name for file in path.parent.iterdir() if ".broken-" not in file.name) == ["tune.db.lock"]


def test_a_file_that_another_process_is_moving_is_left_to_it(path, caplog):
    write(path, trial())
    content = damage(path, "random")
    with lookup._locked(path):
        assert find(path) == []
    assert path.read_bytes() == content
    assert caplog.records == []


def test_many_readers_of_a_damaged_file_move_it_once(path, caplog):
    write(path, trial())
    content = damage(path, "half")
    start = threading.Barrier(8)

    def read(_):
        start.wait(10)
        return find(path)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [[]] * 8
    assert [file.read_bytes() for file in path.parent.glob("tune.db.broken-*")] == [content]
    assert len(caplog.records) == 1


def test_a_file_that_was_replaced_meanwhile_is_kept(path, caplog):
    write(path, trial())
    lookup._set_aside(path, sqlite3.DatabaseError("as another process saw it"))
    assert len(find(path)) == 1
    assert caplog.records == []


def test_a_damaged_file_that_cannot_be_moved_is_named_once(path, caplog, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    write(path, trial())
    content = damage(path, "random")
    monkeypatch.setattr(os, "replace", refuse)
    assert find(path) == []
    assert find(path) == []
    assert path.read_bytes() == content
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "cannot be moved aside" in record.getMessage()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("parameters", "{"),
        ("parameters", "[1]"),
        ("parameters", '{"A": 1.5}'),
        ("parameters", '{"A": true}'),
        ("parameters", '{"A": null}'),
        ("parameters", '{"A": "' + "[" * 100_000),
        ("parameters", b'{"A": "\xff\xfe"}'),
        ("family", b"\xff\xfe"),
        ("family", ""),
        ("digest", b"\xff\xfe"),
        ("digest", sqlite3.Binary(b"\xff")),
        ("us", "fast"),
        ("us", -1.0),
        ("us", float("inf")),
        ("us", None),
        ("rows", "many"),
        ("rows", 0),
    ],
)
def test_h21_an_unreadable_row_costs_itself_only(path, column, value, caplog):
    write(path, trial(10.0, family="broken"), trial(20.0, family="sound"))
    cast = "CAST(? AS TEXT)" if isinstance(value, bytes) else "?"
    change(path, f"UPDATE trials SET {column} = {cast} WHERE family = 'broken'", value)
    assert [choice.family for choice in find(path)] == ["sound"]
    assert caplog.records == []
    assert path.exists()


def test_h21_an_empty_file_and_no_file_are_misses_that_leave_no_trace(path, caplog):
    assert find(path) == []
    assert list(path.parent.iterdir()) == []
    path.touch()
    assert find(path) == []
    assert not database_exists(path)
    assert [(file.name, file.stat().st_size) for file in path.parent.iterdir()] == [("tune.db", 0)]
    assert caplog.records == []


@pytest.mark.parametrize("sql", ["ALTER TABLE silicon DROP COLUMN sms", "DROP VIEW candidates", "DROP TABLE silicon"])
def test_h23_another_schema_is_a_miss(path, sql, caplog):
    write(path, trial())
    if "COLUMN" in sql:
        sql = "ALTER TABLE silicon RENAME COLUMN sms TO cores"
    change(path, sql)
    assert find(path) == []
    assert path.exists()
    assert [file.name for file in path.parent.iterdir()] == ["tune.db"]
    # A column that is missing is what an older schema looks like.
    assert len(caplog.records) == ("COLUMN" in sql)


@pytest.mark.parametrize("odd", ["folder", "pipe", "null\0byte"])
def test_a_path_that_is_no_file_is_a_miss(path, odd):
    if odd == "folder":
        path.mkdir()
    elif odd == "pipe":
        os.mkfifo(path)
    else:
        path = path.with_name(odd)
    assert not database_exists(path)
    assert find(path) == []


def test_characters_that_mean_something_in_a_uri(tmp_path):
    path = tmp_path / "a b?mode=rwc#c%41" / "tune.db"
    write(path, trial())
    assert len(find(path)) == 1
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["a b?mode=rwc#c%41", "tune.db"]


# Busy, read-only, killed


def test_a_locked_file_is_a_miss_within_a_quarter_of_a_second(path):
    write(path, trial())
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    start = time.monotonic()
    assert find(path) == []
    waited = time.monotonic() - start
    connection.execute("ROLLBACK")
    connection.close()
    assert 0.05 < waited < 0.3
    assert len(find(path)) == 1


def test_a_writer_that_has_not_committed_blocks_no_reader(path):
    write(path, trial())
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("DELETE FROM samples")
    assert len(find(path)) == 1
    connection.execute("ROLLBACK")
    connection.close()


def test_reading_writes_nothing_and_keeps_nothing_open(path):
    write(path, trial())
    before = path.read_bytes(), path.stat().st_mtime_ns
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert len(find(path)) == 1
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [file.name for file in path.parent.iterdir()] == ["tune.db"]


def die_while_pages_are_written(path):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE trials SET family = hex(zeroblob(4000)), us = 0.001, score = 0.001")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writers_journal_makes_a_miss_until_a_sweep_rolls_it_back(path, caplog):
    write(path, *(trial(10.0 + i, parameters={"A": i}) for i in range(30)))
    wanted = find(path)
    child = multiprocessing.get_context("spawn").Process(target=die_while_pages_are_written, args=(path,))
    child.start()
    child.join()
    torn, journal = path.read_bytes(), path.with_name("tune.db-journal").read_bytes()
    assert find(path) == []
    assert (path.read_bytes(), path.with_name("tune.db-journal").read_bytes()) == (torn, journal)
    assert caplog.records == []
    Store.open(path).close()
    assert find(path) == wanted


def test_the_reader_loads_no_sqlite_utils():
    code = "import sys, tunegen.lookup; print([m for m in ('sqlite_utils', 'triton', 'optuna') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
