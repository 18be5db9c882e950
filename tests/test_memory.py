"""What is written to may share memory with what is read as far as that changes no result, and no further."""

from __future__ import annotations

import pytest
import torch
from helpers import draw, same_bits, weight_of
from torch._subclasses import FakeTensorMode

from tunegen import add_rms_norm, add_rms_norm_, rms_norm

SHAPE = (3, 2, 100)


def parts(*shape, first, second):
    """x and the residual, as views of one buffer."""
    buffer = draw(*shape)
    return first(buffer), second(buffer)


OVERLAPPING = {
    "rows": parts(6, 8, first=lambda b: b[:4], second=lambda b: b[2:]),
    "a column on": parts(4, 9, first=lambda b: b[:, :8], second=lambda b: b[:, 1:]),
    "a row on, apart": parts(4, 3, 8, first=lambda b: b[:3, 0], second=lambda b: b[1:, 0]),
    "heads": parts(3, 4, 8, first=lambda b: b[:2].transpose(0, 1), second=lambda b: b[1:].transpose(0, 1)),
    "transposed": parts(8, 8, first=lambda b: b, second=lambda b: b.t()),
    "second first": parts(6, 8, first=lambda b: b[2:], second=lambda b: b[:4]),
}
APART = {
    "rows": parts(8, 8, first=lambda b: b[:4], second=lambda b: b[4:]),
    "halves of rows": parts(4, 16, first=lambda b: b[:, :8], second=lambda b: b[:, 8:]),
    "second half first": parts(4, 16, first=lambda b: b[:, 8:], second=lambda b: b[:, :8]),
    "every other row": parts(8, 8, first=lambda b: b[::2], second=lambda b: b[1::2]),
    "every other column": parts(4, 8, 2, first=lambda b: b[..., 0], second=lambda b: b[..., 1]),
    "heads": parts(2, 4, 6, 8, first=lambda b: b[:, :, :3].mT, second=lambda b: b[:, :, 3:].mT),
}


@pytest.mark.parametrize(("x", "residual"), OVERLAPPING.values(), ids=OVERLAPPING)
def test_results_that_would_lie_over_each_other_are_refused(x, residual):
    before = x.clone(), residual.clone()
    with pytest.raises(ValueError, match="x and residual overlap in memory, where two results go; clone one of them"):
        add_rms_norm_(x, residual)
    with pytest.raises(ValueError, match=r"out\[0\] and out\[1\] overlap in memory.*clone"):
        add_rms_norm(x.clone(), residual.clone(), out=(x, residual))
    with pytest.raises(ValueError, match=r"out\[1\] and x overlap in memory.*clone"):
        add_rms_norm(x, torch.zeros_like(x), out=(torch.zeros_like(x), residual))
    with pytest.raises(ValueError, match=r"out and x overlap in memory.*clone"):
        rms_norm(x, out=residual)
    assert same_bits(x, before[0])
    assert same_bits(residual, before[1])


@pytest.mark.parametrize(("x", "residual"), APART.values(), ids=APART)
def test_views_of_one_buffer_that_share_no_element_are_written(x, residual):
    want = add_rms_norm(x, residual)
    got = add_rms_norm_(x, residual)
    assert all(map(same_bits, got, want))


def test_out_may_be_the_inputs_but_not_the_weight():
    x, residual, w = draw(*SHAPE), draw(*SHAPE, seed=1), weight_of(SHAPE[-1])
    want = add_rms_norm(x, residual, w)
    for order in (1, -1):
        ours = [x.clone(), residual.clone()]
        got = add_rms_norm(*ours, w, out=tuple(t.view(SHAPE) for t in ours[::order]))
        assert all(map(same_bits, got, want))
    with pytest.raises(ValueError, match="x and weight overlap in memory"):
        add_rms_norm_(x, residual, x[0, 0])
    with pytest.raises(ValueError, match="out and weight are the same memory"):
        rms_norm(x[0, 0], w, out=w)


def test_tensors_without_memory_are_not_asked_where_it_is():
    x, residual, w = draw(*SHAPE), draw(*SHAPE, seed=1), weight_of(SHAPE[-1])
    on_meta = [t.to("meta") for t in (x, residual, w)]
    assert [t.shape for t in add_rms_norm_(*on_meta)] == [SHAPE, SHAPE]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, residual, w)]
        assert [t.shape for t in add_rms_norm_(*fakes)] == [SHAPE, SHAPE]
        assert rms_norm(fakes[0], fakes[2], out=fakes[1]) is fakes[1]
    want = add_rms_norm(x, residual, w)
    got = torch.func.vmap(lambda x, r: add_rms_norm_(x, r, w))(x.clone(), residual.clone())
    assert all(map(torch.allclose, got, want))
    with pytest.raises(ValueError, match="x and residual are the same memory"):
        torch.func.vmap(lambda x: add_rms_norm_(x, x))(x)
