# Rendered by tunegen from templates/rms_norm/backward_persistent_partials.py.jinja: edit the template, not this file.
# PDL=late RSTD=saved acc=tl.float32 acc_name=fp32 accumulate_dw=False casting=fp32 nested=() offset=False weight=True
"""Backward, two-pass dw: a fixed number of programs walk over tiles of rows, each keeps its share of dw in registers and writes
it once as a partial row; a second kernel adds the partial rows. Deterministic for a given number of programs."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan, Scratch


@triton.jit(do_not_specialize=["M"])
def backward_persistent_partials(
    x_ptr,  # [M, N]
    w_ptr,  # [N]
    dy_ptr,  # [M, N]
    rstd_ptr,  # [M]
    dx_ptr,  # [M, N]
    dw_partial_ptr,  # [programs, N]
    x_row_stride,
    dy_row_stride,
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
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)  # [ROWS]
        wdy = dy * w[None, :]  # [ROWS, BLOCK_SIZE]
        # The dot of w dy and x does not wait for rstd: both reductions can be in flight at once.
        projection = tl.sum(wdy * x, axis=1) * rstd * (1.0 / N)  # [ROWS]
        xhat = x * rstd[:, None]  # [rows, cols]
        dx = (wdy - xhat * projection[:, None]) * rstd[:, None]
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += tl.sum(dy * xhat, axis=0)

    # The next kernel starts now and waits for this one's end: .3 to .7 us a call less (H200, 1 to 16384 rows of 4096).
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(dw_partial_ptr + tl.cast(tl.program_id(0), tl.int64) * N + cols, dw, mask=col_mask)


@triton.jit(do_not_specialize=["partials"])
def sum_partials(
    dw_partial_ptr,  # [partials, N]
    dw_ptr,  # [N]
    partials,
    N: tl.constexpr,
    COLS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
):
    tl.extra.cuda.gdc_wait()  # for the kernel ahead: nothing that it writes may be read before
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)  # [COLS]
    total = tl.zeros([PARTIAL_ROWS, COLS], tl.float32)
    for start in range(0, partials, PARTIAL_ROWS):
        rows = tl.cast(start, tl.int64) + tl.arange(0, PARTIAL_ROWS)  # [PARTIAL_ROWS]
        mask = (rows < partials)[:, None] & (cols < N)[None, :]
        total += tl.load(dw_partial_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)

    dw = tl.sum(total, axis=0)  # [COLS]
    tl.store(dw_ptr + cols, dw.to(dw_ptr.dtype.element_ty), mask=cols < N)


def plan(p):
    programs = min(p.PROGRAMS_PER_SM * p.SMS, triton.cdiv(p.M, p.ROWS))
    tall = p.PROGRAMS_PER_SM > 1
    return Plan(
        launches=(
            Launch(backward_persistent_partials, (programs,)),
            # 16 columns a program and 128 rows at a time: 1 us less than 32 and 32 at 131072x128, .3 at 8192x5120; 512 at a
            # time, where there are more than 132: .8 less at 32768x1024, .4 at 16384x2048 (H200).
            Launch(
                sum_partials,
                (triton.cdiv(p.N, 16),),
                {"partials": programs, "PARTIAL_ROWS": 512 if tall else 128, "COLS": 16},
                num_warps=8 if tall else 4,
                pdl=True,
            ),
        ),
        scratch={"dw_partial": Scratch((programs, p.N), "fp32")},
    )
