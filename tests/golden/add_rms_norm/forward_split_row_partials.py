# Rendered by tunegen from templates/add_rms_norm/forward_split_row_partials.py.jinja: edit the template, not this file.
# acc=tl.float32 acc_name=fp32 casting=fp32 nested=() offset=False residual=True save_rstd=True sum_in_fp32=False weight=True
"""Forward, split row without atomics: SPLITS programs (a power of two) a row each store the sum of squares of their part; a second
kernel adds those in a fixed order and scales. Deterministic. For few rows that are wide. Both kernels add x and residual, and the
sum, which may lie over the residual, is stored by the second: if that does not compile, nothing has been written over yet."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan, Scratch


@triton.jit(do_not_specialize=["M"])
def sum_squares(
    x_ptr,  # [M, N]
    residual_ptr,  # [M, N]
    sum_ptr,  # [M, N], for its dtype
    partial_squares_ptr,  # [M, SPLITS]
    x_row_stride,
    residual_row_stride,
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
    residual = tl.load(residual_ptr + rows[:, None] * residual_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    x += residual  # [rows, cols]
    total = x.to(sum_ptr.dtype.element_ty)
    x = total.to(tl.float32)

    tl.store(partial_squares_ptr + rows * SPLITS + part, tl.sum(x * x, axis=1), mask=rows < M)


@triton.jit(do_not_specialize=["M"])
def scale(
    x_ptr,  # [M, N]
    residual_ptr,  # [M, N]
    w_ptr,  # [N]
    partial_squares_ptr,  # [M, SPLITS]
    sum_ptr,  # [M, N]
    y_ptr,  # [M, N]
    rstd_ptr,  # [M]
    x_row_stride,
    residual_row_stride,
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
    residual = tl.load(residual_ptr + rows[:, None] * residual_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]
    parts = rows[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]  # [1, SPLITS]
    squares = tl.sum(tl.load(partial_squares_ptr + parts, mask=(rows < M)[:, None], other=0.0), axis=1)  # [1]

    x += residual  # [rows, cols]
    total = x.to(sum_ptr.dtype.element_ty)
    x = total.to(tl.float32)
    rstd = tl.rsqrt(squares * (1.0 / N) + eps)  # [1]
    y = x * rstd[:, None]  # [rows, cols]
    y = y * w[None, :]

    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    if part == 0:
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    tl.store(sum_ptr + rows[:, None] * N + cols[None, :], total, mask=mask)


def plan(p):
    return Plan(
        launches=(Launch(sum_squares, (p.M * p.SPLITS,)), Launch(scale, (p.M * p.SPLITS,))),
        scratch={"partial_squares": Scratch((p.M, p.SPLITS), "fp32")},
    )
