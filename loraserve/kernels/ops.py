"""The operators that every backend provides. `reference.py` defines what each one means."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTarget


class PackedLinear(Protocol):
    """A base weight `[out, in]` (and bias) in the layout its backend computes fastest with."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ W.T + b`. x: [num_tokens, in] → new [num_tokens, out] in x's dtype."""
        ...


class Ops(Protocol):
    """One backend. All tensors of a call live on one device; activations are [num_tokens, width], contiguous."""

    name: str

    def warm_up(self) -> None:
        """Compile whatever is compiled at run time, before the first request; may take a minute the first time."""
        ...

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Prepare a base weight [out, in] once at load; the caller gives up its own reference afterwards."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight`, computed in fp32. x: [n, width] → new [n, width]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then the norm of the sum as a new tensor."""
        ...

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
        """Normalise q and k per head (if weights are given), rotate both (half-split style), write k, v to the cache.

        qkv: [n, (heads + 2·kv_heads)·head_dim]; cos, sin: [n, rotary_dim/2] fp32 (rotary_dim ≤ head_dim, the rest of a
        head is left alone); k_cache, v_cache: [num_locations, kv_heads, head_dim]; loc: [n] int32.
        Returns q as [n, heads, head_dim].
        """
        ...

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
        """Causal attention of each sequence's new tokens over its whole context in the cache.

        q: [n, heads, head_dim] → new [n, heads·head_dim]. `window` w: position p sees positions > p − w. `soft_cap` c:
        a score s becomes c·tanh(s / c).
        """
        ...

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        """`act(x[:, :m]) * x[:, m:]` with m = width/2; activation is `silu`, `gelu` or `gelu_tanh`. → new [n, m]."""
        ...

    def lora_apply(
        self, y: Tensor, x: Tensor, targets: tuple[LoraTarget, ...], layer: int, segments: LoraSegments
    ) -> None:
        """For each segment and target: `y[T, cols] += w[:, None] * (x[T] @ A.T) @ B`, fp32 accumulation, y in place.

        y: [n, out of the fused projection]; x: [n, in]; cols = out_offset .. out_offset + out_features of the target.
        """
        ...

    def lora_embed(self, y: Tensor, ids: Tensor, target: LoraTarget, segments: LoraSegments) -> None:
        """For each segment: `y[T] += w[:, None] * A[:, ids[T]].T @ B`; A rows are vocabulary-wide. y: [n, hidden]."""
        ...

    def lora_affine(self, y: Tensor, targets: tuple[LoraTarget, ...], layer: int, segments: LoraSegments) -> None:
        """For each segment and target with gain and shift: `y[T, cols] += w[:, None] * (y0[T, cols] * gain + shift)`.

        y0 is y before the call, the base's output: call it before `lora_apply` or `lora_embed`. y: [n, out of the fused
        projection], in place.
        """
        ...
