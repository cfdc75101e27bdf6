"""LoRA on CPU, float32: one fused Numba call per projection group for decode-shaped segments, GEMMs for prefill chunks.

What does not change from layer to layer (which triples, which slots, page tables, how the work is cut) is planned once
per step and group; a layer then costs one call. A layer's work is cut in one of two ways. By unit (triple, target):
each worker shrinks and expands its own, one launch; it needs tokens that appear once and units of similar cost. By
column: all shrink products first, each by one worker, then every worker expands all of them into its own columns of y;
two launches, and right for blends (one token in several segments) and for a few units of high rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loraserve.kernels.cpu_math import compiled, compiled_parallel

Array = np.ndarray[Any, Any]

_PANEL = 512  # columns expanded at a time: that part of y and of four B rows stays in the first-level cache


@compiled
def _shrink(
    x: Array, storage: Array, pages: Array, page_rows: int, width: int, begin: int, end: int, z: Array, weight: float
) -> None:
    """z[i] = weight · x·A[i] for rank rows [begin, end)."""
    # Slices, because a computed index could be negative for all that LLVM knows, and the check stops vectorisation.
    i = begin
    while i < end:
        at = pages[i // page_rows] + (i % page_rows) * width
        a0 = storage[at : at + width]
        if i + 4 <= end and i % page_rows + 4 <= page_rows:
            a1 = storage[at + width : at + 2 * width]
            a2 = storage[at + 2 * width : at + 3 * width]
            a3 = storage[at + 3 * width : at + 4 * width]
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for j in range(width):
                s0 += x[j] * a0[j]
                s1 += x[j] * a1[j]
                s2 += x[j] * a2[j]
                s3 += x[j] * a3[j]
            z[i], z[i + 1], z[i + 2], z[i + 3] = s0 * weight, s1 * weight, s2 * weight, s3 * weight
            i += 4
        else:
            s0 = np.float32(0)
            for j in range(width):
                s0 += x[j] * a0[j]
            z[i] = s0 * weight
            i += 1


@compiled
def _expand(
    y: Array, storage: Array, pages: Array, page_rows: int, width: int, rank: int, z: Array, first: int, last: int
) -> None:
    """y[j] += Σ_i z[i]·B[i, j] for columns [first, last)."""
    for start in range(first, last, _PANEL):
        count = min(last - start, _PANEL)
        out = y[start : start + count]
        i = 0
        while i < rank:
            at = pages[i // page_rows] + (i % page_rows) * width + start
            b0 = storage[at : at + count]
            if i + 4 <= rank and i % page_rows + 4 <= page_rows:
                b1 = storage[at + width : at + width + count]
                b2 = storage[at + 2 * width : at + 2 * width + count]
                b3 = storage[at + 3 * width : at + 3 * width + count]
                z0, z1, z2, z3 = z[i], z[i + 1], z[i + 2], z[i + 3]
                for j in range(count):
                    out[j] += z0 * b0[j] + z1 * b1[j] + z2 * b2[j] + z3 * b3[j]
                i += 4
            else:
                z0 = z[i]
                for j in range(count):
                    out[j] += z0 * b0[j]
                i += 1


@compiled
def apply_units(
    y: Array,
    x: Array,
    storage: Array,
    tokens: Array,
    weights: Array,
    segment: Array,
    ranks: Array,
    a_pages: Array,
    b_pages: Array,
    widths: Array,
    layer: int,
    begin: int,
    end: int,
) -> None:
    """Shrink and expand units [begin, end), where unit u is triple u // num_targets with target u % num_targets.

    tokens, weights, segment: [num_triples]. ranks: [layers, targets, segments]; a_pages, b_pages: [layers, targets,
    segments, pages]. widths: [targets, 4] (page_rows, in, out, first column).
    """
    num_targets = widths.shape[0]
    z = np.empty(a_pages.shape[3] * widths[0, 0], np.float32)
    for unit in range(begin, end):
        triple, target = unit // num_targets, unit % num_targets
        group = segment[triple]
        rank = ranks[layer, target, group]
        if rank > 0:
            page_rows, in_width, out_width, column = widths[target]
            token = tokens[triple]
            _shrink(x[token], storage, a_pages[layer, target, group], page_rows, in_width, 0, rank, z, weights[triple])
            columns = y[token, column : column + out_width]
            _expand(columns, storage, b_pages[layer, target, group], page_rows, out_width, rank, z, 0, out_width)


@compiled
def _cut(ranks: Array, segment: Array, sizes: Array, layer: int, share: int, workers: int) -> int:
    """The first unit of worker `share`: units' costs (rank · (in + out)) are laid end to end and cut evenly."""
    num_targets = sizes.shape[0]
    total = 0
    for group in segment:
        for target in range(num_targets):
            total += ranks[layer, target, group] * (sizes[target, 1] + sizes[target, 2])
    goal = total * share // workers
    done = 0
    unit = 0
    for group in segment:
        for target in range(num_targets):
            cost = ranks[layer, target, group] * (sizes[target, 1] + sizes[target, 2])
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
    segment: Array,
    ranks: Array,
    a_pages: Array,
    b_pages: Array,
    widths: Array,
    layer: int,
    workers: int,
) -> None:
    for worker in prange(workers):
        begin = _cut(ranks, segment, widths, layer, worker, workers) if worker > 0 else 0
        end = _cut(ranks, segment, widths, layer, worker + 1, workers)
        apply_units(y, x, storage, tokens, weights, segment, ranks, a_pages, b_pages, widths, layer, begin, end)


@compiled
def expand_columns(
    y: Array,
    storage: Array,
    tokens: Array,
    segment: Array,
    ranks: Array,
    b_pages: Array,
    widths: Array,
    layer: int,
    z: Array,
    share: int,
    workers: int,
) -> None:
    """Expand all units into one worker's share of each target's columns. z: [triples, targets, rank rows]."""
    for target in range(widths.shape[0]):
        page_rows, _, out_width, column = widths[target]
        # Shares begin at multiples of 16 columns, so that no two workers write the same cache line.
        chunk = (out_width // workers + 15) // 16 * 16
        first = min(out_width, share * chunk)
        last = out_width if share == workers - 1 else min(out_width, first + chunk)
        for triple in range(tokens.shape[0]):
            group = segment[triple]
            rank = ranks[layer, target, group]
            if rank > 0 and first < last:
                columns = y[tokens[triple], column : column + out_width]
                pages = b_pages[layer, target, group]
                _expand(columns, storage, pages, page_rows, out_width, rank, z[triple, target], first, last)


@compiled_parallel
def apply_columns_parallel(
    y: Array,
    x: Array,
    storage: Array,
    tokens: Array,
    weights: Array,
    segment: Array,
    ranks: Array,
    a_pages: Array,
    b_pages: Array,
    widths: Array,
    layer: int,
    workers: int,
) -> None:
    num_triples, num_targets, num_pages = tokens.shape[0], widths.shape[0], a_pages.shape[3]
    z = np.empty((num_triples, num_targets, num_pages * widths[0, 0]), np.float32)
    pieces = num_triples * num_targets * num_pages
    for worker in prange(workers):
        for piece in range(pieces * worker // workers, pieces * (worker + 1) // workers):
            page = piece % num_pages
            target = piece // num_pages % num_targets
            triple = piece // (num_pages * num_targets)
            group = segment[triple]
            page_rows, in_width = widths[target, 0], widths[target, 1]
            begin = page * page_rows
            end = min(ranks[layer, target, group], begin + page_rows)
            pages = a_pages[layer, target, group]
            row = x[tokens[triple]]
            _shrink(row, storage, pages, page_rows, in_width, begin, end, z[triple, target], weights[triple])
    for worker in prange(workers):
        expand_columns(y, storage, tokens, segment, ranks, b_pages, widths, layer, z, worker, workers)


@compiled
def embed_shrink(
    ids: Array,
    storage: Array,
    tokens: Array,
    weights: Array,
    segment: Array,
    ranks: Array,
    a_pages: Array,
    widths: Array,
    z: Array,
) -> None:
    """z[triple, 0, i] = weight · A[i, ids[token]]; A's rows are vocabulary-wide."""
    page_rows, width = widths[0, 0], widths[0, 1]
    for triple in range(tokens.shape[0]):
        group = segment[triple]
        column = ids[tokens[triple]]
        for i in range(ranks[0, 0, group]):
            at = a_pages[0, 0, group, i // page_rows] + (i % page_rows) * width
            z[triple, 0, i] = storage[at + column] * weights[triple]
