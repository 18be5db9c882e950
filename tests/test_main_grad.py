"""Backward that adds dw to a buffer: values, bits, what autograd does with it, and what is refused."""

from __future__ import annotations

import pytest
import torch
from helpers import CPU, OP_MODULE, Place, draw, error, exact, places, same_bits, weight_of
from torch.utils.checkpoint import checkpoint

from tunegen import add_rms_norm, dispatch, rms_norm

place = places("cpu", "interpreter", "cuda")

HIDDEN = 100
ACCUMULATE = {torch.float64: torch.float64}


def case(place, dtype=torch.float32, w_dtype=None, rows=6, hidden=HIDDEN):
    """x, the weight, dy, and a buffer that holds something."""
    x, dy = (draw(rows, hidden, dtype=dtype, seed=seed, place=place) for seed in (0, 2))
    w = weight_of(hidden, w_dtype or dtype, place).requires_grad_()
    return x, w, dy, draw(hidden, seed=3, dtype=ACCUMULATE.get(dtype, torch.float32), place=place)


def fused(x, w, **contract):
    """The norm of x + 0, as the residual's op computes it, whose other result is used too."""
    y, total = add_rms_norm(x, torch.zeros_like(x), w, **contract)
    return y + 0 * total


NORMS = {"rms_norm": rms_norm, "add_rms_norm": fused}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


@each_norm
@pytest.mark.parametrize("casting", ["fp32", "llama"])
@pytest.mark.parametrize(
    ("dtype", "w_dtype"),
    [(torch.float16, None), (torch.float32, None), (torch.float64, None), (torch.float16, torch.float32)],
    ids=str,
)
def test_dw_is_added_to_what_is_there_and_not_rounded(place, norm, dtype, w_dtype, casting):
    x, w, dy, buffer = case(place, dtype, w_dtype)
    before = buffer.clone()
    x.requires_grad_()
    norm(x, w, casting=casting, main_grad=buffer).backward(dy)
    right = exact(x, w, dy, casting=casting)
    assert w.grad is None
    # An x-hat at a rounding boundary may fall on its other side; else nothing is rounded to 16 bits.
    slack = torch.finfo(dtype).eps if casting == "llama" else 0.0
    assert error(buffer, before.double() + right.dw) <= 32 * torch.finfo(buffer.dtype).eps + slack
    assert error(x.grad, right.dx) <= 2 * place.allowed(dtype, dtype)


@each_norm
def test_bf16_sums_are_not_lost_to_rounding(norm):
    x, w, dy, buffer = case(CPU, torch.bfloat16)
    before = buffer.clone()
    norm(x, w, main_grad=buffer).backward(dy)
    assert error(buffer, before.double() + exact(x, w, dy).dw) <= 1e-6


@each_norm
def test_the_bits_are_those_of_an_fp32_gradient_added(place, norm):
    """Of a weight in fp32, whose gradient is not rounded either."""
    x, w, dy, buffer = case(place, torch.float16, torch.float32)
    want = buffer.clone()
    norm(x, w).backward(dy)
    want += w.grad
    w.grad = None
    norm(x, w, main_grad=buffer).backward(dy)
    assert same_bits(buffer, want)


@each_norm
@pytest.mark.parametrize("policy", ["deterministic", "invariant"])
def test_policies_hold_for_the_buffer(place, norm, policy):
    x, w, dy, buffer = case(place, torch.float16)
    aligned, shifted = buffer.clone(), torch.empty(HIDDEN + 1, device=buffer.device)[1:].copy_(buffer)
    for into in (aligned, shifted):
        norm(x, w, policy=policy, main_grad=into).backward(dy)
    assert same_bits(aligned, shifted)
    assert not same_bits(aligned, buffer)


@each_norm
def test_each_backward_adds_once_more(place, norm):
    x, w, dy, buffer = case(place)
    buffer.zero_()
    y = norm(x, w, main_grad=buffer)
    y.backward(dy, retain_graph=True)
    once = buffer.clone()
    y.backward(dy)
    assert same_bits(buffer, 2 * once)
    norm(x, w, main_grad=buffer).backward(dy)
    assert same_bits(buffer, 2 * once + once)
    assert w.grad is None


@each_norm
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_call_adds_once(place, norm, reentrant):
    x, w, dy, buffer = case(place)
    x.requires_grad_()  # reentrant checkpoints want one input that does
    want = buffer.clone()
    norm(x, w, main_grad=want).backward(dy)
    checkpoint(lambda x: norm(x, w, main_grad=buffer), x, use_reentrant=reentrant).backward(dy)
    assert same_bits(buffer, want)


@each_norm
def test_two_norms_may_share_a_buffer_and_a_graph(place, norm):
    """As a layer that is called twice: the second call's backward runs first and changes what the first one keeps."""
    x, w, dy, buffer = case(place)
    buffer.zero_()
    y = norm(norm(x, w, main_grad=buffer), w, main_grad=buffer)
    y.backward(dy)
    norm(norm(x, w), w).backward(dy)
    assert error(buffer, w.grad.double()) <= 1e-5


@each_norm
def test_a_backward_that_has_the_buffer_saved_notices(place, norm):
    x, w, dy, buffer = case(place)
    other = torch.ones_like(buffer, requires_grad=True)
    product = (other * buffer).sum()
    norm(x, w, main_grad=buffer).backward(dy)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@each_norm
def test_a_gradient_to_be_differentiated_is_refused(place, norm):
    x, w, _, buffer = case(place)
    x.requires_grad_()
    before = buffer.clone()
    with pytest.raises(RuntimeError, match=r"create_graph=True .* without main_grad"):
        torch.autograd.grad(norm(x, w, main_grad=buffer).sum(), (x, w), create_graph=True)
    assert same_bits(buffer, before)


@each_norm
def test_nothing_is_added_where_no_gradient_of_the_weight_is_wanted(place, norm):
    x, w, dy, buffer = case(place)
    before = buffer.clone()
    with torch.no_grad():
        norm(x, w, main_grad=buffer)
    frozen = w.detach()
    norm(x.requires_grad_(), frozen, main_grad=buffer).backward(dy)
    assert same_bits(buffer, before)


@each_norm
def test_a_backward_that_asks_for_another_gradient_adds_nothing(place, norm):
    """As a schedule of a pipeline does, which computes the weights' gradients later: they would count twice."""
    x, w, dy, buffer = case(place)
    before, want = buffer.clone(), buffer.clone()
    norm(x, w, main_grad=want).backward(dy)
    x.requires_grad_()
    y = norm(x, w, main_grad=buffer)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy, retain_graph=True, inputs=[x])
    assert same_bits(buffer, before)
    assert same_bits(x.grad, dx)
    y.backward(dy, inputs=[w], retain_graph=True)
    assert same_bits(buffer, want)
    assert torch.autograd.grad(y, w, dy, allow_unused=True) == (None,)
    assert not same_bits(buffer, want)


def test_a_result_that_nobody_differentiates_adds_nothing(place):
    x, w, dy, buffer = case(place)
    before = buffer.clone()
    _, total = add_rms_norm(x.requires_grad_(), x.detach(), w, main_grad=buffer)
    total.backward(dy)
    assert same_bits(buffer, before)


def test_where_torch_takes_over_in_backward(monkeypatch):
    """A kernel that was chosen in forward and cannot be launched in backward."""
    for norm in NORMS.values():
        x, w, dy, buffer = case(CPU, torch.float16)
        want = buffer.clone()
        norm(x, w, main_grad=want).backward(dy)
        of_call = 1e-6, 0.0, "fp32", True, "fastest"
        with monkeypatch.context() as patched:
            patched.setattr(OP_MODULE, "launch", lambda *args, **named: False)
            _, dw = OP_MODULE.backward(dy, x, w.detach(), None, *of_call, main_grad=buffer)
        assert dw is None
        assert error(buffer, want.double()) <= 1e-6


def wrong(name):
    x, w, _, buffer = case(CPU)
    flat = torch.zeros(2 * HIDDEN)
    return {
        "dtype": (TypeError, "main_grad must be a tensor of torch.float32, in which .* got torch.bfloat16; make", x, w,
                  buffer.bfloat16()),
        "kind": (TypeError, "main_grad must be a tensor of torch.float32.* got list; make", x, w, [0.0] * HIDDEN),
        "fp64": (TypeError, "must be a tensor of torch.float64, .* got torch.float32", x.double(), w, buffer),
        "shape": (ValueError, r"weight's shape \(100,\), got \(1, 100\); make", x, w, buffer[None]),
        "device": (ValueError, "x is on cpu and main_grad on meta; move", x, w, buffer.to("meta")),
        "strides": (ValueError, "must be contiguous, got a stride of 2; make", x, w, flat[::2]),
        "gradient": (ValueError, r"must not require a gradient itself; pass main_grad.detach\(\)", x, w,
                     buffer.requires_grad_()),
        "memory": (ValueError, "main_grad and weight share memory, which backward reads; make", x, w, w.detach()),
        "x": (ValueError, "main_grad and x share memory", x, w, x[0]),
        "no weight": (ValueError, "takes the gradient of a weight, and there is none; leave it out", x, None, buffer),
    }[name]  # fmt: skip


@each_norm
@pytest.mark.parametrize(
    "name", ["dtype", "kind", "fp64", "shape", "device", "strides", "gradient", "memory", "x", "no weight"]
)
def test_what_cannot_take_dw_is_refused(norm, name):
    kind, message, x, w, buffer = wrong(name)
    with pytest.raises(kind, match=message):
        norm(x, w, main_grad=buffer)


def test_memory_of_the_residual_is_refused():
    x, w, _, _ = case(CPU)
    residual = torch.zeros_like(x)
    with pytest.raises(ValueError, match="main_grad and residual share memory"):
        add_rms_norm(x, residual, w, main_grad=residual[2])


@each_norm
def test_graphs_and_transforms_are_refused(norm):
    x, w, _, buffer = case(CPU)
    with pytest.raises(RuntimeError, match=r"transforms of torch.func cannot follow; leave it out"):
        torch.func.grad(lambda x: norm(x, w, main_grad=buffer).sum())(x)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"main_grad is written to in backward"):
        compiled(x, w, main_grad=buffer)


@pytest.mark.gpu
@each_norm
@pytest.mark.parametrize("shape", [(1, 4096), (64, 4096), (16384, 4096), (4096, 128), (64, 40960)], ids=str)
def test_every_default_adds_what_it_would_write(norm, shape):
    """One launch, two launches, split rows: bits, where they do not vary by themselves."""
    place = Place("cuda")
    rows, hidden = shape
    x, w, dy, buffer = case(place, torch.bfloat16, torch.float32, rows, hidden)
    want = buffer.clone()
    norm(x, w).backward(dy)
    want += w.grad
    norm(x, w, main_grad=buffer).backward(dy)
    if any("atomic" in label for label in dispatch.answers().values()):
        assert error(buffer, want.double()) <= 1e-4
    else:
        assert same_bits(buffer, want)


@pytest.mark.gpu
@each_norm
def test_no_room_is_taken_for_dw(norm):
    x, w, dy, buffer = case(Place("cuda"), torch.float32, rows=64, hidden=8192)
    norm(x.requires_grad_(), w, main_grad=buffer).backward(dy)  # compiles
    peaks = []
    for into in (buffer, None):
        x.grad = w.grad = None
        y = norm(x, w, main_grad=into)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        y.backward(dy)
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
        del y
    assert peaks[1] - peaks[0] == w.nbytes


@pytest.mark.gpu
@each_norm
def test_captured_backwards_add_at_each_replay(norm):
    x, w, dy, buffer = case(Place("cuda"), torch.bfloat16, rows=64, hidden=4096)

    def step():
        """With leaves of its own: others would belong to the stream of the first call."""
        norm(x.detach().requires_grad_(), w.detach().requires_grad_(), main_grad=buffer).backward(dy)

    buffer.zero_()
    step()  # compiles and loads
    once = buffer.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    buffer.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert error(buffer, 3 * once.double()) <= 1e-6
