"""Verification of add_rms_norm: right kernels pass, those that get the residual wrong do not."""

from __future__ import annotations

import functools

import pytest
import torch
from emulated import Backwards, InLanes, Kernel

from tunegen.model import Problem
from tunegen.ops import op_spec
from tunegen.reference import DTYPES
from tunegen.verify import Gate

SPEC = op_spec("add_rms_norm")
ROWS, HIDDEN = 130, 250
OUTPUTS = {"forward": frozenset({"y", "sum"}), "backward": frozenset({"dx", "dw"})}

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
narrow = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


class Fused(Kernel):
    """A right kernel: the norm of the sum, and the gradient of the sum added before dx is rounded."""

    def __call__(self, problem, tensors):
        self.given = tensors
        self.acc = DTYPES[problem.accumulate]
        if problem.direction == "forward":
            total = self.add(tensors["x"].to(self.acc), tensors["residual"].to(self.acc))
            stored = total.to(tensors["x"].dtype)
            super().__call__(problem, {**tensors, "x": self.read(total, stored)})
            tensors["sum"].copy_(stored)
        else:
            super().__call__(problem, tensors)

    def add(self, x, residual):
        return x + residual

    def read(self, total, stored):
        return stored

    def store(self, name, value):
        if name == "dx":
            value = self.add_dsum(value, self.given["dsum"].to(self.acc))
        super().store(name, value)

    def add_dsum(self, dx, dsum):
        return dx + dsum


class FusedInLanes(Fused, InLanes):
    pass


class FusedBackwards(Fused, Backwards):
    pass


class ReadsInFp32(Fused):
    """Right where the contract says so, a fault elsewhere."""

    def read(self, total, stored):
        return total


class ByTorch(Fused):
    def __call__(self, problem, tensors):
        for name, value in SPEC.torch_call(problem, dict(tensors))().items():
            tensors[name].copy_(value)


# Faults.


class ResidualLeftOut(Fused):
    def add(self, x, residual):
        return x


class ResidualSlightlyShort(Fused):
    def add(self, x, residual):
        return x + 0.999 * residual


class ResidualOfTheRowBefore(Fused):
    def add(self, x, residual):
        return x + residual.roll(1, 0)


class SumNotStored(Fused):
    def __call__(self, problem, tensors):
        super().__call__(problem, {**tensors, "sum": torch.empty_like(tensors["x"])})


class DsumLeftOut(Fused):
    def add_dsum(self, dx, dsum):
        return dx


class DsumTwice(Fused):
    def add_dsum(self, dx, dsum):
        return dx + 2 * dsum


class DxRoundedTwice(Fused):
    """As autograd does it: dx is rounded, then the gradient of the sum is added in the same dtype."""

    def add_dsum(self, dx, dsum):
        return dx.to(self.given["x"].dtype).to(self.acc) + dsum


class NormPartSlightlyShort(Fused):
    def add_dsum(self, dx, dsum):
        return 0.998 * dx + dsum


class DyTakesDsum(Fused):
    """The gradient of the sum sent through the norm too."""

    def __call__(self, problem, tensors):
        super().__call__(problem, {**tensors, "dy": tensors["dy"] + tensors["dsum"]})


@functools.cache
def gate(direction, dtype, casting="fp32", **more):
    problem = Problem(
        "add_rms_norm", direction, HIDDEN, ROWS, dtype, dtype, casting, weight_grad=direction == "backward", **more
    )
    return Gate(SPEC, problem, torch.device("cpu"))


def verdict(kernel, direction, dtype, **more):
    return gate(direction, dtype, **more).check(kernel(), OUTPUTS[direction])


@every_dtype
@pytest.mark.parametrize("casting", ["fp32", "llama"])
@pytest.mark.parametrize("direction", OUTPUTS)
@pytest.mark.parametrize("kernel", [Fused, FusedInLanes, FusedBackwards])
def test_right_kernels_pass(kernel, direction, casting, dtype):
    found = verdict(kernel, direction, dtype, casting=casting)
    assert found.ok, found.reason


@narrow
def test_a_kernel_that_reads_the_sum_in_fp32_passes_where_that_is_the_contract(dtype):
    found = verdict(ReadsInFp32, "forward", dtype, sum_in_fp32=True)
    assert found.ok, found.reason
    assert not verdict(Fused, "forward", dtype, sum_in_fp32=True).ok
    assert not verdict(ReadsInFp32, "forward", dtype).ok


@every_dtype
def test_torch_passes_forward_and_backward_where_it_rounds_no_more_than_once(dtype):
    assert verdict(ByTorch, "forward", dtype).ok
    assert verdict(ByTorch, "backward", dtype).ok == (dtype in ("fp32", "fp64"))


@every_dtype
@pytest.mark.parametrize("kernel", [ResidualLeftOut, ResidualOfTheRowBefore, SumNotStored])
def test_a_fault_of_forward_is_rejected(kernel, dtype):
    assert not verdict(kernel, "forward", dtype).ok


@every_dtype
@pytest.mark.parametrize("kernel", [DsumLeftOut, DsumTwice, DyTakesDsum])
def test_a_fault_of_backward_is_rejected(kernel, dtype):
    assert not verdict(kernel, "backward", dtype).ok


@narrow
def test_small_faults_are_rejected_too(dtype):
    assert not verdict(ResidualSlightlyShort, "forward", dtype).ok
    assert not verdict(DxRoundedTwice, "backward", dtype).ok
    assert not verdict(NormPartSlightlyShort, "backward", dtype).ok
