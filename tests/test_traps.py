"""Every trap of the source that the project follows, each with a test named after it: traps of the operator."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from helpers import (
    CASTINGS,
    CPU,
    OP_MODULE,
    assert_right,
    draw,
    error,
    exact,
    formula,
    places,
    run,
    same_bits,
    weight_of,
)

from tunegen import rms_norm
from tunegen.ops.quick import Kind
from tunegen.reference import accumulate_dtype

place = places("cpu", "interpreter", "cuda")

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def case(place, shape=(6, 100), dtype=FP32):
    """x, weight, dy; a width that no block has."""
    return (
        draw(*shape, dtype=dtype, place=place),
        weight_of(shape[-1], dtype, place),
        draw(*shape, dtype=dtype, seed=2, place=place),
    )


# Traps that it lists.


def test_trap_non_contiguous_grad_output(place):
    x, w, _ = case(place)
    for dy in (
        draw(100, 6, place=place).t(),
        draw(6, 200, place=place)[:, ::2],
        draw(1, 1, place=place).expand(6, 100),
    ):
        assert not dy.is_contiguous()
        assert_right(run(x, w, dy), exact(x, w, dy.contiguous()), x, w, place)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_trap_reduction_in_bf16(place, dtype):
    """Squares of 3e4 overflow fp16; a running sum in bf16 stops growing at 256; both must be summed in fp32."""
    x, w, dy = case(place, (400, 64), dtype)
    large = (x.float() * 3e3).to(dtype)
    assert_right(run(large, w, dy), exact(large, w, dy), large, w, place)
    ones = torch.ones_like(x)
    dw = run(ones, torch.ones_like(w), ones).dw
    assert error(dw, torch.full_like(dw, 400.0, dtype=FP64)) <= place.rounding(dtype)


def test_trap_closure_keeps_tensors_alive(place):
    """Nothing but saved tensors holds x: backward frees it while y is still there, without the garbage collector."""
    leaf, w, dy = case(place)
    leaf.requires_grad_(), w.requires_grad_()
    x = leaf * 1
    alive = weakref.ref(x)
    gc.disable()
    try:
        y = rms_norm(x, w)
        del x
        assert alive() is not None, "saved for backward"
        y.backward(dy)
        assert alive() is None
        x = leaf * 1
        alive, y = weakref.ref(x), rms_norm(x, w)
        del x, y
        assert alive() is None, "a graph that is dropped takes its tensors along"
    finally:
        gc.enable()


@pytest.mark.gpu
def test_trap_atomics_jitter():
    """The default backward adds partial rows in a fixed order: the same bits in every call."""
    x, w, dy = (t.cuda() for t in case(CPU, (4096, 1024), BF16))
    assert "atomic" not in chosen_family(x, w)
    first = run(x, w, dy)
    for _ in range(19):
        again = run(x, w, dy)
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


def chosen_family(x, w):
    from tunegen import dispatch

    return dispatch.choose(OP_MODULE.key_of("backward", x, w, 0.0, "fp32", True)).config.family


def test_trap_wrong_count_of_gradients(place):
    """As many gradients as forward has inputs, None where nothing can be differentiated or nothing is wanted."""
    x, w, dy = case(place)
    wanted = len(inspect.signature(OP_MODULE._RMSNorm.forward).parameters) - 1  # ctx is no input
    context = SavedContext(x, w)
    assert len(OP_MODULE._RMSNorm.backward(context, dy)) == wanted
    for x_grad, w_grad in ((True, True), (True, False), (False, True)):
        leaf, weight = x.detach().requires_grad_(x_grad), w.detach().requires_grad_(w_grad)
        rms_norm(leaf, weight).backward(dy)
        assert ((leaf.grad is not None), (weight.grad is not None)) == (x_grad, w_grad)


class SavedContext:
    """What autograd hands to backward."""

    of_call = (1e-6, Kind(0.0, "fp32", "fastest", False, True), None, None)
    needs_input_grad = (True, True, False)

    def __init__(self, x, w):
        self.saved_tensors = (x, w, None)


@pytest.mark.parametrize("casting", CASTINGS)
def test_trap_second_derivative(place, casting):
    """`create_graph=True` is implemented: a gradient penalty has the derivative of float64's formula."""
    x, w, dy = case(place)

    def penalty(norm, x, w, dy):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        (dx,) = torch.autograd.grad(norm(x, w), x, dy, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, w))

    found = penalty(lambda x, w: rms_norm(x, w, casting=casting), x, w, dy)
    for got, want in zip(found, penalty(formula, x.double(), w.double(), dy.double()), strict=True):
        assert error(got, want) < 1e-5


def test_trap_eps_as_tensor(place):
    x, w, _ = case(place)
    for eps in (torch.tensor(1e-6), torch.tensor(1e-6, device=place.device), torch.nn.Parameter(torch.tensor(1e-6))):
        with pytest.raises(TypeError, match=r"eps must be a Python number, got torch\.float32; pass float\(eps\)"):
            rms_norm(x, w, eps)
    assert same_bits(rms_norm(x, w, float(torch.tensor(0.5))), rms_norm(x, w, 0.5))


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BF16, FP32), (FP32, BF16), (FP16, BF16), (FP32, FP64)], ids=str)
def test_trap_dtypes_not_equal(place, x_dtype, w_dtype):
    """Products and sums are in fp32 whatever comes in; a weight of 1 + 2^-9 shows whether it was rounded to bf16."""
    x, _, dy = case(place, dtype=x_dtype)
    w = (weight_of(100) + 2**-9).to(w_dtype).to(place.device)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w, place)


def test_trap_wrong_axis(place):
    """The mean is over the last axis alone; a square input would hide another one's shape."""
    x, w, dy = case(place, (8, 8, 8))
    x = x * torch.tensor([10.0**k for k in range(-4, 4)], device=place.device)[:, None, None]
    got = run(x, w, dy)
    assert_right(got, exact(x, w, dy), x, w, place)
    one_row = run(x[3, 5], w, dy[3, 5])
    assert error(got.y[3, 5], one_row.y.double()) <= place.allowed(FP32, FP32)


@pytest.mark.parametrize("hidden", [100, 1000, 1025])
def test_trap_missing_mask(place, hidden):
    """What lies between the rows is NaN: whoever reads past a row, or sums what it did not mask, gets NaN."""
    x, w, dy = case(place, (5, hidden))
    wide = torch.full((2, 5, 2 * hidden), torch.nan, device=place.device)
    wide[0, :, :hidden], wide[1, :, :hidden] = x, dy
    got = run(wide[0, :, :hidden], w, wide[1, :, :hidden])
    assert_right(got, exact(x, w, dy), x, w, place)


# Traps in its code.


def test_trap_y_stored_as_float16(place):
    """y has x's dtype: in bf16 there are numbers beyond 65504."""
    x = draw(4, 64, dtype=BF16, place=place)
    w = torch.full((64,), 3e5, dtype=BF16, device=place.device)
    y = rms_norm(x, w)
    assert y.abs().max() > 65504
    assert error(y, exact(x, w, x).y) <= place.allowed(BF16, BF16)


@pytest.mark.parametrize("dtype", [FP16, FP32, FP64], ids=str)
def test_trap_dx_stored_as_bf16(place, dtype):
    """dx has x's dtype and its precision: 8, 2^16 or 2^45 times that of bf16."""
    x, w, dy = case(place, dtype=dtype)
    got = run(x, w, dy)
    assert_right(got, exact(x, w, dy), x, w, place)
    assert not same_bits(got.dx.to(BF16).to(dtype), got.dx)


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (2, 3, 4, 16), (2, 1, 3, 2, 16)], ids=str)
def test_trap_fixed_3d_unpacking(place, shape):
    """q and k norms come in 4-D, gradcheck's inputs in 2-D."""
    x, w, dy = case(place, shape)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w, place)


def test_trap_everything_in_fp32(place):
    """fp64 in, fp64 arithmetic: errors are a billion times smaller than fp32's, as gradcheck needs."""
    x, w, dy = case(place, dtype=FP64)
    x[0, 0] += 2.0**-40  # lost in an fp32 load
    got, right = run(x, w, dy), exact(x, w, dy)
    for value, want in zip(got, right, strict=True):
        assert value.dtype == FP64
        assert error(value, want) < 1e-14
    assert accumulate_dtype(x) == FP64


def test_trap_everything_in_fp32_fails_gradcheck(place):
    """The article's first gate, at every place: central differences in double precision."""
    x, w = draw(3, 8, dtype=FP64, place=place).requires_grad_(), weight_of(8, FP64, place).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, w))
