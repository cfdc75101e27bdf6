"""Triton: norms, rotation with the KV write, gated activations. `reference.py` defines the results."""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)) without an overflow at either end."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def norm_rows(
    x, residual, weight, out, width, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):
    """RMS norm of x, or of residual += x (in place, rounded to its dtype first). Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_store(
    qkv, cos, sin, q_out, k_cache, v_cache, loc, q_norm, k_norm, heads, kv_heads, half, eps,
    HEAD_DIM: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Norm (if given) and rotate q and k, write q out and k, v to the cache. Grid: (tokens, blocks of heads).

    A head's partner element is read a second time, from the cache, rather than exchanged between threads.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    all_heads = heads + 2 * kv_heads
    both = (head < all_heads)[:, None] & (d < HEAD_DIM)[None, :]
    source = qkv + token * all_heads * HEAD_DIM + head[:, None] * HEAD_DIM
    raw = tl.load(source + d[None, :], mask=both, other=0.0)
    value = raw.to(tl.float32)
    turned = d < 2 * half
    partner = tl.where(d < half, d + half, tl.where(turned, d - half, d))
    other = tl.load(source + partner[None, :], mask=both, other=0.0).to(tl.float32)
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    if Q_NORM or K_NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / HEAD_DIM + eps)
        inside = d < HEAD_DIM
        gain = tl.full([BLOCK_H, BLOCK_D], 1.0, tl.float32)
        gain_other = tl.full([BLOCK_H, BLOCK_D], 1.0, tl.float32)
        if Q_NORM:
            own = tl.load(q_norm + d, mask=inside, other=0.0).to(tl.float32)
            far = tl.load(q_norm + partner, mask=inside, other=0.0).to(tl.float32)
            gain = tl.where(is_q[:, None], scale[:, None] * own[None, :], gain)
            gain_other = tl.where(is_q[:, None], scale[:, None] * far[None, :], gain_other)
        if K_NORM:
            own = tl.load(k_norm + d, mask=inside, other=0.0).to(tl.float32)
            far = tl.load(k_norm + partner, mask=inside, other=0.0).to(tl.float32)
            gain = tl.where(is_k[:, None], scale[:, None] * own[None, :], gain)
            gain_other = tl.where(is_k[:, None], scale[:, None] * far[None, :], gain_other)
        value = (value * gain).to(raw.dtype).to(tl.float32)
        other = (other * gain_other).to(raw.dtype).to(tl.float32)
    angle = tl.where(d < half, d, d - half)
    c = tl.load(cos + token * half + angle, mask=turned, other=1.0)
    s = tl.load(sin + token * half + angle, mask=turned, other=0.0)
    sign = tl.where(d < half, -1.0, 1.0)
    rotated = value * c[None, :] + other * (sign * s)[None, :]
    q_where = q_out + token * heads * HEAD_DIM + head[:, None] * HEAD_DIM + d[None, :]
    tl.store(q_where, rotated.to(q_out.dtype.element_ty), mask=both & is_q[:, None])
    place = tl.load(loc + token).to(tl.int64) * kv_heads
    k_where = k_cache + (place + head - heads)[:, None] * HEAD_DIM + d[None, :]
    tl.store(k_where, rotated.to(k_cache.dtype.element_ty), mask=both & is_k[:, None])
    is_v = head >= heads + kv_heads
    v_where = v_cache + (place + head - heads - kv_heads)[:, None] * HEAD_DIM + d[None, :]
    tl.store(v_where, raw.to(v_cache.dtype.element_ty), mask=both & is_v[:, None])


@triton.jit
def gate_rows(x, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """act(x[:, :width]) · x[:, width:]. Grid: (rows, blocks of BLOCK columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate * sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * sigmoid(2.0 * inner)  # (1 + tanh(z)) / 2
    tl.store(out + row * width + column, (gate * up).to(out.dtype.element_ty), mask=inside)
