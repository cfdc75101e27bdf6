"""Adapters that are served: what PEFT saves is understood exactly, in every spelling."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from raw_adapters import (
    GEOMETRY,
    HIDDEN,
    INTER,
    LAYERS,
    PREFIX,
    Q0,
    SIZES,
    VOCAB,
    Tensor,
    container,
    lora,
    plain_config,
    plain_tensors,
    write,
)
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loraserve.errors import AdapterRefused
from loraserve.kernels.metadata import Kind
from loraserve.lora.container import TensorReader
from loraserve.lora.format import parse_adapter
from loraserve.lora.peft_config import FIELD_RULES
from loraserve.lora.spec import KINDS, AdapterSpec, BaseGeometry, LoadReport
from loraserve.lora.version import content_version

LINEARS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def make_model(tied: bool, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folders = {tied: tmp_path_factory.mktemp("base") for tied in (False, True)}
    for tied, folder in folders.items():
        make_model(tied).save_pretrained(folder)
    return folders


def geometry_of(base: Path, tied: bool) -> BaseGeometry:
    return replace(GEOMETRY, folder=str(base), tied_head=tied, names=(base.name,))


def make_adapter(tied: bool, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Save an adapter with PEFT; every LoRA parameter is random."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        peft_model = get_peft_model(make_model(tied).to(dtype), LoraConfig(**({"r": 4, "lora_alpha": 8} | options)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        peft_model.save_pretrained(folder)


def assert_same_as_peft(spec: AdapterSpec, folder: Path, peft_model: PeftModel) -> None:
    """Every LoRA layer of the model is in the spec, with PEFT's own scaling and exactly its tensors."""
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in peft_model.named_modules()
        if hasattr(module, "lora_A") and (len(module.lora_A) or len(module.lora_embedding_A))
    }
    assert {target.module for target in spec.targets} == set(layers)
    with TensorReader(folder) as reader:
        for target in spec.targets:
            layer = layers[target.module]
            assert target.scaling == layer.scaling["default"]
            assert target.rank == layer.r["default"]
            embed = target.kind == "embed"
            a = layer.lora_embedding_A["default"] if embed else layer.lora_A["default"].weight
            b = layer.lora_embedding_B["default"] if embed else layer.lora_B["default"].weight
            for ref, tensor in ((target.a, a), (target.b, b)):
                assert ref.shape == tuple(tensor.shape)
                read = torch.from_numpy(reader.read(ref))
                read = read.view(torch.bfloat16) if ref.dtype == "BF16" else read
                assert torch.equal(read.float(), tensor.detach().float())


PEFT_CASES: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "q-v": {"target_modules": ["q_proj", "v_proj"]},
    "k-only": {"target_modules": ["k_proj"]},
    "up-only": {"target_modules": ["up_proj"]},
    "rslora": {"target_modules": LINEARS, "use_rslora": True, "r": 6},
    "float-alpha": {"target_modules": ["q_proj"], "lora_alpha": 22.627},
    "zero-alpha": {"target_modules": ["q_proj"], "lora_alpha": 0},
    "negative-alpha": {"target_modules": ["q_proj"], "lora_alpha": -3},
    "patterns": {
        "target_modules": LINEARS,
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 5, "down_proj": 3, r"layers\.1\..*": 2},
        "alpha_pattern": {r"layers\.(0|2)\..*": 2.5, "[qk]_proj": 100, "v_proj": 7},
    },
    "pattern-sort-trap": {"target_modules": ["q_proj"], "alpha_pattern": {"q_proj": 2, "layers.0.self_attn.q_proj": 3}},
    "patterns-rslora": {"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {"layers.2.*": 7}},
    "some-layers": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "one-layer": {"target_modules": ["q_proj"], "layers_to_transform": 1},
    "excluded": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    "regex-targets": {"target_modules": r".*layers\.[01]\.self_attn\.(q|k)_proj"},
    "embed": {"target_modules": ["embed_tokens", "q_proj"]},
    "lm-head": {"target_modules": ["lm_head"]},
    "embed-and-head": {"target_modules": ["embed_tokens", "lm_head"], "r": 3},
    "bias-all-without-biases": {"target_modules": ["q_proj"], "bias": "all"},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.1},
    "rank-1": {"target_modules": LINEARS, "r": 1},
    "rank-above-hidden": {"target_modules": ["k_proj"], "r": 50},
}


VOCABULARY_CASES = ("embed", "lm-head", "embed-and-head")


@pytest.mark.parametrize(
    ("case", "tied"), [(case, False) for case in PEFT_CASES] + [(case, True) for case in VOCABULARY_CASES]
)
def test_what_peft_saves(case: str, tied: bool, bases: dict[bool, Path], tmp_path: Path) -> None:
    make_adapter(tied, tmp_path, **PEFT_CASES[case])
    spec = parse_adapter(tmp_path, geometry_of(bases[tied], tied), 64)
    assert ("base_copy" in spec.features) == (case in VOCABULARY_CASES)
    # PEFT sorts pattern keys when it saves: what counts is the model that comes back from the files.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        again = PeftModel.from_pretrained(make_model(tied), tmp_path)
    assert_same_as_peft(spec, tmp_path, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, bases: dict[bool, Path], tmp_path: Path) -> None:
    make_adapter(False, tmp_path, target_modules=["q_proj", "lm_head"])
    file = tmp_path / "adapter_model.safetensors"
    tensors = {key: value.to(dtype) if "lora" in key else value for key, value in load_file(file).items()}
    save_file(tensors, file)
    spec = parse_adapter(tmp_path, geometry_of(bases[False], False), 64)
    assert LoadReport.of(spec, "0").dtype == str(dtype).removeprefix("torch.")
    with TensorReader(tmp_path) as reader:
        for target in spec.targets:
            read = torch.from_numpy(reader.read(target.a))
            read = read.view(torch.bfloat16) if dtype == torch.bfloat16 else read
            assert torch.equal(read, tensors[target.a.name])


def test_mixed_dtypes_are_named_in_the_report(tmp_path: Path) -> None:
    tensors = lora(Q0, dtype="BF16") | lora("model.layers.1.self_attn.q_proj", dtype="F32")
    assert LoadReport.of(parse_adapter(write(tmp_path, None, tensors), GEOMETRY, 64), "0").dtype == "bfloat16+float32"


SPELLINGS = {
    "canonical": lambda path, side: f"base_model.model.{path}.lora_{side}.weight",
    "default": lambda path, side: f"base_model.model.{path}.lora_{side}.default.weight",
    "no-prefix": lambda path, side: f"{path}.lora_{side}.weight",
    "compiled": lambda path, side: f"base_model.model._orig_mod.{path}.lora_{side}.weight",
    "compiled-outside": lambda path, side: f"_orig_mod.base_model.model.{path}.lora_{side}.default.weight",
    "wrapped-twice": lambda path, side: f"base_model.model.base_model.model.{path}.lora_{side}.weight",
    "fsdp": lambda path, side: (
        "_fsdp_wrapped_module.base_model.model."
        + path.replace(".self_attn", "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn")
        + f".lora_{side}.weight"
    ),
    "multimodal": lambda path, side: (
        "base_model.model." + path.replace("model.", "model.language_model.", 1) + f".lora_{side}.weight"
    ),
    "multimodal-old": lambda path, side: f"base_model.model.language_model.{path}.lora_{side}.weight",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_key_is_the_same_adapter(spelling: str, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain")
    tensors = {}
    for key, tensor in plain_tensors().items():
        path, _, rest = key.removeprefix(PREFIX).partition(".lora_")
        tensors[SPELLINGS[spelling](path, rest[0])] = tensor
    other = write(tmp_path / "other", None, tensors)
    specs = [parse_adapter(folder, GEOMETRY, 64) for folder in (plain, other)]
    assert [target.module for target in specs[1].targets] == [target.module for target in specs[0].targets]
    assert content_version(specs[0], plain) == content_version(specs[1], other)


def test_vocabulary_modules_of_multimodal_classes(tmp_path: Path) -> None:
    tensors = {
        PREFIX + "model.language_model.embed_tokens.lora_embedding_A": Tensor((4, VOCAB)),
        PREFIX + "model.language_model.embed_tokens.lora_embedding_B": Tensor((HIDDEN, 4)),
        PREFIX + "language_model.lm_head.lora_A.weight": Tensor((4, HIDDEN)),
        PREFIX + "language_model.lm_head.lora_B.weight": Tensor((VOCAB, 4)),
    }
    spec = parse_adapter(
        write(tmp_path, plain_config(target_modules=["lm_head", "embed_tokens"]), tensors), GEOMETRY, 64
    )
    assert spec.kinds == ("embed", "lm_head")


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": None},
        {"target_modules": "(a+)+$"},  # a regex of the config is never run
        {"target_modules": ["model.layers.0.self_attn.q_proj", "q_proj", "no_such_proj"]},
        {"rank_pattern": None, "alpha_pattern": {}},
        {"use_dora": False, "lora_bias": None, "modules_to_save": [], "trainable_token_indices": None},
        {"superlora": None, "superlora_2": False, "superlora_3": "", "superlora_4": [], "superlora_5": {}},
        {"init_lora_weights": True},
        {"init_lora_weights": False, "loftq_config": {}},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "orthogonal", "corda_config": {"corda_method": "kpm"}},
        {"lora_dropout": 0, "inference_mode": True, "peft_version": "0.21.2", "fan_in_fan_out": True},
        {"auto_mapping": {"unsloth_fixed": True}, "runtime_config": {"ephemeral_gpu_offload": False}},
        {"layers_to_transform": [], "layers_pattern": None, "layer_replication": None, "megatron_config": None},
        {"task_type": "SEQ_2_SEQ_LM", "revision": "main", "megatron_core": "megatron.core", "qalora_group_size": 16},
        {"ensure_weight_tying": True},
        {"bias": "lora_only"},
        {"bias": ...},
        {"task_type": None, "base_model_name_or_path": None},
    ],
    ids=str,
)
def test_fields_that_change_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    plain = parse_adapter(write(tmp_path / "plain"), GEOMETRY, 64)
    spec = parse_adapter(write(tmp_path / "other", plain_config(**changes)), GEOMETRY, 64)
    assert spec.targets == plain.targets


def test_absent_fields_take_the_defaults_of_peft(tmp_path: Path) -> None:
    spec = parse_adapter(write(tmp_path, {"peft_type": "LORA"}, plain_tensors(rank=8)), GEOMETRY, 64)
    assert {(target.rank, target.scaling) for target in spec.targets} == {(8, 1.0)}


def test_a_byte_order_mark_is_tolerated(tmp_path: Path) -> None:
    write(tmp_path, b"\xef\xbb\xbf" + json.dumps(plain_config()).encode())
    assert parse_adapter(tmp_path, GEOMETRY, 64).max_rank == 4


def test_patterns_match_the_path_that_was_trained(tmp_path: Path) -> None:
    tensors = plain_tensors(prefix="base_model.model.model.language_model.")
    tensors = {key.replace("language_model.model.", "language_model."): value for key, value in tensors.items()}
    config = plain_config(alpha_pattern={"^model.language_model.layers.1.self_attn.q_proj": 40})
    spec = parse_adapter(write(tmp_path, config, tensors), GEOMETRY, 64)
    assert [target.scaling for target in spec.targets] == [2.0, 10.0, 2.0]


def test_patterns_without_use_are_a_warning(tmp_path: Path) -> None:
    config = plain_config(rank_pattern={"proj": 2}, alpha_pattern={"q_proj": 3, "layers.1.self_attn.q_proj": 5})
    spec = parse_adapter(write(tmp_path, config), GEOMETRY, 64)
    assert {target.scaling for target in spec.targets} == {0.75}
    assert [warning.partition(" ")[0] for warning in spec.warnings] == ["rank_pattern", "alpha_pattern"]
    assert "'layers.1.self_attn.q_proj'" in spec.warnings[1]


def test_every_field_of_peft_has_a_rule() -> None:
    known = {rule.name for rule in FIELD_RULES}
    assert set(LoraConfig.__dataclass_fields__) - known == set()
    assert len(known) == len(FIELD_RULES)


def test_kinds_are_those_of_the_kernels() -> None:
    assert tuple(str(kind) for kind in Kind)[: len(KINDS)] == KINDS


def test_without_a_geometry_sizes_are_not_checked(tmp_path: Path) -> None:
    write(tmp_path, None, lora("model.layers.90.self_attn.q_proj", kind="down"))
    assert parse_adapter(tmp_path, None, 64).targets[0].layer == 90


def test_shards_with_an_index(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole")
    tensors = list(plain_tensors().items())
    index = {}
    for number, part in enumerate((tensors[:3], tensors[3:]), 1):
        name = f"adapter_model-0000{number}-of-00002.safetensors"
        write(tmp_path / "shards", None, dict(part), name)
        index |= dict.fromkeys(dict(part), name)
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    spec = parse_adapter(tmp_path / "shards", GEOMETRY, 64)
    assert spec.features == ("sharded",)
    assert content_version(spec, tmp_path / "shards") == content_version(parse_adapter(whole, GEOMETRY, 64), whole)


def test_mlx_files(tmp_path: Path) -> None:
    config = {"fine_tune_type": "lora", "num_layers": 3, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    a, b = Tensor((HIDDEN, 4), seed=1), Tensor((SIZES["v"][1], 4)[::-1], seed=2)
    module = "model.layers.1.self_attn.v_proj"
    write(tmp_path, config, {f"{module}.lora_a": a, f"{module}.lora_b": b}, "adapters.safetensors")
    (target,) = parse_adapter(tmp_path, GEOMETRY, 64).targets
    assert (target.kind, target.layer, target.rank, target.scaling) == ("v", 1, 4, 20.0)
    with TensorReader(tmp_path) as reader:
        expected = np.frombuffer(a.data, np.float32).reshape(HIDDEN, 4).T
        assert np.array_equal(reader.read(target.a), expected)
        assert reader.read(target.b).shape == target.b.shape == (SIZES["v"][1], 4)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"lora_parameters": {"rank": 4, "scale": 2.0}, "fine_tune_type": "dora"}, "unsupported_variant"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0}, "fine_tune_type": "full"}, "unsupported_variant"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0, "alpha": 16}}, "unsupported_format"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0, "new": 1}}, "unsupported_variant"),
        ({"lora_parameters": {"rank": 4}}, "invalid_config"),
        ({"lora_parameters": {"rank": True, "scale": 2.0}}, "invalid_config"),
        ({"lora_parameters": {"rank": 4, "scale": 1e39}}, "invalid_config"),
        ({"peft_type": "LORA"}, "invalid_config"),
        ({"lora_parameters": {"rank": 8, "scale": 2.0}}, "rank_mismatch"),
    ],
    ids=str,
)
def test_mlx_refusals(config: dict[str, Any], code: str, tmp_path: Path) -> None:
    tensors = {Q0 + ".lora_a": Tensor((HIDDEN, 4)), Q0 + ".lora_b": Tensor((4, HIDDEN))}
    with pytest.raises(AdapterRefused) as caught:
        parse_adapter(write(tmp_path, config, tensors, "adapters.safetensors"), GEOMETRY, 64)
    assert caught.value.code == code


def write_embedding_adapter(folder: Path, matrix: torch.Tensor) -> None:
    write(folder, plain_config(target_modules=["embed_tokens"]), {})
    prefix = PREFIX + "model.embed_tokens."
    tensors = {
        prefix + "lora_embedding_A": torch.ones(4, VOCAB),
        prefix + "lora_embedding_B": torch.ones(HIDDEN, 4),
        prefix + "base_layer.weight": matrix,
    }
    save_file(tensors, folder / "adapter_model.safetensors")


class TestBaseCopies:
    """PEFT saves the base's embedding beside an adapter that targets it."""

    @pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_unchanged_at_any_dtype(self, base_dtype: torch.dtype, adapter_dtype: torch.dtype, tmp_path: Path) -> None:
        base = make_model(True, base_dtype)
        base.save_pretrained(tmp_path / "base")
        write_embedding_adapter(tmp_path / "a", base.model.embed_tokens.weight.detach().to(adapter_dtype))
        spec = parse_adapter(tmp_path / "a", geometry_of(tmp_path / "base", True), 64)
        assert spec.features == ("embed", "base_copy")

    def test_of_a_sharded_base(self, tmp_path: Path) -> None:
        base = make_model(False)
        base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
        assert (tmp_path / "base" / "model.safetensors.index.json").exists()
        write_embedding_adapter(tmp_path / "a", base.model.embed_tokens.weight.detach().clone())
        assert "base_copy" in parse_adapter(tmp_path / "a", geometry_of(tmp_path / "base", False), 64).features

    @pytest.mark.parametrize("row", [0, VOCAB - 1])
    def test_changed(self, row: int, bases: dict[bool, Path], tmp_path: Path) -> None:
        matrix = load_file(bases[False] / "model.safetensors")["model.embed_tokens.weight"]
        matrix[row, -1] += 1
        write_embedding_adapter(tmp_path, matrix)
        with pytest.raises(AdapterRefused, match="save_embedding_layers=False") as caught:
            parse_adapter(tmp_path, geometry_of(bases[False], False), 64)
        assert caught.value.code == "unsupported_variant"

    def test_without_a_geometry_a_warning_says_so(self, tmp_path: Path) -> None:
        write_embedding_adapter(tmp_path, torch.zeros(VOCAB, HIDDEN))
        assert "was not compared" in parse_adapter(tmp_path, None, 64).warnings[0]


def test_weights_tied_in_training_but_half_saved(tmp_path: Path) -> None:
    tensors = {
        PREFIX + "model.embed_tokens.lora_embedding_A": Tensor((4, VOCAB)),
        PREFIX + "model.embed_tokens.lora_embedding_B": Tensor((HIDDEN, 4)),
    }
    write(tmp_path, plain_config(target_modules=["embed_tokens"], ensure_weight_tying=True), tensors)
    assert parse_adapter(tmp_path, GEOMETRY, 64).kinds == ("embed",)
    with pytest.raises(AdapterRefused) as caught:
        parse_adapter(tmp_path, replace(GEOMETRY, tied_head=True), 64)
    assert caught.value.code == "unsupported_variant"


def test_report(tmp_path: Path) -> None:
    tensors = plain_tensors() | lora("model.layers.2.mlp.down_proj", kind="down", rank=2)
    config = plain_config(
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 2},
        use_rslora=True,
        base_model_name_or_path="C:\\models\\Other-7B-unsloth-bnb-4bit\\",
    )
    spec = parse_adapter(write(tmp_path, config, tensors), GEOMETRY, 64)
    report = LoadReport.of(spec, "abc")
    assert (report.rank, report.targets, report.dtype) == (4, ("q", "down"), "float32")
    assert report.scaling == (4.0, 8 / math.sqrt(2))
    assert [(kind.kind, kind.num_modules, kind.layers, kind.ranks) for kind in report.kinds] == [
        ("q", 3, "0-2", (4,)),
        ("down", 1, "2", (2,)),
    ]
    assert report.parameters == 3 * 4 * 64 + 2 * (INTER + HIDDEN)
    assert report.bytes == report.parameters * 4
    assert report.features == ("rslora", "rank_pattern")
    assert len(report.warnings) == 1
    assert "Other-7B" in report.warnings[0]


@pytest.mark.parametrize("name", ["tiny/base", "/home/me/base", "unsloth/Base-bnb-4bit", "base/"])
def test_a_base_known_under_another_path_is_no_warning(name: str, tmp_path: Path) -> None:
    spec = parse_adapter(write(tmp_path, plain_config(base_model_name_or_path=name)), GEOMETRY, 64)
    assert spec.warnings == ()
    assert spec.base_model_name == name


class TestContentVersion:
    def version(self, folder: Path) -> str:
        return content_version(parse_adapter(folder, GEOMETRY, 64), folder)

    def test_spelling_does_not_count(self, tmp_path: Path) -> None:
        tensors = plain_tensors()
        first = self.version(write(tmp_path / "a"))
        others = [
            write(tmp_path / "order", None, dict(reversed(tensors.items()))),
            write(tmp_path / "metadata", None, container(tensors, {"format": "pt", "who": "me"})),
            write(tmp_path / "padding", None, container(tensors).replace(b"}}", b"}}", 1)),
            write(tmp_path / "config", json.dumps(plain_config(lora_dropout=0.5, task_type=None), indent=9)),
            write(tmp_path / "scaling", plain_config(lora_alpha=4, use_rslora=True)),
            write(tmp_path / "pattern", plain_config(r=9, rank_pattern={"q_proj": 4})),
            write(tmp_path / "name", plain_config(base_model_name_or_path="elsewhere")),
        ]
        (tmp_path / "a" / "README.md").write_text("hello")
        assert {self.version(folder) for folder in others} == {first}
        assert self.version(tmp_path / "a") == first
        assert len(first) == 64

    def test_the_mathematics_counts(self, tmp_path: Path) -> None:
        tensors = plain_tensors()
        folders = [
            write(tmp_path / "a"),
            write(tmp_path / "alpha", plain_config(lora_alpha=9)),
            write(tmp_path / "one-alpha", plain_config(alpha_pattern={"layers.1.self_attn.q_proj": 9})),
            write(tmp_path / "rslora", plain_config(use_rslora=True)),
            write(tmp_path / "fewer", None, dict(list(tensors.items())[:4])),
            write(tmp_path / "dtype", None, plain_tensors(dtype="F16")),
            write(
                tmp_path / "module",
                plain_config(target_modules=["o_proj"]),
                {key.replace("q_proj", "o_proj"): tensor for key, tensor in tensors.items()},
            ),
            write(
                tmp_path / "swapped",
                None,
                dict(
                    zip(
                        tensors,
                        [*list(tensors.values())[2:4], *list(tensors.values())[:2], *list(tensors.values())[4:]],
                        strict=True,
                    )
                ),
            ),
        ]
        assert len({self.version(folder) for folder in folders}) == len(folders)

    def test_every_byte_counts(self, tmp_path: Path) -> None:
        data = container(plain_tensors())
        start = 8 + int.from_bytes(data[:8], "little")
        seen = {self.version(write(tmp_path / "a"))}
        for number, position in enumerate(np.linspace(start, len(data) - 1, 25).astype(int)):
            changed = bytearray(data)
            changed[position] ^= 1
            seen.add(self.version(write(tmp_path / str(number), None, bytes(changed))))
        assert len(seen) == 26
