"""Processes that were forked or spawned from one that has used the op: loaders of data, servers, launchers.

What a fork of a process that has CUDA under way may not do is CUDA's rule; tests/test_imports.py shows that importing
and calling on the CPU does not get it under way.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
from helpers import CPU, Place, assert_right, draw, exact, run, weight_of

from tunegen import dispatch

HIDDEN = 1984


def fresh(code: str, **environment: str) -> str:
    """What a process of its own prints; forking is what its tests are about, not a fault."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOADER = """
import torch
from torch.utils.data import DataLoader
from tunegen import RMSNorm, rms_norm

torch.set_num_threads(1)
w = torch.rand(64).requires_grad_()
rms_norm(torch.ones(2, 64), w).sum().backward()  # the parent has been through forward and backward

class Normed(torch.utils.data.Dataset):
    norm = RMSNorm(64)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = torch.full((3, 64), index + 1.0).requires_grad_()
        y = self.norm(x)
        y.sum().backward()
        return y.detach(), x.grad

def collate(rows):
    y, dx = map(torch.stack, zip(*rows))
    return rms_norm(y), dx

loader = DataLoader(Normed(), batch_size=4, num_workers=2, multiprocessing_context="fork", collate_fn=collate)
found = list(loader)
assert len(found) == 3
for y, dx in found:
    assert torch.allclose(y, torch.ones(4, 3, 64))  # of equal elements: each is its own root mean square
    assert float(dx.abs().max()) < 1e-5
print("right")
"""


def test_workers_of_a_data_loader_are_forked():
    assert fresh(LOADER) == "right"


def here(seed: int, device: str = "cpu") -> bool:
    """In a process of a pool: a call and its gradients, held against float64; whether kernels answered."""
    place = CPU if device == "cpu" else Place("cuda")
    x, dy = draw(5, HIDDEN, seed=seed).to(device), draw(5, HIDDEN, seed=seed + 1).to(device)
    w = weight_of(HIDDEN).to(device)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w, place)
    found = dispatch.answers()
    return len(found) == 2 and "torch" not in found.values()


def test_processes_that_were_spawned():
    assert here(0) is False
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(here, range(4))) == [False] * 4


@pytest.fixture
def nothing_compiled(tmp_path, monkeypatch):
    folders = {"TUNEGEN_BUILD": "build", "TUNEGEN_DB": "tune.db", "TRITON_CACHE_DIR": "triton"}
    for name, folder in folders.items():
        monkeypatch.setenv(name, str(tmp_path / folder))


@pytest.mark.gpu
def test_processes_that_were_spawned_compile_the_same_kernels_at_once(nothing_compiled):
    """This process has CUDA under way already."""
    assert here(0, "cuda") or dispatch.answers()
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(here, range(3), ["cuda"] * 3)) == [True] * 3


FORKS = """
import os, torch
from tunegen import add_rms_norm, dispatch, rms_norm

x = torch.randn(6, 1984, requires_grad=True)
w = torch.rand(1984, requires_grad=True)
assert rms_norm(x, w).requires_grad  # a backward here would start threads of torch's, which forbid forks
assert not torch.cuda.is_initialized()

def child():
    rms_norm(x, w).sum().backward()
    right = [x.grad, w.grad]
    leaves = [t.detach().cuda().requires_grad_() for t in (x, w)]
    rms_norm(*leaves).sum().backward()
    y, total = add_rms_norm(*[leaves[0].detach()] * 2, leaves[1].detach())
    near = all(torch.allclose(t.grad.cpu(), want, rtol=1e-5, atol=1e-5) for t, want in zip(leaves, right))
    same = torch.equal(total, 2 * leaves[0]) and torch.allclose(y, rms_norm(total, leaves[1]), rtol=1e-5, atol=1e-5)
    answered = dispatch.answers().values()
    return near and same and len(answered) >= 3 and "torch" not in answered

children = []
for _ in range(3):
    child_id = os.fork()
    if child_id == 0:
        try:
            os._exit(0 if child() else 3)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(4)
    children.append(child_id)
print(*[os.waitstatus_to_exitcode(os.waitpid(child_id, 0)[1]) for child_id in children])
"""


@pytest.mark.gpu
def test_children_of_a_fork_use_the_gpu_at_once(nothing_compiled):
    """Their parent has used the op on the CPU, forward, and compiled nothing."""
    assert fresh(FORKS) == "0 0 0"
