"""Level 1: request row → where each of its tokens lies in the KV cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraserve.errors import ConfigError
from loraserve.kvcache.allocator import Locations


class DirtySpan(NamedTuple):
    """Columns `start .. stop` of a row that changed."""

    row: int
    start: int
    stop: int


class ReqToTokenPool:
    """The host's table and its free rows. A device copy is brought up to date with `take_dirty`.

    Raises `ConfigError` for a table without rows or columns.
    """

    __slots__ = ("_dirty_start", "_dirty_stop", "_free", "_is_free", "table")

    def __init__(self, num_rows: int, max_context: int) -> None:
        if num_rows < 1 or max_context < 1:
            raise ConfigError(f"a table of {num_rows} requests of {max_context} tokens is empty")
        self.table: NDArray[np.int32] = np.zeros((num_rows, max_context), np.int32)
        self._free = list(range(num_rows - 1, -1, -1))
        self._is_free = [True] * num_rows
        self._dirty_start = np.full(num_rows, max_context, np.int64)
        self._dirty_stop = np.zeros(num_rows, np.int64)

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return int(self.table.shape[0])

    @property
    def max_context(self) -> int:
        """Columns: the longest sequence."""
        return int(self.table.shape[1])

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def alloc(self) -> int | None:
        """Take a row; None when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._is_free[row] = False
        return row

    def free(self, row: int) -> None:
        """Give a row back. Raises ValueError if it is free already or unknown."""
        if not 0 <= row < len(self._is_free) or self._is_free[row]:
            raise ValueError(f"row {row} is not held")
        self._is_free[row] = True
        self._free.append(row)

    def write(self, row: int, start: int, locations: Locations) -> None:
        """Set columns `start ..` of a row. All writes go through here, so that device copies can follow."""
        stop = start + locations.size
        self.table[row, start:stop] = locations
        if start < self._dirty_start[row]:
            self._dirty_start[row] = start
        if stop > self._dirty_stop[row]:
            self._dirty_stop[row] = stop

    def take_dirty(self) -> list[DirtySpan]:
        """Spans written since the last call, at most one for each row; nobody needs to call it."""
        rows = np.flatnonzero(self._dirty_stop > self._dirty_start)
        spans = [DirtySpan(int(r), int(self._dirty_start[r]), int(self._dirty_stop[r])) for r in rows]
        self._dirty_start[rows] = self.max_context
        self._dirty_stop[rows] = 0
        return spans

    def check(self) -> None:
        """Raise AssertionError if the free rows and their marks differ."""
        assert len(set(self._free)) == len(self._free), "a row is twice among the free"
        assert sum(self._is_free) == len(self._free), "marks and list of free rows differ"
        assert all(self._is_free[row] for row in self._free), "a free row is marked as held"
