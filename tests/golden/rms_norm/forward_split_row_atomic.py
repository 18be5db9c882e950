# Rendered by tunegen from templates/rms_norm/forward_split_row_atomic.py.jinja: edit the template, not this file.
# acc=tl.float32 acc_name=fp32 casting=fp32 nested=() offset=False save_rstd=True weight=True
"""Forward, split row with atomics: SPLITS programs a row add their sums of squares into one number, in any order; a second kernel
scales. For few rows that are wide; the last bits differ from run to run."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan, Scratch


@triton.jit(do_not_specialize=["M"])
def sum_squares(
    x_ptr,  # [M, N]
    squares_ptr,  # [M]
    x_row_stride,
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

    tl.atomic_add(squares_ptr + rows, tl.sum(x * x, axis=1), mask=rows < M, sem="relaxed")


@triton.jit(do_not_specialize=["M"])
def scale(
    x_ptr,  # [M, N]
    w_ptr,  # [N]
    squares_ptr,  # [M]
    y_ptr,  # [M, N]
    rstd_ptr,  # [M]
    x_row_stride,
    M,
    eps: tl.float32,
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
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]
    squares = tl.load(squares_ptr + rows, mask=rows < M, other=0.0)  # [1]

    rstd = tl.rsqrt(squares * (1.0 / N) + eps)  # [1]
    y = x * rstd[:, None]  # [rows, cols]
    y = y * w[None, :]

    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    if part == 0:
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def plan(p):
    return Plan(
        launches=(Launch(sum_squares, (p.M * p.SPLITS,)), Launch(scale, (p.M * p.SPLITS,))),
        scratch={"squares": Scratch((p.M,), "fp32", zero=True)},
    )
