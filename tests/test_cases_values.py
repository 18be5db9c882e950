"""Faults that people reported (H01 to H08), as inputs: values and shapes. The right value is float64's."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, assert_right, draw, error, exact, formula, places, run, same_bits, weight_of

from tunegen import rms_norm
from tunegen.launch import Variant

place = places("cpu", "interpreter", "cuda")


def test_h01_squares_that_overflow_float16(place):
    x = torch.full((1, 64), 300.0).half()
    x[0, 1::2] *= -1
    y = rms_norm(x.to(place.device), eps=1e-6)
    assert same_bits(y.cpu(), x.sign())


def test_h01_an_eps_that_float16_cannot_hold(place):
    x = torch.full((1, 64), 3e-4).half().to(place.device)
    y = rms_norm(x, eps=1e-8)
    assert error(y, torch.full_like(y, 0.94866, dtype=torch.float64)) < place.rounding(torch.float16)


def h02(place):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator).bfloat16() for shape in ((256, 4096), (4096,)))
    return x.to(place.device), w.to(place.device)


@pytest.mark.parametrize("casting", ["fp32", "llama"])
def test_h02_one_documented_order_of_rounding(place, casting):
    if place.name == "interpreter":
        pytest.skip("the interpreter truncates bf16")
    x, w = h02(place)
    xhat = formula(x.double(), None)
    once = (xhat * w.double()).bfloat16()
    twice = (xhat.bfloat16().double() * w.double()).bfloat16()
    want, other = (once, twice) if casting == "fp32" else (twice, once)
    y = rms_norm(x, w, casting=casting)
    # fp32 arithmetic may fall on the other side of a rounding boundary; few elements lie so near to one.
    assert (y != want).double().mean() < 1e-3
    assert (y != other).double().mean() > 0.2
    assert error(y, exact(x, w, x).y) < (0.004 if casting == "fp32" else 0.0076)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_h02_eps_is_a_millionth_in_every_dtype(place, dtype):
    x = (0.058 * draw(8, 32)).bfloat16().to(dtype).to(place.device)
    right = formula(x.double(), None, 1e-6)
    assert error(rms_norm(x), right) <= place.allowed(dtype, dtype)
    assert error(formula(x.double(), None, 0.0078), right) > 0.1


def test_h03_backward_keeps_bf16_out_of_its_sums(place):
    if place.name == "interpreter":
        pytest.skip("too many rows to interpret")
    x, dy = (draw(32768, 128, dtype=torch.bfloat16, seed=seed, place=place) for seed in (0, 1))
    w = torch.ones(128, dtype=torch.bfloat16, device=place.device)
    got, right = run(x, w, dy), exact(x, w, dy)
    assert error(got.dw, right.dw) <= 0.004
    assert error(got.dx, right.dx) <= 0.005


@pytest.mark.parametrize("hidden", [769, 768, 1023, 1025, 3584, 17])
def test_h04_widths_that_no_vector_divides(place, hidden):
    x, w = draw(7, hidden, dtype=torch.float16, place=place), weight_of(hidden, torch.float16, place)
    dy = draw(7, hidden, dtype=torch.float16, seed=2, place=place)
    right = exact(x, w, dy)
    for _ in range(20 if place.name == "cuda" else 1):  # the damage is a race
        assert_right(run(x, w, dy), right, x, w, place)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 102400), torch.bfloat16), ((2, 16384), torch.float32), ((2, 1_200_000), torch.float32)]
)
def test_h05_hidden_above_the_limit_of_a_block(place, shape, dtype):
    if place.name == "interpreter" and shape[1] > 2**20:
        pytest.skip("kernels stop at 32 parts of 16384 columns: torch answers, as on the CPU")
    x, w, dy = draw(*shape, dtype=dtype, place=place), weight_of(shape[1], dtype, place), draw(*shape, seed=2)
    dy = dy.to(dtype).to(place.device)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w, place)


def needs_memory_of_the_gpu(gigabytes):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**23 + 16, 256), (524289, 4096)], ids=str)
@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no weight"])
def test_h06_more_than_two_to_the_31_elements(shape, weight):
    """Only the last row is not 0, in x and in dy: 32-bit offsets wrap to another row."""
    needs_memory_of_the_gpu(24)
    hidden = shape[1]
    x, dy = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x[-1], dy[-1] = 1, draw(hidden).cuda()
    w = torch.ones(hidden, dtype=torch.bfloat16, device="cuda") if weight else None
    right = exact(x[-1:], w, dy[-1:])
    got = run(x, w, dy)
    del x, dy
    for value, want in ((got.y, right.y), (got.dx, right.dx)):
        assert error(value[-1:], want) < 0.004
        assert int(torch.count_nonzero(value)) == int(torch.count_nonzero(value[-1])) > hidden // 2
    assert got.dw is None if w is None else error(got.dw, right.dw) < 0.004


def test_h06_rows_two_to_the_31_elements_apart(place):
    if place.name == "cuda":
        needs_memory_of_the_gpu(6)
    base = torch.empty(2**31 + 128, dtype=torch.bfloat16, device=place.device)  # no page but two is touched
    x = base.as_strided((2, 128), (2**31, 1))
    x.copy_(draw(2, 128))
    w, dy = weight_of(128, torch.bfloat16, place), draw(2, 128, dtype=torch.bfloat16, seed=2, place=place)
    assert_right(run(x, w, dy), exact(x.contiguous(), w, dy), x, w, place)


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128)], ids=str)
def test_h07_no_rows(place, shape, monkeypatch):
    monkeypatch.setattr(Variant, "__call__", lambda *_: pytest.fail("a kernel was launched"))
    monkeypatch.setattr("tunegen.dispatch.choose", lambda key: pytest.fail("a choice was looked up"))
    x = torch.empty(shape, device=place.device, requires_grad=True)
    w = torch.ones(128, device=place.device, requires_grad=True)
    y = rms_norm(x, w)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert same_bits(w.grad, torch.zeros_like(w))


def test_h07_hidden_0_is_refused(place):
    with pytest.raises(ValueError, match=r"at least 1 .*\(3, 0\)"):
        rms_norm(torch.empty(3, 0, device=place.device))


@pytest.mark.parametrize("shape", [(4, 7, 64), (2, 3, 5, 64), (64,)], ids=str)
def test_h08_backward_of_any_rank(place, shape):
    x, w, dy = draw(*shape, place=place), weight_of(64, place=place), draw(*shape, seed=2, place=place)
    got, flat = run(x, w, dy), run(x.reshape(-1, 64), w, dy.reshape(-1, 64))
    assert_right(got, exact(x, w, dy), x, w, place)
    assert same_bits(got.y.view(-1, 64), flat.y)
    assert error(got.dx.view(-1, 64), flat.dx.double()) <= place.allowed(x.dtype, x.dtype)
    assert error(got.dw, flat.dw.double()) <= place.allowed(x.dtype, x.dtype)
