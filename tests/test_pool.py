"""Compiling in processes of their own: whatever one candidate does to the compiler, the others come out right."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from pickle import PicklingError

import pytest
from fake_gpu import H200, PROBLEM, TILES, FakeGpu

from tunegen import paths
from tunegen.errors import PlanError
from tunegen.liveness import process_identity
from tunegen.model import Config, Problem, Resources, TrialState
from tunegen.pool import CompilePool, compile_candidate, import_compiler

GOOD = Resources(32, 0, 1024, "binary")
CRASHED = (TrialState.CRASHED, "the compiler ended its process")


@pytest.fixture
def gpu(tmp_path):
    return FakeGpu(str(tmp_path / "log"))


def pool_of(gpu):
    return CompilePool(H200, workers=2, compile_one=gpu.compile)


def test_outcomes_come_in_the_order_given(gpu):
    gpu.faults = {TILES[1].label(): "too large", TILES[2].label(): "spills"}
    with pool_of(gpu) as pool:
        found = list(pool.compile(PROBLEM, TILES[:4]))
    reason = (TrialState.COMPILE, "tile_kernel: OutOfResources: shared memory")
    assert found == [(TILES[0], GOOD), (TILES[1], reason), (TILES[2], replace(GOOD, spill_bytes=64)), (TILES[3], GOOD)]


def test_compiler_that_ends_its_process_costs_one_candidate(gpu):
    gpu.faults = {TILES[3].label(): "abort"}
    with pool_of(gpu) as pool:
        found = dict(pool.compile(PROBLEM, TILES))
    assert found.pop(TILES[3]) == CRASHED
    assert found == dict.fromkeys((c for c in TILES if c != TILES[3]), GOOD)


def test_compiler_that_ends_its_process_takes_no_other_one_along(gpu):
    """In an executor of the standard library it ends the pool, and all that others compile begins again."""
    gpu.faults = {TILES[0].label(): "slow", TILES[1].label(): "abort", TILES[3].label(): "abort"}
    with pool_of(gpu) as pool:
        found = dict(pool.compile(PROBLEM, TILES))
    assert Counter(gpu.lines("compile")) == {config.label(): 1 + (config in (TILES[1], TILES[3])) for config in TILES}
    assert len(gpu.processes()) <= 2 + 4
    assert [found[config] == GOOD for config in TILES[:5]] == [True, False, True, False, True]


def test_process_that_ends_while_another_one_starts_is_no_trouble(gpu, monkeypatch):
    """Up to Python 3.11 the manager of an executor asked its processes then who is alive, met `RuntimeError: dictionary
    changed size during iteration`, and ended."""
    start, is_alive, ends = SpawnProcess.start, SpawnProcess.is_alive, []
    asked, second = threading.Event(), threading.Event()

    def start_slowly(process):
        start(process)
        ends.append(process.sentinel)
        if len(ends) == 2:
            wait(ends[:1])
            asked.wait(1)
            second.set()

    def is_alive_slowly(process):
        asked.set()
        second.wait(1)
        time.sleep(0.1)
        return is_alive(process)

    monkeypatch.setattr(SpawnProcess, "start", start_slowly)
    monkeypatch.setattr(SpawnProcess, "is_alive", is_alive_slowly)
    gpu.faults = {TILES[0].label(): "abort"}
    with CompilePool(H200, 2, gpu.compile, deadline=10.0) as pool:
        found = list(pool.compile(PROBLEM, TILES[:6]))
    assert found == [(TILES[0], CRASHED), *((config, GOOD) for config in TILES[1:6])]


@pytest.mark.parametrize(
    ("times", "last"), [(1, GOOD), (99, (TrialState.RUNTIME, "no process to compile in: no more processes"))]
)
def test_process_that_cannot_be_had_has_nothing_against_the_candidate(gpu, monkeypatch, times, last):
    start, left = SpawnProcess.start, [OSError("no more processes")] * times

    def refused(process):
        if left:
            raise left.pop()
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", refused)
    with pool_of(gpu) as pool:
        assert dict(pool.compile(PROBLEM, TILES[:2])) == dict.fromkeys(TILES[:2], last)


@pytest.mark.parametrize("program", ["/bin/false", "/bin/sleep"], ids=["ends", "says nothing"])
def test_process_that_does_not_come_up_has_nothing_against_the_candidate(gpu, monkeypatch, tmp_path, program):
    """For want of memory or threads, say. Of all candidates it was said that the compiler had ended its process."""
    silent = tmp_path / "python"
    silent.write_text(f"#!/bin/sh\nexec {program} 600\n")
    silent.chmod(0o755)
    resource_tracker.ensure_running()
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(silent))
    monkeypatch.setattr("tunegen.processes.START_SECONDS", 1)
    reason = "it ended at its start" if program == "/bin/false" else "it says nothing for 1 s at its start"
    with pool_of(gpu) as pool:
        found = dict(pool.compile(PROBLEM, TILES[:2]))
    assert found == dict.fromkeys(TILES[:2], (TrialState.RUNTIME, f"no process to compile in: {reason}"))


def test_thread_that_cannot_be_had_has_nothing_against_the_candidate(gpu, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    with pool_of(gpu) as pool:
        monkeypatch.setattr(threading.Thread, "start", refused)
        (found,) = pool.compile(PROBLEM, TILES[:1])
    assert found == (TILES[0], (TrialState.RUNTIME, "no process to compile in: can't start new thread"))


def test_what_a_compiler_has_started_is_killed_with_it(gpu):
    """A ptxas that hangs: it went on when the compiler had been killed for it."""
    gpu.faults = {TILES[0].label(): "waits for another process"}
    with CompilePool(H200, 1, gpu.compile, deadline=2.0) as pool:
        assert next(pool.compile(PROBLEM, TILES[:1]))[1][0] is TrialState.TIMEOUT
        wait_until(lambda: not alive([int(gpu.lines("started")[0])]))
        pool.begin(PROBLEM, [TILES[0]])
        pool.begin(replace(PROBLEM, hidden=7), [TILES[0]])
        wait_until(lambda: len(gpu.lines("started")) == 2)
    wait_until(lambda: not alive([int(gpu.lines("started")[1])]))


class TwoThingsError(Exception):
    """Cannot be read again once it is written: its constructor takes two arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_two_things(problem, config, silicon):
    raise TwoThingsError("this", "that")


def return_a_function(problem, config, silicon):
    return lambda: None


@pytest.mark.parametrize(
    ("compile_one", "error", "says"),
    [
        (raise_two_things, RuntimeError, "TwoThingsError: this and that"),
        (return_a_function, (AttributeError, PicklingError), "return_a_function"),
    ],
)
def test_what_cannot_be_sent_is_said_and_ends_no_process(compile_one, error, says):
    """The first raised in the parent that an argument was missing; of the second a compiler ended."""
    with CompilePool(H200, 1, compile_one) as pool:
        with pytest.raises(error, match=says):
            next(pool.compile(PROBLEM, TILES[:1]))
        pool.compile_one = start_method
        assert next(pool.compile(PROBLEM, TILES[1:2]))[1] == (TrialState.COMPILE, "spawn")


def test_process_ended_from_outside_is_replaced(gpu):
    gpu.faults = {TILES[0].label(): "compiles for ever"}
    with pool_of(gpu) as pool:
        pool.begin(PROBLEM, TILES[:1])
        wait_until(lambda: os.path.exists(gpu.log) and gpu.lines("compile"))
        (child,) = gpu.processes()
        gpu.faults = {}
        os.kill(child, signal.SIGKILL)
        assert list(pool.compile(PROBLEM, TILES[:2])) == [(config, GOOD) for config in TILES[:2]]


def test_its_end_does_not_wait_for_what_nobody_waits_for(gpu):
    """Of a problem that was left out after its candidates had begun to compile: one that hung kept the sweep."""
    gpu.faults = {TILES[1].label(): "compiles for ever"}
    with pool_of(gpu) as pool:
        list(pool.compile(PROBLEM, TILES[:1]))
        pool.begin(PROBLEM, TILES[1:2])
        wait_until(lambda: TILES[1].label() in gpu.lines("compile"))
        began = time.monotonic()
    assert time.monotonic() - began < 60
    wait_until(lambda: not alive(gpu.processes()))


def test_compiler_that_hangs_costs_one_candidate(gpu):
    gpu.faults = {TILES[1].label(): "compiles for ever"}
    with CompilePool(H200, 2, gpu.compile, deadline=3.0) as pool:
        found = dict(pool.compile(PROBLEM, TILES))
    assert found.pop(TILES[1]) == (TrialState.TIMEOUT, "did not compile within 3 s")
    assert found == dict.fromkeys((c for c in TILES if c != TILES[1]), GOOD)
    assert Counter(gpu.lines("compile")) == {config.label(): 1 for config in TILES}


def test_other_errors_are_not_taken_for_a_result(gpu):
    gpu.log = str(Path(gpu.log) / "in no folder")
    with pool_of(gpu) as pool, pytest.raises(FileNotFoundError) as caught:
        list(pool.compile(PROBLEM, TILES[:2]))
    assert "in note" in str(caught.value.__cause__), "where it was raised is told"


def test_what_is_known_is_not_compiled_again_whatever_the_rows(gpu):
    gpu.faults = {TILES[0].label(): "too large"}
    with pool_of(gpu) as pool:
        first = list(pool.compile(PROBLEM, TILES[:3]))
        again = list(pool.compile(replace(PROBLEM, rows=7), TILES[:4]))
        assert again[:3] == first
        assert sorted(gpu.lines("compile")) == sorted(c.label() for c in TILES[:4])
        list(pool.compile(replace(PROBLEM, hidden=7), TILES[:1]))
    assert gpu.lines("compile").count(TILES[0].label()) == 2


def planned_for_few_rows(problem, config, silicon):
    if problem.rows > 64:
        raise PlanError(f"no plan for {problem.rows} rows")
    return GOOD


def test_plan_that_fails_for_one_number_of_rows_costs_no_other():
    with CompilePool(H200, 1, planned_for_few_rows) as pool:
        found = [next(pool.compile(replace(PROBLEM, rows=rows), TILES[:1]))[1] for rows in (128, 64, 256)]
    assert found == [(TrialState.COMPILE, "no plan for 128 rows"), GOOD, GOOD]


def test_plan_that_failed_for_rows_begun_ahead_costs_no_other():
    """A sweep begins what comes next, which another GPU may be given: `no plan for 128 rows` was told of 64."""
    with CompilePool(H200, 1, planned_for_few_rows) as pool:
        pool.begin(replace(PROBLEM, rows=128), TILES[:2])
        assert next(pool.compile(replace(PROBLEM, rows=64), TILES[:1]))[1] == GOOD
        assert next(pool.compile(replace(PROBLEM, rows=256), TILES[1:2]))[1] == (
            TrialState.COMPILE,
            "no plan for 256 rows",
        )


def test_processes_end_with_the_pool(gpu):
    with pool_of(gpu) as pool:
        list(pool.compile(PROBLEM, TILES[:4]))
    assert not alive(gpu.processes())


def test_processes_end_at_once_when_an_error_leaves_the_pool(gpu):
    gpu.faults = {TILES[1].label(): "compiles for ever"}
    with pytest.raises(KeyboardInterrupt), pool_of(gpu) as pool:  # noqa: PT012 - the error is to pass the pool's end
        next(pool.compile(PROBLEM, TILES[:2]))
        raise KeyboardInterrupt
    wait_until(lambda: not alive(gpu.processes()))


def test_processes_end_when_their_parent_is_killed(gpu):
    code = (
        "import sys; from fake_gpu import *; from tunegen.pool import CompilePool\n"
        f"pool = CompilePool(H200, 2, FakeGpu({gpu.log!r}).compile)\n"
        "list(pool.compile(PROBLEM, TILES[:4])); print('idle', flush=True); sys.stdin.read()"
    )
    folders = os.pathsep.join([str(paths.PACKAGE.parent), str(Path(__file__).parent)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": folders},
    )
    assert parent.stdout.readline() == "idle\n"
    assert alive(gpu.processes())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_until(lambda: not alive(gpu.processes()))


@pytest.mark.compiler
def test_compiler_out_of_memory_has_nothing_against_the_candidate(monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    import triton

    monkeypatch.setattr(triton, "compile", fail)
    config = Config.of("single_block", {"BLOCK_SIZE": 256, "ROWS": 1, "num_warps": 1})
    with pytest.raises(MemoryError):
        compile_candidate(Problem("rms_norm", "forward", 256, 64), config, H200)


@pytest.mark.compiler
def test_h25_block_of_two_million_does_not_compile():
    problem = Problem("rms_norm", "forward", 256, 64)
    configs = [Config.of("single_block", {"BLOCK_SIZE": n, "ROWS": 1, "num_warps": 1}) for n in (2**21, 256)]
    with CompilePool(H200, workers=1, compile_one=compile_candidate) as pool:
        large, good = (outcome for _, outcome in pool.compile(problem, configs))
    assert large[0] is TrialState.COMPILE
    assert large[1].startswith("forward_single_block: CompilationError: numel (2097152) exceeds ")
    assert isinstance(good, Resources)


@pytest.mark.compiler
def test_real_compiler_reads_resources_and_refuses_what_does_not_fit():
    problem = Problem("rms_norm", "forward", 256, 64)
    good = Config.of("single_block", {"BLOCK_SIZE": 256, "ROWS": 1, "num_warps": 1})
    truncated = Config.of("single_block", {"BLOCK_SIZE": 128, "ROWS": 1, "num_warps": 1})
    with CompilePool(H200, workers=1, compile_one=compile_candidate) as pool:
        found = dict(pool.compile(problem, [good, truncated]))
    assert isinstance(found[good], Resources)
    assert 0 < found[good].registers <= 255
    assert found[good].spill_bytes == 0
    state, reason = found[truncated]
    assert state is TrialState.COMPILE
    assert "a block narrower than the row reads only part of it" in reason
    assert "\n" not in reason


def alive(processes):
    return {pid for pid in processes if process_identity(pid)}


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_spawned_not_forked():
    with CompilePool(H200, workers=1, compile_one=start_method) as pool:
        assert next(pool.compile(PROBLEM, TILES[:1]))[1] == (TrialState.COMPILE, "spawn")


def start_method(problem, config, silicon):
    from tunegen.errors import CompileError

    raise CompileError(multiprocessing.get_start_method(allow_none=True) or "fork")


def test_processes_start_before_it_is_known_what_to_compile_for(gpu, monkeypatch):
    loading = functools.partial(gpu.note, "loads")
    monkeypatch.setattr("tunegen.pool.import_compiler", loading)  # quicker
    before = set(multiprocessing.active_children())
    with CompilePool(None, workers=2) as pool:
        pool.prepare()
        assert len(set(multiprocessing.active_children()) - before) == 2, (
            "before the caller goes on to import torch, say"
        )
        pool.prepare()
        wait_until(lambda: os.path.exists(gpu.log) and len(gpu.lines("loads")) == 2)
        assert len(gpu.processes()) == 2
        pool.silicon, pool.compile_one = H200, gpu.compile
        assert list(pool.compile(PROBLEM, TILES[:2])) == [(config, GOOD) for config in TILES[:2]]
    assert len(gpu.lines("loads")) == 2
    with pool_of(gpu) as pool:
        pool.prepare()  # a stand-in loads nothing
    assert len(gpu.lines("loads")) == 2


def test_its_end_does_not_wait_for_what_is_loaded_in_vain(gpu, monkeypatch):
    """Where the GPU cannot be used, say."""
    monkeypatch.setattr("tunegen.pool.import_compiler", functools.partial(time.sleep, 600))
    with CompilePool(None, workers=2) as pool:
        pool.prepare()
        began = time.monotonic()
    assert time.monotonic() - began < 60


def test_what_a_compilation_loads_can_be_loaded_ahead():
    import_compiler()
    assert {"tunegen.compile", "tunegen.render"} <= sys.modules.keys()
