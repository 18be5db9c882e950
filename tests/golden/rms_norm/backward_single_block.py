# Rendered by tunegen from templates/rms_norm/backward_single_block.py.jinja: edit the template, not this file.
# RSTD=saved acc=tl.float32 acc_name=fp32 accumulate_dw=False casting=fp32 nested=() offset=False weight=True
"""Backward, single block, as in a textbook: a program a row, one partial row of dw for each row of x, then their sum. The partials
are M x N in fp32 (268 MB at 16384x4096): swept as the baseline to beat."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan, Scratch



@triton.jit(do_not_specialize=["M"])
def backward_single_block(
    x_ptr,  # [M, N]
    w_ptr,  # [N]
    dy_ptr,  # [M, N]
    rstd_ptr,  # [M]
    dx_ptr,  # [M, N]
    dw_partial_ptr,  # [M, N]
    x_row_stride,
    dy_row_stride,
    M,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    tl.static_assert(BLOCK_SIZE >= N, "a block narrower than the row reads only part of it")
    rows = tl.cast(tl.program_id(0), tl.int64) + tl.arange(0, 1)  # [1]
    cols = tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    col_mask = cols < N
    mask = (rows < M)[:, None] & col_mask[None, :]  # [1, BLOCK_SIZE]

    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]

    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [ROWS]
    wdy = dy * w[None, :]  # [ROWS, BLOCK_SIZE]
    # The dot of w dy and x does not wait for rstd: both reductions can be in flight at once.
    projection = tl.sum(wdy * x, axis=1) * rstd * (1.0 / N)  # [ROWS]
    xhat = x * rstd[:, None]  # [rows, cols]
    dx = (wdy - xhat * projection[:, None]) * rstd[:, None]

    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_partial_ptr + rows[:, None] * N + cols[None, :], dy * xhat, mask=mask)


@triton.jit(do_not_specialize=["partials"])
def sum_partials(
    dw_partial_ptr,  # [partials, N]
    dw_ptr,  # [N]
    partials,
    N: tl.constexpr,
    COLS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)  # [COLS]
    total = tl.zeros([PARTIAL_ROWS, COLS], tl.float32)
    for start in range(0, partials, PARTIAL_ROWS):
        rows = tl.cast(start, tl.int64) + tl.arange(0, PARTIAL_ROWS)  # [PARTIAL_ROWS]
        mask = (rows < partials)[:, None] & (cols < N)[None, :]
        total += tl.load(dw_partial_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)

    dw = tl.sum(total, axis=0)  # [COLS]
    tl.store(dw_ptr + cols, dw.to(dw_ptr.dtype.element_ty), mask=cols < N)


def plan(p):
    return Plan(
        launches=(
            Launch(backward_single_block, (p.M,)),
            Launch(sum_partials, (triton.cdiv(p.N, 32),), {"partials": p.M, "PARTIAL_ROWS": 64, "COLS": 32}, num_warps=4),
        ),
        scratch={"dw_partial": Scratch((p.M, p.N), "fp32")},
    )
