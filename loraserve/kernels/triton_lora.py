"""Triton: segmented LoRA over paged rank rows. `reference.py` defines the results, `triton_lora_launch.py` calls these.

A *tile* is up to BLOCK_M triples of one segment: (slot, first triple, number of triples), no triples meaning no work.
Every shape that depends on the step alone reaches the kernels as data, so that a captured graph serves any mix.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off


@triton.jit(do_not_specialize=["num_segments", "num_tiles"])
def plan_tiles(
    indptr, slots, tiles, num_segments, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):
    """Cut segments into tiles. indptr: [num_segments + 1]; tiles: [num_tiles, 3] int32, all of it written.

    Semantics: tiles of segment 0, then those of segment 1, …; slots below 0 get none; the rest is (-1, 0, 0).
    """
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.full([BLOCK_T], -1, tl.int32)
    first = tl.zeros([BLOCK_T], tl.int32)
    count = tl.zeros([BLOCK_T], tl.int32)
    before = 0
    for base in range(0, num_segments, BLOCK_S):
        seg = base + tl.arange(0, BLOCK_S)
        real = seg < num_segments
        low = tl.load(indptr + seg, mask=real, other=0)
        high = tl.load(indptr + seg + 1, mask=real, other=0)
        owner = tl.load(slots + seg, mask=real, other=-1)
        needed = tl.where(owner >= 0, (high - low + BLOCK_M - 1) // BLOCK_M, 0)
        ends = before + tl.cumsum(needed, 0)
        begins = ends - needed
        hit = (tile[:, None] >= begins[None, :]) & (tile[:, None] < ends[None, :])
        at = low[None, :] + (tile[:, None] - begins[None, :]) * BLOCK_M
        size = tl.minimum(high[None, :] - at, BLOCK_M)
        slot += tl.sum(tl.where(hit, owner[None, :] + 1, 0), 1)
        first += tl.sum(tl.where(hit, at, 0), 1)
        count += tl.sum(tl.where(hit, size, 0), 1)
        before += tl.sum(needed, 0)
    inside = tile < num_tiles
    tl.store(tiles + tile * 3, slot, mask=inside)
    tl.store(tiles + tile * 3 + 1, first, mask=inside)
    tl.store(tiles + tile * 3 + 2, count, mask=inside)


@triton.jit
def _multiple(value, ALIGN: tl.constexpr):
    """`value`, of which the host knows that it is a multiple: so loads and stores may be as wide.

    Arithmetic rather than `tl.multiple_of`, whose mark is lost when the marked operation is simplified away.
    """
    return value // ALIGN * ALIGN


@triton.jit
def _rows(storage, pages, row, real, width, PAGE_ROWS: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to the first elements of rank rows; rows that are not `real` point at the storage's beginning."""
    page = tl.load(pages + row // PAGE_ROWS, mask=real, other=0)
    return storage + _multiple(page + (row % PAGE_ROWS).to(tl.int64) * width, ALIGN)


@triton.jit(do_not_specialize=["layer", "num_triples", "num_slots", "table0", "table1", "table2"])
def lora_shrink(
    x, out, storage, tiles, tokens,
    a_pages0, a_pages1, a_pages2, ranks0, ranks1, ranks2,
    layer, num_triples, num_slots, table0, table1, table2, rank_cap, in_features,
    NUM_TARGETS: tl.constexpr, PAGE_ROWS: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):
    """x @ A.T of every triple and target. Grid: (tiles, pieces, targets).

    out: [pieces, targets, num_triples, rank_cap] fp32, partial sums over the pieces of `in_features`; of a triple only
    the first `rank` columns are written. Work follows each slot's rank.
    """
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    if count == 0:
        return
    piece = tl.program_id(1)
    target = tl.program_id(2)
    pages, ranks, table = a_pages0, ranks0, table0
    if NUM_TARGETS > 1:
        if target == 1:
            pages, ranks, table = a_pages1, ranks1, table1
    if NUM_TARGETS > 2:
        if target == 2:
            pages, ranks, table = a_pages2, ranks2, table2
    entry = layer.to(tl.int64) * num_slots + slot
    rank = tl.load(ranks + entry)
    pages += entry * table

    m = tl.arange(0, BLOCK_M)
    present = m < count
    token = tl.load(tokens + first + m, mask=present, other=0).to(tl.int64)
    x_rows = x + token * in_features
    out_rows = out + ((piece * NUM_TARGETS + target).to(tl.int64) * num_triples + first + m) * rank_cap
    steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), tl.num_programs(1))
    begin = piece * steps * BLOCK_K
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        has = r < rank
        a_rows = _rows(storage, pages, r, has, in_features, PAGE_ROWS, ALIGN)
        total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for step in range(steps):
            k = begin + step * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = k < in_features
            left = tl.load(x_rows[:, None] + k[None, :], mask=present[:, None] & inside[None, :], other=0.0)
            right = tl.load(a_rows[None, :] + k[:, None], mask=inside[:, None] & has[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
        tl.store(out_rows[:, None] + r[None, :], total, mask=present[:, None] & has[None, :])


@triton.jit(do_not_specialize=["num_triples", "table"])
def lora_gather(
    ids, out, storage, tiles, tokens, a_pages, ranks, num_triples, table, rank_cap, vocab,
    PAGE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """A[:, ids] of every triple: the shrink of an embedding. Grid: (tiles,). ids: [num_tokens] int64.

    out: [num_triples, rank_cap] fp32, of a triple only the first `rank` columns are written.
    """
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    if count == 0:
        return
    rank = tl.load(ranks + slot)
    pages = a_pages + slot.to(tl.int64) * table
    m = tl.arange(0, BLOCK_M)
    present = m < count
    token = tl.load(tokens + first + m, mask=present, other=0)
    column = tl.load(ids + token, mask=present, other=0)
    out_rows = out + (first + m).to(tl.int64) * rank_cap
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        has = r < rank
        a_rows = _rows(storage, pages, r, has, vocab, PAGE_ROWS, 1)
        both = present[:, None] & has[None, :]
        value = tl.load(a_rows[None, :] + column[:, None], mask=both, other=0.0)
        tl.store(out_rows[:, None] + r[None, :], value.to(tl.float32), mask=both)


@triton.jit
def _owners(tokens, weights, rounds, this_round, first, count, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tokens, weights and which rows of a tile are due in this round."""
    m = tl.arange(0, BLOCK_M)
    present = m < count
    if ROUNDS:
        present = present & (tl.load(rounds + first + m, mask=present, other=-1) == this_round)
    token = tl.load(tokens + first + m, mask=present, other=0).to(tl.int64)
    weight = tl.load(weights + first + m, mask=present, other=0.0)
    return token, weight, present


@triton.jit(do_not_specialize=[
    "layer", "num_triples", "this_round", "num_slots", "table0", "table1", "table2", "width0", "width1", "width2",
    "column0", "column1", "column2", "blocks0", "blocks01", "pieces",
])
def lora_expand(
    y, shrunk, storage, tiles, tokens, weights, rounds,
    b_pages0, b_pages1, b_pages2, ranks0, ranks1, ranks2,
    layer, num_triples, this_round, num_slots, table0, table1, table2, rank_cap, y_width,
    width0, width1, width2, column0, column1, column2, blocks0, blocks01, pieces,
    NUM_TARGETS: tl.constexpr, PAGE_ROWS: tl.constexpr, ALIGN: tl.constexpr,
    ALIGN_Y: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y += weight · (shrunk @ B) in place. Grid: (tiles, blocks of BLOCK_N columns of all targets).

    `shrunk` as `lora_shrink` leaves it. With ROUNDS only triples whose round is `this_round` are added, so that no two
    programs of a launch change the same token (a blend). The sum is made in fp32 and cast once.
    """
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    if count == 0:
        return
    block = tl.program_id(1)
    pages, ranks, table, width, column, target = b_pages0, ranks0, table0, width0, column0, 0
    if NUM_TARGETS > 1:
        if block >= blocks0:
            pages, ranks, table, width, column, target = b_pages1, ranks1, table1, width1, column1, 1
            if NUM_TARGETS > 2:
                if block >= blocks01:
                    pages, ranks, table, width, column, target = b_pages2, ranks2, table2, width2, column2, 2
                    block -= blocks01
                else:
                    block -= blocks0
            else:
                block -= blocks0
    entry = layer.to(tl.int64) * num_slots + slot
    rank = tl.load(ranks + entry)
    if rank == 0:
        return
    pages += entry * table

    # Loads under way together; long tiles are hardly ever split and have no registers to spare.
    TOGETHER: tl.constexpr = 4 if BLOCK_M <= 16 else 1
    m = tl.arange(0, BLOCK_M)
    token, weight, present = _owners(tokens, weights, rounds, this_round, first, count, ROUNDS, BLOCK_M)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < _multiple(width, ALIGN)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        has = r < rank
        left = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for some in range(0, pieces, TOGETHER):
            for i in tl.static_range(TOGETHER):
                piece = some + i
                row = num_triples.to(tl.int64) * (piece * NUM_TARGETS + target) + first + m
                due = (present & (m * 0 + piece < pieces))[:, None] & has[None, :]
                left += tl.load(shrunk + row[:, None] * rank_cap + r[None, :], mask=due, other=0.0)
        b_rows = _rows(storage, pages, r, has, width, PAGE_ROWS, ALIGN)
        right = tl.load(b_rows[:, None] + n[None, :], mask=has[:, None] & inside[None, :], other=0.0)
        total = tl.dot(left.to(right.dtype), right, total, input_precision=PRECISION)
    where = y + token[:, None] * y_width + (_multiple(column, ALIGN_Y) + n)[None, :]
    both = present[:, None] & inside[None, :]
    before = tl.load(where, mask=both, other=0.0).to(tl.float32)
    tl.store(where, (before + weight[:, None] * total).to(y.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["layer", "this_round", "num_slots", "table", "column"])
def lora_affine(
    y, base, storage, tiles, tokens, weights, rounds, b_pages, ranks, flags,
    layer, this_round, num_slots, table, y_width, width, column,
    PAGE_ROWS: tl.constexpr, ALIGN: tl.constexpr, ALIGN_Y: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """y += weight · (base · gain + shift) of one target, in place. Grid: (tiles, blocks of BLOCK_N columns).

    gain and shift are the rows of B at and after the rank, where flags[layer, slot] is set. `base` may be y itself if
    no token has two adapters.
    """
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    if count == 0:
        return
    entry = layer.to(tl.int64) * num_slots + slot
    if tl.load(flags + entry) == 0:
        return
    rank = tl.load(ranks + entry)
    pages = b_pages + entry * table
    token, weight, present = _owners(tokens, weights, rounds, this_round, first, count, ROUNDS, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < _multiple(width, ALIGN)
    gain_row = _rows(storage, pages, rank, rank >= 0, width, PAGE_ROWS, ALIGN)
    shift_row = _rows(storage, pages, rank + 1, rank >= 0, width, PAGE_ROWS, ALIGN)
    gain = tl.load(gain_row + n, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_row + n, mask=inside, other=0.0).to(tl.float32)
    where = token[:, None] * y_width + (_multiple(column, ALIGN_Y) + n)[None, :]
    both = present[:, None] & inside[None, :]
    own = tl.load(base + where, mask=both, other=0.0).to(tl.float32)
    before = tl.load(y + where, mask=both, other=0.0).to(tl.float32)
    change = weight[:, None] * (own * gain[None, :] + shift[None, :])
    tl.store(y + where, (before + change).to(y.dtype.element_ty), mask=both)
