"""What an adapter brings whole, as `parse_adapter` understands it, and everything about it that is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_adapters import (
    GEOMETRY,
    HIDDEN,
    LAYERS,
    PREFIX,
    Q0,
    VOCAB,
    Tensor,
    container,
    lora,
    plain_config,
    plain_tensors,
    write,
)

from loraserve.errors import AdapterRefused
from loraserve.inspection import inspect_folder
from loraserve.lora.format import parse_adapter
from loraserve.lora.spec import AdapterSpec, AddedToken, BaseGeometry, LoadReport
from loraserve.lora.tables import Table
from loraserve.lora.version import content_version

EMBED, HEAD = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"
ROWS = ".token_adapter.trainable_tokens_delta"
MATRIX = (VOCAB, HIDDEN)
TIED = replace(GEOMETRY, tied_head=True)
HEAD_WIDTH = 8
WITH_HEAD_NORMS = replace(GEOMETRY, head_norm_width=HEAD_WIDTH)
NORMS = [
    f"{PREFIX}model.{name}.weight"
    for name in (
        "norm",
        *(f"layers.{i}.{norm}" for i in range(LAYERS) for norm in ("input_layernorm", "post_attention_layernorm")),
    )
]


def base_matrix(folder: Path, *names: str) -> dict[str, Tensor]:
    """A checkpoint of which only the vocabulary's matrices matter, and its tensors."""
    folder.mkdir()
    tensors = {name: Tensor(MATRIX, seed=i) for i, name in enumerate(names)}
    (folder / "model.safetensors").write_bytes(container(tensors))
    return tensors


def longer(tensor: Tensor, num_rows: int, seed: int = 9) -> Tensor:
    """The matrix with rows after its last."""
    more = Tensor((num_rows, HIDDEN), seed=seed)
    found = Tensor((tensor.shape[0] + num_rows, HIDDEN))
    found.data = tensor.data + more.data
    return found


def parse(
    folder: Path, tensors: dict[str, Tensor], geometry: BaseGeometry | None = GEOMETRY, **fields: Any
) -> AdapterSpec:
    return parse_adapter(write(folder, plain_config(**fields), plain_tensors() | tensors), geometry, 64)


def rows_of(spec: AdapterSpec) -> dict[str, list[int]]:
    return {str(rows.table): sorted({i for part in rows.parts for i in part.ids}) for rows in spec.replaced}


def test_a_saved_norm_is_whatever_ends_alike(tmp_path: Path) -> None:
    spec = parse(tmp_path, {name: Tensor((HIDDEN,)) for name in NORMS}, modules_to_save=["norm"])
    assert rows_of(spec) == {"norm": list(range(1 + 2 * LAYERS))}
    assert spec.features == ("modules_to_save",)
    heads = {
        f"{PREFIX}model.layers.{i}.self_attn.{norm}.weight": Tensor((HEAD_WIDTH,))
        for i in range(LAYERS)
        for norm in ("q_norm", "k_norm")
    }
    norms = {name: Tensor((HIDDEN,)) for name in NORMS}
    spec = parse(tmp_path, norms | heads, WITH_HEAD_NORMS, modules_to_save=["norm"])
    assert rows_of(spec) == {"norm": list(range(1 + 2 * LAYERS)), "head_norm": list(range(2 * LAYERS))}


def test_token_rows_of_a_tied_base_are_the_heads_too(tmp_path: Path) -> None:
    rows = {f"{EMBED}{ROWS}": Tensor((2, HIDDEN))}
    assert rows_of(parse(tmp_path, rows, trainable_token_indices=[9, 3])) == {"embed": [3, 9]}
    assert rows_of(parse(tmp_path, rows, TIED, trainable_token_indices=[9, 3])) == {"embed": [3, 9], "lm_head": [3, 9]}
    own = rows | {f"{HEAD}{ROWS}": Tensor((1, HIDDEN))}
    spec = parse(tmp_path, own, TIED, trainable_token_indices={"embed_tokens": [9, 3], "lm_head": [4]})
    assert rows_of(spec) == {"embed": [3, 9], "lm_head": [4]}


def test_rows_after_the_bases_last_are_new_tokens(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    base = base_matrix(tmp_path / "base", *names)
    geometry = replace(GEOMETRY, folder=str(tmp_path / "base"))
    grown = {f"{PREFIX}{name}": longer(base[name], 3) for name in names}
    spec = parse(tmp_path / "a", grown, geometry)
    assert rows_of(spec) == {"embed": [VOCAB, VOCAB + 1, VOCAB + 2], "lm_head": [VOCAB, VOCAB + 1, VOCAB + 2]}
    assert (spec.num_new_tokens, spec.features) == (3, ("new_tokens", "base_copy"))
    report = LoadReport.of(spec, "0")
    assert (report.new_tokens, report.replaced) == (3, ("embed:3", "lm_head:3"))
    # What counts of the copies is what is new in them.
    other = grown | {f"{PREFIX}{names[1]}": longer(base[names[1]], 3, seed=10)}
    assert content_version(spec, tmp_path / "a") != content_version(
        parse(tmp_path / "b", other, geometry), tmp_path / "b"
    )
    # A row of the base that differs is a trained matrix, which must be named.
    changed = bytearray(grown[f"{PREFIX}{names[0]}"].data)
    changed[5] ^= 1
    grown[f"{PREFIX}{names[0]}"].data = bytes(changed)
    with pytest.raises(AdapterRefused) as refused:
        parse(tmp_path / "c", grown, geometry)
    assert refused.value.code == "unsupported_variant"
    assert "modules_to_save" in refused.value.message


def test_one_grown_matrix_of_a_tied_base_is_both(tmp_path: Path) -> None:
    base = base_matrix(tmp_path / "base", "model.embed_tokens.weight")
    geometry = replace(TIED, folder=str(tmp_path / "base"))
    grown = longer(base["model.embed_tokens.weight"], 2)
    for name in (EMBED, HEAD):
        assert rows_of(parse(tmp_path / name, {f"{name}.weight": grown}, geometry)) == {
            "embed": [VOCAB, VOCAB + 1],
            "lm_head": [VOCAB, VOCAB + 1],
        }
    other = longer(base["model.embed_tokens.weight"], 2, seed=10)
    with pytest.raises(AdapterRefused, match="as one matrix"):
        parse(tmp_path / "two", {f"{EMBED}.weight": grown, f"{HEAD}.weight": other}, geometry)


def test_names_that_mean_no_module_are_a_warning(tmp_path: Path) -> None:
    spec = parse(tmp_path, {f"{HEAD}.weight": Tensor(MATRIX)}, modules_to_save=["lm_head", "cls_token"])
    assert rows_of(spec)["lm_head"] == list(range(VOCAB))
    assert "'cls_token'" in spec.warnings[0]


def test_the_original_beside_a_saved_module_counts_for_nothing(tmp_path: Path) -> None:
    saved = {f"{HEAD}.weight": Tensor(MATRIX, seed=1)}
    beside = saved | {
        f"{HEAD}.modules_to_save.weight": Tensor(MATRIX, seed=1),
        f"{HEAD}.original_module.weight": Tensor(MATRIX, seed=2),
    }
    versions = set()
    for name, tensors in (("plain", saved), ("beside", beside)):
        spec = parse(tmp_path / name, tensors, modules_to_save=["lm_head"])
        versions.add(content_version(spec, tmp_path / name))
    assert len(versions) == 1
    beside[f"{HEAD}.modules_to_save.weight"] = Tensor(MATRIX, seed=3)
    with pytest.raises(AdapterRefused) as refused:
        parse(tmp_path / "other", beside, modules_to_save=["lm_head"])
    assert refused.value.code == "unknown_tensor"


def test_the_version_is_of_rows_and_ids(tmp_path: Path) -> None:
    def version(name: str, ids: list[int], seed: int) -> str:
        rows = {f"{EMBED}{ROWS}": Tensor((2, HIDDEN), seed=seed)}
        return content_version(parse(tmp_path / name, rows, trainable_token_indices=ids), tmp_path / name)

    found = {version("a", [1, 2], 0), version("b", [1, 3], 0), version("c", [1, 2], 1), version("d", [1, 2], 0)}
    assert len(found) == 3


def saved(*names: str, **tensors: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    paths = {"embed": f"{EMBED}.weight", "head": f"{HEAD}.weight", "norm": NORMS[0], "norm_2": NORMS[1]}
    return {"modules_to_save": list(names)}, {paths[name]: Tensor(shape) for name, shape in tensors.items()}


def tokens(ids: Any, embed: tuple[int, ...] | None = None, head: tuple[int, ...] | None = None, **more: Any) -> Any:
    shapes = {f"{EMBED}{ROWS}": embed, f"{HEAD}{ROWS}": head}
    return {"trainable_token_indices": ids} | more, {name: Tensor(s) for name, s in shapes.items() if s is not None}


WIDE = (VOCAB, HIDDEN + 16)
REFUSED: dict[str, tuple[str, tuple[dict[str, Any], dict[str, Tensor]]]] = {
    "saved-embed-missing": ("missing_tensors", saved("embed_tokens", "lm_head", head=MATRIX)),
    "saved-norm-missing": ("missing_tensors", saved("norm", norm=(HIDDEN,), norm_2=(HIDDEN,))),
    "saved-head-too-narrow": ("shape_mismatch", saved("lm_head", head=(VOCAB, HIDDEN - 1))),
    "saved-head-too-wide": ("shape_mismatch", saved("lm_head", head=WIDE)),
    "saved-head-too-short": ("shape_mismatch", saved("lm_head", head=(VOCAB - 1, HIDDEN))),
    "saved-head-transposed": ("shape_mismatch", saved("lm_head", head=(HIDDEN, VOCAB))),
    "saved-head-longer-than-embed": ("shape_mismatch", saved("lm_head", head=(VOCAB + 1, HIDDEN))),
    "saved-both-of-two-lengths": (
        "shape_mismatch",
        saved("lm_head", "embed_tokens", head=(VOCAB + 1, HIDDEN), embed=(VOCAB + 2, HIDDEN)),
    ),
    "saved-norm-too-long": ("shape_mismatch", saved("model.norm", norm=(HIDDEN + 1,))),
    "saved-norm-as-a-matrix": ("shape_mismatch", saved("model.norm", norm=(1, HIDDEN))),
    "saved-head-as-a-vector": ("shape_mismatch", saved("lm_head", head=(HIDDEN,))),
    "saved-head-in-three-sizes": ("shape_mismatch", saved("lm_head", head=(1, VOCAB, HIDDEN))),
    "saved-head-empty": ("zero_size", saved("lm_head", head=(0,))),
    "saved-norm-empty": ("zero_size", saved("model.norm", norm=(0,))),
    "norm-not-named": ("unknown_tensor", saved(norm=(HIDDEN,))),
    "norm-of-no-layer": (
        "unknown_module",
        (saved("norm")[0], {f"{PREFIX}model.layers.{LAYERS}.input_layernorm.weight": Tensor((HIDDEN,))}),
    ),
    "norm-of-layer-01": (
        "unknown_module",
        (saved("norm")[0], {f"{PREFIX}model.layers.01.input_layernorm.weight": Tensor((HIDDEN,))}),
    ),
    "head-norm-without-head-norms": (
        "unknown_module",
        (saved("q_norm")[0], {f"{PREFIX}model.layers.0.self_attn.q_norm.weight": Tensor((HEAD_WIDTH,))}),
    ),
    "head-bias": ("unknown_module", (saved("lm_head")[0], {f"{PREFIX}model.norm.bias": Tensor((HIDDEN,))})),
    "saved-linear": ("unsupported_variant", (saved("q_proj")[0], {f"{PREFIX}{Q0}.weight": Tensor((HIDDEN, HIDDEN))})),
    "saved-mlp": ("unsupported_variant", saved("mlp")),
    "saved-everything": ("unsupported_variant", saved("")),
    "saved-layer": ("unsupported_variant", saved("layers.1")),
    "saved-score": ("unsupported_task", saved("score")),
    "saved-by-too-many-names": ("invalid_config", saved(*map(str, range(5000)))),
    "saved-names-no-list": ("invalid_config", ({"modules_to_save": "lm_head"}, {})),
    "saved-names-no-texts": ("invalid_config", ({"modules_to_save": [1]}, {})),
    "saved-and-lora": (
        "config_tensor_mismatch",
        (
            {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "lm_head"]},
            lora("lm_head", kind="lm_head") | {f"{HEAD}.weight": Tensor(MATRIX)},
        ),
    ),
    "saved-with-base-layer": (
        "config_tensor_mismatch",
        (saved("lm_head")[0], {f"{HEAD}.weight": Tensor(MATRIX), f"{HEAD}.base_layer.weight": Tensor(MATRIX)}),
    ),
    "only-the-original": (
        "config_tensor_mismatch",
        (saved("lm_head")[0], {f"{HEAD}.original_module.weight": Tensor(MATRIX)}),
    ),
    "matrix-of-other-values": ("unsupported_variant", saved(head=MATRIX)),
    "two-matrices-of-one-module": (
        "unknown_tensor",
        ({}, {f"{HEAD}.weight": Tensor(MATRIX, seed=1), f"{HEAD}.base_layer.weight": Tensor(MATRIX, seed=2)}),
    ),
    "saved-with-alora": (
        "unsupported_variant",
        (saved("lm_head")[0] | {"alora_invocation_tokens": [1]}, {f"{HEAD}.weight": Tensor(MATRIX)}),
    ),
    "tokens-missing": ("missing_tensors", tokens([1, 2])),
    "tokens-of-the-head-missing": ("missing_tensors", tokens({"embed_tokens": [1], "lm_head": [2]}, embed=(1, HIDDEN))),
    "tokens-fewer-than-ids": ("shape_mismatch", tokens([1, 2], embed=(1, HIDDEN))),
    "tokens-more-than-ids": ("shape_mismatch", tokens([1], embed=(2, HIDDEN))),
    "tokens-too-wide": ("shape_mismatch", tokens([1], embed=(1, HIDDEN + 1))),
    "tokens-in-one-size": ("shape_mismatch", tokens([1], embed=(HIDDEN,))),
    "tokens-empty": ("zero_size", tokens([1], embed=(0, HIDDEN))),
    "tokens-not-announced": ("config_tensor_mismatch", tokens(None, embed=(1, HIDDEN))),
    "tokens-not-announced-by-an-empty-list": ("config_tensor_mismatch", tokens([], embed=(1, HIDDEN))),
    "tokens-of-the-head-not-announced": ("config_tensor_mismatch", tokens([1], embed=(1, HIDDEN), head=(1, HIDDEN))),
    "tokens-negative": ("invalid_config", tokens([-1], embed=(1, HIDDEN))),
    "tokens-twice": ("invalid_config", tokens([4, 4], embed=(2, HIDDEN))),
    "tokens-bool": ("invalid_config", tokens([True], embed=(1, HIDDEN))),
    "tokens-float": ("invalid_config", tokens([1.0], embed=(1, HIDDEN))),
    "tokens-text": ("invalid_config", tokens(["1"], embed=(1, HIDDEN))),
    "tokens-a-number": ("invalid_config", tokens(1, embed=(1, HIDDEN))),
    "tokens-of-64-bits": ("invalid_config", tokens([2**40], embed=(1, HIDDEN))),
    "tokens-far-out": ("invalid_config", tokens([2**31 - 1], embed=(1, HIDDEN))),
    "tokens-just-out": ("invalid_config", tokens([VOCAB], embed=(1, HIDDEN))),
    "tokens-out-with-a-gap": (
        "invalid_config",
        tokens({"embed_tokens": [VOCAB + 1], "lm_head": [VOCAB + 1]}, embed=(1, HIDDEN), head=(1, HIDDEN)),
    ),
    "tokens-of-no-module": ("invalid_config", tokens({"tok_embeddings": [1]}, embed=(1, HIDDEN))),
    "tokens-of-a-linear": ("unsupported_variant", tokens({"q_proj": [1]})),
    "tokens-of-all-modules": ("unsupported_variant", tokens({"": [1]})),
    "tokens-of-one-module-twice": (
        "invalid_config",
        tokens({"embed_tokens": [1], "model.embed_tokens": [2]}, embed=(1, HIDDEN)),
    ),
    "tokens-named-without-ids": ("invalid_config", tokens({"lm_head": []}, head=(1, HIDDEN))),
    "tokens-of-a-linears-tensor": (
        "unknown_tensor",
        (tokens([1])[0], {f"{PREFIX}{Q0}{ROWS}": Tensor((1, HIDDEN))}),
    ),
    "tokens-of-a-norms-tensor": (
        "unknown_tensor",
        (tokens([1])[0], {f"{PREFIX}model.norm{ROWS}": Tensor((1, HIDDEN))}),
    ),
    "tokens-and-saved": (
        "unsupported_variant",
        (
            {"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]},
            {f"{EMBED}.weight": Tensor(MATRIX), f"{EMBED}{ROWS}": Tensor((1, HIDDEN))},
        ),
    ),
    "tokens-and-lora": (
        "unsupported_variant",
        (
            {"trainable_token_indices": {"lm_head": [1]}, "target_modules": ["q_proj", "lm_head"]},
            lora("lm_head", kind="lm_head") | {f"{HEAD}{ROWS}": Tensor((1, HIDDEN))},
        ),
    ),
    "tokens-with-alora": ("unsupported_variant", tokens([1], embed=(1, HIDDEN), alora_invocation_tokens=[1])),
    "tokens-float8": (
        "unsupported_dtype",
        (tokens([1])[0], {f"{EMBED}{ROWS}": Tensor((1, HIDDEN), "F8_E4M3")}),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_code(tmp_path: Path, name: str) -> None:
    code, (fields, tensors) = REFUSED[name]
    with pytest.raises(AdapterRefused) as refused:
        parse(tmp_path, tensors, **fields)
    assert refused.value.code == code, refused.value.message
    assert len(refused.value.message) < 400


TIED_REFUSED: dict[str, tuple[str, tuple[dict[str, Any], dict[str, Tensor]]]] = {
    "as-one-but-only-one": (
        "missing_tensors",
        ({"ensure_weight_tying": True} | saved("lm_head")[0], saved(head=MATRIX)[1]),
    ),
    "as-one-but-two": (
        "unsupported_variant",
        (
            {"ensure_weight_tying": True} | saved("embed_tokens")[0],
            {f"{EMBED}.weight": Tensor(MATRIX, seed=1), f"{HEAD}.weight": Tensor(MATRIX, seed=2)},
        ),
    ),
    "tokens-as-one-but-two": (
        "invalid_config",
        tokens({"embed_tokens": [1], "lm_head": [2]}, (1, HIDDEN), (1, HIDDEN), ensure_weight_tying=True),
    ),
    "tokens-of-one-in-two": (
        "unsupported_variant",
        (tokens([1])[0], {f"{EMBED}{ROWS}": Tensor((1, HIDDEN), seed=1), f"{HEAD}{ROWS}": Tensor((1, HIDDEN), seed=2)}),
    ),
    "tokens-under-a-saved-head": (
        "unsupported_variant",
        (
            {"trainable_token_indices": [1], "modules_to_save": ["lm_head"]},
            {f"{HEAD}.weight": Tensor(MATRIX), f"{EMBED}{ROWS}": Tensor((1, HIDDEN))},
        ),
    ),
}


@pytest.mark.parametrize("name", TIED_REFUSED)
def test_refused_on_a_tied_base(tmp_path: Path, name: str) -> None:
    code, (fields, tensors) = TIED_REFUSED[name]
    with pytest.raises(AdapterRefused) as refused:
        parse(tmp_path, tensors, TIED, **fields)
    assert refused.value.code == code, refused.value.message


@pytest.mark.parametrize("where", ["head", "norm", "tokens"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_found_offline(tmp_path: Path, where: str, value: float) -> None:
    fields, tensors = {
        "head": saved("lm_head", head=MATRIX),
        "norm": saved("model.norm", norm=(HIDDEN,)),
        "tokens": tokens([1], embed=(1, HIDDEN)),
    }[where]
    (tensor,) = tensors.values()
    values = np.frombuffer(tensor.data, np.float32).copy()
    values[-1] = value
    tensor.data = values.tobytes()
    folder = write(tmp_path, plain_config(**fields), plain_tensors() | tensors)
    with pytest.raises(AdapterRefused) as refused:
        inspect_folder(folder, base=None, max_rank=64, page_rows=8)
    assert refused.value.code == "non_finite"


# -- tokens of the adapter's own tokenizer ----------------------------------------------------------------------------


def added(folder: Path, ids: list[int], files: dict[str, Any]) -> AdapterSpec:
    rows = {f"{name}{ROWS}": Tensor((len(ids), HIDDEN)) for name in (EMBED, HEAD)}
    for name, content in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return parse(folder, rows, trainable_token_indices={"embed_tokens": ids, "lm_head": ids})


TOOL = AddedToken(VOCAB, "<tool>", special=True, normalized=False)
FORMS: dict[str, dict[str, Any]] = {
    "tokenizer.json": {
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": True},
            {"id": VOCAB, "content": "<tool>", "special": True},
        ]
    },
    "tokenizer_config.json": {
        "added_tokens_decoder": {"0": {"content": "<s>"}, str(VOCAB): {"content": "<tool>", "special": True}}
    },
}


@pytest.mark.parametrize("file", FORMS)
def test_tokens_with_rows_have_their_names(tmp_path: Path, file: str) -> None:
    assert added(tmp_path, [VOCAB], {file: FORMS[file]}).added_tokens == (TOOL,)


def test_added_tokens_of_the_base_are_harmless(tmp_path: Path) -> None:
    spec = added(tmp_path, [3], {"added_tokens.json": {"<s>": 0, "</s>": VOCAB - 1}})
    assert (spec.added_tokens, spec.warnings) == ((), ())
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "added_tokens.json").write_text(json.dumps({"<s>": 0, "</s>": VOCAB - 1}))
    assert parse(tmp_path / "plain", {}).warnings == ()


@pytest.mark.parametrize("ids", [[3], []])
def test_added_tokens_without_rows_are_a_warning(tmp_path: Path, ids: list[int]) -> None:
    files = {"added_tokens.json": {"<tool>": VOCAB}}
    if ids:
        spec = added(tmp_path, ids, files)
    else:
        (tmp_path / "added_tokens.json").write_text(json.dumps(files["added_tokens.json"]))
        spec = parse(tmp_path, {})
    assert spec.added_tokens == ()
    assert "has no rows for" in spec.warnings[0]


@pytest.mark.parametrize(
    "content",
    [
        "<html>",
        "[1]",
        *(json.dumps({"added_tokens": [{"id": VOCAB, "content": text}]}) for text in ("\ud800", "", "x" * 2000)),
        '{"added_tokens": 3}',
        '{"added_tokens": [3, {"id": true}, {"id": 1e9, "content": "x"}, null]}',
    ],
)
def test_files_that_are_no_tokenizers_do_no_harm(tmp_path: Path, content: str) -> None:
    assert added(tmp_path, [VOCAB], {"tokenizer.json": content}).added_tokens == ()


def test_without_a_base_rows_are_taken_as_they_are(tmp_path: Path) -> None:
    spec = parse(tmp_path, {f"{EMBED}.weight": Tensor((7, HIDDEN))}, None, modules_to_save=["embed_tokens"])
    assert (spec.replaced[0].table, spec.replaced[0].num_rows, spec.num_new_tokens) == (Table.EMBED, 7, 0)


@pytest.mark.parametrize(
    ("field", "vector"),
    [("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias")],
    ids=["dora", "lora-bias"],
)
def test_vectors_on_a_resized_head_are_named_as_the_reason(field: str, vector: str, tmp_path: Path) -> None:
    rows = VOCAB + 3
    tensors = {
        f"{HEAD}.lora_A.weight": Tensor((4, HIDDEN)),
        f"{HEAD}.lora_B.weight": Tensor((rows, 4)),
        f"{HEAD}.{vector}": Tensor((rows,)),
        f"{HEAD}.base_layer.weight": Tensor((rows, HIDDEN)),
    }
    config = plain_config(target_modules=["lm_head"], **{field: True})
    with pytest.raises(AdapterRefused, match=f"3 rows for tokens beyond .* {field}") as caught:
        parse_adapter(write(tmp_path, config, tensors), GEOMETRY, 64)
    assert caught.value.code == "unsupported_variant"


def test_new_tokens_of_an_activated_adapter_are_refused(tmp_path: Path) -> None:
    """A prompt without an invocation is the base's, which has no such tokens; PEFT's model has them everywhere."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    base = base_matrix(tmp_path / "base", *names)
    geometry = replace(GEOMETRY, folder=str(tmp_path / "base"))
    config = plain_config(alora_invocation_tokens=[1])
    same = plain_tensors() | {f"{PREFIX}{name}": base[name] for name in names}
    assert parse_adapter(write(tmp_path / "same", config, same), geometry, 64).invocation == (1,)
    grown = plain_tensors() | {f"{PREFIX}{name}": longer(base[name], 3) for name in names}
    with pytest.raises(AdapterRefused, match="save_embedding_layers=False") as caught:
        parse_adapter(write(tmp_path / "grown", config, grown), geometry, 64)
    assert caught.value.code == "unsupported_variant"
