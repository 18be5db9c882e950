"""Marks that say what a test needs, and folders of the session's own.

Triton reads TRITON_INTERPRET once, when it is imported, and cannot compile afterwards: so the interpreter's tests and
the compiler's run in two processes, and nothing here imports triton unless it is to interpret.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile

import pytest

from tunegen import paths

FOLDERS = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """No test reads or writes the user's database or rendered kernels; a child process inherits these."""
    config.stash[FOLDERS] = tempfile.mkdtemp(prefix="tunegen-tests-")
    os.environ["TUNEGEN_BUILD"] = os.path.join(config.stash[FOLDERS], "build")
    os.environ["TUNEGEN_DB"] = os.path.join(config.stash[FOLDERS], "tune.db")
    # Where a script starts the tests in the background, they and all their children would ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if paths.interpreted():  # before any kernel in Gluon is imported
        import gluon_interpreted

        gluon_interpreted.install()


@pytest.fixture(autouse=True)
def _no_short_way() -> None:
    """What an earlier test called takes no way past what this one puts in place of a part of the long way."""
    if dispatch := sys.modules.get("tunegen.dispatch"):
        dispatch.quick = dispatch.Table()


@pytest.fixture(autouse=True)
def _no_index() -> None:
    """Nor does it find what an earlier test has put there, in a file."""
    for path in paths.build_folder().glob("index_*.json"):
        path.unlink(missing_ok=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[FOLDERS], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, missing in (("interpreter", _no_interpreter), ("compiler", _no_compiler), ("gpu", _no_gpu)):
            if item.get_closest_marker(name) and (reason := missing()):
                item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def _no_interpreter() -> str:
    if not paths.interpreted():
        return "needs TRITON_INTERPRET=1"
    old = importlib.metadata.version("triton").startswith("3.6.")
    return "the interpreter of Triton 3.6 cannot loop between tensors" if old else ""


@functools.cache
def _no_compiler() -> str:
    return "TRITON_INTERPRET is set: this process cannot compile" if paths.interpreted() else ""


@functools.cache
def _no_gpu() -> str:
    if paths.interpreted():
        return "TRITON_INTERPRET is set: kernels run on CPU tensors"
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA GPU"
