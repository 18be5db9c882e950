"""What a sweep starts before it imports torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from fake_gpu import H200, FakeGpu

from tunegen import cli, commands, early
from tunegen.early import Early, started_early
from tunegen.pool import CompilePool
from tunegen.processes import deaf_to_interrupts, interrupts_held


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine with a driver, whose measuring processes are stand-ins; `prepared` counts pools that start."""
    gpu = FakeGpu(str(tmp_path / "log"))
    monkeypatch.setattr(early, "DRIVERS", (tmp_path,))
    monkeypatch.setattr(early, "CARDS", str(tmp_path / "nvidia[0-9]*"))
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(early, "Worker", gpu.worker_on)
    monkeypatch.setattr("tunegen.pool.CompilePool.prepare", lambda self: prepared.append(self))
    prepared = gpu.prepared = []
    return gpu


@pytest.mark.parametrize(("gpus", "device"), [(None, 0), ("1", 1)])
def test_one_measuring_process_is_started_and_is_the_one_that_measures(gpu, gpus, device):
    with started_early(gpus, None, 7) as found:
        assert found.worker.device == device
        assert found.worker.seed == 7
        assert gpu.prepared == [found.pool]
        found.worker.start()
        assert len(gpu.lines("start")) == 1


def test_it_ends_with_the_sweep(gpu):
    with started_early(None, None, 0) as found:
        process = found.worker._spare.process
    assert process.exitcode is not None


@pytest.mark.parametrize(("gpus", "arch"), [(None, "sm_90"), ("all", None), ("0,1", None), ("x", None), ("2", None)])
def test_nothing_is_started_for_other_sweeps(gpu, gpus, arch):
    with started_early(gpus, arch, 0) as found:
        assert found is None


def test_the_first_gpu_needs_no_file_of_its_own(gpu, monkeypatch):
    """In WSL there is none."""
    monkeypatch.setattr(early, "CARDS", "/dev/none*")
    with started_early(None, None, 0) as found:
        assert found.worker.device == 0


def test_nothing_is_started_without_a_driver(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(early, "DRIVERS", (tmp_path / "none",))
    with started_early(None, None, 0) as found:
        assert found is None


def test_compilers_go_on_for_a_target_where_the_gpu_cannot_be_used(gpu, tmp_path, monkeypatch):
    pool = CompilePool(None, 1, gpu.compile)
    monkeypatch.setattr(cli, "started_early", lambda *options: contextlib.nullcontext(Early(None, pool)))
    monkeypatch.setattr(commands, "target_of", lambda arch: H200)
    options = ["--hidden", "64", "--rows", "1", "--direction", "forward", "--db", str(tmp_path / "tune.db")]
    done = CliRunner().invoke(cli.main, ["sweep", *options])
    assert done.exit_code == 0, done.output
    assert pool.silicon == H200
    assert gpu.lines("compile")


def test_nothing_is_started_under_the_interpreter(gpu, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with started_early(None, None, 0) as found:
        assert found is None


def test_the_command_starts_them_before_it_imports_torch(tmp_path):
    program = """
import sys
import tunegen.cli, tunegen.early

def started(*options):
    print(options, "torch" in sys.modules, "optuna" in sys.modules)
    raise SystemExit(0)

tunegen.cli.started_early = started
tunegen.cli.main(["sweep", "--hidden", "64", "--seed", "3"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "(None, None, 3) False False\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_torch_is_imported_ends_the_command_in_order(number):
    """One that came as numpy was imported was dropped, and the sweep went on; SIGTERM left semaphores behind."""
    program = f"""
import contextlib, os, sys, time
import tunegen.cli

class Drops:
    def find_spec(self, name, *_):
        if name == "torch":
            try:
                os.kill(os.getpid(), {int(number)})
                time.sleep(0.1)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Drops())
tunegen.cli.started_early = lambda *options: contextlib.nullcontext()
tunegen.cli.main(["sweep", "--hidden", "64"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tunegen: interrupted\n")


@pytest.mark.parametrize("held", [interrupts_held, deaf_to_interrupts])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_is_held_comes_at_the_end(held, number):
    """SIGTERM half way through the start of a child had that print a traceback."""
    before, reached = signal.signal(signal.SIGTERM, signal.default_int_handler), []

    def interrupted():
        with held():
            os.kill(os.getpid(), number)
            reached.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert reached
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        assert signal.signal(signal.SIGTERM, before) is signal.default_int_handler


def test_an_interrupt_that_is_ignored_is_not_held():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN
