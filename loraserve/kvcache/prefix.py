"""The `PrefixCache` protocol: which KV can be reused, who is using it, what can go."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loraserve.kvcache.allocator import Pages

Tokens = NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, np.int32)


class Lease(Protocol):
    """The right to use a cached prefix. Its pages stay until the lease is released; once, by whoever took it."""

    @property
    def num_pages(self) -> int:
        """Pages of the prefix."""


class Match(NamedTuple):
    """The longest cached prefix: its pages in order, under lease."""

    pages: Pages
    lease: Lease


class Inserted(NamedTuple):
    """What became of offered pages.

    The lease covers the offered prefix as far as the cache holds it: `lease.num_pages` pages now belong to the cache.
    `present` are the cache's own pages for the part that it held before; the offered ones for that part, where they
    are others, still belong to the caller, who should free them and use these.
    """

    present: Pages
    lease: Lease


class PrefixCache(Protocol):
    """Finished KV by namespace and tokens, in whole pages. Pages are owned by the cache from `insert` to `evict`."""

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""

    @property
    def evictable_pages(self) -> int:
        """Of those, pages without a lease."""

    def lookup(self, namespace: str, tokens: Tokens) -> int:
        """Pages that `match` would find. Takes no lease and does not count as use."""

    def match(self, namespace: str, tokens: Tokens) -> Match:
        """The longest cached prefix of whole pages of `tokens`, under a new lease."""

    def insert(self, namespace: str, tokens: Tokens, pages: Pages) -> Inserted:
        """Offer the KV of `tokens` (whole pages) in `pages`. The answer's lease is new."""

    def release(self, lease: Lease) -> None:
        """Give a lease back. Raises ValueError for one that was given back before."""

    def evict(self, num_pages: int) -> Pages:
        """Give up `num_pages` unleased pages (fewer if there are fewer); the caller frees them."""

    def drop_namespaces(self, matches: Callable[[str], bool]) -> Pages:
        """Give up all unleased pages of the namespaces that `matches`; the caller frees them."""

    def drop_marked(self, marks: frozenset[int]) -> Pages:
        """Give up all unleased pages whose keys carry one of these overlay marks; the caller frees them."""

    def held_pages(self) -> Pages:
        """All pages that the cache owns, for checks."""

    def check(self) -> None:
        """Raise AssertionError if counts and structure differ."""
