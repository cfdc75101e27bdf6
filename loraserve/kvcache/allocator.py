"""Level 2: which pages of the KV cache are free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loraserve.errors import ConfigError

MAX_PAGE_SIZE = 64

Pages = NDArray[np.int32]
Locations = NDArray[np.int32]


class PagedTokenToKVPoolAllocator:
    """A stack of free page ids. Page p holds locations `p * page_size .. (p + 1) * page_size`.

    Raises `ConfigError` for a pool without pages or a page size outside 1..64.
    """

    __slots__ = ("_is_free", "_num_free", "_offsets", "_stack", "num_pages", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ConfigError(f"page size must be from 1 to {MAX_PAGE_SIZE}, got {page_size}")
        if num_pages < 1 or num_pages * page_size > np.iinfo(np.int32).max:
            raise ConfigError(f"a KV pool of {num_pages} pages of {page_size} tokens cannot be addressed")
        self.num_pages = num_pages
        self.page_size = page_size
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # low page ids go out first
        self._num_free = num_pages
        self._is_free = np.ones(num_pages, np.bool_)
        self._offsets = np.arange(page_size, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_free

    def alloc(self, num_pages: int) -> Pages | None:
        """Take `num_pages` pages; None, and nothing taken, when fewer are free."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > self._num_free:
            return None
        self._num_free -= num_pages
        pages = self._stack[self._num_free : self._num_free + num_pages][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: Pages) -> None:
        """Give pages back. Raises ValueError, and changes nothing, if one is free already, twice here or unknown."""
        if pages.size == 0:
            return
        if int(pages.min()) < 0 or int(pages.max()) >= self.num_pages:
            raise ValueError(f"pages {pages.tolist()} are not all of a pool of {self.num_pages}")
        if self._is_free[pages].any() or (pages.size > 1 and np.unique(pages).size != pages.size):
            raise ValueError(f"double free among pages {pages.tolist()}")
        self._is_free[pages] = True
        self._stack[self._num_free : self._num_free + pages.size] = pages
        self._num_free += pages.size

    def locations(self, pages: Pages) -> Locations:
        """Locations of the pages' tokens in order, [len(pages) * page_size]."""
        if self.page_size == 1:
            return pages
        return (pages[:, None] * np.int32(self.page_size) + self._offsets).reshape(-1)

    def check(self, held: Pages | None = None) -> None:
        """Raise AssertionError if the stack and the marks differ, or if `held` is not exactly what is not free."""
        free = self._stack[: self._num_free]
        assert np.unique(free).size == self._num_free, "a page is twice among the free"
        assert int(self._is_free.sum()) == self._num_free, "marks and stack of free pages differ"
        assert bool(self._is_free[free].all()), "a free page is marked as held"
        if held is not None:
            assert np.unique(held).size == held.size, "a page has two holders"
            assert held.size == self.num_pages - self._num_free, (
                f"{self.num_pages - self._num_free} pages are taken but {held.size} are accounted for"
            )
            assert not self._is_free[held].any(), "a held page is among the free"


class TokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """Pages of one token: a page id is a location."""

    __slots__ = ()

    def __init__(self, num_locations: int) -> None:
        super().__init__(num_locations, 1)


def make_allocator(num_locations: int, page_size: int) -> PagedTokenToKVPoolAllocator:
    """The allocator for a pool of `num_locations` tokens; a rest smaller than a page stays unused."""
    if page_size == 1:
        return TokenToKVPoolAllocator(num_locations)
    return PagedTokenToKVPoolAllocator(num_locations // max(page_size, 1), page_size)
