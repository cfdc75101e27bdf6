"""Rows of the base's weights, asked for again after loading, whatever file they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_gguf import write_gguf
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from loraserve.errors import AdapterRefused
from loraserve.kernels.metadata import Kind
from loraserve.models.base_rows import CheckpointRows
from loraserve.models.config import load_shape
from loraserve.models.demo import find_demo_gguf, prepare_demo_model


def assert_same_rows(one: CheckpointRows, other: CheckpointRows, path: Path, layers: tuple[int, ...]) -> None:
    for target in load_shape(path).lora_targets():
        rows = target.in_features if target.kind is Kind.EMBED else target.out_features
        for layer in layers if target.num_layers > 1 else (0,):
            for begin, end in ((0, min(rows, 200)), (rows // 2 - 3, rows // 2 + 5), (rows - 2, rows)):
                ours = one.rows(target.kind, layer, begin, end)
                assert ours.dtype == torch.float32
                assert torch.equal(ours, other.rows(target.kind, layer, begin, end)), (target.kind, layer)
            assert one.bias(target.kind, layer) is None


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_a_gguf_are_those_of_the_model_it_was_made_of(tmp_path: Path, tied: bool) -> None:
    source = make_model(tmp_path / "source", seed=5, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "gguf" / "tiny.gguf", model)
    shape = load_shape(tmp_path / "gguf")
    for path in (tmp_path / "gguf", tmp_path / "gguf" / "tiny.gguf"):
        found = CheckpointRows(path, shape, torch.bfloat16)
        assert_same_rows(found, CheckpointRows(source, load_shape(source), torch.bfloat16), source, (0, 2))
    with pytest.raises(AdapterRefused):
        CheckpointRows(tmp_path / "none", shape, torch.float32).rows(Kind.Q, 0, 0, 1)


def test_rows_of_the_demo_gguf_are_those_of_its_conversion() -> None:
    gguf, folder = find_demo_gguf(), prepare_demo_model()
    rows = CheckpointRows(gguf, load_shape(gguf), torch.bfloat16)
    assert_same_rows(rows, CheckpointRows(folder, load_shape(folder), torch.bfloat16), folder, (29,))
