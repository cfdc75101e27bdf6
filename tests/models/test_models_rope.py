"""cos and sin against transformers' own rotary modules, at positions that models of test size do not reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import PagedKV, Sample, load, make_batch, save_random_model
from test_models_families import LLAMA3, LONGROPE, YARN
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from loraserve.kernels.reference import ReferenceOps
from loraserve.models.config import RopeSpec, RopeType
from loraserve.models.forward_batch import ForwardBatch
from loraserve.models.rope import RotaryEmbedding

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def batch(tmp_path: Path) -> ForwardBatch:
    """The tokens 0..9 of a long prompt at far positions."""
    save_random_model(tmp_path, LlamaConfig(**SMALL))
    decoder = load(tmp_path, ReferenceOps())
    kv = PagedKV(decoder, 1, 9000)
    return make_batch([(0, Sample([1] * 9000, 9000, done=8990), 10)], kv)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        LLAMA3,
        YARN,
        LONGROPE,
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotation_equals_transformers(batch: ForwardBatch, tmp_path: Path, rope: dict[str, Any]) -> None:
    config = LlamaConfig(**SMALL, rope_parameters=rope)
    save_random_model(tmp_path, config)
    rotary = load(tmp_path, ReferenceOps()).rotary
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), batch.positions[None])
    ours = rotary(batch)
    half = config.head_dim // 2
    assert ours.cos.shape == (10, half)
    torch.testing.assert_close(ours.cos, cos[0, :, :half], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.sin, sin[0, :, :half], atol=1e-6, rtol=0)


def test_reserved_tables_are_not_replaced(batch: ForwardBatch) -> None:
    rope = RopeSpec(rope_type=RopeType.DEFAULT, theta=100.0, rotary_dim=8, max_position_embeddings=64)
    rotary = RotaryEmbedding(rope, torch.device("cpu"))
    rotary.reserve(9000)
    table = rotary._table
    rotary(batch)
    assert rotary._table is table
