"""The command line: bad input, sweeps without a GPU, and what show and render print."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click
import pytest
from command import output, run
from fake_gpu import H200, VERSIONS, make_resources, measurement
from rich.console import Console

from tunegen import cli, dispatch, paths
from tunegen.commands import show_rows
from tunegen.dispatch import triton_minor
from tunegen.errors import TunegenError
from tunegen.exported import Exported
from tunegen.model import PROTOCOL, Config, Problem, Trial, TrialState
from tunegen.ops import op_spec
from tunegen.plans import load
from tunegen.render import combined_digest, render
from tunegen.space import load_space
from tunegen.store import Store

REPOSITORY = paths.PACKAGE.parent
BACKWARD = Problem("rms_norm", "backward", 4096, 16384, weight_grad=True)
FORWARD = replace(BACKWARD, direction="forward", weight_grad=False)


def process(*arguments, cwd=None, **variables):
    """The command in a process of its own, as a user has it."""
    command = [sys.executable, "-m", "tunegen.cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


def refused(*arguments):
    """The one line with which the command refuses its arguments."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    told = [line for line in result.stderr.splitlines() if line.startswith(("Error:", "tunegen:"))]
    assert len(told) == 1
    assert result.stderr.splitlines()[-1] == told[0], "nothing stands behind it"
    assert "Traceback" not in result.stderr
    return told[0]


def test_a_current_folder_that_is_deleted_is_one_line(tmp_path, monkeypatch):
    """torch, loaded there, ends the process in the middle of it; new_folder ended in a traceback."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for command in (["show"], ["sweep", "--hidden", 256, "--arch", "sm_90", "--db", "tune.db"], ["export", "file"]):
        assert refused(*command) == "tunegen: the current folder has been deleted: change to one that is there"


def test_a_pipe_is_no_database(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for command in ("explain", "render forward"):
        told = refused(*command.split(), "--hidden", 256, "--rows", 4, "--arch", "sm_90", "--db", tmp_path / "pipe")
        assert told == f"tunegen: {tmp_path}/pipe is no plain file; {paths.ANOTHER_DATABASE}"


# Bad input


FROZEN = "--frozen-weight: forward computes no gradient; take backward too, or leave it out"
BAD_INPUT = {
    "sweep": ["--hidden 4096", "--from"],
    "sweep --from step.json --hidden 64": ["--from", "--hidden", "give one of them up"],
    "sweep --from step.json --weight-dtype fp32": ["--from", "--weight-dtype", "give one of them up"],
    "sweep --from no/step.json": ["cannot read no/step.json", "No such file"],
    "sweep --hidden 0": ["--hidden", "0 is not in the range from 1 to 2147483647"],
    "sweep --hidden -4096": ["--hidden", "-4096 is not in the range"],
    "sweep --hidden 2147483648": ["--hidden", "2147483648 is not in the range"],
    "sweep --hidden abc": ["--hidden", "'abc' is no integer", "such as 4096"],
    "sweep --hidden ''": ["--hidden", "'' is no integer", "such as 4096"],
    "sweep --hidden 4096,": ["--hidden", "'' is no integer"],
    "sweep --hidden 4096 --hidden 4e3": ["--hidden", "'4e3' is no integer"],
    "sweep --hidden \u0664": ["--hidden", "is no integer"],
    "sweep --hidden 64 --rows 4,0": ["--rows", "0 is not in the range"],
    "sweep --hidden 64 --budget 0": ["--budget", "0 is not in the range x>=1"],
    "sweep --hidden 64 --budget many": ["--budget", "'many'", "integer"],
    "sweep --hidden 64 --seed -1": ["--seed", "-1 is not in the range 0<=x<=4294967295"],
    "sweep --hidden 64 --dtype fp8": ["--dtype", "'fp8'", "'bf16', 'fp16', 'fp32', 'fp64'"],
    "sweep --hidden 64 --weight-dtype int8": ["--weight-dtype", "'int8'", "'none'"],
    "sweep --hidden 64 --direction both": ["--direction", "'both'", "'forward', 'backward'"],
    "sweep --hidden 64 --casting hf": ["--casting", "'hf'", "'fp32', 'llama'"],
    "sweep --hidden 64 --arch sm_75": ["--arch", "'sm_75'", "sm_80, sm_86, sm_89, sm_90"],
    "sweep --from ~nobody.here/step.json": ["--from", "~nobody.here/step.json"],
    "gate --out ~nobody.here/gates": ["--out", "~nobody.here/gates"],
    "sweep --hidden 64 --db ~nobody.here/x.db": ["--db", "~nobody.here/x.db"],
    "sweep --width 64": ["No such option", "--width"],
    "show losers": ["'losers'", "'winners', 'trials'"],
    "show --hidden 0": ["--hidden", "0 is not in the range"],
    "show --state bad": ["--state", "'bad'", "'incorrect'"],
    "show --kind bad": ["--kind", "'bad'", "'measured'"],
    "render sideways --hidden 64": ["'sideways'", "'forward', 'backward'"],
    "render forward": ["--hidden", "Missing"],
    "render forward --hidden 0": ["--hidden", "0 is not in the range from 1 to 2147483647"],
    "render forward --hidden 64 --rows 0": ["--rows", "0 is not in the range"],
    "render forward --hidden 64 --arch sm_1": ["--arch", "'sm_1'", "sm_80, sm_86"],
    "render forward two_pass CHUNK --hidden 64": ["'CHUNK'", "NAME=VALUE", "num_warps=8"],
    "render forward two_pass =4 --hidden 64": ["'=4'", "NAME=VALUE"],
    "render forward flash --hidden 64": ["forward family 'flash'", "single_block", "two_pass"],
    "render forward dx_only --hidden 64": ["forward family 'dx_only'", "single_block"],
    "render forward two_pass RSTD=saved --hidden 64": ["'RSTD'", "CHUNK", "num_warps"],
    "render forward two_pass CHUNK=5 --hidden 64": ["CHUNK of two_pass is 5", "1024, 2048"],
    "render forward two_pass CHUNK=\u00b2 --hidden 64": ["CHUNK of two_pass is '\u00b2'"],
    "render forward two_pass CHUNK=1024 num_warps=big --hidden 64": ["num_warps of two_pass is 'big'"],
    "render forward single_block BLOCK_SIZE=big --hidden 64": [
        "BLOCK_SIZE of single_block is 'big', but is computed, here 64: next_power_of_2(N)"
    ],
    "render backward dx_only RSTD=1 --hidden 64": ["RSTD of dx_only is 1", "saved, recomputed"],
    "try rms_norm.forward two_pass --hidden 0": ["--hidden", "0 is not in the range from 1 to 2147483647"],
    "try rms_norm.forward two_pass --hidden 4096,5120": ["'4096,5120' is no integer; give one number, such as 4096"],
    "show --rows 1,2": ["--rows", "'1,2' is no integer; give one number"],
    "sweep --hidden 64 --direction forward --frozen-weight": [FROZEN],
    "try rms_norm.forward two_pass --hidden 64 --frozen-weight": [FROZEN],
    "render forward --hidden 64 --frozen-weight": [FROZEN],
    "explain --hidden 64 --rows 4 --direction forward --frozen-weight": [FROZEN],
    "tune": ["No such command 'tune'"],
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(command):
    told = refused(*shlex.split(command))
    assert [words for words in BAD_INPUT[command] if words not in told] == []


def a_folder(folder):
    (folder / "tune.db").mkdir()
    return folder / "tune.db", "is no plain file"


def below_a_file(folder):
    (folder / "file").touch()
    return folder / "file" / "tune.db", f"tune.db: {folder / 'file'} is no folder"


def in_a_folder_below_a_file(folder):
    """It cannot be made, and nothing says that it is."""
    (folder / "file").touch()
    return folder / "file" / "new" / "tune.db", "Not a directory"


def no_database(folder):
    (folder / "notes.txt").write_text("not for you " * 100)
    return folder / "notes.txt", "not a database"


def of_another_program(folder):
    with sqlite3.connect(folder / "other.db") as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    connection.close()
    return folder / "other.db", "another program's database"


@pytest.mark.parametrize("place", [a_folder, below_a_file, in_a_folder_below_a_file, no_database, of_another_program])
def test_database_that_cannot_be_written_is_refused_and_left_alone(tmp_path, place):
    path, words = place(tmp_path)
    before = path.read_bytes() if path.is_file() else None
    told = refused("sweep", "--hidden", 64, "--arch", "sm_90", "--db", path)
    assert str(path) in told
    assert words in told
    assert "give another with --db, or set TUNEGEN_DB" in told
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize("command", [["show"], ["show", "trials"], ["render", "forward", "--hidden", "64"]])
@pytest.mark.parametrize("place", [a_folder, no_database, of_another_program])
def test_what_is_no_database_is_refused_and_left_alone_by_readers(tmp_path, command, place):
    path, words = place(tmp_path)
    before = path.read_bytes() if path.is_file() else None
    told = refused(*command, "--db", path, *(["--arch", "sm_90"] if command[0] == "render" else []))
    assert words in told
    assert "give another with --db, or set TUNEGEN_DB" in told
    assert (path.read_bytes() if path.is_file() else None) == before
    assert list(tmp_path.iterdir()) == [path]


def test_show_without_a_database_says_how_to_get_one(tmp_path):
    db = tmp_path / "none.db"
    told = refused("show", "--db", db)
    assert f"no database at {db}; run `tunegen sweep --db {db}`, give another with --db, or set TUNEGEN_DB" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", [["families"], ["sweep", "--hidden", "64", "--arch", "sm_90"], ["render", "forward", "--hidden", "64"]]
)
def test_broken_search_space_is_named_with_file_and_line(tmp_path, monkeypatch, command):
    package = make_resources(tmp_path / "package")
    monkeypatch.setattr(paths, "PACKAGE", package)
    space = package / "search_spaces" / "rms_norm.yaml"
    space.write_text(space.read_text().replace("baseline: true", "basline: true"))
    line = space.read_text().splitlines().index("    basline: true") + 1
    told = refused(*command, *([] if command == ["families"] else ["--db", tmp_path / "tune.db"]))
    assert f"{space}:{line}: forward.old.basline: unknown key" in told


def test_missing_resources_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PACKAGE", tmp_path / "lib" / "tunegen")
    told = refused("families")
    assert str(tmp_path / "lib" / "tunegen" / "search_spaces") in told
    assert str(tmp_path / "lib" / "search_spaces") in told


# Help


def commands():
    return [pytest.param(command, id=name) for name, command in cli.main.commands.items()]


@pytest.mark.parametrize("command", commands())
def test_every_command_and_option_has_help(command):
    assert command.help
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert [p.opts for p in options if not p.help] == []
    assert output(command.name, "--help") == output(command.name, "-h")


@pytest.mark.parametrize("command", commands())
def test_examples_in_help_run_as_far_as_the_parser(command):
    for example in re.findall(r"Example: tunegen (.*)", command.help):
        with cli.main.make_context("tunegen", example.split()) as context:
            command.make_context(command.name, example.split()[1:], parent=context)


@pytest.mark.parametrize("command", commands())
def test_readme_names_every_command(command):
    assert f"`tunegen {command.name}" in (REPOSITORY / "README.md").read_text()


def test_version():
    assert output("--version").split()[-1] == cli.__version__


def test_help_is_quick_to_load():
    code = """
import sys
from tunegen.cli import main
try:
    main(["sweep", "--help"])
except SystemExit as end:
    assert end.code == 0
print([name for name in ("torch", "triton", "optuna", "jinja2", "sqlite_utils", "numpy") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert found.stderr == ""
    assert found.stdout.splitlines()[-1] == "[]"


# A sweep without a GPU


SWEEP = ["sweep", "--hidden", "256", "--direction", "forward", "--arch", "sm_90"]


@pytest.mark.compiler
def test_sweep_without_a_gpu_stores_estimates_and_says_so(tmp_path):
    path = tmp_path / "new" / "tune.db"
    result = process(*SWEEP, "--rows", "4,300", "--db", path)
    assert (result.returncode, result.stderr) == (0, "")
    *_, summary, last = result.stdout.splitlines()
    assert last == f"database: {path}"
    assert re.match(r"No GPU: \d+ candidates of \d+ families compiled for sm_90 .*nothing was timed\. \d+ s\.", summary)
    assert not set("\x1b\r") & set(result.stdout)
    assert "forward 300x256 bf16" in result.stdout
    with Store.read(path) as store:
        trials = store.trials()
        assert store.winners(kind="measured") == []
        assert [row["rows"] for row in store.winners(kind="estimated")] == [4, 300]
    assert sorted((t["rows"], t["family"], t["parameters"]) for t in trials) == all_candidates(
        hidden=256, rows=(4, 300)
    )
    assert {(t["kind"], t["state"], t["us"]) for t in trials} == {("estimated", "ok", None)}
    assert all(t["estimate_us"] > 0 and t["registers"] > 0 for t in trials)


def lines_of(*arguments, db):
    return output("sweep", "--arch", "sm_90", *arguments, "--db", db).splitlines()


def test_problem_without_candidates_is_said_without_a_gpu(tmp_path):
    lines = lines_of("--hidden", 2000000, "--rows", "1,64", "--direction", "backward", db=tmp_path / "tune.db")
    assert [line for line in lines if line.startswith("backward")] == [
        f"backward {rows}x2000000 bf16: 0 candidates: no family takes this problem" for rows in (1, 64)
    ]


@pytest.mark.parametrize(("arguments", "told"), [(("--budget", 5), 1), ((), 0)])
def test_budget_is_said_not_to_count_without_a_gpu(tmp_path, arguments, told):
    wide = ("--hidden", 2000000, "--rows", "1,64", "--direction", "backward")
    lines = lines_of(*wide, *arguments, db=tmp_path / "tune.db")
    assert lines.count("--budget counts on a GPU; all candidates are compiled") == told


@pytest.mark.compiler
def test_sweep_of_the_other_op_is_told_apart(tmp_path):
    path = tmp_path / "tune.db"
    for more in ((), ("--sum-in-fp32",)):
        command = ["sweep", "--op", "add_rms_norm", "--hidden", 256, "--rows", 4, "--arch", "sm_90", "--db", path]
        result = process(*command, *more)
        assert (result.returncode, result.stderr) == (0, "")
        assert "forward 4x256 bf16 add_rms_norm" in result.stdout
    with Store.read(path) as store:
        assert {row["op"] for row in store.trials()} == {"add_rms_norm"}
        found = {(row["direction"], row["sum_in_fp32"]) for row in store.winners(kind="estimated")}
        assert found == {("forward", 0), ("forward", 1), ("backward", 0)}
        assert store.winners(op="rms_norm") == []
    shown = columns(output("show", "--op", "add_rms_norm", "--db", path))
    assert {(row["direction"], row["op"], row["sum in fp32"]) for row in shown} == {
        *(("forward", "add_rms_norm", more) for more in ("", "yes")),
        ("backward", "add_rms_norm", ""),
    }
    assert "no winners match" in output("show", "--op", "rms_norm", "--db", path)


def test_a_sum_in_fp32_needs_an_op_that_adds():
    told = refused("explain", "--hidden", 4096, "--rows", 4, "--sum-in-fp32", "--arch", "sm_90")
    assert "rms_norm adds nothing; give --op add_rms_norm too" in told


BROKEN = {
    "single_block": ("def plan(p):\n", "def plan(p):\n    assert p.M != 64, 'no rows for me'\n"),
    "two_pass": ("import triton\n", "import triton\n\nraise ValueError('no table')\n"),
    "split_row_atomic": ("x_ptr,", "x_ptr, gamma_ptr,"),
}
"""Templates made bad: the text, and what stands there instead."""


@pytest.mark.compiler
def test_broken_templates_cost_their_trials_and_not_a_sweep_without_a_gpu(tmp_path):
    """In a copy as a wheel installs it, since the compiler runs in processes of its own."""
    copy = tmp_path / "site" / "tunegen"
    shutil.copytree(REPOSITORY / "tunegen", copy)
    for name in ("templates", "search_spaces"):
        shutil.copytree(REPOSITORY / name, copy / name)
    for family, (old, new) in BROKEN.items():
        template = copy / "templates" / "rms_norm" / f"forward_{family}.py.jinja"
        assert old in template.read_text()
        template.write_text(template.read_text().replace(old, new, 1))
    command = ["sweep", "--hidden", "2048", "--rows", "4,64", "--direction", "forward", "--arch", "sm_90"]
    result = process(*command, "--db", tmp_path / "tune.db", cwd=tmp_path, PYTHONPATH=str(copy.parent))
    assert (result.returncode, result.stderr) == (0, "")
    with Store.read(tmp_path / "tune.db") as store:
        trials = store.trials()
        assert store.trials(state="ok", family="split_row_partials", rows=64)
    found = {(t["family"], t["rows"], t["state"], t["reason"]) for t in trials if t["family"] in BROKEN}
    assert found == {
        ("single_block", 4, "ok", ""),
        ("single_block", 64, "compile", "forward_single_block.py.jinja: AssertionError: no rows for me, for 64 rows"),
        *(("two_pass", rows, "compile", "forward_two_pass.py.jinja: ValueError: no table") for rows in (4, 64)),
        *(
            (
                "split_row_atomic",
                rows,
                "compile",
                "sum_squares has an argument gamma_ptr, which no parameter or tensor gives",
            )
            for rows in (4, 64)
        ),
    }


def all_candidates(hidden, rows):
    space = load_space("rms_norm")
    problems = [replace(FORWARD, hidden=hidden, rows=m) for m in rows]
    families = [(p, family.name) for p in problems for family in space.families(p, H200)]
    return sorted((p.rows, name, c.to_json()) for p, name in families for c in space.candidates(p, H200, name))


@pytest.mark.compiler
def test_sweep_prints_json_and_nothing_else(tmp_path):
    result = process(*SWEEP, "--rows", "4", "--json", "--db", tmp_path / "tune.db")
    found = json.loads(result.stdout)
    assert sorted(found) == ["database", "failures", "machine", "results", "seconds", "summary"]
    assert found["database"] == str(tmp_path / "tune.db")
    assert {(r["direction"], r["rows"], r["hidden"]) for r in found["results"]} == {("forward", 4, 256)}
    times = [r["estimate_us"] for r in found["results"]]
    assert times == sorted(times)
    assert found["failures"] == []
    assert "forward 4x256 bf16" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.compiler
def test_database_of_a_sweep_is_that_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEGEN_DB", str(tmp_path / "mine.db"))
    # no algorithm is for rows as wide as this, so that nothing needs to be compiled
    text = output("sweep", "--hidden", "2000000000", "--rows", "1", "--direction", "backward", "--arch", "sm_90")
    assert text.splitlines()[-1] == f"database: {tmp_path / 'mine.db'}"
    assert (tmp_path / "mine.db").is_file()


def test_plain_text_in_ci_even_where_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("CI", raising=False)
    assert cli.console_for().is_terminal
    monkeypatch.setenv("CI", "true")
    assert not cli.console_for().is_terminal


# Show, render


def winner():
    """A choice for BACKWARD that is not the default and whose kernel reads otherwise."""
    space = load_space("rms_norm")
    candidates = space.candidates(BACKWARD, H200, "persistent_partials")
    return next(c for c in candidates if c["RSTD"] == "recomputed")


@pytest.fixture
def db(tmp_path):
    """Measured, failed and estimated trials; the winner of BACKWARD is `winner()`."""
    path = tmp_path / "tune.db"
    spec, config = op_spec("rms_norm"), winner()
    digest = combined_digest(BACKWARD, config, spec)
    torch = Trial(BACKWARD, Config("torch"), TrialState.OK, measurement=measurement(60.0))
    failed = Config.of("two_pass", {"CHUNK": 1024, "num_warps": 4})
    with Store.open(path) as store:
        sweep = store.begin_sweep(H200, {}, {k: v for k, v in VERSIONS.items() if k != "gpu"}, 0)
        for trial in (
            Trial(BACKWARD, config, TrialState.OK, digest=digest, measurement=measurement(50.0)),
            torch,
            Trial(FORWARD, failed, TrialState.COMPILE, reason="OutOfResources: [shared] memory"),
            Trial(FORWARD, failed, TrialState.OK, kind="estimated", estimate_us=31.5),
        ):
            store.add_all(sweep, [trial], PROTOCOL, triton_minor(), "2.14")
        store.finish_sweep(sweep)
    return path


def test_show_prints_winners_one_a_line(db):
    head, backward, forward = [line for line in output("show", "--db", db).splitlines() if line.strip(" \u2500")]
    assert head.split()[:4] == ["direction", "rows", "hidden", "dtype"]
    for text in (
        "backward",
        "16384",
        winner().label(),
        "measured",
        "50.000",
        "5.000",
        H200.name,
    ):
        assert f" {text} " in backward
    for text in ("forward", "two_pass", "estimated", "31.500"):
        assert f" {text} " in forward
    assert forward.strip().endswith(f" compiled for sm_90 ({H200.name})"), "an estimate: no such GPU was there"
    assert "compiled for" not in backward
    assert "of half a sweep" not in head
    assert not {"op", "weight", "casting", "policy", "contract"}.intersection(head.split()), "all rows have the usual"


def columns(text):
    """The rows of a table as printed, by column."""
    head, *rows = [line.rstrip() for line in text.splitlines() if line.strip(" \u2500")]
    names = re.split(r" {2,}", head.strip())
    starts = [head.index(f" {name}") for name in names]
    return [
        dict(zip(names, [r[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)], strict=True))
        for r in rows
    ]


def test_show_says_in_the_words_of_the_options_what_a_problem_is(db):
    """A column for what differs anywhere, with the value of each row."""
    odd = replace(FORWARD, op="add_rms_norm", casting="llama", offset=True, sum_in_fp32=True, policy="deterministic")
    frozen = replace(BACKWARD, weight_grad=False, weight_dtype="fp32")
    bare = replace(FORWARD, weight_dtype=None, rows=1)
    config = Config.of("two_pass", {"CHUNK": 1024, "num_warps": 4})
    with Store.open(db) as store:
        sweep = store.begin_sweep(H200, {}, {}, 0)
        trials = [Trial(p, config, TrialState.OK, measurement=measurement(9.0)) for p in (odd, frozen, bare)]
        store.add_all(sweep, trials, PROTOCOL, triton_minor(), "2.14")
    names = ("op", "weight", "casting", "offset", "sum in fp32", "dx only", "policy")
    found = [tuple(row[name] for name in names) for row in columns(output("show", "trials", "--db", db))]
    usual = ("rms_norm", "bf16", "fp32", "", "", "", "fastest")
    assert found[:4] == [usual] * 4
    assert found[4:] == [
        ("add_rms_norm", "bf16", "llama", "yes", "yes", "", "deterministic"),
        ("rms_norm", "fp32", "fp32", "", "", "yes", "fastest"),
        ("rms_norm", "none", "fp32", "", "", "", "fastest"),
    ]
    console = Console(file=io.StringIO(), width=100)
    show_rows("trials", db, console, {"op": "add_rms_norm"})
    told = " ".join(console.file.getvalue().split())
    assert f"{config.label()}, op add_rms_norm, casting llama, policy deterministic, offset, sum in fp32, " in told
    (row,) = json.loads(output("show", "--op", "add_rms_norm", "--json", "--db", db))
    assert (row["op"], row["casting"], row["silicon"]) == ("add_rms_norm", "llama", H200.name)


def test_show_marks_the_winner_of_half_a_sweep(db):
    with sqlite3.connect(db) as connection:
        connection.execute("UPDATE sweeps SET state = 'interrupted'")
    connection.close()
    (line,) = [line for line in output("show", "--kind", "measured", "--db", db).splitlines() if "backward" in line]
    assert " yes " in line
    assert json.loads(output("show", "--kind", "measured", "--json", "--db", db))[0]["half"] == 1


def test_show_trials_with_reasons_as_they_are(db):
    (line,) = [
        line for line in output("show", "trials", "--state", "compile", "--db", db).splitlines() if "two_pass" in line
    ]
    assert "OutOfResources: [shared] memory" in line


@pytest.mark.parametrize(
    ("arguments", "families"),
    [
        ([], ["persistent_partials", "torch", "two_pass", "two_pass"]),
        (["--state", "ok"], ["persistent_partials", "torch", "two_pass"]),
        (["--state", "ok", "--kind", "measured"], ["persistent_partials", "torch"]),
        (["--direction", "forward"], ["two_pass", "two_pass"]),
        (["--family", "torch"], ["torch"]),
        (["--hidden", "4096", "--rows", "16384", "--dtype", "bf16", "--state", "compile"], ["two_pass"]),
        (["--hidden", "64"], []),
        (["--dtype", "fp16"], []),
    ],
)
def test_show_trials_filters(db, arguments, families):
    found = json.loads(output("show", "trials", *arguments, "--json", "--db", db))
    assert [trial["family"] for trial in found] == families


@pytest.mark.parametrize("what", ["winners", "trials"])
def test_show_fits_a_terminal(db, what):
    """What is long stands below the rest, whose words stay whole."""
    console = Console(file=io.StringIO(), width=80)
    show_rows(what, db, console, {})
    shown = console.file.getvalue().splitlines()
    assert max(map(len, shown)) <= 80
    numbers = next(i for i, line in enumerate(shown) if "50.000" in line)
    assert shown[numbers].split()[:5] == ["backward", "16384", "4096", "bf16", "measured"]
    below = " ".join(" ".join(shown[numbers + 1 : numbers + 4]).split())
    assert below.startswith(winner().label())
    assert H200.name in below


def test_show_says_when_nothing_matches(db):
    assert json.loads(output("show", "--hidden", 64, "--json", "--db", db)) == []
    told = f"no winners match in {db}; others there: 2; every candidate, failed ones too: "
    assert output("show", "--hidden", 64, "--db", db).strip() == f"{told}`tunegen show trials --db {db}`"
    assert output("show", "trials", "--hidden", 64, "--db", db).strip() == f"no trials match in {db}; others there: 4"
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("DELETE FROM samples")
        connection.execute("DELETE FROM trials")
        connection.commit()
    assert output("show", "--db", db).strip() == f"no winners match in {db}"


@pytest.mark.parametrize("arguments", [["show"], ["show", "trials"], ["show", "--json"]])
def test_show_names_the_families_where_one_is_unknown(db, arguments):
    told = refused(*arguments, "--family", "single_blok", "--db", db)
    assert "--family: unknown family 'single_blok'; known are " in told
    assert {"two_pass", "dx_only", "torch", "torch.compile"} <= set(re.split(r"[\s,]+", told.partition("known are")[2]))
    for known in ("two_pass", "torch.compile"):
        if "--json" not in arguments:
            assert "match in" in output(*arguments, "--family", known, "--hidden", 64, "--db", db)


def test_show_takes_a_family_that_only_the_database_has(db):
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("UPDATE trials SET family = 'of_last_year'")
        connection.commit()
    assert "of_last_year" in output("show", "--family", "of_last_year", "--db", db)


def test_show_takes_an_op_that_only_the_database_has(db):
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("UPDATE trials SET op = 'layer_norm'")
        connection.commit()
    assert "layer_norm" in output("show", "--db", db)


def loaded(problem, config, number=0):
    """The text of the file from which the kernel is imported, and the line that says which config it is."""
    flags = op_spec(problem.op).flags(problem, config)[number]
    module = load(render(problem.op, f"{problem.direction}_{config.family}", flags))
    return Path(module.__file__).read_text()


def rendered(*arguments, arch="sm_90"):
    """The kernel's text, and what the comment above it says."""
    result = run("render", *arguments, "--arch", arch)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    first, text = result.stdout.split("\n", 1)
    assert first.startswith("# ")
    return text, first.removeprefix("# ")


def test_render_prints_the_file_of_the_winner(db):
    text, origin = rendered("backward", "--hidden", 4096, "--rows", 16384, "--db", db)
    assert text == loaded(BACKWARD, winner())
    assert origin == f"{BACKWARD.label()}: {winner().label()} (measured at 16384 rows on {H200.name} ({db}, trial 1))"


def test_render_prints_the_file_of_the_default_where_nothing_is_measured(db):
    default = load_space("rms_norm").default(FORWARD, H200)
    text, origin = rendered("forward", "--hidden", 4096, "--rows", 16384, "--db", db)
    assert text == loaded(FORWARD, default)
    assert origin == f"{FORWARD.label()}: {default.label()} (built-in default on {H200.name})"


def test_render_prints_the_file_of_another_contract_and_not_the_winner(db):
    offset = replace(BACKWARD, offset=True, casting="llama", weight_dtype="fp32")
    options = ["--offset", "--casting", "llama", "--weight-dtype", "fp32"]
    text, origin = rendered("backward", "--hidden", 4096, "--rows", 16384, "--db", db, *options)
    assert text == loaded(offset, load_space("rms_norm").default(offset, H200))
    assert "built-in default" in origin


def test_render_prints_the_file_of_a_config(tmp_path):
    nowhere = ["--db", tmp_path / "none.db"]
    text, _ = rendered(
        "backward", "persistent_partials", "RSTD=recomputed", "--hidden", 4096, "--rows", 16384, *nowhere
    )
    assert text == loaded(BACKWARD, winner())
    saved, _ = rendered("backward", "persistent_partials", "--hidden", 4096, *nowhere)
    assert saved != text
    frozen = replace(BACKWARD, weight_grad=False)
    text, _ = rendered("backward", "dx_only", "--frozen-weight", "--hidden", 4096, *nowhere)
    assert text == loaded(frozen, Config.of("dx_only", {"RSTD": "saved"}))


def test_render_prints_forward_as_it_runs_for_a_gradient(tmp_path):
    options = ["forward", "two_pass", "CHUNK=2048", "--hidden", 4096, "--db", tmp_path / "none.db"]
    config = Config.of("two_pass", {"CHUNK": 2048})
    plain, saving = loaded(FORWARD, config), loaded(FORWARD, config, 1)
    assert plain != saving
    assert rendered(*options)[0] == plain
    assert rendered(*options, "--save-rstd")[0] == saving


def test_render_says_of_which_config_the_text_is(tmp_path):
    """The file is shared by configs, so that it cannot say it; left out is what is computed."""
    _, origin = rendered(
        "forward", "single_block", "ROWS=1", "num_warps=8", "--hidden", 4096, "--db", tmp_path / "no.db"
    )
    assert origin == "forward 4096x4096 bf16: single_block BLOCK_SIZE=4096 ROWS=1 num_warps=8 (as given)"
    _, origin = rendered("backward", "dx_only", "--frozen-weight", "--hidden", 4096, "--db", tmp_path / "no.db")
    assert origin == "backward 4096x4096 bf16 dx only: dx_only RSTD=saved (as given)"


def test_render_of_a_hostile_database_is_a_comment_and_the_text(db):
    with sqlite3.connect(db) as connection:
        connection.execute("UPDATE silicon SET name = char(10) || 'import os' || char(8232, 13) || 'x'")
    connection.close()
    text, origin = rendered("backward", "--hidden", 4096, "--rows", 16384, "--db", db)
    assert text == loaded(BACKWARD, winner())
    assert "measured at 16384 rows on import os x (" in origin


NEVER = {
    "forward two_pass CHUNK=1024 num_warps=32": "two_pass needs 4 <= CHUNK / (32 * num_warps) <= 32",
    "forward two_pass CHUNK=16384": "no valid config has that",
    "forward single_block ROWS=1 num_warps=8 BLOCK_SIZE=512": "single_block: BLOCK_SIZE is 512, but may be 4096",
    "forward single_block ROWS=16": "no valid config has that",
    "forward persistent --rows 4": "persistent is only for M >= 8 * SMS and 64 <= N <= 32768",
    "backward dx_only": "dx_only is only for not WEIGHT_GRAD and N <= 32768",
    "backward single_block": "it is a baseline",
}


@pytest.mark.parametrize("command", NEVER)
def test_render_says_what_is_never_launched_and_why(tmp_path, command):
    _, origin = rendered(*command.split(), "--hidden", 4096, "--db", tmp_path / "none.db")
    assert origin.endswith(f" (as given; never launched here: {NEVER[command]})")


def test_render_says_for_what_where_no_gpu_is(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = ("render", "forward", "--hidden", 64, "--db", tmp_path / "no.db")
    assert output(*command).splitlines()[0].endswith("(built-in default on NVIDIA H200; no GPU here, so for sm_90)")
    assert output(*command, "--arch", "sm_90").splitlines()[0].endswith("(built-in default on NVIDIA H200)")


def test_render_says_what_is_never_launched_on_another_gpu(tmp_path):
    config = ["ROWS=1", "STAGES=4", "PROGRAMS_PER_SM=2", "num_warps=16"]
    command = ["forward", "persistent", *config, "--hidden", 16384, "--rows", 16384, "--db", tmp_path / "none.db"]
    assert rendered(*command)[1].endswith("num_warps=16 (as given)")
    assert "never launched here: persistent needs (STAGES - 1) * ROWS" in rendered(*command, arch="sm_86")[1]


DEFAULT = load_space("rms_norm").default(FORWARD, H200)


def reject(db, config, problem=FORWARD):
    """As the gate does, at another row count."""
    digest = combined_digest(problem, config, op_spec("rms_norm"))
    trial = Trial(replace(problem, rows=7), config, TrialState.INCORRECT, digest=digest, reason="y: NaN")
    with Store.open(db) as store:
        store.add_all(store.begin_sweep(H200, {}, {}, 0), [trial], PROTOCOL, triton_minor(), "2.14")


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert f"cannot read {tmp_path}/step.json" in refused("sweep", "--from", "~/step.json")
    assert f"{tmp_path}/file" in refused("gate", "--out", "~/file", "--device", "cpu")


def test_render_never_shows_a_default_that_the_gate_rejected(db):
    command = ["forward", "--hidden", 4096, "--rows", 16384]
    assert DEFAULT.label() in rendered(*command, "--db", db)[1]
    reject(db, DEFAULT)
    told = refused("render", *command, "--arch", "sm_90", "--db", db)
    assert told == (
        f"tunegen: {FORWARD.label()} is answered by torch's own op (the gate found the built-in default wrong: "
        f"{DEFAULT.label()} ({db})); name a family to see its kernel"
    )


def test_render_says_that_the_gate_rejected_what_is_given(db):
    given = ["forward", DEFAULT.family, *(f"{k}={v}" for k, v in DEFAULT.parameters), "--hidden", 4096, "--db", db]
    assert rendered(*given)[1].endswith("(as given)")
    reject(db, DEFAULT)
    text, origin = rendered(*given)
    assert text == loaded(FORWARD, DEFAULT)
    assert origin.endswith(f"{DEFAULT.label()} (as given; never launched here: the gate found it wrong)")


def test_render_of_what_is_given_needs_no_sound_database(tmp_path):
    path, _ = no_database(tmp_path)
    before = path.read_bytes()
    assert rendered("forward", "two_pass", "--hidden", 4096, "--db", path)[1].endswith("(as given)")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_render_looks_for_the_row_count_as_a_call_does(tmp_path):
    """9 rows are looked up as 16, to which 64 are nearer than 2; 9 itself is nearer to 2."""
    near, far = (Config.of("two_pass", {"CHUNK": chunk, "num_warps": 8}) for chunk in (1024, 2048))
    with Store.open(tmp_path / "tune.db") as store:
        sweep = store.begin_sweep(H200, {}, {}, 0)
        for rows, config in ((2, near), (64, far)):
            digest = combined_digest(FORWARD, config, op_spec("rms_norm"))
            trial = Trial(
                replace(FORWARD, rows=rows), config, TrialState.OK, digest=digest, measurement=measurement(9.0)
            )
            store.add_all(sweep, [trial], PROTOCOL, triton_minor(), "2.14")
        store.finish_sweep(sweep)
    for rows, config in ((8, near), (9, far)):
        _, origin = rendered("forward", "--hidden", 4096, "--rows", rows, "--db", tmp_path / "tune.db")
        assert f"forward {rows}x4096 bf16: {config.label()} (measured at " in origin


def test_render_where_torch_wins_asks_for_a_family(db):
    with sqlite3.connect(db) as connection:
        connection.execute("UPDATE trials SET score = 0.5 WHERE family = 'torch'")
    connection.close()
    told = refused("render", "backward", "--hidden", 4096, "--rows", 16384, "--arch", "sm_90", "--db", db)
    assert re.search(r"torch's own op \(measured at 16384 rows on .*, trial 2\)\); name a family", told)


def test_bytes_that_are_no_text_are_one_line(tmp_path, db):
    command = [sys.executable, "-m", "tunegen", "show", "trials", "--db", os.fsencode(db), "--family", b"\xff"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


# Policies


@pytest.mark.parametrize(
    ("variable", "arguments", "told"),
    [
        ("", [], "fastest"),
        ("deterministic", [], "deterministic"),
        ("deterministic", ["--policy", "invariant"], "invariant"),
        ("invariant", ["--policy", "fastest"], "fastest"),
    ],
)
@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("explain --hidden 64 --rows 4", "tunegen.single.explain_problems"),
        ("sweep --hidden 64", "tunegen.commands.run_sweep"),
        ("try rms_norm.forward single_block --hidden 64", "tunegen.single.try_one"),
        ("render forward --hidden 64", "tunegen.rendered.render_kernel"),
    ],
    ids=lambda text: text.partition(" ")[0],
)
def test_commands_are_under_the_policy_of_calls_in_their_shell(
    monkeypatch, variable, arguments, told, command, function
):
    seen = []

    def noted(problems, *_, **__):
        seen.extend(problems if isinstance(problems, list) else [problems])
        return 0 if command.startswith("try") else ("as given", "")

    monkeypatch.setattr(function, noted)
    monkeypatch.setenv("TUNEGEN_POLICY", variable)
    output(*shlex.split(command), *arguments)
    assert {problem.policy for problem in seen} == {told}


def test_an_unknown_policy_of_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("TUNEGEN_POLICY", "fast")
    assert refused("explain", "--hidden", "64", "--rows", "4") == (
        "Error: the variable TUNEGEN_POLICY must be one of fastest, deterministic, invariant, got 'fast'"
    )


def test_show_takes_a_policy_and_says_that_calls_are_under_another(db, monkeypatch):
    assert "no winners match" in output("show", "--policy", "deterministic", "--db", db)
    assert output("show", "--policy", "fastest", "--db", db) == output("show", "--db", db)
    assert run("show", "--db", db).stderr == ""
    monkeypatch.setenv("TUNEGEN_POLICY", "deterministic")
    assert run("show", "--db", db).stderr.startswith("TUNEGEN_POLICY is deterministic, which calls are under;")
    assert run("show", "--policy", "fastest", "--db", db).stderr == ""


# Folders of the database


READERS = ["show", "show trials", "explain --hidden 64 --rows 4", "render forward --hidden 64", "export out.jsonl"]


@pytest.mark.parametrize("command", READERS)
def test_what_only_reads_makes_no_folder(tmp_path, monkeypatch, command):
    monkeypatch.setenv("TUNEGEN_DB", str(tmp_path / "new" / "folder" / "tune.db"))
    monkeypatch.chdir(tmp_path)
    told = run(*shlex.split(command)).output
    assert "new folder" not in told
    assert dispatch.rejected(paths.database(), FORWARD, H200)(winner()) is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["sweep --hidden 64 --arch sm_90", "import results.jsonl"])
def test_a_folder_that_is_made_is_told_of(tmp_path, monkeypatch, command):
    def stop(*_):
        raise TunegenError("enough")

    monkeypatch.setattr("tunegen.commands.sweep_target", stop)
    monkeypatch.setattr("tunegen.importing.read_export", lambda path: Exported([], [], []))
    folder = tmp_path / "new" / "folder"
    command = [*shlex.split(command), "--db", folder / "tune.db"]
    told = f"new folder for the database: {folder}"
    assert told in run(*command).output.splitlines()
    assert folder.is_dir()
    assert told not in run(*command).output


# Commands that messages suggest


SUGGESTED = {
    "explain --hidden 64 --rows 4 --arch sm_80 --direction forward": (
        "tunegen sweep --hidden 64 --rows 4 --direction forward"
    ),
    "export --defaults": "`tunegen sweep`",
    "export --hidden 999 out.jsonl": "`tunegen show trials`",
    "show": "`tunegen explain`",
}


@pytest.mark.parametrize("command", SUGGESTED)
def test_a_command_that_is_suggested_is_of_the_same_database(db, tmp_path, monkeypatch, command):
    """With --db where that was given, and without where the environment names the database."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEGEN_POLICY", "deterministic" if command == "show" else "")
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("UPDATE trials SET stage = 'screen'")
        connection.commit()
    given, quoted = tmp_path / "my results.db", f"--db '{tmp_path / 'my results.db'}'"
    db.rename(given)
    end = "`" if SUGGESTED[command].endswith("`") else ""
    assert f"{SUGGESTED[command].removesuffix('`')} {quoted}{end}" in run(*shlex.split(command), "--db", given).output
    monkeypatch.setenv("TUNEGEN_DB", str(given))
    told = run(*shlex.split(command)).output
    assert SUGGESTED[command] in told
    assert "--db" not in told


def test_a_sweep_that_updates_an_older_database_is_of_that_one(db):
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("DELETE FROM _sqlite_migrations WHERE id = (SELECT max(id) FROM _sqlite_migrations)")
        connection.commit()
    assert f"{db} is of an older tunegen; update: `tunegen sweep --db {db}`" in refused("show", "--db", db)
