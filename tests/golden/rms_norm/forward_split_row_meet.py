# Rendered by tunegen from templates/rms_norm/forward_split_row_meet.py.jinja: edit the template, not this file.
# acc=tl.float32 acc_name=fp32 casting=fp32 nested=() offset=False save_rstd=True weight=True
"""Forward of wide rows, each byte read once: SPLITS programs share a row, each keeps its column part of the weight in registers while
it walks over rows. They meet through memory: a part's sum of squares is published one tile before the whole is read, while the tile
behind it is being loaded. All programs run at the same time, else they would wait for ever. Deterministic: parts are added in order."""

import triton
import triton.language as tl

from tunegen.model import Launch, Plan, Scratch



@triton.jit(do_not_specialize=["M"])
def forward_split_row_meet(
    x_ptr,  # [M, N]
    w_ptr,  # [N]
    y_ptr,  # [M, N]
    rstd_ptr,  # [M]
    squares_ptr,  # [M, SPLITS], zeros: not published yet
    x_row_stride,
    M,
    eps: tl.float32,
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
    # Two tensors: Triton takes two names of one tensor for one variable of the loop.
    x_here = tl.zeros([ROWS, BLOCK_SIZE], x_ptr.dtype.element_ty)
    x_next = tl.zeros([ROWS, BLOCK_SIZE], x_ptr.dtype.element_ty)
    words_ptr = squares_ptr.to(tl.pointer_type(tl.int32), bitcast=True)

    # A tile is loaded two steps, and its sum published one step, before it is finished: the first two steps finish none.
    for tile in tl.range(group - 2 * groups, tl.cdiv(M, ROWS), groups):
        rows = tl.cast(tile + 2 * groups, tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        mask = (rows < M)[:, None] & col_mask[None, :]  # [ROWS, BLOCK_SIZE]
        x_last = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0)

        # Asked for ahead of the sum below, which takes about as long as the answer.
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        slots = tl.cast(tile, tl.int64) * ROWS * SPLITS + tl.arange(0, ROWS * SPLITS)  # [ROWS * SPLITS]
        there = (slots >= 0) & (slots < tl.cast(M, tl.int64) * SPLITS)
        words = tl.load(words_ptr + slots, mask=there, other=0.0, volatile=True)

        # The word itself says that it is there, so that nothing has to be ordered: a sum of 0 is published as -0.
        x = x_next.to(tl.float32)  # [ROWS, BLOCK_SIZE]
        rows += groups * ROWS
        word = tl.sum(x * x, axis=1).to(tl.int32, bitcast=True)  # [ROWS]
        word = tl.where(word == 0, -2147483648, word)
        tl.atomic_xchg(words_ptr + rows * SPLITS + part, word, mask=(rows >= 0) & (rows < M), sem="relaxed")

        # Each warp waits by itself: 32 slots at most are in one, and a barrier in here would stop the others.
        while tl.max((there & (words == 0)).to(tl.int32), axis=0) != 0:
            words = tl.load(words_ptr + slots, mask=there, other=0.0, volatile=True)

        squares = tl.sum(tl.reshape(words.to(tl.float32, bitcast=True), [ROWS, SPLITS]), axis=1)  # [ROWS]
        rows -= groups * ROWS
        rstd = tl.rsqrt(squares * (1.0 / N) + eps)  # [ROWS]
        x = x_here.to(tl.float32)
        y = x * rstd[:, None]  # [rows, cols]
        y = y * w[None, :]
        mask = ((rows >= 0) & (rows < M))[:, None] & col_mask[None, :]  # [ROWS, BLOCK_SIZE]
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(rstd_ptr + rows, rstd, mask=(rows >= 0) & (rows < M) & (part == 0))
        x_here, x_next = x_next, x_last


def plan(p):
    groups = min(max(1, p.PROGRAMS_PER_SM * p.SMS // p.SPLITS), triton.cdiv(p.M, p.ROWS))
    return Plan(
        launches=(Launch(forward_split_row_meet, (groups * p.SPLITS,), together=p.PROGRAMS_PER_SM),),
        scratch={"squares": Scratch((p.M, p.SPLITS), "fp32", zero=True)},
    )
