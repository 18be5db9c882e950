"""The short way of a call on a GPU: the bits of the long way, on the right stream and device, with Triton's hooks."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import Place, assert_right, draw, exact, run, same_bits, weight_of
from torch.nn import functional as F

from tunegen import add_rms_norm, dispatch, prepared, rms_norm
from tunegen.model import rows_bucket

pytestmark = pytest.mark.gpu
CUDA = Place("cuda")
BF16 = torch.bfloat16


@pytest.fixture
def short(monkeypatch):
    """A list that grows by one in each call that takes the short way, forward or backward."""
    taken, stream = [], prepared.current_stream
    monkeypatch.setattr(prepared, "current_stream", lambda device: taken.append(True) or stream(device))
    return taken


def case(rows, hidden, dtype=BF16, weight_dtype=None):
    x, dy = (draw(rows, hidden, dtype=dtype, seed=seed, place=CUDA) for seed in (0, 2))
    return x, weight_of(hidden, weight_dtype or dtype, CUDA), dy


@pytest.mark.parametrize("policy", ["deterministic", "invariant"])
@pytest.mark.parametrize(
    ("rows", "hidden", "dtype", "weight_dtype", "contract"),
    [
        (16, 4096, BF16, BF16, {}),
        (1, 4096, BF16, BF16, {}),
        (3000, 128, BF16, BF16, {}),
        (7, 5120, BF16, torch.float32, {"casting": "llama"}),
        (300, 2560, torch.float16, torch.float16, {"offset": 1.0}),
        (5, 100, torch.float32, torch.float32, {}),
        (33, 1000, torch.float64, torch.float64, {}),
        (2, 65536, BF16, BF16, {}),
        (2000, 16384, BF16, BF16, {}),
    ],
)
def test_the_short_way_gives_the_bits_of_the_long_one(rows, hidden, dtype, weight_dtype, contract, policy, short):
    x, w, dy = case(rows, hidden, dtype, weight_dtype)
    dispatch.forget()
    for weight in (w, None):
        long, again = (run(x, weight, dy, policy=policy, **contract) for _ in range(2))
        plain = [rms_norm(x, weight, policy=policy, **contract) for _ in range(2)]
        out = rms_norm(x, weight, policy=policy, out=torch.empty_like(x), **contract)
        for a, b in zip(long, again, strict=True):
            assert (a is None and b is None) or same_bits(a, b)
        assert same_bits(plain[0], plain[1])
        assert same_bits(plain[0], out)
    if "torch" not in dispatch.answers().values():
        assert short == [True] * 8, "of each weight one forward and backward, one without a gradient, one with out"


def test_each_call_but_the_first_takes_the_short_way(short):
    x, w, dy = case(16, 4096)
    for turn in range(3):
        run(x, w, dy)
        assert short == [True] * (2 * turn)
    rms_norm(x, w), rms_norm(x, w)
    assert short == [True] * 5


def test_outputs_are_like_those_of_the_long_way(short):
    x, w, dy = case(6, 1024)
    x, dy = x.view(2, 3, 1024), dy.view(2, 3, 1024)
    long, again = (run(x, w, dy) for _ in range(2))
    assert len(short) == 2
    for a, b in zip(long, again, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_outputs_of_the_short_way_belong_to_the_mode_of_the_call(short):
    x, w, _ = case(6, 1024)
    with torch.inference_mode():
        long, again = (rms_norm(x, w) for _ in range(2))
    assert len(short) == 1
    assert long.is_inference()
    assert again.is_inference()
    assert same_bits(long, again)


def test_misaligned_and_strided_views_are_right(short):
    w, dy = weight_of(128, BF16, CUDA), draw(6, 128, dtype=BF16, seed=2, place=CUDA)
    buffer = draw(6 * 128 + 8, dtype=BF16, place=CUDA)
    usual = buffer[:768].view(6, 128)
    run(usual, w, dy), run(usual, w, dy)
    taken = len(short)
    views = [buffer[1:769].view(6, 128), draw(6, 256, dtype=BF16, place=CUDA)[:, :128], usual.t().contiguous().t()]
    for x in views:
        for _ in range(2):
            assert_right(run(x, w, dy), exact(x, w, dy), x, w, CUDA)
    assert_right(run(usual, w, dy.t().contiguous().t()), exact(usual, w, dy), usual, w, CUDA)
    assert len(short) == taken + 1, "none of the views but the last forward, whose x is the usual one"


def test_hooks_of_triton_see_each_launch(short):
    from triton import knobs

    x, w, dy = case(16, 1024)
    first = [run(x, w, dy, policy="deterministic") for _ in range(2)][1]
    entered, left = [], []
    knobs.runtime.launch_enter_hook.add(entered.append)
    knobs.runtime.launch_exit_hook.add(left.append)
    try:
        taken = len(short)
        seen = run(x, w, dy, policy="deterministic")
    finally:
        knobs.runtime.launch_enter_hook.remove(entered.append)
        knobs.runtime.launch_exit_hook.remove(left.append)
    assert len(short) == taken
    assert len(entered) == len(left) >= 2
    assert all(same_bits(a, b) for a, b in zip(first, seen, strict=True))
    run(x, w, dy, policy="deterministic")
    assert len(short) == taken + 2
    assert len(entered) == len(left)


def test_the_current_stream_is_used(short):
    """It is still busy when the call is made; another stream would read x as it was."""
    x, w, _ = case(64, 2048)
    rms_norm(x, w), rms_norm(x, w)
    other = draw(64, 2048, dtype=BF16, seed=5, place=CUDA)
    want = rms_norm(other, w)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.copy_(other)
        y = rms_norm(x, w)
    side.synchronize()
    assert short
    assert same_bits(y, want)


def test_it_is_captured_and_replayed(short):
    x, w, _ = case(16, 1152)
    rms_norm(x, w), rms_norm(x, w)
    taken, graph = len(short), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x, w)
    assert len(short) == taken + 1
    x.copy_(draw(16, 1152, dtype=BF16, seed=7))
    graph.replay()
    assert same_bits(y, rms_norm(x, w))


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_tensors_of_another_device_than_the_current_one(short):
    x, w, dy = case(16, 4096)
    here = [run(x, w, dy, policy="deterministic") for _ in range(2)][1]
    there = [t.to("cuda:1") for t in (x, w, dy)]
    assert torch.cuda.current_device() == 0
    taken = len(short)
    for turn in range(2):
        found = run(*there, policy="deterministic")
        assert len(short) == taken + 2 * turn, "the other device is of another kind"
        assert all(t.device.index == 1 for t in found)
        assert all(same_bits(a, b.to("cuda:0")) for a, b in zip(here, found, strict=True))
    assert torch.cuda.current_device() == 0


def test_the_switch_holds_at_once(short, monkeypatch):
    x, w, _ = case(16, 4096)
    rms_norm(x, w), rms_norm(x, w)
    taken = len(short)
    monkeypatch.setenv("TUNEGEN_DISABLE", "1")
    assert same_bits(rms_norm(x, w), F.rms_norm(x, (4096,), w, 1e-6))
    assert len(short) == taken == 1


def test_offloaded_tensors_come_back(short):
    x, w, dy = case(16, 4096)
    usual = [run(x, w, dy, policy="deterministic") for _ in range(2)][1]
    with torch.autograd.graph.save_on_cpu():
        found = run(x, w, dy, policy="deterministic")
    assert all(same_bits(a, b) for a, b in zip(usual, found, strict=True))


def test_threads_with_streams_of_their_own():
    x, w, dy = case(64, 4096)
    want = [run(x, w, dy, policy="deterministic") for _ in range(2)][1]
    torch.cuda.synchronize()
    failed = []

    def calls():
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(100):
                    found = run(x, w, dy, policy="deterministic")
                stream.synchronize()
                failed.extend(name for name, a, b in zip(want._fields, want, found, strict=True) if not same_bits(a, b))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert failed == []


def test_ten_thousand_row_counts():
    x, w = draw(10_000, 192, dtype=BF16, place=CUDA), weight_of(192, BF16, CUDA)
    dispatch.forget()
    kernels = {}

    def loaded():
        variants = [one for choice in dispatch._choices.values() for one in choice._variants.values()]
        return sum(len(one.compiled) for one in variants)

    for rows in range(1, 10_001):
        rms_norm(x[:rows], w)
        bucket = rows_bucket(rows)
        kernels.setdefault(bucket, loaded())
        assert kernels[bucket] == loaded(), f"compiled behind the first of its bucket, at {rows} rows"
    assert len(dispatch.quick) == len(kernels) == 15


@pytest.mark.parametrize("sum_in_fp32", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), [(16, 4096), (2000, 2048)])
def test_the_fused_op_gives_the_bits_of_its_long_way(rows, hidden, sum_in_fp32, short):
    x, w, dy = case(rows, hidden)
    residual, named = draw(rows, hidden, dtype=BF16, seed=3, place=CUDA), {"policy": "deterministic"}
    named["sum_in_fp32"] = sum_in_fp32
    dispatch.forget()

    def step():
        leaves = [t.detach().requires_grad_() for t in (x, residual, w)]
        y, total = add_rms_norm(*leaves, **named)
        return y.detach(), total.detach(), *torch.autograd.grad([y, total], leaves, [dy, residual])

    long, again = step(), step()
    plain = [add_rms_norm(x, residual, w, **named) for _ in range(2)]
    into = add_rms_norm(x, residual, w, out=(torch.empty_like(x), torch.empty_like(x)), **named)
    for one, other in ((long, again), plain, (plain[0], into)):
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))
    if "torch" not in dispatch.answers().values():
        assert short == [True] * 4
