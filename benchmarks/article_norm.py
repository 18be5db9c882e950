"""RMSNorm as articles about `triton.autotune` write it: a row a program, many warps and stages, keyed by the width.
Imports triton; used by `first_call.py`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CONFIGS = [
    triton.Config({}, num_warps=warps, num_stages=stages) for warps in (1, 2, 4, 8, 16, 32) for stages in (1, 2, 3, 4)
]


def rms_norm_fwd(x_ptr, w_ptr, y_ptr, row_stride, N, eps, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < N
    x = tl.load(x_ptr + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(y_ptr + row * row_stride + cols, (x * rstd * w).to(y_ptr.dtype.element_ty), mask=mask)


def tuned(cache_results: bool) -> Any:
    """The kernel under `triton.autotune`; None where this Triton cannot store its results."""
    more = {}
    if cache_results:
        if "cache_results" not in inspect.signature(triton.autotune).parameters:
            return None
        more["cache_results"] = True
    return triton.autotune(configs=CONFIGS, key=["N"], **more)(triton.jit(rms_norm_fwd))


def rms_norm(kernel: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Launch it."""
    rows, hidden = x.shape
    y = torch.empty_like(x)
    kernel[(rows,)](x, weight, y, x.stride(0), hidden, 1e-6, BLOCK_SIZE=triton.next_power_of_2(hidden))
    return y
