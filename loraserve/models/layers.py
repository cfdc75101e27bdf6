"""The two halves of a decoder layer, attention and MLP, over one step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from loraserve.kernels.metadata import Kind, LoraSegments, LoraTables, LoraTarget
from loraserve.kernels.ops import Ops, PackedLinear
from loraserve.lora.tables import K_NORM, Q_NORM, head_norm_row
from loraserve.models.forward_batch import ForwardBatch
from loraserve.models.rope import Rotation


class KVTensors(Protocol):
    """The part of a KV cache that the decoder touches: per layer [num_locations, kv_heads, head_dim]."""

    @property
    def k(self) -> Sequence[Tensor]:
        """Keys, rotated."""
        ...

    @property
    def v(self) -> Sequence[Tensor]:
        """Values."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights, linears packed by the backend: qkv is q|k|v, gate_up is gate|up."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: PackedLinear
    post_norm: Tensor  # [hidden]
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class StepLora:
    """The adapters of one step, grouped by fused linear once so that layers only ask "is there any"."""

    segments: LoraSegments
    affine: bool  # whether some slot scales or shifts the base's output
    qkv: tuple[LoraTarget, ...]
    o: tuple[LoraTarget, ...]
    gate_up: tuple[LoraTarget, ...]
    down: tuple[LoraTarget, ...]

    @staticmethod
    def of(tables: LoraTables, segments: LoraSegments) -> StepLora:
        """Group the tables' targets."""
        return StepLora(
            segments,
            affine=segments.affine and bool(tables.affine_slots),
            qkv=tables.group(Kind.Q, Kind.K, Kind.V),
            o=tables.group(Kind.O),
            gate_up=tables.group(Kind.GATE, Kind.UP),
            down=tables.group(Kind.DOWN),
        )

    def apply(self, ops: Ops, y: Tensor, x: Tensor, targets: tuple[LoraTarget, ...], layer: int) -> None:
        """Turn the base's output y of x into the adapters', in place."""
        if not targets:
            return
        if self.affine:
            ops.lora_affine(y, targets, layer, self.segments)
        ops.lora_apply(y, x, targets, layer, self.segments)


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward shares."""

    ops: Ops
    batch: ForwardBatch
    kv: KVTensors
    rotation: Rotation
    lora: StepLora | None  # None when no token of the step uses an adapter


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP of one layer; each takes normed hidden states and returns what is added to the residual."""

    index: int
    weights: LayerWeights
    scale: float  # of attention scores
    window: int | None
    activation: str
    eps: float

    def attend(self, x: Tensor, step: Step) -> Tensor:
        """Self-attention; writes the tokens' K and V. x: [num_tokens, hidden] → new [num_tokens, hidden]."""
        ops, weights, lora = step.ops, self.weights, step.lora
        k_cache, v_cache = step.kv.k[self.index], step.kv.v[self.index]
        qkv = weights.qkv(x)
        if lora is not None:
            lora.apply(ops, qkv, x, lora.qkv, self.index)
        q = ops.rope_write_kv(
            qkv,
            step.rotation.cos,
            step.rotation.sin,
            k_cache,
            v_cache,
            step.batch.out_loc,
            weights.q_norm,
            weights.k_norm,
            self.eps,
        )
        if step.batch.rows is not None and weights.q_norm is not None and weights.k_norm is not None:
            self._renorm_heads(step, qkv, q)
        heads = ops.attention(q, k_cache, v_cache, step.batch.attention, self.scale, self.window)
        out = weights.o(heads)
        if lora is not None:
            lora.apply(ops, out, heads, lora.o, self.index)
        return out

    def _renorm_heads(self, step: Step, qkv: Tensor, q: Tensor) -> None:
        """Do q and k again for tokens whose adapters bring norms of their own. q: [num_tokens, heads, head_dim]."""
        assert step.batch.rows is not None
        for tokens, rows in step.batch.rows.head_norms:
            q_norm, k_norm = (rows.row(head_norm_row(self.index, name)) for name in (Q_NORM, K_NORM))
            if q_norm is None and k_norm is None:
                continue
            q[tokens] = step.ops.rope_write_kv(
                qkv[tokens],
                step.rotation.cos[tokens],
                step.rotation.sin[tokens],
                step.kv.k[self.index],
                step.kv.v[self.index],
                step.batch.out_loc[tokens],
                self.weights.q_norm if q_norm is None else q_norm,
                self.weights.k_norm if k_norm is None else k_norm,
                self.eps,
            )

    def transform(self, x: Tensor, step: Step) -> Tensor:
        """The gated MLP. x: [num_tokens, hidden] → new [num_tokens, hidden]."""
        ops, weights, lora = step.ops, self.weights, step.lora
        gate_up = weights.gate_up(x)
        if lora is not None:
            lora.apply(ops, gate_up, x, lora.gate_up, self.index)
        inner = ops.act_and_mul(gate_up, self.activation)
        out = weights.down(inner)
        if lora is not None:
            lora.apply(ops, out, inner, lora.down, self.index)
        return out
