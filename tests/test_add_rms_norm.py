"""add_rms_norm against float64, against the two steps that it fuses, and where autograd meets it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import CASTINGS, FLOATS, OP_MODULE, draw, error, formula, places, same_bits, weight_of
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from tunegen import add_rms_norm, add_rms_norm_, dispatch, rms_norm
from tunegen.ops import arguments

place = places("cpu", "interpreter", "cuda")

SHAPE = (3, 2, 100)
EPS = 1e-6


def case(place=None, dtype=torch.float32, shape=SHAPE):
    """x, residual, weight, dy, dsum."""
    here = {"place": place} if place is not None else {}
    x, residual, dy, dsum = (draw(*shape, dtype=dtype, seed=seed, **here) for seed in (0, 1, 2, 3))
    return x, residual, weight_of(shape[-1], **here), dy, dsum


def exact(x, residual, w, dy, dsum, casting="fp32", offset=0.0, sum_in_fp32=False):
    """y, sum, the gradient of x and of residual, dw: float64, rounded where the contract rounds."""
    total = x + residual
    round_to = x.dtype if casting == "llama" else None
    read = (x.double() + residual.double()) if sum_in_fp32 else total.double()
    y = formula(read, None if w is None else w.double(), EPS, offset, round_to)
    stored = total.double().requires_grad_()
    weight = None if w is None else w.double().requires_grad_()
    results = formula(stored, weight, EPS, offset, round_to), stored * 1.0
    torch.autograd.backward(results, (dy.double(), dsum.double()))
    return y, total, stored.grad, None if weight is None else weight.grad


def run(x, residual, w, dy, dsum, **contract):
    """The same by the op; dx and that of the residual are compared here."""
    x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
    weight = None if w is None else w.detach().requires_grad_()
    y, total = add_rms_norm(x, residual, weight, EPS, **contract)
    torch.autograd.backward((y, total), (dy, dsum))
    assert same_bits(x.grad, residual.grad)
    return y.detach(), total.detach(), x.grad, None if weight is None else weight.grad


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_against_float64(place, dtype, casting, offset):
    if place.name == "interpreter" and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates bf16: the sum already is another one")
    x, residual, w, dy, dsum = case(place, dtype)
    got = run(x, residual, w, dy, dsum, casting=casting, offset=offset)
    want = exact(x, residual, w, dy, dsum, casting, offset)
    assert same_bits(got[1], want[1])
    # torch adds what comes in for the sum in x's dtype, and so rounds twice; a kernel once.
    roundings = 2 if place.name == "cpu" and dtype in (torch.bfloat16, torch.float16) else 1
    for name, value, right, like, allowed in zip(
        ("y", "dx", "dw"), got[::2] + got[3:], want[::2] + want[3:], (x, x, w), (1, roundings, 1), strict=True
    ):
        assert (value.shape, value.dtype) == (like.shape, like.dtype), name
        assert value.is_contiguous(), name
        if casting == "llama" and name != "dx":  # an x-hat on a rounding boundary may fall on either side
            allowed += 2
        assert error(value, right) <= allowed * place.allowed(like.dtype, x.dtype), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norm_may_read_the_sum_in_fp32(place, dtype):
    x, residual, w, dy, dsum = case(place, dtype)
    got = run(x, residual, w, dy, dsum, sum_in_fp32=True)
    y, total, dx, dw = exact(x, residual, w, dy, dsum, sum_in_fp32=True)
    assert error(got[0], y) <= place.allowed(dtype, dtype)
    assert error(got[1], total.double()) <= (torch.finfo(dtype).eps if place.name == "interpreter" else 0.0)
    # Gradients are those of the stored sum; torch operators take those of the other one, a rounding of it away.
    assert error(got[2], dx) <= 4 * place.rounding(dtype) + 1e-5
    assert error(got[3], dw) <= 4 * place.rounding(dtype) + 1e-5
    if dtype != torch.float32:
        assert not same_bits(got[0], add_rms_norm(x, residual, w, EPS)[0])


def test_without_a_weight(place):
    x, residual, _, dy, dsum = case(place)
    got, want = run(x, residual, None, dy, dsum), exact(x, residual, None, dy, dsum)
    assert error(got[0], want[0]) <= place.allowed(x.dtype, x.dtype)
    assert error(got[2], want[2]) <= place.allowed(x.dtype, x.dtype)


LAYOUTS = {
    "adjacent": lambda t: t,
    "every other column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "part of a wider row": lambda t: F.pad(t, (4, 12))[..., 4:-12],
    "batch second": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_the_cpu_it_is_the_two_steps_to_the_last_bit(dtype, layout, casting):
    x, residual, w, dy, dsum = case(dtype=dtype)
    x, residual, w = (t.detach().requires_grad_() for t in (layout(x), layout(residual), w))
    y, total = add_rms_norm(x, residual, w, EPS, casting=casting)
    found = torch.autograd.grad((y, total), (x, residual, w), (dy, dsum))
    h = x + residual
    parted = rms_norm(h, w, EPS, casting=casting)
    assert same_bits(total, h)
    assert same_bits(y, parted)
    assert y.is_contiguous()
    assert total.is_contiguous()
    for got, want in zip(found, torch.autograd.grad((parted, h), (x, residual, w), (dy, dsum)), strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_of_all_that_comes_in(place, layout):
    x, residual, w, dy, dsum = (layout(t) if t.dim() > 1 else t for t in case(place))
    got, want = run(x, residual, w, dy, dsum), exact(x, residual, w, dy, dsum)
    for value, right in zip(got, want, strict=True):
        assert error(value, right.double()) <= place.allowed(x.dtype, x.dtype)


# Autograd.


@pytest.mark.parametrize("sum_in_fp32", [False, True])
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives_in_double_precision(check, casting, sum_in_fp32):
    x, residual, w, _, _ = case(dtype=torch.float64, shape=(3, 5))
    arguments = tuple(t.double().requires_grad_() for t in (x, residual, w))
    contract = {"casting": casting, "offset": 0.25, "sum_in_fp32": sum_in_fp32}
    assert check(lambda x, r, w: add_rms_norm(x, r, w, 1e-3, **contract), arguments)


def test_first_derivatives_of_the_kernels_in_double_precision(place):
    x, residual, w, _, _ = case(place, torch.float64, (2, 5))
    arguments = tuple(t.double().requires_grad_() for t in (x, residual, w))
    assert gradcheck(lambda x, r, w: add_rms_norm(x, r, w, 1e-3), arguments)


WANTED = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("used", ["both", "y", "sum"])
def test_each_gradient_is_as_wanted_and_what_is_not_used_counts_for_nothing(place, used, wanted):
    x, residual, w, dy, dsum = case(place)
    leaves = [t.detach().requires_grad_(bool(on)) for t, on in zip((x, residual, w), wanted, strict=True)]
    y, total = add_rms_norm(*leaves, EPS)
    assert (y.requires_grad, total.requires_grad) == (True, wanted != (0, 0, 1))
    parts = {"both": [(y, dy), (total, dsum)], "y": [(y, dy)], "sum": [(total, dsum)]}[used]
    parts = [(result, gradient) for result, gradient in parts if result.requires_grad]
    if parts:
        torch.autograd.backward(*zip(*parts, strict=True))
    zeros = torch.zeros_like(dy)
    seen = zeros if used == "sum" else dy, zeros if used == "y" else dsum
    _, _, dx, dw = exact(x, residual, w, *seen)
    for leaf, on, right in zip(leaves, wanted, (dx, dx, dw), strict=True):
        if not on:
            assert leaf.grad is None
        elif leaf is leaves[2] and used == "sum":
            assert leaf.grad is None or not leaf.grad.any()
        else:
            assert error(leaf.grad, right) <= place.allowed(x.dtype, x.dtype)


def test_where_the_sum_is_not_used_backward_is_that_of_rms_norm(monkeypatch):
    """The last norm of a model: nothing reads its sum, and no zeros are made to be added."""
    x, residual, w, dy, dsum = case()
    asked = []
    monkeypatch.setattr(OP_MODULE, "has_kernels", lambda *_: True)
    monkeypatch.setattr(dispatch, "choose", lambda key: SimpleNamespace(config="a kernel", saves_rstd=False))
    monkeypatch.setattr(OP_MODULE, "launch", lambda key, tensors, *_: asked.append((key, tensors)) or True)
    for given in ((dy, None), (dy, dsum)):
        leaves = [t.detach().requires_grad_() for t in (x, residual, w)]
        results = add_rms_norm(*leaves, EPS)
        torch.autograd.backward(
            *zip(*((y, g) for y, g in zip(results, given, strict=True) if g is not None), strict=True)
        )
    backward = [(key.op, tensors) for key, tensors in asked if key.direction == "backward"]
    assert [op for op, _ in backward] == ["rms_norm", "add_rms_norm"]
    assert backward[0][1]["rstd"] is not None, "its kernels may want rstd"
    assert backward[0][1]["dsum"] is None
    assert same_bits(backward[1][1]["dsum"], dsum)


def test_a_gradient_penalty(place):
    """`create_graph=True`: the second derivative is that of float64's formula."""
    x, residual, w, dy, dsum = case(place)

    def penalty(op, *tensors):
        x, residual, w, dy, dsum = tensors
        leaves = tuple(t.detach().requires_grad_() for t in (x, residual, w))
        (dx,) = torch.autograd.grad(op(*leaves), leaves[0], (dy, dsum), create_graph=True)
        return torch.autograd.grad(dx.square().sum(), leaves)

    def parted(x, residual, w):
        return formula(x + residual, w, EPS), x + residual

    found = penalty(lambda x, residual, w: add_rms_norm(x, residual, w, EPS), x, residual, w, dy, dsum)
    for got, want in zip(found, penalty(parted, *(t.double() for t in (x, residual, w, dy, dsum))), strict=True):
        assert error(got, want) < 1e-5


def test_a_sum_that_is_written_over_before_backward_is_noticed(place):
    x, residual, w, dy, _ = case(place)
    y, total = add_rms_norm(x.requires_grad_(), residual, w, EPS)
    with torch.no_grad():
        add_rms_norm_(torch.zeros_like(x), total.detach())
    if place.name == "cpu":
        total.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_transforms_of_torch_func():
    x, residual, w, dy, dsum = case()

    def weighted(op):
        return lambda x, r: sum((t * g).sum() for t, g in zip(op(x, r), (dy, dsum), strict=True))

    ours = torch.func.grad(weighted(lambda x, r: add_rms_norm(x, r, w, EPS)), (0, 1))(x, residual)
    assert error(ours[0], exact(x, residual, w, dy, dsum)[2]) < 1e-5
    assert same_bits(*ours)
    y, total = torch.func.vmap(lambda x, r: add_rms_norm(x, r, w, EPS))(x, residual)
    assert torch.allclose(y, add_rms_norm(x, residual, w, EPS)[0])
    assert same_bits(total, x + residual)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.11, in its compiler
def test_inside_torch_compile():
    x, residual, w, _, _ = case()
    compiled = torch.compile(lambda x, r, w: add_rms_norm(x, r, w, EPS), backend="eager", fullgraph=True)
    for got, want in zip(compiled(x, residual, w), add_rms_norm(x, residual, w, EPS), strict=True):
        assert same_bits(got, want)
    torch._dynamo.reset()


# Written to memory that is there.


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("sum_in_fp32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_in_place(place, dtype, sum_in_fp32, layout):
    x, residual, w, _, _ = case(place, dtype)
    want = add_rms_norm(x, residual, w, EPS, sum_in_fp32=sum_in_fp32)
    x, residual = layout(x).clone(memory_format=torch.preserve_format), layout(residual).clone()
    versions = x._version, residual._version
    y, total = add_rms_norm_(x, residual, w, EPS, sum_in_fp32=sum_in_fp32)
    assert (y is x, total is residual) == (True, True)
    assert same_bits(y, want[0])
    assert same_bits(total, want[1])
    assert x._version > versions[0]
    assert residual._version > versions[1]


@pytest.mark.parametrize("hidden", [4096, 40000, 70000])
def test_in_place_on_rows_that_are_read_twice(place, hidden):
    """One row of every family that its width may get: what is read again must not have been written over."""
    x, residual, w, _, _ = case(place, torch.float16, (1, hidden))
    for sum_in_fp32 in (False, True):
        want = add_rms_norm(x, residual, w, EPS, sum_in_fp32=sum_in_fp32)
        got = add_rms_norm_(x.clone(), residual.clone(), w, EPS, sum_in_fp32=sum_in_fp32)
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])


def test_out(place):
    x, residual, w, _, _ = case(place)
    want, single = add_rms_norm(x, residual, w, EPS), rms_norm(x, w, EPS)
    for make in (torch.empty_like, lambda t: torch.empty(*t.shape, 2, device=t.device)[..., 0]):
        out = make(x), make(x)
        y, total = add_rms_norm(x, residual, w, EPS, out=out)
        assert (y is out[0], total is out[1]) == (True, True)
        assert same_bits(y, want[0])
        assert same_bits(total, want[1])
        assert rms_norm(x, w, EPS, out=out[0]) is out[0]
        assert same_bits(out[0], single)
    assert same_bits(rms_norm(x, w, EPS, out=x), single)


def test_inference_mode(place):
    x, residual, w, _, _ = case(place)
    want = add_rms_norm(x, residual, w, EPS)
    with torch.inference_mode():
        got = add_rms_norm_(x.clone(), residual.clone(), w, EPS)
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])


def test_rows_of_zeros_and_no_rows():
    zeros = torch.zeros(2, 8)
    y, total = add_rms_norm(draw(2, 8), -draw(2, 8))
    assert same_bits(y, zeros)
    assert same_bits(total, zeros)
    empty = torch.ones(0, 8)
    assert [t.shape for t in add_rms_norm(empty, empty)] == [(0, 8), (0, 8)]
    assert [t.shape for t in add_rms_norm_(empty, empty.clone())] == [(0, 8), (0, 8)]


# What it refuses: the type of the error, and that the message names the value, the limit and the remedy.

X, W = torch.ones(2, 8), torch.ones(8)
LEAF = torch.ones(2, 8, requires_grad=True)
REFUSED = {
    "residual shape": (ValueError, lambda: add_rms_norm(X, torch.ones(8)), r"x's shape \(2, 8\), got \(8,\); expand"),
    "residual dtype": (TypeError, lambda: add_rms_norm(X, X.bfloat16()), r"float32, got torch\.bfloat16; convert"),
    "residual none": (TypeError, lambda: add_rms_norm(X, None), r"residual must be a tensor .* got NoneType"),
    "residual meta": (ValueError, lambda: add_rms_norm(X, X.to("meta")), r"x is on cpu and residual on meta; move"),
    "x int": (TypeError, lambda: add_rms_norm(X.long(), X.long()), r"x .*bf16, fp16, fp32, fp64.*torch\.int64"),
    "weight shape": (ValueError, lambda: add_rms_norm(X, X, torch.ones(4)), r"\(8,\).*\(4,\)"),
    "eps negative": (ValueError, lambda: add_rms_norm(X, X, W, -1e-6), r"eps .*at least 0.*-1e-06"),
    "casting": (ValueError, lambda: add_rms_norm(X, X, casting="gemma"), r"casting .*fp32, llama.*'gemma'"),
    "sum_in_fp32": (TypeError, lambda: add_rms_norm(X, X, sum_in_fp32="yes"), r"sum_in_fp32 .*True or False, got str"),
    "in place x": (RuntimeError, lambda: add_rms_norm_(LEAF, X), r"x is written to.*no_grad\(\), or use add_rms_norm"),
    "in place w": (RuntimeError, lambda: add_rms_norm_(X, X.clone(), LEAF[0]), r"gradient is wanted.*no_grad"),
    "in place twice": (ValueError, lambda: add_rms_norm_(X, X), r"x and residual are the same memory.*clone"),
    "out one": (TypeError, lambda: add_rms_norm(X, X, out=X.clone()), r"out must be a pair of tensors.*got Tensor"),
    "out grad": (RuntimeError, lambda: rms_norm(LEAF, out=X.clone()), r"out is written to.*without out"),
    "out shape": (ValueError, lambda: rms_norm(X, out=torch.ones(8)), r"out must have x's shape \(2, 8\), got \(8,\)"),
    "out dtype": (TypeError, lambda: rms_norm(X, out=X.half()), r"out .*float32, got torch\.float16"),
    "out pair": (ValueError, lambda: add_rms_norm(X, X, out=(X, W)), r"out\[1\] must have x's shape"),
}


@pytest.mark.parametrize(("kind", "call", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(kind, call, message):
    with pytest.raises(kind, match=message) as caught:
        call()
    assert type(caught.value) is kind
    assert bool((X == 1).all()), "what is refused is not written to"


# Which kernels answer.


def test_what_answers_is_named(place):
    if place.name == "cpu":
        pytest.skip("torch operators answer there")
    dispatch.forget()
    run(*case(place))
    found = dispatch.answers()
    assert sorted(found) == ["backward 8x100 fp32 add_rms_norm", "forward 8x100 fp32 add_rms_norm"]
    assert "torch" not in found.values()


def test_a_residual_that_is_no_plain_tensor_gets_no_kernel(monkeypatch):
    """DTensor and the like: torch answers."""
    monkeypatch.setattr(arguments, "PLAIN_TENSORS", (SimpleNamespace,))
    monkeypatch.setattr(arguments, "has_address", lambda tensor: True)
    on_a_gpu = SimpleNamespace(is_cuda=True, numel=lambda: 16)
    assert OP_MODULE.has_kernels(on_a_gpu, None, on_a_gpu)
    assert not OP_MODULE.has_kernels(on_a_gpu, None, torch.ones(16))


@pytest.mark.parametrize("policy", ["deterministic", "invariant"])
def test_policies(place, policy):
    """Invariant: a row alone, at an odd address, and in place has the bits that it has among others."""
    x, residual, dy = (draw(9, 160, seed=seed, place=place) for seed in (0, 1, 2))
    w = weight_of(160, place=place)

    def bits(x, residual, dy):
        leaves = [t.detach().requires_grad_() for t in (x, residual)]
        y, total = add_rms_norm(*leaves, w, policy=policy)
        return [y.detach(), total.detach(), *torch.autograd.grad((y, total), leaves, (dy, dy))]

    whole = bits(x, residual, dy)
    assert all(map(same_bits, whole, bits(x, residual, dy)))
    if policy == "deterministic" or place.name == "cpu":
        return
    odd = [torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)[3:8] for t in (x, residual, dy)]
    alone = [t[3:4] for t in (x, residual, dy)]
    for rows, given in ((slice(3, 8), odd), (slice(3, 4), alone)):
        for got, want in zip(bits(*given), whole, strict=True):
            assert same_bits(got, want[rows])
        found = add_rms_norm_(given[0].clone(), given[1].clone(), w, policy=policy)
        assert all(same_bits(got, want[rows]) for got, want in zip(found, whole, strict=False))
