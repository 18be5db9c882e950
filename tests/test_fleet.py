"""A sweep on several GPUs: who tunes what, and what an end of one of them costs. The GPUs are made up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_gpu import H200, OLD, PROBLEM, TILES, FakeGpu, make_resources
from test_pool import alive, wait_until

from tunegen import cli_options, paths
from tunegen.cli import main
from tunegen.errors import WorkerError
from tunegen.fleet import Member, _ended, _give, sweep_gpus
from tunegen.gpu_process import given_to
from tunegen.model import Problem
from tunegen.progress import SweepProgress
from tunegen.silicon import kind_of, of_arch
from tunegen.store import Store
from tunegen.sweep import together

PROBLEMS = [replace(PROBLEM, rows=rows) for rows in (1, 4, 64, 1024, 4096, 16384)]
REPOSITORY = paths.PACKAGE.parent


class Told:
    """Listeners that remember what each GPU said."""

    def __init__(self):
        self.stages, self.trials = [], Counter()

    def of(self, name):
        told = self

        class One:
            def stage(self, text, total):
                told.stages.append((name, text))

            def trial(self, trial):
                told.trials[name] += 1

        return One()


@pytest.fixture
def host(tmp_path, monkeypatch):
    """`sweep(devices)` on a host whose GPUs are all alike, unless `gpu.others` says otherwise."""

    class Host:
        def __init__(self):
            self.db, self.told = tmp_path / "tune.db", Told()
            package = make_resources(tmp_path / "package")
            monkeypatch.setattr(paths, "PACKAGE", package)
            self.gpu = FakeGpu(str(tmp_path / "log"), package=str(package))

        def sweep(self, devices=(0, 1), problems=PROBLEMS):
            make, compile_one = self.gpu.worker_on, self.gpu.compile
            return sweep_gpus(self.db, problems, 100, 0, self.told, {}, devices, make, compile_one)

        def rows(self, view="trials", **filters):
            with Store.read(self.db) as store:
                return getattr(store, view)(**filters)

    return Host()


def test_alike_gpus_share_the_problems(host):
    results = host.sweep()
    tuned = [{t.problem for t in result.finals} for result in results]
    assert tuned[0] | tuned[1] == set(PROBLEMS)
    assert not tuned[0] & tuned[1]
    assert {row["rows"] for row in host.rows("winners", kind="measured", half=0)} == {p.rows for p in PROBLEMS}
    keys = Counter((r["rows"], r["family"], r["parameters"], r["stage"]) for r in host.rows())
    assert set(keys.values()) == {1}
    assert host.told.trials.keys() == {"cuda:0", "cuda:1"}, "each takes its first one while the other works on one"
    assert sum(host.told.trials.values()) == len(host.rows())
    whole = together(results)
    assert {t.problem for t in whole.finals} == set(PROBLEMS)
    assert whole.seconds["starting processes"] == pytest.approx(sum(r.seconds["starting processes"] for r in results))


def test_gpus_that_differ_by_the_size_of_their_memory_alone_are_alike(host):
    """The driver reports it a few megabytes apart for one model."""
    host.gpu.memory = {"1": 4096}
    results = host.sweep(problems=PROBLEMS[:4])
    assert not {t.problem for t in results[0].finals} & {t.problem for t in results[1].finals}
    assert len(host.gpu.lines("screen")) == len(host.rows(stage="screen", state="ok"))


def test_problem_that_no_gpu_finished_is_named_with_the_reason(host):
    host.gpu.faults = {PROBLEMS[0].label(): "out of memory"}
    results = host.sweep(problems=PROBLEMS[:3])
    assert set().union(*(result.left_out for result in results)) == {PROBLEMS[0]}


def test_gpus_that_differ_tune_everything_for_themselves_and_never_mix(host):
    """H22: injected records of silicon."""
    host.gpu.others = {"1": "sm_80"}
    results = host.sweep(problems=PROBLEMS[:2])
    assert {r.silicon for r in results} == {H200, of_arch("sm_80")}
    for result in results:
        assert {t.problem for t in result.finals} == set(PROBLEMS[:2])
    by_capability = Counter(row["capability"] for row in host.rows(stage="screen", state="ok"))
    assert by_capability[90] == by_capability[80] == len(host.rows(stage="screen", state="ok")) / 2 > 20
    assert {(r["capability"], r["rows"]) for r in host.rows("winners", kind="measured")} == {
        (capability, p.rows) for capability in (80, 90) for p in PROBLEMS[:2]
    }


def test_gpu_that_does_not_come_up_leaves_the_work_to_the_others(host):
    host.gpu.others = {"1": "out of order"}
    (result,) = host.sweep()
    assert {t.problem for t in result.finals} == set(PROBLEMS)
    (said,) = [text for name, text in host.told.stages if name == "cuda:1" and "left out" in text]
    assert "cuda:1" in said


def test_process_that_cannot_be_had_is_said_in_a_sentence(host, monkeypatch):
    def refused(process):
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(SpawnProcess, "start", refused)
    with pytest.raises(WorkerError, match=r"the process of cuda:0 cannot be started: .*no more processes"):
        host.sweep()


def test_no_gpu_that_comes_up_is_an_error_with_the_reason(host):
    host.gpu.faults = {"start": "exit"}
    with pytest.raises(WorkerError, match="cuda:0"):
        host.sweep()


def test_candidate_that_ends_the_measuring_process_costs_one_trial_on_its_gpu(host):
    host.gpu.faults = {TILES[3].label(): "exit"}
    host.sweep()
    assert Counter(
        r["state"] for r in host.rows(**dict(zip(("family", "parameters"), key(TILES[3]), strict=True)))
    ) == {"crashed": len(PROBLEMS)}
    assert {row["rows"] for row in host.rows("winners", kind="measured", half=0)} == {p.rows for p in PROBLEMS}


def key(config):
    return config.family, config.to_json()


def test_progress_has_a_bar_for_each_gpu(capsys):
    from rich.console import Console

    with SweepProgress(Console(width=100)) as progress:
        progress.of("cuda:0").stage("forward 4x4096", 5)
        progress.of("cuda:1").stage("forward 1x4096", 7)
    assert capsys.readouterr().out.split("\n")[:2] == [
        "cuda:0: forward 4x4096: 5 candidates",
        "cuda:1: forward 1x4096: 7 candidates",
    ]


def test_process_of_a_gpu_starts_its_own_ones_before_it_imports_torch(host):
    """One after the other they would import it, seconds each."""
    program = """
import sys
import tunegen.gpu_process

class Worker:
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def launch(self): print("launched", "torch" in sys.modules, "optuna" in sys.modules)

class Pool(Worker):
    def prepare(self):
        print("prepared", "torch" in sys.modules, "optuna" in sys.modules)
        raise EOFError

tunegen.gpu_process.CompilePool = lambda silicon, cores, compile_one: Pool()
order = tunegen.gpu_process.Order(sys.argv[1], 1, 0, {}, 1, lambda device, seed: Worker(), None)
tunegen.gpu_process.os._exit = sys.exit
tunegen.gpu_process.sweep_device(None, 0, order)
"""
    done = subprocess.run([sys.executable, "-c", program, str(host.db)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "launched False False\nprepared False False\n"), done.stderr


# The command


def command(host, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CI": "1"}
    rows = ",".join(str(p.rows) for p in PROBLEMS)
    options = ["--hidden", "4096", "--direction", "forward", "--rows", rows, "--gpus", "0,1", "--db", str(host.db)]
    return subprocess.Popen(
        host.gpu.command(host.gpu.package, "sweep", *options, *arguments),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_command_shows_one_table_of_gpus_that_are_alike(host):
    stdout, stderr = command(host, "--json").communicate(timeout=100)
    found = json.loads(stdout)
    assert sorted(line["rows"] for line in found["results"]) == [p.rows for p in PROBLEMS]
    assert "cuda:1: " in stderr


def test_command_keeps_gpus_that_differ_apart(host):
    host.gpu.others = {"1": "sm_80"}
    stdout, _ = command(host, "--json").communicate(timeout=100)
    found = json.loads(stdout)["by_gpu"]
    assert {one["machine"]["gpu"] for one in found} == {H200.name, of_arch("sm_80").name}
    assert [len(one["results"]) for one in found] == [len(PROBLEMS)] * 2


@pytest.mark.parametrize(("number", "whole"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)])
def test_stopped_command_leaves_no_process_and_goes_on_where_it_was(host, number, whole):
    """SIGINT reaches the whole group, as from a terminal."""
    host.gpu.faults = {TILES[-1].label(): "hang"}
    process = command(host)
    wait_until(lambda: os.path.exists(host.gpu.log) and len(host.gpu.lines("hang")) == 2)
    os.killpg(process.pid, number) if whole else process.send_signal(number)
    process.communicate(timeout=60)
    wait_until(lambda: not alive(host.gpu.processes()))
    before = {r["id"]: r["us"] for r in host.rows(state="ok")}
    assert before
    host.gpu.faults = {}
    host.sweep()
    after = {r["id"]: r["us"] for r in host.rows()}
    assert {number: after[number] for number in before} == before
    assert {row["rows"] for row in host.rows("winners", kind="measured", half=0)} == {p.rows for p in PROBLEMS}


@pytest.mark.parametrize(("text", "found"), [(None, [0]), ("all", [0, 1, 2]), ("2,0,2", [2, 0]), ("1", [1])])
def test_gpus_are_named_by_number(monkeypatch, text, found):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert cli_options.devices_of(text) == found


@pytest.mark.parametrize(
    ("text", "words"), [("3", "no GPU 3: 3 are visible"), ("x", "'x' is no number"), ("-1", "'-1'")]
)
def test_gpus_that_are_not_there_are_refused(monkeypatch, text, words):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    done = CliRunner().invoke(main, ["sweep", "--hidden", "64", "--gpus", text])
    assert done.exit_code == 2
    assert words in done.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "'x' is no number"),
        ("-1", "'-1' is no number"),
        ("0,", "'' is no number"),
        ("3", "no GPU 3: 0 are visible"),
    ],
)
def test_gpus_are_refused_where_there_is_none(tmp_path, monkeypatch, text, words):
    """They were ignored, and the sweep compiled for a target."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    db = tmp_path / "new" / "tune.db"
    done = CliRunner().invoke(main, ["sweep", "--hidden", "64", "--gpus", text, "--db", str(db)])
    assert done.exit_code == 2
    assert words in done.output
    assert not db.parent.exists()


TWO_KERNELS = [Problem("rms_norm", d, 4096, rows) for d in ("forward", "backward") for rows in (1, 64, 1024)]


@pytest.fixture
def given(monkeypatch):
    """`given(problems, number, ...)`: what GPUs that ask in this order are sent; `given.members` are two of them."""
    sent = []
    process = SimpleNamespace(join=lambda _: None, exitcode=1)
    connection = SimpleNamespace(send=sent.append)

    def give(problems, *numbers):
        give.waiting = {kind_of(H200): list(problems)}
        for number in numbers:
            _give(give.members[number], give.members, give.waiting)

    give.sent = sent
    give.members = [Member(i, process, connection, Told().of(str(i)), H200) for i in range(2)]
    return give


def test_gpu_goes_on_with_kernels_that_it_has_compiled(given):
    """Others would compile them again: what a config compiles to does not depend on the row count."""
    given(TWO_KERNELS, 0, 1, 1, 0, 0, 0, 1)
    forward, backward = TWO_KERNELS[:3], TWO_KERNELS[3:]
    assert given.members[0].held == [*forward, backward[2]], "its own ones first, then what is left"
    assert given.members[1].held == backward[:2]


def test_gpu_is_told_what_its_compilers_may_begin_behind_each_problem(given):
    """Which it is given, if it asks before all else is gone: nothing is kept for it."""
    a, b, c, d = (replace(PROBLEM, hidden=hidden) for hidden in (1024, 2048, 4096, 8192))
    given([a, b, c, d], 0, 1, 1, 1, 0)
    first, *later = given.sent
    assert first == (a, b)
    assert later[0] == (c, d), "not what the other one is likely given"
    assert later[1:] == [(d, b), (b, None), (None, None)]


def test_gpu_that_has_ended_keeps_no_kernels_from_the_others(given):
    """It gives its problem back; what it was likely given next is as good as any again."""
    a, b, c = (replace(PROBLEM, hidden=hidden) for hidden in (1024, 2048, 4096))
    given([a, b, c], 0)
    _ended(given.members[0], given.waiting)
    _give(given.members[1], given.members, given.waiting)
    assert given.members[1].held == [b]
    assert given.members[1].hinted == c


def test_what_comes_next_is_known_before_a_problem_is_given():
    """Else compilers would wait while the first batches are measured."""
    a, b = PROBLEMS[:2]
    answers = [(a, b), (b, None), (None, None)]
    connection = SimpleNamespace(send=lambda _: None, recv=lambda: answers.pop(0))
    worker, then = SimpleNamespace(start=lambda: SimpleNamespace(silicon=H200)), {}
    seen = [(problem, dict(then)) for problem in given_to(connection, worker, then)]
    assert seen == [(a, {a: b}), (b, {a: b})]


def test_compilers_go_on_with_what_a_gpu_is_likely_given_next(host):
    """One GPU here: with two, the problem might be given to the other one."""
    host.sweep((0,), [PROBLEM, replace(PROBLEM, hidden=2 * PROBLEM.hidden)])
    done = [line.split(" ", 1)[1] for line in Path(host.gpu.log).read_text().splitlines()]
    compiled = [i for i, line in enumerate(done) if line.startswith("compile ")]
    screened = [i for i, line in enumerate(done) if line.startswith(f"screen {PROBLEM.label()} ")]
    kernels = len(TILES) + len(OLD)
    assert len(compiled) == 2 * kernels
    assert compiled[kernels] < screened[-1], "while candidates of the first problem are measured"
