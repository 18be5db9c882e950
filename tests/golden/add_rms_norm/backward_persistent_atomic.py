# Rendered by tunegen from templates/add_rms_norm/backward_persistent_atomic.py.jinja: edit the template, not this file.
# PDL=late RSTD=saved acc=tl.float32 acc_name=fp32 accumulate_dw=False casting=fp32 nested=() offset=False residual=True weight=True
"""Backward, persistent with atomic dw: as persistent_partials, but each program adds its share of dw to one row of sums, in any
order: less workspace, and dw differs from run to run in its last bits."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan, Scratch


@triton.jit(do_not_specialize=["M"])
def backward_persistent_atomic(
    x_ptr,  # [M, N], the stored sum
    w_ptr,  # [N]
    dy_ptr,  # [M, N]
    dsum_ptr,  # [M, N]
    rstd_ptr,  # [M]
    dx_ptr,  # [M, N]
    dw_sum_ptr,  # [N]
    x_row_stride,
    dy_row_stride,
    dsum_row_stride,
    M,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    tl.static_assert(BLOCK_SIZE >= N, "a block narrower than the row reads only part of it")
    cols = tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    col_mask = cols < N
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]
    dw = tl.zeros([BLOCK_SIZE], tl.float32)

    # STAGES > 1 turns the loads of the next tiles into asynchronous copies: .5 -> .9 of copy bandwidth at 16384x4096 (H200).
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        mask = (rows < M)[:, None] & col_mask[None, :]  # [ROWS, BLOCK_SIZE]
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dsum = tl.load(dsum_ptr + rows[:, None] * dsum_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [ROWS]
        wdy = dy * w[None, :]  # [ROWS, BLOCK_SIZE]
        # The dot of w dy and x does not wait for rstd: both reductions can be in flight at once.
        projection = tl.sum(wdy * x, axis=1) * rstd * (1.0 / N)  # [ROWS]
        xhat = x * rstd[:, None]  # [rows, cols]
        dx = (wdy - xhat * projection[:, None]) * rstd[:, None] + dsum
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += tl.sum(dy * xhat, axis=0)

    # The next kernel starts now and waits for this one's end: .3 to .7 us a call less (H200, 1 to 16384 rows of 4096).
    tl.extra.cuda.gdc_launch_dependents()
    tl.atomic_add(dw_sum_ptr + cols, dw, mask=col_mask, sem="relaxed")


@triton.jit
def cast_dw(
    dw_sum_ptr,  # [N]
    dw_ptr,  # [N]
    N: tl.constexpr,
    CAST_COLS: tl.constexpr,
):
    tl.extra.cuda.gdc_wait()  # for the kernel ahead: nothing that it writes may be read before
    cols = tl.program_id(0) * CAST_COLS + tl.arange(0, CAST_COLS)  # [CAST_COLS]
    dw = tl.load(dw_sum_ptr + cols, mask=cols < N, other=0.0)
    tl.store(dw_ptr + cols, dw.to(dw_ptr.dtype.element_ty), mask=cols < N)


def plan(p):
    programs = min(p.PROGRAMS_PER_SM * p.SMS, triton.cdiv(p.M, p.ROWS))
    return Plan(
        launches=(
            Launch(backward_persistent_atomic, (programs,)),
            Launch(cast_dw, (triton.cdiv(p.N, 1024),), {"CAST_COLS": 1024}, num_warps=4, pdl=True),
        ),
        scratch={"dw_sum": Scratch((p.N,), "fp32", zero=True)},
    )
