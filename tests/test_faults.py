"""A sweep that is killed, interrupted, short of disk or of company: what it loses, and what the database says after.

Each sweep here is `tunegen sweep` in a process of its own, with its measuring and compiling processes, on a GPU that
is not there. It notes each trial that it reports; no such trial may be lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fake_gpu import H200, OLD, PROBLEM, TILES, FakeGpu, make_resources, us_of
from sweeper import Sweeper
from test_pool import alive, wait_until

from tunegen.evaluate import COMPILED, TORCH
from tunegen.lookup import find_winners
from tunegen.records import KEY
from tunegen.store import Store
from tunegen.ties import LIMITS_SMALL, NEAR

ALL = [*TILES, *OLD, TORCH]
WRONG, TOO_LARGE = TILES[3], TILES[7]
FAULTS = {WRONG.label(): "wrong", TOO_LARGE.label(): "too large"}


@pytest.fixture(scope="module")
def sweeper():
    found = Sweeper()
    yield found
    found.close()


class Place:
    """A folder with a database, and sweeps into it."""

    def __init__(self, sweeper, folder, number=0):
        self.sweeper, self.folder, self.number = sweeper, folder, number
        self.package = folder / "package"
        if not self.package.exists():
            make_resources(self.package)
        self.db, self.gpu = folder / f"{number}.db", FakeGpu(str(folder / f"{number}.log"), dict(FAULTS))
        self.sweeps = 0

    def next(self):
        return Place(self.sweeper, self.folder, self.number + 1)

    def start(self, rows=(PROBLEM.rows,), gpu=None, file_limit=0, options=()):
        self.sweeps += 1
        gpu = gpu or self.gpu
        arguments = ["--hidden", "4096", "--rows", ",".join(map(str, rows)), "--direction", "forward"]
        arguments = ["sweep", *arguments, "--db", str(self.db), *options]
        output = Path(f"{gpu.log}.{self.sweeps}")
        return self.sweeper.start(self.package, gpu.plan(), arguments, output, file_limit)

    def finish(self, **options):
        sweep = self.start(**options)
        assert sweep.wait() == 0, sweep.stderr()
        return sweep

    def processes(self):
        """All that took part in a sweep here, of any GPU."""
        return {int(line.split()[0]) for log in self.folder.glob("*.log") for line in log.read_text().splitlines()}

    def noted(self):
        """How much has happened."""
        return Path(self.gpu.log).read_bytes().count(b"\n") if os.path.exists(self.gpu.log) else 0

    def told(self):
        """The last that was reported of each candidate."""
        lines = self.gpu.lines("told") if os.path.exists(self.gpu.log) else []
        return {tuple(key): (state, us) for *key, state, us in map(json.loads, lines)}

    def query(self, sql):
        with closing(sqlite3.connect(self.db)) as connection:
            return connection.execute(sql).fetchall()

    def stored(self):
        rows = self.query("SELECT stage, rows, family, parameters, state, us FROM trials")
        return {tuple(key): (state, us) for *key, state, us in rows}

    def states(self):
        return [state for (state,) in self.query("SELECT state FROM sweeps ORDER BY id")]

    def finished(self):
        made = self.db.exists() and self.query("SELECT name FROM sqlite_master WHERE name = 'sweeps'")
        return bool(made) and "finished" in self.states()

    def halves(self):
        return {half for (half,) in self.query("SELECT half FROM winners WHERE kind = 'measured'")}

    def winners(self):
        rows = self.query("SELECT rows, family, parameters FROM winners WHERE kind = 'measured'")
        return {count: (family, json.loads(parameters)) for count, family, parameters in rows}


@pytest.fixture
def place(sweeper, tmp_path):
    return Place(sweeper, tmp_path)


def assert_sound(place):
    """The file is whole, it has all that was reported, and no key twice."""
    assert place.query("PRAGMA integrity_check") == [("ok",)]
    assert place.query("PRAGMA foreign_key_check") == []
    if not place.query("SELECT name FROM sqlite_master"):
        assert place.told() == {}
        return
    Store.read(place.db).close()
    stored = place.stored()
    for key, what in place.told().items():
        assert stored[key] == what
    keys = place.query(f"SELECT {', '.join(KEY)} FROM trials NOT INDEXED")
    assert len(set(keys)) == len(keys)
    blocks = "SELECT count(*) FROM samples WHERE trial_id = trials.id"
    pieces = place.query(f"SELECT DISTINCT us IS NULL, stage, ({blocks}) FROM trials")
    assert set(pieces) <= {(0, "screen", 3), (0, "final", 20), (1, "screen", 0)}


def best(rows):
    """What wins: of the fastest one and those nearest to it, the one with the fewest warps."""
    times = {c: us_of(replace(PROBLEM, rows=rows), c) for c in TILES if c not in (WRONG, TOO_LARGE)}
    tied = [c for c in times if times[c] <= min(times.values()) * (1 + LIMITS_SMALL[0] * NEAR)]
    return min(tied, key=lambda config: (config.num_warps, config.to_json()))


def assert_complete(place, rows=(PROBLEM.rows,)):
    """Every trial once, the right winners, and nothing half or running."""
    assert_sound(place)
    screened = Counter(key[1:] for key in place.stored() if key[0] == "screen")
    assert screened == Counter((count, c.family, c.to_json()) for count in rows for c in ALL)
    timed = {(key[1], key[2]) for key in place.stored() if key[0] == "final"}
    assert {(count, family) for count in rows for family in ("tile", "torch", COMPILED.family)} == timed
    assert place.winners() == {count: ("tile", dict(best(count).parameters)) for count in rows}
    assert place.halves() == {0}
    assert set(place.states()) <= {"interrupted", "finished"}
    wait_until(lambda: not alive(place.processes()))


def assert_half(place):
    """What an unfinished sweep says of itself."""
    if place.query("SELECT name FROM sqlite_master"):
        assert place.halves() <= {1}
        assert "finished" not in place.states()


def at_random(place, sweep, chance, most):
    """Wait until up to `most` more things have happened, and a moment; some moments lie within a transaction."""
    target = place.noted() + chance.randrange(1, most)
    while place.noted() < target and sweep.running():
        time.sleep(0.003)
    time.sleep(chance.choice((0.002, 0.005, 0.02, 0.1)) * chance.random())


# Killed


@pytest.mark.parametrize("seed", range(4))
def test_25_kills_lose_at_most_the_running_trial(place, seed):
    """SIGKILL of the sweeping process at any moment, a look at the database after each, and then a run to the end."""
    chance, kills = random.Random(seed), 0
    for _ in range(25):
        sweep = place.start()
        at_random(place, sweep, chance, 30)
        kills += sweep.kill() == -signal.SIGKILL
        if place.finished():  # it was about to end
            assert_complete(place)
            place = place.next()
        elif place.db.exists():
            assert_sound(place)
            assert_half(place)
    place.finish()
    assert_complete(place)
    assert kills >= 18


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_at_random_points_end_in_order(place, number):
    """Of the sweeping process alone, or of its children too, as a terminal or a batch system does it."""
    chance, ends = random.Random(number), Counter()
    for _ in range(5):
        sweep = place.start()
        at_random(place, sweep, chance, 50)
        code = sweep.signal(number, group=chance.random() < 0.7)
        assert_sound(place)
        if code == 130:
            assert sweep.stderr().strip() == "tunegen: interrupted"
            ends[place.states()[-1]] += 1
            assert "running" not in place.states()[:-1]
        else:  # it had ended, or was about to
            assert place.states()[-1] == "finished"
            place = place.next()
    place.finish()
    assert_complete(place)
    assert ends["interrupted"] >= 2
    # An interrupt as the row of the sweep is made leaves it to the next sweep to see that the process has ended.
    assert ends["running"] <= 1


def test_measuring_process_that_hangs_in_c_ends_with_a_killed_sweep(place):
    """Holding the interpreter's lock, as in a driver's call: its own threads cannot end it."""
    place.gpu.faults[TILES[5].label()] = "hang in C"
    sweep = place.start()
    wait_until(lambda: place.noted() and place.gpu.lines("hang"))
    try:
        assert sweep.kill() == -signal.SIGKILL
        wait_until(lambda: not alive(place.processes()), 5)
    finally:
        for pid in alive(place.processes()):
            os.kill(pid, signal.SIGKILL)


# Company


def test_h19_eight_sweeps_into_one_new_file(place):
    """Each has a problem of its own and one in common with all others; each reports its own winners."""
    gpus = [FakeGpu(str(place.folder / f"of {i}.log"), dict(FAULTS)) for i in range(8)]
    rows = [(PROBLEM.rows, 2**i) for i in range(8)]
    sweeps = [place.start(own, gpu, options=["--json"]) for own, gpu in zip(rows, gpus, strict=True)]
    for sweep, own in zip(sweeps, rows, strict=True):
        assert sweep.wait() == 0, sweep.stderr()
        found = {line["rows"]: line["winner"] for line in json.loads(sweep.stdout())["results"]}
        assert found == {count: best(count).label() for count in own}
    assert_complete(place, sorted({count for own in rows for count in own}))
    assert place.states() == ["finished"] * 8
    assert place.query("SELECT count(*) FROM silicon") == [(1,)]
    for gpu in gpus:
        told = [tuple(json.loads(line)) for line in gpu.lines("told")]
        assert len(set(told)) == len(told)
        assert {(*key, *what) for key, what in place.stored().items()} >= set(told)


def test_sweeps_beside_one_that_is_killed(place):
    """The same problem: the other goes on, and the last one to begin leaves nothing half."""
    gpu = FakeGpu(str(place.folder / "killed.log"), FAULTS | {TILES[9].label(): "hang"})
    killed = place.start(gpu=gpu)
    wait_until(lambda: os.path.exists(gpu.log) and gpu.lines("hang"))
    other = place.start((PROBLEM.rows, 4))
    wait_until(lambda: place.noted() > 1)
    assert killed.kill() == -signal.SIGKILL
    assert other.wait() == 0, other.stderr()
    place.finish(rows=(PROBLEM.rows, 4))
    assert_complete(place, (PROBLEM.rows, 4))
    assert place.states() == ["interrupted", "finished", "finished"]


# A disk that is full


@pytest.fixture(params=["tmpfs", "file size limit"])
def small_disk(request, sweeper, tmp_path):
    """A place with room for half of the trials and their journal, until it is widened: a small file system, and a limit
    on the size of files, which needs no rights and is another error to SQLite."""
    if request.param == "file size limit":
        yield Place(sweeper, tmp_path), {"file_limit": 56 << 10}, lambda: None
        return
    make_resources(tmp_path / "package")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here, so a limit on files stands for it: {mounted.stderr.strip()}")
    found = Place(sweeper, tmp_path)
    found.db = disk / "tune.db"
    yield found, {}, lambda: subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_full_disk_loses_at_most_the_running_trial(small_disk):
    place, limit, widen = small_disk
    rows = (PROBLEM.rows, 4)
    sweep = place.start(rows, **limit)
    assert sweep.wait() == 2
    (line,) = sweep.stderr().splitlines()
    assert line.startswith(f"tunegen: database {place.db}: ")
    assert "full" in line
    assert 3 < len(place.told()) < 2 * len(ALL)
    assert_sound(place)
    assert_half(place)
    assert len(place.stored()) == len(place.told())
    widen()
    place.finish(rows=rows)
    assert_complete(place, rows)
    assert place.states() == ["interrupted", "finished"]


def test_disk_too_full_for_a_database(small_disk):
    place, limit, widen = small_disk
    filler = place.db.with_name("filler")
    if limit:
        limit = {"file_limit": 8 << 10}
    else:
        filler.write_bytes(bytes(64 << 10))
    sweep = place.start(**limit)
    assert sweep.wait() == 2
    (line,) = sweep.stderr().splitlines()
    assert line.startswith(f"tunegen: database {place.db}: ")
    filler.unlink(missing_ok=True)
    widen()
    place.finish()
    assert_complete(place)


# A file that is broken


def damaged(content, how):
    size, noise = len(content), random.Random(1)
    return {
        "random": noise.randbytes(size),
        "half": content[: size // 2],
        "pages": content[:4096] + noise.randbytes(size - 4096),
        "empty": b"",
    }[how]


@pytest.mark.parametrize("how", ["random", "half", "pages"])
def test_h21_sweep_into_a_broken_file_says_so_and_leaves_it(place, how):
    """What is in it may be worth more than a new sweep, or be no database at all: it is moved by its owner, or by the
    running program, which goes on without it."""
    place.finish()
    content = damaged(place.db.read_bytes(), how)
    place.db.write_bytes(content)
    sweep = place.start()
    assert sweep.wait() == 2
    (line,) = sweep.stderr().splitlines()
    assert line.startswith(f"tunegen: database {place.db}: ")
    assert "move it away" in line
    assert place.db.read_bytes() == content
    place.db.rename(place.db.with_name("aside"))
    place.finish()
    assert_complete(place)


def test_h21_sweep_after_the_running_program_has_moved_the_broken_file(place):
    place.finish()
    content = damaged(place.db.read_bytes(), "random")
    place.db.write_bytes(content)
    assert find_winners(place.db, H200, PROBLEM, "3.8", 1) == []
    place.finish()
    assert_complete(place)
    (aside,) = place.folder.glob("*.broken-*")
    assert aside.read_bytes() == content


def test_h21_sweep_into_an_empty_file(place):
    place.db.touch()
    place.finish()
    assert_complete(place)


@pytest.mark.parametrize(
    ("column", "value"), [("score", "fast"), ("parameters", "{"), ("digest", b"\xff\xfe"), ("us", None)]
)
def test_h21_one_unreadable_row_is_measured_again(place, column, value):
    place.finish()
    worst = max((c for c in TILES if c not in (WRONG, TOO_LARGE)), key=lambda config: us_of(PROBLEM, config))
    with closing(sqlite3.connect(place.db)) as connection:
        where = "family = 'tile' AND stage = 'screen' AND parameters = ?"
        connection.execute(f"UPDATE trials SET {column} = ? WHERE {where}", (value, worst.to_json()))
        connection.commit()
    before = place.gpu.lines("screen")
    place.finish()
    assert place.gpu.lines("screen")[len(before) :] == [f"{PROBLEM.label()} {worst.label()}"]
    if column in ("parameters", "digest"):  # part of the key: the unreadable row stays beside the new one
        with closing(sqlite3.connect(place.db)) as connection:
            (deleted,) = connection.execute(f"SELECT count(*) FROM trials WHERE {column} = ?", (value,)).fetchone()
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"DELETE FROM trials WHERE {column} = ?", (value,))
            connection.commit()
        assert deleted == 1
    assert_complete(place)
