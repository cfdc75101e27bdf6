"""Numba kernels for what stands between two GEMMs: norms, rotation with the KV write, SwiGLU. float32, contiguous.

Each is a kernel over rows [first, last), most with a parallel form that gives every worker an equal share; the caller
picks by the amount of work, because starting the threads costs as much as a few thousand elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loraserve.kernels.cpu_math import compiled, compiled_parallel, fast_exp
from loraserve.kernels.cpu_simd import prefetch

Array = np.ndarray[Any, Any]


@compiled
def norm_rows(x: Array, weight: Array, eps: float, out: Array, first: int, last: int) -> None:
    width = x.shape[1]
    for i in range(first, last):
        total = np.float32(0)
        for j in range(width):
            total += x[i, j] * x[i, j]
        inverse = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for j in range(width):
            out[i, j] = x[i, j] * inverse * weight[j]


@compiled
def add_norm_rows(x: Array, residual: Array, weight: Array, eps: float, out: Array, first: int, last: int) -> None:
    width = x.shape[1]
    for i in range(first, last):
        total = np.float32(0)
        for j in range(width):
            summed = residual[i, j] + x[i, j]
            residual[i, j] = summed
            total += summed * summed
        inverse = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for j in range(width):
            out[i, j] = residual[i, j] * inverse * weight[j]


@compiled_parallel
def add_norm_parallel(x: Array, residual: Array, weight: Array, eps: float, out: Array, workers: int) -> None:
    rows = x.shape[0]
    for worker in prange(workers):
        add_norm_rows(x, residual, weight, eps, out, rows * worker // workers, rows * (worker + 1) // workers)


@compiled
def _rotate_head(source: Array, cos: Array, sin: Array, norm: Array, eps: float, target: Array) -> None:
    """One head: norm it if `norm` is not empty, then rotate the first 2·len(cos) elements, half-split."""
    width, half = source.shape[0], cos.shape[0]
    # Slices, because a computed index could be negative for all that LLVM knows, and the check stops vectorisation.
    low, high = source[:half], source[half : 2 * half]
    low_out, high_out = target[:half], target[half : 2 * half]
    if norm.shape[0] == 0:
        for j in range(half):
            a, b = low[j], high[j]
            low_out[j] = a * cos[j] - b * sin[j]
            high_out[j] = b * cos[j] + a * sin[j]
        for j in range(2 * half, width):
            target[j] = source[j]
        return
    total = np.float32(0)
    for j in range(width):
        total += source[j] * source[j]
    inverse = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
    low_norm, high_norm = norm[:half], norm[half : 2 * half]
    for j in range(half):
        a, b = low[j] * inverse * low_norm[j], high[j] * inverse * high_norm[j]
        low_out[j] = a * cos[j] - b * sin[j]
        high_out[j] = b * cos[j] + a * sin[j]
    for j in range(2 * half, width):
        target[j] = source[j] * inverse * norm[j]


@compiled
def rope_rows(
    qkv: Array,
    cos: Array,
    sin: Array,
    k_cache: Array,
    v_cache: Array,
    loc: Array,
    q_norm: Array,
    k_norm: Array,
    eps: float,
    q_out: Array,
    first: int,
    last: int,
) -> None:
    heads = q_out.shape[1]
    kv_heads, width = k_cache.shape[1], k_cache.shape[2]
    # Ask for all lines first: a store that waits for its line holds up every later one.
    size = kv_heads * width * 4
    for i in range(first, last):
        offset = np.int64(loc[i]) * size
        for line in range(offset, offset + size, 64):
            prefetch(k_cache.ctypes.data + line, 1)
            prefetch(v_cache.ctypes.data + line, 1)
    for i in range(first, last):
        row, where = qkv[i], loc[i]
        for h in range(heads):
            _rotate_head(row[h * width : (h + 1) * width], cos[i], sin[i], q_norm, eps, q_out[i, h])
        for h in range(kv_heads):
            at = (heads + h) * width
            _rotate_head(row[at : at + width], cos[i], sin[i], k_norm, eps, k_cache[where, h])
            at += kv_heads * width
            value = row[at : at + width]
            for j in range(width):
                v_cache[where, h, j] = value[j]


@compiled_parallel
def rope_parallel(
    qkv: Array,
    cos: Array,
    sin: Array,
    k_cache: Array,
    v_cache: Array,
    loc: Array,
    q_norm: Array,
    k_norm: Array,
    eps: float,
    q_out: Array,
    workers: int,
) -> None:
    rows = qkv.shape[0]
    for worker in prange(workers):
        first, last = rows * worker // workers, rows * (worker + 1) // workers
        rope_rows(qkv, cos, sin, k_cache, v_cache, loc, q_norm, k_norm, eps, q_out, first, last)


@compiled
def silu_rows(x: Array, out: Array, first: int, last: int) -> None:
    width = out.shape[1]
    for i in range(first, last):
        up = x[i, width:]
        for j in range(width):
            gate = x[i, j]
            out[i, j] = gate / (np.float32(1) + fast_exp(-gate)) * up[j]


@compiled_parallel
def silu_parallel(x: Array, out: Array, workers: int) -> None:
    rows = x.shape[0]
    for worker in prange(workers):
        silu_rows(x, out, rows * worker // workers, rows * (worker + 1) // workers)
