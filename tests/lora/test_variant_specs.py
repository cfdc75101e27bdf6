"""What is understood of DoRA, trained biases and fused modules, and that all of it counts for the content hash."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from raw_adapters import GEOMETRY, HIDDEN, INTER, KV, PREFIX, Q0, Tensor, lora, plain_config, write

from loraserve.errors import AdapterRefused
from loraserve.lora.container import TensorReader
from loraserve.lora.format import parse_adapter
from loraserve.lora.spec import BaseGeometry
from loraserve.lora.version import content_version

QKV = "model.layers.0.self_attn.qkv_proj"
GATE_UP = "model.layers.1.mlp.gate_up_proj"
FUSED = {
    f"{PREFIX}{QKV}.lora_A.weight": Tensor((4, HIDDEN), "F32", 1),
    f"{PREFIX}{QKV}.lora_B.weight": Tensor((HIDDEN + 2 * KV, 4), "F32", 2),
    f"{PREFIX}{QKV}.lora_magnitude_vector": Tensor((HIDDEN + 2 * KV,), "F32", 3),
    f"{PREFIX}{GATE_UP}.lora_A.weight": Tensor((4, HIDDEN), "F32", 4),
    f"{PREFIX}{GATE_UP}.lora_B.weight": Tensor((2 * INTER, 4), "F32", 5),
    f"{PREFIX}{GATE_UP}.lora_magnitude_vector": Tensor((2 * INTER,), "F32", 6),
}
FUSED_CONFIG = plain_config(use_dora=True, target_modules=["qkv_proj", "gate_up_proj"])


def with_biases() -> BaseGeometry:
    targets = tuple(dataclasses.replace(target, has_bias=target.kind in "qkv") for target in GEOMETRY.targets)
    return dataclasses.replace(GEOMETRY, targets=targets)


def test_a_fused_module_becomes_its_parts(tmp_path: Path) -> None:
    spec = parse_adapter(write(tmp_path, FUSED_CONFIG, FUSED), GEOMETRY, 64)
    assert [(t.kind, t.layer) for t in spec.targets] == [("q", 0), ("k", 0), ("v", 0), ("gate", 1), ("up", 1)]
    assert {"fused", "dora"} <= set(spec.features)
    assert spec.num_parameters == sum(int(np.prod(tensor.shape)) for tensor in FUSED.values())
    with TensorReader(tmp_path) as reader:
        for module, kinds in ((QKV, "qkv"), (GATE_UP, ("gate", "up"))):
            parts = [target for target in spec.targets if target.kind in kinds]
            assert len({target.a for target in parts}) == 1
            for name, refs in (
                ("lora_B.weight", [target.b for target in parts]),
                ("lora_magnitude_vector", [target.magnitude for target in parts]),
            ):
                whole = FUSED[f"{PREFIX}{module}.{name}"].data
                assert b"".join(reader.read(ref).tobytes() for ref in refs if ref is not None) == whole


def test_a_fused_adapter_has_the_version_of_the_same_adapter_split(tmp_path: Path) -> None:
    fused = write(tmp_path / "fused", FUSED_CONFIG, FUSED)
    spec = parse_adapter(fused, GEOMETRY, 64)
    split: dict[str, Tensor] = {}
    with TensorReader(fused) as reader:
        for target in spec.targets:
            for name, ref in (
                ("lora_A.weight", target.a),
                ("lora_B.weight", target.b),
                ("lora_magnitude_vector", target.magnitude),
            ):
                assert ref is not None
                tensor = Tensor(ref.shape)
                tensor.data = reader.read(ref).tobytes()
                split[f"{PREFIX}{target.module}.{name}"] = tensor
    names = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    other = write(tmp_path / "split", plain_config(use_dora=True, target_modules=names), split)
    assert content_version(parse_adapter(other, GEOMETRY, 64), other) == content_version(spec, fused)


@pytest.mark.parametrize(
    ("tensors", "geometry", "code"),
    [
        (FUSED, None, "unknown_module"),
        (FUSED | {f"{PREFIX}{QKV}.lora_B.weight": Tensor((HIDDEN + KV, 4))}, GEOMETRY, "shape_mismatch"),
        (FUSED | {f"{PREFIX}{QKV}.lora_magnitude_vector": Tensor((HIDDEN,))}, GEOMETRY, "shape_mismatch"),
        (
            FUSED | lora(Q0) | {f"{PREFIX}{Q0}.lora_magnitude_vector": Tensor((HIDDEN,))},
            GEOMETRY,
            "unknown_tensor",
        ),
        ({name.replace("layers.0", "layers.7"): tensor for name, tensor in FUSED.items()}, GEOMETRY, "unknown_module"),
    ],
)
def test_fused_modules_that_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], geometry: BaseGeometry | None, code: str
) -> None:
    config = plain_config(use_dora=True, target_modules=["qkv_proj", "gate_up_proj", "q_proj"])
    with pytest.raises(AdapterRefused) as caught:
        parse_adapter(write(tmp_path, config, tensors), geometry, 64)
    assert caught.value.code == code


def test_every_vector_counts_for_the_version(tmp_path: Path) -> None:
    versions = set()
    for number, (config, extra) in enumerate(
        [
            ({}, {}),
            ({"use_dora": True}, {"lora_magnitude_vector": 1}),
            ({"use_dora": True}, {"lora_magnitude_vector": 2}),
            ({"lora_bias": True}, {"lora_B.bias": 1}),
            ({"bias": "all"}, {"base_layer.bias": 1}),
            ({"bias": "lora_only"}, {"base_layer.bias": 2}),
        ]
    ):
        tensors = lora(Q0) | {f"{PREFIX}{Q0}.{name}": Tensor((HIDDEN,), "F32", seed) for name, seed in extra.items()}
        folder = write(tmp_path / str(number), plain_config(**config), tensors)
        spec = parse_adapter(folder, with_biases(), 64)
        assert spec.num_parameters == 8 * HIDDEN + HIDDEN * len(extra)
        versions.add(content_version(spec, folder))
    assert len(versions) == 6


def test_a_bias_alone_makes_a_module_of_rank_zero(tmp_path: Path) -> None:
    k0 = Q0.replace("q_proj", "k_proj")
    tensors = lora(Q0) | {f"{PREFIX}{k0}.bias": Tensor((KV,))}
    spec = parse_adapter(write(tmp_path, plain_config(bias="all"), tensors), with_biases(), 64)
    q, k = spec.targets
    assert (q.rank, q.extra_rows) == (4, 0)
    assert (k.kind, k.rank, k.extra_rows, k.a, k.b) == ("k", 0, 2, None, None)
    assert spec.scalings == (2.0,)
    assert "bias" in spec.features


def test_an_activated_adapter_says_where_it_begins(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain")
    folder = write(tmp_path / "activated", plain_config(alora_invocation_tokens=[5, 6]))
    spec, other = parse_adapter(folder, GEOMETRY, 64), parse_adapter(plain, GEOMETRY, 64)
    assert spec.invocation == (5, 6)
    assert "alora" in spec.features
    assert content_version(spec, folder) != content_version(other, plain)
    for prompt, start in (
        ([5, 6], 0),
        ([1, 5, 6, 5, 6, 2], 3),
        ([5, 5, 6], 1),
        ([6, 5], None),
        ([5], None),
        ([], None),
    ):
        assert spec.first_token(prompt) == start
        assert other.first_token(prompt) == 0
