# Rendered by tunegen from templates/add_rms_norm/forward_persistent.py.jinja: edit the template, not this file.
# acc=tl.float32 acc_name=fp32 casting=fp32 nested=() offset=False residual=True save_rstd=True sum_in_fp32=False weight=True
"""Forward, persistent: a fixed number of programs walk over tiles of ROWS whole rows; the weight is loaded once a program and the
next tiles of x and residual are on their way while one is added and normalised."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan


@triton.jit(do_not_specialize=["M"])
def forward_persistent(
    x_ptr,  # [M, N]
    residual_ptr,  # [M, N]
    w_ptr,  # [N]
    sum_ptr,  # [M, N]
    y_ptr,  # [M, N]
    rstd_ptr,  # [M]
    x_row_stride,
    residual_row_stride,
    M,
    eps: tl.float32,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tl.static_assert(BLOCK_SIZE >= N, "a block narrower than the row reads only part of it")
    cols = tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    col_mask = cols < N
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]

    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        mask = (rows < M)[:, None] & col_mask[None, :]  # [ROWS, BLOCK_SIZE]
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + rows[:, None] * residual_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x += residual  # [rows, cols]
        total = x.to(sum_ptr.dtype.element_ty)
        x = total.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / N) + eps)  # [ROWS]
        y = x * rstd[:, None]  # [rows, cols]
        y = y * w[None, :]
        tl.store(sum_ptr + rows[:, None] * N + cols[None, :], total, mask=mask)
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def plan(p):
    programs = min(p.PROGRAMS_PER_SM * p.SMS, triton.cdiv(p.M, p.ROWS))
    return Plan((Launch(forward_persistent, (programs,)),))
