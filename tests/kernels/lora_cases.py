"""Builders of random paged pools, batches and caches. Whatever an op has no business to read is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTarget

NAN = float("nan")
MIXES = ("distinct", "uniform", "zipf", "identical", "skewed")


@dataclass
class Pool:
    """A pool of targets and the plain matrices that were put into it: factors[target][layer][slot] = (A, B) or None."""

    targets: tuple[LoraTarget, ...]
    factors: list[list[list[tuple[Tensor, Tensor] | None]]]


def make_pool(
    widths: list[tuple[int, int]],
    ranks: list[list[int]],
    *,
    layers: int = 2,
    page_rows: int = 4,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.2,
    generator: torch.Generator,
) -> Pool:
    """Targets of `widths` (in, out) side by side, `ranks[target][slot]`, pages shuffled over one storage.

    Unused rows, unused pages and the gaps between pages are NaN; unused entries of the page tables point past the end.
    """
    wanted: list[tuple[int, int, int, bool, int, Tensor]] = []  # target, layer, slot, is_b, page, rows
    factors = []
    for t, (width_in, width_out) in enumerate(widths):
        per_layer = []
        for layer in range(layers):
            per_slot: list[tuple[Tensor, Tensor] | None] = []
            for slot, rank in enumerate(ranks[t]):
                if rank == 0:
                    per_slot.append(None)
                    continue
                a = (torch.randn(rank, width_in, generator=generator) * scale).to(dtype)
                b = (torch.randn(rank, width_out, generator=generator) * scale).to(dtype)
                per_slot.append((a, b))
                for is_b, matrix in ((False, a), (True, b)):
                    for page in range(0, rank, page_rows):
                        rows = matrix[page : page + page_rows]
                        wanted.append((t, layer, slot, is_b, page // page_rows, rows))
            per_layer.append(per_slot)
        factors.append(per_layer)
    order = torch.randperm(len(wanted), generator=generator).tolist()
    sizes = [page_rows * widths[w[0]][1 if w[3] else 0] for w in wanted]
    gap = 3
    storage = torch.full((gap + sum(sizes[i] + gap for i in order),), NAN, dtype=dtype)
    max_pages = max(-(-max(max(r), 1) // page_rows) for r in ranks)
    tables = [
        [torch.full((layers, len(ranks[t]), max_pages), 1 << 40, dtype=torch.int64) for _ in range(2)]
        for t in range(len(widths))
    ]
    at = gap
    for i in order:
        t, layer, slot, is_b, page, rows = wanted[i]
        storage[at : at + rows.numel()] = rows.flatten()
        tables[t][int(is_b)][layer, slot, page] = at
        at += sizes[i] + gap
    targets, column = [], 0
    for t, (width_in, width_out) in enumerate(widths):
        targets.append(
            LoraTarget(
                storage=storage,
                a_pages=tables[t][0],
                b_pages=tables[t][1],
                ranks=torch.tensor(ranks[t], dtype=torch.int32).repeat(layers, 1),
                page_rows=page_rows,
                in_features=width_in,
                out_features=width_out,
                out_offset=column,
            )
        )
        column += width_out
    return Pool(tuple(targets), factors)


def make_segments(assignments: list[list[tuple[int, float]]], *, extra: list[int] = []) -> LoraSegments:  # noqa: B006
    """Segments of tokens' (slot, weight) lists; `extra` slots get an empty segment each."""
    slots = sorted({slot for token in assignments for slot, _ in token} | set(extra))
    tokens, weights, indptr = [], [], [0]
    for slot in slots:
        for token, pairs in enumerate(assignments):
            for owner, weight in pairs:
                if owner == slot:
                    tokens.append(token)
                    weights.append(weight)
        indptr.append(len(tokens))
    return LoraSegments(
        tokens=torch.tensor(tokens, dtype=torch.int32),
        weights=torch.tensor(weights, dtype=torch.float32),
        slots=torch.tensor(slots, dtype=torch.int32),
        indptr=torch.tensor(indptr, dtype=torch.int32),
        max_segment=max((b - a for a, b in pairwise(indptr)), default=0),
    )


def popularity(mix: str, num_tokens: int, num_slots: int, generator: torch.Generator) -> list[int]:
    """Punica's five ways in which requests choose adapters."""
    if mix == "distinct":
        return [i % num_slots for i in range(num_tokens)]
    if mix == "identical":
        return [num_slots - 1] * num_tokens
    if mix == "uniform":
        return torch.randint(num_slots, (num_tokens,), generator=generator).tolist()
    if mix == "zipf":
        odds = 1 / torch.arange(1, num_slots + 1).float() ** 1.5
        return torch.multinomial(odds, num_tokens, replacement=True, generator=generator).tolist()
    if mix == "skewed":
        return [0] * (num_tokens - num_tokens // 4) + [1 + i % (num_slots - 1) for i in range(num_tokens // 4)]
    raise ValueError(mix)


def expected_lora(y: Tensor, x: Tensor, pool: Pool, layer: int, assignments: list[list[tuple[int, float]]]) -> Tensor:
    """y with every token's deltas added, token by token in float64 through merged matrices."""
    result = y.double().clone()
    for token, pairs in enumerate(assignments):
        for slot, weight in pairs:
            if slot < 0:
                continue
            for target, factors in zip(pool.targets, pool.factors, strict=True):
                pair = factors[layer][slot]
                if pair is None:
                    continue
                merged = pair[1].double().T @ pair[0].double()  # [out, in]: what PEFT would add to W
                columns = slice(target.out_offset, target.out_offset + target.out_features)
                result[token, columns] += weight * (merged @ x[token].double())
    return result


@dataclass
class AttentionCase:
    """A paged cache, a batch over it, and the dense K and V of every sequence."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch
    keys: list[Tensor]  # [len, kv_heads, head_dim] each
    values: list[Tensor]


def make_attention(
    lens: list[int],
    new: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator,
) -> AttentionCase:
    """Sequences of `lens` tokens, the last `new` of them in this step; pages shuffled, everything unused NaN."""
    pages = [-(-n // page_size) for n in lens]
    num_pages = sum(pages) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    num_rows, max_context = len(lens) + 2, max(lens) + 5
    locations = torch.full((num_rows, max_context), 1 << 30, dtype=torch.int32)
    rows = torch.randperm(num_rows, generator=generator)[: len(lens)].to(torch.int32)
    k_cache = torch.full((num_pages * page_size, kv_heads, head_dim), NAN, dtype=dtype)
    v_cache = k_cache.clone()
    keys, values = [], []
    for i, length in enumerate(lens):
        mine = [order.pop() for _ in range(pages[i])]
        where = torch.tensor([page * page_size + j for page in mine for j in range(page_size)][:length])
        locations[rows[i], :length] = where.to(torch.int32)
        k = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
        v = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
        k_cache[where], v_cache[where] = k, v
        keys.append(k)
        values.append(v)
    indptr = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    num_decode = next((i for i, n in enumerate(new) if n != 1), len(new))
    batch = AttentionBatch(
        req_rows=rows,
        q_indptr=indptr,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        locations=locations,
        num_decode=num_decode,
        max_seq_len=max(lens),
        max_q_len=max(new),
    )
    q = torch.randn(sum(new), heads, head_dim, generator=generator).to(dtype)
    return AttentionCase(q, k_cache, v_cache, batch, keys, values)


def expected_attention(case: AttentionCase, scale: float, window: int | None) -> Tensor:
    """Dense torch attention, sequence by sequence, in float64."""
    outs = []
    indptr = case.batch.q_indptr.tolist()
    for i, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.q[indptr[i] : indptr[i + 1]]
        length, num = len(k), len(q)
        at = torch.arange(length - num, length)[:, None]
        seen = torch.arange(length)[None]
        visible = seen <= at
        if window is not None:
            visible &= seen > at - window
        repeat = q.shape[1] // k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(0, 1),
            k.double().transpose(0, 1).repeat_interleave(repeat, 0),
            v.double().transpose(0, 1).repeat_interleave(repeat, 0),
            attn_mask=visible,
            scale=scale,
        )
        outs.append(out.transpose(0, 1).flatten(1))
    return torch.cat(outs)
