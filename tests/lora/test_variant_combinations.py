"""Combinations of variants that are refused because PEFT refuses them, tried with PEFT itself; and those that work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import BdLoraConfig, LoraConfig, get_peft_model
from raw_adapters import GEOMETRY, HIDDEN, INTER, LAYERS, VOCAB, plain_config, plain_tensors, write
from test_lora_format_refused import EMBED
from tiny_models import quiet
from transformers import LlamaConfig, LlamaForCausalLM

from loraserve.errors import AdapterRefused
from loraserve.lora.format import parse_adapter

BLOCKS = {"target_modules_bd_b": ["q_proj"], "nblocks": 2, "match_strict": False}
REFUSED: dict[str, dict[str, Any]] = {
    "dora and lora_bias": {"use_dora": True, "lora_bias": True},
    "dora and alora": {"use_dora": True, "alora_invocation_tokens": [5]},
    "dora and bdlora": {"use_dora": True, "use_bdlora": BLOCKS},
    "alora and bdlora": {"alora_invocation_tokens": [5], "use_bdlora": BLOCKS},
    "alora on embed": {"alora_invocation_tokens": [5], "target_modules": ["embed_tokens"]},
    "lora_bias on embed": {"lora_bias": True, "target_modules": ["embed_tokens"]},
    "bdlora on embed": {"use_bdlora": BLOCKS, "target_modules": ["embed_tokens"]},
}
WORKING: dict[str, dict[str, Any]] = {
    "dora on embed and lm_head": {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]},
    "alora on lm_head": {"alora_invocation_tokens": [5], "target_modules": ["lm_head"]},
    "alora and lora_bias": {"alora_invocation_tokens": [5], "lora_bias": True},
    "bdlora and lora_bias": {"use_bdlora": BLOCKS | {"target_modules_bd_a": ["o_proj"]}, "lora_bias": True},
    "bdlora, rslora and patterns": {"use_bdlora": BLOCKS, "use_rslora": True, "rank_pattern": {"o_proj": 3}},
}


def adapt(**settings: Any) -> Any:
    """PEFT's model."""
    shape = {"hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))
    if "use_bdlora" in settings:
        settings["use_bdlora"] = BdLoraConfig(**settings["use_bdlora"])
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"} | settings
    with quiet():
        return get_peft_model(model, LoraConfig(**settings))


@pytest.mark.parametrize("name", REFUSED)
def test_what_peft_refuses_is_refused(tmp_path: Path, name: str) -> None:
    settings = REFUSED[name]
    with pytest.raises(ValueError, match=r"not supported|unsupported variant combination"):
        adapt(**settings)
    tensors = EMBED if "target_modules" in settings else plain_tensors()
    with pytest.raises(AdapterRefused, match="PEFT") as refused:
        parse_adapter(write(tmp_path, plain_config(**settings), tensors), GEOMETRY, 64)
    assert refused.value.code == "unsupported_variant"


@pytest.mark.parametrize("name", WORKING)
def test_what_peft_saves_is_taken(tmp_path: Path, name: str) -> None:
    model = adapt(**WORKING[name])
    with quiet():
        model.save_pretrained(tmp_path, save_embedding_layers=False)
    spec = parse_adapter(tmp_path, GEOMETRY, 64)
    assert spec.targets
    assert spec.features


def test_alora_with_trained_base_biases_is_refused_though_peft_saves_it(tmp_path: Path) -> None:
    """PEFT applies such biases to the tokens before the invocation too, whose KV would not be the base's."""
    adapt(alora_invocation_tokens=[5], bias="all")
    folder = write(tmp_path, plain_config(alora_invocation_tokens=[5], bias="all"))
    with pytest.raises(AdapterRefused, match="before the invocation") as refused:
        parse_adapter(folder, GEOMETRY, 64)
    assert refused.value.code == "unsupported_variant"
