"""The index: a new process gets the ladder's answer from it, and not once what that came from is another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch
from stored import keep

from tunegen import dispatch, index, installed, lookup, paths, render
from tunegen.errors import CompileError, RenderError
from tunegen.explanation import explain_problem
from tunegen.key import Key
from tunegen.model import Config, Measurement, Trial, TrialState
from tunegen.ops import op_spec
from tunegen.silicon import of_arch
from tunegen.space import load_space

H200 = of_arch("sm_90")
KEY = Key("rms_norm", "backward", 4096, 1024, torch.bfloat16, torch.bfloat16, "fp32", False, True, 0)
FORWARD = KEY._replace(direction="forward", weight_grad=False)
PROBLEM = KEY.problem()
FIRST, SECOND = load_space("rms_norm").candidates(PROBLEM, H200, "persistent_partials")[:2]


def timed(config, us):
    digest = dispatch.digest_today(PROBLEM, config)
    return Trial(
        PROBLEM, config, TrialState.OK, digest=digest, measurement=Measurement(us, us / 10, 10.0, (us,), (10.0,))
    )


class Place:
    """A database and a build folder, and what happens to them: `ask` is the first call of a new process."""

    def __init__(self, folder, monkeypatch):
        self.db, self.build, self.climbed = folder / "tune.db", folder / "build", 0
        self.silicon, self.before, self.on_the_way = H200, lambda: None, lambda: None
        monkeypatch.setenv("TUNEGEN_DB", str(self.db))
        monkeypatch.setenv("TUNEGEN_BUILD", str(self.build))
        monkeypatch.setattr(dispatch, "silicon_of", lambda device: self.silicon)
        rungs = dispatch.rungs

        def counted(*arguments):
            self.climbed += 1
            self.before()
            for rung in rungs(*arguments):
                self.on_the_way()
                yield rung

        monkeypatch.setattr(dispatch, "rungs", counted)

    def ask(self, key=KEY):
        """The choice, and whether the index knew it."""
        dispatch.forget()
        before = self.climbed
        choice = dispatch.choose(key)
        return choice, self.climbed == before

    def knows(self, key=KEY):
        return self.ask(key)[1]

    def entries(self):
        return json.loads(index.file().read_text())


@pytest.fixture
def place(tmp_path, monkeypatch):
    dispatch.forget()
    yield Place(tmp_path, monkeypatch)
    dispatch.forget()


def all_of(choice):
    return choice.problem, choice.config, choice.rung, choice.stored, choice.device, choice.saves_rstd, choice.nests


@pytest.mark.parametrize("stage", ["final", "screen"])
@pytest.mark.parametrize("best", [FIRST, Config("torch"), None], ids=["kernel", "torch", "default"])
def test_a_new_process_gets_the_same_choice_without_the_ladder(place, best, stage):
    if best is not None:
        keep(place.db, replace(timed(best, 5.0), stage=stage), timed(SECOND, 9.0))
    first, known = place.ask()
    assert not known
    again, known = place.ask()
    assert known
    assert all_of(again) == all_of(first)
    assert (again.stored is None) == (best is None)


def test_each_call_has_its_own_entry(place):
    keep(place.db, timed(FIRST, 5.0))
    keys = [KEY, FORWARD, KEY._replace(hidden=5120), KEY._replace(rows=1), KEY._replace(casting="llama")]
    keys += [KEY._replace(policy=policy) for policy in ("deterministic", "invariant")]
    keys += [
        KEY._replace(weight_dtype=None, weight_grad=False),
        KEY._replace(offset=True),
        KEY._replace(op="add_rms_norm"),
    ]
    found = []
    for key in keys:
        choice, known = place.ask(key)
        assert not known
        found.append(all_of(choice))
    assert [all_of(place.ask(key)[0]) for key in keys] == found
    assert all(place.knows(key) for key in keys)


def test_explain_says_the_same_of_either(place):
    keep(place.db, timed(FIRST, 4.0), timed(SECOND, 9.0))
    told = []
    for known in (False, True):
        assert place.knows() is known
        told.append(explain_problem(place.db, PROBLEM, H200, KEY))
    assert told[0] == told[1]
    keep(place.db, timed(SECOND, 1.0))
    assert "as it was when this process first asked" in explain_problem(place.db, PROBLEM, H200, KEY).why


# What an answer comes from, one thing at a time.


def copies(place, monkeypatch):
    """Our files, as copies that may be edited; they are those that the process began with."""
    root = place.db.parent / "copy"
    for name in ("templates", "search_spaces"):
        shutil.copytree(paths.resource(name), root / name)
    shutil.copytree(paths.PACKAGE, root / "tunegen", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(paths, "PACKAGE", root / "tunegen")
    monkeypatch.setattr(paths, "resource", lambda name: root / name)
    monkeypatch.setattr(index, "FILES", index.our_files())
    return root


@pytest.mark.parametrize(
    "file",
    [
        "templates/rms_norm/backward_persistent_partials.py.jinja",
        "templates/common/_backward_rows.py.jinja",
        "search_spaces/rms_norm.yaml",
        "tunegen/dispatch.py",
        "tunegen/ops/rms_norm_spec.py",
    ],
)
def test_not_once_a_file_of_ours_is_edited(place, monkeypatch, file):
    path = copies(place, monkeypatch) / file
    assert [place.knows(), place.knows()] == [False, True]
    status, text = path.stat(), path.read_text()
    path.write_text(text[:-1] + "#")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert [place.knows(), place.knows()] == [False, False], "what this process has loaded is of before"
    monkeypatch.setattr(index, "FILES", index.our_files())
    path.write_text(text)
    assert not place.knows()
    monkeypatch.setattr(index, "FILES", index.our_files())
    assert [place.knows(), place.knows()] == [False, True]


def test_not_once_a_template_is_added(place, monkeypatch):
    root = copies(place, monkeypatch)
    assert [place.knows(), place.knows()] == [False, True]
    (root / "templates/rms_norm/new.py.jinja").touch()
    monkeypatch.setattr(index, "FILES", index.our_files())
    assert not place.knows()


def sweep(place):
    keep(place.db, timed(FIRST, 4.0))


def vanish(place):
    place.db.unlink()


def replaced(place):
    other, times = place.db.with_suffix(".new"), place.db.stat()
    shutil.copy(place.db, other)
    os.replace(other, place.db)
    os.utime(place.db, ns=(times.st_atime_ns, times.st_mtime_ns))


def counted_up(place):
    """A commit that leaves size and times."""
    times = place.db.stat()
    with closing(sqlite3.connect(place.db)) as connection:
        connection.execute("UPDATE trials SET us = us / 2")
        connection.commit()
    assert place.db.stat().st_size == times.st_size
    os.utime(place.db, ns=(times.st_atime_ns, times.st_mtime_ns))


def copied_over(place):
    """Another file's contents in the same file, whose counter happens to be the same."""
    other, old = place.db.with_suffix(".new"), place.db.read_bytes()
    keep(other, timed(SECOND, 8.0))
    new = other.read_bytes()
    place.db.write_bytes(new[:24] + old[24:28] + new[28:])


@pytest.mark.parametrize("event", [sweep, vanish, replaced, counted_up, copied_over])
def test_not_once_the_database_has_changed(place, event):
    keep(place.db, timed(SECOND, 9.0))
    assert [place.knows(), place.knows()] == [False, True]
    event(place)
    choice, known = place.ask()
    assert not known
    assert choice.config == (FIRST if event is sweep else choice.config)
    assert place.knows()


def test_not_once_there_is_a_database(place):
    assert [place.knows(), place.knows()] == [False, True]
    keep(place.db, timed(FIRST, 4.0))
    choice, known = place.ask()
    assert (choice.config, known) == (FIRST, False)


@pytest.mark.parametrize("journal", ["-journal", "-wal"])
def test_not_while_a_journal_lies_beside(place, journal):
    keep(place.db, timed(FIRST, 4.0))
    assert [place.knows(), place.knows()] == [False, True]
    beside = place.db.with_name(f"{place.db.name}{journal}")
    beside.touch()
    assert [place.knows(), place.knows()] == [False, False]
    beside.unlink()
    place.knows()
    assert place.knows()


def test_of_another_database_there_is_another_index(place, monkeypatch, tmp_path):
    keep(place.db, timed(FIRST, 4.0))
    assert [place.knows(), place.knows()] == [False, True]
    monkeypatch.setenv("TUNEGEN_DB", str(tmp_path / "other.db"))
    choice, known = place.ask()
    assert (choice.stored, known) == (None, False)
    monkeypatch.setenv("TUNEGEN_DB", str(place.db))
    assert place.knows()


@pytest.mark.parametrize("fact", ["name", "capability", "sms", "l2_bytes", "memory_clock_khz", "shared_limit"])
def test_another_gpu_has_its_own(place, fact):
    assert [place.knows(), place.knows()] == [False, True]
    place.silicon = replace(H200, **{fact: "another" if fact == "name" else getattr(H200, fact) - 1})
    assert not place.knows()
    place.silicon = H200
    assert place.knows()


@pytest.mark.parametrize("name", ["torch", "triton", "jinja2", "pyyaml", "python"])
def test_not_of_another_release(place, monkeypatch, name):
    assert [place.knows(), place.knows()] == [False, True]
    release = installed._release
    monkeypatch.setattr(installed, "_release", lambda asked: "99.0" if asked == name else release(asked))
    if name == "python":
        monkeypatch.setattr(sys, "version", "3.99")
    installed.releases.cache_clear()
    try:
        assert not place.knows()
    finally:
        installed.releases.cache_clear()


def test_nothing_is_kept_that_changed_while_it_was_found(place):
    keep(place.db, timed(SECOND, 9.0))
    place.on_the_way = lambda: keep(place.db, timed(FIRST, 4.0))
    assert place.ask()[0].config == SECOND
    place.on_the_way = lambda: None
    choice, known = place.ask()
    assert (choice.config, known) == (FIRST, False)


def test_nothing_is_kept_of_a_database_that_was_not_there_before(place):
    """Once it is gone again all is as it was, but for the answer."""
    place.before = lambda: keep(place.db, timed(FIRST, 4.0))
    assert place.ask()[0].config == FIRST
    place.before = lambda: None
    place.db.unlink()
    choice, known = place.ask()
    assert (choice.stored, known) == (None, False)


# What holds for one process, or is to be told to each.


@contextmanager
def locked(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


@pytest.mark.parametrize("policy", ["fastest", "invariant"])
def test_nothing_is_kept_while_the_database_cannot_be_read(place, policy):
    keep(place.db, timed(FIRST, 4.0))
    with locked(place.db):
        choice, _ = place.ask(KEY._replace(policy=policy))
        assert "could not be read" in choice.rung
        assert not index.file().exists()
    assert [place.knows(), place.knows()] == [False, True]


def test_a_database_of_an_older_tunegen_is_named_by_each_process(place, caplog, monkeypatch):
    with closing(sqlite3.connect(place.db)) as connection:
        connection.execute("CREATE TABLE silicon (id INTEGER)")
    for _ in range(2):
        monkeypatch.setattr(lookup, "_warned", set())
        caplog.clear()
        assert not place.knows()
        assert "older tunegen" in caplog.text


def test_nothing_is_kept_where_a_template_was_not_rendered(place, monkeypatch):
    keep(place.db, timed(FIRST, 4.0))

    def fail(*_):
        raise RenderError("no open files left")

    with monkeypatch.context() as broken:
        broken.setattr(render, "combined_digest", fail)
        assert place.ask()[0].config != FIRST
    choice, known = place.ask()
    assert (choice.config, known) == (FIRST, False)


def test_what_did_not_run_gives_way_and_the_index_stays_as_it_was(place):
    keep(place.db, timed(FIRST, 4.0), timed(SECOND, 9.0))
    place.ask()
    before = place.entries()
    choice, known = place.ask()
    assert (choice.config, known) == (FIRST, True)
    dispatch.demote(KEY, choice, CompileError("no"))
    assert dispatch.choose(KEY).config == SECOND
    assert place.entries() == before
    assert place.ask()[0].config == FIRST


# The file.


def broken_files(sound):
    """What a file may hold instead."""
    entry = next(iter(sound["answers"]))

    def with_answer(value):
        return {**sound, "answers": {entry: value}}

    config, why, stored = sound["answers"][entry]
    family, parameters = config
    for place_of, wrong in enumerate([[], [], 7, -1, "x", 3, "x", 2, None]):
        yield with_answer([config, why, [*stored[:place_of], wrong, *stored[place_of + 1 :]]])
    yield from map(with_answer, [None, 1, [], [config, why], [config, 3, stored], [config, why, stored[:-1]], "abc"])
    for bad in (["../x", parameters], [family, {**parameters, "ROWS": 1.5}], [family, []], [family], 7, [family, None]):
        yield with_answer([bad, why, stored])
    yield with_answer([config, why, [*stored[:4], float("inf"), *stored[5:]]])
    half = "\ud800"  # of a pair of surrogates: JSON may say it, and no file can hold it
    yield with_answer([config, half, stored])
    yield with_answer([[family, {**parameters, "RSTD": half}], why, stored])
    yield with_answer([config, why, [*stored[:5], half, *stored[6:]]])
    yield from (
        [],
        {},
        None,
        3,
        "text",
        {**sound, "stamp": None},
        {**sound, "renderings": []},
        {"stamp": sound["stamp"]},
    )


def test_whatever_is_wrong_in_the_file_it_is_passed_over_and_written_anew(place, caplog):
    keep(place.db, timed(FIRST, 4.0))
    want, _ = place.ask()
    text, sound = index.file().read_bytes(), place.entries()
    contents = [json.dumps(value).encode() for value in broken_files(sound)]
    contents += [b"", text[: len(text) // 2], b"\xff\xfe\x00", b"[" * 100_000, text + b"x"]
    for content in contents:
        index.file().write_bytes(content)
        choice, known = place.ask()
        assert not known, content[:300]
        assert all_of(choice) == all_of(want)
        assert place.entries() == sound
    assert place.knows()
    assert [r for r in caplog.records if r.levelname == "WARNING"] == []


def world_writable(place):
    index.file().chmod(0o666)


def group_writable(place):
    index.file().chmod(0o620)


def in_an_open_folder(place):
    place.build.chmod(0o777)


def a_link(place):
    index.file().rename(place.build / "real.json")
    index.file().symlink_to(place.build / "real.json")


def of_somebody_else(place):
    if os.getuid() != 0:
        pytest.skip("needs root")
    os.chown(index.file(), 12345, -1)


def a_folder(place):
    index.file().unlink()
    index.file().mkdir()


@pytest.mark.parametrize(
    "event", [world_writable, group_writable, in_an_open_folder, a_link, of_somebody_else, a_folder]
)
def test_a_file_that_others_could_have_written_is_not_read(place, event, caplog):
    assert [place.knows(), place.knows()] == [False, True]
    event(place)
    assert not place.knows()
    assert place.knows() is (event not in (in_an_open_folder, a_folder)), "it was written anew, where that can be done"
    assert caplog.text == ""


def test_file_and_folder_are_private(place):
    old = os.umask(0)
    try:
        place.ask()
    finally:
        os.umask(old)
    assert index.file().stat().st_mode & 0o777 == 0o600
    assert place.build.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in place.build.iterdir()] == [index.file().name]


def test_no_folder_no_index_no_noise(place, monkeypatch, caplog, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TUNEGEN_BUILD", str(tmp_path / "file" / "build"))
    assert [place.knows(), place.knows()] == [False, False]
    assert caplog.text == ""


def test_a_full_file_begins_anew(place, monkeypatch):
    monkeypatch.setattr(index, "MOST", 2)
    keys = [KEY._replace(hidden=hidden) for hidden in (1024, 2048, 4096)]
    for key in keys:
        place.ask(key)
    assert len(place.entries()["answers"]) == 1
    assert place.knows(keys[2])


def test_many_writers_leave_a_whole_file(place):
    place.ask()
    known = index.stamp()

    def write(number):
        for turn in range(40):
            index.keep_answer(known, replace(PROBLEM, hidden=1000 * number + turn + 1), H200, (None, "x" * 500, None))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert place.entries()["stamp"] == known
    assert len(place.entries()["answers"]) >= 40
    assert [path.name for path in place.build.iterdir()] == [index.file().name]


TAKES_THE_LOCK = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"


def test_asking_for_the_state_of_the_database_ends_no_lock(place):
    """POSIX drops all locks of a process on a file that it closes, SQLite's with them."""
    keep(place.db, timed(FIRST, 4.0))
    with closing(sqlite3.connect(place.db, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert index.stamp() is not None
        place.ask()
        other = subprocess.run([sys.executable, "-c", TAKES_THE_LOCK, str(place.db)], capture_output=True, text=True)
        assert "database is locked" in other.stderr


# Renderings.

HOWS = [index.How(*how) for how in ((False, (), False), (True, (), False), (False, ("x",), False))]
BACKWARD_HOWS = [index.How(False, ("x", "dy"), False), index.How(False, (), True)]


@pytest.mark.parametrize(("key", "hows"), [(FORWARD, HOWS), (KEY, BACKWARD_HOWS)], ids=["forward", "backward"])
def test_a_rendering_is_found_again_whole(place, monkeypatch, key, hows):
    problem, config = key.problem(), place.ask(key)[0].config
    want = [render.rendering(problem, config, op_spec(problem.op), **how._asdict()) for how in hows]
    for how in hows:
        render.write(index.rendering(problem, config, how))
    monkeypatch.setattr(render, "rendering", None)
    assert [index.rendering(problem, config, how) for how in hows] == want


def test_a_rendering_that_is_not_as_it_was_written_is_made_anew(place):
    problem, config = FORWARD.problem(), place.ask(FORWARD)[0].config
    want = index.rendering(problem, config, HOWS[0])
    path = render.write(want)
    for spoil in (lambda: path.write_text("import os"), path.unlink, lambda: path.chmod(0o666)):
        spoil()
        assert index.rendering(problem, config, HOWS[0]) == want
        assert render.write(want).read_text() == want.text
        path.chmod(0o600)


@pytest.mark.parametrize("wrong", [None, [], [1, 2, 3, 4, 5], ["rms_norm", "../x", "0" * 64, "d", []], {"a": 1}])
def test_a_broken_entry_of_a_rendering_is_passed_over(place, wrong):
    problem, config = FORWARD.problem(), place.ask(FORWARD)[0].config
    want = index.rendering(problem, config, HOWS[0])
    render.write(want)
    sound = place.entries()
    broken = {**sound, "renderings": dict.fromkeys(sound["renderings"], wrong)}
    index.file().write_text(json.dumps(broken))
    assert index.rendering(problem, config, HOWS[0]) == want
    assert place.entries() == sound


@pytest.mark.parametrize("number", [2, 3, 4])
def test_an_entry_of_a_rendering_with_half_a_surrogate_is_passed_over(place, number):
    problem, config = FORWARD.problem(), place.ask(FORWARD)[0].config
    want = index.rendering(problem, config, HOWS[0])
    render.write(want)
    sound = place.entries()
    broken = json.loads(json.dumps(sound))
    for entry in broken["renderings"].values():
        entry[number] = [["casting", "\ud800"]] if number == 4 else "\ud800" * 16
    index.file().write_text(json.dumps(broken))
    assert index.rendering(problem, config, HOWS[0]) == want
    assert place.entries() == sound


def test_a_pipe_in_the_place_of_the_database_is_not_waited_for(place):
    """To open one for reading waits for someone who writes."""

    def late(*_):
        raise RuntimeError("it waits")

    os.mkfifo(place.db)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    try:
        assert index.stamp() is None
        assert place.ask()[0].config is not None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Processes.

FRESH = """
import json, sys, torch
had = set(sys.modules)
from tunegen import dispatch
from tunegen.key import Key
from tunegen.silicon import of_arch
dispatch.silicon_of = lambda device: of_arch("sm_90")
found = {}
for direction in ("forward", "backward"):
    bf16, weight_grad = torch.bfloat16, direction == "backward"
    key = Key("rms_norm", direction, 4096, 1024, bf16, bf16, "fp32", False, weight_grad, 0)
    choice = dispatch.choose(key)
    variant = choice.variant(direction == "forward", 0.0)
    found[direction] = [choice.config.label(), choice.rung, variant.source.text]
loaded = sorted({"jinja2", "yaml", "sqlite3"} & (set(sys.modules) - had))
print(json.dumps([found, loaded]))
"""


@pytest.mark.compiler
def test_a_process_that_finds_its_calls_loads_neither_templates_nor_space_nor_database(place):
    keep(place.db, timed(FIRST, 4.0))
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    (first, loaded), (again, nothing) = runs
    assert first == again
    assert FIRST.label() in first["backward"]
    assert loaded == ["jinja2", "sqlite3", "yaml"]
    assert nothing == []
