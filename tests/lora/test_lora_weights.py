"""Staging: files of every dtype become exactly the factors that PEFT would apply, or are refused."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import FILE, LAYERS, LINEAR_KINDS, SHAPES, make_adapter, spec_of, uniform_ranks

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.kernels.metadata import Kind, LoraTargetShape
from loraserve.lora.layout import PoolLayout
from loraserve.lora.spec import AdapterSpec
from loraserve.lora.weights import StagedAdapter, StagingCancelled, StagingTicket, stage, staged_bytes

LAYOUT = PoolLayout(SHAPES, page_rows=8, max_rank=64)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def rewrite(folder: Path, name: str, index: tuple[int, int], value: float) -> None:
    """Change one value of an adapter's file; shapes and offsets stay."""
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / FILE).items()}
    tensors[name][index] = value
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize("a_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("b_dtype", DTYPES, ids=str)
def test_factors_are_exact_in_float32(tmp_path: Path, a_dtype: torch.dtype, b_dtype: torch.dtype) -> None:
    ranks = {(kind, layer): 1 + i + layer for i, kind in enumerate(LINEAR_KINDS) for layer in range(LAYERS)}
    ranks |= {(Kind.EMBED, 0): 4, (Kind.LM_HEAD, 0): 7}
    scaling = {place: 16 / math.sqrt(rank) for place, rank in ranks.items()}
    adapter = make_adapter(tmp_path / "a", ranks, scaling=scaling, a_dtype=a_dtype, b_dtype=b_dtype)
    staged = stage(adapter.spec, adapter.folder, LAYOUT, torch.float32)
    assert {(target.kind, target.layer): target.rank for target in staged.targets} == ranks
    for target in staged.targets:
        a, b = adapter.factors[target.kind, target.layer]
        torch.testing.assert_close((target.a, target.b), (a, b), rtol=0, atol=0)
        assert target.a.is_contiguous()
        assert target.b.is_contiguous()
    assert staged.num_bytes == staged_bytes(adapter.spec, LAYOUT, torch.float32)
    assert staged.num_bytes == sum(target.a.nbytes + target.b.nbytes for target in staged.targets)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scaling_is_applied_before_the_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = make_adapter(tmp_path / "a", uniform_ranks(3), scaling=1 / 3)
    staged = stage(adapter.spec, adapter.folder, LAYOUT, dtype)
    for target in staged.targets:
        a, b = adapter.factors[target.kind, target.layer]
        torch.testing.assert_close((target.a, target.b), (a.to(dtype), b.to(dtype)), rtol=0, atol=0)
    assert staged.dtype == dtype


def test_transposed_files(tmp_path: Path) -> None:
    """mlx-lm keeps A as [in, r] and B as [r, out]; refs say so, shapes stay PEFT's."""
    adapter = make_adapter(tmp_path / "a", uniform_ranks(5, [Kind.K, Kind.DOWN]), a_dtype=torch.bfloat16)
    flipped = {name: tensor.T.contiguous() for name, tensor in load_file(adapter.folder / FILE).items()}
    (tmp_path / "b").mkdir()
    save_file(flipped, tmp_path / "b" / FILE)
    plain = spec_of(tmp_path / "b", dict.fromkeys(adapter.factors, 2.0))
    targets = tuple(
        dataclasses.replace(
            target,
            rank=5,
            a=dataclasses.replace(target.a, shape=target.a.shape[::-1], transposed=True),
            b=dataclasses.replace(target.b, shape=target.b.shape[::-1], transposed=True),
        )
        for target in plain.targets
    )
    staged = stage(AdapterSpec(targets), tmp_path / "b", LAYOUT, torch.float32)
    for target in staged.targets:
        torch.testing.assert_close((target.a, target.b), adapter.factors[target.kind, target.layer], rtol=0, atol=0)


def test_matrices_larger_than_a_tile(tmp_path: Path) -> None:
    vocab = 40_001
    layout = PoolLayout(
        [LoraTargetShape(Kind.EMBED, vocab, 16, 0, 1), LoraTargetShape(Kind.LM_HEAD, 16, vocab, 0, 1)], 8, 8
    )
    wide, tall = torch.randn(3, vocab), torch.randn(vocab, 3)
    small, flat = torch.randn(16, 3), torch.randn(3, 16)
    save_file({"embed.0.a": wide, "embed.0.b": small, "lm_head.0.a": flat, "lm_head.0.b": tall}, tmp_path / FILE)
    spec = spec_of(tmp_path, {(Kind.EMBED, 0): -1.5, (Kind.LM_HEAD, 0): 0.25})
    embed, head = stage(spec, tmp_path, layout, torch.float32).targets
    torch.testing.assert_close((embed.a, embed.b), (wide, small.T * -1.5), rtol=0, atol=0)
    torch.testing.assert_close((head.a, head.b), (flat, tall.T * 0.25), rtol=0, atol=0)


# -- refusals -----------------------------------------------------------------------------------------------------


def refused(spec: AdapterSpec, folder: Path, dtype: torch.dtype = torch.float32) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        stage(spec, folder, LAYOUT, dtype)
    return caught.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q.1.a", "v.2.b"])
def test_values_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    adapter = make_adapter(tmp_path / "a", uniform_ranks(4))
    rewrite(adapter.folder, name, (1, 2), value)
    error = refused(adapter.spec, adapter.folder)
    assert error.fault is AdapterFault.NON_FINITE
    assert name in error.message


def test_overflow_in_the_serving_dtype_is_not_finite(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", uniform_ranks(4), scaling=64.0)
    rewrite(adapter.folder, "q.0.b", (3, 1), 2000.0)
    stage(adapter.spec, adapter.folder, LAYOUT, torch.bfloat16)
    assert refused(adapter.spec, adapter.folder, torch.float16).fault is AdapterFault.NON_FINITE
    wide = make_adapter(tmp_path / "wide", uniform_ranks(4), a_dtype=torch.float64)
    rewrite(wide.folder, "q.0.a", (3, 1), 1e200)
    assert refused(wide.spec, wide.folder).fault is AdapterFault.NON_FINITE


def test_shapes_are_those_of_the_base(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", {(Kind.DOWN, 0): 4})
    targets = (dataclasses.replace(adapter.spec.targets[0], kind="q"),)
    error = refused(AdapterSpec(targets), adapter.folder)
    assert error.fault is AdapterFault.SHAPE_MISMATCH
    assert "[4, 48]" in error.message
    assert "[4, 32]" in error.message


def test_files_that_went_bad(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", uniform_ranks(4))
    size = (adapter.folder / FILE).stat().st_size
    os.truncate(adapter.folder / FILE, size - 10)
    assert refused(adapter.spec, adapter.folder).fault is AdapterFault.CORRUPT_WEIGHTS
    (adapter.folder / FILE).unlink()
    assert refused(adapter.spec, adapter.folder).fault is AdapterFault.MISSING_WEIGHTS
    adapter.folder.rmdir()
    error = refused(adapter.spec, adapter.folder)
    assert error.fault is AdapterFault.NOT_AN_ADAPTER
    assert str(tmp_path) not in error.message


def test_memory_that_is_not_there(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", {(Kind.Q, 0): 4})
    layout = PoolLayout([LoraTargetShape(Kind.Q, 2**55, 2**55, 0, 1)], 8, 64)
    with pytest.raises(AdapterRefused, match="host memory") as caught:
        stage(adapter.spec, adapter.folder, layout, torch.float32)
    assert caught.value.fault is AdapterFault.STAGING_FAILED


# -- what the residency needs -------------------------------------------------------------------------------------


def test_progress_and_cancelling(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", uniform_ranks(4))
    ticket = StagingTicket()
    stage(adapter.spec, adapter.folder, LAYOUT, torch.float32, ticket=ticket)
    assert ticket.bytes_done == ticket.bytes_total == adapter.spec.num_bytes
    cancelled = StagingTicket(cancelled=True)
    with pytest.raises(StagingCancelled):
        stage(adapter.spec, adapter.folder, LAYOUT, torch.float32, ticket=cancelled)
    assert cancelled.bytes_done == 0


def test_the_checksum_notices_a_changed_file(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", uniform_ranks(4))

    def checksum() -> int:
        staged: StagedAdapter = stage(adapter.spec, adapter.folder, LAYOUT, torch.float32)
        return staged.checksum

    first = checksum()
    assert first == checksum()
    rewrite(adapter.folder, "q.0.a", (0, 0), 1.25)
    assert first != checksum()
