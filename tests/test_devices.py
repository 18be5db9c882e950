"""Several GPUs and streams (H15): each tensor is computed where it is, on the stream that is current there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Place, assert_right, draw, error, exact, run, same_bits, weight_of
from stored import keep
from test_dispatch import FIRST, H200, PROBLEM, SECOND, SPACE, timed

from tunegen import add_rms_norm, add_rms_norm_, dispatch, rms_norm
from tunegen.key import Key
from tunegen.silicon import of_arch

B200 = of_arch("sm_100")
BF16 = torch.bfloat16
CUDA = Place("cuda")
KEY = Key("rms_norm", "backward", PROBLEM.hidden, PROBLEM.rows, BF16, BF16, "fp32", False, True, 0)


# Which choice, on GPUs that are not there.


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Puts cards of one process there; what answers on each, asked in turns."""
    path = tmp_path / "tune.db"
    monkeypatch.setenv("TUNEGEN_DB", str(path))

    def answers(*silicons):
        monkeypatch.setattr(dispatch, "silicon_of", lambda index: silicons[index])
        dispatch.forget()
        found = [[dispatch.choose(KEY._replace(device=index)) for index in range(len(silicons))] for _ in range(2)]
        assert found[0] == found[1], "each keeps its own"
        assert [choice.device for choice in found[0]] == [torch.device("cuda", i) for i in range(len(silicons))]
        return [choice.config for choice in found[0]]

    yield path, answers
    dispatch.forget()


def test_h15_a_choice_tuned_on_one_card_answers_on_one_that_is_alike(cards):
    path, answers = cards
    keep(path, timed(FIRST, 10.0))
    alike = replace(H200, name="another name", memory_bytes=H200.memory_bytes - 2**20)
    assert answers(H200, alike) == [FIRST, FIRST]


@pytest.mark.parametrize(
    "other",
    [replace(H200, sms=H200.sms + 12), replace(H200, memory_clock_khz=2_619_000), B200],
    ids=["more multiprocessors", "slower memory", "another generation"],
)
def test_h15_a_choice_tuned_on_one_card_does_not_answer_on_another(cards, other):
    path, answers = cards
    keep(path, timed(FIRST, 10.0))
    own = SPACE.default(PROBLEM, other)
    assert own != FIRST
    assert SPACE.check(PROBLEM, other, FIRST) is None, "it could"
    assert answers(H200, other) == [FIRST, own]


def test_two_different_cards_each_get_what_was_measured_on_them(cards):
    path, answers = cards
    keep(path, timed(FIRST, 10.0), timed(SECOND, 20.0))
    keep(path, timed(SECOND, 10.0), timed(FIRST, 20.0), silicon=B200)
    assert answers(H200, B200) == [FIRST, SECOND]
    assert answers(B200, H200) == [SECOND, FIRST]
    label = replace(PROBLEM, rows=KEY.rows).label()
    assert dispatch.answers() == {label: SECOND.label(), f"{label} on cuda:1": FIRST.label()}


def test_two_different_cards_have_variants_for_their_own_multiprocessors(cards):
    path, answers = cards
    keep(path, timed(FIRST, 10.0))
    keep(path, timed(FIRST, 10.0), silicon=B200)
    assert answers(H200, B200) == [FIRST, FIRST]
    found = [dispatch.choose(KEY._replace(device=index)).variant(False, 0.0) for index in range(2)]
    assert [(one.sms, one.device.index) for one in found] == [(H200.sms, 0), (B200.sms, 1)]
    assert found[0].plan(PROBLEM.rows).launches[0].grid != found[1].plan(PROBLEM.rows).launches[0].grid


def test_a_card_on_which_a_choice_does_not_run_leaves_it_to_the_others(cards):
    path, answers = cards
    keep(path, timed(FIRST, 10.0), timed(SECOND, 20.0))
    assert answers(H200, H200) == [FIRST, FIRST]
    there = KEY._replace(device=1)
    dispatch.demote(there, dispatch.choose(there), RuntimeError("no room"))
    assert [dispatch.choose(KEY._replace(device=index)).config for index in range(2)] == [FIRST, SECOND]


# Two GPUs.


@pytest.fixture
def second():
    """The second GPU, while the first is the current one, as it still is afterwards."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    yield torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0


def tensors(rows, hidden, device, dtype=torch.float32, count=4):
    return [draw(rows, hidden, dtype=dtype, seed=seed).to(device) for seed in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_h15_a_tensor_on_another_gpu_than_the_current_one(second, dtype):
    """The kernel's first use is there; then one on the current GPU, and there again."""
    for device in (second, torch.device("cuda", 0), second):
        x, dy = tensors(40, 2112, device, dtype, 2)
        w = weight_of(2112).to(device)
        got = run(x, w, dy)
        assert_right(got, exact(x, w, dy), x, w, CUDA)
        assert {t.device for t in got} == {device}
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_h15_add_rms_norm_on_another_gpu(second):
    x, residual, dy, dsum = tensors(40, 2112, second)
    w = weight_of(2112).to(second)
    leaves = [t.detach().requires_grad_() for t in (x, residual, w)]
    y, total = add_rms_norm(*leaves)
    torch.autograd.backward((y, total), (dy, dsum))
    right = exact(x + residual, w, dy)
    found = (y.detach(), leaves[0].grad, leaves[1].grad, leaves[2].grad)
    for got, want in zip(found, (right.y, right.dx + dsum, right.dx + dsum, right.dw), strict=True):
        assert got.device == second
        assert error(got, want) <= CUDA.allowed(x.dtype, x.dtype)
    assert same_bits(total.detach(), x + residual)


@pytest.mark.gpu
def test_h15_results_in_place_on_another_gpu(second):
    x, residual = tensors(40, 2112, second, count=2)
    w, into = weight_of(2112).to(second), torch.empty_like(x)
    assert rms_norm(x, w, out=into) is into
    assert error(into, exact(x, w, x).y) <= CUDA.allowed(x.dtype, x.dtype)
    total = x + residual
    y, written = add_rms_norm_(x, residual, w)
    assert (y is x, written is residual) == (True, True)
    assert same_bits(written, total)
    assert error(y, exact(total, w, total).y) <= CUDA.allowed(x.dtype, x.dtype)


@pytest.mark.gpu
def test_h15_tensors_on_two_gpus_are_an_error_that_says_so(second):
    x, w = draw(4, 64).to("cuda:0"), weight_of(64).to(second)
    with pytest.raises(ValueError, match="x is on cuda:0 and weight on cuda:1; move one of them"):
        rms_norm(x, w)
    with pytest.raises(ValueError, match="x is on cuda:0 and residual on cuda:1; move one of them"):
        add_rms_norm(x, x.to(second))
    with pytest.raises(ValueError, match="x is on cuda:0 and out on cuda:1; move one of them"):
        rms_norm(x, out=torch.empty_like(x, device=second))


@pytest.mark.gpu
def test_h15_a_weight_on_the_gpu_and_x_on_the_cpu_are_an_error_that_says_so():
    with pytest.raises(ValueError, match="x is on cpu and weight on cuda:0; move one of them"):
        rms_norm(draw(4, 64), weight_of(64).to("cuda:0"))


@pytest.mark.gpu
def test_h15_a_stream_of_another_gpu(second):
    """What is current there counts, whichever GPU is current."""
    old, new, dy = tensors(40, 2112, second, count=3)
    w, x = weight_of(2112).to(second), old.clone()
    run(x, w, dy)  # compiled
    torch.cuda.synchronize(second)
    stream = torch.cuda.Stream(second)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        got = late(x, new, lambda: run(x, w, dy), second)
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert_right(got, exact(new, w, dy), x, w, CUDA)


# Streams of one GPU. `late` has x arrive on the current stream long after the calls are enqueued: a kernel on any other
# stream would read what was there before.

SLEEP = 100_000_000
"""Cycles, some 50 ms."""


def late(x, new, call, device="cuda"):
    with torch.cuda.device(device):
        torch.cuda._sleep(SLEEP)
    x.copy_(new)
    return call()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 4096])
def test_a_side_stream_is_the_one_that_kernels_run_on(rows):
    old, new, dy = tensors(rows, 2048, "cuda", BF16, 3)
    w, x = weight_of(2048, BF16).cuda(), old.clone()
    run(x, w, dy)  # compiled
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = late(x, new, lambda: run(x, w, dy))
    stream.synchronize()
    assert_right(got, exact(new, w, dy), x, w, CUDA)


@pytest.mark.gpu
def test_the_fused_addition_runs_on_the_side_stream_too():
    old, new, residual, dy = tensors(40, 2048, "cuda")
    w, x = weight_of(2048).cuda(), old.clone()

    def step():
        leaves = [t.detach().requires_grad_() for t in (x, residual, w)]
        y, total = add_rms_norm(*leaves)
        return [y.detach(), *torch.autograd.grad((y, total), (leaves[0], leaves[2]), (dy, dy))]

    step()  # compiled
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = late(x, new, step)
    stream.synchronize()
    right = exact(new + residual, w, dy)
    for value, want in zip(got, (right.y, right.dx + dy, right.dw), strict=True):
        assert error(value, want) <= CUDA.allowed(x.dtype, x.dtype)


@pytest.mark.gpu
def test_two_streams_at_once_share_no_workspace():
    """Many calls of both are under way together, and each backward has a workspace of its own."""
    w, streams = weight_of(2048).cuda(), [torch.cuda.Stream() for _ in range(2)]
    given = [[t.cuda() for t in (draw(4096, 2048, seed=s), draw(4096, 2048, seed=s + 9))] for s in range(2)]

    def step(x, dy):
        return run(x, w, dy, policy="deterministic")

    right = [step(*pair) for pair in given]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream, pair in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(step(*pair))
    torch.cuda.synchronize()
    for number, got in enumerate(found):
        assert all(map(same_bits, got, right[number % 2])), number


@pytest.mark.gpu
def test_backward_called_on_another_stream():
    """Autograd runs it on the stream of its forward, behind what made dy and before what reads the gradients."""
    x, old, new = tensors(40, 2048, "cuda", count=3)
    w, dy = weight_of(2048).cuda(), old.clone()
    run(x, w, dy)  # compiled
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
    with torch.cuda.stream(first):
        y = rms_norm(*leaves)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        gradients = late(dy, new, lambda: torch.autograd.grad(y, leaves, dy))
        read = [gradient.clone() for gradient in gradients]
    second.synchronize()
    right = exact(x, w, new)
    for got, want in zip(read, right[1:], strict=True):
        assert error(got, want) <= CUDA.allowed(x.dtype, x.dtype)
