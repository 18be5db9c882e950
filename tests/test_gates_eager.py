"""The runs that say how far apart right norms are: Hugging Face's arithmetic, and the same in other orders."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from tunegen.gates.double import formula, relative
from tunegen.gates.eager import REORDERED, eager

pytest.importorskip("transformers")

EPS = 1e-6
SHAPES = [(8, 32, 64), (8, 4, 32, 16), (130, 250)]
"""The hidden states and heads of the model that the gate trains, and rows of an odd width."""

RESULTS = ("y", "dx", "dw")
MOVED = {
    "columns backward": {"y", "dx", "dw"},
    "rows backward": {"dw"},
    "rows and columns interleaved": {"y", "dx", "dw"},
}
"""What adds up in another order: y and dx over columns, dw over rows, of x-hats that follow from y's order."""

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_order = pytest.mark.parametrize("name", REORDERED)


def drawn(shape, dtype):
    """x, w and dy of normal numbers; 4-D ones with axes 1 and 2 exchanged in memory, as attention leaves them."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    if len(shape) == 4:
        x, dy = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, dy))
    return x, (1 + 0.3 * torch.randn(shape[-1], generator=generator)).to(dtype), dy


def results(norm, x, w, dy):
    x, w = (t.detach().requires_grad_() for t in (x, w))
    y = norm(x, w, EPS)
    y.backward(dy)
    return dict(zip(RESULTS, (y.detach(), x.grad, w.grad), strict=True))


@each_shape
@each_dtype
def test_eager_has_the_bits_of_hugging_faces_norm(dtype, shape):
    """Values and gradients."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def theirs(x, w, eps):
        module = Qwen3RMSNorm(shape[-1], eps).to(dtype)
        return torch.func.functional_call(module, {"weight": w}, (x,))

    given = drawn(shape, dtype)
    got, right = results(eager, *given), results(theirs, *given)
    for name in RESULTS:
        assert torch.equal(got[name], right[name]), name


@each_order
@each_shape
@each_dtype
def test_reordered_norm_differs_by_rounding(dtype, shape, name):
    """By no more than bf16's ulp, or in fp32 than sums of a thousand numbers may."""
    x, w, dy = drawn(shape, dtype)
    right = results(formula, *(t.double() for t in (x, w, dy)))
    got = results(REORDERED[name], x, w, dy)
    limit = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
    for what in RESULTS:
        assert float(relative(got[what], right[what]).max()) < limit, what


@each_order
@each_shape
def test_reordered_norm_has_other_bits(shape, name):
    """Else the band would be nothing: a right norm would be infinitely far from the baseline."""
    given = drawn(shape, torch.float32)
    got, plain = results(REORDERED[name], *given), results(eager, *given)
    assert {what for what in RESULTS if not torch.equal(got[what], plain[what])} == MOVED[name]


@pytest.mark.parametrize("name", [None, *REORDERED])
@pytest.mark.parametrize("shape", [(9, 8), (2, 3, 2, 5)], ids=str)
def test_gradients_are_right(shape, name):
    norm = eager if name is None else REORDERED[name]
    x, w, _ = (t.double().requires_grad_() for t in drawn(shape, torch.float32))
    assert gradcheck(lambda x, w: norm(x, w, EPS), (x, w))
    assert gradcheck(lambda x: norm(x, None, EPS), (x,))
    got, right = norm(x, w, EPS), formula(x, w, EPS)
    assert float(relative(got.detach(), right.detach()).max()) < 1e-14
