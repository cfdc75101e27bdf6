"""Rotary embedding: cos and sin of each token, as transformers computes them for the same prompt run alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraserve.models.config import RopeSpec, RopeType
from loraserve.models.forward_batch import ForwardBatch

_FIRST_POSITIONS = 4096  # rows of the first tables; they double when a longer sequence comes


class Rotation(NamedTuple):
    """What each token's heads are rotated by; [num_tokens, rotary_dim / 2] float32 each."""

    cos: Tensor
    sin: Tensor


class _ConfigView:
    """A `RopeSpec` seen as the config object that transformers' functions read."""

    def __init__(self, rope: RopeSpec) -> None:
        self.head_dim = rope.rotary_dim
        self.hidden_size = rope.rotary_dim
        self.num_attention_heads = 1
        self.max_position_embeddings = rope.max_position_embeddings
        given: dict[str, Any] = {
            "rope_type": rope.rope_type.value,
            "rope_theta": rope.theta,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
            "truncate": rope.truncate,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "short_factor": rope.short_factor,
            "long_factor": rope.long_factor,
        }
        self.rope_parameters = {key: value for key, value in given.items() if value is not None}

    def standardize_rope_params(self) -> None:
        """Already in the form that the functions expect."""


def inverse_frequencies(rope: RopeSpec, context_lens: int | Tensor | None = None) -> tuple[Tensor, float]:
    """inv_freq, float32 on the CPU (or on `context_lens`' device), and the factor on cos and sin.

    context_lens: None or an int → [rotary_dim / 2]; a tensor [n, 1] (dynamic only) → [n, rotary_dim / 2].
    """
    if rope.rope_type is RopeType.DEFAULT:
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
        return 1.0 / (rope.theta**exponents), 1.0
    device = context_lens.device if isinstance(context_lens, Tensor) else None
    made: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[rope.rope_type.value](
        _ConfigView(rope), device, seq_len=context_lens
    )
    return made


class RotaryEmbedding:
    """cos and sin for the tokens of a batch; tables by position where the frequencies do not depend on the context."""

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        inv_freq, self._scaling = inverse_frequencies(rope)
        self._rope = rope
        self._inv_freq = inv_freq.to(device)
        self._long_inv_freq: Tensor | None = None
        if rope.rope_type is RopeType.LONGROPE:
            assert rope.original_max_position_embeddings is not None  # the config was refused without it
            long_inv_freq, _ = inverse_frequencies(rope, rope.original_max_position_embeddings + 1)
            self._long_inv_freq = long_inv_freq.to(device)
        self._table: Rotation | None = None

    def reserve(self, num_positions: int) -> None:
        """Make the tables hold positions below `num_positions`, so that none is replaced later (captured graphs)."""
        if self._rope.context_threshold is not None:
            return
        if self._table is None or self._table.cos.shape[0] < num_positions:
            positions = torch.arange(num_positions, device=self._inv_freq.device)
            self._table = self._rotate(positions, self._inv_freq)

    def __call__(self, batch: ForwardBatch) -> Rotation:
        """The rotation of each token of the batch."""
        if self._rope.context_threshold is not None:
            return self._rotate(batch.positions, self._frequencies(batch.context_lens, self._rope.context_threshold))
        needed = batch.attention.max_seq_len
        if self._table is None or self._table.cos.shape[0] < needed:
            self.reserve(max(_FIRST_POSITIONS, 1 << (needed - 1).bit_length()))
        assert self._table is not None
        return Rotation(self._table.cos[batch.positions], self._table.sin[batch.positions])

    def _frequencies(self, context_lens: Tensor, threshold: int) -> Tensor:
        """inv_freq of each token, [n, rotary_dim / 2]; at or below the threshold exactly the unscaled ones."""
        lens = context_lens[:, None]
        if self._long_inv_freq is not None:
            stretched = self._long_inv_freq
        else:
            stretched, _ = inverse_frequencies(self._rope, lens)
        return torch.where(lens > threshold, stretched, self._inv_freq)

    def _rotate(self, positions: Tensor, inv_freq: Tensor) -> Rotation:
        angles = positions[:, None].float() * inv_freq
        return Rotation(angles.cos() * self._scaling, angles.sin() * self._scaling)
