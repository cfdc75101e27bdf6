"""Each family against transformers on small random models: prefill, chunks, decode and mixed steps over paged KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import TOLERANCE, VOCAB, Sample, backends, hf_logits, load, random_tokens, save_random_model, serve
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

BACKENDS = backends()
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_TUNED = YARN | {"beta_fast": 4.0, "beta_slow": 2.0, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 2.5, 3.0],
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
PHI3_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # the class's own lie past this vocabulary
CASES: dict[str, Any] = {
    "llama-gqa": LlamaConfig(**SMALL),
    "llama-tied-mqa": LlamaConfig(**SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama-gelu": LlamaConfig(**SMALL, hidden_act="gelu"),
    "llama-gelu-tanh": LlamaConfig(**SMALL, hidden_act="gelu_pytorch_tanh"),
    "llama-llama3": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama-linear": LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}),
    "llama-dynamic": LlamaConfig(
        **SMALL | {"max_position_embeddings": 20},
        rope_parameters={"rope_type": "dynamic", "factor": 2.5, "rope_theta": 100.0},
    ),
    "llama-yarn": LlamaConfig(**SMALL, rope_parameters=YARN),
    "llama-yarn-tuned": LlamaConfig(**SMALL, rope_parameters=YARN_TUNED),
    "llama-longrope": LlamaConfig(**SMALL, rope_parameters=LONGROPE),
    "smollm2": LlamaConfig(**SMALL | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "mistral-window": MistralConfig(**SMALL, sliding_window=5, head_dim=12),
    "mistral-no-window": MistralConfig(**SMALL, sliding_window=None),
    "qwen2-tied": Qwen2Config(**SMALL | {"tie_word_embeddings": True}),
    "qwen2-some-windows": Qwen2Config(**SMALL, **WINDOWED),
    "qwen3-head-dim": Qwen3Config(**SMALL, head_dim=16),
    "qwen3-biases-tied": Qwen3Config(**SMALL | {"tie_word_embeddings": True}, head_dim=10, attention_bias=True),
    "qwen3-some-windows": Qwen3Config(**SMALL, **WINDOWED, head_dim=16),
    "phi3": Phi3Config(**SMALL, **PHI3_TOKENS),
    "phi3-window-partial-longrope": Phi3Config(
        **SMALL,
        **PHI3_TOKENS,
        sliding_window=7,
        original_max_position_embeddings=24,
        rope_parameters=LONGROPE
        | {"partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.0, 2.5]},
    ),
}
# (tokens, prompt): the last is longer than the context at which dynamic and longrope begin to stretch.
LENGTHS = ((9, 4), (30, 17), (46, 39))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_random_model(folder, CASES[request.param])
    expected = [hf_logits(model, random_tokens(total, i), prompt) for i, (total, prompt) in enumerate(LENGTHS)]
    assert min(float(logits.std()) for logits in expected) > 0.5, "degenerate logits would hide differences"
    return folder, expected


@pytest.mark.parametrize("chunk", [7, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_transformers(case: tuple[Path, list[torch.Tensor]], backend: str, chunk: int) -> None:
    folder, expected = case
    decoder = load(folder, BACKENDS[backend])
    sequences = [Sample(random_tokens(total, i), prompt) for i, (total, prompt) in enumerate(LENGTHS)]
    got, num_mixed = serve(decoder, sequences, chunk)
    assert num_mixed > 0
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
