"""`CacheManager`: rows, pages and reusable prefixes behind one door; what the scheduler calls the KV side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraserve.config import CacheConfig
from loraserve.kvcache.allocator import Pages, make_allocator
from loraserve.kvcache.chunk_cache import ChunkCache
from loraserve.kvcache.eviction import make_policy
from loraserve.kvcache.overlays import OverlayMarks, Overlays
from loraserve.kvcache.prefix import NO_PAGES, Lease, PrefixCache, Tokens
from loraserve.kvcache.radix_cache import RadixCache
from loraserve.kvcache.req_to_token import DirtySpan, ReqToTokenPool


class RowLease(NamedTuple):
    """A request's place in the cache: its level-1 row, and how many leading tokens already have their KV there."""

    row: int
    num_cached: int


@dataclass(slots=True)
class _Holding:
    """What one row holds. Its first `lease.num_pages` pages are the prefix cache's, the others its own."""

    namespace: str
    overlays: Overlays
    lease: Lease
    num_pages: int


class CacheManager:
    """Rows, pages and reusable prefixes. Host-side only: the tensors are `kvcache.pool.KVCache`, of equal size.

    `num_locations` tokens in all; `num_rows` requests at once, each up to `max_context` tokens. Raises `ConfigError`
    for sizes that make no pool.
    """

    def __init__(self, config: CacheConfig, num_locations: int, num_rows: int, max_context: int) -> None:
        policy = make_policy(config.eviction)
        self._allocator = make_allocator(num_locations, config.page_size)
        self._rows = ReqToTokenPool(num_rows, max_context)
        self._prefixes: PrefixCache = RadixCache(config.page_size, policy) if config.prefix_cache else ChunkCache()
        self._marks = OverlayMarks(config.page_size)
        self._holdings: list[_Holding | None] = [None] * num_rows

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._allocator.page_size

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._allocator.num_pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._allocator.num_free

    @property
    def evictable_pages(self) -> int:
        """Pages that only the prefix cache holds."""
        return self._prefixes.evictable_pages

    @property
    def free_rows(self) -> int:
        """Rows that no request holds."""
        return self._rows.num_free

    @property
    def max_context(self) -> int:
        """Longest sequence that fits a row."""
        return self._rows.max_context

    @property
    def table(self) -> NDArray[np.int32]:
        """Level 1, [num_rows, max_context]: where each position of each row lies."""
        return self._rows.table

    def take_dirty(self) -> list[DirtySpan]:
        """Spans of the table written since the last call, for device copies of it."""
        return self._rows.take_dirty()

    def pages_of(self, row: int) -> int:
        """Pages a row has, shared ones included. Raises ValueError if the row is not held."""
        return self._held(row).num_pages

    def lookup(self, namespace: str, tokens: Tokens, overlays: Overlays = ()) -> int:
        """How many leading tokens could be reused. Takes no lease and does not count as use."""
        return self._prefixes.lookup(namespace, self._marks.keys(tokens, overlays)) * self.page_size

    def acquire(self, namespace: str, tokens: Tokens, overlays: Overlays = ()) -> RowLease | None:
        """Take a row and a lease on the longest cached prefix of `tokens`; None when no row is free.

        `overlays` decide the KV from their positions on, as `namespace` does from the first.
        """
        row = self._rows.alloc()
        if row is None:
            return None
        match = self._prefixes.match(namespace, self._marks.keys(tokens, overlays))
        self._holdings[row] = _Holding(namespace, overlays, match.lease, match.pages.size)
        self._write_pages(row, 0, match.pages)
        return RowLease(row, match.pages.size * self.page_size)

    def extend(self, row: int, num_tokens: int) -> bool:
        """Give the row locations for positions below `num_tokens`; False, and no change, if pages are short.

        Evicts unused prefixes if needed. Raises ValueError past `max_context` or if the row is not held.
        """
        holding = self._held(row)
        missing = -(-num_tokens // self.page_size) - holding.num_pages
        if missing <= 0:
            return True
        if num_tokens > self.max_context:
            raise ValueError(f"row {row} cannot have {num_tokens} tokens, only {self.max_context}")
        pages = self._take(missing)
        if pages is None:
            return False
        self._write_pages(row, holding.num_pages, pages)
        holding.num_pages += missing
        return True

    def publish(self, row: int, tokens: Tokens) -> None:
        """Offer the row's full pages for reuse; `tokens` are those whose KV is complete. The row goes on.

        Where another request published the same prefix before, the row changes over to that one's pages and its own
        are freed. Raises ValueError if the row is not held or has fewer locations than tokens.
        """
        holding = self._held(row)
        num_full = tokens.size // self.page_size
        if num_full > holding.num_pages:
            raise ValueError(f"row {row} has {holding.num_pages} pages, not the {num_full} of {tokens.size} tokens")
        own_from = holding.lease.num_pages
        if num_full <= own_from:
            return
        pages = self._pages(row, 0, num_full)
        keys = self._marks.keys(tokens[: num_full * self.page_size], holding.overlays)
        inserted = self._prefixes.insert(holding.namespace, keys, pages)
        present = inserted.present[own_from:]  # what lies before is leased, so it is ours and the cache's alike
        if present.size:
            self._allocator.free(pages[own_from : own_from + present.size])
            self._write_pages(row, own_from, present)
        self._prefixes.release(holding.lease)
        holding.lease = inserted.lease

    def release(self, row: int, tokens: Tokens) -> None:
        """End the row: full pages of `tokens` (KV complete) stay for reuse, everything else is free again."""
        self.publish(row, tokens)
        holding = self._held(row)
        self._allocator.free(self._pages(row, holding.lease.num_pages, holding.num_pages))
        self._prefixes.release(holding.lease)
        self._holdings[row] = None
        self._rows.free(row)

    def drop_namespaces(self, matches: Callable[[str], bool]) -> int:
        """Free what no request uses in every namespace and under every set of overlays that `matches`; pages freed."""
        pages = self._prefixes.drop_namespaces(matches)
        self._allocator.free(pages)
        marked = self._prefixes.drop_marked(self._marks.forget(matches))
        self._allocator.free(marked)
        return int(pages.size + marked.size)

    def check(self) -> None:
        """Raise AssertionError if pages or rows do not add up."""
        self._prefixes.check()
        self._rows.check()
        held = [(row, holding) for row, holding in enumerate(self._holdings) if holding is not None]
        assert len(held) == len(self._holdings) - self._rows.num_free, "rows are taken that nobody holds"
        own = [self._pages(row, holding.lease.num_pages, holding.num_pages) for row, holding in held]
        self._allocator.check(np.concatenate([self._prefixes.held_pages(), *own]) if own else None)
        if not own:
            self._allocator.check(self._prefixes.held_pages())
            assert self.free_pages + self.evictable_pages == self.num_pages, "a page is leased though no row is held"

    def _held(self, row: int) -> _Holding:
        holding = self._holdings[row] if 0 <= row < len(self._holdings) else None
        if holding is None:
            raise ValueError(f"row {row} is not held")
        return holding

    def _take(self, num_pages: int) -> Pages | None:
        short = num_pages - self._allocator.num_free
        if short > 0:
            if short > self._prefixes.evictable_pages:
                return None
            self._allocator.free(self._prefixes.evict(short))
        return self._allocator.alloc(num_pages)

    def _pages(self, row: int, start: int, stop: int) -> Pages:
        """Page ids of the row's pages `start .. stop`."""
        if start >= stop:
            return NO_PAGES
        size = self.page_size
        pages: Pages = self._rows.table[row, start * size : stop * size : size] // np.int32(size)
        return pages

    def _write_pages(self, row: int, start: int, pages: Pages) -> None:
        """Make `pages` the row's pages from page `start` on; the last page may reach past the table's width."""
        column = start * self.page_size
        self._rows.write(row, column, self._allocator.locations(pages)[: self.max_context - column])
