"""LoRA on CPU: one fused Numba call per projection group, for decode rows and prefill chunks alike.

What does not change from layer to layer (which tokens, which slots, page tables, how the work is cut) is planned once
per step and group; a layer then costs one call. Tokens of one segment are taken in blocks: each rank row is read once
for several of them. A layer's work is cut in one of two ways. By unit (block, target): each worker shrinks and
expands its own, one launch; it needs tokens that appear once and units of similar cost. By column: all shrink products
first, each by one worker, then every worker expands all of them into its own columns of y; two launches, and right for
blends (one token in several segments) and for a few units of high rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loraserve.kernels.cpu_math import compiled, compiled_parallel
from loraserve.kernels.cpu_simd import LANES, SMALL_TILE, TILE_COLUMNS, TILE_VECTORS, dot_tile, matmul_tile

Array = np.ndarray[Any, Any]

BLOCK = 32  # tokens of a unit: their rows of x and z stay in the caches while the adapter's rows pass by
_FIXED_COST = 3  # reading an adapter's rows costs as much as computing them for so many tokens


@compiled
def _dots(
    storage: Array,
    a: int,
    width: int,
    x: int,
    x_stride: int,
    tokens: int,
    rows: int,
    count: int,
    z: int,
    z_stride: int,
) -> None:
    """z[t, i] = x[tokens[t]] · a[i] for `rows` neighbouring rank rows and `count` tokens; all are addresses."""
    one = np.float32(1)
    i = 0
    while i < rows:
        four = i + 4 <= rows
        at, out = a + i * width * storage.itemsize, z + i * 4
        t = 0
        while t < count:
            numbers, into = tokens + t * 4, out + t * z_stride * 4
            if four and t + SMALL_TILE <= count:
                dot_tile(4, SMALL_TILE, storage, at, width, x, x_stride, numbers, width, into, 1, z_stride, one)
                t += SMALL_TILE
            elif four and t + 2 <= count:
                dot_tile(4, 2, storage, at, width, x, x_stride, numbers, width, into, 1, z_stride, one)
                t += 2
            elif four:
                dot_tile(4, 1, storage, at, width, x, x_stride, numbers, width, into, 1, z_stride, one)
                t += 1
            else:
                dot_tile(1, 1, storage, at, width, x, x_stride, numbers, width, into, 1, z_stride, one)
                t += 1
        i += 4 if four else 1


@compiled
def _shrink(
    storage: Array,
    pages: Array,
    page_rows: int,
    width: int,
    x: Array,
    tokens: Array,
    weights: Array,
    begin: int,
    end: int,
    z: Array,
) -> None:
    """z[t, i] = weights[t] · x[tokens[t]]·A[i] for rank rows [begin, end); begin is a page's first row."""
    stride = z.shape[1]
    for row in range(begin, end, page_rows):
        rows = min(page_rows, end - row)
        page = row // page_rows
        at = storage.ctypes.data + pages[page] * storage.itemsize
        into = z.ctypes.data + row * 4
        _dots(
            storage,
            at,
            width,
            x.ctypes.data,
            x.shape[1],
            tokens.ctypes.data,
            rows,
            tokens.shape[0],
            into,
            stride,
        )
    for t in range(tokens.shape[0]):
        for i in range(begin, end):
            z[t, i] *= weights[t]


@compiled
def _add_page(
    storage: Array,
    b: int,
    width: int,
    z: int,
    z_stride: int,
    depth: int,
    tokens: int,
    count: int,
    y: int,
    y_stride: int,
    columns: int,
) -> None:
    """y[tokens[t], j] += Σ_i z[t, i]·b[i, j] for `depth` neighbouring rank rows and `columns` columns. Addresses."""
    itemsize = storage.itemsize
    column = 0
    while column < columns:
        w, to = b + column * itemsize, y + column * 4
        if column + TILE_COLUMNS <= columns:
            t = 0
            while t < count:
                mine, numbers = z + t * z_stride * 4, tokens + t * 4
                if t + 4 <= count:
                    matmul_tile(
                        4,
                        TILE_VECTORS,
                        0,
                        storage,
                        mine,
                        z_stride,
                        w,
                        width,
                        0,
                        to,
                        y_stride,
                        to,
                        y_stride,
                        numbers,
                        depth,
                        0,
                    )
                    t += 4
                elif t + 2 <= count:
                    matmul_tile(
                        2,
                        TILE_VECTORS,
                        0,
                        storage,
                        mine,
                        z_stride,
                        w,
                        width,
                        0,
                        to,
                        y_stride,
                        to,
                        y_stride,
                        numbers,
                        depth,
                        0,
                    )
                    t += 2
                else:
                    matmul_tile(
                        1,
                        TILE_VECTORS,
                        0,
                        storage,
                        mine,
                        z_stride,
                        w,
                        width,
                        0,
                        to,
                        y_stride,
                        to,
                        y_stride,
                        numbers,
                        depth,
                        0,
                    )
                    t += 1
            column += TILE_COLUMNS
        else:
            rest = min(LANES, columns - column)
            for t in range(count):
                mine, numbers = z + t * z_stride * 4, tokens + t * 4
                matmul_tile(
                    1,
                    1,
                    1,
                    storage,
                    mine,
                    z_stride,
                    w,
                    width,
                    0,
                    to,
                    y_stride,
                    to,
                    y_stride,
                    numbers,
                    depth,
                    rest,
                )
            column += rest


@compiled
def _expand(
    storage: Array,
    pages: Array,
    page_rows: int,
    width: int,
    rank: int,
    z: Array,
    tokens: Array,
    y: Array,
    column: int,
    first: int,
    last: int,
) -> None:
    """y[tokens[t], column + j] += Σ_i z[t, i]·B[i, j] for the target's columns j in [first, last)."""
    for row in range(0, rank, page_rows):
        depth = min(page_rows, rank - row)
        b = storage.ctypes.data + (pages[row // page_rows] + first) * storage.itemsize
        to = y.ctypes.data + (column + first) * 4
        mine = z.ctypes.data + row * 4
        count = tokens.shape[0]
        _add_page(storage, b, width, mine, z.shape[1], depth, tokens.ctypes.data, count, to, y.shape[1], last - first)


@compiled
def apply_units(
    y: Array,
    x: Array,
    storage: Array,
    tokens: Array,
    weights: Array,
    blocks: Array,
    ranks: Array,
    a_pages: Array,
    b_pages: Array,
    widths: Array,
    layer: int,
    begin: int,
    end: int,
) -> None:
    """Shrink and expand units [begin, end), where unit u is block u // num_targets with target u % num_targets.

    tokens, weights: [num_triples]. blocks: [num_blocks, 3] (segment, first triple, number). ranks: [layers, targets,
    segments]; a_pages, b_pages: [layers, targets, segments, pages]. widths: [targets, 4] (page_rows, in, out, first
    column).
    """
    num_targets = widths.shape[0]
    z = np.empty((BLOCK, a_pages.shape[3] * widths[0, 0]), np.float32)
    for unit in range(begin, end):
        target = unit % num_targets
        group, first, count = blocks[unit // num_targets]
        rank = ranks[layer, target, group]
        if rank > 0:
            page_rows, in_width, out_width, column = widths[target]
            mine, scale = tokens[first : first + count], weights[first : first + count]
            pages = b_pages[layer, target, group]
            a = a_pages[layer, target, group]
            _shrink(storage, a, page_rows, in_width, x, mine, scale, 0, rank, z)
            _expand(storage, pages, page_rows, out_width, rank, z, mine, y, column, 0, out_width)


@compiled
def _cut(ranks: Array, blocks: Array, sizes: Array, layer: int, share: int, workers: int) -> int:
    """The first unit of worker `share`: units' costs are laid end to end and cut evenly."""
    num_targets = sizes.shape[0]
    total = 0
    for b in range(blocks.shape[0]):
        for target in range(num_targets):
            rows = ranks[layer, target, blocks[b, 0]]
            total += rows * (sizes[target, 1] + sizes[target, 2]) * (blocks[b, 2] + _FIXED_COST)
    goal = total * share // workers
    done = 0
    unit = 0
    for b in range(blocks.shape[0]):
        for target in range(num_targets):
            rows = ranks[layer, target, blocks[b, 0]]
            cost = rows * (sizes[target, 1] + sizes[target, 2]) * (blocks[b, 2] + _FIXED_COST)
            if done + cost // 2 >= goal and share < workers:
                return unit
            done += cost
            unit += 1
    return unit


@compiled_parallel
def apply_units_parallel(
    y: Array,
    x: Array,
    storage: Array,
    tokens: Array,
    weights: Array,
    blocks: Array,
    ranks: Array,
    a_pages: Array,
    b_pages: Array,
    widths: Array,
    layer: int,
    workers: int,
) -> None:
    for worker in prange(workers):
        begin = _cut(ranks, blocks, widths, layer, worker, workers) if worker > 0 else 0
        end = _cut(ranks, blocks, widths, layer, worker + 1, workers)
        apply_units(y, x, storage, tokens, weights, blocks, ranks, a_pages, b_pages, widths, layer, begin, end)


@compiled
def expand_columns(
    y: Array,
    storage: Array,
    tokens: Array,
    blocks: Array,
    ranks: Array,
    b_pages: Array,
    widths: Array,
    layer: int,
    z: Array,
    share: int,
    workers: int,
) -> None:
    """Expand all units into one worker's share of each target's columns. z: [targets, triples, rank rows]."""
    for target in range(widths.shape[0]):
        page_rows, _, out_width, column = widths[target]
        # Shares begin at multiples of 16 columns, so that no two workers write the same cache line.
        chunk = (out_width // workers + 15) // 16 * 16
        first = min(out_width, share * chunk)
        last = out_width if share == workers - 1 else min(out_width, first + chunk)
        for b in range(blocks.shape[0]):
            group, start, count = blocks[b]
            rank = ranks[layer, target, group]
            if rank > 0 and first < last:
                mine, pages = tokens[start : start + count], b_pages[layer, target, group]
                products = z[target, start : start + count]
                _expand(storage, pages, page_rows, out_width, rank, products, mine, y, column, first, last)


@compiled_parallel
def apply_columns_parallel(
    y: Array,
    x: Array,
    storage: Array,
    tokens: Array,
    weights: Array,
    blocks: Array,
    ranks: Array,
    a_pages: Array,
    b_pages: Array,
    widths: Array,
    layer: int,
    workers: int,
) -> None:
    num_blocks, num_targets, num_pages = blocks.shape[0], widths.shape[0], a_pages.shape[3]
    z = np.empty((num_targets, tokens.shape[0], num_pages * widths[0, 0]), np.float32)
    pieces = num_blocks * num_targets * num_pages
    for worker in prange(workers):
        for piece in range(pieces * worker // workers, pieces * (worker + 1) // workers):
            page = piece % num_pages
            target = piece // num_pages % num_targets
            group, first, count = blocks[piece // (num_pages * num_targets)]
            page_rows, in_width = widths[target, 0], widths[target, 1]
            begin = page * page_rows
            end = min(ranks[layer, target, group], begin + page_rows)
            if begin < end:
                mine, scale = tokens[first : first + count], weights[first : first + count]
                products = z[target, first : first + count]
                pages = a_pages[layer, target, group]
                _shrink(storage, pages, page_rows, in_width, x, mine, scale, begin, end, products)
    for worker in prange(workers):
        expand_columns(y, storage, tokens, blocks, ranks, b_pages, widths, layer, z, worker, workers)


@compiled
def embed_shrink(
    ids: Array,
    storage: Array,
    tokens: Array,
    weights: Array,
    blocks: Array,
    ranks: Array,
    a_pages: Array,
    widths: Array,
    z: Array,
) -> None:
    """z[0, triple, i] = weight · A[i, ids[token]]; A's rows are vocabulary-wide."""
    page_rows, width = widths[0, 0], widths[0, 1]
    for b in range(blocks.shape[0]):
        group, first, count = blocks[b]
        for triple in range(first, first + count):
            column = ids[tokens[triple]]
            for i in range(ranks[0, 0, group]):
                at = a_pages[0, 0, group, i // page_rows] + (i % page_rows) * width
                z[0, triple, i] = storage[at + column] * weights[triple]
