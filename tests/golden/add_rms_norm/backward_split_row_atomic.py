# Rendered by tunegen from templates/add_rms_norm/backward_split_row_atomic.py.jinja: edit the template, not this file.
# PDL=late RSTD=saved acc=tl.float32 acc_name=fp32 accumulate_dw=False casting=fp32 nested=() offset=False residual=True weight=True
"""Backward, split row with atomics: SPLITS programs a row add their parts of the row's sums; then each program of a second kernel
walks over rows of one column part, adds the gradient of the sum, writes dx, keeps its share of dw in registers and adds it once;
a third kernel casts dw."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan, Scratch


@triton.jit(do_not_specialize=["M"])
def sum_rows(
    x_ptr,  # [M, N], the stored sum
    w_ptr,  # [N]
    dy_ptr,  # [M, N]
    dots_ptr,  # [M]
    x_row_stride,
    dy_row_stride,
    M,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    tl.static_assert(SPLITS * BLOCK_SIZE >= N, "the parts together are narrower than the row")
    rows = tl.cast(tl.program_id(0) // SPLITS, tl.int64) + tl.arange(0, 1)  # [1]
    part = tl.program_id(0) % SPLITS
    # A part that starts past the end of the row is masked out as a whole: it adds 0 and stores nothing.
    cols = part * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    col_mask = cols < N
    mask = (rows < M)[:, None] & col_mask[None, :]  # [1, BLOCK_SIZE]

    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]

    tl.atomic_add(dots_ptr + rows, tl.sum(dy * w[None, :] * x, axis=1), mask=rows < M, sem="relaxed")


@triton.jit(do_not_specialize=["M"])
def finish_rows(
    x_ptr,  # [M, N], the stored sum
    w_ptr,  # [N]
    dy_ptr,  # [M, N]
    dsum_ptr,  # [M, N]
    rstd_ptr,  # [M]
    dots_ptr,  # [M]
    dx_ptr,  # [M, N]
    dw_sum_ptr,  # [N]
    x_row_stride,
    dy_row_stride,
    dsum_row_stride,
    M,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    tl.static_assert(SPLITS * BLOCK_SIZE >= N, "the parts together are narrower than the row")
    cols = (tl.program_id(0) % SPLITS) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    col_mask = cols < N
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]
    dw = tl.zeros([BLOCK_SIZE], tl.float32)

    for row in tl.range(tl.program_id(0) // SPLITS, M, tl.num_programs(0) // SPLITS):
        rows = tl.cast(row, tl.int64) + tl.arange(0, 1)  # [1]
        mask = (rows < M)[:, None] & col_mask[None, :]  # [1, BLOCK_SIZE]
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dsum = tl.load(dsum_ptr + rows[:, None] * dsum_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [1]
        projection = tl.load(dots_ptr + rows, mask=rows < M, other=0.0) * rstd * (1.0 / N)  # [1]
        wdy = dy * w[None, :]  # [1, BLOCK_SIZE]
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
    # About four programs an SM: enough to hide latency, and few enough that adding dw up costs little.
    walkers = min(p.M, max(1, 4 * p.SMS // p.SPLITS))
    scratch = {
        "dots": Scratch((p.M,), "fp32", zero=True),
        "dw_sum": Scratch((p.N,), "fp32", zero=True),
    }
    return Plan(
        launches=(
            Launch(sum_rows, (p.M * p.SPLITS,)),
            Launch(finish_rows, (walkers * p.SPLITS,)),
            Launch(cast_dw, (triton.cdiv(p.N, 1024),), {"CAST_COLS": 1024}, num_warps=4, pdl=True),
        ),
        scratch=scratch,
    )
