"""Anything at all as config or as weights: a valid spec or an `AdapterError`, nothing else.

`LORASERVE_FUZZ=10000` runs that many cases of each.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_adapters import (
    GEOMETRY,
    HIDDEN,
    LAYERS,
    PREFIX,
    Q0,
    VOCAB,
    Tensor,
    container,
    plain_config,
    plain_tensors,
    raw_container,
    write,
)

from loraserve.errors import AdapterError
from loraserve.lora.format import parse_adapter
from loraserve.lora.peft_config import FIELD_RULES
from loraserve.lora.spec import AdapterSpec, BaseGeometry
from loraserve.lora.version import content_version

CASES = int(os.environ.get("LORASERVE_FUZZ", "100"))
fuzz = settings(
    max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.sampled_from(
        ["", "q_proj", "LORA", "all-linear", "none", "pissa", "eva", "(a+)+$", "^.*$", "layers.1.", "\ud800"]
    ),
    st.text(max_size=6),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(["q_proj", "proj", ".*"]), st.text(max_size=4)), inner, max_size=3),
    ),
    max_leaves=6,
)
fields = st.one_of(st.sampled_from([rule.name for rule in FIELD_RULES]), st.text(max_size=5))
dtypes = st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "F4", "F8_E4M3", "BOOL", "X", 3, None])
sizes = st.one_of(st.sampled_from([0, 1, 4, 8, 16, HIDDEN]), st.integers(-2, 200), st.integers(), st.booleans())
names = st.one_of(
    st.sampled_from(
        [f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight", f"{Q0}.lora_A.default.weight", "lm_head.weight"]
    ),
    st.builds(
        ".".join,
        st.lists(
            st.sampled_from(
                "base_model model layers 0 1 9 self_attn q_proj mlp lm_head embed_tokens lora_A lora_B weight default "
                "lora_embedding_A lora_embedding_B _orig_mod language_model base_layer score bias".split()
            ),
            max_size=9,
        ),
    ),
    st.text(max_size=8),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def outcome(folder: Path, geometry: BaseGeometry | None = GEOMETRY) -> AdapterSpec | AdapterError:
    try:
        spec = parse_adapter(folder, geometry, 64)
    except AdapterError as error:
        refused = error
    else:
        check(spec, folder)
        return spec
    assert refused.message.isprintable()
    refused.message.encode()
    return refused


def check(spec: AdapterSpec, folder: Path) -> None:
    assert spec.targets
    for target in spec.targets:
        assert math.isfinite(target.scaling)
        assert 1 <= target.rank <= 64
        assert target.a.shape[0] == target.b.shape[1] == target.rank
    assert len(content_version(spec, folder)) == 64


@fuzz
@given(changes=st.dictionaries(fields, values, max_size=3))
def test_config_fields(changes: dict[str, Any], folder: Path) -> None:
    write(folder, json.dumps(plain_config() | changes))
    outcome(folder)


@fuzz
@given(data=st.data())
def test_config_text(data: st.DataObject, folder: Path) -> None:
    text = bytearray(json.dumps(plain_config(rank_pattern={"q_proj": 4})).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(text) - 1))
        text[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    write(folder, bytes(text))
    outcome(folder)


@fuzz
@given(data=st.binary(max_size=40))
def test_config_bytes(data: bytes, folder: Path) -> None:
    write(folder, data)
    assert isinstance(outcome(folder), AdapterError)


@fuzz
@given(
    entries=st.dictionaries(
        names,
        st.one_of(
            values,
            st.fixed_dictionaries(
                {"dtype": dtypes, "shape": st.lists(sizes, max_size=3), "data_offsets": st.lists(sizes, max_size=3)}
            ),
        ),
        max_size=4,
    ),
    size=st.integers(0, 300),
)
def test_header_entries(entries: dict[str, Any], size: int, folder: Path) -> None:
    write(folder, None, raw_container(entries, bytes(size)))
    outcome(folder)


@fuzz
@given(keys=st.lists(names, min_size=1, max_size=6, unique=True), config=st.booleans())
def test_names_of_well_formed_tensors(keys: list[str], config: bool, folder: Path) -> None:
    tensors = dict(zip(keys, list(plain_tensors().values()) * 2, strict=False))
    write(folder, plain_config(target_modules=["q_proj"] if config else None), raw_or_container(tensors))
    outcome(folder)


@fuzz
@given(data=st.data())
def test_damaged_file(data: st.DataObject, folder: Path) -> None:
    file = bytearray(container(plain_tensors()))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.one_of(st.integers(0, 900), st.integers(0, len(file) - 1)))
        file[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    write(folder, None, bytes(file[: data.draw(st.integers(0, len(file) + 50))]))
    outcome(folder)


def raw_or_container(tensors: dict[str, Any]) -> bytes:
    try:
        return container(tensors)
    except UnicodeEncodeError:
        return b""


rows_modules = st.sampled_from(
    [
        "model.embed_tokens",
        "lm_head",
        "model.norm",
        "model.layers.0.input_layernorm",
        "model.layers.1.self_attn.q_norm",
        Q0,
    ]
)
rows_suffixes = st.sampled_from(
    [
        "weight",
        "base_layer.weight",
        "modules_to_save.weight",
        "original_module.weight",
        "token_adapter.trainable_tokens_delta",
        "token_adapter.base_layer.weight",
        "lora_A.weight",
        "lora_B.weight",
        "lora_embedding_A",
        "lora_embedding_B",
    ]
)
rows_sizes = st.sampled_from([0, 1, 2, 4, 8, HIDDEN, VOCAB - 1, VOCAB, VOCAB + 1, VOCAB + 2])
rows_shapes = st.one_of(
    st.sampled_from([(HIDDEN,), (VOCAB, HIDDEN), (VOCAB + 2, HIDDEN), (1, HIDDEN), (2, HIDDEN), (4, VOCAB + 2)]),
    st.lists(rows_sizes, max_size=3).map(tuple),
)
rows_names = st.lists(
    st.sampled_from(["embed_tokens", "lm_head", "norm", "q_norm", "head", "", "x", "q_proj"]), max_size=3
)
rows_ids = st.lists(st.one_of(st.sampled_from([0, 1, VOCAB - 1, VOCAB, VOCAB + 1]), st.integers()), max_size=3)


@fuzz
@given(
    tensors=st.dictionaries(st.tuples(rows_modules, rows_suffixes), rows_shapes, max_size=4),
    saved=rows_names,
    tokens=st.one_of(rows_ids, st.dictionaries(st.sampled_from(["embed_tokens", "lm_head", "e", ""]), rows_ids)),
    tied=st.booleans(),
    one=st.booleans(),
)
def test_rows_that_adapters_bring(
    tensors: dict[tuple[str, str], tuple[int, ...]], saved: list[str], tokens: Any, tied: bool, one: bool, folder: Path
) -> None:
    geometry = replace(GEOMETRY, tied_head=tied, head_norm_width=8 if one else 0)
    config = plain_config(
        target_modules=["q_proj", "lm_head", "embed_tokens"],
        modules_to_save=saved,
        trainable_token_indices=tokens,
        ensure_weight_tying=one,
    )
    brought = {f"{PREFIX}{module}.{suffix}": Tensor(shape) for (module, suffix), shape in tensors.items()}
    write(folder, config, plain_tensors() | brought)
    for base in (geometry, None):
        spec = outcome(folder, base)
        if isinstance(spec, AdapterError):
            continue
        for rows in spec.replaced:
            stop = VOCAB + spec.num_new_tokens if rows.table in ("embed", "lm_head") else 2 * LAYERS + 1
            assert rows.stop <= stop or base is None
            for part in rows.parts:
                assert part.ref.num_elements == len(part.ids) * rows.width
