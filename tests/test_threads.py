"""Eight threads that make the first call of a kind at the same time: right values, one choice, nothing told twice.

On the CPU kernels are stand-ins that take a while to be made; on a GPU they are real, in a fresh process with nothing
compiled.
"""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, OP_MODULE, Place, assert_right, draw, error, exact, run, weight_of

from tunegen import add_rms_norm, dispatch, launch, lookup, once, plans, reference, render, rms_norm
from tunegen.errors import CompileError
from tunegen.ops import notes
from tunegen.silicon import of_arch

THREADS = 8
HIDDEN = 64


def at_once(function, arguments=range(THREADS)):
    """What `function` returns of each argument, from threads that all start together and take turns often."""
    start, before = threading.Barrier(THREADS), sys.getswitchinterval()

    def one(argument):
        start.wait(60)
        return function(argument)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(one, arguments))
    finally:
        sys.setswitchinterval(before)


class Slow(set):
    """A set that other threads get a turn behind."""

    def __contains__(self, what):
        found = super().__contains__(what)
        time.sleep(0.005)
        return found


class StandIn:
    """In place of a bound kernel: torch operators that write to the tensors that are given."""

    def __init__(self, problem, offset):
        self.problem, self.offset, self.calls = problem, offset, 0

    def __call__(self, rows, given):
        self.calls += 1
        x, w, eps = given["x_ptr"].reshape(-1, HIDDEN), given["w_ptr"], given["eps"]
        if self.problem.direction == "forward":
            total = x + given["residual_ptr"].reshape(-1, HIDDEN) if "residual_ptr" in given else x
            y, rstd, _ = reference.forward(total, w, eps, self.offset, None)
            written = {"y_ptr": y, "sum_ptr": total, "rstd_ptr": rstd}
        else:
            dx, dw = reference.backward(given["dy_ptr"].reshape(-1, HIDDEN), x, w, eps, self.offset, None)
            written = {"dx_ptr": dx, "dw_ptr": dw}
        for name in written.keys() & given.keys():
            given[name].copy_(written[name].reshape(given[name].shape))


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """CPU tensors are answered by `StandIn`s of a GPU that is not there; all that were made."""
    made, key_of = [], OP_MODULE.key_of

    def bind(choice, save_rstd, offset, nested, accumulate_dw):
        time.sleep(0.01)
        made.append(StandIn(choice.problem, offset))
        return made[-1]

    monkeypatch.setenv("TUNEGEN_DB", str(tmp_path / "tune.db"))
    monkeypatch.setattr(OP_MODULE, "has_kernels", lambda x, *others: x.numel() > 0)
    monkeypatch.setattr(OP_MODULE, "key_of", lambda *args, **named: key_of(*args, **named)._replace(device=0))
    monkeypatch.setattr(dispatch, "silicon_of", lambda index: time.sleep(0.01) or of_arch("sm_90"))
    monkeypatch.setattr(dispatch.Choice, "_bind", bind)
    monkeypatch.setattr(launch, "launches_directly", lambda: False)  # a `StandIn` has no short way
    dispatch.forget()
    yield made
    dispatch.forget()


def one_shape(_):
    return 6


def many_shapes(thread):
    return 2 ** (thread + 1)


@pytest.mark.parametrize("rows_of", [one_shape, many_shapes])
def test_first_calls_of_many_threads(stand_ins, rows_of, caplog):
    caplog.set_level(logging.INFO, "tunegen")

    def call(thread):
        rows = rows_of(thread)
        x, dy = draw(rows, HIDDEN, seed=thread), draw(rows, HIDDEN, seed=thread + 50)
        return x, dy, run(x, weight_of(HIDDEN), dy)

    for x, dy, got in at_once(call):
        assert_right(got, exact(x, weight_of(HIDDEN), dy), x, weight_of(HIDDEN))
    used = [one for one in stand_ins if one.calls]
    kinds = len({rows_of(thread) for thread in range(THREADS)})
    assert len(used) == len(dispatch._choices) == 2 * kinds, "one kernel for each kind and direction"
    assert sum(one.calls for one in used) == 2 * THREADS
    assert len(caplog.records) == 2 * kinds, "one line for each"


def test_first_calls_of_the_fused_addition(stand_ins):
    x, residual, w = draw(6, HIDDEN), draw(6, HIDDEN, seed=1), weight_of(HIDDEN)
    right = exact(x + residual, w, x).y
    for y, total in at_once(lambda _: add_rms_norm(x, residual, w)):
        assert error(y, right) <= CPU.allowed(x.dtype, x.dtype)
        assert torch.equal(total, x + residual)
    assert len([one for one in stand_ins if one.calls]) == 1


def test_what_does_not_run_is_told_once(stand_ins, monkeypatch, caplog):
    """All threads had the same choice when it failed; the next rung answers them all."""

    def fail(choice, *_):
        time.sleep(0.01)
        raise CompileError("out of shared memory")

    monkeypatch.setattr(dispatch.Choice, "_bind", fail)
    monkeypatch.setattr(dispatch, "_demoted", Slow())
    x, w = draw(6, HIDDEN), weight_of(HIDDEN)
    right = exact(x, w, x).y
    for y in at_once(lambda _: rms_norm(x, w)):
        assert error(y, right) <= CPU.allowed(x.dtype, x.dtype)
    (record,) = caplog.records
    assert "does not run here (out of shared memory)" in record.getMessage()


def test_copies_of_nested_rows_are_told_once(stand_ins, monkeypatch, caplog):
    bind = dispatch.Choice._bind

    def fail(choice, save_rstd, offset, nested, accumulate_dw):
        if nested:
            time.sleep(0.01)
            raise CompileError("no such rendering")
        return bind(choice, save_rstd, offset, nested, accumulate_dw)

    monkeypatch.setattr(dispatch.Choice, "_bind", fail)
    monkeypatch.setattr(dispatch, "_copying", Slow())
    x, w = draw(2, 3, 4 * HIDDEN).view(2, 3, 4, HIDDEN).transpose(1, 2), weight_of(HIDDEN)
    right = exact(x, w, x).y
    for y in at_once(lambda _: rms_norm(x, w)):
        assert error(y, right) <= CPU.allowed(x.dtype, x.dtype)
    (record,) = caplog.records
    assert "copying them" in record.getMessage()


SAID = {
    "notes": (notes, "_told", lambda: notes.note_torch("invariant", "x is on cpu")),
    "database": (lookup, "_warned", lambda: lookup._warn_once(Path("tune.db"), "database %s", "tune.db")),
    "build folder": (render, "_told", lambda: render._private_folder("read-only")),
}


@pytest.mark.parametrize(("module", "seen", "say"), SAID.values(), ids=SAID)
def test_what_is_said_once_is_said_by_one_thread(module, seen, say, monkeypatch, caplog):
    monkeypatch.setattr(module, seen, Slow())
    at_once(lambda _: say())
    assert len(caplog.records) == 1


def test_an_unknown_triton_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(launch, "_told", Slow())
    monkeypatch.setattr(launch, "DIRECT_LAUNCH", ())
    monkeypatch.setattr(launch.paths, "interpreted", lambda: False)
    assert at_once(lambda _: launch.launches_directly.__wrapped__()) == [False] * THREADS
    assert len(caplog.records) == 1


def test_a_child_of_a_fork_can_speak_where_another_thread_was_speaking():
    code = """
    import os, threading
    from tunegen import once
    once._lock.acquire()
    child = os.fork()
    if child == 0:
        os._exit(0 if once.first(set(), "said") else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "0"
    assert once.first(set(), "said")


def test_a_file_that_is_no_kernel_is_the_same_error_for_all(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import time\ntime.sleep(0.02)\nraise ValueError('no kernel')\n")

    def load(_):
        with pytest.raises(ValueError, match="no kernel"):
            plans._import(path)

    at_once(load)


@pytest.mark.compiler
def test_a_kernel_is_compiled_by_many_threads(monkeypatch):
    """Each may compile it, and all launch the one that came first; another one would be unloaded behind its launch."""
    from test_launch import FORWARD, arguments_of, bound_variant

    compiled, lock = [], threading.Lock()

    def make(*_):
        time.sleep(0.01)
        with lock:
            compiled.append(object())
            return compiled[-1]

    monkeypatch.setattr(launch, "compile_launch", make)
    monkeypatch.setattr(launch, "load_binary", lambda one: time.sleep(0.001))
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: None))
    monkeypatch.setattr(importlib.import_module("triton.runtime.driver"), "driver", driver)
    variant = bound_variant(FORWARD, "rms_norm/forward_single_block")
    (one,) = variant.plan(FORWARD.rows).launches
    given = arguments_of(FORWARD)
    found = at_once(lambda _: variant._ready(one, given).compiled)
    assert len({id(kernel) for kernel in found}) == 1
    assert found[0] in compiled


FRESH = """
import json, sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
from tunegen import add_rms_norm, dispatch, rms_norm

start = threading.Barrier(8)
same = sys.argv[1] == "same"

def call(thread):
    rows = 100 if same else 2 ** (thread + 4)
    generator = torch.Generator().manual_seed(thread)
    x, residual, dy = (torch.randn(rows, 2048, generator=generator).cuda() for _ in range(3))
    w = torch.ones(2048, device="cuda")
    start.wait(60)
    found = []
    for op in (rms_norm, lambda x, w: add_rms_norm(x, residual, w)[0]):
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = op(*leaves)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    worst = 0.0
    for op, results in zip((lambda x: x, lambda x: x + residual), found):
        wide, weight = op(x).double().requires_grad_(), w.double().requires_grad_()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight
        right = [y.detach(), *torch.autograd.grad(y, (wide, weight), dy.double())]
        for got, want in zip(results, right):
            worst = max(worst, float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()))
    return worst

with ThreadPoolExecutor(8) as pool:
    worst = max(pool.map(call, range(8)))
print(json.dumps([worst, len(dispatch.answers()), "torch" in dispatch.answers().values()]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", ["same", "different"])
def test_first_calls_of_many_threads_on_a_gpu_with_nothing_compiled(shapes, tmp_path, monkeypatch):
    """Nothing is written to stderr, where warnings and errors go."""
    monkeypatch.setenv("TUNEGEN_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("TUNEGEN_DB", str(tmp_path / "tune.db"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    done = subprocess.run([sys.executable, "-c", FRESH, shapes], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    worst, answers, torchs = json.loads(done.stdout)
    assert worst <= 16 * torch.finfo(torch.float32).eps
    assert answers >= 4
    assert not torchs
    assert "does not run" not in done.stderr, done.stderr


@pytest.mark.gpu
def test_a_thread_whose_first_use_of_the_gpu_is_a_call():
    """Its memory comes from torch's cache, so that nothing else has made the GPU's context the thread's."""
    x, dy = draw(6, 1920).cuda(), draw(6, 1920, seed=1).cuda()
    w = weight_of(1920).cuda()
    run(x, w, dy)  # compiled, and its memory is in torch's cache
    torch.cuda.synchronize()
    found = []
    thread = threading.Thread(target=lambda: found.append(run(x, w, dy)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert_right(*found, exact(x, w, dy), x, w, Place("cuda"))
