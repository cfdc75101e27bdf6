"""Saved modules, trained token rows and added tokens: served as PEFT computes them, beside everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_models import ATTENTION, MLP, Oracle, make_model
from variants import PLAIN, PLAIN_FUSED, VOCAB, check_variant, make_prompts, make_variant

NEW = 5  # tokens that are added to the vocabulary
ADDED = list(range(VOCAB, VOCAB + NEW))
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "llama-tied": {"family": "llama"},
    "mistral": {"family": "mistral", "tie_word_embeddings": False, "sliding_window": 16},
    "phi3": {"family": "phi3", "tie_word_embeddings": False, "pad_token_id": 0},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
}


class Case(NamedTuple):
    model: str
    lora: dict[str, Any]
    new_tokens: int = 0
    save_embeddings: bool = False


def saved(*names: str, **more: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "o_proj"], "modules_to_save": list(names), **more}


def tokens(ids: Any, **more: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "down_proj"], "trainable_token_indices": ids, **more}


CASES: dict[str, Case] = {
    "everything": Case("llama", saved("embed_tokens", "lm_head", "norm")),
    "tied-embed": Case("llama-tied", saved("embed_tokens")),
    "tied-head": Case("qwen2", saved("lm_head")),
    "tied-both": Case("qwen2", saved("lm_head", "embed_tokens")),
    "tied-as-one": Case("llama-tied", saved("embed_tokens", ensure_weight_tying=True)),
    "norms": Case("mistral", saved("input_layernorm", "model.norm")),
    "head-norms": Case("qwen3", saved("norm", target_modules=ATTENTION + MLP)),
    "head-norm-of-one-layer": Case("qwen3", saved("layers.1.self_attn.q_norm")),
    "phi3": Case("phi3", {"r": 4, "target_modules": ["qkv_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "saved-wins-over-lora": Case("mistral", saved("lm_head", target_modules=["q_proj", "lm_head"])),
    "dora": Case("qwen2", saved("norm", "lm_head", use_dora=True)),
    "tokens": Case("llama", tokens([7, 299, 3, 41])),
    "tokens-tied": Case("qwen2", tokens([7, 299, 3, 41])),
    "tokens-tied-by-name": Case("llama-tied", tokens({"embed_tokens": [5, 9], "lm_head": [5, 9]})),
    "tokens-of-each": Case("mistral", tokens({"embed_tokens": [5, 9], "lm_head": [9, 11, 12]})),
    "tokens-of-each-tied": Case("qwen2", tokens({"embed_tokens": [5, 9], "lm_head": [9, 11, 12]})),
    "tokens-of-the-tied-head": Case("qwen2", tokens({"lm_head": [9, 11, 12]})),
    "tokens-and-lora-on-the-tied-head": Case("qwen2", tokens([7, 41], target_modules=["q_proj", "lm_head"])),
    "tokens-beside-a-saved-head": Case(
        "phi3", tokens([7, 41], target_modules="all-linear", modules_to_save=["lm_head"])
    ),
    "added": Case("llama", PLAIN, NEW, True),
    "added-tied": Case("qwen2", PLAIN, NEW, True),
    "added-saved": Case("mistral", saved("embed_tokens", "lm_head"), NEW, True),
    "added-saved-without-copies": Case("llama", saved("embed_tokens", "lm_head"), NEW),
    "added-tied-saved": Case("llama-tied", saved("embed_tokens"), NEW, True),
    "added-trained": Case("phi3", tokens({"embed_tokens": ADDED, "lm_head": ADDED}, target_modules=["o_proj"]), NEW),
    "added-trained-tied": Case("qwen2", tokens([4, *ADDED]), NEW),
    "added-trained-with-copies": Case("llama-tied", tokens(ADDED[2:]), NEW, True),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def model_of(root: Path, name: str) -> Path:
    folder = root / name
    return folder if folder.exists() else make_model(folder, seed=7, **MODELS[name])


def adapter_of(root: Path, name: str) -> tuple[Path, Path]:
    case, folder = CASES[name], root / "adapters" / name
    model = model_of(root, case.model)
    if not folder.exists():
        make_variant(model, folder, 3, new_tokens=case.new_tokens, save_embeddings=case.save_embeddings, **case.lora)
    return model, folder


def prompts_for(case: Case) -> list[list[int]]:
    """With tokens whose rows are replaced or added in them."""
    prompts = make_prompts()
    for prompt in prompts[1:]:
        prompt[1:4] = [7, 299, 5]
        prompt[-1] = VOCAB + NEW - 1 if case.new_tokens else 41
    return prompts


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_peft(root: Path, name: str, kernels: str) -> None:
    case = CASES[name]
    model, folder = adapter_of(root, name)
    plain = PLAIN_FUSED if case.model == "phi3" else PLAIN
    oracle = Oracle(model, new_tokens=case.new_tokens)
    check_variant(model, folder, root / f"beside-{case.model}", kernels, plain, oracle, prompts_for(case))
