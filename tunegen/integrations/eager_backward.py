"""The tier between: forward by the tuned kernel, backward left to torch's eager operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..ops.arguments import is_distributed
from ..ops.rms_norm import backward_by_torch, rms_norm


def rms_norm_eager_backward(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, casting: str = "fp32"
) -> Tensor:
    """`rms_norm` whose backward is the formula in torch operators, so that derivatives of any order exist.

    Arguments, result and errors are those of `tunegen.rms_norm`.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return rms_norm(x, weight, eps, offset=offset, casting=casting)  # torch's operators there already
    if is_distributed(x, weight):
        from ..ops.distributed import by_shards

        def shard(x: Tensor, weight: Tensor | None) -> tuple[Tensor]:
            return (rms_norm_eager_backward(x, weight, eps, offset=offset, casting=casting),)

        if found := by_shards(shard, (x,), weight):
            return found[0]
    y: Tensor = _EagerBackward.apply(x, weight, eps, offset, casting)
    return y


class _EagerBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.contract = eps, offset, casting
        return rms_norm(x, weight, eps, offset=offset, casting=casting)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        eps, offset, casting = ctx.contract
        dx, dw = backward_by_torch(dy, x, weight, eps, offset, casting, ctx.needs_input_grad[1])
        return dx if ctx.needs_input_grad[0] else None, dw, None, None, None
