"""Every variant that is served, on every family of models: as PEFT alone, mixed, and after eviction and reload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BdLoraConfig, EvaConfig, LoraConfig, get_peft_model
from tiny_gguf import write_gguf
from tiny_models import ATTENTION, MLP, Oracle, make_model, quiet
from transformers import AutoModelForCausalLM
from variants import (
    INVOCATION,
    PLAIN,
    PLAIN_FUSED,
    ActivatedOracle,
    check_variant,
    invoking_prompts,
    make_prompts,
    make_variant,
)

FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "qwen2": {"family": "qwen2"},  # tied, with biases
    "phi3": {"family": "phi3", "tie_word_embeddings": False, "pad_token_id": 0},
    "mistral": {"family": "mistral", "tie_word_embeddings": False, "sliding_window": 12},
}


def pick(family: str, *parts: str) -> list[str]:
    """These of q, k, v, o, gate, up, down; in a fused model the modules that hold them."""
    fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"} if family == "phi3" else {}
    return list(dict.fromkeys(f"{fused.get(part, part)}_proj" for part in parts))


def linears(family: str) -> list[str]:
    return FUSED if family == "phi3" else ATTENTION + MLP


def block_diagonal(family: str) -> BdLoraConfig:
    a, b = pick(family, "o", "down"), pick(family, "q", "k", "up")
    return BdLoraConfig(
        target_modules_bd_a=a, target_modules_bd_b=b, nblocks=2 if family == "phi3" else 4, match_strict=False
    )


VARIANTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "rslora-patterns": lambda family: {
        "r": 4,
        "lora_alpha": 5.5,
        "use_rslora": True,
        "target_modules": linears(family),
        "rank_pattern": {"o_proj": 9, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"down_proj": -3},
    },
    "partial": lambda family: {
        "r": 3,
        "target_modules": pick(family, "k", "up"),
        "layers_to_transform": [0, 2],
        "lora_alpha": 9,
    },
    "embed-head": lambda family: {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head"]},
    "lora-bias": lambda family: {
        "r": 4,
        "lora_alpha": 6,
        "lora_bias": True,
        "target_modules": [*linears(family), "lm_head"],
    },
    "dora": lambda family: {"r": 4, "lora_alpha": 10, "use_dora": True, "target_modules": linears(family)},
    "dora-rslora-embed-head": lambda family: {
        "r": 4,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["embed_tokens", "lm_head", *pick(family, "v")],
    },
    "bdlora": lambda family: {
        "r": 8,
        "lora_alpha": 12,
        "target_modules": linears(family),
        "use_bdlora": block_diagonal(family),
    },
    "alora": lambda family: {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": [*linears(family), "lm_head"],
        "alora_invocation_tokens": INVOCATION,
    },
    "alora-rslora": lambda family: {
        "r": 5,
        "use_rslora": True,
        "target_modules": pick(family, "q", "v", "down"),
        "alora_invocation_tokens": INVOCATION,
    },
    "alora-lora-bias": lambda family: {
        "r": 3,
        "lora_bias": True,
        "target_modules": linears(family),
        "alora_invocation_tokens": INVOCATION,
    },
    "eva": lambda family: {
        "r": 4,
        "init_lora_weights": "eva",
        "eva_config": EvaConfig(),
        "target_modules": pick(family, "q", "up"),
        "rank_pattern": {f"model.layers.0.{module}": 7 for module in ("mlp.down_proj",)},
        "alpha_pattern": {"model.layers.1.self_attn.o_proj": 3.25},
    },
    # Only Qwen2 has biases to train.
    "bias-all": lambda family: {
        "r": 4,
        "bias": "all" if family == "qwen2" else "none",
        "target_modules": linears(family),
    },
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def model_of(root: Path, family: str) -> Path:
    folder = root / family
    return folder if folder.exists() else make_model(folder, seed=9, **MODELS[family])


@pytest.fixture(scope="module")
def oracles(root: Path) -> dict[str, ActivatedOracle]:
    """One for each family: the base and the plain adapter are loaded once."""
    return {family: ActivatedOracle(model_of(root, family)) for family in MODELS}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_peft_on_every_family(
    root: Path, oracles: dict[str, ActivatedOracle], name: str, family: str
) -> None:
    model, folder = model_of(root, family), root / f"{name}-of-{family}"
    make_variant(model, folder, 13, **VARIANTS[name](family))
    plain = PLAIN_FUSED if family == "phi3" else PLAIN
    prompts = invoking_prompts()[1:4] if "alora" in name else make_prompts()[1:4]
    # The two implementations take turns; both on the same model is another test's.
    kernels = ("cpu", "reference")[(list(VARIANTS).index(name) + list(MODELS).index(family)) % 2]
    check_variant(model, folder, root / f"beside-{family}", kernels, plain, oracles[family], prompts)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_whose_base_was_changed_is_served_once_it_is_converted(root: Path, init: str) -> None:
    model, folder = model_of(root, "llama"), root / init
    torch.manual_seed(4)
    with quiet():
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        lora = LoraConfig(r=4, init_lora_weights=init, target_modules=ATTENTION, lora_alpha=4, task_type="CAUSAL_LM")
        peft_model = get_peft_model(base, lora)
        peft_model.peft_config["default"].init_lora_weights = True  # or it would be taken apart again
        peft_model.save_pretrained(root / f"{init}-start")
        peft_model.peft_config["default"].init_lora_weights = init
        with torch.no_grad():
            for parameter in peft_model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        peft_model.save_pretrained(folder, path_initial_model_for_weight_conversion=root / f"{init}-start")
    check_variant(model, folder, root / "beside-llama", "reference", prompts=make_prompts()[1:4])


@pytest.mark.parametrize("name", ["dora", "dora-rslora-embed-head", "lora-bias"])
def test_a_gguf_base_serves_what_needs_its_weights(root: Path, name: str) -> None:
    """The model's folder holds a GGUF file and nothing else."""
    model = model_of(root, "llama")
    served = root / "gguf"
    if not served.exists():
        served.mkdir()
        write_gguf(served / "tiny.gguf", AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    folder = make_variant(model, root / f"{name}-on-gguf", 17, **VARIANTS[name]("llama"))
    oracle, prompts = Oracle(model), make_prompts()[1:4]
    check_variant(model, folder, root / "beside-llama", "reference", oracle=oracle, prompts=prompts, served=served)
