"""Databases as a call finds them (H21 to H23): whatever is wrong with the file, right values, and at most one warning,
which names it."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import OP_MODULE, SMALL_GPU, assert_right, draw, exact, places, run, weight_of
from sqlite_utils import Database
from stored import keep, nobody

from tunegen import dispatch, lookup, migrations
from tunegen.model import Measurement, Problem, Trial, TrialState
from tunegen.space import load_space

place = places("interpreter")
pytestmark = pytest.mark.usefixtures("place")

HIDDEN, ROWS = 1024, 4
SPACE = load_space("rms_norm")
MEASURED, BUILT_IN = "measured", "built-in"


@pytest.fixture
def path(monkeypatch):
    """In a folder that others may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "cache")
        folder.mkdir()
        os.chmod(name, 0o755)
        monkeypatch.setenv("TUNEGEN_DB", str(folder / "tune.db"))
        monkeypatch.setattr(lookup, "_warned", set())
        yield folder / "tune.db"
        folder.chmod(0o755)


def trials(rows=ROWS):
    """For both directions some configs of one family, so that the answer is no built-in default."""
    for direction, family in (("forward", "single_block"), ("backward", "persistent_partials")):
        problem = Problem("rms_norm", direction, HIDDEN, rows, "fp32", "fp32", weight_grad=direction == "backward")
        default = SPACE.default(problem, SMALL_GPU)
        others = [c for c in SPACE.candidates(problem, SMALL_GPU, family) if c != default]
        for us, config in enumerate(others[:4], 10):
            measurement = Measurement(float(us), us / 10.0, 10.0, (float(us),), (10.0,))
            digest = dispatch.digest_today(problem, config)
            yield Trial(problem, config, TrialState.OK, digest=digest, measurement=measurement)


def sweep(path, **where):
    keep(path, *trials(), **{"silicon": SMALL_GPU, **where})


def answers(during=nullcontext, rows=ROWS):
    """What answers forward and backward, looked up while `during` lasts; the values are right in any case."""
    x, dy, w = draw(rows, HIDDEN), draw(rows, HIDDEN, seed=2), weight_of(HIDDEN)
    with during():
        keys = [OP_MODULE.key_of(d, x, w, 0.0, "fp32", d == "backward") for d in ("forward", "backward")]
        choices = [dispatch.choose(key) for key in keys]
    assert_right(run(x, w, dy), exact(x, w, dy), x, w)
    found = {choice.rung.split()[0] for choice in choices}
    assert len(found) == 1, [choice.rung for choice in choices]
    return found.pop()


def assert_quiet(caplog):
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def assert_one_warning(caplog, path):
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(path) in record.getMessage()


def damage(path, how):
    content = path.read_bytes()
    path.write_bytes({"half": content[: len(content) // 2], "random": random.Random(1).randbytes(len(content))}[how])


def test_h21_a_sound_one(path, caplog):
    sweep(path)
    assert answers() == MEASURED
    assert_quiet(caplog)


def test_h21_missing(path, caplog):
    assert answers() == BUILT_IN
    assert_quiet(caplog)
    assert list(path.parent.iterdir()) == []


def test_h21_empty(path, caplog):
    path.touch()
    assert answers() == BUILT_IN
    assert_quiet(caplog)
    assert path.stat().st_size == 0


@pytest.mark.parametrize("how", ["half", "random"])
def test_h21_damaged(path, caplog, how):
    sweep(path)
    damage(path, how)
    assert answers() == BUILT_IN
    assert_one_warning(caplog, path)
    sweep(path)
    dispatch.forget()
    assert answers() == MEASURED


@pytest.mark.parametrize("how", ["half", "random"])
def test_h21_damaged_in_a_folder_that_is_read_only(path, caplog, how):
    sweep(path)
    damage(path, how)
    path.parent.chmod(0o555)
    assert answers(nobody) == BUILT_IN
    dispatch.forget()
    assert answers(nobody) == BUILT_IN
    assert_one_warning(caplog, path)
    assert [file.name for file in path.parent.iterdir()] == ["tune.db"]


def test_h21_locked(path, caplog):
    @contextmanager
    def locked():
        with closing(sqlite3.connect(path, isolation_level=None)) as writer:
            writer.execute("BEGIN EXCLUSIVE")
            yield

    sweep(path)
    assert answers(locked) == BUILT_IN
    assert_quiet(caplog)
    dispatch.forget()
    assert answers() == MEASURED


def test_h21_read_only(path, caplog):
    sweep(path)
    path.chmod(0o444)
    assert answers(nobody) == MEASURED
    assert_quiet(caplog)


def test_h21_not_readable(path, caplog):
    sweep(path)
    path.chmod(0o000)
    assert answers(nobody) == BUILT_IN
    assert_quiet(caplog)


def test_h21_in_a_read_only_folder(path, caplog):
    sweep(path)
    path.parent.chmod(0o555)
    assert answers(nobody) == MEASURED
    assert_quiet(caplog)


DIES_WHILE_PAGES_ARE_WRITTEN = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE trials SET family = hex(zeroblob(4000)), us = 0.001, score = 0.001")
os.kill(os.getpid(), 9)
"""


def test_h21_in_a_read_only_folder_with_a_killed_writers_journal(path, caplog):
    """Only a writer may roll it back; what the file itself holds is half of a transaction."""
    sweep(path)
    subprocess.run([sys.executable, "-c", DIES_WHILE_PAGES_ARE_WRITTEN, path])
    journal = path.with_name("tune.db-journal")
    assert journal.stat().st_size > 0
    path.parent.chmod(0o555)
    assert answers(nobody) == BUILT_IN
    assert_quiet(caplog)
    path.parent.chmod(0o755)
    sweep(path)
    dispatch.forget()
    assert answers() == MEASURED


def test_h21_one_broken_row(path, caplog):
    sweep(path)
    with closing(sqlite3.connect(path)) as file:
        (best,) = file.execute("SELECT min(us) FROM trials").fetchone()
        file.execute("UPDATE trials SET parameters = CAST(x'7bff' AS TEXT) WHERE us = ?", [best])
        file.commit()
    assert answers() == MEASURED
    assert_quiet(caplog)


def test_h22_of_another_gpu(path, caplog):
    sweep(path, silicon=replace(SMALL_GPU, sms=SMALL_GPU.sms + 1))
    assert answers() == BUILT_IN
    assert_quiet(caplog)


def test_h22_of_another_triton(path, caplog):
    sweep(path, triton="3.5")
    assert answers() == BUILT_IN
    assert_quiet(caplog)


def test_h23_of_an_older_schema(path, caplog):
    """As the first migration left it; the next sweep brings it up to date."""
    newer = path.with_name("newer.db")
    sweep(newer)
    old = Database(path)
    migrations.migrations.apply(old, stop_before=migrations.STEPS[1].__name__)
    old.conn.execute("ATTACH ? AS newer", [str(newer)])
    for table in ("silicon", "sweeps", "trials", "samples"):
        columns = ", ".join(column.name for column in old[table].columns)
        old.conn.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM newer.{table}")
    old.conn.commit()
    old.conn.close()
    assert answers() == BUILT_IN
    dispatch.forget()
    assert answers(rows=8) == BUILT_IN
    assert_one_warning(caplog, path)
    assert "run `tunegen sweep`" in caplog.text
    sweep(path)
    dispatch.forget()
    assert answers() == MEASURED


def test_h21_replaced_while_the_process_runs(path, caplog):
    """A choice that is made stays made; calls of other kinds read the new file, and a damaged one is told once."""
    assert answers() == BUILT_IN
    new = path.with_name("new.db")
    keep(new, *trials(), *trials(16), silicon=SMALL_GPU)
    os.replace(new, path)
    assert answers() == BUILT_IN
    assert answers(rows=16) == MEASURED
    assert_quiet(caplog)
    damage(path, "random")
    assert answers(rows=16) == MEASURED
    assert answers(rows=2) == BUILT_IN
    assert answers(rows=8) == BUILT_IN
    assert_one_warning(caplog, path)
