"""The tier between: forward by the tuned kernel, backward left to torch's eager operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..ops.rms_norm import rms_norm


def rms_norm_eager_backward(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, casting: str = "fp32"
) -> Tensor:
    """`rms_norm` with a backward of torch operators: the plain formula is run again under autograd.

    Arguments, result and errors are those of `tunegen.rms_norm`; derivatives of any order.
    """
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
        eps, offset, casting = ctx.contract
        x: Any
        weight: Any
        again = torch.is_grad_enabled()  # create_graph=True
        with torch.enable_grad():
            # An alias of each, so that the graph of this formula alone is walked.
            x, weight = (None if t is None else t.view_as(t) if again else t.detach() for t in ctx.saved_tensors)
            needed = [t for t, need in zip((x, weight), ctx.needs_input_grad, strict=False) if need]
            for tensor in needed:
                if not tensor.requires_grad:
                    tensor.requires_grad_()
            y = reference.rms_norm(x, weight, eps, offset=offset, casting=casting)
            found = iter(torch.autograd.grad(y, needed, dy, create_graph=again))
        dx, dw = (next(found) if need else None for need in ctx.needs_input_grad[:2])
        return dx, dw, None, None, None
