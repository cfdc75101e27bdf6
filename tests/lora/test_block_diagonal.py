"""BD-LoRA: the blocks of a file become the block-diagonal factor, and one block is a plain matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from raw_adapters import GEOMETRY, HIDDEN, PREFIX, Q0, Tensor, lora, plain_config, write
from safetensors.torch import load_file
from tiny_adapters import SHAPES

from loraserve.lora.format import parse_adapter
from loraserve.lora.layout import PoolLayout
from loraserve.lora.spec import AdapterSpec, Blocks
from loraserve.lora.version import content_version
from loraserve.lora.weights import stage

A, B, BIAS = (f"{PREFIX}{Q0}.lora_{part}" for part in ("A.weight", "B.weight", "B.bias"))


def adapter(
    folder: Path, shapes: dict[str, tuple[int, ...]], blocks: dict[str, Any] | None, **config: Any
) -> AdapterSpec:
    write(
        folder,
        plain_config(use_bdlora=blocks, **config),
        {name: Tensor(shape, seed=3) for name, shape in shapes.items()},
    )
    return parse_adapter(folder, GEOMETRY, 64)


def on(side: str, num_blocks: int, **more: Any) -> dict[str, Any]:
    return {f"target_modules_bd_{side}": ["q_proj"], "nblocks": num_blocks} | more


def test_blocks_of_either_factor_are_laid_out_on_the_diagonal(tmp_path: Path) -> None:
    layout = PoolLayout(SHAPES, 4, 64)
    for side, shapes in (("a", {A: (4, HIDDEN // 4), B: (HIDDEN, 4)}), ("b", {A: (4, HIDDEN), B: (HIDDEN, 1)})):
        folder = tmp_path / side
        spec = adapter(folder, shapes, on(side, 4))
        assert "bdlora" in spec.features
        (staged,) = stage(spec, folder, layout, torch.float32).targets
        tensors = load_file(folder / "adapter_model.safetensors")
        whole = {
            name: torch.block_diag(*tensors[name].chunk(4)) if name == (A if side == "a" else B) else tensors[name]
            for name in (A, B)
        }
        assert torch.equal(staged.a, whole[A])
        assert torch.equal(staged.b, 2 * whole[B].T)


def test_one_block_is_a_plain_matrix_and_several_are_another_version(tmp_path: Path) -> None:
    plain = adapter(tmp_path / "plain", {A: (4, HIDDEN), B: (HIDDEN, 4)}, None)
    one = adapter(tmp_path / "one", {A: (4, HIDDEN), B: (HIDDEN, 4)}, on("b", 1))
    assert one.targets == plain.targets
    assert content_version(one, tmp_path / "one") == content_version(plain, tmp_path / "plain")
    versions = set()
    # The same bytes and shapes at every place where blocks can be told apart.
    for name, side, shapes in (
        ("a2", "a", {A: (4, HIDDEN // 2), B: (HIDDEN, 4)}),
        ("b2", "b", {A: (4, HIDDEN), B: (HIDDEN, 2)}),
    ):
        spec = adapter(tmp_path / name, shapes, on(side, 2))
        versions.add(content_version(spec, tmp_path / name))
        (target,) = spec.targets
        assert (target.a_blocks, target.b_blocks) == (
            (Blocks(2, 2), None) if side == "a" else (None, Blocks(2, HIDDEN // 2))
        )
    assert len(versions) == 2


def test_only_a_plain_b_has_a_bias(tmp_path: Path) -> None:
    """PEFT's block-diagonal B has none, even if it is one block; beside a block-diagonal A there is one."""
    half = {A: (4, HIDDEN // 2), B: (HIDDEN, 4), BIAS: (HIDDEN,)}
    assert adapter(tmp_path / "a", half, on("a", 2), lora_bias=True).targets[0].lora_bias is not None
    assert (
        adapter(tmp_path / "b", {A: (4, HIDDEN), B: (HIDDEN, 2)}, on("b", 2), lora_bias=True).targets[0].lora_bias
        is None
    )


def test_modules_that_no_pattern_names_are_plain_if_the_config_allows_it(tmp_path: Path) -> None:
    tensors = lora("model.layers.1.self_attn.v_proj", kind="v") | {A: Tensor((4, HIDDEN)), B: Tensor((HIDDEN, 2))}
    config = plain_config(target_modules=["q_proj", "v_proj"], use_bdlora=on("b", 2, match_strict=False))
    spec = parse_adapter(write(tmp_path, config, tensors), GEOMETRY, 64)
    assert [target.b_blocks for target in spec.targets] == [Blocks(2, HIDDEN // 2), None]
