"""What gradients cost and where they lie (H11, H12), on every route to a kernel."""

from __future__ import annotations

import pytest
import torch
from helpers import Place, draw, places, weight_of
from torch.utils.checkpoint import checkpoint

from tunegen import add_rms_norm, rms_norm

place = places("cpu", "interpreter", "cuda")
CUDA = Place("cuda")


def rows(place, *shape, seed=0):
    return draw(*shape, seed=seed, place=place)


def heads(place, batch, positions, count, hidden, seed=0):
    """Heads before positions, as a slice of a projection lies: rows at no common distance."""
    wide = draw(batch, positions, 2 * count * hidden, seed=seed, place=place)
    return wide[..., : count * hidden].unflatten(-1, (count, hidden)).transpose(1, 2)


def of_norm(x, residual, w):
    return (rms_norm(x, w),)


def of_sum(x, residual, w):
    return add_rms_norm(x, residual, w)


def of_checkpoint(x, residual, w):
    return (checkpoint(rms_norm, x, w, use_reentrant=False),)


def twice(x, residual, w):
    return add_rms_norm(x, x, w)


# What is called, how x, the residual and what comes in lie, and which results are used.
ROUTES = {
    "rows": (of_norm, rows, (6, 16), (0,)),
    "nested": (of_norm, heads, (2, 3, 2, 16), (0,)),
    "checkpointed": (of_checkpoint, rows, (6, 16), (0,)),
    "fused": (of_sum, rows, (6, 16), (0, 1)),
    "fused, y alone": (of_sum, rows, (6, 16), (0,)),
    "fused, sum alone": (of_sum, rows, (6, 16), (1,)),
    "fused, nested": (of_sum, heads, (2, 3, 2, 16), (0, 1)),
    "fused, x twice": (twice, rows, (6, 16), (0, 1)),
}


@pytest.mark.parametrize(("call", "lying", "shape", "used"), ROUTES.values(), ids=ROUTES)
def test_h11_no_gradient_of_a_leaf_shares_storage(place, call, lying, shape, used):
    """Nor with what came in: an optimiser, a hook or the next accumulation may write into any of them."""
    leaves = [lying(place, *shape, seed=seed).detach().requires_grad_() for seed in (0, 1)]
    leaves.append(weight_of(shape[-1], place=place).requires_grad_())
    results = call(*leaves)
    incoming = [lying(place, *shape, seed=seed) for seed in (2, 3)][: len(results)]
    torch.autograd.backward([results[i] for i in used], [incoming[i] for i in used])
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) >= (2 if used != (1,) else 1)
    tensors = [*leaves, *results, *incoming, *gradients]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    kept = [t.clone() for t in (*incoming, *gradients[1:])]
    gradients[0].fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(kept, (*incoming, *gradients[1:]), strict=True))


# Bytes that a backward asks for, on a GPU.

WIDE = {
    "rows": (of_norm, rows, (64, 8192), (0,)),
    "three axes": (of_norm, rows, (4, 16, 8192), (0,)),
    "nested": (of_norm, heads, (2, 64, 8, 1024), (0,)),
    "fused": (of_sum, rows, (64, 8192), (0, 1)),
    "fused, y alone": (of_sum, rows, (64, 8192), (0,)),
}


def asked_for(call, lying, shape, used, wanted):
    """Peak bytes, as asked of torch's allocator, of a backward for the `wanted` of x, residual and weight; and how many
    of them are still there behind it."""
    cuda = CUDA
    leaves = [lying(cuda, *shape, seed=seed).detach() for seed in (0, 1)] + [weight_of(shape[-1], place=cuda)]
    leaves = [leaf.requires_grad_(on) for leaf, on in zip(leaves, wanted, strict=True)]
    incoming = [lying(cuda, *shape, seed=seed) for seed in (2, 3)]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    for _ in range(2):  # the first one compiles
        results = call(*leaves)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        found = torch.autograd.grad([results[i] for i in used], inputs, [incoming[i] for i in used])
        after = torch.cuda.memory_stats()
        del results
    distinct = {t.untyped_storage().data_ptr(): t for t in found}
    return after["requested_bytes.all.peak"] - before, sum(t.nbytes for t in distinct.values())


@pytest.mark.gpu
@pytest.mark.parametrize(("call", "lying", "shape", "used"), WIDE.values(), ids=WIDE)
def test_h12_a_frozen_weight_costs_not_a_byte(call, lying, shape, used):
    """dx and nothing else: no dw, no partial sums of it. Trained, it costs both."""
    residual = call is of_sum
    dx, dw = 4 * torch.Size(shape).numel(), 4 * shape[-1]
    assert asked_for(call, lying, shape, used, (True, residual, False)) == (dx, dx)
    peak, kept = asked_for(call, lying, shape, used, (True, residual, True))
    assert (peak >= dx + dw, kept) == (True, dx + dw)


@pytest.mark.gpu
@pytest.mark.parametrize(("call", "lying", "shape", "used"), WIDE.values(), ids=WIDE)
def test_h12_an_x_without_a_gradient_keeps_not_a_byte(call, lying, shape, used):
    """Every kernel of dw makes dx too; it is gone behind the backward, and there is one of it, not two."""
    dx, dw = 4 * torch.Size(shape).numel(), 4 * shape[-1]
    trained, _ = asked_for(call, lying, shape, used, (True, False, True))
    peak, kept = asked_for(call, lying, shape, (0,), (False, False, True))
    assert kept == dw
    assert dx + dw <= peak <= trained


@pytest.mark.gpu
def test_h12_without_any_gradient_nothing_is_saved():
    """A call under no_grad, and one of tensors that want none, leave y alone behind them."""
    x, w = rows(CUDA, 64, 8192), weight_of(8192, place=CUDA)
    rms_norm(x, w)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            y = rms_norm(x, w)
            peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
            assert (peak, y.requires_grad) == (y.nbytes, False)
            del y
