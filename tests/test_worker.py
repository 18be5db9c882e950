"""The measuring process: crash, hang or poisoned context cost a candidate and a process, never the sweep (H24)."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.context import SpawnProcess
from types import SimpleNamespace

import pytest
from fake_gpu import H200, PROBLEM, TILES, VERSIONS, FakeGpu, us_of
from test_pool import alive, wait_until

from tunegen import child
from tunegen import worker as worker_module
from tunegen.child import Facts, serve
from tunegen.errors import WorkerError
from tunegen.evaluate import COMPILED, TORCH
from tunegen.model import Problem, Resources, Trial, TrialState
from tunegen.worker import Worker

SPENT = Resources(32, 0, 1024, "binary")
OTHER = Problem("rms_norm", "forward", 4096, 7)


@pytest.fixture
def gpu(tmp_path):
    return FakeGpu(str(tmp_path / "log"))


@pytest.fixture
def worker(gpu):
    with gpu.worker() as found:
        found.open(PROBLEM)
        yield found


def finalist(config):
    return Trial(PROBLEM, config, TrialState.OK, resources=SPENT)


def test_nothing_runs_before_it_is_needed(gpu, worker):
    assert not os.path.exists(gpu.log)
    assert worker.start() == worker.start() == Facts(H200, VERSIONS)
    assert gpu.lines("start") == [""]
    assert gpu.lines("open") == []


def test_a_config_is_measured_in_another_process(gpu, worker):
    trial = worker.screen(TILES[0], SPENT)
    assert (trial.problem, trial.config, trial.state, trial.resources) == (PROBLEM, TILES[0], TrialState.OK, SPENT)
    assert trial.measurement.us == us_of(PROBLEM, TILES[0])
    assert os.getpid() not in gpu.processes()


def test_one_process_serves_all_and_opens_each_problem_once(gpu, worker):
    for config in TILES[:3]:
        worker.screen(config, None)
    worker.open(OTHER)
    worker.open(OTHER)
    trials = [worker.screen(config, None) for config in TILES[:2]]
    assert [t.problem for t in trials] == [OTHER, OTHER]
    assert gpu.lines("open") == [PROBLEM.label(), OTHER.label()]
    assert len(gpu.processes()) == 1


def test_problem_opens_while_the_caller_prepares(gpu, worker):
    worker.begin()  # nothing runs yet
    assert not os.path.exists(gpu.log)
    worker.start()
    worker.begin()
    wait_until(lambda: gpu.lines("open") == [PROBLEM.label()])
    worker.begin()
    assert [worker.screen(config, None).state for config in TILES[:2]] == [TrialState.OK] * 2
    worker.begin()
    worker.open(OTHER)
    worker.begin()
    assert worker.screen(TILES[0], None).problem == OTHER
    assert gpu.lines("open") == [PROBLEM.label(), OTHER.label()]


def test_problem_that_was_begun_in_vain_costs_nothing(gpu, worker):
    worker.target = FakeGpu(gpu.log, {PROBLEM.label(): "out of memory"}).serve
    worker.start()
    worker.begin()
    worker.open(OTHER)
    assert worker.screen(TILES[0], None).state is TrialState.OK


@pytest.mark.parametrize(("fault", "reason"), [("exit", "EOFError"), ("out of memory", "OutOfMemoryError: 2 TiB")])
def test_problem_that_was_begun_and_cannot_be_opened_is_the_same_error(gpu, worker, fault, reason):
    worker.target = FakeGpu(gpu.log, {PROBLEM.label(): fault}).serve
    worker.start()
    worker.begin()
    with pytest.raises(WorkerError, match=f"cannot measure forward 1024x4096 bf16: {reason}"):
        worker.screen(TILES[0], None)
    worker.open(OTHER)
    assert worker.screen(TILES[0], None).state is TrialState.OK


def test_real_spare_process_loads_the_compiler(monkeypatch):
    started = []
    worker = Worker(0, 0)
    monkeypatch.setattr(worker, "_launch", lambda target: started.append(target) or (SimpleNamespace(), None))
    worker.prepare()
    assert started == [child.serve_later]


def test_child_that_was_launched_is_the_one_that_starts(gpu):
    with gpu.worker() as worker:
        worker.launch()
        worker.start()
        worker.launch()  # there is one
        worker.open(PROBLEM)
        assert worker.screen(TILES[0], SPENT).state is TrialState.OK
        assert len(gpu.lines("start")) == 1


def test_child_that_was_launched_and_does_not_come_up_is_not_tried_again(gpu):
    with FakeGpu(gpu.log, {"start": "exit"}).worker() as worker:
        worker.launch()
        with pytest.raises(WorkerError, match="ended at its start"):
            worker.start()
    assert len(gpu.lines("start")) == 1


def test_spare_process_takes_over_at_once(gpu):
    with gpu.worker() as worker:
        worker.start()
        worker.prepare()
        wait_until(lambda: len(gpu.lines("start")) == 2)
        worker.stop()
        worker.open(PROBLEM)
        assert worker.screen(TILES[0], SPENT).state is TrialState.OK
        assert len(gpu.lines("start")) == 2


def test_spare_process_compiles_for_the_finals_meanwhile(gpu):
    with gpu.worker() as worker:
        worker.open(PROBLEM)
        worker.foresee(PROBLEM)  # nobody is there for it
        worker.start()
        worker.prepare()
        worker.foresee(PROBLEM)
        worker.foresee(OTHER)
        wait_until(lambda: gpu.lines("foresee") == [PROBLEM.label(), OTHER.label()])
        assert worker.screen(TILES[0], SPENT).state is TrialState.OK
        worker.stop()
        assert [trial.config for trial in worker.finals([finalist(TILES[0])])] == [TILES[0]]
        assert len(gpu.lines("start")) == 2


def test_spare_process_that_ends_while_it_compiles_costs_nothing(gpu):
    with gpu.worker() as worker:
        worker.open(PROBLEM)
        worker.start()
        worker.target = FakeGpu(gpu.log, {"foresee": "exit"}).serve
        worker.prepare()
        worker.foresee(PROBLEM)
        wait_until(lambda: gpu.lines("foresee") == [PROBLEM.label()])
        worker.target = gpu.serve
        worker.foresee(OTHER)
        worker.stop()
        assert [trial.config for trial in worker.finals([finalist(TILES[0])])] == [TILES[0]]
        assert len(gpu.lines("start")) == 3


def test_next_candidate_is_under_way_while_the_caller_is_at_the_last(gpu, worker):
    trials = worker.screens([(config, SPENT) for config in TILES[:3]])
    assert next(trials).config == TILES[0]
    wait_until(lambda: len(gpu.lines("screen")) == 2)
    assert [trial.config for trial in trials] == TILES[1:3]
    assert len(gpu.lines("screen")) == 3


def test_answer_that_nobody_reads_is_not_taken_for_another(gpu, worker):
    trials = worker.screens([(config, SPENT) for config in TILES[:3]])
    next(trials)
    trials.close()
    assert worker.screen(TILES[5], SPENT).config == TILES[5]


def test_one_that_ends_the_process_costs_the_next_one_nothing(gpu, monkeypatch):
    monkeypatch.setattr(worker_module, "SCREEN_SECONDS", 20)
    bad = FakeGpu(gpu.log, {TILES[1].label(): "exit", TILES[3].label(): "illegal address"})
    with bad.worker() as worker:
        worker.open(PROBLEM)
        states = [trial.state for trial in worker.screens([(config, SPENT) for config in TILES[:5]])]
    crashed = TrialState.CRASHED
    assert states == [TrialState.OK, crashed, TrialState.OK, crashed, TrialState.OK]


def test_spare_process_that_did_not_come_up_costs_nothing(gpu):
    """As on a GPU that takes one process at a time: the second is refused while the first one lives."""
    with gpu.worker() as worker:
        worker.start()
        worker.target = FakeGpu(gpu.log, {"start": "exit"}).serve
        worker.prepare()
        worker.target = gpu.serve
        worker.stop()
        worker.open(PROBLEM)
        assert worker.screen(TILES[0], SPENT).state is TrialState.OK


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        ("exit", TrialState.CRASHED, "ended its process, exit code 7"),
        ("hang", TrialState.TIMEOUT, "no answer within 1 s"),
        ("illegal address", TrialState.CRASHED, "illegal address"),
    ],
)
def test_h24_culprit_is_recorded_and_the_process_replaced(gpu, monkeypatch, fault, state, reason):
    monkeypatch.setattr(worker_module, "SCREEN_SECONDS", 1.0)
    gpu.faults = {TILES[1].label(): fault}
    with gpu.worker() as worker:
        worker.open(PROBLEM)
        trials = [worker.screen(config, SPENT) for config in TILES[:4]]
    ok = TrialState.OK
    assert [t.state for t in trials] == [ok, state, ok, ok]
    assert (trials[1].config, trials[1].reason, trials[1].resources) == (TILES[1], reason, SPENT)
    assert trials[1].measurement is None
    assert gpu.lines("open") == [PROBLEM.label()] * 2
    assert len(gpu.processes()) == 2
    assert not alive(gpu.processes())


def test_failure_that_leaves_the_process_whole_keeps_it(gpu, worker):
    worker.target = FakeGpu(gpu.log, {TILES[0].label(): "out of memory"}).serve
    trials = [worker.screen(config, None) for config in TILES[:2]]
    assert [(t.state, t.reason) for t in trials] == [(TrialState.RUNTIME, "out of memory"), (TrialState.OK, "")]
    assert len(gpu.processes()) == 1


def test_finals_side_by_side(gpu, worker):
    found = worker.finals([finalist(c) for c in (*TILES[:2], TORCH, COMPILED)])
    assert [(t.config, t.stage) for t in found] == [(c, "final") for c in (*TILES[:2], TORCH, COMPILED)]
    assert len(gpu.lines("finals")) == 1


def test_finals_go_on_without_the_one_that_ends_the_process(gpu, worker):
    worker.target = FakeGpu(gpu.log, {TILES[1].label(): "exit in finals"}).serve
    found = worker.finals([finalist(c) for c in (*TILES[:3], TORCH)])
    assert [(t.config, t.state) for t in found] == [
        (TILES[0], TrialState.OK),
        (TILES[1], TrialState.CRASHED),
        (TILES[2], TrialState.OK),
        (TORCH, TrialState.OK),
    ]
    assert found[1].reason == "ended its process, exit code 8"
    assert found[1].measurement is None


def test_peak_of_memory_is_the_largest_told(worker):
    worker.screen(TILES[0], None)
    assert worker.peak_bytes == 1000
    worker.finals([finalist(TILES[0])])
    worker.screen(TILES[0], None)
    assert worker.peak_bytes == 3000


def test_process_that_ends_at_its_start_is_an_error(gpu):
    gpu.faults = {"start": "exit"}
    with gpu.worker() as worker, pytest.raises(WorkerError, match="ended at its start"):
        worker.start()


def test_process_that_says_nothing_at_its_start_is_an_error(gpu, monkeypatch):
    monkeypatch.setattr(worker_module, "START_SECONDS", 0.5)
    gpu.faults = {"start": "hang"}
    with gpu.worker() as worker:
        with pytest.raises(WorkerError, match="says nothing at its start"):
            worker.start()
        assert not alive([child.pid for child in multiprocessing.active_children()])


@pytest.mark.parametrize(("fault", "reason"), [("exit", "EOFError"), ("out of memory", "OutOfMemoryError: 2 TiB")])
def test_problem_that_cannot_be_opened_is_an_error_with_its_name_and_the_reason(gpu, worker, fault, reason):
    worker.target = FakeGpu(gpu.log, {PROBLEM.label(): fault}).serve
    with pytest.raises(WorkerError, match=f"cannot measure forward 1024x4096 bf16: {reason}"):
        worker.screen(TILES[0], None)
    assert not alive(gpu.processes())


def test_process_ends_when_its_connection_does(gpu):
    worker = gpu.worker()
    worker.open(PROBLEM)
    worker.screen(TILES[0], None)
    worker._connection.close()
    wait_until(lambda: not alive(gpu.processes()))


def test_process_that_cannot_be_killed_is_given_up(gpu, monkeypatch):
    """One that waits in the driver for a GPU that no longer answers."""
    monkeypatch.setattr(worker_module, "KILL_SECONDS", 0.2)
    gpu.faults = {TILES[0].label(): "hang"}
    monkeypatch.setattr(worker_module, "SCREEN_SECONDS", 0.5)
    with gpu.worker() as worker:
        worker.open(PROBLEM)
        worker.start()
        process = worker._process
        monkeypatch.setattr(worker_module, "kill_group", lambda process: None)
        assert worker.screen(TILES[0], SPENT).state is TrialState.TIMEOUT
        assert worker.screen(TILES[1], SPENT).state is TrialState.OK
    assert process.is_alive()
    monkeypatch.undo()
    process.kill()
    process.join()


def test_interrupt_as_the_process_starts_is_an_interrupt(gpu, monkeypatch):
    def interrupted(process):
        raise KeyboardInterrupt

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), gpu.worker() as worker:
        worker.start()


def test_process_that_cannot_be_had_is_said_in_a_sentence(gpu, monkeypatch):
    def refused(process):
        raise BlockingIOError(11, "no more processes")

    with gpu.worker() as worker:
        monkeypatch.setattr(SpawnProcess, "start", refused)
        for start in (worker.launch, worker.start):
            with pytest.raises(WorkerError, match=r"cannot be started \(cuda:0\): .*no more processes"):
                start()
        worker.prepare()  # may be had later
        monkeypatch.undo()
        assert worker.start().silicon == H200


def test_what_the_process_has_started_is_killed_with_it(gpu, monkeypatch):
    monkeypatch.setattr(worker_module, "SCREEN_SECONDS", 2.0)
    gpu.faults = {TILES[0].label(): "waits for another process"}
    with gpu.worker() as worker:
        worker.open(PROBLEM)
        assert worker.screen(TILES[0], SPENT).state is TrialState.TIMEOUT
        (other,) = gpu.lines("started")
        wait_until(lambda: not alive([int(other)]))


def test_real_process_ends_quietly_when_its_answer_is_not_read(monkeypatch):
    """The parent closes the connection with an answer in it: the child's next read is no end of file, but a reset."""
    ours, theirs = multiprocessing.Pipe()
    server = SimpleNamespace(facts=Facts(H200, VERSIONS), screen=lambda: "an answer")
    monkeypatch.setattr("tunegen.serving.Server", lambda device, seed, spare: server)
    child = threading.Thread(target=serve, args=(theirs, 0, 0))
    ours.send(("screen", ()))
    child.start()
    wait_until(lambda: ours.poll())
    ours.close()
    child.join(20)
    assert not child.is_alive()


def test_real_process_says_that_there_is_no_such_gpu():
    with Worker(99, 0, serve) as worker, pytest.raises(WorkerError, match=r"cannot use cuda:99: \w+: .+") as raised:
        worker.start()
    assert "\n" not in str(raised.value)
