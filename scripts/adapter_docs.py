"""The tables of docs/adapters.md, made from the rules in the code: `python scripts/adapter_docs.py` rewrites them."""

from __future__ import annotations

import re
from pathlib import Path

from loraserve.lora.keys import _SUFFIXES, _WRAPPERS, Role
from loraserve.lora.modules import _PREFIXES
from loraserve.lora.peft_config import _SET_WHEN_EMPTY, FIELD_RULES, FieldRule, Treatment

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "adapters.md"

TREATMENTS: dict[Treatment, str] = {
    Treatment.HONOURED: "honoured",
    Treatment.CHECKED: "checked",
    Treatment.IGNORED: "ignored",
    Treatment.REFUSED: "refused when set",
}

ROLES: dict[Role, str] = {
    Role.A: "loaded: A [r, in]",
    Role.B: "loaded: B [out, r]",
    Role.EMBED_A: "loaded for `embed_tokens`: A [r, vocab]; elsewhere `unknown_tensor`",
    Role.EMBED_B: "loaded for `embed_tokens`: B [hidden, r]; elsewhere `unknown_tensor`",
    Role.MLX_A: "loaded from mlx-lm's `adapters.safetensors`, [in, r]; in PEFT's file `unknown_tensor`",
    Role.MLX_B: "loaded from mlx-lm's `adapters.safetensors`, [r, out]; in PEFT's file `unknown_tensor`",
    Role.MAGNITUDE: "loaded with `use_dora`: [out], for every module, else `missing_tensors`; without the field "
    "`config_tensor_mismatch`",
    Role.LORA_BIAS: "loaded with `lora_bias`: [out], for every module, else `missing_tensors`; without the field "
    "`config_tensor_mismatch`",
    Role.BASE_WEIGHT: "a copy of `embed_tokens` or `lm_head`: must equal the base's matrix, else "
    "`unsupported_variant`, and have its width, else `shape_mismatch`; rows after the base's last are new tokens, "
    "which both matrices must have, else `shape_mismatch`; elsewhere `unknown_tensor`",
    Role.BASE_BIAS: "loaded with `bias` where the base has that bias, else `unknown_tensor`; without the field "
    "`config_tensor_mismatch`",
    Role.WEIGHT: "loaded in place of the base's for `embed_tokens`, `lm_head` and norms that `modules_to_save` names, "
    "with all rows of the base's or more, else `shape_mismatch`; a matrix that is not named is as `base_layer.weight`; "
    "elsewhere `unknown_tensor`",
    Role.BIAS: "loaded with `bias` where the base has that bias, else `unknown_tensor`; without the field "
    "`config_tensor_mismatch`",
    Role.TOKEN_ROWS: "loaded for `embed_tokens` and `lm_head` with `trainable_token_indices`: a row for each id, else "
    "`shape_mismatch`; without the field `config_tensor_mismatch`",
    Role.ORIGINAL_WEIGHT: "not used, as in PEFT: the base's own `embed_tokens` or `lm_head` beside the saved one that "
    "replaces it; elsewhere `unknown_tensor`",
    Role.UNKNOWN: "`unknown_tensor`",
}


def fields_table() -> str:
    """One row for each field that is known."""
    rows = [
        f"| `{rule.name}` | {rule.type.name}{' or null' if rule.nullable else ''} | {_treatment(rule)} | {rule.note} |"
        for rule in sorted(FIELD_RULES, key=lambda rule: (list(Treatment).index(rule.treatment), rule.name))
    ]
    return "\n".join(["| field | type | treatment | note |", "|---|---|---|---|", *rows])


def _treatment(rule: FieldRule) -> str:
    return TREATMENTS[rule.treatment] + (", even if empty" if rule.name in _SET_WHEN_EMPTY else "")


def keys_table() -> str:
    """One row for each part that a tensor can play."""
    rows = []
    for role, treatment in ROLES.items():
        forms = [f"`{'.'.join(suffix)}`" for suffix, found in _SUFFIXES if found is role] or ["anything else"]
        rows.append(f"| {', '.join(forms)} | {treatment} |")
    return "\n".join(["| the key ends in | treatment |", "|---|---|", *rows])


def prefixes_table() -> str:
    """What may stand before or inside a key."""
    rows = [
        "| `base_model.model.` | PEFT's own prefix: taken off, once, several times, or not there |",
        *(f"| `{wrapper}.` anywhere | wrapper of a training run: taken out |" for wrapper in sorted(_WRAPPERS)),
        *(f"| `{prefix}…` | text model of a multimodal class: read as `{plain}…` |" for prefix, plain in _PREFIXES),
        "| anything else | `unknown_module`, naming the first tensors without a place |",
    ]
    return "\n".join(["| before or inside | treatment |", "|---|---|", *rows])


TABLES = {"fields": fields_table, "keys": keys_table, "prefixes": prefixes_table}


def render(text: str) -> str:
    """The document with every marked table made anew. Raises `ValueError` if a mark is missing."""
    for name, table in TABLES.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        found = marked.search(text)
        if found is None:
            raise ValueError(f"the document has no place for the table {name}")
        text = text[: found.end(1)] + table() + text[found.start(2) :]
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
