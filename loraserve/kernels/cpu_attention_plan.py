"""How one step's attention is done on CPU: few new tokens by our kernel, prefill chunks by torch's blocked attention.

What all layers with one window share is planned once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loraserve.kernels.cpu_attention import decode_parallel, decode_share
from loraserve.kernels.metadata import AttentionBatch

Array = np.ndarray[Any, Any]

_MAX_ITEM_TOKENS = 16  # with more new tokens torch is faster: at 16 it needs 1.4 times as long, at 64 the same or less
_SERIAL_WORK = 1 << 15  # positions × heads × head_dim below which one thread is faster than waking the others


@dataclass(slots=True)
class _Chunk:
    """One sequence's new tokens that go through torch's attention."""

    first: int
    last: int
    where: Tensor  # [visible] int64 locations, those that no token of the chunk can see left out
    mask: Tensor | None  # [last - first, visible] float32, 0 or −inf; None: plainly causal from position 0


@dataclass(slots=True)
class AttentionPlan:
    """What all layers with the same window share about one step."""

    locations: Array
    items: Array  # [n, 3] int64: row of q, row of locations, first visible position
    ends: Array  # [n] int64 running ends of the items' numbers of visible positions
    chunks: list[_Chunk]


def plan_attention(batch: AttentionBatch, window: int | None) -> AttentionPlan:
    """Split the step's sequences into single tokens for the decode kernel and chunks for torch."""
    rows, indptr, lens = batch.req_rows.numpy(), batch.q_indptr.numpy(), batch.seq_lens.numpy()
    items: list[tuple[int, int, int, int]] = []
    chunks: list[_Chunk] = []
    for row, begin, end, length in zip(
        rows.tolist(), indptr[:-1].tolist(), indptr[1:].tolist(), lens.tolist(), strict=True
    ):
        if end - begin <= _MAX_ITEM_TOKENS:
            for token in range(begin, end):
                seen = length - (end - token) + 1
                first = 0 if window is None else max(0, seen - window)
                items.append((token, row, first, seen - first))
        else:
            chunks.append(_plan_chunk(batch.locations[row], begin, end, length, window))
    table = np.array(items, np.int64).reshape(-1, 4)
    return AttentionPlan(batch.locations.numpy(), np.ascontiguousarray(table[:, :3]), np.cumsum(table[:, 3]), chunks)


def _plan_chunk(locations: Tensor, begin: int, end: int, length: int, window: int | None) -> _Chunk:
    start = length - (end - begin)  # position of the chunk's first token
    lowest = 0 if window is None else max(0, start - window + 1)
    where = locations[lowest:length].long()
    if start == 0 and (window is None or window >= length):
        return _Chunk(begin, end, where, None)
    at = torch.arange(start, length)[:, None]
    seen = torch.arange(lowest, length)[None, :]
    hidden = seen > at
    if window is not None:
        hidden |= seen <= at - window
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return _Chunk(begin, end, where, mask)


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, workers: int) -> Tensor:
    """q: [n, heads, head_dim] → [n, heads·head_dim]; contiguous float32."""
    out = torch.empty_like(q)
    if len(plan.items):
        arrays = (q.numpy(), k_cache.numpy(), v_cache.numpy(), plan.locations, plan.items, plan.ends)
        work = int(plan.ends[-1]) * q.shape[1] * q.shape[2]
        if workers == 1 or work < _SERIAL_WORK:
            unused = np.empty((2, 1, 1), np.float32), np.empty(2, np.int64)  # nothing is cut
            decode_share(*arrays, np.float32(scale), out.numpy(), 0, plan.ends[-1], *unused)
        else:
            decode_parallel(*arrays, np.float32(scale), out.numpy(), workers)
    for chunk in plan.chunks:
        _attend_chunk(q, k_cache, v_cache, chunk, scale, out)
    return out.flatten(1)


def _attend_chunk(q: Tensor, k_cache: Tensor, v_cache: Tensor, chunk: _Chunk, scale: float, out: Tensor) -> None:
    heads, width = q.shape[1:]
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    # The KV heads become the batch and K, V are repeated over their group by a zero stride: no copy per query head.
    grouped = q[chunk.first : chunk.last].view(-1, kv_heads, group, width).permute(1, 2, 0, 3)
    keys = k_cache[chunk.where].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    values = v_cache[chunk.where].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    mask = None if chunk.mask is None else chunk.mask[None, None]
    attended = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    out[chunk.first : chunk.last].view(-1, kv_heads, group, width).copy_(attended.permute(2, 0, 1, 3))
