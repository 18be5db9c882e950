"""The specification in plain torch: what every kernel is held to, and what runs on CPU tensors. No kernel is imported
here.

Forward, Zhang and Sennrich 2019 (arXiv:1910.07467): y = x / sqrt(mean(x^2) + eps) * (weight + offset).
Backward with r = 1 / sqrt(mean(x^2) + eps), xhat = x r, g = (weight + offset) dy:
dx = r (g - xhat mean(g xhat)), dw = sum over rows of dy xhat.
With a residual the norm reads x + residual, which is a result too: what its other readers send back is added to dx.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Expected(NamedTuple):
    """What an output must be. `slack` is how far each element may lie from it for a reason of its own (see `forward`);
    `scale`, of any shape that broadcasts, is the size below which an element's error is counted as if the element were
    of that size: that of the terms which an error of arithmetic comes from. By default it is mean |value|."""

    value: Tensor
    slack: Tensor | None = None
    scale: Tensor | None = None


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, casting: str = "fp32"
) -> Tensor:
    """RMSNorm over the last axis of `x` (any shape), in differentiable torch operators; the result has x's shape and
    dtype.

    All arithmetic is in fp32 (fp64 for fp64 inputs). casting "fp32" rounds once, at the end; "llama" rounds x-hat to
    x's dtype before the product with the weight, as Hugging Face's LlamaRMSNorm and Qwen3RMSNorm do.
    """
    return _norm(x.to(accumulate_dtype(x)), x.dtype, weight, eps, offset, casting)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "fp32",
    sum_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of `x + residual`, and that sum, in differentiable torch operators; both have x's shape and dtype.

    The norm reads the sum as it is returned, rounded to x's dtype, or with `sum_in_fp32` as it was before.
    """
    total = x + residual
    if not sum_in_fp32:
        return rms_norm(total, weight, eps, offset=offset, casting=casting), total
    acc = accumulate_dtype(x)
    return _norm(x.to(acc) + residual.to(acc), x.dtype, weight, eps, offset, casting), total


def _norm(wide: Tensor, dtype: torch.dtype, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
    """RMSNorm of what is in the accumulation dtype already, rounded to `dtype`."""
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if casting == "llama":
        # Added as a constant, which is exact: through casts autograd would round the gradient too.
        normed = normed + (normed.to(dtype).to(wide.dtype) - normed).detach()
    if weight is not None:
        normed = normed * (weight.to(wide.dtype) + offset)
    return normed.to(dtype)


def forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, round_to: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(y, rstd, slack)` for x (M, N), computed in x's own dtype and not rounded, but for x-hat where `round_to` is
    given.

    `slack` (M, N) is how far y may lie from the exact value because x-hat sits so close to a rounding boundary of
    `round_to` that arithmetic in fp32 may fall on its other side; it is 0 almost everywhere, and everywhere without
    `round_to`.
    """
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    xhat, gap = _round_xhat(x * rstd, round_to)
    scale = torch.ones_like(x[:1]) if weight is None else (weight.to(x.dtype) + offset)[None, :]
    return xhat * scale, rstd.squeeze(-1), gap * scale.abs()


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, round_to: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """`(dx, dw)` for dy and x (M, N), computed in x's own dtype.

    dw is summed from the rounded x-hat where `round_to` is given; dx takes that rounding for the identity, as
    autograd does.
    """
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    xhat = x * rstd
    g = dy if weight is None else dy * (weight.to(x.dtype) + offset)[None, :]
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    rounded = xhat if round_to is None else xhat + (xhat.to(round_to).to(xhat.dtype) - xhat).detach()
    return dx, (dy * rounded).sum(0)


def weight_slack(dy: Tensor, x: Tensor, eps: float, round_to: torch.dtype | None) -> Tensor | None:
    """How far dw (N) may lie from that of `backward`, as `slack` in `forward`; None without `round_to`."""
    if round_to is None:
        return None
    _, gap = _round_xhat(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), round_to)
    return (dy.abs() * gap).sum(0)


def _round_xhat(xhat: Tensor, round_to: torch.dtype | None) -> tuple[Tensor, Tensor]:
    if round_to is None:
        return xhat, torch.zeros_like(xhat)
    # Eight units of fp32 rounding: what the sum of squares, rsqrt and the product may be off by.
    nudge = 8 * torch.finfo(torch.float32).eps
    low, high = ((xhat * factor).to(round_to).to(xhat.dtype) for factor in (1 - nudge, 1 + nudge))
    return xhat.to(round_to).to(xhat.dtype), (high - low).abs()
