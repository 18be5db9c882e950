# Rendered by tunegen from templates/rms_norm/backward_split_row_meet.py.jinja: edit the template, not this file.
# PDL=late RSTD=saved acc=tl.float32 acc_name=fp32 accumulate_dw=False casting=fp32 nested=() offset=False weight=True
"""Backward of wide rows, each byte read once: SPLITS programs share a row, each has a column part of the weight and of dw in registers,
and a ring of STAGES tiles in shared memory that asynchronous copies fill. They meet through memory: a part's dot is published one
step before the whole is read, and the tile read again from the ring. All programs run at the same time, else they would wait for ever.
Deterministic: dots and partial rows of dw are added in order."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tunegen.model import Launch, Plan, Scratch

# Triton 3.9 has renamed it.
copy_to_shared = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)


@gluon.jit
def fetch(
    tile,  # [1, BLOCK_SIZE], in shared memory
    pointers,  # [1, BLOCK_SIZE]
    mask,  # [1, BLOCK_SIZE]
    COPIED: gl.constexpr,
):
    """Begin to copy a tile, 16 bytes at a time; rows that begin anywhere are read at once, through registers."""
    if COPIED:
        copy_to_shared(tile, pointers, mask)
    else:
        tile.store(gl.load(pointers, mask=mask, other=0.0))


@gluon.jit(do_not_specialize=["M"])
def backward_split_row_meet(
    x_ptr,  # [M, N]
    w_ptr,  # [N]
    dy_ptr,  # [M, N]
    rstd_ptr,  # [M]
    dx_ptr,  # [M, N]
    dots_ptr,  # [M, SPLITS], zeros: not published yet
    dw_partial_ptr,  # [groups, N]
    x_row_stride,
    dy_row_stride,
    M,
    N: gl.constexpr,
    SPLITS: gl.constexpr,
    WORDS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    gl.static_assert(SPLITS * BLOCK_SIZE >= N, "the parts together are narrower than the row")
    gl.static_assert(WORDS >= SPLITS, "fewer words than parts")
    gl.static_assert(STAGES >= 3, "a tile is read twice, a step apart, while another one comes")

    # A thread has 16 bytes of a tile, its neighbour the next 16. A tensor of its columns alone, as the weight, lies in
    # SliceLayout(0, layout), one of its rows alone, as their sums, in SliceLayout(1, layout).
    WIDE: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, WIDE], [1, 32], [1, gl.num_warps()], [1, 0])
    # Shared memory in the order of memory: 16 bytes are copied as they lie.
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Each warp has all words, so that it waits by itself.
    word_layout: gl.constexpr = gl.BlockedLayout([max(1, WORDS // 32)], [32], [gl.num_warps()], [0])

    # This program's rows are group, group + groups, ...; of each it has the columns of its part.
    group = gl.program_id(0) // SPLITS
    groups = gl.num_programs(0) // SPLITS
    part = gl.program_id(0) % SPLITS
    cols = part * BLOCK_SIZE + gl.arange(0, BLOCK_SIZE, gl.SliceLayout(0, layout))  # [BLOCK_SIZE]
    col_mask = cols < N  # [BLOCK_SIZE]
    w = gl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_SIZE]
    dw = gl.zeros([BLOCK_SIZE], tl.float32, gl.SliceLayout(0, layout))  # [BLOCK_SIZE]
    # Dots as integers of their width: 0 is no dot yet.
    words_ptr = dots_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    # A ring a stream: STAGES tiles [1, BLOCK_SIZE].
    x_ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, 1, BLOCK_SIZE], flat)
    dy_ring = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES, 1, BLOCK_SIZE], flat)

    # Two tiles of a ring are read in a step, so STAGES - 2 are on their way to begin with.
    for step in gl.static_range(STAGES - 2):
        later = group + step * groups
        rows = gl.cast(later, gl.int64) + gl.arange(0, 1, gl.SliceLayout(1, layout))  # [1]
        mask = (rows < M)[:, None] & col_mask[None, :]  # [1, BLOCK_SIZE]
        fetch(x_ring.index(step), x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask, ALIGNED and N % WIDE == 0)
        fetch(dy_ring.index(step), dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask, ALIGNED and N % WIDE == 0)
        async_copy.commit_group()

    # A step publishes the dot of row + groups, whose tile is in `slot`, and finishes `row`, whose tile is in the slot before. The first
    # has no row to finish (row < 0).
    slot = gl.to_tensor(0)
    for row in range(group - groups, M, groups):
        async_copy.wait_group(STAGES - 3)  # the tile in `slot` has come
        # The words of the row that this step finishes: asked for now, they come while the row ahead is summed.
        parts = gl.arange(0, WORDS, word_layout)  # [WORDS]
        there = (parts < SPLITS) & (row >= 0)  # [WORDS]
        slots = gl.cast(row, gl.int64) * SPLITS + parts
        words = gl.load(words_ptr + slots, mask=there, other=0, volatile=True)  # [WORDS]
        rows = gl.cast(row, gl.int64) + gl.arange(0, 1, gl.SliceLayout(1, layout))  # [1]
        rstd = gl.load(rstd_ptr + rows, mask=rows >= 0, other=0.0)  # [1]

        x = x_ring.index(slot).load(layout).to(tl.float32)  # [1, BLOCK_SIZE]
        dy = dy_ring.index(slot).load(layout).to(tl.float32)  # [1, BLOCK_SIZE]
        total = gl.sum(dy * w[None, :] * x, axis=1)  # [1]
        rows += groups  # [1]
        word = total.to(gl.int32, bitcast=True)  # [1]
        word = gl.where(word == 0, -2147483648, word)  # a sum of 0 is published as -0
        # Relaxed: the word is all that the others wait for, so no other store has to be seen ahead of it.
        gl.atomic_xchg(words_ptr + rows * SPLITS + part, word, mask=rows < M, sem="relaxed")

        # The next tile, over the one that the last step has read again: behind the sum, by which all warps have left that.
        later = row + (STAGES - 1) * groups
        rows = gl.cast(later, gl.int64) + gl.arange(0, 1, gl.SliceLayout(1, layout))  # [1]
        mask = (rows < M)[:, None] & col_mask[None, :]  # [1, BLOCK_SIZE]
        fetch(x_ring.index((slot + STAGES - 2) % STAGES), x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask, ALIGNED and N % WIDE == 0)
        fetch(dy_ring.index((slot + STAGES - 2) % STAGES), dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask, ALIGNED and N % WIDE == 0)
        async_copy.commit_group()

        if row >= 0:
            while gl.max((there & (words == 0)).to(gl.int32), axis=0) != 0:  # no barrier in here: it would stop the other warps
                words = gl.load(words_ptr + slots, mask=there, other=0, volatile=True)
            here = (slot + STAGES - 1) % STAGES
            projection = gl.sum(words.to(tl.float32, bitcast=True), axis=0) * rstd * (1.0 / N)  # [1]
            # Read again: kept in registers, x and dy would leave no room for those of other programs.
            x = x_ring.index(here).load(layout).to(tl.float32)  # [1, BLOCK_SIZE]
            dy = dy_ring.index(here).load(layout).to(tl.float32)  # [1, BLOCK_SIZE]
            wdy = dy * w[None, :]  # [1, BLOCK_SIZE]
            xhat = x * rstd[:, None]  # [rows, cols]
            dx = (wdy - xhat * projection[:, None]) * rstd[:, None]
            gl.store(dx_ptr + gl.cast(row, gl.int64) * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=col_mask[None, :])
            dw += gl.sum(dy * xhat, axis=0)  # [BLOCK_SIZE]
        slot = (slot + 1) % STAGES
    async_copy.wait_group(0)  # of zeros for rows behind the last: what follows may be given the ring's memory

    # The next kernel starts now and waits for this one's end: .3 to .7 us a call less (H200, 1 to 16384 rows of 4096).
    tl.extra.cuda.gdc_launch_dependents()
    gl.store(dw_partial_ptr + gl.cast(group, gl.int64) * N + cols, dw, mask=col_mask)


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
    groups = min(most, p.M)
    partial_rows = max(16, min(triton.next_power_of_2(most), 128))
    return Plan(
        launches=(
            Launch(
                backward_split_row_meet,
                (groups * p.SPLITS,),
                {"WORDS": triton.next_power_of_2(p.SPLITS)},
                together=p.PROGRAMS_PER_SM,
            ),
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
