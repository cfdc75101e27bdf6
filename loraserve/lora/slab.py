"""Page allocator over one flat range of elements, cut into slabs that page sizes borrow. Knows nothing of tensors.

One budget serves every width of row. The range is cut into equal slabs; a slab is lent to one page size on demand and
comes back when its last page is freed. A page larger than a slab (one row of a vocabulary-wide matrix) takes a run of
neighbouring slabs for itself. Small pages fill the fullest slab first and then the lowest empty one, runs come from the
top, so that the two rarely break each other's room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Pages start at multiples of this many elements, so that a row of even a small dtype starts on a vector boundary.
ALIGNMENT = 16
_MAX_CANDIDATES = 4096

Demand = Mapping[int, int]  # page size in elements → pages
Offsets = NDArray[np.int64]


class SlabCounts(NamedTuple):
    """How many pages someone holds in which slabs. A page that spans a run counts once in each of its slabs."""

    slabs: Offsets
    pages: Offsets


def align(num_elements: int) -> int:
    """Smallest legal page size of at least `num_elements`."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def choose_slab(small: Sequence[int], large: Sequence[int], num_elements: int) -> int:
    """Slab size in elements that wastes least: `small` pages share slabs, `large` ones may span several.

    The waste of a size is what its pages leave unused of the slabs they take, plus half a slab per page size that is
    partly filled at any time. Slabs never grow past 1/16 of the range unless a small page is larger than that.
    """
    floor = max(small)
    limit = max(floor, min(num_elements // 16, 64 * floor))
    sizes = sorted({*small, *large})
    candidates = {floor}
    for size in sizes:
        first = -(-floor // size)
        last = limit // size
        step = max(1, (last - first) // _MAX_CANDIDATES)
        candidates.update(size * count for count in range(first, last + 1, step))

    def waste(slab: int) -> float:
        inner = max(_waste_in_slab(size, slab) for size in sizes)
        return inner + len(sizes) * slab / (2 * max(num_elements, 1))

    return min(candidates, key=lambda slab: (waste(slab), slab))


def _waste_in_slab(size: int, slab: int) -> float:
    if size <= slab:
        return (slab % size) / slab
    taken = -(-size // slab) * slab
    return (taken - size) / taken


class SlabAllocator:
    """Pages of several sizes out of one range of elements. Offsets are in elements. Not thread-safe."""

    def __init__(self, num_elements: int, slab_elements: int) -> None:
        if slab_elements < ALIGNMENT or slab_elements % ALIGNMENT:
            raise ValueError(f"a slab must be a positive multiple of {ALIGNMENT} elements, got {slab_elements}")
        self.slab_elements = slab_elements
        self.num_slabs = num_elements // slab_elements
        self._size = np.zeros(self.num_slabs, np.int64)  # page size that the slab is lent to, 0: to none
        self._used = np.zeros(self.num_slabs, np.int64)  # pages in use
        self._free: dict[int, list[int]] = {}  # slab lent to small pages → its free pages, descending
        self._heads: dict[int, int] = {}  # first slab of each run → the size of its page

    @property
    def num_free_slabs(self) -> int:
        """Slabs lent to no page size."""
        return int(np.count_nonzero(self._size == 0))

    @property
    def used_elements(self) -> int:
        """Elements of all pages in use, without what their slabs leave over."""
        small = self._size <= self.slab_elements
        return int((self._used * self._size)[small].sum()) + sum(self._heads.values())

    def fits(self, demand: Demand, freeing: Sequence[SlabCounts] = ()) -> bool:
        """Whether `alloc(demand)` would succeed now, or after the pages in `freeing` have been freed."""
        used = self._used
        if freeing:
            used = used.copy()
            for counts in freeing:
                used[counts.slabs] -= counts.pages
        return self._plan(demand, used) is not None

    def fits_empty(self, demand: Demand) -> bool:
        """Whether `alloc(demand)` would succeed if nothing else were allocated."""
        return self._plan(demand, np.zeros_like(self._used)) is not None

    def alloc(self, demand: Demand) -> dict[int, Offsets] | None:
        """Page offsets, ascending, for every size in `demand`; None, and nothing taken, if not all fit."""
        plan = self._plan(demand, self._used)
        if plan is None:
            return None
        empty, runs = plan
        taken: dict[int, Offsets] = {}
        fresh = iter(empty)
        for size, count in _wanted(demand):
            if size > self.slab_elements:
                taken[size] = self._take_runs(size, runs[size])
            else:
                taken[size] = self._take_small(size, count, fresh)
        return taken

    def free(self, pages: Mapping[int, Offsets]) -> None:
        """Give pages back. Raises `ValueError` on a page that is not in use."""
        for size, offsets in pages.items():
            if size > self.slab_elements:
                self._free_runs(size, offsets)
            else:
                self._free_small(size, offsets)

    def counts(self, pages: Mapping[int, Offsets]) -> SlabCounts:
        """Where pages lie, for `fits(…, freeing)`."""
        slabs: list[Offsets] = []
        for size, offsets in pages.items():
            first = offsets // self.slab_elements
            slabs.append((first[:, None] + np.arange(self._run(size))).ravel())
        found, pages_in = np.unique(np.concatenate(slabs), return_counts=True)
        return SlabCounts(found, pages_in)

    def check(self) -> None:
        """Raise `AssertionError` if the books do not balance."""
        for slab in range(self.num_slabs):
            size, used = int(self._size[slab]), int(self._used[slab])
            if size == 0 or size > self.slab_elements:
                assert slab not in self._free, f"slab {slab} is lent to no small page but has free ones"
                assert used == (size > 0), f"slab {slab} counts {used} pages"
                continue
            free = self._free[slab]
            assert used > 0, f"slab {slab} is empty but still lent"
            assert used + len(free) == self.slab_elements // size, f"slab {slab} lost a page"
            assert free == sorted(set(free), reverse=True), f"slab {slab} lists a free page twice or out of order"
        spanned = sum(self._run(size) for size in self._heads.values())
        assert spanned == int(np.count_nonzero(self._size > self.slab_elements)), "a run lost a slab"
        assert len(self._free) == int(np.count_nonzero((self._size > 0) & (self._size <= self.slab_elements)))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self, size: int) -> int:
        return -(-size // self.slab_elements)

    def _plan(self, demand: Demand, used: Offsets) -> tuple[list[int], dict[int, list[int]]] | None:
        """Empty slabs for small pages and first slabs of runs that serve `demand` when `used` pages are in use."""
        empty = used == 0
        needed = 0
        for size, count in _wanted(demand):
            if size <= self.slab_elements:
                per_slab = self.slab_elements // size
                lent = (self._size == size) & ~empty
                room = int(np.count_nonzero(lent)) * per_slab - int(used[lent].sum())
                needed += -(-max(0, count - room) // per_slab)
        lowest = np.flatnonzero(empty)[:needed]
        if len(lowest) < needed:
            return None
        empty[lowest] = False
        runs: dict[int, list[int]] = {}
        for size, count in _wanted(demand):
            if size > self.slab_elements:
                starts = _highest_runs(empty, self._run(size), count)
                if starts is None:
                    return None
                runs[size] = starts
        return lowest.tolist(), runs

    def _take_small(self, size: int, count: int, fresh: Iterator[int]) -> Offsets:
        lent = np.flatnonzero(self._size == size)
        fullest = lent[np.argsort(-self._used[lent], kind="stable")].tolist()
        parts: list[Offsets] = []
        while count:
            if fullest:
                slab = fullest.pop(0)
            else:
                slab = next(fresh)
                self._size[slab] = size
                self._free[slab] = list(range(self.slab_elements // size - 1, -1, -1))
            free = self._free[slab]
            take = min(count, len(free))
            if take == 0:
                continue
            pages = np.array(free[-take:], np.int64)
            del free[-take:]
            self._used[slab] += take
            parts.append(slab * self.slab_elements + pages * size)
            count -= take
        return np.sort(np.concatenate(parts))

    def _take_runs(self, size: int, starts: list[int]) -> Offsets:
        for start in starts:
            run = slice(start, start + self._run(size))
            self._size[run] = size
            self._used[run] = 1
            self._heads[start] = size
        return np.sort(np.array(starts, np.int64)) * self.slab_elements

    def _free_small(self, size: int, offsets: Offsets) -> None:
        slabs, within = np.divmod(np.sort(offsets), self.slab_elements)
        found, firsts = np.unique(slabs, return_index=True)
        for slab, pages in zip(found.tolist(), np.split(within // size, firsts[1:]), strict=True):
            returned = pages.tolist()
            free = self._free.get(slab, [])
            if self._size[slab] != size or len({*returned, *free}) < len(returned) + len(free):
                raise ValueError(f"slab {slab} has no such page of {size} elements in use")
            free += returned
            free.sort(reverse=True)
            self._used[slab] -= len(returned)
            if self._used[slab] == 0:
                self._size[slab] = 0
                del self._free[slab]

    def _free_runs(self, size: int, offsets: Offsets) -> None:
        for start in (offsets // self.slab_elements).tolist():
            if self._heads.pop(start, None) != size:
                raise ValueError(f"slab {start} has no page of {size} elements in use")
            run = slice(start, start + self._run(size))
            self._size[run] = 0
            self._used[run] = 0


def _wanted(demand: Demand) -> list[tuple[int, int]]:
    """The demand in the one order that planning and taking share: large pages first, they are hardest to place."""
    return sorted(((size, count) for size, count in demand.items() if count), reverse=True)


def _highest_runs(empty: NDArray[np.bool_], length: int, count: int) -> list[int] | None:
    """First slabs of `count` disjoint runs of `length` empty slabs, highest first; marks them taken in `empty`."""
    starts: list[int] = []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], empty, [False])).astype(np.int8)))
    for begin, end in zip(edges[0::2][::-1].tolist(), edges[1::2][::-1].tolist(), strict=True):
        while end - begin >= length and len(starts) < count:
            end -= length
            starts.append(end)
            empty[end : end + length] = False
    return starts if len(starts) == count else None
