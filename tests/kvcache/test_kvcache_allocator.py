"""Page allocator and level-1 rows against naive models."""

import random

import numpy as np
import pytest

from loraserve.errors import ConfigError
from loraserve.kvcache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    make_allocator,
)
from loraserve.kvcache.req_to_token import DirtySpan, ReqToTokenPool


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_random_walk_against_a_set(page_size: int) -> None:
    rng = random.Random(page_size)
    pool = make_allocator(40 * page_size + (page_size - 1), page_size)
    assert pool.num_pages == 40
    free, held = set(range(40)), []
    for _ in range(600):
        if rng.random() < 0.55:
            count = rng.randint(0, 9)
            got = pool.alloc(count)
            if count > len(free):
                assert got is None
            else:
                assert got is not None
                assert set(got.tolist()) <= free
                assert len(set(got.tolist())) == count
                free -= set(got.tolist())
                held += got.tolist()
        else:
            rng.shuffle(held)
            gone = [held.pop() for _ in range(rng.randint(0, min(7, len(held))))]
            pool.free(np.array(gone, np.int32))
            free |= set(gone)
        assert pool.num_free == len(free)
        pool.check(np.array(held, np.int32))


def test_alloc_that_does_not_fit_takes_nothing() -> None:
    pool = PagedTokenToKVPoolAllocator(3, 16)
    assert pool.alloc(4) is None
    assert pool.num_free == 3
    assert pool.alloc(3) is not None
    assert pool.alloc(1) is None
    with pytest.raises(ValueError, match="cannot allocate"):
        pool.alloc(-1)


@pytest.mark.parametrize("bad", [[2], [0, 0], [0, 2], [5], [-1]])
def test_double_and_foreign_frees_are_refused_whole(bad: list[int]) -> None:
    pool = PagedTokenToKVPoolAllocator(4, 4)
    taken = pool.alloc(2)
    assert sorted(taken.tolist()) == [0, 1], "low pages go out first"
    with pytest.raises(ValueError, match=r"double free|not all of a pool"):
        pool.free(pages(*bad))
    assert pool.num_free == 2, "a refused free must change nothing"
    pool.check(taken)


def test_check_finds_pages_that_nobody_accounts_for() -> None:
    pool = PagedTokenToKVPoolAllocator(4, 4)
    taken = pool.alloc(2)
    pool.check(taken)
    with pytest.raises(AssertionError, match="accounted"):
        pool.check(taken[:1])
    with pytest.raises(AssertionError, match="two holders"):
        pool.check(pages(int(taken[0]), int(taken[0])))
    with pytest.raises(AssertionError, match="free"):
        pool.check(pages(2, 3))


def test_locations_of_pages() -> None:
    assert PagedTokenToKVPoolAllocator(8, 4).locations(pages(2, 0)).tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    single = make_allocator(8, 1)
    assert isinstance(single, TokenToKVPoolAllocator)
    assert single.locations(pages(5, 3)).tolist() == [5, 3]


@pytest.mark.parametrize(("locations", "page_size"), [(100, 0), (100, 65), (3, 4), (0, 1), (2**33, 1)])
def test_impossible_pools_are_named_errors(locations: int, page_size: int) -> None:
    with pytest.raises(ConfigError):
        make_allocator(locations, page_size)


def test_rows_are_given_once_and_taken_back_once() -> None:
    pool = ReqToTokenPool(3, 8)
    rows = [pool.alloc() for _ in range(3)]
    assert sorted(rows) == [0, 1, 2]  # type: ignore[type-var]
    assert pool.alloc() is None
    pool.free(1)
    for bad in (1, 7, -1):
        with pytest.raises(ValueError, match="not held"):
            pool.free(bad)
    assert pool.num_free == 1
    assert pool.alloc() == 1
    pool.check()
    with pytest.raises(ConfigError):
        ReqToTokenPool(0, 8)


def test_dirty_spans_cover_every_write() -> None:
    rng = random.Random(0)
    pool = ReqToTokenPool(4, 32)
    copy = pool.table.copy()
    for _ in range(200):
        for _ in range(rng.randint(0, 5)):
            start = rng.randrange(32)
            values = np.arange(rng.randint(0, 32 - start), dtype=np.int32) + rng.randrange(99)
            pool.write(rng.randrange(4), start, values)
        for row, start, stop in pool.take_dirty():
            copy[row, start:stop] = pool.table[row, start:stop]
        assert np.array_equal(copy, pool.table)
        assert pool.take_dirty() == []
    pool.write(2, 3, pages(9, 9))
    assert pool.take_dirty() == [DirtySpan(2, 3, 5)]
