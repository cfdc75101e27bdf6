"""`load_shape`: what is read from a config, and what is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import VOCAB, save_random_model
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from loraserve.errors import ModelLoadError, UnsupportedModel
from loraserve.kernels.metadata import Kind
from loraserve.models.config import RopeType, load_shape

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(folder, LlamaConfig(**SMALL, eos_token_id=7))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A Llama checkpoint that the test may spoil."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def edit(folder: Path, name: str = "config.json", /, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    file = folder / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    content |= fields
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_rope(folder: Path, max_position_embeddings: int = 64, **rope: Any) -> None:
    edit(folder, rope_parameters=rope, max_position_embeddings=max_position_embeddings)


def test_importing_the_config_needs_no_torch() -> None:
    code = "import sys, loraserve.models.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sizes_and_features(tmp_path: Path) -> None:
    config = Qwen3Config(**SMALL, head_dim=10, attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5)
    save_random_model(tmp_path, config)
    shape = load_shape(tmp_path)
    assert (shape.family, shape.architecture) == ("qwen3", "Qwen3ForCausalLM")
    assert (shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.vocab_size) == (24, 20, 2, VOCAB)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 10)
    assert (shape.q_size, shape.kv_size, shape.max_context) == (40, 20, 64)
    assert (shape.qkv_bias, shape.o_bias, shape.mlp_bias, shape.qk_norm) == (True, True, False, True)
    assert shape.tie_word_embeddings
    assert shape.rms_norm_eps == 1e-5
    assert shape.activation == "silu"
    assert shape.dtype == "float32"
    assert shape.windows == (None, None)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MistralConfig(**SMALL, sliding_window=9), (9, 9)),
        (MistralConfig(**SMALL, sliding_window=None), (None, None)),
        (Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1), (None, 9)),
        (Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=9, max_window_layers=1), (None, None)),
    ],
)
def test_windows(tmp_path: Path, config: Any, windows: tuple[int | None, ...]) -> None:
    save_random_model(tmp_path, config)
    assert load_shape(tmp_path).windows == windows


@pytest.mark.parametrize(
    ("rope", "max_context", "threshold"),
    [
        ({"rope_type": "default"}, 64, None),
        ({"rope_type": "linear", "factor": 3.0}, 192, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 128, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128, None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64, None),
    ],
)
def test_max_context(folder: Path, rope: dict[str, Any], max_context: int, threshold: int | None) -> None:
    edit_rope(folder, **rope)
    shape = load_shape(folder)
    assert shape.max_context == max_context
    assert shape.rope.context_threshold == threshold


def test_old_style_rope_scaling(folder: Path) -> None:
    edit(folder, rope_parameters=None, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    rope = load_shape(folder).rope
    assert (rope.rope_type, rope.theta, rope.factor) == (RopeType.LINEAR, 500.0, 2.0)


def test_eos_ids_of_both_files(folder: Path) -> None:
    edit(folder, "generation_config.json", eos_token_id=[9, 3], pad_token_id=5, temperature=0.2, do_sample=True)
    shape = load_shape(folder)
    assert shape.eos_token_ids == (3, 7, 9)
    assert (shape.bos_token_id, shape.pad_token_id) == (1, 5)


def test_eos_default_of_the_config_class_does_not_count(folder: Path) -> None:
    edit(folder, eos_token_id=None)
    edit(folder, "generation_config.json", eos_token_id=[9])
    assert load_shape(folder).eos_token_ids == (9,)


def test_without_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_shape(folder).eos_token_ids == (7,)


def test_dtype_from_the_weights_when_the_config_has_none(folder: Path) -> None:
    edit(folder, dtype=None)
    assert load_shape(folder).dtype == "float32"


def test_module_paths_and_targets_are_those_of_the_model(tmp_path: Path) -> None:
    model = save_random_model(tmp_path, Qwen3Config(**SMALL, head_dim=10))
    modules = dict(model.named_modules())
    shape = load_shape(tmp_path)
    targets = shape.lora_targets()
    assert {target.kind for target in targets} == set(Kind)
    for target in targets:
        for layer in range(target.num_layers):
            weight = modules[shape.module_path(target.kind, layer)].weight
            if target.kind is Kind.EMBED:
                weight = weight.T
            assert (target.out_features, target.in_features) == tuple(weight.shape)
    offsets = {target.kind: target.out_offset for target in targets}
    assert (offsets[Kind.Q], offsets[Kind.K], offsets[Kind.V]) == (0, 40, 60)
    assert (offsets[Kind.GATE], offsets[Kind.UP]) == (0, 20)
    assert shape.module_path(Kind.Q, 1) == "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(("kind", "layer"), [(Kind.Q, 2), (Kind.Q, -1), (Kind.EMBED, 1)])
def test_module_path_of_a_layer_that_does_not_exist(folder: Path, kind: Kind, layer: int) -> None:
    with pytest.raises(IndexError):
        load_shape(folder).module_path(kind, layer)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known_to_transformers", [True, False])
def test_unsupported_architecture_names_it_and_the_supported_ones(folder: Path, known_to_transformers: bool) -> None:
    name, model_type = ("GPT2LMHeadModel", "gpt2") if known_to_transformers else ("NewForCausalLM", "new-2031")
    edit(folder, architectures=[name], model_type=model_type)
    with pytest.raises(UnsupportedModel) as caught:
        load_shape(folder)
    for expected in (name, "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert expected in caught.value.message


def test_model_type_alone_is_enough_to_refuse(folder: Path) -> None:
    edit(folder, architectures=None, model_type="gpt2")
    with pytest.raises(UnsupportedModel, match="gpt2"):
        load_shape(folder)


def test_model_type_alone_is_enough_to_accept(folder: Path) -> None:
    edit(folder, architectures=None)
    assert load_shape(folder).architecture == "LlamaForCausalLM"


def test_architecture_that_disagrees_with_the_model_type(folder: Path) -> None:
    edit(folder, model_type="mistral")
    with pytest.raises(UnsupportedModel, match="model_type mistral"):
        load_shape(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"hidden_act": "relu2"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}}, "mrope_section"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_features_that_change_the_math_are_refused_by_name(folder: Path, fields: dict[str, Any], named: str) -> None:
    edit(folder, **fields)
    with pytest.raises(UnsupportedModel, match=named):
        load_shape(folder)


def test_fields_without_effect_are_accepted(folder: Path) -> None:
    edit(folder, attn_logit_softcapping=0, residual_multiplier=1.0, pretraining_tp=2, use_cache=False, torchscript=True)
    load_shape(folder)


def test_mistral_with_layer_types_is_refused(tmp_path: Path) -> None:
    save_random_model(tmp_path, MistralConfig(**SMALL, sliding_window=9))
    edit(tmp_path, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UnsupportedModel, match="ministral"):
        load_shape(tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"head_dim": 3}, "rotary dimensions"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}}, "factor"),
        ({"model_type": None}, "model_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_configs(folder: Path, fields: dict[str, Any], named: str) -> None:
    edit(folder, **fields)
    with pytest.raises(ModelLoadError, match=named):
        load_shape(folder)


def test_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        load_shape(folder)


def test_config_that_is_missing(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_shape(folder)


def test_generation_config_that_is_broken(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(ModelLoadError, match="generation_config"):
        load_shape(folder)


def test_eos_ids_that_are_no_ids(folder: Path) -> None:
    edit(folder, "generation_config.json", eos_token_id=["</s>"])
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        load_shape(folder)


def test_half_precision_checkpoint(tmp_path: Path) -> None:
    save_random_model(tmp_path, LlamaConfig(**SMALL)).to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_shape(tmp_path).dtype == "bfloat16"
