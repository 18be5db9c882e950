# Rendered by tunegen from templates/rms_norm/backward_side_by_side.py.jinja: edit the template, not this file.
# RSTD=saved acc=tl.float32 acc_name=fp32 accumulate_dw=False casting=fp32 nested=() offset=False weight=True
"""Backward in one launch: some programs finish ROWS rows of dx each, others COLS columns of dw over all rows. With rstd saved dw does
not wait for dx; x and dy are read twice, the second time from L2 where they fit. Deterministic, without workspace."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan


@triton.jit(do_not_specialize=["M"])
def backward_side_by_side(
    x_ptr,  # [M, N]
    w_ptr,  # [N]
    dy_ptr,  # [M, N]
    rstd_ptr,  # [M]
    dx_ptr,  # [M, N]
    dw_ptr,  # [N]
    x_row_stride,
    dy_row_stride,
    M,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tl.static_assert(BLOCK_SIZE >= N, "a block narrower than the row reads only part of it")
    slabs: tl.constexpr = tl.cdiv(N, COLS)

    if tl.program_id(0) < slabs:  # dw first: its programs run longest
        cols = tl.program_id(0) * COLS + tl.arange(0, COLS)  # [COLS]
        total = tl.zeros([DEPTH, COLS], tl.float32)
        for start in tl.range(0, M, DEPTH):
            rows = tl.cast(start, tl.int64) + tl.arange(0, DEPTH)  # [DEPTH]
            mask = (rows < M)[:, None] & (cols < N)[None, :]  # [DEPTH, COLS]
            x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [DEPTH]
            xhat = x * rstd[:, None]  # [DEPTH, COLS]
            total += dy * xhat
        dw = tl.sum(total, axis=0)  # [COLS]
        tl.store(dw_ptr + cols, dw.to(dw_ptr.dtype.element_ty), mask=cols < N)
        return

    rows = tl.cast(tl.program_id(0) - slabs, tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    cols = tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    mask = (rows < M)[:, None] & (cols < N)[None, :]  # [ROWS, BLOCK_SIZE]
    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)  # [BLOCK_SIZE]
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [ROWS]
    wdy = dy * w[None, :]  # [ROWS, BLOCK_SIZE]
    # The dot of w dy and x does not wait for rstd: both reductions can be in flight at once.
    projection = tl.sum(wdy * x, axis=1) * rstd * (1.0 / N)  # [ROWS]
    xhat = x * rstd[:, None]  # [rows, cols]
    dx = (wdy - xhat * projection[:, None]) * rstd[:, None]
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


def plan(p):
    return Plan((Launch(backward_side_by_side, (triton.cdiv(p.N, p.COLS) + triton.cdiv(p.M, p.ROWS),)),))
