"""`ChunkCache`: no sharing. Each request keeps its own pages and frees them when it ends."""

from __future__ import annotations

from collections.abc import Callable

from loraserve.kvcache.allocator import Pages
from loraserve.kvcache.prefix import NO_PAGES, Inserted, Lease, Match, Tokens


class _EmptyLease:
    """A lease on nothing."""

    __slots__ = ()

    @property
    def num_pages(self) -> int:
        """Always 0."""
        return 0


class ChunkCache:
    """The `PrefixCache` that never holds anything, for when prefix caching is off."""

    __slots__ = ("_lease",)

    def __init__(self) -> None:
        self._lease = _EmptyLease()

    @property
    def num_pages(self) -> int:
        """Always 0."""
        return 0

    @property
    def evictable_pages(self) -> int:
        """Always 0."""
        return 0

    def lookup(self, namespace: str, tokens: Tokens) -> int:
        """Always 0."""
        return 0

    def match(self, namespace: str, tokens: Tokens) -> Match:
        """An empty match."""
        return Match(NO_PAGES, self._lease)

    def insert(self, namespace: str, tokens: Tokens, pages: Pages) -> Inserted:
        """Takes nothing: the pages still belong to the caller."""
        return Inserted(NO_PAGES, self._lease)

    def release(self, lease: Lease) -> None:
        """There is nothing to give back."""

    def evict(self, num_pages: int) -> Pages:
        """Nothing."""
        return NO_PAGES

    def drop_namespaces(self, matches: Callable[[str], bool]) -> Pages:
        """Nothing."""
        return NO_PAGES

    def drop_marked(self, marks: frozenset[int]) -> Pages:
        """Nothing."""
        return NO_PAGES

    def held_pages(self) -> Pages:
        """Nothing."""
        return NO_PAGES

    def check(self) -> None:
        """Nothing can be wrong."""
