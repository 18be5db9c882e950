"""The forward-only tier: torch's operators in backward, with derivatives of any order."""

from __future__ import annotations

import pytest
import torch
from helpers import draw, places, run

from tunegen import rms_norm
from tunegen.integrations.eager_backward import rms_norm_eager_backward

place = places("cpu", "cuda")


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_first_and_second_derivatives(place, weighted, offset):
    x, w = (draw(*shape, dtype=torch.float64, seed=seed, place=place) for shape, seed in (((3, 2, 8), 0), ((8,), 1)))
    inputs = (x.requires_grad_(), w.requires_grad_()) if weighted else (x.requires_grad_(),)
    assert torch.autograd.gradcheck(lambda *t: rms_norm_eager_backward(*t, offset=offset), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: rms_norm_eager_backward(*t, offset=offset), inputs)


@pytest.mark.parametrize("casting", ["fp32", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_are_those_of_the_tuned_op(place, casting, dtype):
    """y to the bit; gradients to a rounding of their dtype, sums in another order."""
    x, dy = (draw(4, 64, 256, dtype=dtype, seed=seed, place=place) for seed in (0, 2))
    w = (1 + 0.3 * draw(256, seed=1)).to(dtype).to(place.device)
    ours, eager = (run(x, w, dy, norm=norm, casting=casting) for norm in (rms_norm, rms_norm_eager_backward))
    assert torch.equal(ours.y, eager.y)
    for got, want in zip(eager[1:], ours[1:], strict=True):
        assert got.dtype == want.dtype
        scale = want.double().abs().maximum(want.double().abs().mean())
        assert float(((got.double() - want.double()).abs() / scale).max()) <= 4 * torch.finfo(dtype).eps


def test_only_what_is_wanted_is_returned(place):
    x, w, dy = draw(4, 8, place=place), torch.ones(8, device=place.device), draw(4, 8, seed=2, place=place)
    y = rms_norm_eager_backward(x.requires_grad_(), w)
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is None
    y = rms_norm_eager_backward(x.detach(), w.requires_grad_())
    y.backward(dy)
    assert w.grad is not None


def test_transforms_of_functorch_run(place):
    x = draw(3, 8, dtype=torch.float64, place=place)
    got, want = (torch.func.grad(lambda t, f=f: f(t).pow(3).sum())(x) for f in (rms_norm_eager_backward, rms_norm))
    assert torch.equal(got, want)
