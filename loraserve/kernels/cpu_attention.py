"""Attention of single tokens over the paged cache on CPU, float32.

Each K and V row is read once for all query heads, in the order in which they lie in memory. The work is the list of
(token, positions) laid end to end and cut into equal shares, one per worker, wherever that falls: sequences on a cut
leave partial softmax sums that are merged at the end. So one long context is as well spread over the threads as many
short ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loraserve.kernels.cpu_math import compiled, compiled_parallel, fast_exp
from loraserve.kernels.cpu_simd import LANES, SMALL_TILE, dot_tile, matmul_tile, prefetch

Array = np.ndarray[Any, Any]

_BLOCK = 32  # positions scored before their values are read: their K and V stay in the first-level cache
_AHEAD = 16  # positions whose K and V are asked for before they are needed
_LOWEST = -1e30  # start of the running maximum; finite, so that differences are never NaN


@compiled
def _scores(
    rows: int, cache: Array, q: int, k: int, stride: int, where: int, width: int, scale: float, out: int
) -> None:
    """Products of `rows` ≤ 4 query heads of one KV head with one position.

    q, k, where, out are addresses; `stride` separates positions in k, _BLOCK heads in out.
    """
    if rows == 4:
        dot_tile(4, 1, cache, q, width, k, stride, where, width, out, _BLOCK, 1, scale)
    elif rows == 3:
        dot_tile(3, 1, cache, q, width, k, stride, where, width, out, _BLOCK, 1, scale)
    elif rows == 2:
        dot_tile(2, 1, cache, q, width, k, stride, where, width, out, _BLOCK, 1, scale)
    else:
        dot_tile(1, 1, cache, q, width, k, stride, where, width, out, _BLOCK, 1, scale)


@compiled
def _values(
    rows: int, cache: Array, weights: int, v: int, stride: int, where: int, count: int, acc: int, width: int
) -> None:
    """Add the values of `count` positions, weighted, to the sums of `rows` ≤ 4 query heads of one KV head."""
    wide = SMALL_TILE * LANES
    column = 0
    while column + wide <= width:
        to, source = acc + column * 4, v + column * 4
        if rows == 4:
            matmul_tile(
                4,
                SMALL_TILE,
                0,
                cache,
                weights,
                _BLOCK,
                source,
                stride,
                where,
                to,
                width,
                to,
                width,
                0,
                count,
                0,
            )
        elif rows == 3:
            matmul_tile(
                3,
                SMALL_TILE,
                0,
                cache,
                weights,
                _BLOCK,
                source,
                stride,
                where,
                to,
                width,
                to,
                width,
                0,
                count,
                0,
            )
        elif rows == 2:
            matmul_tile(
                2,
                SMALL_TILE,
                0,
                cache,
                weights,
                _BLOCK,
                source,
                stride,
                where,
                to,
                width,
                to,
                width,
                0,
                count,
                0,
            )
        else:
            matmul_tile(
                1,
                SMALL_TILE,
                0,
                cache,
                weights,
                _BLOCK,
                source,
                stride,
                where,
                to,
                width,
                to,
                width,
                0,
                count,
                0,
            )
        column += wide
    while column < width:
        columns = min(LANES, width - column)
        for row in range(rows):
            to, mine = acc + (row * width + column) * 4, weights + row * _BLOCK * 4
            matmul_tile(1, 1, 1, cache, mine, 0, v + column * 4, stride, where, to, 0, to, 0, 0, count, columns)
        column += LANES


@compiled
def _prefetch_row(k: int, v: int, number: int, size: int) -> None:
    # Pages lie in no order that the processor could foresee.
    offset = np.int64(number) * size
    for line in range(offset, offset + size, 64):
        prefetch(k + line, 0)
        prefetch(v + line, 0)


@compiled
def _attend_span(
    q: Array,
    token: int,
    k: Array,
    v: Array,
    where: Array,
    first: int,
    last: int,
    next_where: Array,
    next_first: int,
    next_last: int,
    scale: float,
    scores: Array,
    top: Array,
    total: Array,
    acc: Array,
) -> None:
    """Online softmax of one token over positions [first, last). q: [n, heads, head_dim]; where: [positions] int32.

    Updates the running maximum `top` [heads], sum `total` [heads] and weighted values `acc` [heads, head_dim].
    """
    heads, width = q.shape[1], q.shape[2]
    kv_heads = k.shape[1]
    group = heads // kv_heads
    stride = kv_heads * width
    q_at, k_at, v_at = q.ctypes.data + token * heads * width * 4, k.ctypes.data, v.ctypes.data
    where_at, scores_at, acc_at = where.ctypes.data, scores.ctypes.data, acc.ctypes.data
    for at in range(first, last, _BLOCK):
        count = min(_BLOCK, last - at)
        # One position at a time: K is read as it lies in memory, and the prefetches are spread between the products.
        for j in range(count):
            ahead = at + j + _AHEAD
            if ahead < last:
                _prefetch_row(k_at, v_at, where[ahead], stride * 4)
            elif next_first + ahead - last < next_last:
                _prefetch_row(k_at, v_at, next_where[next_first + ahead - last], stride * 4)
            spot = where_at + (at + j) * 4
            for kv_head in range(kv_heads):
                for h in range(kv_head * group, (kv_head + 1) * group, 4):
                    rows = min(4, (kv_head + 1) * group - h)
                    mine, out = q_at + h * width * 4, scores_at + (h * _BLOCK + j) * 4
                    _scores(rows, k, mine, k_at + kv_head * width * 4, stride, spot, width, scale, out)
        for h in range(heads):
            highest = top[h]
            for j in range(count):
                highest = max(highest, scores[h, j])
            shrink = fast_exp(top[h] - highest)
            added = np.float32(0)
            for j in range(count):
                weight = fast_exp(scores[h, j] - highest)
                scores[h, j] = weight
                added += weight
            total[h] = total[h] * shrink + added
            top[h] = highest
            for d in range(width):
                acc[h, d] *= shrink
        spot = where_at + at * 4
        for kv_head in range(kv_heads):
            for h in range(kv_head * group, (kv_head + 1) * group, 4):
                rows = min(4, (kv_head + 1) * group - h)
                to, weights = acc_at + h * width * 4, scores_at + h * _BLOCK * 4
                _values(rows, v, weights, v_at + kv_head * width * 4, stride, spot, count, to, width)


@compiled
def decode_share(
    q: Array,
    k: Array,
    v: Array,
    locations: Array,
    items: Array,
    ends: Array,
    scale: float,
    out: Array,
    begin: int,
    end: int,
    partial: Array,
    partial_item: Array,
) -> None:
    """Work on positions [begin, end) of all items' positions laid end to end; `ends` are the items' running ends.

    items: [n, 3] (row of q, row of locations, first position). An item that lies wholly inside is written to `out`;
    one that a cut goes through leaves [heads, head_dim + 2] (values, sum, maximum) in `partial`: the first item in
    slot 0, the last in slot 1.
    """
    heads, width = q.shape[1], q.shape[2]
    scores = np.empty((heads, _BLOCK), np.float32)
    top = np.empty(heads, np.float32)
    total = np.empty(heads, np.float32)
    acc = np.empty((heads, width), np.float32)
    item = 0
    while begin < end and ends[item] <= begin:
        item += 1
    slot = 0
    while begin < end:
        item_begin = ends[item - 1] if item > 0 else 0
        stop = min(end, ends[item])
        token, row, offset = items[item, 0], items[item, 1], items[item, 2] - item_begin
        for h in range(heads):
            top[h] = np.float32(_LOWEST)
            total[h] = np.float32(0)
            for d in range(width):
                acc[h, d] = np.float32(0)
        first, last = offset + begin, offset + stop
        # What will be read after this item; nothing if it is the last. Not past its end: the table may end there too.
        following = min(item + 1, ends.shape[0] - 1)
        next_row, next_first = items[following, 1], items[following, 2]
        next_last = next_first + min(_AHEAD, end - stop, ends[following] - ends[item])
        where, then = locations[row], locations[next_row]
        _attend_span(q, token, k, v, where, first, last, then, next_first, next_last, scale, scores, top, total, acc)
        if begin == item_begin and stop == ends[item]:
            for h in range(heads):
                inverse = np.float32(1) / total[h]
                for d in range(width):
                    out[token, h, d] = acc[h, d] * inverse
        else:
            partial_item[slot] = item
            for h in range(heads):
                for d in range(width):
                    partial[slot, h, d] = acc[h, d]
                partial[slot, h, width] = total[h]
                partial[slot, h, width + 1] = top[h]
            slot += 1
        begin = stop
        item += 1


@compiled
def _merge(partial: Array, partial_item: Array, items: Array, out: Array) -> None:
    """Merge the partial sums of cut items; those of one item stand one after the other."""
    heads, width = out.shape[1], out.shape[2]
    count = partial_item.shape[0]
    first = 0
    while first < count:
        item = partial_item[first]
        last = first + 1
        while last < count and (partial_item[last] == item or partial_item[last] < 0):
            last += 1
        if item >= 0:
            token = items[item, 0]
            for h in range(heads):
                highest = np.float32(_LOWEST)
                for i in range(first, last):
                    if partial_item[i] >= 0:
                        highest = max(highest, partial[i, h, width + 1])
                total = np.float32(0)
                for d in range(width):
                    out[token, h, d] = np.float32(0)
                for i in range(first, last):
                    if partial_item[i] >= 0:
                        weight = fast_exp(partial[i, h, width + 1] - highest)
                        total += weight * partial[i, h, width]
                        for d in range(width):
                            out[token, h, d] += weight * partial[i, h, d]
                for d in range(width):
                    out[token, h, d] /= total
        first = last


@compiled_parallel
def decode_parallel(
    q: Array, k: Array, v: Array, locations: Array, items: Array, ends: Array, scale: float, out: Array, workers: int
) -> None:
    heads, width = q.shape[1], q.shape[2]
    work = ends[-1]
    partial = np.empty((2 * workers, heads, width + 2), np.float32)
    partial_item = np.empty(2 * workers, np.int64)
    for i in range(2 * workers):
        partial_item[i] = -1
    for worker in prange(workers):
        begin, end = work * worker // workers, work * (worker + 1) // workers
        mine = slice(2 * worker, 2 * worker + 2)
        decode_share(q, k, v, locations, items, ends, scale, out, begin, end, partial[mine], partial_item[mine])
    _merge(partial, partial_item, items, out)
