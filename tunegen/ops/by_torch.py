"""The norm in torch operators: what answers where no kernel does."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import reference


def by_torch(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
    """`F.rms_norm` on the GPU where its contract is the same, else the reference in torch operators."""
    fused = x.is_cuda and casting == "fp32" and (weight is None or (offset == 0.0 and weight.dtype == x.dtype))
    if fused and x.numel():
        # Under autocast torch would compute a copy of x in fp32, and return that dtype.
        plain = torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext()
        with plain:
            return F.rms_norm(x, x.shape[-1:], weight, eps).contiguous()
    return reference.rms_norm(x, weight, eps, offset=offset, casting=casting).contiguous()


def rstd_by_torch(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row (M), in the accumulation dtype."""
    return torch.rsqrt(x.reshape(-1, x.shape[-1]).to(reference.accumulate_dtype(x)).square().mean(-1) + eps)


def backward_by_torch(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    weight_grad: bool,
    dsum: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The backward formula in torch operators, differentiable in dy, x, the weight and `dsum`, which is added to dx."""
    acc = reference.accumulate_dtype(x)
    hidden = x.shape[-1]
    round_to = x.dtype if casting == "llama" else None
    wide_dy, wide_x = dy.reshape(-1, hidden).to(acc), x.reshape(-1, hidden).to(acc)
    dx, dw = reference.backward(wide_dy, wide_x, weight, eps, offset, round_to)
    dx = dx if dsum is None else dx + dsum.reshape(-1, hidden).to(acc)
    return dx.to(x.dtype).view(x.shape), dw.to(weight.dtype) if weight is not None and weight_grad else None
