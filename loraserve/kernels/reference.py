"""Every operator in plain torch: the definition that the other backends are tested against.

Works on any device and for every float dtype. Sums, norms, softmax and rotations are computed in float32 and cast once
at the end; base linears are `torch.nn.functional.linear`, whose float16/bfloat16 forms accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from loraserve.errors import ConfigError
from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTarget

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_MAX_SCORES = 1 << 25  # elements of one block of attention scores: bounds memory to 128 MiB whatever the context


@dataclass(slots=True)
class ReferenceLinear:
    """A base weight kept as it came."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    in_features: int = field(init=False)
    out_features: int = field(init=False)

    def __post_init__(self) -> None:
        self.out_features, self.in_features = self.weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ReferenceOps:
    """The `Ops` protocol in plain torch."""

    name = "reference"

    def warm_up(self) -> None:
        """Nothing to compile."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> ReferenceLinear:
        """Keep weight [out, in] and bias [out] unchanged.

        Semantics:
            linear(x) = x @ weight.T + bias
        """
        return ReferenceLinear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension. x: [n, width], weight: [width] → new [n, width].

        Semantics:
            out[i] = x[i] / sqrt(mean(x[i]²) + eps) * weight
        """
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (scaled * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add to the residual stream, then norm it. x, residual: [n, width] → new [n, width].

        Semantics:
            residual[:] = residual + x
            out = rms_norm(residual, weight, eps)
        """
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        loc: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Split qkv, norm and rotate q and k, store k and v. Shapes: see `Ops.rope_write_kv`.

        Semantics:
            q, k, v = split(qkv);  q = rms_norm(q, q_norm) per head if given;  k likewise
            rotated[:r/2]  = h[:r/2]·cos − h[r/2:r]·sin        r = rotary_dim
            rotated[r/2:r] = h[r/2:r]·cos + h[:r/2]·sin        rotated[r:] = h[r:]
            k_cache[loc] = rotated k;  v_cache[loc] = v;  return rotated q
        """
        num_tokens = qkv.shape[0]
        _, kv_heads, head_dim = k_cache.shape
        by_head = qkv.reshape(num_tokens, -1, head_dim)
        heads = by_head.shape[1] - 2 * kv_heads
        q, k, v = torch.split(by_head, [heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        where = loc.long()
        k_cache[where] = _rotate(k, cos, sin).to(k_cache.dtype)
        v_cache[where] = v.to(v_cache.dtype)
        return _rotate(q, cos, sin).to(qkv.dtype)

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Causal attention over the paged cache. q: [n, heads, head_dim] → new [n, heads·head_dim].

        Semantics, for token t at position p of sequence s, query head h, KV head h // (heads / kv_heads):
            visible = positions j of s with j ≤ p and, if window is given, j > p − window
            score_j = scale · q[t, h]·K[locations[s, j]];  if soft_cap is given, soft_cap · tanh(score_j / soft_cap)
            out[t, h] = Σ_j softmax_j(score_j) · V[locations[s, j]]
        """
        out = torch.empty_like(q)
        rows, indptr, lens = batch.req_rows.tolist(), batch.q_indptr.tolist(), batch.seq_lens.tolist()
        for row, begin, end, length in zip(rows, indptr, indptr[1:], lens, strict=False):
            if begin == end:
                continue
            where = batch.locations[row, :length].long()
            # One [kv_heads, length, head_dim] copy per sequence; all query blocks of the sequence share it.
            keys = k_cache[where].float().transpose(0, 1)
            values = v_cache[where].float().transpose(0, 1)
            block = max(1, _MAX_SCORES // (q.shape[1] * length))
            for first in range(begin, end, block):
                last = min(first + block, end)
                position = length - (end - first)
                out[first:last] = _attend(q[first:last], keys, values, position, scale, window, soft_cap)
        return out.flatten(1)

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        """Gated activation. x: [n, 2·m] → new [n, m]. Raises `ConfigError` for an unknown activation.

        Semantics:
            out = act(x[:, :m]) * x[:, m:];  gelu is the erf form, gelu_tanh its tanh approximation
        """
        gate, up = x.float().chunk(2, dim=-1)
        if activation == "silu":
            gate = F.silu(gate)
        elif activation == "gelu":
            gate = F.gelu(gate)
        elif activation == "gelu_tanh":
            gate = F.gelu(gate, approximate="tanh")
        else:
            raise unknown_activation(activation)
        return (gate * up).to(x.dtype)

    def lora_apply(
        self, y: Tensor, x: Tensor, targets: tuple[LoraTarget, ...], layer: int, segments: LoraSegments
    ) -> None:
        """Add every segment's low-rank product to y in place. y: [n, out of the fused projection]; x: [n, in].

        Semantics, for each target and each segment g = (slot, tokens T, weights w), A and B the rows of (layer, slot):
            y[T, out_offset : out_offset + out_features] += w[:, None] · (x[T] @ A.T) @ B
            slot −1, empty segments and slots of rank 0 change nothing; the sum is made in float32 and cast once.
        """
        for slot, tokens, weights in iter_segments(segments):
            picked = x[tokens].float()
            for target in targets:
                factors = slot_factors(target, layer, slot)
                if factors is None:
                    continue
                a, b = factors
                columns = slice(target.out_offset, target.out_offset + target.out_features)
                delta = (picked @ a.float().T) @ b.float()
                summed = y[tokens, columns].float() + weights[:, None] * delta
                y[tokens, columns] = summed.to(y.dtype)

    def lora_affine(self, y: Tensor, targets: tuple[LoraTarget, ...], layer: int, segments: LoraSegments) -> None:
        """Scale and shift the base's output in place, before the deltas come. y: [n, out of the fused projection].

        Semantics, for each target and segment g = (slot, tokens T, weights w) with `affine[layer, slot]`, gain and
        shift the two rows of B past the rank, y0 the y before the call:
            y[T, out_offset : out_offset + out_features] += w[:, None] · (y0[T, same columns] * gain + shift)
            slot −1, empty segments and slots without the two rows change nothing; each segment's sum is in float32.
        """
        before: Tensor | None = None
        for slot, tokens, weights in iter_segments(segments):
            for target in targets:
                rows = slot_affine(target, layer, slot)
                if rows is None:
                    continue
                if before is None:
                    before = y.clone()
                gain, shift = rows.float()
                columns = slice(target.out_offset, target.out_offset + target.out_features)
                delta = before[tokens, columns].float() * gain + shift
                y[tokens, columns] = (y[tokens, columns].float() + weights[:, None] * delta).to(y.dtype)

    def lora_embed(self, y: Tensor, ids: Tensor, target: LoraTarget, segments: LoraSegments) -> None:
        """Add the adapters' embedding deltas to y in place. y: [n, hidden]; ids: [n] token ids < in_features.

        Semantics, for each segment g = (slot, tokens T, weights w), A: [rank, vocab] and B: [rank, hidden] of the slot:
            y[T] += w[:, None] · A[:, ids[T]].T @ B
        """
        for slot, tokens, weights in iter_segments(segments):
            factors = slot_factors(target, 0, slot)
            if factors is None:
                continue
            a, b = factors
            columns = slice(target.out_offset, target.out_offset + target.out_features)
            delta = a[:, ids[tokens]].float().T @ b.float()
            y[tokens, columns] = (y[tokens, columns].float() + weights[:, None] * delta).to(y.dtype)


def unknown_activation(activation: str) -> ConfigError:
    """The error for an activation that no backend computes."""
    return ConfigError(f"activation {activation!r} is not implemented; supported: {', '.join(ACTIVATIONS)}")


def iter_segments(segments: LoraSegments) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(slot, token rows int64, weights float32) of each segment that can change something."""
    slots, indptr = segments.slots.tolist(), segments.indptr.tolist()
    for slot, begin, end in zip(slots, indptr, indptr[1:], strict=False):
        if slot >= 0 and begin < end:
            yield slot, segments.tokens[begin:end].long(), segments.weights[begin:end]


def slot_factors(target: LoraTarget, layer: int, slot: int) -> tuple[Tensor, Tensor] | None:
    """A [rank, in] and B [rank, out] of one slot, or None if the slot does not target this kind.

    A view of the pool where the slot's pages follow each other, else a copy.
    """
    rank = int(target.ranks[layer, slot])
    if rank == 0:
        return None
    num_pages = -(-rank // target.page_rows)
    a = target.a_pages[layer, slot, :num_pages].tolist()
    b = target.b_pages[layer, slot, :num_pages].tolist()
    return (
        _gather_rows(target.storage, a, rank, target.page_rows, target.in_features),
        _gather_rows(target.storage, b, rank, target.page_rows, target.out_features),
    )


def slot_affine(target: LoraTarget, layer: int, slot: int) -> Tensor | None:
    """Gain and shift of one slot, [2, out], or None if it has none."""
    if target.affine is None or not bool(target.affine[layer, slot]):
        return None
    rank = int(target.ranks[layer, slot])
    num_pages = -(-(rank + 2) // target.page_rows)
    pages = target.b_pages[layer, slot, :num_pages].tolist()
    return _gather_rows(target.storage, pages, rank + 2, target.page_rows, target.out_features)[rank:]


def _gather_rows(storage: Tensor, pages: list[int], rank: int, page_rows: int, width: int) -> Tensor:
    """The `rank` rows of `width` elements that lie in `pages` (element offsets)."""
    page = page_rows * width
    if all(after - before == page for before, after in pairwise(pages)):
        return storage[pages[0] : pages[0] + rank * width].view(rank, width)
    ends = [start + min(page, rank * width - i * page) for i, start in enumerate(pages)]
    return torch.cat([storage[start:end] for start, end in zip(pages, ends, strict=True)]).view(rank, width)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the first 2·cos.shape[1] elements of each head. x: [n, heads, head_dim] → float32."""
    half = cos.shape[-1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Softmax attention of q [m, heads, d], whose first row is at `position`, over keys/values [kv_heads, len, d]."""
    num_new, heads, head_dim = q.shape
    kv_heads, length, _ = keys.shape
    grouped = q.float().view(num_new, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("mkgd,kld->kgml", grouped, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at = torch.arange(position, position + num_new, device=q.device)[:, None]
    seen = torch.arange(length, device=q.device)[None, :]
    hidden = seen > at
    if window is not None:
        hidden |= seen <= at - window
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("kgml,kld->mkgd", weights, values).reshape(num_new, heads, head_dim).to(q.dtype)
