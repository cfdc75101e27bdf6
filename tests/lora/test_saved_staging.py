"""Rows that adapters bring, from the files to the pool: their places, their bytes, and what reads them in a step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from raw_adapters import GEOMETRY, HIDDEN, PREFIX, VOCAB, Tensor, container, plain_config, plain_tensors, write
from tiny_adapters import make_pool

from loraserve.errors import AdapterRefused
from loraserve.lora.format import parse_adapter
from loraserve.lora.pool import LoraPool, PoolReservation
from loraserve.lora.spec import AdapterSpec
from loraserve.lora.tables import FINAL_NORM, INPUT_NORM, K_NORM, POST_NORM, Q_NORM, Table, head_norm_row, norm_row
from loraserve.lora.weights import StagingCancelled, StagingTicket, stage, staged_bytes
from loraserve.models.replaced import plan_logits_rows, plan_step_rows, vocab_size_of

HEAD_WIDTH = 8
NEW = 3
IDS = [77, 3, 127, 4, VOCAB + 1]
DEVICE = torch.device("cpu")


def tensor_of(raw: Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw.data), dtype=torch.float32).view(raw.shape)


def make(root: Path) -> tuple[AdapterSpec, Path, dict[str, dict[int, torch.Tensor]]]:
    """New tokens of which one is trained again, trained rows in no order, a saved head, and some norms."""
    base = Tensor((VOCAB, HIDDEN), seed=1)
    more, head = Tensor((NEW, HIDDEN), seed=2), Tensor((VOCAB + NEW, HIDDEN), seed=3)
    grown = Tensor((VOCAB + NEW, HIDDEN))
    grown.data = base.data + more.data
    (root / "base").mkdir(parents=True)
    (root / "base" / "model.safetensors").write_bytes(container({"model.embed_tokens.weight": base}))
    geometry = replace(GEOMETRY, folder=str(root / "base"), head_norm_width=HEAD_WIDTH)
    norms = {
        f"model.layers.1.{name}": Tensor((HEAD_WIDTH if name in (Q_NORM, K_NORM) else HIDDEN,), seed=9 + i)
        for i, name in enumerate((INPUT_NORM, POST_NORM, Q_NORM, K_NORM))
    } | {FINAL_NORM: Tensor((HIDDEN,), seed=8)}
    trained = Tensor((len(IDS), HIDDEN), seed=4)
    embed = f"{PREFIX}model.embed_tokens.token_adapter"
    tensors = {
        f"{embed}.base_layer.weight": grown,
        f"{embed}.trainable_tokens_delta": trained,
        f"{PREFIX}lm_head.weight": head,
        **{f"{PREFIX}{name}.weight": norm for name, norm in norms.items()},
    }
    names = ["lm_head", *(f"layers.1.{n}" for n in (INPUT_NORM, POST_NORM, Q_NORM, K_NORM)), "model.norm"]
    config = plain_config(modules_to_save=names, trainable_token_indices=IDS)
    spec = parse_adapter(write(root / "adapter", config, plain_tensors() | tensors), geometry, 64)
    assert spec.num_new_tokens == NEW
    rows = dict(enumerate(tensor_of(more), VOCAB)) | dict(zip(IDS, tensor_of(trained), strict=True))
    expected = {
        Table.EMBED: rows,
        Table.LM_HEAD: dict(enumerate(tensor_of(head))),
        Table.NORM: {0: tensor_of(norms[FINAL_NORM])}
        | {norm_row(1, n): tensor_of(norms[f"model.layers.1.{n}"]) for n in (INPUT_NORM, POST_NORM)},
        Table.HEAD_NORM: {head_norm_row(1, n): tensor_of(norms[f"model.layers.1.{n}"]) for n in (Q_NORM, K_NORM)},
    }
    return spec, root / "adapter", expected


def scattered(pool: LoraPool, spec: AdapterSpec, folder: Path) -> PoolReservation:
    """The adapter in pages that do not adjoin."""
    small = replace(spec, replaced=(), targets=spec.targets[:1])
    staged = stage(small, folder, pool.layout, pool.dtype)
    between = [pool.reserve(staged) for _ in range(pool.max_slots - 1)]
    for held in between[::2]:
        assert held is not None
        pool.free(held.slot)
    held = pool.reserve(stage(spec, folder, pool.layout, pool.dtype))
    assert held is not None
    while not pool.write(held, 900):
        assert held.slot not in pool.tables.replaced
    for other in between[1::2]:
        assert other is not None
        pool.free(other.slot)
    return held


@pytest.mark.parametrize("page_rows", [1, 3, 4, 8])
def test_every_row_is_in_its_place(tmp_path: Path, page_rows: int) -> None:
    spec, folder, expected = make(tmp_path)
    pool = make_pool(160 << 10, page_rows=page_rows, max_slots=9)
    assert staged_bytes(spec, pool.layout, torch.float32) == stage(spec, folder, pool.layout, torch.float32).num_bytes
    held = scattered(pool, spec, folder)
    assert held.num_bytes == pool.bytes_needed(spec) == pool.stats().used_bytes
    tables = pool.tables.replaced[held.slot]
    assert tables.keys() == expected.keys()
    for table, rows in expected.items():
        assert tables[table].ids.tolist() == sorted(rows)
        for index in range(VOCAB + NEW + 1):
            row, wanted = tables[table].row(index), rows.get(index)
            assert (row is None) == (wanted is None)
            if row is not None and wanted is not None:
                assert torch.equal(row, wanted)
    pool.check()
    pool.free(held.slot)
    pool.check()
    assert pool.tables.replaced == {}
    assert pool.stats().used_bytes == pool.stats().lent_bytes == 0


def test_a_step_finds_the_rows_of_its_tokens(tmp_path: Path) -> None:
    spec, folder, expected = make(tmp_path)
    pool = make_pool(400 << 10, page_rows=3, max_slots=9)
    mine = scattered(pool, spec, folder).slot
    plain = pool.reserve(stage(replace(spec, replaced=()), folder, pool.layout, pool.dtype))
    assert plain is not None
    assert pool.write(plain, 1 << 20)
    draw = random.Random(0)
    slots = [[(mine, 1.0)], [], [(plain.slot, 1.0)], [(mine, 1.0)], [(mine, 1.0)]]
    lengths = [4, 3, 5, 0, 9]
    ids = np.array([draw.choice([*IDS, 0, 50, VOCAB]) for _ in range(sum(lengths))])
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    rows = plan_step_rows(pool.tables.replaced, slots, indptr, ids, DEVICE)
    assert rows is not None
    hidden = torch.zeros(len(ids), HIDDEN)
    rows.replace_embeddings(hidden)
    owned = set(range(4)) | set(range(12, 21))
    for token, found in enumerate(hidden):
        brought = expected[Table.EMBED].get(int(ids[token])) if token in owned else None
        assert torch.equal(found, torch.zeros(HIDDEN) if brought is None else brought)
    ((tokens, weight),) = rows.norms_of(norm_row(1, POST_NORM))
    assert (set(tokens.tolist()), weight.tolist()) == (owned, expected[Table.NORM][norm_row(1, POST_NORM)].tolist())
    assert list(rows.norms_of(norm_row(0, POST_NORM))) == []
    assert plan_step_rows(pool.tables.replaced, slots[1:3], indptr[1:4] - 4, ids[4:12], DEVICE) is None


def test_logits_are_replaced_and_no_others(tmp_path: Path) -> None:
    spec, folder, expected = make(tmp_path)
    pool = make_pool(400 << 10, page_rows=3, max_slots=9)
    whole = scattered(pool, spec, folder).slot
    # The embedding's few rows as a head's, to have one that is not whole.
    part = {**pool.tables.replaced[whole], Table.LM_HEAD: pool.tables.replaced[whole][Table.EMBED]}
    replaced = {**pool.tables.replaced, 7: part}
    slots = [[], [(whole, 1.0)], [(7, 1.0)], [(whole, 1.0)]]
    rows = plan_logits_rows(replaced, slots, np.arange(5), DEVICE)
    assert rows is not None
    base, hidden = torch.randn(4, VOCAB), torch.randn(4, HIDDEN)
    found = rows.replace(base.clone(), hidden)
    assert found.shape == (4, VOCAB + NEW)
    assert torch.equal(found[0, :VOCAB], base[0])
    assert found[0, VOCAB:].tolist() == [float("-inf")] * NEW
    head = torch.stack([expected[Table.LM_HEAD][i] for i in range(VOCAB + NEW)])
    torch.testing.assert_close(found[[1, 3]], hidden[[1, 3]] @ head.T)
    for token in range(VOCAB + NEW):
        row = expected[Table.EMBED].get(token)
        wanted = base[2, token] if row is None else hidden[2] @ row
        torch.testing.assert_close(found[2, token], wanted)
    assert [vocab_size_of(replaced, uses, VOCAB) for uses in slots] == [VOCAB] + [VOCAB + NEW] * 3
    assert plan_logits_rows(replaced, slots[:1], np.arange(2), DEVICE) is None


def test_a_value_that_overflows_the_served_dtype_is_refused(tmp_path: Path) -> None:
    spec, folder, _ = make(tmp_path)
    file = folder / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    for rows in spec.replaced:
        ref = rows.parts[-1].ref
        kept = data[ref.end - 4 : ref.end]
        data[ref.end - 4 : ref.end] = np.float32(70000).tobytes()
        file.write_bytes(data)
        layout = make_pool(400 << 10).layout
        stage(spec, folder, layout, torch.float32)
        with pytest.raises(AdapterRefused, match="not finite in float16") as refused:
            stage(spec, folder, layout, torch.float16)
        assert refused.value.code == "non_finite"
        data[ref.end - 4 : ref.end] = kept


def test_staging_can_be_cancelled_within_a_matrix(tmp_path: Path) -> None:
    spec, folder, _ = make(tmp_path)
    only_rows = replace(spec, targets=())
    ticket = StagingTicket(cancelled=True)
    with pytest.raises(StagingCancelled):
        stage(only_rows, folder, make_pool(400 << 10).layout, torch.float32, ticket=ticket)
