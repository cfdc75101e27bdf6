"""docs/adapters.md says what the code does: its tables are made from the rules, and their outcomes are tried out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loraserve.errors import AdapterRefused
from loraserve.lora.format import parse_adapter
from loraserve.lora.keys import Role, parse_key
from loraserve.lora.peft_config import FIELD_RULES

ROOT = Path(__file__).resolve().parents[1]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs = _module(ROOT / "scripts" / "adapter_docs.py")
raw = _module(ROOT / "tests" / "lora" / "raw_adapters.py")
TEXT = docs.DOCUMENT.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code() -> None:
    assert docs.render(TEXT) == TEXT, "run: python scripts/adapter_docs.py"


@pytest.mark.parametrize("rule", FIELD_RULES, ids=lambda rule: rule.name)
def test_every_field_has_its_row(rule: Any) -> None:
    row = next((line for line in TEXT.splitlines() if line.startswith(f"| `{rule.name}` |")), None)
    assert row is not None, f"{rule.name} is missing in docs/adapters.md"
    assert docs.TREATMENTS[rule.treatment] in row
    assert rule.note in row


def test_every_role_has_a_row() -> None:
    assert docs.ROLES.keys() == set(Role)


Q = f"{raw.PREFIX}{raw.Q0}"
EMBED = f"{raw.PREFIX}model.embed_tokens"
SQUARE = (raw.HIDDEN, raw.HIDDEN)
CASES: list[tuple[Role, str, tuple[int, ...], dict[str, Any]]] = [
    (Role.EMBED_A, f"{Q}.lora_embedding_A", (4, raw.HIDDEN), {}),
    (Role.EMBED_B, f"{Q}.lora_embedding_B", (raw.HIDDEN, 4), {}),
    (Role.MLX_A, f"{Q}.lora_a", (raw.HIDDEN, 4), {}),
    (Role.MLX_B, f"{Q}.lora_b", (4, raw.HIDDEN), {}),
    (Role.MAGNITUDE, f"{Q}.lora_magnitude_vector", (raw.HIDDEN,), {"use_dora": True}),
    (Role.MAGNITUDE, f"{Q}.lora_magnitude_vector", (raw.HIDDEN,), {}),
    (Role.LORA_BIAS, f"{Q}.lora_B.bias", (raw.HIDDEN,), {"lora_bias": True}),
    (Role.LORA_BIAS, f"{Q}.lora_B.bias", (raw.HIDDEN,), {}),
    (Role.BASE_WEIGHT, f"{Q}.base_layer.weight", SQUARE, {}),
    (Role.BASE_WEIGHT, f"{EMBED}.base_layer.weight", (raw.VOCAB + 1, raw.HIDDEN), {}),
    (Role.BASE_WEIGHT, f"{EMBED}.base_layer.weight", (raw.VOCAB, raw.HIDDEN), {}),
    (Role.BASE_BIAS, f"{Q}.base_layer.bias", (raw.HIDDEN,), {"bias": "all"}),
    (Role.BASE_BIAS, f"{Q}.base_layer.bias", (raw.HIDDEN,), {}),
    (Role.WEIGHT, f"{Q}.weight", SQUARE, {}),
    (Role.WEIGHT, f"{EMBED}.weight", (raw.VOCAB - 1, raw.HIDDEN), {"modules_to_save": ["embed_tokens"]}),
    (Role.ORIGINAL_WEIGHT, f"{EMBED}.original_module.weight", (raw.VOCAB, raw.HIDDEN), {}),
    (Role.BIAS, f"{Q}.bias", (raw.HIDDEN,), {"bias": "lora_only"}),
    (Role.BIAS, f"{Q}.bias", (raw.HIDDEN,), {}),
    (Role.TOKEN_ROWS, f"{EMBED}.token_adapter.trainable_tokens_delta", (1, raw.HIDDEN), {}),
    (
        Role.TOKEN_ROWS,
        f"{EMBED}.token_adapter.trainable_tokens_delta",
        (1, raw.HIDDEN),
        {"trainable_token_indices": [0, 1]},
    ),
    (Role.UNKNOWN, f"{Q}.lora_C.weight", (4, 4), {}),
]


@pytest.mark.parametrize(("role", "key", "shape", "config"), CASES, ids=lambda value: str(value)[:40])
def test_refusals_are_those_of_the_table(
    tmp_path: Path, role: Role, key: str, shape: tuple[int, ...], config: dict[str, Any]
) -> None:
    assert parse_key(key).role is role
    tensors = raw.plain_tensors() | {key: raw.Tensor(shape)}
    with pytest.raises(AdapterRefused) as refused:
        parse_adapter(raw.write(tmp_path, raw.plain_config(**config), tensors), raw.GEOMETRY, 64)
    row = docs.ROLES[role]
    assert f"`{refused.value.code}`" in row, refused.value.message
