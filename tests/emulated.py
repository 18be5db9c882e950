"""Kernels written in plain torch, right ones and faulty ones, to try the gate on."""

from __future__ import annotations

import torch
from torch import Tensor

from tunegen.ops import op_spec
from tunegen.reference import DTYPES

SPEC = op_spec("rms_norm")
EPS, OFFSET = 1e-6, 1.0


class Kernel:
    """A right kernel, as a Runner of the gate. A faulty one overrides the step that it gets wrong."""

    eps = EPS

    def __call__(self, problem, tensors) -> None:
        self.problem, self.tensors = problem, tensors
        self.acc = DTYPES[problem.accumulate]
        x, r = tensors["x"].to(self.acc), self.rstd()
        xhat = x * r
        if problem.direction == "forward":
            self.store("y", self.times_weight(self.round(xhat)))
            if "rstd" in tensors:
                self.store("rstd", r.squeeze(-1))
            return
        dy = tensors["dy"].to(self.acc)
        g = self.times_weight(dy)
        self.store("dx", r * (g - xhat * self.mean_term(g, xhat)))
        if "dw" in tensors:
            self.store("dw", self.sum_rows(dy * self.round(xhat)))

    def rstd(self) -> Tensor:
        return torch.rsqrt(self.sum_columns(self.row_read().square()) / self.problem.hidden + self.eps)

    def row_read(self) -> Tensor:
        """What the sum of squares is made of."""
        return self.tensors["x"].to(self.acc)

    def sum_columns(self, values: Tensor) -> Tensor:
        return values.sum(-1, keepdim=True)

    def round(self, xhat: Tensor) -> Tensor:
        return xhat.to(self.tensors["x"].dtype).to(self.acc) if self.problem.casting == "llama" else xhat

    def times_weight(self, values: Tensor) -> Tensor:
        return values * self.factor() if "w" in self.tensors else values

    def factor(self) -> Tensor:
        return self.tensors["w"].to(self.acc) + (OFFSET if self.problem.offset else 0.0)

    def mean_term(self, g: Tensor, xhat: Tensor) -> Tensor:
        return self.sum_columns(g * xhat) / self.problem.hidden

    def sum_rows(self, values: Tensor) -> Tensor:
        return values.sum(0)

    def store(self, name: str, value: Tensor) -> None:
        self.tensors[name].copy_(value)


class InLanes(Kernel):
    """Another order of addition: 32 lanes across the columns, 4 programs down the rows."""

    def sum_columns(self, values):
        return torch.stack([values[:, lane::32].sum(-1) for lane in range(32)], -1).sum(-1, keepdim=True)

    def sum_rows(self, values):
        return torch.stack([values[program::4].sum(0) for program in range(4)]).sum(0)


class Backwards(Kernel):
    """Another order of addition: from the last element to the first."""

    def sum_columns(self, values):
        return values.flip(-1).sum(-1, keepdim=True)

    def sum_rows(self, values):
        return values.flip(0).sum(0)


class TorchOps(Kernel):
    """torch's own form, by autograd."""

    def __call__(self, problem, tensors):
        for name, value in SPEC.torch_call(problem, dict(tensors))().items():
            tensors[name].copy_(value)


# From here on: faults.


class DwSummedInBf16(Kernel):
    def sum_rows(self, values):
        total = torch.zeros(values.shape[1:], dtype=torch.bfloat16)
        for block in values.split(16):
            total += block.sum(0).bfloat16()
        return total


class DwSlightlyShort(Kernel):
    def sum_rows(self, values):
        return 0.999 * values.sum(0)


class DwWithoutTheLastRow(Kernel):
    def sum_rows(self, values):
        return values[:-1].sum(0)


class RstdInBf16(Kernel):
    def rstd(self):
        return super().rstd().bfloat16().to(self.acc)


class RstdStoredInBf16(Kernel):
    """A right y, and an rstd that backward suffers from."""

    def store(self, name, value):
        super().store(name, value.bfloat16() if name == "rstd" else value)


class EpsDoubled(Kernel):
    eps = 2 * EPS


class EpsOutsideTheRoot(Kernel):
    def rstd(self):
        mean = self.sum_columns(self.row_read().square()) / self.problem.hidden
        return 1 / (mean.sqrt() + self.eps)


class LoadsInFp32(Kernel):
    """What comes in is taken for fp32; all arithmetic is right."""

    def __call__(self, problem, tensors):
        read = {name: tensors[name].float().to(tensors[name].dtype) for name in ("x", "w", "dy") if name in tensors}
        super().__call__(problem, {**tensors, **read})


class SquaresInFp16(Kernel):
    def row_read(self):
        return super().row_read().half().square().sqrt().to(self.acc)


class MeanTermLeftOut(Kernel):
    def mean_term(self, g, xhat):
        return torch.zeros_like(xhat[:, :1])


class MeanTermOverTheBlock(Kernel):
    """Divides by the width of the block instead of the row's."""

    def mean_term(self, g, xhat):
        return self.sum_columns(g * xhat) / (1 << (self.problem.hidden - 1).bit_length())


class OffsetAddedInBf16(Kernel):
    def factor(self):
        return (self.tensors["w"].bfloat16() + OFFSET).to(self.acc)


class RoundsXhat(Kernel):
    """As casting llama does; a fault where the contract rounds once."""

    def round(self, xhat):
        return xhat.to(self.tensors["x"].dtype).to(self.acc)


class DoesNotRoundXhat(Kernel):
    """A fault where the contract is llama's."""

    def round(self, xhat):
        return xhat


class ReadsOn(Kernel):
    """No mask: the block of the next power of two is read to its end, into the next row; after the last row, into
    whatever lies there."""

    def row_read(self):
        x = self.tensors["x"]
        block = 1 << (self.problem.hidden - 1).bit_length()
        return torch.as_strided(x, (x.shape[0], block), x.stride(), x.storage_offset()).to(self.acc)


class ReadsOnWithinTheTensor(ReadsOn):
    """As a missing mask where another tensor's zeros happen to lie behind."""

    def row_read(self):
        return super().row_read().nan_to_num(0.0)


class HalfOfTheRowRead(Kernel):
    """As a block narrower than the row, whose mean is taken over what was read."""

    def row_read(self):
        half = super().row_read()[:, : -(-self.problem.hidden // 2)]
        return half * (self.problem.hidden / half.shape[1]) ** 0.5


class LastColumnNotRead(Kernel):
    def row_read(self):
        return super().row_read()[:, :-1]


class OneRowWrong(Kernel):
    """The last row gets its neighbour's rstd."""

    def rstd(self):
        found = super().rstd()
        found[-1] = found[-2]
        return found


class HalfOfTheRowUnwritten(Kernel):
    def store(self, name, value):
        half = -(-value.shape[-1] // 2)
        self.tensors[name][..., :half].copy_(value[..., :half])


class LastElementUnwritten(Kernel):
    def store(self, name, value):
        self.tensors[name].view(-1)[:-1].copy_(value.reshape(-1)[:-1])


class WritesPastTheEnd(Kernel):
    def store(self, name, value):
        out = self.tensors[name]
        out.copy_(value)
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)


class WritesBeforeTheStart(Kernel):
    def store(self, name, value):
        out = self.tensors[name]
        out.copy_(value)
        torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).fill_(0.0)


class NanInOneElement(Kernel):
    def store(self, name, value):
        super().store(name, value)
        self.tensors[name].view(-1)[0] = torch.nan


class DxOverDy(Kernel):
    """Saves memory by writing dx into the gradient that it was given."""

    def store(self, name, value):
        super().store(name, value)
        if name == "dx":
            super().store("dy", value)
