"""`tunegen export` and `tunegen import`: the same results in another database, and nothing lost of what is there."""

from __future__ import annotations

import json
import lzma
import re
import sqlite3
import sys
import tracemalloc
from contextlib import closing
from dataclasses import replace

import pytest
from command import output, run
from fake_gpu import H200
from stored import keep

from tunegen import dispatch, packed, records
from tunegen import exported as exported_file
from tunegen.evaluate import TORCH
from tunegen.importing import import_file
from tunegen.migrations import STEPS
from tunegen.model import Conditions, Measurement, Problem, Resources, Trial, TrialState
from tunegen.silicon import of_arch
from tunegen.space import load_space
from tunegen.store import Store

FORWARD = Problem("rms_norm", "forward", 1024, 4096)
BACKWARD = replace(FORWARD, direction="backward", weight_grad=True)
OTHER_GPU = of_arch("sm_80")
PLACE = ("id", "sweep_id", "silicon_id")


def timed(us):
    conditions = (Conditions(1980.0, 3201.0, 500.5, 61.0), None)
    return Measurement(us, us / 10, 10.0, (us, us + 0.1), (10.0, 10.1), (), conditions, (True, False), (0, 1))


def configs(problem, count):
    """Different ones of today's space, the built-in default left out, so that what answers is told by the database."""
    space = load_space(problem.op)
    family = "single_block" if problem.direction == "forward" else "persistent_partials"
    return [c for c in space.candidates(problem, H200, family) if c != space.default(problem, H200)][:count]


def trials(problem, us=20.0, **changes):
    """Screened, failed and final ones of a problem, with a tie that the time alone would decide otherwise."""
    first, second, third = configs(problem, 3)
    digest = {c: dispatch.digest_today(problem, c) for c in (first, second, third)}
    spent = Resources(40, 0, 512, "binary")
    for config in (first, second):
        yield Trial(problem, config, TrialState.OK, digest[config], resources=spent, measurement=timed(us + 1))
    yield Trial(problem, third, TrialState.COMPILE, digest[third], reason=f"{us} \u00e4\n\u4e16")
    for config, time, tied in ((second, us, True), (first, us + 0.01, True)):
        judged = {"band": 0.0065, "tied": tied, "gains": False, "error_ulp": 0.75}
        yield Trial(
            problem, config, TrialState.OK, digest[config], stage="final", resources=spent, measurement=timed(time),
            scratch_bytes=7, **{**judged, **changes},
        )  # fmt: skip
    torch = {"stage": "final", "band": 0.0065, "tied": False, "gains": False}
    yield Trial(problem, TORCH, TrialState.OK, measurement=timed(us + 9), **torch)
    yield Trial(problem, first, TrialState.OK, "d", kind="estimated", estimate_us=us / 3)


def fill(path, us=20.0, problems=(FORWARD, BACKWARD), **where):
    with Store.open(path) as file:
        for problem in problems:
            sweep = file.begin_sweep(where.get("silicon", H200), {"hidden": [1024]}, {"torch": "2.11"}, 3)
            file.add_all(sweep, list(trials(problem, us)), dispatch.PROTOCOL, dispatch.triton_minor(), "2.11")
            file.finish_sweep(sweep)
    return path


@pytest.fixture
def source(tmp_path):
    path = fill(tmp_path / "source.db")
    keep(path, *trials(FORWARD, 55.0), silicon=OTHER_GPU, torch="2.14")
    return path


def exported(path, *filters):
    file = path.with_suffix(".jsonl")
    output("export", file, "--db", path, *filters)
    return file


def refused(file, db):
    result = run("import", file, "--db", db)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def dump(path):
    with closing(sqlite3.connect(path)) as connection:
        return {
            table: connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
            for table in ("silicon", "sweeps", "trials", "samples")
        }


def winners(path):
    with Store.read(path) as store:
        return [{k: v for k, v in row.items() if k not in PLACE} for row in store.winners()]


def answers(path):
    """What the dispatcher would find, nearest and best first."""
    rows = (1024, 4096, 16384)
    asked = [(replace(p, rows=r), chip) for p in (FORWARD, BACKWARD) for r in rows for chip in (H200, OTHER_GPU)]
    found = [list(dispatch.stored_choices(path, *one)) for one in asked]
    return [[(config, stored._replace(trial_id=0)) for config, stored in choices] for choices in found]


def test_round_trip_gives_the_same_database(source, tmp_path):
    copy = tmp_path / "new" / "copy.db"
    told = output("import", exported(source), "--db", copy)
    assert told == f"{copy}: 21 trials added, 0 were there already, 0 left out\n"
    assert dump(copy) == dump(source)
    assert winners(copy) == winners(source)
    assert len(winners(copy)) == 6
    assert answers(copy) == answers(source)
    assert all(answers(copy)[:2])
    assert exported(copy).read_bytes() == exported(source).read_bytes()


def test_gaps_between_numbers_do_not_show(source, tmp_path):
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("DELETE FROM trials WHERE id IN (2, 9)")
        connection.commit()
    copy = tmp_path / "copy.db"
    output("import", exported(source), "--db", copy)
    assert winners(copy) == winners(source)
    assert exported(copy).read_bytes() == exported(source).read_bytes()


def test_lines_say_what_they_are(source):
    lines = [json.loads(line) for line in exported(source).read_text("ascii").splitlines()]
    assert lines[0] == {
        "record": "header", "format": 1, "schema": len(STEPS), "silicon": 2, "sweep": 3, "trial": 21,
    }  # fmt: skip
    assert [line["record"] for line in lines[1:]] == ["silicon"] * 2 + ["sweep"] * 3 + ["trial"] * 21
    assert (lines[1]["name"], lines[3]["torch"], lines[3]["state"]) == (H200.name, "2.11", "finished")
    final = next(line for line in lines if line.get("stage") == "final")
    assert final["samples"]["us"] == [20.0, 20.1]
    assert final["samples"]["kept"] == [1, 0]
    assert final["samples"]["watts"] == [500.5, None]


def test_the_same_file_twice_adds_nothing(source, tmp_path):
    file, copy = exported(source), tmp_path / "copy.db"
    output("import", file, "--db", copy)
    before = dump(copy)
    assert output("import", file, "--db", copy).endswith("0 trials added, 21 were there already, 0 left out\n")
    assert output("import", file, "--db", source).endswith("0 trials added, 21 were there already, 0 left out\n")
    assert dump(copy) == before == dump(source)


def test_filters_choose_trials_with_their_gpus_and_sweeps(source, tmp_path):
    lines = exported(source, "--direction", "backward", "--kind", "measured").read_text().splitlines()
    assert [json.loads(line)["record"] for line in lines] == ["header", "silicon", "sweep", *["trial"] * 6]
    copy = tmp_path / "copy.db"
    output("import", exported(source, "--direction", "backward"), "--db", copy)
    assert winners(copy) == [row for row in winners(source) if row["direction"] == "backward"]
    told = output("import", exported(source), "--db", copy)
    assert told.endswith("14 trials added, 7 were there already, 0 left out\n")
    assert winners(copy) == winners(source)


@pytest.mark.parametrize(("mine", "other"), [(20.0, 30.0), (30.0, 20.0)])
def test_what_is_measured_here_stays_and_is_named(tmp_path, mine, other):
    """Faster or slower: not one trial is replaced, and finals of two measurements are not mixed."""
    here, there = fill(tmp_path / "here.db", mine, [FORWARD]), fill(tmp_path / "there.db", other)
    before = dump(here), answers(here)[:6]
    told = output("import", exported(there), "--db", here).splitlines()
    assert told[-1].endswith("7 trials added, 0 were there already, 7 left out")
    finals = next(line for line in told if "3 finals" in line)
    assert finals.startswith(f"left out: {FORWARD.label()} on {H200.name}, 3 finals")
    assert "the database has its own (2" in finals
    assert dump(here)["trials"][:7] == before[0]["trials"]
    assert answers(here)[:6] == before[1]
    assert {row["direction"] for row in winners(here)} == {"forward", "backward"}
    again = dump(here)
    assert (
        output("import", exported(there), "--db", here)
        .splitlines()[-1]
        .endswith("0 trials added, 7 were there already, 7 left out")
    )
    assert dump(here) == again


def test_finals_of_another_set_are_left_out_whole(tmp_path):
    """Their keys are new here, but which of them are tied was decided among others."""
    here, there = tmp_path / "here.db", fill(tmp_path / "there.db", problems=[FORWARD])
    config = configs(FORWARD, 5)[4]
    digest = dispatch.digest_today(FORWARD, config)
    keep(here, Trial(FORWARD, config, TrialState.OK, digest, stage="final", measurement=timed(40.0), tied=True))
    winner = [row for row in winners(here) if row["kind"] == "measured"]
    told = output("import", exported(there), "--db", here)
    assert told.endswith("4 trials added, 0 were there already, 3 left out\n")
    assert [row for row in winners(here) if row["kind"] == "measured"] == winner


def test_sweep_that_ran_when_it_was_exported(tmp_path):
    """It counts as interrupted, until a later export says that it has finished."""
    source, copy = tmp_path / "source.db", tmp_path / "copy.db"
    with Store.open(source) as store:
        sweep = store.begin_sweep(H200, {}, {}, 0)
        store.add_all(sweep, list(trials(FORWARD)), dispatch.PROTOCOL, dispatch.triton_minor(), "")
        output("import", exported(source), "--db", copy)
        assert {row["half"] for row in winners(copy)} == {1}
        store.finish_sweep(sweep)
    assert output("import", exported(source), "--db", copy).endswith(
        "0 trials added, 7 were there already, 0 left out\n"
    )
    assert winners(copy) == winners(source)
    assert {row["half"] for row in winners(copy)} == {0}


def changed(line, **columns):
    """The file's line with other columns; None takes one out."""

    def change(lines):
        row = {**json.loads(lines[line - 1]), **columns}
        lines[line - 1] = json.dumps({name: value for name, value in row.items() if value is not None})

    return change


def inside(line, **samples):
    def change(lines):
        row = json.loads(lines[line - 1])
        row["samples"] |= samples
        lines[line - 1] = json.dumps(row)

    return change


def text(line, value):
    return lambda lines: lines.__setitem__(line - 1, value)


# Lines: 1 header, 2 and 3 GPUs, 4 to 6 sweeps, 7 to 27 trials.
WRONG = {
    "format": (changed(1, format=2), "1: format: must be 1, got 2"),
    "no format": (changed(1, format=None), "1: format: must be 1, got None"),
    "a later schema": (changed(1, schema=len(STEPS) + 1), f"1: schema: must be 1 to {len(STEPS)}"),
    "no header": (lambda lines: lines.pop(0), "1: record: must be header, got 'silicon'"),
    "another program's": (text(1, '{"id": 1}'), "1: record: must be header, got None"),
    "no JSON": (text(8, "{nothing"), "8: the line: no JSON"),
    "not a number": (changed(8, us=float("nan")), "8: the line: no JSON: NaN is no number"),
    "list": (text(8, "[]"), "8: the line: must be an object"),
    "cut short": (lambda lines: lines.pop(), "1: trial: says 21, but the file has 20"),
    "kind": (changed(5, record="result"), "5: record: must be one of silicon, sweep, trial, got 'result'"),
    "list for a kind": (changed(5, record=["trial"]), "5: record: must be one of silicon, sweep, trial, got ['trial']"),
    "unknown key": (changed(7, speed=3), "7: speed: unknown; a trial has"),
    "missing key": (changed(7, family=None), "7: family: missing"),
    "text for a number": (changed(7, us="20"), "7: us: must be a number, got '20'"),
    "truth for a number": (changed(7, registers=True), "7: registers: must be a whole number, got True"),
    "number for a text": (changed(7, digest=4), "7: digest: must be text, got 4"),
    "too large": (changed(7, scratch_bytes=2**63), "7: scratch_bytes: must be a whole number"),
    "no text": (changed(9, reason="\ud800"), "9: reason: must be text"),
    "time below zero": (changed(7, us=-1.0), "7: us: must be above 0, got -1.0"),
    "state": (changed(7, state="good"), "7: state: must be one of ok,"),
    "stage": (changed(7, stage="third"), "7: stage: must be one of screen, final"),
    "sweep's state": (changed(4, state="good"), "4: state: must be one of running"),
    "parameters": (changed(7, parameters='{"b": 1, "a": 1}'), "7: parameters: must be a JSON object with sorted keys"),
    "parameters that are none": (changed(7, parameters="[1]"), "7: parameters: must be a JSON object"),
    **{
        f"parameters that hold {value}": (changed(7, parameters=f'{{"a": {value}}}'), "7: parameters: must be a JSON")
        for value in ("[1]", "null", "true", "1.5", "NaN")
    },
    "sweep that is not there": (changed(7, sweep_id=4), "7: sweep_id: no sweep of that number stands above, got 4"),
    "GPU that is not there": (changed(4, silicon_id=3), "4: silicon_id: no silicon of that number"),
    "numbers": (changed(3, id=1), "3: id: must be 2, got 1"),
    "twice": (lambda lines: lines.__setitem__(8, lines[7]), "9: the line: has the trial of line 8 again"),
    "samples": (changed(7, samples=[1]), "7: samples: must hold a list for each column"),
    "sample's column": (inside(7, speed=[1, 2]), "7: samples.speed: unknown"),
    "sample's value": (inside(7, us=[1.0, "2"]), "7: samples.us: must be a number, got '2'"),
    "unequal samples": (inside(7, us=[1.0]), "7: samples.us: has 1 values where others have 2"),
    "block twice": (inside(7, block=[0, 0]), "7: samples.block: has a number twice"),
    "empty": (lambda lines: lines.clear(), "1: record: the file is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_file_is_refused_by_line_and_key(source, tmp_path, name):
    change, told = WRONG[name]
    file, db = exported(source), tmp_path / "untouched.db"
    lines = file.read_text().splitlines()
    change(lines)
    file.write_text("".join(f"{line}\n" for line in lines))
    assert f"{file}:{told}" in refused(file, db)
    assert not db.exists()


def test_file_that_is_no_text_or_not_there_is_refused(tmp_path):
    file = tmp_path / "x.jsonl"
    assert "cannot read" in refused(file, tmp_path / "x.db")
    file.write_bytes(b"\xff\xfe\n")
    assert "no text in UTF-8" in refused(file, tmp_path / "x.db")
    assert "cannot read" in refused(tmp_path, tmp_path / "x.db")


def test_a_line_without_an_end_is_refused(source, tmp_path, monkeypatch):
    """/dev/zero was read until the memory was full."""
    file = tmp_path / "x.jsonl"
    with file.open("wb") as endless:
        endless.truncate(2**30)  # of zeros, and takes no room on the disk
    told = refused(file, tmp_path / "x.db")
    assert f"{file}:1: the line: has more than {exported_file.LONGEST_LINE} characters; make one with `tunegen" in told
    sound = exported(source)
    monkeypatch.setattr(exported_file, "LONGEST_LINE", max(map(len, sound.read_text().split("\n"))))
    import_file(sound, tmp_path / "y.db")
    monkeypatch.setattr(exported_file, "LONGEST_LINE", exported_file.LONGEST_LINE - 1)
    assert "has more than" in refused(sound, tmp_path / "z.db")


def test_a_database_is_told_from_a_file_of_its_results(source, tmp_path):
    told = refused(source, tmp_path / "x.db")
    assert f"{source} is a database; `tunegen export FILE --db {source}` makes a file of it" in told


def test_file_of_an_older_schema_gets_the_defaults_of_later_columns(source, tmp_path):
    file, copy = exported(source), tmp_path / "copy.db"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["schema"] = 3
    for row in rows:
        row.pop("sum_in_fp32", None)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    output("import", file, "--db", copy)
    assert winners(copy) == winners(source)


def test_import_that_fails_half_way_leaves_the_database_as_it_was(source, tmp_path, monkeypatch):
    file, here = exported(source), fill(tmp_path / "here.db", problems=[BACKWARD])
    before = dump(here)
    insert, count = records.insert_trial, iter(range(5))

    def fails(*arguments):
        if next(count) == 4:
            raise KeyboardInterrupt
        return insert(*arguments)

    monkeypatch.setattr(records, "insert_trial", fails)
    assert run("import", file, "--db", here).exit_code == 130
    assert dump(here) == before


def test_export_writes_whole_or_not_at_all(source, tmp_path, monkeypatch):
    (tmp_path / "taken.jsonl").mkdir()
    (tmp_path / "file").touch()
    result = run("export", tmp_path / "file" / "x.jsonl", "--db", source)
    assert f"x.jsonl: {tmp_path / 'file'} is no folder; choose another file" in result.stderr
    result = run("export", tmp_path / "taken.jsonl", "--db", source)
    assert f"cannot write {tmp_path / 'taken.jsonl'}: Is a directory; choose another file" in result.stderr
    assert "no database at" in run("export", tmp_path / "x.jsonl", "--db", tmp_path / "none.db").stderr
    file = exported(source)
    before = file.read_bytes()
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("UPDATE trials SET score = 9e999 WHERE id = 21")
        connection.commit()
    assert "holds a value that JSON cannot" in run("export", file, "--db", source).stderr
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


@pytest.mark.parametrize("command", ["show", "export", "defaults"])
@pytest.mark.parametrize(("column", "value"), [("score", "fast"), ("rows", b"\xff"), ("us", "soon"), ("gains", 1.5)])
def test_a_value_of_another_kind_is_named_with_its_row(source, tmp_path, command, column, value):
    """SQLite keeps what it is given, whatever the column is meant for."""
    with closing(sqlite3.connect(source)) as connection:
        connection.execute(f"UPDATE trials SET {column} = ? WHERE stage = 'final'", (value,))
        connection.commit()
    arguments = {"show": ["show", "trials"], "export": ["export", tmp_path / "x.jsonl"]}
    result = run(*arguments.get(command, ["export", "--defaults"]), "--db", source)
    assert result.exit_code == 2, result.output
    assert re.search(rf"row \d+ of the database has .* as {column}, not a .*number; delete it", result.stderr)


def test_import_names_a_row_with_a_value_of_another_kind(source):
    file = exported(source)
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("UPDATE trials SET us = 'soon' WHERE stage = 'final'")
        connection.commit()
    before = dump(source)
    assert "of the database has 'soon' as us, not a number; delete it" in refused(file, source)
    assert dump(source) == before


def test_a_trial_whose_sweep_was_deleted_by_hand_is_not_exported(source, tmp_path):
    """The command line of SQLite does not look at references, unless it is told to."""
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("DELETE FROM sweeps WHERE id = 1")
        connection.execute("DELETE FROM silicon WHERE id = 2")
        (left,) = connection.execute(
            """SELECT count(*) FROM trials JOIN sweeps ON sweeps.id = sweep_id
            JOIN silicon ON silicon.id = trials.silicon_id"""
        ).fetchone()
        connection.commit()
    assert left
    file = tmp_path / "x.jsonl"
    assert f"trials: {left}, " in output("export", file, "--db", source)
    assert f"{left} trials added" in output("import", file, "--db", tmp_path / "new.db")
    assert run("export", "--defaults", "--db", source).exit_code == 0


def test_export_makes_the_folder_that_it_names_and_says_so(source, tmp_path):
    file = tmp_path / "new" / "folder" / "x.jsonl"
    assert run("export", file, "--db", source, "--hidden", 999).exit_code == 2
    assert not file.parent.parent.exists(), "nothing is made for nothing"
    result = run("export", file, "--db", source)
    assert (result.exit_code, result.stderr) == (0, f"new folder for the file: {file.parent}\n")
    assert file.is_file()
    assert run("export", file, "--db", source).stderr == ""


@pytest.mark.parametrize("filters", [["--hidden", 999], ["--family", "two_pass"]])
def test_what_matches_nothing_is_refused_and_leaves_the_file_as_it_was(source, filters):
    file = exported(source)
    before = file.read_bytes()
    result = run("export", file, "--db", source, *filters)
    assert result.exit_code == 2
    assert f"no trials match in {source}: {file} is not written; `tunegen show trials --db {source}`" in result.stderr
    assert file.read_bytes() == before


def test_unknown_family_is_refused_with_those_that_are_known(source, tmp_path):
    result = run("export", tmp_path / "x.jsonl", "--family", "single_blok", "--db", source)
    assert result.exit_code == 2
    assert "--family: unknown family 'single_blok'; known are " in result.stderr
    assert not (tmp_path / "x.jsonl").exists()


def test_packed_file_holds_the_same_in_the_same_bytes(source, tmp_path):
    file, copy = tmp_path / "results.jsonl.xz", tmp_path / "copy.db"
    told = output("export", file, "--db", source)
    assert told == f"{file}: trials: 21, sweeps: 3, kinds of GPU: 2\n"
    first = file.read_bytes()
    assert lzma.decompress(first, lzma.FORMAT_XZ) == exported(source).read_bytes()
    output("export", file, "--db", source)
    assert file.read_bytes() == first
    assert output("import", file, "--db", copy).endswith("21 trials added, 0 were there already, 0 left out\n")
    assert dump(copy) == dump(source)


HUGE = {"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2 * packed.WORKING}
PACKED = {
    "no xz": (lambda whole: b'{"record": "header"}\n', " as xz: "),
    "another packer's": (lambda whole: lzma.compress(b"{}", lzma.FORMAT_ALONE), " as xz: "),
    "half": (lambda whole: whole[: len(whole) // 2], ": its xz is cut short"),
    "all but its last byte": (lambda whole: whole[:-1], ": its xz is cut short"),
    "nothing": (lambda whole: b"", ": its xz is cut short"),
    "a wrong byte": (lambda whole: whole[:90] + bytes([whole[90] ^ 1]) + whole[91:], " as xz: "),
    "two files": (lambda whole: whole + whole, " bytes stand behind the end of its xz"),
    "dictionary": (lambda whole: lzma.compress(b"{}", filters=[HUGE]), " as xz: Memory usage limit"),
    "nonsense": (lambda whole: lzma.compress(b"nonsense\n"), ":1: the line: no JSON: "),
    "no text": (lambda whole: lzma.compress(b"\xff\xfe\n"), ":1: the line: no text in UTF-8"),
    "an empty one": (lambda whole: lzma.compress(b""), ":1: record: the file is empty"),
    "fewer trials": (lambda whole: lzma.compress(lzma.decompress(whole).rpartition(b"\n{")[0]), ":1: trial: says 21"),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_file_that_is_wrong_is_refused(source, tmp_path, name):
    change, told = PACKED[name]
    file, db = tmp_path / "results.jsonl.xz", tmp_path / "untouched.db"
    output("export", file, "--db", source)
    file.write_bytes(change(file.read_bytes()))
    message = refused(file, db)
    assert str(file) in message
    assert told in message
    assert not db.exists()


def test_packed_file_that_is_not_there_is_refused(tmp_path):
    assert "cannot read" in refused(tmp_path / "x.jsonl.xz", tmp_path / "x.db")
    (tmp_path / "folder.xz").mkdir()
    assert "cannot read" in refused(tmp_path / "folder.xz", tmp_path / "x.db")


def test_packed_file_has_a_limit_when_it_is_read_and_when_it_is_written(source, tmp_path, monkeypatch):
    file, db = tmp_path / "results.jsonl.xz", tmp_path / "x.db"
    output("export", file, "--db", source)
    whole, size = file.read_bytes(), len(lzma.decompress(file.read_bytes()))
    monkeypatch.setattr(packed, "LIMIT", size - 1)
    assert f"cannot read {file}: it holds more than" in refused(file, db)
    result = run("export", file, "--db", source)
    assert result.exit_code == 2
    assert f"cannot write {file}: it would hold more than" in result.stderr
    assert file.read_bytes() == whole
    assert not db.exists()
    monkeypatch.setattr(packed, "LIMIT", size)
    output("export", file, "--db", source)
    output("import", file, "--db", db)


def test_small_file_that_unpacks_to_much_does_not_fill_the_memory(tmp_path, monkeypatch):
    file = tmp_path / "results.jsonl.xz"
    file.write_bytes(lzma.compress(bytes(2**25), preset=0))
    monkeypatch.setattr(packed, "LIMIT", 2**20)
    tracemalloc.start()
    message = refused(file, tmp_path / "x.db")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "it holds more than" in message
    assert peak < 2**24


def test_python_without_lzma_says_so_and_writes_plain_files(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lzma", None)
    file = tmp_path / "results.jsonl.xz"
    result = run("export", file, "--db", source)
    assert (result.exit_code, file.exists()) == (2, False)
    assert f"this Python has no lzma, which {file} needs" in result.stderr
    file.touch()
    assert "take a name without .xz" in refused(file, tmp_path / "x.db")
    assert exported(source).exists()
