# Rendered by tunegen from templates/add_rms_norm/backward_dx_only.py.jinja: edit the template, not this file.
# RSTD=saved acc=tl.float32 acc_name=fp32 accumulate_dw=False casting=fp32 nested=() offset=False residual=True weight=True
"""Backward without a gradient of the weight (frozen, or none): a program finishes ROWS whole rows held in registers. dx is the
gradient of x and of residual alike."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan


@triton.jit(do_not_specialize=["M"])
def backward_dx_only(
    x_ptr,  # [M, N], the stored sum
    w_ptr,  # [N]
    dy_ptr,  # [M, N]
    dsum_ptr,  # [M, N]
    rstd_ptr,  # [M]
    dx_ptr,  # [M, N]
    x_row_stride,
    dy_row_stride,
    dsum_row_stride,
    M,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    tl.static_assert(BLOCK_SIZE >= N, "a block narrower than the row reads only part of it")
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    cols = tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    col_mask = cols < N
    mask = (rows < M)[:, None] & col_mask[None, :]  # [ROWS, BLOCK_SIZE]

    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dsum = tl.load(dsum_ptr + rows[:, None] * dsum_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]

    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [ROWS]
    wdy = dy * w[None, :]  # [ROWS, BLOCK_SIZE]
    # The dot of w dy and x does not wait for rstd: both reductions can be in flight at once.
    projection = tl.sum(wdy * x, axis=1) * rstd * (1.0 / N)  # [ROWS]
    xhat = x * rstd[:, None]  # [rows, cols]
    dx = (wdy - xhat * projection[:, None]) * rstd[:, None] + dsum

    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


def plan(p):
    return Plan((Launch(backward_dx_only, (triton.cdiv(p.M, p.ROWS),)),))
