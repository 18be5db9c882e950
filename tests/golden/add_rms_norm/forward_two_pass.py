# Rendered by tunegen from templates/add_rms_norm/forward_two_pass.py.jinja: edit the template, not this file.
# acc=tl.float32 acc_name=fp32 casting=fp32 nested=() offset=False residual=True save_rstd=True sum_in_fp32=False weight=True
"""Forward, two passes over a wide row: a program a row, CHUNK columns at a time. The first pass adds and sums squares and asks L2
to keep what the second reads again: the stored sum, or x and residual where the norm reads the sum in fp32."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan


@triton.jit(do_not_specialize=["M"])
def forward_two_pass(
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
    CHUNK: tl.constexpr,
):
    rows = tl.cast(tl.program_id(0), tl.int64) + tl.arange(0, 1)  # [1]
    row_mask = rows < M

    # Keeping one sum a lane leaves a single reduction across lanes for the whole row.
    squares = tl.zeros([1, CHUNK], tl.float32)
    for start in tl.range(0, N, CHUNK):
        cols = start + tl.arange(0, CHUNK)  # [CHUNK]
        mask = row_mask[:, None] & (cols < N)[None, :]  # [1, CHUNK]
        x_ptrs = x_ptr + rows[:, None] * x_row_stride + cols[None, :]
        residual_ptrs = residual_ptr + rows[:, None] * residual_row_stride + cols[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        residual = tl.load(residual_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x += residual  # [rows, cols]
        total = x.to(sum_ptr.dtype.element_ty)
        x = total.to(tl.float32)
        tl.store(sum_ptr + rows[:, None] * N + cols[None, :], total, mask=mask, eviction_policy="evict_last")
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=1) * (1.0 / N) + eps)  # [1]
    # What a thread stored another one may read below.
    tl.debug_barrier()

    for start in tl.range(0, N, CHUNK):
        cols = start + tl.arange(0, CHUNK)  # [CHUNK]
        mask = row_mask[:, None] & (cols < N)[None, :]  # [1, CHUNK]
        sum_ptrs = sum_ptr + rows[:, None] * N + cols[None, :]
        x = tl.load(sum_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)  # [CHUNK]
        y = x * rstd[:, None]  # [rows, cols]
        y = y * w[None, :]
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)


def plan(p):
    return Plan((Launch(forward_two_pass, (p.M,)),))
