"""How verification counts errors, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tunegen.reference import Expected
from tunegen.ulps import deviation

DTYPES = ("bf16", "fp16", "fp32", "fp64")


def error_ulp(got, want, dtype):
    return deviation(got, want, dtype).largest


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(("dtype", "ulp"), [("bf16", 2**-7), ("fp16", 2**-10), ("fp32", 2**-23), ("fp64", 2**-52)])
def test_an_ulp_is_that_of_the_dtype(dtype, ulp):
    want = Expected(column(1.0, 1.5))
    assert error_ulp(column(1.0 + ulp, 1.5), want, dtype) == 1.0
    assert error_ulp(column(1.0, 1.5 - 3 * ulp), want, dtype) == 3.0


def test_an_ulp_grows_with_the_element():
    assert error_ulp(column(1.0, 4.0 + 2**-7), Expected(column(1.0, 4.0)), "bf16") == 0.25


def test_small_elements_are_counted_at_the_mean():
    assert error_ulp(column(2**-7, 3.0), Expected(column(0.0, 3.0)), "bf16") == 1.0  # the mean is 1.5


def test_elements_are_counted_at_the_scale_of_their_row():
    want = torch.tensor([[0.0, 2.0], [0.0, 2048.0]], dtype=torch.float64)
    got = want + torch.tensor([[2**-7, 0.0], [0.0, 0.0]], dtype=torch.float64)
    scale = want.mean(-1, keepdim=True)
    assert error_ulp(got, Expected(want, None, scale), "bf16") == 1.0
    assert error_ulp(got, Expected(want), "bf16") < 0.01, "a large row would hide the error"


def test_slack_is_taken_off():
    want = Expected(column(1.0, 1.0), column(2**-7, 0.0))
    assert error_ulp(column(1.0 + 3 * 2**-7, 1.0), want, "bf16") == 2.0
    assert error_ulp(column(1.0 + 0.5 * 2**-7, 1.0), want, "bf16") == 0.0


def test_a_row_of_zeros_must_be_zero():
    want = Expected(torch.zeros(1, 4, dtype=torch.float64), None, torch.zeros(1, 1, dtype=torch.float64))
    for dtype in DTYPES:
        assert error_ulp(torch.zeros(1, 4), want, dtype) == 0.0
        assert error_ulp(torch.full((1, 4), 1e-3), want, dtype) > 1e6 or dtype == "fp16"


@pytest.mark.parametrize("at", [0, 1])
def test_nan_is_never_small(at):
    got = column(1.0, 1.0)
    got[at] = math.nan
    assert math.isnan(error_ulp(got, Expected(column(1.0, 1.0)), "fp32"))


def test_inf_is_far_off():
    assert error_ulp(column(math.inf, 1.0), Expected(column(1.0, 1.0)), "fp32") == math.inf


def test_the_typical_error_is_the_root_mean_square(monkeypatch):
    got = column(1.0 + 3 * 2**-7, 1.0, 1.0 - 4 * 2**-7, 1.0)
    assert deviation(got, Expected(column(1.0, 1.0, 1.0, 1.0)), "bf16") == (4.0, 2.5)
    monkeypatch.setattr("tunegen.ulps.CHUNK_ELEMENTS", 3)
    assert deviation(got, Expected(column(1.0, 1.0, 1.0, 1.0)), "bf16") == (4.0, 2.5)
