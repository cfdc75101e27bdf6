"""The one generic decoder: pre-norm layers of attention and gated MLP. Families differ in their `ModelShape` only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from loraserve.kernels.metadata import Kind, LoraSegments, LoraTables
from loraserve.kernels.ops import Ops, PackedLinear
from loraserve.lora.tables import FINAL_NORM_ROW, INPUT_NORM, POST_NORM, norm_row
from loraserve.models.config import ModelShape
from loraserve.models.forward_batch import ForwardBatch
from loraserve.models.layers import DecoderLayer, KVTensors, LayerWeights, Step, StepLora
from loraserve.models.replaced import LogitsRows
from loraserve.models.rope import RotaryEmbedding


class WeightBytes(NamedTuple):
    """Memory of the base weights in bytes; `head` is 0 where a tied head shares the embedding's memory."""

    embedding: int
    layers: int
    head: int


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, on one device."""

    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: PackedLinear
    nbytes: WeightBytes


class Decoder:
    """A causal language model over paged KV, with adapters applied per token."""

    def __init__(self, shape: ModelShape, weights: DecoderWeights, ops: Ops) -> None:
        self.shape = shape
        self.weights = weights
        self.ops = ops
        self.rotary = RotaryEmbedding(shape.rope, weights.embed.device)
        self._layers = tuple(
            DecoderLayer(
                index,
                layer,
                scale=shape.head_dim**-0.5,
                window=shape.windows[index],
                activation=shape.activation,
                eps=shape.rms_norm_eps,
            )
            for index, layer in enumerate(weights.layers)
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the base weights."""
        return sum(self.weights.nbytes)

    def forward(self, batch: ForwardBatch, kv: KVTensors, lora: LoraTables | None) -> Tensor:
        """Run the step's tokens through all layers, writing their K and V.

        Returns hidden states after the final norm, [num_tokens, hidden] in the weights' dtype. Raises `ValueError` if
        the batch has adapter segments but no tables are given.
        """
        ops, eps = self.ops, self.shape.rms_norm_eps
        active = _active(batch.lora, lora)
        ids = batch.input_ids
        if batch.rows is not None:
            # A token that only its adapter has a row for: whatever the base says of it is replaced below.
            ids = ids.clamp(max=self.shape.vocab_size - 1)
        residual = F.embedding(ids, self.weights.embed)
        if active is not None and (target := active.tables.targets.get(Kind.EMBED)) is not None:
            if active.affine:
                ops.lora_affine(residual, (target,), 0, active.segments)
            ops.lora_embed(residual, ids, target, active.segments)
        if batch.rows is not None:
            batch.rows.replace_embeddings(residual)
        step_lora = StepLora.of(active.tables, active.segments) if active is not None else None
        step = Step(ops, batch, kv, self.rotary(batch), step_lora)

        x = ops.rms_norm(residual, self.weights.layers[0].input_norm, eps)
        for layer in self._layers:
            if layer.index > 0:
                x = ops.add_rms_norm(x, residual, layer.weights.input_norm, eps)
            self._renorm(x, residual, norm_row(layer.index, INPUT_NORM), batch)
            x = layer.attend(x, step)
            x = ops.add_rms_norm(x, residual, layer.weights.post_norm, eps)
            self._renorm(x, residual, norm_row(layer.index, POST_NORM), batch)
            x = layer.transform(x, step)
        x = ops.add_rms_norm(x, residual, self.weights.final_norm, eps)
        self._renorm(x, residual, FINAL_NORM_ROW, batch)
        return x

    def _renorm(self, x: Tensor, residual: Tensor, row: int, batch: ForwardBatch) -> None:
        """Do a norm again for tokens whose adapters bring its weight. x, in place: the normed residual."""
        if batch.rows is None:
            return
        for tokens, weight in batch.rows.norms_of(row):
            x[tokens] = self.ops.rms_norm(residual[tokens], weight, self.shape.rms_norm_eps)

    def logits(
        self,
        hidden_rows: Tensor,
        lora: LoraTables | None,
        segments: LoraSegments | None,
        rows: LogitsRows | None = None,
    ) -> Tensor:
        """Logits of some rows of `forward`'s output. hidden_rows: [R, hidden] → [R, vocab] float32.

        `segments` and `rows` count in rows of `hidden_rows`. With `rows` of adapters that bring tokens, the result is
        as wide as the largest vocabulary. Raises `ValueError` if `segments` are given without tables.
        """
        y = self.weights.lm_head(hidden_rows)
        if rows is not None:
            y = rows.replace(y, hidden_rows)
        active = _active(segments, lora)
        if active is not None and (target := active.tables.targets.get(Kind.LM_HEAD)) is not None:
            if active.affine:
                self.ops.lora_affine(y, (target,), 0, active.segments)
            self.ops.lora_apply(y, hidden_rows, (target,), 0, active.segments)
        return y.float()


class _ActiveLora(NamedTuple):
    tables: LoraTables
    segments: LoraSegments

    @property
    def affine(self) -> bool:
        """Whether some slot of the step scales or shifts the base's output."""
        return self.segments.affine and bool(self.tables.affine_slots)


def _active(segments: LoraSegments | None, tables: LoraTables | None) -> _ActiveLora | None:
    """What must be applied, or None when no token has an adapter: then no LoRA operator runs at all."""
    if segments is None or segments.max_segment == 0:
        return None
    if tables is None:
        raise ValueError("the batch has adapter segments, but no adapter tables were given")
    return _ActiveLora(tables, segments)
