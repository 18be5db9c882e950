"""Verification, itself tested: right kernels pass, faulty ones do not, in every dtype in which the fault is one."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import emulated
import pytest
import torch
from emulated import SPEC, Kernel

from tunegen.model import Problem
from tunegen.verify import GUARD_VALUE, Gate, checks

ROWS, HIDDEN = 130, 250
DTYPES = ("bf16", "fp16", "fp32", "fp64")
NARROW = ("bf16", "fp16")
FORWARD, BACKWARD = frozenset({"y"}), frozenset({"dx", "dw"})

both_directions = pytest.mark.parametrize("direction", ["forward", "backward"])
both_castings = pytest.mark.parametrize("casting", ["fp32", "llama"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@functools.cache
def gate(direction, dtype, casting="fp32", rows=ROWS, hidden=HIDDEN, **more):
    weight, seed = more.pop("weight", dtype), more.pop("seed", 0)
    grad = direction == "backward" and weight is not None
    reach = more.pop("reach", 1)
    problem = Problem("rms_norm", direction, hidden, rows, dtype, weight, casting, weight_grad=grad, **more)
    return Gate(SPEC, problem, torch.device("cpu"), seed, reach)


def verdict(kernel, direction, dtype, casting="fp32", outputs=None, **more):
    """The outputs that a call without rstd saved has, unless stated."""
    written = FORWARD if direction == "forward" else BACKWARD if more.get("weight", 1) else frozenset({"dx"})
    return gate(direction, dtype, casting, **more).check(kernel(), outputs or written)


def assert_rejected(kernel, direction, dtype, casting="fp32", **more):
    found = verdict(kernel, direction, dtype, casting, **more)
    assert not found.ok, f"passed with an error of {found.error_ulp} ulp"
    assert found.reason


@every_dtype
@both_castings
@both_directions
@pytest.mark.parametrize("kernel", [Kernel, emulated.InLanes, emulated.Backwards, emulated.TorchOps])
def test_right_kernels_pass(kernel, direction, casting, dtype):
    found = verdict(kernel, direction, dtype, casting)
    assert found.ok, found.reason


@both_directions
@pytest.mark.parametrize(("dtype", "weight"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16"), ("bf16", None)])
def test_right_kernels_pass_with_other_weights(direction, dtype, weight):
    found = verdict(emulated.InLanes, direction, dtype, weight=weight)
    assert found.ok, found.reason


@both_castings
@both_directions
@pytest.mark.parametrize("shape", [(1, 1), (1, 4096), (3, 2), (5, 8192), (1100, 33)], ids=str)
def test_right_kernels_pass_at_every_shape(direction, casting, shape):
    for dtype in DTYPES:
        found = verdict(emulated.InLanes, direction, dtype, casting, rows=shape[0], hidden=shape[1])
        assert found.ok, f"{dtype}: {found.reason}"


@every_dtype
def test_rstd_is_held_to_a_few_ulp(dtype):
    assert verdict(emulated.InLanes, "forward", dtype, outputs=FORWARD | {"rstd"}).ok
    found = verdict(emulated.RstdStoredInBf16, "forward", dtype, outputs=FORWARD | {"rstd"})
    assert found.error_ulp > 1000
    assert found.reason.startswith("rstd at ")


# Faults of the arithmetic.


@every_dtype
@both_castings
def test_rejects_dw_summed_in_bf16(casting, dtype):
    assert_rejected(emulated.DwSummedInBf16, "backward", dtype, casting)


@every_dtype
@both_castings
@pytest.mark.parametrize("rows", [ROWS, 1])
def test_rejects_dw_a_thousandth_too_small(rows, casting, dtype):
    assert_rejected(emulated.DwSlightlyShort, "backward", dtype, casting, rows=rows)


@every_dtype
@both_castings
def test_rejects_dw_without_the_last_row(casting, dtype):
    assert_rejected(emulated.DwWithoutTheLastRow, "backward", dtype, casting)


@every_dtype
@both_castings
@both_directions
@pytest.mark.parametrize("shape", [(ROWS, HIDDEN), (1, 4096), (5, 128)], ids=str)
def test_rejects_rstd_in_bf16(shape, direction, casting, dtype):
    assert_rejected(emulated.RstdInBf16, direction, dtype, casting, rows=shape[0], hidden=shape[1])


@every_dtype
@both_castings
@both_directions
@pytest.mark.parametrize("shape", [(ROWS, HIDDEN), (1, 4096), (5, 128)], ids=str)
@pytest.mark.parametrize("kernel", [emulated.EpsDoubled, emulated.EpsOutsideTheRoot])
def test_rejects_a_wrong_eps(kernel, shape, direction, casting, dtype):
    assert_rejected(kernel, direction, dtype, casting, rows=shape[0], hidden=shape[1])


@every_dtype
@both_directions
def test_rejects_squares_that_overflow_fp16(direction, dtype):
    assert_rejected(emulated.SquaresInFp16, direction, dtype)


@every_dtype
@both_castings
@pytest.mark.parametrize("shape", [(ROWS, HIDDEN), (1, 4096), (5, 16384)], ids=str)
@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no weight"])
def test_rejects_dx_without_its_mean_term(weight, shape, casting, dtype):
    weight = dtype if weight else None
    assert_rejected(emulated.MeanTermLeftOut, "backward", dtype, casting, rows=shape[0], hidden=shape[1], weight=weight)


@every_dtype
@pytest.mark.parametrize("seed", range(0, 1000, 100))
def test_rejects_a_mean_term_over_the_block_instead_of_the_row(seed, dtype):
    """4000 and 4096 are close, and the mean of random numbers is small: rows with a part of dy along x show it. Without
    them a third of all seeds let it pass in bf16."""
    assert_rejected(emulated.MeanTermOverTheBlock, "backward", dtype, rows=8, hidden=4000, seed=seed)


@both_castings
@both_directions
def test_rejects_fp64_that_went_through_fp32(direction, casting):
    assert_rejected(emulated.LoadsInFp32, direction, "fp64", casting)


@every_dtype
@both_castings
@both_directions
def test_rejects_an_offset_added_in_bf16(direction, casting, dtype):
    assert verdict(Kernel, direction, dtype, casting, offset=True).ok
    assert_rejected(emulated.OffsetAddedInBf16, direction, dtype, casting, offset=True)


@both_directions
@pytest.mark.parametrize("rows", [ROWS, 1])
@pytest.mark.parametrize("dtype", NARROW)
def test_rejects_a_rounding_that_the_contract_does_not_have(dtype, rows, direction):
    assert_rejected(emulated.RoundsXhat, direction, dtype, "fp32", rows=rows)


@both_directions
@pytest.mark.parametrize("rows", [ROWS, 1])
@pytest.mark.parametrize("dtype", NARROW)
def test_rejects_a_rounding_that_the_contract_has_and_the_kernel_lacks(dtype, rows, direction):
    assert_rejected(emulated.DoesNotRoundXhat, direction, dtype, "llama", rows=rows)


# Faults of reading.


@every_dtype
@both_castings
@both_directions
@pytest.mark.parametrize("hidden", [HIDDEN, 127, 1023])
@pytest.mark.parametrize("kernel", [emulated.ReadsOn, emulated.ReadsOnWithinTheTensor])
def test_rejects_a_missing_mask(kernel, hidden, direction, casting, dtype):
    assert_rejected(kernel, direction, dtype, casting, hidden=hidden)


@every_dtype
@both_directions
def test_rejects_a_missing_mask_on_a_single_row(direction, dtype):
    assert_rejected(emulated.ReadsOn, direction, dtype, rows=1, hidden=1023)


@every_dtype
@both_castings
@both_directions
@pytest.mark.parametrize("shape", [(ROWS, HIDDEN), (1, 4096), (5, 16384)], ids=str)
@pytest.mark.parametrize("kernel", [emulated.HalfOfTheRowRead, emulated.LastColumnNotRead])
def test_rejects_a_row_that_is_read_in_part(kernel, shape, direction, casting, dtype):
    assert_rejected(kernel, direction, dtype, casting, rows=shape[0], hidden=shape[1])


@every_dtype
@both_directions
def test_rejects_one_wrong_row(direction, dtype):
    assert_rejected(emulated.OneRowWrong, direction, dtype)


# Faults of writing.


@every_dtype
@both_directions
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (emulated.HalfOfTheRowUnwritten, "unwritten"),
        (emulated.LastElementUnwritten, "unwritten"),
        (emulated.NanInOneElement, "NaN"),
        (emulated.WritesPastTheEnd, "outside of the tensor"),
        (emulated.WritesBeforeTheStart, "outside of the tensor"),
    ],
)
def test_rejects_wrong_writes_with_the_reason(kernel, reason, direction, dtype):
    found = verdict(kernel, direction, dtype)
    assert not found.ok
    assert found.error_ulp == math.inf
    assert reason in found.reason


@every_dtype
def test_rejects_a_backward_that_writes_into_dy(dtype):
    found = verdict(emulated.DxOverDy, "backward", dtype)
    assert not found.ok
    assert "dy" in found.reason
    assert "input was written" in found.reason
    assert verdict(Kernel, "backward", dtype).ok, "the next candidate must find its inputs as they were"


@pytest.mark.parametrize("order", [(Kernel, emulated.HalfOfTheRowUnwritten), (emulated.HalfOfTheRowUnwritten, Kernel)])
def test_no_candidate_fills_the_gaps_of_another(order):
    found = [verdict(kernel, "forward", "fp32").ok for kernel in order]
    assert found == [kernel is Kernel for kernel in order]


def test_the_reason_names_output_shape_error_and_limit():
    found = verdict(emulated.EpsDoubled, "forward", "fp32", rows=3)
    assert found.reason == f"y at 3x{HIDDEN}: off by {found.error_ulp:.3g} ulp, allowed {budget_of('forward', 'y'):.3g}"


def budget_of(direction, name):
    return gate(direction, "fp32", rows=3).cases[0][2][name].budget


@both_directions
def test_one_budget_for_all_cases(direction):
    """Else a right kernel would be rejected where plain torch was lucky on three rows."""
    bounds = [bounds for _, _, bounds in gate(direction, "fp32").cases]
    assert len(bounds) > 1
    assert all(len({b[name].budget for b in bounds}) == 1 for name in bounds[0])


@both_directions
@pytest.mark.parametrize("dtype", NARROW)
def test_sixteen_bit_outputs_are_allowed_one_ulp(dtype, direction):
    for _, _, bounds in gate(direction, dtype).cases:
        assert {name: bound.budget for name, bound in bounds.items() if name != "rstd"} == dict.fromkeys(
            FORWARD if direction == "forward" else BACKWARD, 1.0
        )


# What it looks at.


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 1031, 16384])
def test_every_problem_sees_every_kind_of_row(rows):
    found = checks(Problem("rms_norm", "forward", HIDDEN, rows), seed=5, reach=1)
    assert {count for count, _ in found} == {min(rows, 3), min(rows, 1031), rows}
    assert {(seed + row) % 8 for count, seed in found for row in range(count)} == set(range(8))
    assert sum(count for count, _ in found) < 8 + 2 * rows + 3, "no more than it takes"


def test_inputs_lie_between_guards():
    seen = {}

    def look(problem, tensors):
        for name, tensor in tensors.items():
            wide = tensor.storage_offset()
            around = torch.as_strided(tensor, (tensor.numel() + 2 * wide,), (1,), 0)
            guards = torch.cat([around[:wide], around[-wide:]])
            assert wide >= 16 * tensor.shape[-1], "a tile may be 16 rows tall"
            seen[name] = bool((guards == GUARD_VALUE).all() if name in BACKWARD else guards.isnan().all())
        Kernel()(problem, tensors)

    assert gate("backward", "fp32", rows=3).check(look, BACKWARD).ok
    assert seen == dict.fromkeys(("x", "w", "dy", "rstd", "dx", "dw"), True)


@both_directions
def test_rejects_rows_past_the_last_read_and_written(direction):
    """Without a row mask, NaN is read from the guard and NaN is written over it: that it was NaN before hid it once."""

    def unmasked(problem, tensors):
        wide = {}
        for name, tensor in tensors.items():
            more = tensor.shape[-1] if tensor.dim() == 2 else 0
            wide[name] = torch.as_strided(tensor, (tensor.numel() + more,), (1,)).view(-1, *tensor.shape[1:])
        for name in ("rstd",):
            if name in tensors and tensors[name].dim() == 1:
                wide[name] = torch.as_strided(tensors[name], (len(tensors[name]) + 1,), (1,))
        Kernel()(replace(problem, rows=problem.rows + 1), wide)

    found = gate(direction, "fp32", rows=5).check(unmasked, FORWARD if direction == "forward" else BACKWARD)
    assert not found.ok


@pytest.mark.parametrize(("rows", "right_up_to"), [(1, 1), (1, 7), (64, 64), (64, 500)])
def test_rejects_what_is_right_only_for_the_rows_it_was_tuned_for(rows, right_up_to):
    """dispatch launches a choice for up to `reach` times the rows it was measured at."""

    def short_sighted(problem, tensors):
        Kernel()(problem, tensors)
        tensors["y"][right_up_to:] = 0.0

    assert not gate("forward", "fp32", rows=rows, reach=8).check(short_sighted, FORWARD).ok
    assert gate("forward", "fp32", rows=rows, reach=8).check(Kernel(), FORWARD).ok


def test_reach_ends_where_memory_would():
    wide = Problem("rms_norm", "forward", 1 << 17, 4096)
    assert [rows for rows, _ in checks(wide, 0, 8)] == [3, 1031, 4096]
