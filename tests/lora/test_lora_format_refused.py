"""Malformed and unsupported adapters: each is refused with its code, quickly, whatever it claims."""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from raw_adapters import (
    GEOMETRY,
    HIDDEN,
    INTER,
    KV,
    PREFIX,
    Q0,
    VOCAB,
    Tensor,
    container,
    lora,
    plain_config,
    plain_tensors,
    raw_container,
    write,
)

from loraserve.errors import AdapterRefused
from loraserve.lora.format import parse_adapter

Q0_A, Q0_B = f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Build = Callable[[Path], object]


class Bomb:
    """Leaves a mark if it is ever unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, ("pickle-ran",))


def config(**changes: object) -> Build:
    return lambda folder: write(folder, plain_config(**changes))


def config_text(text: str | bytes) -> Build:
    return lambda folder: write(folder, text)


def config_json(old: str, new: str) -> Build:
    return lambda folder: write(folder, json.dumps(plain_config()).replace(old, new))


def weights(data: bytes | dict[str, Tensor], **changes: object) -> Build:
    return lambda folder: write(folder, plain_config(**changes), data)


def extra(name: str, shape: tuple[int, ...] = (4,), **changes: object) -> Build:
    return weights(plain_tensors() | {name: Tensor(shape)}, **changes)


def header(**tensors: object) -> Build:
    return weights(raw_container({"__metadata__": {}} | tensors, bytes(64)))


def entry(dtype: object = "F32", shape: object = (4, 4), offsets: object = (0, 64)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def instead_of(name: str, make: Callable[[Path], object]) -> Build:
    def build(folder: Path) -> None:
        write(folder)
        (folder / name).unlink()
        make(folder / name)

    return build


def only(*names: str, data: bytes = b"x") -> Build:
    return lambda folder: [(folder / name).write_bytes(data) for name in names]


def shards(weight_map: object, *names: str) -> Build:
    def build(folder: Path) -> None:
        tensors = list(plain_tensors().items())
        for position, name in enumerate(names):
            write(folder, weights=dict(tensors[position * 2 : position * 2 + 2]), name=name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return build


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may be only 108 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def blocks(a: object = None, b: object = None, n: object = 2, **more: object) -> dict[str, object]:
    return {"target_modules_bd_a": a, "target_modules_bd_b": b, "nblocks": n} | more


valid = container(plain_tensors())
EMBED = {
    f"{PREFIX}model.embed_tokens.lora_embedding_A": Tensor((4, VOCAB)),
    f"{PREFIX}model.embed_tokens.lora_embedding_B": Tensor((HIDDEN, 4)),
}
one = {Q0_A: Tensor((4, HIDDEN)), Q0_B: Tensor((HIDDEN, 4))}
S1, S2 = "adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"

CASES: dict[str, tuple[str, Build]] = {
    # files: kind, size, path, presence, format
    "empty-folder": ("not_an_adapter", lambda folder: None),
    "full-model": ("not_an_adapter", only("config.json", "model.safetensors")),
    "no-config": ("missing_config", lambda folder: (write(folder) / CONFIG).unlink()),
    "no-weights": ("missing_weights", lambda folder: (write(folder) / WEIGHTS).unlink()),
    "weights-fifo": ("missing_weights", instead_of(WEIGHTS, os.mkfifo)),
    "weights-folder": ("missing_weights", instead_of(WEIGHTS, os.mkdir)),
    "weights-socket": ("missing_weights", instead_of(WEIGHTS, make_socket)),
    "config-fifo": ("missing_config", instead_of(CONFIG, os.mkfifo)),
    "config-folder": ("missing_config", instead_of(CONFIG, os.mkdir)),
    "weights-device-link": ("path_escape", instead_of(WEIGHTS, lambda path: path.symlink_to("/dev/zero"))),
    "config-device-link": ("path_escape", instead_of(CONFIG, lambda path: path.symlink_to("/dev/urandom"))),
    "config-link-out": ("path_escape", instead_of(CONFIG, lambda path: path.symlink_to("/etc/hostname"))),
    "weights-dangling-link": ("missing_weights", instead_of(WEIGHTS, lambda path: path.symlink_to("nowhere"))),
    "weights-link-loop": ("missing_weights", instead_of(WEIGHTS, lambda path: path.symlink_to(WEIGHTS))),
    "config-2MiB": ("config_too_large", config_text(b" " * (2 << 20))),
    "bin-only": ("unsafe_pickle", only(CONFIG, "adapter_model.bin", data=pickle.dumps(Bomb()))),
    "pickle-inside": ("unsafe_pickle", weights(pickle.dumps(Bomb(), protocol=4))),
    "pickle-2-inside": ("unsafe_pickle", weights(pickle.dumps(Bomb(), protocol=2))),
    "zip-inside": ("unsafe_pickle", weights(b"PK\x03\x04" + bytes(100))),
    "html": ("corrupt_weights", weights(b"<!DOCTYPE html><html>404</html>")),
    "html-upper": ("corrupt_weights", weights(b"\n <HTML><body>login</body></HTML>")),
    "lfs-pointer": ("corrupt_weights", weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")),
    "gguf": ("unsupported_format", weights(b"GGUF\x03\0\0\0" + bytes(50))),
    "torchtune-files": ("unsupported_format", only(CONFIG, "adapter_0.pt")),
    "nemo-file": ("unsupported_format", only("lora.nemo")),
    "kohya-keys": ("unsupported_format", weights({"lora_te_text_model_q_proj.lora_down.weight": Tensor((4, 8))})),
    "nemo-keys": (
        "unsupported_format",
        weights({"model.decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight": Tensor((4, 8))}),
    ),
    "torchtune-keys": ("unsupported_format", weights({"layers.0.attn.q_proj.lora_a.weight": Tensor((4, 8))})),
    "mlx-config-peft-weights": ("unsupported_format", config_text('{"lora_parameters": {"rank": 4, "scale": 2}}')),
    "shards-no-index": ("missing_weights", lambda folder: write(folder, name=S1)),
    "shard-missing": ("missing_weights", shards({Q0_A: S1, Q0_B: S2}, S1)),
    "shard-elsewhere": ("path_escape", shards({Q0_A: "../" + S1}, S1)),
    "shard-strange": ("corrupt_weights", shards({Q0_A: "optimizer.pt"}, S1)),
    "index-incomplete": ("corrupt_weights", shards({Q0_A: S1}, S1)),
    "index-not-a-map": ("corrupt_weights", shards([Q0_A], S1)),
    # container
    "empty-file": ("corrupt_weights", weights(b"")),
    "seven-bytes": ("corrupt_weights", weights(b"1234567")),
    "header-longer-than-file": ("corrupt_weights", weights((1 << 20).to_bytes(8, "little") + b"{}")),
    "header-2**63": ("corrupt_weights", weights((2**63).to_bytes(8, "little") + b"{" + bytes(100))),
    "header-not-json": ("corrupt_weights", weights(raw_container("{nonsense"))),
    "header-list": ("corrupt_weights", weights(raw_container("[1]"))),
    "header-not-utf8": ("corrupt_weights", weights(raw_container(b'{"\xff\xfe": 1}'))),
    "header-deep": ("corrupt_weights", weights(raw_container('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"))),
    "header-duplicate": ("corrupt_weights", weights(raw_container(f'{{"a":{json.dumps(entry())},"a":1}}', bytes(64)))),
    "header-nan": ("corrupt_weights", weights(raw_container('{"a": NaN}'))),
    "metadata-not-strings": ("corrupt_weights", weights(raw_container({"__metadata__": {"a": 1}}))),
    "entry-not-object": ("corrupt_weights", header(a=5)),
    "entry-lacks-shape": ("corrupt_weights", header(a={"dtype": "F32", "data_offsets": [0, 64]})),
    "entry-extra-field": ("corrupt_weights", header(a=entry() | {"stride": 1})),
    "dtype-not-string": ("corrupt_weights", header(a=entry(dtype=4))),
    "shape-negative": ("corrupt_weights", header(a=entry(shape=[-4, -4]))),
    "shape-bool": ("corrupt_weights", header(a=entry(shape=[True, 16]))),
    "shape-float": ("corrupt_weights", header(a=entry(shape=[4.0, 4]))),
    "shape-too-many": ("corrupt_weights", header(a=entry(shape=[1] * 9 + [16]))),
    "shape-lies": ("corrupt_weights", header(a=entry(shape=[4, 5]))),
    "shape-huge": ("corrupt_weights", header(a=entry(shape=[2**62, 2**62]))),
    "offsets-reversed": ("corrupt_weights", header(a=entry(offsets=[64, 0]))),
    "offsets-beyond": ("corrupt_weights", header(a=entry(shape=[32], offsets=[0, 128]))),
    "overlap": ("corrupt_weights", header(a=entry(), b=entry(shape=[8], offsets=[32, 64]))),
    "gap": ("corrupt_weights", header(a=entry(shape=[8], offsets=[32, 64]))),
    "trailing-bytes": ("corrupt_weights", weights(valid + b"more")),
    "cut-short": ("corrupt_weights", weights(valid[:-4])),
    "cut-in-header": ("corrupt_weights", weights(valid[:40])),
    # config: syntax, types, limits
    "config-empty": ("invalid_config", config_text("")),
    "config-not-json": ("invalid_config", config_text("{'r': 8}")),
    "config-list": ("invalid_config", config_text("[]")),
    "config-lfs-pointer": ("invalid_config", config_text("version https://git-lfs.github.com/spec/v1")),
    "config-utf16": ("invalid_config", config_text(json.dumps(plain_config()).encode("utf-16"))),
    "config-deep": ("invalid_config", config_text('{"a":' * 50_000 + "1" + "}" * 50_000)),
    "config-deep-17": (
        "invalid_config",
        config_json('"bias": "none"', '"eva_config":' + '{"a":' * 17 + "1" + "}" * 17),
    ),
    "config-duplicate": ("invalid_config", config_json('"r": 4', '"r": 4, "r": 8')),
    "config-alpha-nan": ("invalid_config", config_json('"lora_alpha": 8', '"lora_alpha": NaN')),
    "config-alpha-inf": ("invalid_config", config_json('"lora_alpha": 8', '"lora_alpha": -Infinity')),
    "config-alpha-1e999": ("invalid_config", config_json('"lora_alpha": 8', '"lora_alpha": 1e999')),
    "config-alpha-1e308": ("invalid_config", config_json('"lora_alpha": 8', '"lora_alpha": 1e308')),
    "config-alpha-digits": ("invalid_config", config_json('"lora_alpha": 8', '"lora_alpha": ' + "9" * 5000)),
    "config-alpha-text": ("invalid_config", config(lora_alpha="8")),
    "config-alpha-bool": ("invalid_config", config(lora_alpha=True)),
    "config-alpha-null": ("invalid_config", config(lora_alpha=None)),
    "config-r-zero": ("invalid_config", config(r=0)),
    "config-r-negative": ("invalid_config", config(r=-4)),
    "config-r-float": ("invalid_config", config(r=4.0)),
    "config-r-bool": ("invalid_config", config(r=True)),
    "config-r-text": ("invalid_config", config(r="4")),
    "config-r-null": ("invalid_config", config(r=None)),
    "config-rslora-text": ("invalid_config", config(use_rslora="false")),
    "config-rslora-int": ("invalid_config", config(use_rslora=1)),
    "config-pattern-list": ("invalid_config", config(rank_pattern=["q_proj"])),
    "config-pattern-zero": ("invalid_config", config(rank_pattern={"q_proj": 0})),
    "config-pattern-float": ("invalid_config", config(rank_pattern={"q_proj": 4.0})),
    "config-pattern-text": ("invalid_config", config(alpha_pattern={"q_proj": "8"})),
    "config-pattern-redos": ("invalid_config", config(rank_pattern={"(?:(?:[a-z._0-9]?){999}){999}[A-Z]": 4})),
    "config-pattern-lookahead": ("invalid_config", config(rank_pattern={"(?=(.+)+$)q_proj": 4})),
    "config-pattern-broken": ("invalid_config", config(alpha_pattern={"(q_proj": 4})),
    "config-pattern-long": ("invalid_config", config(alpha_pattern={"q" * 5000: 4})),
    "config-pattern-alpha-huge": ("invalid_config", config(alpha_pattern={"q_proj": 1e300})),
    "config-targets-int": ("invalid_config", config(target_modules=5)),
    "config-bias-word": ("invalid_config", config(bias="some")),
    "config-no-peft-type": ("invalid_config", config(peft_type=...)),
    "config-peft-type-int": ("invalid_config", config(peft_type=1)),
    # feature: type, variant, initialisation, task
    "peft-type-ia3": ("unsupported_peft_type", config(peft_type="IA3")),
    "peft-type-lower": ("unsupported_peft_type", config(peft_type="lora")),
    "dora-and-lora-bias": ("unsupported_variant", config(use_dora=True, lora_bias=True)),
    "modules-to-save": ("missing_tensors", config(modules_to_save=["embed_tokens"])),
    "token-rows": ("missing_tensors", config(trainable_token_indices=[1, 2])),
    "token-rows-dict": ("missing_tensors", config(trainable_token_indices={"embed_tokens": [1]})),
    "target-parameters": ("unsupported_variant", config(target_parameters=["mlp.experts.gate_up_proj"])),
    "layer-replication": ("unsupported_variant", config(layer_replication=[[0, 2], [1, 3]])),
    "qalora": ("unsupported_variant", config(use_qalora=True)),
    "bdlora-true": ("invalid_config", config(use_bdlora=True)),
    "bdlora-list": ("invalid_config", config(use_bdlora=["q_proj"])),
    "bdlora-no-blocks": ("invalid_config", config(use_bdlora=blocks(b=["q_proj"], n=0))),
    "bdlora-blocks-text": ("invalid_config", config(use_bdlora=blocks(b=["q_proj"], n="2"))),
    "bdlora-blocks-huge": ("invalid_config", config(use_bdlora=blocks(b=["q_proj"], n=2**40))),
    "bdlora-more-blocks-than-rank": ("rank_mismatch", config(use_bdlora=blocks(b=["q_proj"], n=2**30))),
    "bdlora-pattern-text": ("invalid_config", config(use_bdlora=blocks(b="q_proj"))),
    "bdlora-too-many-patterns": ("invalid_config", config(use_bdlora=blocks(b=["x"] * 2000))),
    "bdlora-strict-text": ("invalid_config", config(use_bdlora=blocks(b=["q_proj"], match_strict="no"))),
    "bdlora-overlap": ("invalid_config", config(use_bdlora=blocks(a=["q_proj"], b=["q_proj"]))),
    "bdlora-both-factors": ("invalid_config", config(use_bdlora=blocks(a=["q_proj"], b=["self_attn"]))),
    "bdlora-unknown-part": ("unsupported_variant", config(use_bdlora=blocks(b=["q_proj"], shuffled=True))),
    "bdlora-empty": ("config_tensor_mismatch", config(use_bdlora={})),
    "bdlora-strict": ("config_tensor_mismatch", config(use_bdlora=blocks(b=["k_proj"]))),
    "bdlora-b-is-whole": ("rank_mismatch", config(use_bdlora=blocks(b=["q_proj"]))),
    "bdlora-a-is-whole": ("shape_mismatch", config(use_bdlora=blocks(a=["q_proj"]))),
    "bdlora-uneven-rank": ("rank_mismatch", config(use_bdlora=blocks(a=["q_proj"], n=3))),
    "bdlora-uneven-width": (
        "shape_mismatch",
        weights({Q0_A: Tensor((6, HIDDEN)), Q0_B: Tensor((HIDDEN, 2))}, r=6, use_bdlora=blocks(b=["q_proj"], n=3)),
    ),
    "bdlora-bias-of-blocks": (
        "config_tensor_mismatch",
        weights(
            {Q0_A: Tensor((4, HIDDEN)), Q0_B: Tensor((HIDDEN, 2)), f"{PREFIX}{Q0}.lora_B.bias": Tensor((HIDDEN,))},
            lora_bias=True,
            use_bdlora=blocks(b=["q_proj"]),
        ),
    ),
    "bdlora-dora": ("unsupported_variant", config(use_bdlora=blocks(b=["q_proj"]), use_dora=True)),
    "bdlora-alora": ("unsupported_variant", config(use_bdlora=blocks(b=["q_proj"]), alora_invocation_tokens=[5])),
    "bdlora-embed": (
        "unsupported_variant",
        weights(EMBED, target_modules=["embed_tokens"], use_bdlora=blocks(b=["q_proj"], match_strict=False)),
    ),
    "lora-bias-embed": ("unsupported_variant", weights(EMBED, target_modules=["embed_tokens"], lora_bias=True)),
    "alora-dora": ("unsupported_variant", config(alora_invocation_tokens=[5, 6], use_dora=True)),
    "alora-bias": ("unsupported_variant", config(alora_invocation_tokens=[5, 6], bias="all")),
    "alora-beyond-the-vocabulary": ("invalid_config", config(alora_invocation_tokens=[5, VOCAB])),
    "alora-negative": ("invalid_config", config(alora_invocation_tokens=[-1])),
    "alora-empty": ("unsupported_variant", config(alora_invocation_tokens=[])),
    "kasa": ("unsupported_variant", config(kasa_config={})),
    "arrow": ("unsupported_variant", config(arrow_config={"top_k": 3})),
    "velora": ("unsupported_variant", config(velora_config={"num_groups": 2})),
    "monteclora": ("unsupported_variant", config(monteclora_config={"num_samples": 2})),
    "megatron": ("unsupported_variant", config(megatron_config={"x": 1})),
    "unknown-field": ("unsupported_variant", config(use_superlora=True)),
    "unknown-field-zero": ("unsupported_variant", config(superlora_depth=0)),
    "init-pissa": ("unsupported_init", config(init_lora_weights="pissa_niter_16")),
    "init-olora": ("unsupported_init", config(init_lora_weights="olora")),
    "init-corda": ("unsupported_init", config(init_lora_weights="corda")),
    "init-loftq": ("unsupported_init", config(init_lora_weights="loftq", loftq_config={"loftq_bits": 4})),
    "init-lora-ga": ("unsupported_init", config(init_lora_weights="lora_ga")),
    "init-unknown": ("unsupported_init", config(init_lora_weights="newest")),
    "head-tensor": ("unsupported_task", extra(PREFIX + "score.weight", (2, HIDDEN))),
    "head-saved": (
        "unsupported_task",
        extra(PREFIX + "score.weight", (2, HIDDEN), task_type="SEQ_CLS", modules_to_save=["classifier", "score"]),
    ),
    # dtypes
    "int8": ("unsupported_dtype", weights(one | {Q0_A: Tensor((4, HIDDEN), "I8")})),
    "fp8": ("unsupported_dtype", weights(one | {Q0_B: Tensor((HIDDEN, 4), "F8_E4M3")})),
    "dtype-invented": ("unsupported_dtype", header(a=entry(dtype="F31"))),
    # names
    "no-tensors": ("no_lora_tensors", weights(container({}))),
    "base-tensors-only": ("no_lora_tensors", weights({"model.layers.0.self_attn.q_proj.weight": Tensor((4, 4))})),
    "wrong-prefix": ("unknown_module", weights(plain_tensors(prefix="base_model.model.transformer."))),
    "bare-layers": ("unknown_module", weights(lora("layers.0.self_attn.q_proj"))),
    "vision-tower": ("unknown_module", extra(PREFIX + "model.visual.blocks.0.mlp.linear_fc1.lora_A.weight", (4, 8))),
    "fused-module-of-other-sizes": (
        "shape_mismatch",
        weights(lora("model.layers.0.self_attn.qkv_proj"), target_modules=["qkv_proj"]),
    ),
    "layer-too-high": ("unknown_module", weights(plain_tensors() | lora("model.layers.3.self_attn.q_proj"))),
    "layer-absurd": ("unknown_module", weights(lora(f"model.layers.{'9' * 3000}.self_attn.q_proj"))),
    "layer-leading-zero": ("unknown_module", weights(lora("model.layers.00.self_attn.q_proj"))),
    "layer-negative": ("unknown_module", weights(lora("model.layers.-1.self_attn.q_proj"))),
    "layer-other-digits": ("unknown_module", weights(lora("model.layers.١.self_attn.q_proj"))),
    "experts": ("unknown_module", weights(lora("model.layers.0.mlp.experts.0.gate_proj"))),
    "other-adapter-name": ("unknown_tensor", weights({f"{PREFIX}{Q0}.lora_A.mine.weight": Tensor((4, HIDDEN))} | one)),
    "second-spelling": ("unknown_tensor", weights(one | {Q0 + ".lora_A.default.weight": Tensor((4, HIDDEN))})),
    "halves-spelled-apart": (
        "unknown_tensor",
        weights({Q0_A: one[Q0_A], Q0_B.replace("model.layers", "model.language_model.layers"): one[Q0_B]}),
    ),
    "linear-lora-on-embedding": ("unknown_tensor", weights(lora("model.embed_tokens", kind="embed"))),
    "embedding-lora-on-linear": ("unknown_tensor", extra(f"{PREFIX}{Q0}.lora_embedding_A", (4, HIDDEN))),
    "adalora-e": ("unknown_tensor", extra(f"{PREFIX}{Q0}.lora_E", (4, 1))),
    "kasa-diag": ("unknown_tensor", extra(f"{PREFIX}{Q0}.lora_diag", (4,))),
    "norm-weight": ("unknown_tensor", extra(PREFIX + "model.norm.weight", (HIDDEN,))),
    "surrogate-name": (
        "unknown_tensor",
        weights(
            raw_container(
                '{"a.lora_A.weight\\ud800":'
                + json.dumps(entry())
                + f',"{Q0_A}":'
                + json.dumps(entry(offsets=(64, 128)))
                + "}",
                bytes(128),
            )
        ),
    ),
    "magnitude-without-dora": ("config_tensor_mismatch", extra(f"{PREFIX}{Q0}.lora_magnitude_vector", (HIDDEN,))),
    "bias-unannounced": ("config_tensor_mismatch", extra(f"{PREFIX}{Q0}.base_layer.bias", (HIDDEN,))),
    "bias-without-a-base-bias": ("unknown_tensor", extra(f"{PREFIX}{Q0}.base_layer.bias", (HIDDEN,), bias="all")),
    "bias-twice": (
        "unknown_tensor",
        weights(
            one | {f"{PREFIX}{Q0}.base_layer.bias": Tensor((HIDDEN,)), f"{PREFIX}{Q0}.bias": Tensor((HIDDEN,))},
            bias="all",
        ),
    ),
    "bias-of-no-module": ("unknown_module", extra(PREFIX + "model.layers.0.mlp.gate.bias", (HIDDEN,), bias="all")),
    "dora-without-magnitudes": ("missing_tensors", config(use_dora=True)),
    "dora-magnitude-alone": (
        "missing_tensors",
        weights(one | {f"{PREFIX}{Q0[:-6]}k_proj.lora_magnitude_vector": Tensor((KV,))}, use_dora=True),
    ),
    "dora-magnitude-misshapen": (
        "shape_mismatch",
        weights(one | {f"{PREFIX}{Q0}.lora_magnitude_vector": Tensor((HIDDEN + 1,))}, use_dora=True),
    ),
    "dora-magnitude-empty": (
        "zero_size",
        weights(one | {f"{PREFIX}{Q0}.lora_magnitude_vector": Tensor((0,))}, use_dora=True),
    ),
    "dora-magnitude-square": (
        "shape_mismatch",
        weights(one | {f"{PREFIX}{Q0}.lora_magnitude_vector": Tensor((HIDDEN, 1))}, use_dora=True),
    ),
    "lora-bias-missing": ("missing_tensors", config(lora_bias=True)),
    "lora-bias-misshapen": (
        "shape_mismatch",
        weights(one | {f"{PREFIX}{Q0}.lora_B.bias": Tensor((1,))}, lora_bias=True),
    ),
    "lora-bias-unannounced": ("config_tensor_mismatch", extra(f"{PREFIX}{Q0}.lora_B.bias", (HIDDEN,))),
    "token-rows-unannounced": (
        "config_tensor_mismatch",
        extra(PREFIX + "model.embed_tokens.token_adapter.trainable_tokens_delta", (1, HIDDEN)),
    ),
    "not-targeted": ("config_tensor_mismatch", config(target_modules=["v_proj"])),
    "not-targeted-suffix": ("config_tensor_mismatch", config(target_modules=["proj"])),
    "excluded": ("config_tensor_mismatch", config(exclude_modules=["layers.1.self_attn.q_proj"])),
    "layers-left-out": ("config_tensor_mismatch", config(layers_to_transform=[0, 1])),
    "resized-embedding": ("shape_mismatch", extra(PREFIX + "model.embed_tokens.weight", (VOCAB + 2, HIDDEN))),
    "base-matrix": ("unsupported_variant", extra(PREFIX + "lm_head.base_layer.weight", (VOCAB, HIDDEN))),
    # pairs, ranks, shapes
    "orphan-a": ("missing_tensors", weights({Q0_A: one[Q0_A]})),
    "orphan-b": ("missing_tensors", weights({Q0_B: one[Q0_B]})),
    "size-zero": ("zero_size", weights({Q0_A: Tensor((0,)), Q0_B: Tensor((0,))})),
    "size-zero-2d": ("zero_size", weights({Q0_A: Tensor((4, 0)), Q0_B: Tensor((HIDDEN, 4))})),
    "one-dimensional": ("zero_size", weights({Q0_A: Tensor((4 * HIDDEN,)), Q0_B: Tensor((4 * HIDDEN,))})),
    "three-dimensional": ("shape_mismatch", weights(one | {Q0_A: Tensor((4, HIDDEN, 1))})),
    "rank-declared-wrong": ("rank_mismatch", config(r=8)),
    "rank-declared-huge": ("rank_mismatch", config(r=10**9)),
    "rank-pattern-wrong": ("rank_mismatch", config(rank_pattern={"layers.1.self_attn.q_proj": 2})),
    "rank-a-not-b": ("rank_mismatch", weights(one | {Q0_B: Tensor((HIDDEN, 8))})),
    "transposed": ("rank_mismatch", weights({Q0_A: Tensor((HIDDEN, 4)), Q0_B: Tensor((4, HIDDEN))})),
    "rank-above-maximum": ("rank_too_large", weights(plain_tensors(rank=65), r=65)),
    "wrong-base": ("shape_mismatch", weights(lora(Q0, kind="down"))),
    "wrong-base-out": ("shape_mismatch", weights({Q0_A: Tensor((4, HIDDEN)), Q0_B: Tensor((KV, 4))})),
    "wrong-vocabulary": (
        "shape_mismatch",
        weights(
            {
                PREFIX + "model.embed_tokens.lora_embedding_A": Tensor((4, VOCAB + 1)),
                PREFIX + "model.embed_tokens.lora_embedding_B": Tensor((HIDDEN, 4)),
            },
            target_modules=["embed_tokens"],
        ),
    ),
    "wrong-intermediate": (
        "shape_mismatch",
        weights(
            {
                f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight": Tensor((4, HIDDEN)),
                f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.weight": Tensor((INTER + 1, 4)),
            },
            target_modules=["up_proj"],
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_with_its_code(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, build = CASES[case]
    folder = tmp_path / "adapter"
    folder.mkdir()
    build(folder)
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    with pytest.raises(AdapterRefused) as caught:
        parse_adapter(folder, GEOMETRY, 64)
    assert time.monotonic() - begin < 5
    assert caught.value.code == code, caught.value.message
    assert caught.value.http_status == (403 if code == "path_escape" else 400)
    message = caught.value.message
    assert message.isprintable()
    assert len(message) < 700
    assert str(tmp_path) not in message
    assert not (tmp_path / "pickle-ran").exists()


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize(
    ("config", "tensors", "code"),
    [
        # Each stage's failure hides those of the stages after it.
        (b"{", b"", "corrupt_weights"),
        (plain_config(r="4", use_dora=True), {Q0_A: Tensor((4, HIDDEN), "I8")}, "invalid_config"),
        (plain_config(use_qalora=True), {Q0_A: Tensor((4, HIDDEN), "I8")}, "unsupported_variant"),
        (plain_config(), {"x.lora_A.weight": Tensor((4, HIDDEN), "I8")}, "unsupported_dtype"),
        (plain_config(), {"x.lora_A.weight": Tensor((0,))}, "unknown_module"),
        (plain_config(), {Q0_A: Tensor((0,))}, "missing_tensors"),
        (plain_config(r=8), {Q0_A: Tensor((4, HIDDEN + 1)), Q0_B: Tensor((HIDDEN, 4))}, "rank_mismatch"),
        (plain_config(), {Q0_A: Tensor((4, HIDDEN + 1)), Q0_B: Tensor((HIDDEN, 4))}, "shape_mismatch"),
    ],
)
def test_the_first_failing_stage_names_the_code(
    config: dict[str, object] | bytes, tensors: dict[str, Tensor] | bytes, code: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterRefused) as caught:
        parse_adapter(write(tmp_path, config, tensors), GEOMETRY, 64)
    assert caught.value.code == code


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "absent"):
        with pytest.raises(AdapterRefused) as caught:
            parse_adapter(path, GEOMETRY, 64)
        assert caught.value.code == "not_an_adapter"
