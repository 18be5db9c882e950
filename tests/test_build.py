"""Rendered kernels and Triton's compile cache on a disk that is full or closed: one error with path and remedy."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import re
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_gpu import H200
from helpers import assert_right, draw, exact, interpret_kernels, run, weight_of
from test_cli import SWEEP, process

from tunegen import dispatch, launch, paths, plans
from tunegen import render as rendering
from tunegen.compile import compile_candidate
from tunegen.errors import BuildError, CompileError, PlanError
from tunegen.launch import Variant
from tunegen.model import Config, Problem
from tunegen.ops import op_spec
from tunegen.plans import load
from tunegen.store import Store

SPEC = op_spec("rms_norm")
PROBLEM = Problem("rms_norm", "forward", 256, 4)
CONFIG = Config.of("single_block", {"BLOCK_SIZE": 256, "ROWS": 1, "num_warps": 1})
SOURCE = rendering.renderings(PROBLEM, CONFIG, SPEC)[0]


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def closed(path, *_, **__):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.fixture
def build(tmp_path, monkeypatch):
    """An empty build folder of the test's own; no temporary one of an earlier test is remembered."""
    monkeypatch.setenv("TUNEGEN_BUILD", str(tmp_path / "build"))
    rendering._private_folder.cache_clear()
    yield tmp_path / "build"
    rendering._private_folder.cache_clear()


def file_of(source):
    """Where the kernel's file lies; it is not left there."""
    path = rendering.write(source)
    path.unlink()
    return path


# Rendered kernels


def test_full_build_folder_is_an_error_with_path_and_remedy(build, monkeypatch):
    path = file_of(SOURCE)
    assert path.parent == build
    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full)
        with pytest.raises(BuildError) as caught:
            load(SOURCE)
    assert str(caught.value) == (
        f"cannot write the rendered kernel {path}: [Errno 28] No space left on device; "
        "free space there or set TUNEGEN_BUILD"
    )
    assert list(build.iterdir()) == [], "half a file is left behind"
    assert rendering.write(SOURCE).read_text() == SOURCE.text, "and goes on once there is space"


def test_kernel_file_that_is_a_folder_is_an_error_with_path_and_remedy(build):
    path = file_of(SOURCE)
    path.mkdir()
    with pytest.raises(BuildError, match=rf"kernel {path}: .*Is a directory.*set TUNEGEN_BUILD"):
        rendering.write(SOURCE)


def test_build_folder_that_is_a_file_gives_way_to_a_temporary_one_and_says_so_once(build, caplog):
    build.write_text("mine")
    found = [rendering.write(SOURCE) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].read_text() == SOURCE.text
    assert found[0].parent.parent == Path(tempfile.gettempdir())
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(build) in said
    assert str(found[0].parent) in said
    assert said.endswith("set TUNEGEN_BUILD")
    assert build.read_text() == "mine"


def test_no_build_folder_and_no_temporary_one_is_an_error_with_path_and_remedy(build, monkeypatch):
    build.write_text("mine")
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(BuildError, match=rf"File exists: '{build}'.* No space left on device; set TUNEGEN_BUILD"):
        rendering.write(SOURCE)


@pytest.mark.compiler
def test_command_says_it_in_one_line_and_blames_no_candidate(build, tmp_path):
    path = file_of(SOURCE)
    path.mkdir()
    found = process(*SWEEP, "--rows", "4", "--db", tmp_path / "tune.db", TUNEGEN_BUILD=str(build))
    assert found.returncode == 2
    (told,) = found.stderr.splitlines()
    assert told.startswith(f"tunegen: cannot write the rendered kernel {path}: ")
    assert told.endswith("; free space there or set TUNEGEN_BUILD")
    with Store.read(tmp_path / "tune.db") as store:
        assert store.trials() == []


def said_while_torch_answers(caplog):
    """The warnings, of both directions, while the op gives the right values all the same."""
    x, w, dy = draw(3, 64), weight_of(64), draw(3, 64, seed=2)
    with caplog.at_level(logging.WARNING, "tunegen"):
        got = run(x, w, dy)
    dispatch.forget()
    assert_right(got, exact(x, w, dy), x, w)
    said = [record.getMessage() for record in caplog.records]
    assert {s.split()[0] for s in said} == {"forward", "backward"}
    return said


@pytest.mark.interpreter
def test_op_runs_in_torch_and_says_why(build, monkeypatch, caplog):
    """A full disk costs a caller speed, and no result."""
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(os, "replace", full)
    said = said_while_torch_answers(caplog)
    assert all("No space left on device; free space there or set TUNEGEN_BUILD" in s for s in said)


@pytest.mark.interpreter
def test_current_folder_that_is_deleted_costs_no_result(build, monkeypatch, caplog, tmp_path):
    """Whatever is named by a relative path is not there; an error came up in the caller's norm."""
    interpret_kernels(monkeypatch)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("TUNEGEN_DB", "tune.db")
    monkeypatch.setenv("TUNEGEN_BUILD", "build")
    x, w, dy = draw(3, 64), weight_of(64), draw(3, 64, seed=2)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("cannot keep rendered kernels ([Errno 2] No such file or directory")
    dispatch.forget()


def test_folder_that_cannot_be_entered_gives_way_to_a_temporary_one(build, monkeypatch, caplog):
    """It was taken for one that can be written: each kernel then failed, with a warning of its own."""
    build.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.X_OK)
    found = [rendering.write(SOURCE) for _ in range(2)]
    assert found[0].parent.parent == Path(tempfile.gettempdir())
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"not writable: '{build}'" in said


# Users without a home folder


@pytest.fixture
def homeless(build, monkeypatch):
    def nobody(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME", "TUNEGEN_DB", "TUNEGEN_BUILD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(paths, "in_checkout", lambda: False)


@pytest.mark.parametrize("folder", [None, "~/.cache/tunegen"], ids=["platformdirs raises", "platformdirs returns ~"])
def test_user_without_a_home_has_that_of_the_root_folder(homeless, monkeypatch, folder):
    if folder is not None:  # as it did in earlier releases: a folder ~ was made wherever the caller was
        monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: folder)
    assert paths.database() == Path("/.cache/tunegen/tune.db")
    assert paths.build_folder() == Path("/.cache/tunegen/build")


@pytest.mark.parametrize("value", ["~", "~/x", "~nobody-of-this-name/x"])
def test_tilde_without_a_home_is_no_folder_of_that_name(homeless, monkeypatch, value):
    monkeypatch.setenv("TUNEGEN_BUILD", value)
    monkeypatch.setenv("TUNEGEN_DB", value)
    wanted = {"~": Path("/"), "~/x": Path("/x")}.get(value, Path(value).absolute())
    assert paths.build_folder() == paths.database() == wanted


@pytest.mark.interpreter
def test_user_without_a_home_has_right_values_and_one_warning(homeless, monkeypatch, caplog):
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(paths, "resource", lambda name: paths.PACKAGE.parent / name)
    monkeypatch.setattr(Path, "mkdir", closed)
    x, w, dy = draw(3, 64), weight_of(64), draw(3, 64, seed=2)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "cannot keep rendered kernels ([Errno 13] Permission denied: '/.cache/tunegen/build'): using "
    )
    assert said.endswith("; set TUNEGEN_BUILD")
    dispatch.forget()


# Templates that raise


BROKEN = {
    "raise RuntimeError('no such intrinsic')": "RuntimeError: no such intrinsic",
    "import a_module_that_nobody_has": "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    "from tunegen.model import Launch, Plan\n\ndef plan(p): return Plan((Launch(len, (1,)),))": "len: AttributeError: ",
    "from types import SimpleNamespace as S\nfrom tunegen.model import Launch, Plan\n"
    "kernel = S(__name__='kernel', arg_names=['x_ptr', 'COLOUR'], params=[])\n"
    "def plan(p): return Plan((Launch(kernel, (1,)),))": "kernel: nothing gives its parameter 'COLOUR'",
}


def broken(text, number):
    return replace(SOURCE, template=f"broken_{number}", text=text)


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_template_that_raises_does_not_compile(build, number, monkeypatch):
    text, words = list(BROKEN.items())[number]
    monkeypatch.setattr(launch, "launches_directly", lambda: False)
    with pytest.raises(CompileError, match=rf"^broken_{number}\.py\.jinja: {re.escape(words)}"):
        Variant(broken(text, number), CONFIG, {"N": 256}, "fp32", torch.device("cpu"), 1)(4, {"x_ptr": torch.ones(4)})
    assert not [name for name in sys.modules if name.startswith("tunegen_kernels.broken_0")]


@pytest.mark.interpreter
@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_op_runs_in_torch_where_a_template_raises(build, monkeypatch, caplog, number):
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(rendering, "rendering", lambda *_, **__: broken(list(BROKEN)[number], number))
    said = said_while_torch_answers(caplog)
    assert all(f"broken_{number}.py.jinja" in s for s in said)


HANGING = {
    "a plan": "def plan(p):\n    while True:\n        pass\n",
    "an import": "import time\nwhile True:\n    time.sleep(1)\n",
}


@pytest.mark.parametrize("what", HANGING)
def test_template_that_hangs_costs_its_deadline_once(build, what, monkeypatch):
    """As a candidate of a sweep, which asks every config of it."""
    monkeypatch.setattr(plans, "PLAN_SECONDS", 0.2)
    monkeypatch.setattr(plans, "_hung", set())
    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    source = replace(SOURCE, template="hanging", text=HANGING[what])
    with pytest.raises(CompileError, match=r"^hanging\.py\.jinja: TimeoutError: no plan within 0\.2 s"):
        plans.plan_of(source, PROBLEM, CONFIG, H200)
    monkeypatch.setattr(plans, "PLAN_SECONDS", 1e6)
    with pytest.raises(PlanError, match=r"^hanging\.py\.jinja: its plan has hung before$"):
        plans.plan_of(source, PROBLEM, CONFIG, H200)
    sound = replace(source, op="add_rms_norm", text=SOURCE.text)
    assert plans.plan_of(sound, PROBLEM, CONFIG, H200).launches, "a template of that name of another op is another"
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == pytest.approx(timer, abs=5), "pytest's own deadline goes on"


def test_template_that_cannot_open_its_own_file_is_no_fault_of_the_build_folder(build):
    source = replace(SOURCE, template="opening", text="open('/no/such/table')\n")
    with pytest.raises(CompileError, match=r"^opening\.py\.jinja: FileNotFoundError: .*/no/such/table"):
        load(source)


# Triton's compile cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiled():
    return compile_candidate(SPEC, PROBLEM, CONFIG, H200)


@pytest.mark.compiler
def test_compile_cache_that_is_a_file_is_an_error_with_path_and_remedy(cache):
    cache.write_text("mine")
    with pytest.raises(
        BuildError, match=rf"forward_single_block into {cache}: .*Not a directory.*set TRITON_CACHE_DIR"
    ):
        compiled()
    assert cache.read_text() == "mine"


@pytest.mark.compiler
def test_full_compile_cache_is_an_error_with_path_and_remedy(cache, monkeypatch):
    """That error of the system names no file."""
    from triton.runtime.cache import FileCacheManager

    with monkeypatch.context() as disk:
        disk.setattr(FileCacheManager, "put", full)
        with pytest.raises(BuildError) as caught:
            compiled()
    assert str(caught.value) == (
        f"cannot compile forward_single_block into {cache}: [Errno 28] No space left on device; "
        "free space there or set TRITON_CACHE_DIR"
    )
    assert compiled().registers > 0, "and goes on once there is space"


@pytest.mark.compiler
def test_command_says_of_the_compile_cache_in_one_line_and_blames_no_candidate(cache, tmp_path):
    cache.write_text("mine")
    found = process(*SWEEP, "--rows", "4", "--db", tmp_path / "tune.db")
    assert found.returncode == 2
    (told,) = found.stderr.splitlines()
    assert told.startswith(f"tunegen: cannot compile forward_single_block into {cache}: ")
    assert told.endswith("; free space there or set TRITON_CACHE_DIR")
    with Store.read(tmp_path / "tune.db") as store:
        assert store.trials() == []
