"""What a measuring process loads before it is asked for anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

from tunegen import ahead, paths
from tunegen.ahead import NICE, Ahead, compiling_here

LOADS = """
import json, sys, warnings
from tunegen import ahead
ahead.load_autograd_quietly = lambda: None  # Triton's driver is not here
ahead.load_compiler()
import torch
loaded = set(sys.modules)
inductor = torch._inductor.async_compile.AsyncCompile.process_pool.cache_info().currsize
x = torch.ones(4, 64, requires_grad=True)
torch.compile(lambda x: x * x.mean(), backend="aot_eager_decomp_partition")(x).sum().backward()
parts = ("torch._dynamo", "torch._inductor", "sympy")
late = sorted(name for name in set(sys.modules) - loaded if name.startswith(parts))
print(json.dumps({"late": late, "pools": inductor, "cuda": torch.cuda.is_initialized()}))
"""


def test_compiler_is_loaded_without_a_pool_and_without_a_gpu():
    """In a fresh process: in this one all of it may be there."""
    environment = {**os.environ, "PYTHONPATH": str(paths.PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", LOADS], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"late": [], "pools": 0, "cuda": False}


def test_inductor_compiles_in_this_process_and_no_longer_than_asked():
    import torch._inductor.config as config

    before = config.compile_threads
    with compiling_here():
        assert config.compile_threads == 1
    assert config.compile_threads == before


def test_inductor_leaves_tritons_cache_folder_where_it_was(monkeypatch):
    """It sets the variable for the whole process as soon as it compiles, and every kernel of a sweep would be compiled
    again."""
    from triton import knobs

    for usual in (None, "/usual"):
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        if usual:
            monkeypatch.setenv("TRITON_CACHE_DIR", usual)
        before = knobs.cache.dir
        with compiling_here():
            os.environ["TRITON_CACHE_DIR"] = "/tmp/torchinductor/triton"
        assert os.environ.get("TRITON_CACHE_DIR") == usual
        assert knobs.cache.dir == before


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
def test_thread_yields_to_others_and_the_process_stays_as_it_was():
    found = []
    Ahead(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())), NICE).join()
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert found == [max(here, NICE)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == here


def test_what_cannot_be_loaded_costs_nothing():
    def fail():
        raise ImportError("moved elsewhere")

    Ahead(fail).join()


def test_autograd_is_loaded_where_triton_has_no_driver(monkeypatch):
    ahead.load_autograd_quietly()
    assert "torch.fx.experimental.symbolic_shapes" in sys.modules
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
