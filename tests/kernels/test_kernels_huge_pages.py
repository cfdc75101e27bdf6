"""Memory in large pages, and memory that is taken ahead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from loraserve.kernels.huge_pages import Arena, fill_ahead, map_bytes


def test_mapped_memory_is_zero_and_as_long_as_asked() -> None:
    for size in (0, 1, 4096, 3 * 2**21 + 5):
        mapped = map_bytes(size)
        assert len(mapped) == size
        assert not mapped.any()


def test_tables_of_an_arena_are_aligned_and_apart() -> None:
    arena = Arena()
    tables = [arena.take(count) for count in (1, 17, 20 * 2**20, 5, 0)]
    for value, table in enumerate(tables, start=1):
        assert table.data_ptr() % 64 == 0 or len(table) == 0
        table.fill_(value)
    for value, table in enumerate(tables, start=1):
        assert (table == value).all()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system call is Linux's")
def test_filling_ahead_takes_the_memory_and_keeps_what_is_in_it() -> None:
    tensors = [map_bytes(2**24).view(torch.float32) for _ in range(4)]
    tensors[1][7] = 3.0
    before = _resident_bytes()
    thread = fill_ahead(tensors, 2**25)  # half of each
    assert thread is not None
    thread.join(timeout=60)
    taken = _resident_bytes() - before
    assert 0.7 * 2**25 < taken < 1.5 * 2**25
    assert tensors[1][7] == 3.0
    assert sum(int(tensor.count_nonzero()) for tensor in tensors) == 1


def test_filling_ahead_of_less_than_a_page_does_nothing() -> None:
    small = torch.ones(8)
    thread = fill_ahead([small], 2**20)
    if thread is not None:
        thread.join(timeout=60)
    assert torch.equal(small, torch.ones(8))
