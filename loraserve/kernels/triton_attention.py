"""Triton: attention over the paged KV cache. `reference.py` defines the results.

Both kernels put the query heads that share a KV head, and for `extend` several tokens, into the rows of one tile: row i
is token i // GROUP, head i % GROUP of the group. Softmax runs online in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraserve.kernels.triton_pointwise import sigmoid

# fmt: off

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(q, k, scale, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scaled (and softly capped) scores in base 2."""
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if CAP > 0.0:
        scores = CAP * (2.0 * sigmoid(2.0 * scores / CAP) - 1.0)  # CAP · tanh(scores / CAP)
    return scores * _LOG2E


@triton.jit
def _absorb(scores, v, peak, mass, total, PRECISION: tl.constexpr):
    """One block of keys into the running softmax; a row that has seen no key keeps peak −inf and mass 0."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    kept = tl.exp2(peak - safe)
    p = tl.exp2(scores - safe[:, None])
    mass = mass * kept + tl.sum(p, 1)
    total = tl.dot(p.to(v.dtype), v, total * kept[:, None], input_precision=PRECISION)
    return new_peak, mass, total


@triton.jit(do_not_specialize=["locations_stride"])
def decode_attention(
    q, k_cache, v_cache, out, partial, partial_lse, req_rows, seq_lens, locations, locations_stride,
    kv_heads, scale,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):
    """One new token per sequence. Grid: (sequences, kv_heads, splits).

    Without SPLIT `out` [n, heads, HEAD_DIM] is written; else each split leaves its normalised sum in `partial`
    [n, heads, splits, HEAD_DIM] fp32 and the base-2 logarithm of its mass in `partial_lse` [n, heads, splits].
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + seq)
    table = locations + tl.load(req_rows + seq).to(tl.int64) * locations_stride
    start = 0
    if WINDOW > 0:
        start = tl.maximum(length - WINDOW, 0)
    splits = tl.num_programs(2)
    share = tl.cdiv(tl.cdiv(length - start, splits), BLOCK_N) * BLOCK_N
    low = start + split * share
    high = tl.minimum(low + share, length)

    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    wide = d < HEAD_DIM
    head = kv_head * GROUP + h
    row = (seq.to(tl.int64) * kv_heads * GROUP + head) * HEAD_DIM
    query = tl.load(q + row[:, None] + d[None, :], mask=(h < GROUP)[:, None] & wide[None, :], other=0.0)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_H], tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for n0 in range(low, high, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        seen = n < high
        where = (tl.load(table + n, mask=seen, other=0).to(tl.int64) * kv_heads + kv_head) * HEAD_DIM
        k = tl.load(k_cache + where[None, :] + d[:, None], mask=wide[:, None] & seen[None, :], other=0.0)
        scores = tl.where(seen[None, :], _scores(query, k, scale, CAP, PRECISION), float("-inf"))
        v = tl.load(v_cache + where[:, None] + d[None, :], mask=seen[:, None] & wide[None, :], other=0.0)
        peak, mass, total = _absorb(scores, v, peak, mass, total, PRECISION)
    safe_mass = tl.where(mass == 0.0, 1.0, mass)
    result = total / safe_mass[:, None]
    stored = (h < GROUP)[:, None] & wide[None, :]
    if not SPLIT:
        tl.store(out + row[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=stored)
    else:
        at = (seq.to(tl.int64) * kv_heads * GROUP + head) * splits + split
        tl.store(partial + at[:, None] * HEAD_DIM + d[None, :], result, mask=stored)
        lse = tl.where(mass == 0.0, float("-inf"), peak + tl.log2(safe_mass))
        tl.store(partial_lse + at, lse, mask=h < GROUP)


@triton.jit(do_not_specialize=["splits"])
def combine_splits(
    partial, partial_lse, out, splits,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Join what the splits of one query head left. Grid: (tokens · heads,). out: [tokens, heads, HEAD_DIM]."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    real = s < splits
    wide = d < HEAD_DIM
    lse = tl.load(partial_lse + row * splits + s, mask=real, other=float("-inf"))
    share = tl.exp2(lse - tl.max(lse, 0))
    share = share / tl.sum(share, 0)
    where = partial + (row * splits + s)[:, None] * HEAD_DIM + d[None, :]
    value = tl.load(where, mask=real[:, None] & wide[None, :], other=0.0)
    result = tl.sum(value * share[:, None], 0)
    tl.store(out + row * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=wide)


@triton.jit(do_not_specialize=["locations_stride", "first_seq"])
def extend_attention(
    q, k_cache, v_cache, out, req_rows, q_indptr, seq_lens, locations, locations_stride, first_seq,
    kv_heads, scale,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):
    """New tokens over the cached prefix and themselves. Grid: (tiles of the longest, kv_heads, sequences − first_seq).

    Sequences before `first_seq` are left alone.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    seq = first_seq + tl.program_id(2)
    kv_head = tl.program_id(1)
    begin = tl.load(q_indptr + seq)
    num_new = tl.load(q_indptr + seq + 1) - begin
    first = tl.program_id(0) * TOKENS
    if first >= num_new:
        return
    length = tl.load(seq_lens + seq)
    table = locations + tl.load(req_rows + seq).to(tl.int64) * locations_stride

    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    wide = d < HEAD_DIM
    token = first + i // GROUP
    live = (token < num_new) & (i // GROUP < TOKENS)
    position = length - num_new + token
    row = ((begin + token).to(tl.int64) * kv_heads * GROUP + kv_head * GROUP + i % GROUP) * HEAD_DIM
    both = live[:, None] & wide[None, :]
    query = tl.load(q + row[:, None] + d[None, :], mask=both, other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - num_new + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    high = tl.minimum(length - num_new + first + TOKENS, length)
    for n0 in range(low, high, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        seen = n < high
        where = (tl.load(table + n, mask=seen, other=0).to(tl.int64) * kv_heads + kv_head) * HEAD_DIM
        k = tl.load(k_cache + where[None, :] + d[:, None], mask=wide[:, None] & seen[None, :], other=0.0)
        visible = seen[None, :] & (n[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (n[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, _scores(query, k, scale, CAP, PRECISION), float("-inf"))
        v = tl.load(v_cache + where[:, None] + d[None, :], mask=seen[:, None] & wide[None, :], other=0.0)
        peak, mass, total = _absorb(scores, v, peak, mass, total, PRECISION)
    result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(out + row[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=both)
