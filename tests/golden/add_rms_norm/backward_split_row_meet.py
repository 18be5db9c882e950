# Rendered by tunegen from templates/add_rms_norm/backward_split_row_meet.py.jinja: edit the template, not this file.
# PDL=on RSTD=saved acc=tl.float32 acc_name=fp32 accumulate_dw=False casting=fp32 nested=() offset=False residual=True weight=True
"""Backward of wide rows, each byte read once: SPLITS programs share a row, each has a column part of the weight and of dw in registers.
They meet through memory: a part's dot is published one tile before the whole is read, while the tile behind it is being loaded.
All programs run at the same time, else they would wait for ever. Deterministic: dots and partial rows of dw are added in order. dx is the
gradient of x and of residual alike."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan, Scratch


@triton.jit(do_not_specialize=["M"])
def backward_split_row_meet(
    x_ptr,  # [M, N], the stored sum
    w_ptr,  # [N]
    dy_ptr,  # [M, N]
    dsum_ptr,  # [M, N]
    rstd_ptr,  # [M]
    dx_ptr,  # [M, N]
    dots_ptr,  # [M, SPLITS], zeros: not published yet
    dw_partial_ptr,  # [groups, N]
    x_row_stride,
    dy_row_stride,
    dsum_row_stride,
    M,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    tl.static_assert(SPLITS * BLOCK_SIZE >= N, "the parts together are narrower than the row")
    tl.static_assert(ROWS * SPLITS <= 32, "a warp waits for all parts of a tile of rows")
    group = tl.program_id(0) // SPLITS
    groups = tl.num_programs(0) // SPLITS
    part = tl.program_id(0) % SPLITS
    cols = part * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]
    col_mask = cols < N
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]
    dw = tl.zeros([BLOCK_SIZE], tl.float32)
    # Four tensors: Triton takes two names of one tensor for one variable of the loop.
    x_here = tl.zeros([ROWS, BLOCK_SIZE], x_ptr.dtype.element_ty)
    x_next = tl.zeros([ROWS, BLOCK_SIZE], x_ptr.dtype.element_ty)
    dy_here = tl.zeros([ROWS, BLOCK_SIZE], dy_ptr.dtype.element_ty)
    dy_next = tl.zeros([ROWS, BLOCK_SIZE], dy_ptr.dtype.element_ty)
    words_ptr = dots_ptr.to(tl.pointer_type(tl.int32), bitcast=True)

    # A tile is loaded two steps, and its dot published one step, before it is finished: the first two steps finish none.
    for tile in tl.range(group - 2 * groups, tl.cdiv(M, ROWS), groups):
        rows = tl.cast(tile + 2 * groups, tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        mask = (rows < M)[:, None] & col_mask[None, :]  # [ROWS, BLOCK_SIZE]
        x_last = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0)
        dy_last = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0)

        # Asked for ahead of the sum below, which takes about as long as the answer.
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        rstd = tl.load(rstd_ptr + rows, mask=(rows >= 0) & (rows < M), other=0.0)  # [ROWS]
        slots = tl.cast(tile, tl.int64) * ROWS * SPLITS + tl.arange(0, ROWS * SPLITS)  # [ROWS * SPLITS]
        there = (slots >= 0) & (slots < tl.cast(M, tl.int64) * SPLITS)
        words = tl.load(words_ptr + slots, mask=there, other=0.0, volatile=True)
        here = ((rows >= 0) & (rows < M))[:, None] & col_mask[None, :]  # [ROWS, BLOCK_SIZE]
        dsum = tl.load(dsum_ptr + rows[:, None] * dsum_row_stride + cols[None, :], mask=here, other=0.0)

        # The word itself says that it is there, so that nothing has to be ordered: a dot of 0 is published as -0.
        dot = tl.sum(dy_next.to(tl.float32) * w[None, :] * x_next.to(tl.float32), axis=1)  # [ROWS]
        rows += groups * ROWS
        word = dot.to(tl.int32, bitcast=True)
        word = tl.where(word == 0, -2147483648, word)
        tl.atomic_xchg(words_ptr + rows * SPLITS + part, word, mask=(rows >= 0) & (rows < M), sem="relaxed")

        # Each warp waits by itself: 32 slots at most are in one, and a barrier in here would stop the others.
        while tl.max((there & (words == 0)).to(tl.int32), axis=0) != 0:
            words = tl.load(words_ptr + slots, mask=there, other=0.0, volatile=True)

        dots = tl.reshape(words.to(tl.float32, bitcast=True), [ROWS, SPLITS])
        rows -= groups * ROWS
        projection = tl.sum(dots, axis=1) * rstd * (1.0 / N)  # [ROWS]
        x, dy = x_here.to(tl.float32), dy_here.to(tl.float32)  # [ROWS, BLOCK_SIZE]
        wdy = dy * w[None, :]
        xhat = x * rstd[:, None]  # [rows, cols]
        dx = (wdy - xhat * projection[:, None]) * rstd[:, None] + dsum
        mask = ((rows >= 0) & (rows < M))[:, None] & col_mask[None, :]  # [ROWS, BLOCK_SIZE]
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += tl.sum(dy * xhat, axis=0)
        x_here, dy_here, x_next, dy_next = x_next, dy_next, x_last, dy_last

    # The next kernel starts now and waits for this one's end: .3 to .7 us a call less (H200, 1 to 16384 rows of 4096).
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(dw_partial_ptr + tl.cast(group, tl.int64) * N + cols, dw, mask=col_mask)


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
    most = max(1, p.PROGRAMS_PER_SM * p.SMS // p.SPLITS)
    groups = min(most, triton.cdiv(p.M, p.ROWS))
    partial_rows = max(16, min(triton.next_power_of_2(most), 128))
    return Plan(
        launches=(
            Launch(backward_split_row_meet, (groups * p.SPLITS,), together=p.PROGRAMS_PER_SM),
            Launch(
                sum_partials,
                (triton.cdiv(p.N, 2048 // partial_rows),),
                {"partials": groups, "PARTIAL_ROWS": partial_rows, "COLS": 2048 // partial_rows},
                num_warps=4,
                pdl=True,
            ),
        ),
        scratch={
            "dots": Scratch((p.M, p.SPLITS), "fp32", zero=True),
            "dw_partial": Scratch((groups, p.N), "fp32"),
        },
    )
