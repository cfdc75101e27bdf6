"""Weights that arrive later than they are sent: an adapter is seen whole or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_adapters import LINEAR_KINDS, make_adapter, make_pool, read_back, uniform_ranks
from torch import Tensor

from loraserve.lora.copier import DirectCopier, make_copier
from loraserve.lora.layout import VOCABULARY_KINDS
from loraserve.lora.weights import stage


class LateCopier:
    """Copies only when told to, as a side stream does."""

    def __init__(self) -> None:
        self.begun = 0
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.num_sent = self.num_arrived = 0

    def begin(self) -> None:
        self.begun += 1

    def copy(self, into: Tensor, source: Tensor) -> None:
        self.queue.append((into, source))
        self.num_sent += 1

    def mark(self) -> Callable[[], bool]:
        wanted = self.num_sent
        return lambda: self.num_arrived >= wanted

    def deliver(self, count: int) -> None:
        for into, source in self.queue[:count]:
            into.copy_(source)
        self.num_arrived += len(self.queue[:count])
        del self.queue[:count]


def test_an_adapter_appears_when_all_of_it_has_arrived(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pool = make_pool(1 << 20)
    pool._copier = copier = LateCopier()
    adapter = make_adapter(tmp_path, uniform_ranks(3, LINEAR_KINDS))
    staged = stage(adapter.spec, adapter.folder, pool.layout, pool.dtype)
    held = pool.reserve(staged)
    assert held is not None
    assert copier.begun == 1
    assert not pool.write(held, 1 << 30)
    assert held.bytes_written == staged.num_bytes
    while copier.queue:
        copier.deliver(1)
        if copier.queue:
            assert not pool.write(held, 1 << 30)
            assert not pool.tables.targets, "a part of an adapter is visible"
    assert pool.write(held, 1 << 30)
    for target in staged.targets:
        found = read_back(pool, held.slot, target.kind, target.layer)
        assert found is not None
        assert torch.equal(found[0], target.a)
        assert torch.equal(found[1], target.b)
    pool.check()


def test_without_a_gpu_copies_are_made_at_once() -> None:
    copier = make_copier(torch.device("cpu"))
    assert isinstance(copier, DirectCopier)
    into = torch.zeros(3)
    copier.begin()
    copier.copy(into, torch.ones(3))
    assert copier.mark()()
    assert into.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind_rank", [2, 5])
def test_reserved_tables_are_never_replaced(tmp_path, kind_rank) -> None:  # type: ignore[no-untyped-def]
    pool = make_pool(1 << 20)
    pool.reserve_tables()
    before = {kind: (t.a_pages, t.b_pages, t.ranks, t.affine) for kind, t in pool.tables.targets.items()}
    assert before.keys() >= VOCABULARY_KINDS
    revision = pool.tables.revision
    adapter = make_adapter(tmp_path, uniform_ranks(kind_rank, LINEAR_KINDS))
    held = pool.reserve(stage(adapter.spec, adapter.folder, pool.layout, pool.dtype))
    assert held is not None
    assert pool.write(held, 1 << 30)
    assert pool.tables.revision == revision
    for kind, tensors in before.items():
        target = pool.tables.targets[kind]
        for old, new in zip(tensors, (target.a_pages, target.b_pages, target.ranks, target.affine), strict=True):
            assert old is new
    pool.free(held.slot)
    pool.check()
