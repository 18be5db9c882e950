"""Compiling in processes of their own: whatever one candidate does to the compiler, the others come out right."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fake_gpu import H200, PROBLEM, TILES, FakeGpu

from tunegen import paths
from tunegen.liveness import process_identity
from tunegen.model import Config, Problem, Resources, TrialState
from tunegen.pool import CompilePool, _is_lost, compile_candidate, import_compiler

GOOD = Resources(32, 0, 1024, "binary")


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
    assert found.pop(TILES[3]) == (TrialState.CRASHED, "the compiler ended its process")
    assert found == dict.fromkeys((c for c in TILES if c != TILES[3]), GOOD)


def test_candidates_lost_with_the_pool_go_on_side_by_side(gpu):
    """Not one by one in a process of its own each: among hundreds that would take minutes."""
    gpu.faults = {TILES[3].label(): "abort"}
    with pool_of(gpu) as pool:
        list(pool.compile(PROBLEM, TILES))
    assert len(gpu.processes()) <= 12
    assert len(gpu.lines("compile")) <= len(TILES) + 12


@pytest.mark.parametrize(
    ("times", "last"), [(1, GOOD), (99, (TrialState.RUNTIME, "no process to compile in: handle is closed"))]
)
def test_pool_that_breaks_while_it_is_asked_is_a_broken_one(gpu, monkeypatch, times, last):
    """Its pipe is closed before it says so: that ended a sweep. Where no process can be had at all, that is told."""
    submit, left = ProcessPoolExecutor.submit, [OSError("handle is closed")] * times

    def closed(*arguments):
        if left:
            raise left.pop()
        return submit(*arguments)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", closed)
    with pool_of(gpu) as pool:
        assert dict(pool.compile(PROBLEM, TILES[:2])) == dict.fromkeys(TILES[:2], last)


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
    with pool_of(gpu) as pool:
        outcomes = pool.compile(PROBLEM, TILES)
        assert next(outcomes) == (TILES[0], GOOD)
        pool.deadline = 0.7
        assert next(outcomes) == (TILES[1], (TrialState.TIMEOUT, "did not compile within 0.7 s"))
        pool.deadline = 60.0
        assert list(outcomes) == [(config, GOOD) for config in TILES[2:]]


def test_candidate_whose_submission_was_cancelled_is_one_to_try_again(gpu):
    """It may be, as another one's pool is shut down."""
    cancelled = Future()
    cancelled.cancel()
    assert pool_of(gpu)._wait(cancelled) is None
    assert _is_lost(cancelled)


def test_other_errors_are_not_taken_for_a_result(gpu):
    gpu.log = str(Path(gpu.log) / "in no folder")
    with pool_of(gpu) as pool, pytest.raises(FileNotFoundError):
        list(pool.compile(PROBLEM, TILES[:2]))


def test_what_is_known_is_not_compiled_again_whatever_the_rows(gpu):
    gpu.faults = {TILES[0].label(): "too large"}
    with pool_of(gpu) as pool:
        first = list(pool.compile(PROBLEM, TILES[:3]))
        again = list(pool.compile(replace(PROBLEM, rows=7), TILES[:4]))
        assert again[:3] == first
        assert sorted(gpu.lines("compile")) == sorted(c.label() for c in TILES[:4])
        list(pool.compile(replace(PROBLEM, hidden=7), TILES[:1]))
    assert gpu.lines("compile").count(TILES[0].label()) == 2


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
    monkeypatch.setattr("tunegen.pool.import_compiler", os.getpid)  # quicker
    with CompilePool(None, workers=2) as pool:
        pool.prepare()
        assert len(pool._executor._processes) == 2
        pool.silicon, pool.compile_one = H200, gpu.compile
        assert list(pool.compile(PROBLEM, TILES[:2])) == [(config, GOOD) for config in TILES[:2]]
    with pool_of(gpu) as pool:
        pool.prepare()
        assert pool._executor is None  # a stand-in loads nothing


def test_what_a_compilation_loads_can_be_loaded_ahead():
    import_compiler()
    assert {"tunegen.compile", "tunegen.render"} <= sys.modules.keys()
