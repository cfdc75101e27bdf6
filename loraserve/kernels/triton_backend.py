"""The Triton backend for CUDA and ROCm; on the CPU it runs in Triton's interpreter, to test it.

An operator without a kernel of its own is inherited from the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraserve.kernels import triton_attention, triton_lora_launch, triton_pointwise
from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTarget
from loraserve.kernels.reference import ACTIVATIONS, ReferenceOps, unknown_activation
from loraserve.kernels.triton_configs import (
    DECODE_ATTENTION,
    EXTEND_ATTENTION,
    OPTIONS,
    SPLITS,
    Arch,
    arch_of,
    attention_tiles,
    dot_precision,
    power_of_two,
    splits_for,
)

_PROGRAMS_PER_UNIT = 4  # a multiprocessor wants so many programs to hide the latency of memory
_INTERPRETED_UNITS = 2
_HEAD_BLOCK = 8
_GATE_BLOCK = 1024


class TritonOps(ReferenceOps):
    """The `Ops` protocol in Triton.

    Tiles of a step are kept while its `LoraSegments` is one of the last two seen. Call from one thread only. Tensors
    that are not contiguous are made so first.
    """

    name = "triton"

    def __init__(self, device: torch.device, num_units: int | None = None, arch: Arch | None = None) -> None:
        """Kernels for `device`, which has `num_units` multiprocessors and is an `arch` (None: ask it)."""
        self.arch = arch or arch_of(device)
        if num_units is None:
            is_gpu = device.type == "cuda"
            num_units = _INTERPRETED_UNITS
            if is_gpu:
                num_units = torch.cuda.get_device_properties(device).multi_processor_count
        self._wanted_programs = _PROGRAMS_PER_UNIT * num_units
        self._lora: list[triton_lora_launch.LoraStep] = []  # the newest first: over tokens, over rows of logits

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [n, width] → new [n, width]. Semantics: see the reference."""
        if x.dim() != 2:
            return super().rms_norm(x, weight, eps)
        return self._norm(x.contiguous(), None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place → new [n, width], its norm. Semantics: see the reference."""
        if x.dim() != 2 or x.shape != residual.shape or not residual.is_contiguous():
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x.contiguous(), residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        if x.numel():
            block = power_of_two(x.shape[1])
            triton_pointwise.norm_rows[(x.shape[0],)](
                x, x if residual is None else residual, weight, out, x.shape[1], eps,
                ADD=residual is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **OPTIONS,
            )  # fmt: skip
        return out

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
        """Shapes: see `Ops.rope_write_kv`. Semantics: see the reference."""
        num_tokens, kv_heads, head_dim = qkv.shape[0], k_cache.shape[1], k_cache.shape[2]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q = torch.empty((num_tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        if num_tokens:
            qkv = qkv.contiguous()
            triton_pointwise.rotate_and_store[(num_tokens, -(-(heads + 2 * kv_heads) // _HEAD_BLOCK))](
                qkv, cos.contiguous(), sin.contiguous(), q, k_cache, v_cache, loc,
                qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
                heads, kv_heads, cos.shape[1], eps,
                HEAD_DIM=head_dim, Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
                BLOCK_H=_HEAD_BLOCK, BLOCK_D=power_of_two(head_dim), num_warps=4, **OPTIONS,
            )  # fmt: skip
        return q

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
        """q: [n, heads, head_dim] → new [n, heads·head_dim]. Semantics: see the reference."""
        q = q.contiguous()
        out = torch.empty_like(q)
        if q.shape[0] == 0:
            return out.flatten(1)
        if batch.num_decode:
            self._decode(q, k_cache, v_cache, out, batch, scale, window, soft_cap)
        if batch.num_decode < batch.seq_lens.shape[0]:
            self._extend(q, k_cache, v_cache, out, batch, scale, window, soft_cap)
        return out.flatten(1)

    def _decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> None:
        num, heads, head_dim = batch.num_decode, q.shape[1], q.shape[2]
        kv_heads = k_cache.shape[1]
        group = heads // kv_heads
        tiles = attention_tiles(DECODE_ATTENTION, self.arch, head_dim, q.dtype)
        longest = batch.max_seq_len if window is None else min(window, batch.max_seq_len)
        splits = splits_for(num * kv_heads, self._wanted_programs, -(-longest // tiles.block_n))
        block_d = power_of_two(head_dim)
        partial = lse = out
        if splits > 1:
            partial = torch.empty((num, heads, splits, head_dim), dtype=torch.float32, device=q.device)
            lse = torch.empty((num, heads, splits), dtype=torch.float32, device=q.device)
        triton_attention.decode_attention[(num, kv_heads, splits)](
            q, k_cache, v_cache, out, partial, lse, batch.req_rows, batch.seq_lens, batch.locations,
            batch.locations.stride(0), kv_heads, scale,
            HEAD_DIM=head_dim, GROUP=group, WINDOW=window or 0, CAP=soft_cap or 0.0, SPLIT=splits > 1,
            BLOCK_H=power_of_two(group, tiles.block_m), BLOCK_N=tiles.block_n, BLOCK_D=block_d,
            PRECISION=dot_precision(q), num_warps=tiles.warps, num_stages=tiles.stages, **OPTIONS,
        )  # fmt: skip
        if splits > 1:
            triton_attention.combine_splits[(num * heads,)](
                partial,
                lse,
                out,
                splits,
                HEAD_DIM=head_dim,
                BLOCK_S=SPLITS[-1],
                BLOCK_D=block_d,
                num_warps=4,
                **OPTIONS,
            )

    def _extend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> None:
        heads, head_dim = q.shape[1], q.shape[2]
        kv_heads = k_cache.shape[1]
        group = heads // kv_heads
        tiles = attention_tiles(EXTEND_ATTENTION, self.arch, head_dim, q.dtype)
        block_m = power_of_two(group, tiles.block_m)
        num_tiles = -(-batch.max_q_len // (block_m // group))
        triton_attention.extend_attention[(num_tiles, kv_heads, batch.seq_lens.shape[0] - batch.num_decode)](
            q, k_cache, v_cache, out, batch.req_rows, batch.q_indptr, batch.seq_lens, batch.locations,
            batch.locations.stride(0), batch.num_decode, kv_heads, scale,
            HEAD_DIM=head_dim, GROUP=group, WINDOW=window or 0, CAP=soft_cap or 0.0,
            BLOCK_M=block_m, BLOCK_N=tiles.block_n, BLOCK_D=power_of_two(head_dim),
            PRECISION=dot_precision(q), num_warps=tiles.warps, num_stages=tiles.stages, **OPTIONS,
        )  # fmt: skip

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        """x: [n, 2·m] → new [n, m]. Semantics: see the reference. Raises `ConfigError` for an unknown activation."""
        if activation not in ACTIVATIONS:
            raise unknown_activation(activation)
        width = x.shape[1] // 2
        out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
        if out.numel():
            block = min(_GATE_BLOCK, power_of_two(width))
            triton_pointwise.gate_rows[(x.shape[0], -(-width // block))](
                x.contiguous(), out, width, ACTIVATION=activation, BLOCK=block, num_warps=4, **OPTIONS
            )
        return out

    def lora_apply(
        self, y: Tensor, x: Tensor, targets: tuple[LoraTarget, ...], layer: int, segments: LoraSegments
    ) -> None:
        """y: [n, out of the fused projection], in place; x: [n, in]. Semantics: see the reference."""
        if targets and segments.tokens.shape[0]:
            step = self._step(segments)
            triton_lora_launch.apply(y, x.contiguous(), targets, layer, step, self._wanted_programs)

    def lora_affine(self, y: Tensor, targets: tuple[LoraTarget, ...], layer: int, segments: LoraSegments) -> None:
        """y: [n, out of the fused projection], in place. Semantics: see the reference."""
        if targets and segments.tokens.shape[0]:
            triton_lora_launch.affine(y, targets, layer, self._step(segments))

    def lora_embed(self, y: Tensor, ids: Tensor, target: LoraTarget, segments: LoraSegments) -> None:
        """y: [n, hidden], in place; ids: [n] token ids. Semantics: see the reference."""
        if segments.tokens.shape[0]:
            triton_lora_launch.embed(y, ids.contiguous(), target, self._step(segments))

    def _step(self, segments: LoraSegments) -> triton_lora_launch.LoraStep:
        cached = next((step for step in self._lora if step.segments is segments), None)
        if cached is None:
            cached = triton_lora_launch.plan_step(segments, self.arch)
            self._lora = [cached, *self._lora[:1]]
        return cached
