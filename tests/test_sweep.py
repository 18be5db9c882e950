"""Whole sweeps on a GPU that is not there: what is stored and when, who wins, and what a kill costs (H20, H25, H26)."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fake_gpu import (
    COMPILED_US,
    DEFAULT,
    H200,
    OLD,
    PROBLEM,
    TILES,
    TORCH_US,
    VERSIONS,
    FakeGpu,
    make_resources,
    measurement,
    template_of,
    us_of,
)
from rich.console import Console
from test_pool import alive, wait_until

from tunegen import commands, paths, render, worker
from tunegen.bench import CONTENDER
from tunegen.dispatch import triton_minor
from tunegen.errors import SearchSpaceError, WorkerError
from tunegen.evaluate import COMPILED, TORCH
from tunegen.model import PROTOCOL, Config, Trial, TrialState
from tunegen.ops import op_spec
from tunegen.pool import CompilePool
from tunegen.recorded import RecordedCall, Recording
from tunegen.sampler import Sampler
from tunegen.standing import FEWEST, FINALISTS, shortlist
from tunegen.store import Store
from tunegen.sweep import sweep_gpu

ALL = [*TILES, *OLD, TORCH]
FEW = replace(PROBLEM, rows=4)
BEST = min(TILES, key=functools.partial(us_of, PROBLEM))
REPOSITORY = paths.PACKAGE.parent


class Told:
    """A listener that remembers, and asks the database at once whether it knows."""

    def __init__(self, db):
        self.db, self.stages, self.trials, self.unstored = db, [], [], []
        self.ends_at, self.ends_after = None, None

    def stage(self, text, total):
        self.stages.append((text, total))

    def trial(self, trial):
        self.trials.append(trial)
        query = "SELECT state, us IS NULL FROM trials WHERE family = ? AND parameters = ? AND stage = ? AND rows = ?"
        key = (trial.config.family, trial.config.to_json(), trial.stage, trial.problem.rows)
        with sqlite3.connect(self.db) as other:
            if other.execute(query, key).fetchall() != [(trial.state.value, trial.measurement is None)]:
                self.unstored.append(trial)
        other.close()
        finals = sum(t.stage == "final" for t in self.trials)
        if self.ends_at == (trial.stage, trial.problem) or finals == self.ends_after:
            raise KeyboardInterrupt


class Bench:
    """A database, a fake GPU and the folder of its search space."""

    def __init__(self, folder):
        self.package, self.db = make_resources(folder / "package"), folder / "tune.db"
        self.gpu = FakeGpu(str(folder / "log"))

    def sweep(self, problems=(PROBLEM,), budget=200, seed=0, ends_at=None, ends_after=None, **options):
        self.told = Told(self.db)
        self.told.ends_at, self.told.ends_after = ends_at, ends_after
        with Store.open(self.db) as store:
            gpu = self.gpu
            return sweep_gpu(store, problems, budget, seed, self.told, {}, gpu.worker(), gpu.compile, **options)

    def rows(self, what="trials", **filters):
        with Store.read(self.db) as store:
            return store.winners(**filters) if what == "winners" else store.trials(**filters)

    def winner(self):
        (row,) = self.rows("winners", kind="measured")
        return row["family"], json.loads(row["parameters"])

    def start(self, *arguments):
        """`tunegen sweep` as a process, leader of its group."""
        command = self.gpu.command(
            self.package, "sweep", "--hidden", "4096", "--rows", "1024", "--db", str(self.db), *arguments
        )
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CI": "1"}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen([*command, "--direction", "forward"], env=environment, **options)

    def finish(self, *arguments):
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=100)
        assert process.returncode == 0, stderr
        return stdout, stderr


@pytest.fixture
def bench(tmp_path, monkeypatch):
    found = Bench(tmp_path)
    monkeypatch.setattr(paths, "PACKAGE", found.package)
    return found


def family_and_parameters(config):
    return config.family, dict(config.parameters)


def configs(trials):
    return sorted(trial.config.label() for trial in trials)


# What a sweep does


def test_every_candidate_is_screened_once_and_the_best_are_timed_again(bench):
    result = bench.sweep()
    assert sorted(bench.gpu.lines("screen")) == sorted(f"{PROBLEM.label()} {c.label()}" for c in ALL)
    (finals,) = bench.gpu.lines("finals")
    times = sorted(us_of(PROBLEM, c) for c in TILES)
    within = sum(time <= times[0] * (1 + CONTENDER) for time in times)
    assert within < FEWEST < len(TILES)
    near = [c for c in TILES if us_of(PROBLEM, c) <= times[FEWEST - 1]]
    wanted = {*near, DEFAULT, TORCH, COMPILED}
    assert configs(result.finals) == sorted(c.label() for c in wanted)
    assert finals.startswith(f"{PROBLEM.label()} {BEST.label()}")
    assert {t.stage for t in result.finals} == {"final"}


@pytest.mark.parametrize(("within", "finalists"), [(3, FEWEST), (10, 10), (FINALISTS, FINALISTS), (15, FINALISTS)])
def test_as_many_go_to_the_finals_as_are_near_the_best(within, finalists):
    configs = [Config.of("tile", {"ROWS": i, "num_warps": 1}) for i in range(20)]
    far = [10 * (1 + CONTENDER) + i for i in range(1, 21 - within)]
    us = [10 + i / 100 for i in range(within)] + far
    trials = [Trial(PROBLEM, c, TrialState.OK, measurement=measurement(t)) for c, t in zip(configs, us, strict=True)]
    assert [trial.config for trial in shortlist(trials[::-1], None)] == configs[:finalists]


def test_finals_run_in_a_fresh_process(bench):
    bench.sweep()
    assert len(bench.gpu.lines("start")) == 2


def test_every_trial_is_stored_before_it_is_told(bench):
    bench.sweep()
    assert bench.told.unstored == []
    assert len(bench.told.trials) == len(ALL) + len(bench.rows(stage="final"))


def test_total_that_is_told_is_what_comes(bench):
    bench.sweep()
    assert (PROBLEM.label(), len(ALL)) in bench.told.stages
    (_, finalists) = bench.told.stages[-1]
    assert finalists == len(bench.rows(stage="final"))


def test_winner_is_the_best_and_never_a_baseline(bench):
    bench.gpu.us = {OLD[0].label(): 1.0, COMPILED.label(): 2.0}
    bench.sweep()
    assert bench.winner() == family_and_parameters(BEST)
    assert {(r["family"], r["stage"]) for r in bench.rows(kind="baseline")} == {
        ("old", "screen"),
        ("torch.compile", "final"),
    }


def test_torch_wins_where_it_is_the_fastest(bench):
    bench.gpu.us = {TORCH.label(): 5.0}
    bench.sweep()
    assert bench.winner() == ("torch", {})


def test_tie_is_broken_by_the_rule_and_not_by_the_time(bench):
    """Fewer warps, though a little slower; what is slower than the band does not tie."""
    fast, near, slow = (TILES[i] for i in (5, 1, 6))
    assert near.num_warps < fast.num_warps
    bench.gpu.us, bench.gpu.jitter = {fast.label(): 9.0, near.label(): 9.01, slow.label(): 9.3}, 0.002
    bench.sweep()
    assert bench.winner() == family_and_parameters(near)
    rows = {row["parameters"]: row for row in bench.rows(stage="final", kind="measured")}
    assert [rows[c.to_json()]["tied"] for c in (fast, near, slow, DEFAULT)] == [2, 2, 0, 0]
    assert {row["band"] for row in rows.values()} == {rows[fast.to_json()]["band"]} != {0.0}


def test_winner_that_is_tied_with_the_default_is_stored_as_no_gain(bench):
    bench.gpu.us, bench.gpu.jitter = {TILES[1].label(): 8.99, DEFAULT.label(): 9.0}, 0.002
    result = bench.sweep()
    (row,) = bench.rows("winners", kind="measured")
    assert (row["tied"], row["gains"]) == (2, 0)
    assert {t.gains for t in result.finals if t.config in (TILES[1], DEFAULT)} == {False}
    bench.db.unlink()
    bench.gpu.us = {TILES[1].label(): 8.0, DEFAULT.label(): 9.0}
    bench.sweep()
    (row,) = bench.rows("winners", kind="measured")
    assert (row["tied"], row["gains"]) == (2, 1)


def test_next_batch_compiles_while_this_one_is_measured(bench, monkeypatch):
    begin = CompilePool.begin

    def noted(pool, problem, configs):
        bench.gpu.note(f"begin {len(configs)}")
        begin(pool, problem, configs)

    monkeypatch.setattr(CompilePool, "begin", noted)
    bench.sweep()
    words = [what.split()[0] for _, what in bench.gpu._log()]
    screened, begun = ([i for i, word in enumerate(words) if word == what] for what in ("screen", "begin"))
    assert begun[0] < screened[0]  # torch's op, for which the problem is opened
    assert begun[1] < screened[1]  # the first candidate of the first batch


def test_sweep_says_what_its_seconds_were_spent_on(bench):
    spent = bench.sweep().seconds
    waited = {"waiting for the compiler", "compiling the plain formula"}
    assert spent.keys() == {
        *waited,
        "starting processes",
        "opening problems",
        "measured replays",
    }  # the last is made up
    assert all(seconds > 0 for seconds in spent.values())


def test_every_row_count_is_a_problem_of_its_own(bench):
    few = replace(PROBLEM, rows=4)
    bench.sweep([PROBLEM, few])
    winners = {row["rows"]: json.loads(row["parameters"]) for row in bench.rows("winners", kind="measured")}
    assert winners == {p.rows: dict(min(TILES, key=functools.partial(us_of, p)).parameters) for p in (PROBLEM, few)}
    assert sorted(bench.gpu.lines("compile")) == sorted(c.label() for c in (*TILES, *OLD))


def test_sweep_says_on_what_it_ran(bench):
    result = bench.sweep(seed=7)
    assert result.silicon == H200
    assert result.versions == "tunegen 0.1.0, torch 2.14, triton 3.8, driver 580"
    assert result.peak_bytes == 3000
    with sqlite3.connect(bench.db) as connection:
        stored = connection.execute("SELECT tunegen, torch, triton, driver, seed, state FROM sweeps").fetchall()
    connection.close()
    assert stored == [(*(VERSIONS[k] for k in ("tunegen", "torch", "triton", "driver")), 7, "finished")]


@pytest.mark.parametrize("budget", [1, 7, 21])
def test_budget_counts_candidates_and_not_torch(bench, budget):
    bench.sweep(budget=budget)
    assert len(bench.gpu.lines("compile")) == budget
    assert len(bench.rows(stage="screen")) == budget + 1
    assert DEFAULT.label() in bench.gpu.lines("compile")


def test_layouts_of_finalists_compile_ahead_of_the_finals(bench):
    """Nested rows, which only finalists are verified with; nothing where the finals were timed before."""
    bench.gpu.faults = {"finals": "compiles layouts"}  # else they are over first where compilers start slowly
    result = bench.sweep()
    finalists = {trial.config.label() for trial in result.finals if trial.config not in (TORCH, COMPILED)}
    assert sorted(bench.gpu.lines("layouts")) == sorted(finalists)
    bench.sweep()
    assert sorted(bench.gpu.lines("layouts")) == sorted(finalists)


def test_nothing_nested_is_compiled_for_an_op_that_has_no_such_layouts(bench):
    for place, file in (("search_spaces", "{}.yaml"), ("templates", "{}")):
        source, copy = (bench.package / place / file.format(op) for op in ("rms_norm", "add_rms_norm"))
        copy.symlink_to(source)
    problem = replace(PROBLEM, op="add_rms_norm")
    assert op_spec(problem.op).nestable(problem) == []
    assert len(bench.sweep([problem]).finals) > 1
    assert bench.gpu.lines("layouts") == []


# Candidates that fail


@pytest.mark.parametrize("wrong", [TILES[0], TILES[-1]], ids=["first", "last"])
def test_h26_fast_but_wrong_never_wins(bench, wrong):
    """Whatever the order; right, the same candidate does win."""
    bench.gpu.us, bench.gpu.faults = {wrong.label(): 1.0}, {wrong.label(): "wrong"}
    bench.sweep()
    assert bench.winner() == family_and_parameters(BEST if wrong != BEST else TORCH)
    (row,) = bench.rows(state="incorrect")
    assert (row["reason"], row["us"], row["stage"]) == ("y: half of each row is NaN", None, "screen")
    bench.db.unlink()
    bench.gpu.faults = {}
    bench.sweep()
    assert bench.winner() == family_and_parameters(wrong)


@pytest.mark.parametrize(("fault", "state"), [("wrong in finals", "incorrect"), ("exit in finals", "crashed")])
def test_candidate_that_fails_in_the_finals_loses_its_first_time(bench, fault, state):
    bench.gpu.us, bench.gpu.faults = {BEST.label(): 1.0}, {BEST.label(): fault}
    for _ in range(2):
        result = bench.sweep()
        assert BEST.label() not in configs(result.finals)
        assert bench.winner()[1] != dict(BEST.parameters)
        found = [row for row in bench.rows(family="tile") if json.loads(row["parameters"]) == dict(BEST.parameters)]
        assert [(r["stage"], r["state"], r["us"]) for r in found] == [("screen", state, None), ("final", state, None)]
        assert "finals" in found[0]["reason"] or "exit code 8" in found[0]["reason"]
    # A crash may have a cause that passes: it is tried again in the next sweep, a wrong result is not.
    assert len(bench.gpu.lines("screen")) == len(ALL) + (state == "crashed")


def test_h24_crash_hang_and_poison_cost_their_candidates_only(bench, monkeypatch):
    monkeypatch.setattr(worker, "SCREEN_SECONDS", 1.0)
    faults = ("exit", "hang", "illegal address", "out of memory")
    victims = [config for config in TILES if config != BEST][: len(faults)]
    bench.gpu.faults = {config.label(): fault for config, fault in zip(victims, faults, strict=True)}
    bench.sweep()
    screened = [row for row in bench.rows(stage="screen") if row["family"] == "tile"]
    states = {(r["family"], r["parameters"]): r["state"] for r in screened}
    failed = [states.pop((c.family, c.to_json())) for c in victims]
    assert failed == ["crashed", "timeout", "crashed", "runtime"]
    assert set(states.values()) == {"ok"}
    assert len(states) == len(TILES) - len(faults)
    assert bench.winner() == family_and_parameters(BEST)


def test_h25_candidates_that_do_not_compile_are_stored_and_not_run(bench):
    victims = [config for config in TILES if config != BEST][:3]
    bench.gpu.faults = dict(zip((c.label() for c in victims), ("too large", "abort", "too large"), strict=True))
    bench.sweep()
    reasons = {json.dumps(json.loads(r["parameters"])): (r["state"], r["reason"]) for r in bench.rows() if r["reason"]}
    too_large, abort = (
        ("compile", "tile_kernel: OutOfResources: shared memory"),
        ("crashed", "the compiler ended its process"),
    )
    assert reasons == {victims[0].to_json(): too_large, victims[1].to_json(): abort, victims[2].to_json(): too_large}
    assert len(bench.gpu.lines("screen")) == len(ALL) - 3
    assert bench.winner() == family_and_parameters(BEST)


def test_h25_64_warps_are_no_candidate(bench):
    space = bench.package / "search_spaces" / "rms_norm.yaml"
    space.write_text(space.read_text().replace("8, 16]", "8, 64]"))
    with pytest.raises(SearchSpaceError, match="a block has at most 32 warps"):
        bench.sweep()


def test_spilling_candidates_are_passed_over_where_others_do_not_spill(bench):
    bench.gpu.faults = {BEST.label(): "spills"}
    bench.sweep()
    (row,) = bench.rows(state="constraint")
    assert row["reason"] == "spills 64 bytes a thread where others of its family do not"
    assert f"{PROBLEM.label()} {BEST.label()}" not in bench.gpu.lines("screen")


def test_candidate_that_spills_a_little_is_timed_and_may_win(bench):
    bench.gpu.faults = {BEST.label(): "spills a little"}
    bench.sweep()
    assert bench.rows(state="constraint") == []
    assert bench.winner() == family_and_parameters(BEST)


def test_spilling_candidates_are_timed_where_all_spill(bench):
    bench.gpu.faults = {config.label(): "spills" for config in (*TILES, *OLD)}
    bench.sweep()
    assert bench.rows(state="constraint") == []
    assert bench.winner() == family_and_parameters(BEST)


# Problems that the measuring process cannot open


def states_of_sweeps(bench):
    with sqlite3.connect(bench.db) as connection:
        found = [row[0] for row in connection.execute("SELECT state FROM sweeps ORDER BY id")]
    connection.close()
    return found


LEFT_OUT = f"left out: cannot measure {FEW.label()}: OutOfMemoryError: 2 TiB"


@pytest.mark.parametrize("problems", [[PROBLEM, FEW], [FEW, PROBLEM]], ids=["last", "first"])
def test_problem_that_cannot_be_opened_is_left_out_and_said(bench, problems):
    bench.gpu.faults = {FEW.label(): "out of memory"}
    result = bench.sweep(problems)
    assert bench.winner() == family_and_parameters(BEST)
    assert {t.problem for t in result.finals} == {PROBLEM}
    assert {row["rows"] for row in bench.rows()} == {PROBLEM.rows}
    assert [stage for stage in bench.told.stages if "left out" in stage[0]] == [(LEFT_OUT, 0)]
    assert list(result.left_out) == [FEW]
    assert states_of_sweeps(bench) == ["finished"]
    bench.gpu.faults = {}
    bench.sweep(problems)
    assert {row["rows"] for row in bench.rows("winners", kind="measured")} == {PROBLEM.rows, FEW.rows}
    assert len(bench.gpu.lines("screen")) == 2 * len(ALL)


def test_command_names_problems_that_it_left_out(bench):
    bench.gpu.faults = {FEW.label(): "out of memory"}
    stdout, _ = bench.finish("--rows", "4", "--json")
    found = json.loads(stdout)
    assert [line["rows"] for line in found["results"]] == [PROBLEM.rows]
    (line,) = found["left_out"]
    assert line.startswith(f"left out: {FEW.label()}: ")
    assert "OutOfMemoryError: 2 TiB" in line


def test_torchs_own_op_is_timed_again_by_another_release_of_torch(bench):
    bench.sweep()
    bench.sweep()
    assert len([line for line in bench.gpu.lines("screen") if line.endswith(" torch")]) == 1
    with closing(sqlite3.connect(bench.db)) as connection, connection:
        connection.execute("UPDATE trials SET torch = '2.13' WHERE family LIKE 'torch%'")
    bench.sweep()
    assert len([line for line in bench.gpu.lines("screen") if line.endswith(" torch")]) == 2
    assert len(bench.gpu.lines("screen")) == len(ALL) + 1


def test_problem_that_cannot_be_opened_again_for_its_finals_keeps_its_screening(bench):
    bench.gpu.faults = {FEW.label(): "out of memory in finals"}
    result = bench.sweep([FEW, PROBLEM])
    assert {t.problem for t in result.finals} == {PROBLEM}
    assert (LEFT_OUT, 0) in bench.told.stages
    assert {(row["rows"], row["stage"]) for row in bench.rows("winners", kind="measured")} == {
        (FEW.rows, "screen"),
        (PROBLEM.rows, "final"),
    }
    assert states_of_sweeps(bench) == ["finished", "interrupted"]
    assert halves(bench) == {FEW.rows: 1, PROBLEM.rows: 0}
    bench.gpu.faults = {}
    bench.sweep([FEW, PROBLEM])
    assert halves(bench) == {FEW.rows: 0, PROBLEM.rows: 0}
    assert len(bench.gpu.lines("screen")) == 2 * len(ALL)


def test_problem_that_is_lost_half_way_is_half_a_sweeps(bench):
    """The measuring process dies of a candidate and cannot open the problem again."""
    bench.gpu.faults = {TILES[5].label(): "exit", FEW.label(): "out of memory again"}
    bench.sweep([FEW, PROBLEM])
    assert len(bench.rows(rows=FEW.rows)) == 7
    assert (LEFT_OUT, 0) in bench.told.stages
    assert states_of_sweeps(bench) == ["finished", "interrupted"]
    assert halves(bench) == {FEW.rows: 1, PROBLEM.rows: 0}
    bench.gpu.faults = {}
    bench.sweep([FEW])
    assert states_of_sweeps(bench) == ["finished", "interrupted", "finished"]
    assert halves(bench) == {FEW.rows: 0, PROBLEM.rows: 0}
    assert len(bench.rows(rows=FEW.rows, stage="screen")) == len(ALL)


def halves(bench):
    return {row["rows"]: row["half"] for row in bench.rows("winners", kind="measured")}


def test_sweep_of_which_no_problem_can_be_opened_is_an_error(bench):
    bench.gpu.faults = dict.fromkeys((PROBLEM.label(), FEW.label()), "out of memory")
    with pytest.raises(WorkerError, match=f"^cannot measure {FEW.label()}: OutOfMemoryError: 2 TiB$"):
        bench.sweep([PROBLEM, FEW])
    assert bench.rows() == []
    assert states_of_sweeps(bench) == ["interrupted"]


def test_command_of_which_no_problem_can_be_opened_ends_in_one_line(bench):
    bench.gpu.faults = {PROBLEM.label(): "out of memory"}
    process = bench.start()
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 2
    assert stderr == f"tunegen: cannot measure {PROBLEM.label()}: OutOfMemoryError: 2 TiB\n"


# Templates that are broken, or change


KERNEL = """\
import triton
import triton.language as tl
from tunegen.model import Launch, Plan

@triton.jit
def forward_binding(x_ptr, y_ptr, gamma_ptr):
    tl.store(y_ptr, tl.load(x_ptr))

def plan(p):
    return Plan((Launch(forward_binding, (1,)),))
"""
BROKEN = {
    "jinja": ("{% if %}\n", "rms_norm/forward_jinja.py.jinja, line 1: TemplateSyntaxError: Expected an expression"),
    "flag": ("{{ no_flag }}\n", "rms_norm/forward_flag.py.jinja, line 1: UndefinedError: 'no_flag' is undefined"),
    "python": ("def plan(:\n", "rms_norm/forward_python.py.jinja, line 1: renders to invalid Python: "),
    "importing": ("raise ValueError('no table')\n", "forward_importing.py.jinja: ValueError: no table"),
    "planless": ("SAVE_RSTD = {{ save_rstd }}\n", "forward_planless.py.jinja has no plan(p)"),
    "planning": ("def plan(p):\n    return p.M / 0\n", "forward_planning.py.jinja: ZeroDivisionError: "),
    "halved": (KERNEL.replace("(1,)", "(p.M / 2,)"), "forward_halved.py.jinja: the grid of forward_binding is ("),
    "binding": (KERNEL, "forward_binding has an argument gamma_ptr, which no parameter or tensor gives"),
}
"""Templates that are no good, by family, and the reason that is stored."""


@pytest.mark.compiler
def test_broken_template_costs_its_trial_and_not_the_sweep(bench):
    space = bench.package / "search_spaces" / "rms_norm.yaml"
    broken = {family: Config.of(family, {"num_warps": 1}) for family in BROKEN}
    families = [f"  {family}:\n    about: broken\n    parameters: {{num_warps: [1]}}\n" for family in BROKEN]
    space.write_text(space.read_text().replace("  old:\n", "".join(families) + "  old:\n"))
    for family, config in broken.items():
        template_of(config, bench.package).write_text(BROKEN[family][0])
    bench.gpu.package = str(bench.package)
    bench.gpu.faults = {config.label(): "compiles in earnest" for config in broken.values()}
    bench.sweep()
    assert states_of_sweeps(bench) == ["finished"]
    assert bench.winner() == family_and_parameters(BEST)
    assert len(bench.rows(state="ok", stage="screen")) == len(ALL)
    for family, config in broken.items():
        (row,) = bench.rows(**one(config))
        assert (row["state"], row["stage"], row["us"]) == ("compile", "screen", None)
        assert row["reason"].startswith(BROKEN[family][1])
        assert len(row["reason"].splitlines()) == 1


@pytest.fixture
def rendered_anew():
    """A process renders a template once; the next sweep is another process."""

    def forget():
        render._render.cache_clear()
        render._environment.cache_clear()

    return forget


def test_digest_is_that_of_the_measuring_process(bench, rendered_anew):
    """A template that is edited while the sweep runs: the text that was launched is the one that was timed."""
    bench.gpu.package, bench.gpu.faults = str(bench.package), {TILES[0].label(): "edits its template"}
    config, spec = TILES[0], op_spec("rms_norm")
    before = render.combined_digest(PROBLEM, config, spec)
    bench.sweep()
    assert render.combined_digest(PROBLEM, config, spec) == before, "this process has not seen the edit"
    rendered_anew()
    edited = render.combined_digest(PROBLEM, config, spec)
    assert edited != before
    assert {row["digest"] for row in bench.rows(family="tile")} == {edited}
    bench.gpu.faults = {}
    bench.sweep()
    assert len(bench.gpu.lines("screen")) == len(ALL), "nothing is stale"


# Again


@pytest.mark.parametrize(
    ("fault", "state", "again"),
    [
        ("out of memory", "runtime", True),
        ("hang", "timeout", True),
        ("exit", "crashed", True),
        ("illegal address", "crashed", True),
        ("abort", "crashed", True),
        ("out of host memory", "runtime", True),
        ("wrong", "incorrect", False),
        ("too large", "compile", False),
        ("spills", "constraint", False),
    ],
)
def test_only_failures_that_may_pass_are_tried_again(bench, monkeypatch, fault, state, again):
    monkeypatch.setattr(worker, "SCREEN_SECONDS", 1.0)
    bench.gpu.faults = {BEST.label(): fault}
    tried = []
    for _ in range(2):
        bench.sweep()
        (row,) = bench.rows(**one(BEST))
        assert (row["state"], row["us"]) == (state, None)
        assert row["reason"]
        tried.append(BEST in [trial.config for trial in bench.told.trials])
    bench.gpu.faults = {}
    bench.sweep()
    assert tried == [True, again]
    screened, *finals = bench.rows(**one(BEST))
    if again:
        assert (screened["state"], screened["us"], screened["reason"]) == ("ok", us_of(PROBLEM, BEST), "")
        assert bench.winner() == family_and_parameters(BEST)
    else:
        assert (screened, finals) == (row, [])
        assert bench.winner() != family_and_parameters(BEST)


def one(config):
    """Filters of the rows of one config."""
    return {"family": config.family, "parameters": config.to_json()}


def test_second_sweep_measures_nothing_and_finds_the_same(bench):
    first = bench.sweep()
    before, log = bench.rows(), Path(bench.gpu.log).read_text()
    second = bench.sweep()
    assert configs(second.finals) == configs(first.finals)
    assert bench.rows() == before
    assert [
        line for line in Path(bench.gpu.log).read_text()[len(log) :].splitlines() if not line.endswith(" start")
    ] == []


def test_larger_budget_goes_on_where_the_smaller_one_ended(bench):
    bench.sweep(budget=9)
    bench.sweep(budget=15)
    assert len(bench.gpu.lines("compile")) == 15
    assert len(set(bench.gpu.lines("screen"))) == len(bench.gpu.lines("screen")) == 16


def test_changed_template_is_measured_again(bench):
    bench.sweep()
    template = bench.package / "templates" / "rms_norm" / "forward_tile.py.jinja"
    template.write_text("# a comment\n" + template.read_text())
    bench.sweep()
    assert len(bench.gpu.lines("screen")) == len(ALL)


def test_config_that_the_search_space_no_longer_has_is_out(bench):
    bench.sweep()
    space = bench.package / "search_spaces" / "rms_norm.yaml"
    ways = [str(value) for value in (1, 2, 4, 8) if value != BEST["ROWS"]]
    space.write_text(
        space.read_text().replace("[1, 2, 4, 8]\n", f"[{', '.join(ways)}]\n", 1).replace("ROWS: 2", f"ROWS: {ways[0]}")
    )
    result = bench.sweep()
    assert BEST.label() not in configs(result.finals)
    assert len(bench.gpu.lines("screen")) == len(ALL)


# Killed and interrupted: `tunegen sweep` itself, in a process


def stopped_after_five(bench, number):
    """A sweep whose sixth candidate hangs, ended there by a signal; the trials that it left behind."""
    bench.gpu.faults = {TILES[5].label(): "hang"}
    process = bench.start()
    wait_until(lambda: os.path.exists(bench.gpu.log) and bench.gpu.lines("hang"))
    wait_until(lambda: len(bench.rows()) >= 6)  # the sixth candidate hangs already while the fifth is being stored
    left = bench.rows()
    assert configs_of(left) == sorted(c.label() for c in (TORCH, *TILES[:5]))
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: the children get it too
    else:
        process.send_signal(number)
    output = process.communicate(timeout=60)
    wait_until(lambda: not alive(bench.gpu.processes()))
    assert [row["half"] for row in bench.rows("winners", kind="measured")] == [1]
    return left, process.returncode, output


def configs_of(rows):
    return sorted(" ".join([r["family"], *(f"{k}={v}" for k, v in json.loads(r["parameters"]).items())]) for r in rows)


def resumed(bench, left):
    """Start again: nothing lost, nothing measured twice, nothing left running."""
    bench.gpu.faults = {}
    bench.finish()
    after = {row["id"]: row for row in bench.rows()}
    kept = [{k: v for k, v in after[row["id"]].items() if k != "sweep_id"} for row in left]
    assert kept == [{k: v for k, v in row.items() if k != "sweep_id"} for row in left]
    assert sorted(bench.gpu.lines("screen")) == sorted(f"{PROBLEM.label()} {c.label()}" for c in ALL)
    assert configs_of(row for row in after.values() if row["stage"] == "screen") == sorted(c.label() for c in ALL)
    assert [row["half"] for row in bench.rows("winners", kind="measured")] == [0]
    assert bench.winner() == family_and_parameters(BEST)
    with sqlite3.connect(bench.db) as connection:
        states = connection.execute("SELECT state FROM sweeps ORDER BY id").fetchall()
    connection.close()
    assert states == [("interrupted",), ("finished",)]


def test_h20_killed_sweep_goes_on_where_it_was(bench):
    left, code, _ = stopped_after_five(bench, signal.SIGKILL)
    assert code == -signal.SIGKILL
    resumed(bench, left)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_sweep_says_so_and_goes_on_where_it_was(bench, number):
    left, code, (stdout, stderr) = stopped_after_five(bench, number)
    assert (code, stderr.strip()) == (130, "tunegen: interrupted")
    assert "the same command goes on from there" in stdout
    assert "Traceback" not in stdout
    with sqlite3.connect(bench.db) as connection:
        assert connection.execute("SELECT state FROM sweeps").fetchall() == [("interrupted",)]
    connection.close()
    resumed(bench, left)


def test_finals_before_the_interrupt_are_those_of_a_whole_sweep_after_the_next(bench):
    few = replace(PROBLEM, rows=4)
    with pytest.raises(KeyboardInterrupt):
        bench.sweep([PROBLEM, few], ends_at=("final", few))
    assert {row["half"] for row in bench.rows("winners", kind="measured")} == {1}
    bench.sweep([PROBLEM, few])
    assert {row["half"] for row in bench.rows("winners", kind="measured")} == {0}
    assert [line.split()[1] for line in bench.gpu.lines("finals")] == ["1024x4096", "4x4096"]
    assert len(bench.gpu.lines("screen")) == 2 * len(ALL)


def test_sweep_that_ends_before_the_last_of_its_finals_times_all_of_them_again(bench):
    """The time of `torch.compile` was stored last, and was never taken where a sweep was killed before."""
    whole = bench.sweep()
    bench.db.unlink()
    with pytest.raises(KeyboardInterrupt):
        bench.sweep(ends_after=len(whole.finals) - 1)
    assert configs(bench.sweep().finals) == configs(whole.finals)


# What the command prints


def shown(bench, result):
    found = commands._measured(bench.db, [PROBLEM], result, Console(file=io.StringIO()), None)
    return [line["winner"] for line in found["results"]]


def test_h19_own_winner_is_shown_while_another_sweep_holds_the_file(bench):
    result = bench.sweep()
    with closing(sqlite3.connect(bench.db, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert shown(bench, result) == [BEST.label()]


def test_h19_own_winner_is_shown_where_another_sweep_found_a_better_one(bench):
    """There is no time of this sweep beside it; the line was missing."""
    result = bench.sweep()
    own = {trial.config for trial in result.finals}
    (trial, *_) = [trial for trial in bench.told.trials if trial.config in TILES and trial.config not in own]
    with Store.open(bench.db) as store:
        other = store.begin_sweep(H200, {}, {}, 0)
        faster = replace(trial, stage="final", measurement=measurement(1.0), band=0.01, tied=True, gains=True)
        store.add_all(other, [faster], PROTOCOL, triton_minor(), "")
    assert bench.winner() == family_and_parameters(trial.config)
    assert shown(bench, result) == [BEST.label()]


def test_h25_command_lists_each_failure_with_its_reason_once(bench):
    bench.gpu.faults = {
        TILES[1].label(): "too large",
        TILES[2].label(): "abort",
        TILES[3].label(): "wrong",
        TILES[4].label(): "too large",
        TILES[6].label(): "spills",
    }
    stdout, stderr = bench.finish("--rows", "4")
    assert stderr == ""
    lines = stdout.splitlines()
    wanted = [
        f"compile: forward {TILES[1].label()} and 1 more: tile_kernel: OutOfResources: shared memory",
        f"crashed: forward {TILES[2].label()}: the compiler ended its process",
        f"incorrect: forward {TILES[3].label()}: y: half of each row is NaN",
        "constraint: 1 candidates were not timed, since they spill where others do not",
    ]
    assert [line for line in lines if line.split(":")[0] in ("compile", "crashed", "incorrect", "constraint")] == wanted


def test_command_ends_with_table_sentence_and_database(bench):
    stdout, stderr = bench.finish()
    *_, sentence, database = stdout.splitlines()
    assert (database, stderr) == (f"database: {bench.db}", "")
    gain = us_of(PROBLEM, DEFAULT) / us_of(PROBLEM, BEST)
    assert gain > 1.02
    assert "Gained: 1 of 1 problems are faster than the built-in default" in sentence
    assert f"at most {gain:.2f}x (forward 1024x4096)" in sentence
    (row,) = [line for line in stdout.splitlines() if BEST.label() in line and line.split()[0] == "forward"]
    assert row.split()[-6:] == [
        f"{us_of(PROBLEM, BEST):.2f}",
        f"{2 * 1024 * 4096 * 2 / us_of(PROBLEM, BEST) / 1e6:.2f}",
        f"{10 / us_of(PROBLEM, BEST):.2f}",
        f"{30 / us_of(PROBLEM, BEST):.2f}",
        f"{25 / us_of(PROBLEM, BEST):.2f}",
        f"{gain:.2f}",
    ]
    assert "\x1b" not in stdout
    assert "\r" not in stdout


def test_command_on_a_terminal_of_80_columns_shows_every_number(bench):
    command = bench.gpu.command(
        bench.package, "sweep", "--hidden", "4096", "--rows", "1024", "--direction", "forward", "--db", str(bench.db)
    )
    terminal = {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm", "PYTHONPATH": str(REPOSITORY)}
    environment = {**{name: value for name, value in os.environ.items() if name != "CI"}, **terminal}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found.stdout)
    lines = plain[plain.index("direction") :].splitlines()
    factors = (10, TORCH_US, COMPILED_US, us_of(PROBLEM, DEFAULT))
    us = us_of(PROBLEM, BEST)
    numbers = [us, 2 * 1024 * 4096 * 2 / us / 1e6, *(factor / us for factor in factors)]
    assert lines[0].split()[3:] == ["us", "TB/s", "of", "copy", "x", "torch", "x", "compile", "x", "default"]
    assert lines[2].split() == ["forward", "1024", "4096", *(f"{number:.2f}" for number in numbers)]
    assert lines[3].strip() == BEST.label()


def test_command_prints_json_and_nothing_else(bench):
    bench.gpu.faults = {TILES[1].label(): "too large"}
    stdout, stderr = bench.finish("--json")
    found = json.loads(stdout)
    assert found["database"] == str(bench.db)
    assert [(line["winner"], line["us"]) for line in found["results"]] == [(BEST.label(), us_of(PROBLEM, BEST))]
    reason = "tile_kernel: OutOfResources: shared memory"
    assert found["failures"] == [{"state": "compile", "reason": reason, "candidates": [f"forward {TILES[1].label()}"]}]
    assert found["summary"].startswith("Gained:")
    assert PROBLEM.label() in stderr


def test_recorded_step_is_weighed_by_its_counts(bench, tmp_path):
    """`tunegen sweep --from`: 7 calls of one problem, 2 of another that differs in rows."""
    counts = {PROBLEM: 7, replace(PROBLEM, rows=64): 2}
    calls = [RecordedCall(p, n, (p.rows, p.hidden), (p.hidden, 1)) for p, n in counts.items()]
    Recording("Model", tuple(calls)).save(tmp_path / "step.json")
    command = bench.gpu.command(
        bench.package, "sweep", "--from", str(tmp_path / "step.json"), "--db", str(bench.db), "--json"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CI": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=environment)
    found = json.loads(done.stdout)
    best = {p: min(TILES, key=functools.partial(us_of, p)) for p in counts}
    assert {(line["rows"], line["winner"]) for line in found["results"]} == {
        (p.rows, c.label()) for p, c in best.items()
    }
    tuned = sum(n * us_of(p, best[p]) for p, n in counts.items())
    default = sum(n * us_of(p, DEFAULT) for p, n in counts.items())
    assert found["step"] == {
        "calls": 9,
        "missing": 0,
        "tuned": pytest.approx(tuned),
        "default": pytest.approx(default),
        "torch": pytest.approx(9 * TORCH_US),
        "compiled": pytest.approx(9 * COMPILED_US),
    }
    assert (
        f"A step makes 9 of these norm calls, {tuned / 1e3:.2f} ms of GPU time tuned; {default / 1e3:.2f} ms by "
        f"the built-in default ({(default - tuned) / 1e3:.2f} ms gained)"
    ) in done.stderr


@pytest.mark.parametrize(("budget", "ahead", "more"), [(200, 4, True), (200, 0, False), (15, 4, False)])
def test_compilers_work_ahead_of_the_batch_where_all_candidates_will_be_tried(bench, monkeypatch, budget, ahead, more):
    begun, asked = [], []
    begin, ask = CompilePool.begin, Sampler.ask
    monkeypatch.setattr(CompilePool, "begin", lambda pool, *given: begun.append(len(given[1])) or begin(pool, *given))
    monkeypatch.setattr(Sampler, "ask", lambda sampler, count: asked.append(ask(sampler, count)) or asked[-1])
    monkeypatch.setattr("tunegen.sweep.BATCH", 4)
    monkeypatch.setattr("tunegen.sweep.AHEAD", ahead)
    bench.sweep(budget=budget)
    assert (begun[0] > len(asked[0])) is more


@pytest.mark.parametrize("one_by_one", [False, True])
def test_compilers_work_at_the_next_problem_once_this_one_has_nothing_left_for_them(bench, monkeypatch, one_by_one):
    """But not those of a problem that has more to compile than is asked for ahead."""
    order = []
    begin, told = CompilePool.begin, Told.trial
    monkeypatch.setattr(CompilePool, "begin", lambda pool, *given: order.append(given) or begin(pool, *given))
    monkeypatch.setattr(Told, "trial", lambda self, trial: order.append(trial) or told(self, trial))
    monkeypatch.setattr("tunegen.sweep.BATCH", 4)
    other = replace(PROBLEM, hidden=2 * PROBLEM.hidden)
    if one_by_one:
        bench.sweep(iter([PROBLEM, other]), then={PROBLEM: other})
    else:
        bench.sweep([PROBLEM, other])
    begun = [i for i, one in enumerate(order) if not isinstance(one, Trial) and one[0] == other and one[1]]
    screened = [i for i, one in enumerate(order) if isinstance(one, Trial) and one.stage == "screen"]
    own = [i for i in screened if order[i].problem == PROBLEM]
    assert begun[0] < own[-2], "while its last candidates are measured"
    assert any(i > own[-1] for i in begun)


def test_trials_of_a_problem_that_only_may_come_next_stay_where_they_are(bench):
    """Another GPU may be given it, and its sweep then goes on from them."""
    with pytest.raises(KeyboardInterrupt):
        bench.sweep([FEW], ends_at=("screen", FEW))
    left = bench.rows(rows=FEW.rows)
    bench.sweep(iter([PROBLEM]), then={PROBLEM: FEW})
    assert bench.rows(rows=FEW.rows) == left != []


def test_problems_that_come_one_by_one_are_not_looked_for_ahead(bench):
    given = []

    def problems():
        for problem in (PROBLEM, replace(PROBLEM, hidden=2 * PROBLEM.hidden)):
            given.append(len(bench.told.trials))
            yield problem

    bench.sweep(problems())
    assert given[0] == 0
    assert given[1] > 10
