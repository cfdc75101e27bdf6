"""Gain and shift: what staging computes for DoRA and trained biases, and how the pool keeps them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from raw_adapters import GEOMETRY, HIDDEN, KV, PREFIX, Q0, Tensor, lora, plain_config, write
from tiny_adapters import make_pool

from loraserve.errors import AdapterRefused
from loraserve.kernels.metadata import Kind
from loraserve.kernels.reference import slot_affine, slot_factors
from loraserve.lora.format import parse_adapter
from loraserve.lora.spec import AdapterSpec
from loraserve.lora.weights import stage, staged_bytes

K0 = Q0.replace("q_proj", "k_proj")


class RandomBase:
    """A base of random weights whose row 3 of q is zero if asked for."""

    def __init__(self, zero_row: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(HIDDEN, HIDDEN, generator=generator)
        self.own_bias = torch.randn(HIDDEN, generator=generator)
        if zero_row:
            self.weight[3] = 0

    def rows(self, kind: Kind, layer: int, begin: int, end: int) -> torch.Tensor:
        assert (kind, layer) == (Kind.Q, 0)
        return self.weight[begin:end].clone()

    def bias(self, kind: Kind, layer: int) -> torch.Tensor | None:
        return self.own_bias[: HIDDEN if kind is Kind.Q else KV].clone()


def tensor_of(raw: Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw.data), dtype=torch.float32).view(raw.shape)


def adapter(folder: Path) -> tuple[AdapterSpec, dict[str, torch.Tensor]]:
    """DoRA with a replaced bias on q of layer 0, and a replaced bias alone on its k."""
    tensors = lora(Q0) | {
        f"{PREFIX}{Q0}.lora_magnitude_vector": Tensor((HIDDEN,), seed=5),
        f"{PREFIX}{Q0}.base_layer.bias": Tensor((HIDDEN,), seed=6),
        f"{PREFIX}{K0}.bias": Tensor((KV,), seed=7),
    }
    biased = tuple(dataclasses.replace(target, has_bias=target.kind in "qkv") for target in GEOMETRY.targets)
    write(folder, plain_config(use_dora=True, bias="all"), tensors)
    spec = parse_adapter(folder, dataclasses.replace(GEOMETRY, targets=biased), 64)
    return spec, {name.removeprefix(PREFIX): tensor_of(raw) for name, raw in tensors.items()}


def test_gain_and_shift_follow_the_factors_in_the_pool(tmp_path: Path) -> None:
    spec, tensors = adapter(tmp_path)
    pool, base = make_pool(1 << 20), RandomBase()
    staged = stage(spec, tmp_path, pool.layout, torch.float32, base=base)
    assert staged.num_bytes == staged_bytes(spec, pool.layout, torch.float32)
    held = pool.reserve(staged)
    assert held is not None
    assert pool.tables.affine_slots == set()
    while not pool.write(held, 1000):
        pass
    pool.check()
    assert pool.tables.affine_slots == {held.slot}

    a, b = tensors[f"{Q0}.lora_A.weight"], 2.0 * tensors[f"{Q0}.lora_B.weight"]  # alpha 8, rank 4
    factor = tensors[f"{Q0}.lora_magnitude_vector"] / (base.weight + b @ a).norm(dim=1)
    q, k = pool.tables.targets[Kind.Q], pool.tables.targets[Kind.K]
    factors = slot_factors(q, 0, held.slot)
    assert factors is not None
    torch.testing.assert_close(factors[0], a)
    torch.testing.assert_close(factors[1], (factor[:, None] * b).T)
    rows = slot_affine(q, 0, held.slot)
    assert rows is not None
    torch.testing.assert_close(rows[0], factor - 1)
    torch.testing.assert_close(rows[1], tensors[f"{Q0}.base_layer.bias"] - factor * base.own_bias)
    rows = slot_affine(k, 0, held.slot)
    assert rows is not None
    assert slot_factors(k, 0, held.slot) is None
    torch.testing.assert_close(rows, torch.stack((torch.zeros(KV), tensors[f"{K0}.bias"] - base.own_bias[:KV])))
    assert slot_affine(q, 1, held.slot) is None

    pool.free(held.slot)
    pool.check()
    assert pool.tables.affine_slots == set()
    assert slot_affine(q, 0, held.slot) is None
    assert pool.stats().used_bytes == 0


def test_a_row_of_norm_zero_is_refused(tmp_path: Path) -> None:
    tensors = lora(Q0)
    b = tensor_of(tensors[f"{PREFIX}{Q0}.lora_B.weight"]).clone()
    b[3] = 0
    tensors[f"{PREFIX}{Q0}.lora_B.weight"].data = b.numpy().tobytes()
    tensors[f"{PREFIX}{Q0}.lora_magnitude_vector"] = Tensor((HIDDEN,))
    spec = parse_adapter(write(tmp_path, plain_config(use_dora=True), tensors), GEOMETRY, 64)
    with pytest.raises(AdapterRefused) as caught:
        stage(spec, tmp_path, make_pool(1 << 20).layout, torch.float32, base=RandomBase(zero_row=True))
    assert caught.value.code == "non_finite"


def test_without_the_bases_weights_it_is_refused(tmp_path: Path) -> None:
    spec, _ = adapter(tmp_path)
    with pytest.raises(AdapterRefused) as caught:
        stage(spec, tmp_path, make_pool(1 << 20).layout, torch.float32)
    assert caught.value.code == "unsupported_variant"
