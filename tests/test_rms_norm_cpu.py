"""The public op on CPU tensors against a float64 formula written in `helpers`, and what it refuses."""

from __future__ import annotations

import itertools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    CASTINGS,
    CPU,
    FLOATS,
    OP_MODULE,
    Results,
    assert_right,
    draw,
    error,
    exact,
    formula,
    run,
    same_bits,
    weight_of,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional as F

from tunegen import add_rms_norm, dispatch, rms_norm
from tunegen.ops import arguments

SHAPES = ((64,), (7, 64), (4, 7, 64), (2, 3, 5, 64), (2, 1, 3, 2, 64))
DTYPE_PAIRS = [*itertools.product(FLOATS[:3], repeat=2), *itertools.product(FLOATS[3:], FLOATS)]


def case(shape, x_dtype=torch.float32, w_dtype=torch.float32):
    """x, weight and dy."""
    return draw(*shape, dtype=x_dtype), weight_of(shape[-1], w_dtype), draw(*shape, dtype=x_dtype, seed=2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank(shape):
    x, w, dy = case(shape)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), DTYPE_PAIRS, ids=str)
def test_every_pair_of_dtypes(x_dtype, w_dtype):
    x, w, dy = case((9, 96), x_dtype, w_dtype)
    assert_right(run(x, w, dy), exact(x, w, dy), x, w)


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_without_a_weight(x_dtype):
    x, _, dy = case((9, 96), x_dtype)
    assert_right(run(x, None, dy), exact(x, None, dy), x, None)


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_offset_is_added_to_the_weight_in_the_accumulation_dtype(x_dtype):
    x, w, dy = case((9, 96), x_dtype, x_dtype)
    w = (w - 1).to(x_dtype)
    assert_right(run(x, w, dy, offset=1.0), exact(x, w, dy, offset=1.0), x, w)


def test_offset_without_a_weight_is_ignored():
    x, _, dy = case((9, 96))
    assert same_bits(run(x, None, dy, offset=3.0).y, run(x, None, dy).y)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_casting_llama_rounds_xhat_first(dtype):
    x, w, _ = case((50, 256), dtype, dtype)
    xhat = formula(x.double(), None).to(dtype)
    want = (xhat.double() * w.double()).to(dtype)
    got = rms_norm(x, w, casting="llama")
    assert (got != want).double().mean() < 1e-3, "an x-hat at a rounding boundary may fall on its other side; few do"
    assert (rms_norm(x, w) != want).double().mean() > 0.1, "the test must tell the castings apart"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_casting_llama_passes_gradients_unrounded(dtype):
    """dx takes the rounding of x-hat for the identity, and dw is summed from the rounded x-hat."""
    x, w, dy = case((50, 256), dtype, dtype)
    got, right = run(x, w, dy, casting="llama"), exact(x, w, dy, casting="llama")
    assert error(got.dx, right.dx) <= CPU.allowed(dtype, dtype)
    # One x-hat of the 50 that a sum is made of may be rounded the other way.
    other_way = torch.finfo(dtype).eps * 4 / math.sqrt(50) if dtype in FLOATS[:2] else 0.0
    assert error(got.dw, right.dw) <= CPU.allowed(dtype, dtype) + other_way


@pytest.mark.parametrize("casting", CASTINGS)
def test_compiled_once_for_all_row_counts(casting):
    """`torch.compile(dynamic=True)` makes one graph, with the row count and eps as symbols; forward and backward."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    norm = torch.compile(rms_norm, dynamic=True, fullgraph=True, backend=graphs)
    for rows, eps in ((7, 1e-5), (24, 0.5)):
        x, w, dy = case((rows, 96))
        x.requires_grad_()
        w.requires_grad_()
        y = norm(x, w, eps, offset=1.0, casting=casting)
        y.backward(dy)
        got, right = Results(y.detach(), x.grad, w.grad), exact(x, w, dy, eps, offset=1.0, casting=casting)
        assert_right(got, right, x, w)
        assert graphs.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.5, 3])
def test_every_eps(eps):
    x, w, dy = case((9, 96))
    x = x * 1e-2
    assert_right(run(x, w, dy, eps), exact(x, w, dy, eps), x, w)


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives_in_double_precision(check, shape, casting):
    x, w, _ = case(shape, torch.float64, torch.float64)
    arguments = (x.requires_grad_(), w.requires_grad_())
    assert check(lambda x, w: rms_norm(x, w, 1e-3, offset=0.25, casting=casting), arguments)


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128)], ids=str)
def test_no_rows(shape):
    x, w, dy = case(shape)
    got = run(x, w, dy)
    assert got.y.shape == got.dx.shape == shape
    assert same_bits(got.dw, torch.zeros(128))


@pytest.mark.parametrize("casting", CASTINGS)
def test_a_row_of_zeros(casting):
    got = run(torch.zeros(2, 8), torch.ones(8), torch.ones(2, 8), casting=casting)
    assert same_bits(got.y, torch.zeros(2, 8))
    assert torch.allclose(got.dx, torch.full((2, 8), 1000.0))  # rstd is 1 / sqrt(eps)
    assert same_bits(got.dw, torch.zeros(8))


@pytest.mark.parametrize("casting", CASTINGS)
def test_the_result_is_contiguous_whatever_the_strides(casting):
    x = draw(48, 5).t()
    y = rms_norm(x, weight_of(48), casting=casting)
    assert y.is_contiguous()
    assert error(y, exact(x, weight_of(48), x).y) <= CPU.allowed(x.dtype, x.dtype)


def test_the_same_as_torch():
    x, w, _ = case((9, 96))
    assert torch.allclose(rms_norm(x, w, 1e-5), F.rms_norm(x, (96,), w, 1e-5), rtol=1e-6, atol=1e-6)


# What it refuses: the type of the error, and that the message names the value and the limit.

X, W = torch.ones(2, 8), torch.ones(8)
REFUSED = {
    "weight shape": (ValueError, lambda: rms_norm(X, torch.ones(4)), r"\(8,\).*\(4,\)"),
    "weight rank": (ValueError, lambda: rms_norm(X, torch.ones(1, 8)), r"\(8,\).*\(1, 8\)"),
    "weight int": (TypeError, lambda: rms_norm(X, W.int()), r"weight .*bf16, fp16, fp32, fp64.*torch\.int32"),
    "weight list": (TypeError, lambda: rms_norm(X, [1.0] * 8), r"weight .*bf16, fp16, fp32, fp64.*list"),
    "weight meta": (ValueError, lambda: rms_norm(X, W.to("meta")), r"x is on cpu and weight on meta"),
    "x int": (TypeError, lambda: rms_norm(X.long(), W), r"x .*bf16, fp16, fp32, fp64.*torch\.int64"),
    "x complex": (TypeError, lambda: rms_norm(X.cfloat(), W), r"x .*bf16, fp16, fp32, fp64.*torch\.complex64"),
    "x bool": (TypeError, lambda: rms_norm(X.bool(), W), r"x .*bf16, fp16, fp32, fp64.*torch\.bool"),
    "x list": (TypeError, lambda: rms_norm([1.0, 2.0]), r"x .*bf16, fp16, fp32, fp64.*list"),
    "hidden 0": (ValueError, lambda: rms_norm(torch.ones(3, 0)), r"at least 1 .*\(3, 0\)"),
    "no axis": (ValueError, lambda: rms_norm(torch.tensor(1.0)), r"at least 1 .*\(\)"),
    "eps negative": (ValueError, lambda: rms_norm(X, W, -1e-6), r"eps .*at least 0.*-1e-06"),
    "eps nan": (ValueError, lambda: rms_norm(X, W, math.nan), r"eps .*finite.*nan"),
    "eps inf": (ValueError, lambda: rms_norm(X, W, math.inf), r"eps .*finite.*inf"),
    "eps tensor": (TypeError, lambda: rms_norm(X, W, torch.tensor(1e-6)), r"eps .*Python number.*torch\.float32"),
    "eps bool": (TypeError, lambda: rms_norm(X, W, True), r"eps .*Python number.*bool"),
    "eps none": (TypeError, lambda: rms_norm(X, W, None), r"eps .*Python number.*NoneType; give one, such as 1e-6"),
    "eps text": (TypeError, lambda: rms_norm(X, W, "1e-6"), r"eps .*Python number.*str"),
    "offset tensor": (TypeError, lambda: rms_norm(X, W, offset=W), r"offset .*Python number.*torch\.float32"),
    "offset nan": (ValueError, lambda: rms_norm(X, W, offset=math.nan), r"offset .*finite.*nan"),
    "casting": (ValueError, lambda: rms_norm(X, W, casting="gemma"), r"casting .*fp32, llama.*'gemma'"),
}


@pytest.mark.parametrize(("kind", "call", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(kind, call, message):
    with pytest.raises(kind, match=message) as caught:
        call()
    assert type(caught.value) is kind


@pytest.mark.gpu
def test_refuses_a_weight_on_another_device():
    with pytest.raises(ValueError, match="x is on cpu and weight on cuda:0"):
        rms_norm(X, W.to("cuda:0"))
    with pytest.raises(ValueError, match="x is on cuda:0 and weight on cpu"):
        rms_norm(X.to("cuda:0"), W)


# TUNEGEN_DISABLE sends every call to torch.


@pytest.mark.parametrize(("value", "runs"), [(None, True), ("", True), ("0", True), ("1", False), ("yes", False)])
def test_tunegen_disable_turns_kernels_off(monkeypatch, value, runs):
    monkeypatch.delenv("TUNEGEN_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("TUNEGEN_DISABLE", value)
    monkeypatch.setattr(arguments, "PLAIN_TENSORS", (SimpleNamespace,))
    monkeypatch.setattr(arguments, "has_storage", lambda _: True)
    on_a_gpu = SimpleNamespace(is_cuda=True, numel=lambda: 16)
    assert OP_MODULE.has_kernels(on_a_gpu, None) == runs
    assert not OP_MODULE.has_kernels(on_a_gpu, torch.ones(16)), (
        "a weight that is no plain tensor, as far as this test goes"
    )
    with forward_ad.dual_level():
        assert not OP_MODULE.has_kernels(on_a_gpu, None), "a kernel would lose the tangent"


# torch.jit.trace


def traced(function, *example):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace", FutureWarning)
        return torch.jit.trace(function, example)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("contract", [{}, {"casting": "llama"}, {"offset": 1.0}, {"policy": "deterministic"}], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_jit_trace_records_the_norm_whatever_the_sizes(grad, contract):
    """Sizes are tensors while it records: the call ended with "'Tensor' object has no attribute 'bit_length'"."""
    weight = weight_of(64).requires_grad_(grad)
    graph = traced(lambda x, w: rms_norm(x * 2, w, **contract) + 1, draw(4, 64), weight)
    pair = traced(lambda x, r, w: add_rms_norm(x, r, w, **contract), draw(4, 64), draw(4, 64, seed=1), weight)
    for shape in ((7, 64), (2, 1, 64)):
        x, residual = draw(*shape, seed=2), draw(*shape, seed=3)
        assert same_bits(graph(x, weight), rms_norm(x * 2, weight, **contract) + 1)
        for got, want in zip(pair(x, residual, weight), add_rms_norm(x, residual, weight, **contract), strict=True):
            assert same_bits(got, want)
    if grad:
        graph(x, weight).square().sum().backward()
        recorded, weight.grad = weight.grad, None
        (rms_norm(x * 2, weight, **contract) + 1).square().sum().backward()
        assert torch.allclose(recorded, weight.grad, rtol=1e-5)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_jit_trace_refuses_what_the_call_refuses():
    with pytest.raises(ValueError, match=r"weight must have shape \(64,\), the last axis of x, got \(1,\)"):
        traced(lambda x, w: rms_norm(x, w), draw(4, 64), torch.ones(1))
    with pytest.raises(RuntimeError, match=r"main_grad .*torch\.jit\.trace does not record; leave it out there$"):
        traced(lambda x, w: rms_norm(x, w, main_grad=torch.zeros(64)), draw(4, 64), weight_of(64))
    assert torch._C._get_tracing_state() is None


def test_no_kernel_is_launched_while_jit_trace_records(monkeypatch):
    """It would be left out of the graph, and its result be a constant there."""
    asked = []
    monkeypatch.setattr(arguments, "PLAIN_TENSORS", (SimpleNamespace,))
    monkeypatch.setattr(arguments, "has_storage", lambda _: True)
    on_a_gpu = SimpleNamespace(is_cuda=True, numel=lambda: 16, device="cuda:0")
    assert OP_MODULE.has_kernels(on_a_gpu, None)

    def ask(x):
        asked.append((OP_MODULE.has_kernels(on_a_gpu, None), OP_MODULE.no_kernels_because(on_a_gpu)))
        return x + 1

    traced(ask, draw(4, 64))
    assert asked[0] == (False, "torch.jit.trace records it")  # then it is called to check the graph


def test_no_kernel_for_no_rows():
    assert not OP_MODULE.has_kernels(SimpleNamespace(is_cuda=True, numel=lambda: 0), None)


@pytest.mark.gpu
def test_tunegen_disable_is_torch_on_the_gpu(monkeypatch):
    x, w = draw(9, 96).cuda(), weight_of(96).cuda()
    monkeypatch.setenv("TUNEGEN_DISABLE", "1")
    monkeypatch.setattr(dispatch, "choose", lambda key: pytest.fail("a kernel was asked for"))
    assert same_bits(rms_norm(x, w, 1e-6), F.rms_norm(x, (96,), w, 1e-6))
