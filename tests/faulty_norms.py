"""Norms with one fault each, as an `autograd.Function` of torch operators, and the same without a fault.

They round as Qwen3's: x-hat to x's dtype before the product with the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 16
"""Rows whose sum is rounded to bf16 at a time, where dw is summed in bf16."""

RIGHT = "no fault"
FAULTS = ("no dw", "dw x .9", "dx without the mean term", "rstd in bf16", "dw summed in bf16", "eps 1e-5")


def norm_with(fault: str) -> Any:
    """`norm(x, weight, eps)` with that fault, one of FAULTS, or RIGHT."""

    def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return _Norm.apply(x, weight, 1e-5 if fault == "eps 1e-5" else eps, fault)

    return norm


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, fault: str) -> Tensor:
        wide = x.to(_accumulate(x))
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if fault == "rstd in bf16":
            rstd = rstd.bfloat16().to(wide.dtype)
        ctx.save_for_backward(x, weight, rstd)
        ctx.fault = fault
        xhat = (wide * rstd).to(x.dtype)
        return xhat if weight is None else weight * xhat

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        wide, dy = x.to(rstd.dtype), dy.to(rstd.dtype)
        xhat = wide * rstd
        g = dy if weight is None else dy * weight.to(rstd.dtype)
        mean = 0.0 if ctx.fault == "dx without the mean term" else (g * xhat).mean(-1, keepdim=True)
        dx = (rstd * (g - xhat * mean)).to(x.dtype)
        if weight is None or ctx.fault == "no dw":
            return dx, None, None, None
        terms = (dy * xhat.to(x.dtype).to(rstd.dtype)).reshape(-1, x.shape[-1])
        dw = _sum_in_bf16(terms) if ctx.fault == "dw summed in bf16" else terms.sum(0)
        return dx, (0.9 * dw if ctx.fault == "dw x .9" else dw).to(weight.dtype), None, None


def _accumulate(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _sum_in_bf16(terms: Tensor) -> Tensor:
    """Each block's sum in bf16, and the sum of those in bf16 too."""
    total = torch.zeros(terms.shape[-1], dtype=torch.bfloat16, device=terms.device)
    for block in terms.split(BLOCK):
        total = total + block.bfloat16().sum(0)
    return total.to(terms.dtype)
