"""Modules that PEFT would leave without their LoRA because of other fields: refused, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from raw_adapters import GEOMETRY, HIDDEN, PREFIX, VOCAB, Tensor, plain_config, plain_tensors, write

from loraserve.errors import AdapterRefused
from loraserve.lora.format import parse_adapter

TIED = replace(GEOMETRY, tied_head=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_to_transform": [0, 1, 2, 3], "layers_pattern": "layers"},
        {"layers_to_transform": [0, 1, 2, 3], "layers_pattern": ["h", "model.layers"]},
        {"layers_to_transform": [0, 1, 2, 3], "layers_pattern": "l.*s"},
        {"layers_to_transform": [0, 1, 2, 3], "layers_pattern": "h"},
        {"layers_to_transform": [0, 1, 2, 3], "layers_pattern": ["h", "blocks"]},
        {"layers_to_transform": [0, 1, 2, 3], "layers_pattern": "ayers"},
        {
            "layers_to_transform": [0, 1, 2, 3],
            "layers_pattern": "h",
            "target_modules": ["model.layers.0.self_attn.q_proj"],
        },
        {"modules_to_save": ["q.proj"]},
        {"modules_to_save": [".*"]},
        {"modules_to_save": ["[pq]_proj"]},
        {"modules_to_save": ["k.proj", "model.nothing", "q"]},
        {"modules_to_save": ["layers.[1-3]"]},
        {"modules_to_save": ["x|self_attn"]},
    ],
    ids=str,
)
def test_what_peft_leaves_out_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    tensors = {name: tensor for name, tensor in plain_tensors().items() if f".{module}." in name}
    assert len(tensors) == 2
    config = plain_config(**({"target_modules": ["q_proj"]} | changes))
    fields = {name: value for name, value in config.items() if name in ("target_modules", *changes)}
    kept = check_target_module_exists(LoraConfig(**fields), module) is True
    folder = write(tmp_path, config, tensors)
    if kept:
        parse_adapter(folder, GEOMETRY, 64)
        return
    with pytest.raises(AdapterRefused) as caught:
        parse_adapter(folder, GEOMETRY, 64)
    assert caught.value.code == "config_tensor_mismatch"


@pytest.mark.parametrize("field", ["layers_pattern", "modules_to_save"])
def test_a_hostile_expression_in_them(field: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {field: ["(a)\\1"], "layers_to_transform": [0, 1, 2, 3]}
    with pytest.raises(AdapterRefused, match=field) as caught:
        parse_adapter(write(tmp_path, plain_config(**changes)), GEOMETRY, 64)
    assert caught.value.code == "invalid_config"


def tied_pair(tmp_path: Path, **changes: Any) -> Path:
    """LoRA of embed_tokens and, its transpose, of lm_head, as PEFT saves them with `ensure_weight_tying`."""
    a, b = Tensor((4, VOCAB), seed=1), Tensor((HIDDEN, 4), seed=2)
    head_a, head_b = Tensor((4, HIDDEN)), Tensor((VOCAB, 4))
    head_a.data = np.frombuffer(b.data, np.float32).reshape(HIDDEN, 4).T.tobytes()
    head_b.data = np.frombuffer(a.data, np.float32).reshape(4, VOCAB).T.tobytes()
    tensors = {
        PREFIX + "model.embed_tokens.lora_embedding_A": a,
        PREFIX + "model.embed_tokens.lora_embedding_B": b,
        PREFIX + "lm_head.lora_A.weight": head_a,
        PREFIX + "lm_head.lora_B.weight": head_b,
    }
    tensors |= changes.pop("tensors", {})
    return write(tmp_path, plain_config(ensure_weight_tying=True, **changes), tensors)


@pytest.mark.parametrize(
    "targets", [["embed_tokens"], ["embed_tokens", "model.embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]]
)
def test_a_tied_target_means_both_modules(targets: list[str], tmp_path: Path) -> None:
    spec = parse_adapter(tied_pair(tmp_path, target_modules=targets), TIED, 64)
    assert spec.kinds == ("embed", "lm_head")


def test_an_untied_base_has_two_modules(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match="lm_head") as caught:
        parse_adapter(tied_pair(tmp_path, target_modules=["embed_tokens"]), GEOMETRY, 64)
    assert caught.value.code == "config_tensor_mismatch"


@pytest.mark.parametrize(
    ("name", "shape"), [("lm_head.lora_A.weight", (4, HIDDEN)), ("lm_head.lora_B.weight", (VOCAB, 4))]
)
def test_a_tied_pair_that_differs(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = tied_pair(tmp_path, target_modules=["embed_tokens"], tensors={PREFIX + name: Tensor(shape, seed=9)})
    with pytest.raises(AdapterRefused, match="transpose") as caught:
        parse_adapter(folder, TIED, 64)
    assert caught.value.code == "unsupported_variant"
