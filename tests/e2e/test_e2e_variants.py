"""Every variant of LoRA that is served answers as PEFT does: alone, in mixed batches, after eviction and reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver, engine_config
from tiny_models import ATTENTION, MLP, Oracle, make_model
from variants import (
    COUNT,
    INVOCATION,
    PLAIN,
    PLAIN_FUSED,
    ActivatedOracle,
    check_request,
    check_variant,
    invoking_prompts,
    make_prompts,
    make_variant,
)

LINEARS = ATTENTION + MLP
DORA: dict[str, Any] = {"r": 4, "lora_alpha": 10, "use_dora": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": False},
    "phi3": {"family": "phi3", "tie_word_embeddings": False, "pad_token_id": 0},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("qwen2", DORA | {"target_modules": LINEARS}),
    "dora-biases": ("llama-biases", DORA | {"target_modules": LINEARS}),
    "dora-partial": (
        "llama",
        {
            "r": 5,
            "use_rslora": True,
            "use_dora": True,
            "target_modules": ["k_proj", "up_proj", "down_proj"],
            "layers_to_transform": [1, 2],
            "rank_pattern": {"up_proj": 9},
        },
    ),
    "dora-embed-head": ("qwen2", DORA | {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    "dora-embed-tied": ("llama", DORA | {"target_modules": ["embed_tokens", "q_proj"]}),
    "embed-tied-as-one": ("qwen2", {"r": 4, "ensure_weight_tying": True, "target_modules": ["embed_tokens", "q_proj"]}),
    "lora-bias": ("qwen2", {"r": 4, "lora_alpha": 6, "lora_bias": True, "target_modules": LINEARS}),
    "bias-all": ("llama-biases", {"r": 4, "bias": "all", "target_modules": ["q_proj", "down_proj"]}),
    "bias-lora-only": ("qwen2", {"r": 3, "bias": "lora_only", "target_modules": ["k_proj", "v_proj", "o_proj"]}),
    "fused": ("phi3", {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "fused-dora": ("phi3", DORA | {"target_modules": ["qkv_proj", "gate_up_proj"], "rank_pattern": {"qkv_proj": 9}}),
    "fused-lora-bias": ("phi3", {"r": 2, "lora_bias": True, "target_modules": ["qkv_proj", "lm_head"]}),
    "dora-bias-all": ("qwen2", DORA | {"bias": "all", "target_modules": ["v_proj", "o_proj"]}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variants")


def model_of(root: Path, name: str) -> Path:
    folder = root / name
    return folder if folder.exists() else make_model(folder, seed=7, **MODELS[name])


def variant_of(root: Path, name: str) -> tuple[Path, Path]:
    model_name, settings = VARIANTS[name]
    model, folder = model_of(root, model_name), root / "adapters" / name
    return model, folder if folder.exists() else make_variant(model, folder, 3, **settings)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_peft(root: Path, name: str, kernels: str) -> None:
    model, folder = variant_of(root, name)
    plain = PLAIN_FUSED if VARIANTS[name][0] == "phi3" else PLAIN
    check_variant(model, folder, root / f"beside-{VARIANTS[name][0]}", kernels, plain)


def test_a_scaled_variant_scales_its_whole_difference(root: Path) -> None:
    model, folder = variant_of(root, "dora-biases")
    prompt = make_prompts()[2]
    with Driver(engine_config(model)) as driver:
        driver.load("variant", folder)
        zero = driver.add(prompt, [("variant", 0.0)], max_tokens=COUNT)
        halves = driver.add(prompt, [("variant", 0.5), ("variant", 0.5)], max_tokens=COUNT)
        driver.finish()
        check_request(driver, zero, Oracle(model), None, prompt)
        check_request(driver, halves, Oracle(model), folder, prompt)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_an_activated_adapter_begins_with_its_last_invocation(root: Path, kernels: str) -> None:
    model, folder = model_of(root, "qwen2"), root / "adapters" / "alora"
    if not folder.exists():
        settings = {"r": 4, "lora_alpha": 12, "target_modules": [*LINEARS, "lm_head"]}
        make_variant(model, folder, 3, **settings, alora_invocation_tokens=INVOCATION)
    oracle = ActivatedOracle(model)
    prompts = invoking_prompts()
    assert oracle.greedy(folder, prompts[4], 4) == oracle.greedy(None, prompts[4], 4)
    check_variant(model, folder, root / "beside-qwen2", kernels, oracle=oracle, prompts=prompts)
    # Prompt log-probabilities are of the base before the invocation, of the adapter after it.
    with Driver(engine_config(model, kernels=kernels, scheduler={"prefill_chunk": 16})) as driver:
        driver.load("variant", folder)
        request = driver.add(prompts[2], "variant", max_tokens=3, prompt_logprobs=0)
        driver.finish()
        assert len(driver.logits[request]) == len(prompts[2]) + 2
        check_request(driver, request, oracle, folder, prompts[2])
