"""`RadixCache` against a naive model: a dict from token prefix to page."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraserve.kvcache.chunk_cache import ChunkCache
from loraserve.kvcache.radix_cache import RadixCache


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


class NaiveCache:
    """Every whole-page prefix of every namespace → its page. What is leased is a list of prefixes per lease."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[tuple[str, tuple[int, ...]], int] = {}
        self.leases: dict[int, list[tuple[str, tuple[int, ...]]]] = {}

    def prefixes(self, namespace: str, tokens: list[int]) -> list[tuple[str, tuple[int, ...]]]:
        size = self.page_size
        return [(namespace, tuple(tokens[: (i + 1) * size])) for i in range(len(tokens) // size)]

    def found(self, namespace: str, tokens: list[int]) -> list[tuple[str, tuple[int, ...]]]:
        keys = []
        for key in self.prefixes(namespace, tokens):
            if key not in self.pages:
                break
            keys.append(key)
        return keys

    @property
    def leased(self) -> set[tuple[str, tuple[int, ...]]]:
        return {key for keys in self.leases.values() for key in keys}

    def drop_pages(self, pages: list[int]) -> None:
        gone = set(pages)
        assert len(gone) == len(pages)
        keys = {key for key, page in self.pages.items() if page in gone}
        assert len(keys) == len(gone), "gave up a page that it did not own"
        assert not keys & self.leased, "gave up a leased page"
        self.pages = {key: page for key, page in self.pages.items() if key not in keys}
        for namespace, tokens in self.pages:  # what is left must still be reachable
            assert len(tokens) == self.page_size or (namespace, tokens[: -self.page_size]) in self.pages


class Both:
    """The real cache and the naive one, kept in step."""

    def __init__(self, page_size: int) -> None:
        self.real, self.naive = RadixCache(page_size), NaiveCache(page_size)
        self.page_size = page_size
        self.next_page = 0
        self.leases: dict[int, Any] = {}
        self.count = 0

    def hold(self, lease: Any, keys: list[tuple[str, tuple[int, ...]]]) -> None:
        self.count += 1
        self.leases[self.count], self.naive.leases[self.count] = lease, keys

    def match(self, namespace: str, tokens: list[int]) -> None:
        keys = self.naive.found(namespace, tokens)
        assert self.real.lookup(namespace, ids(tokens)) == len(keys)
        match = self.real.match(namespace, ids(tokens))
        assert match.pages.tolist() == [self.naive.pages[key] for key in keys]
        assert match.lease.num_pages == len(keys)
        self.hold(match.lease, keys)

    def insert(self, namespace: str, tokens: list[int]) -> None:
        keys = self.naive.prefixes(namespace, tokens)
        tokens = tokens[: len(keys) * self.page_size]
        offered = np.arange(self.next_page, self.next_page + len(keys), dtype=np.int32)
        self.next_page += len(keys)
        found = self.naive.found(namespace, tokens)
        inserted = self.real.insert(namespace, ids(tokens), offered)
        assert inserted.present.tolist() == [self.naive.pages[key] for key in found]
        assert inserted.lease.num_pages == len(keys)
        for key, page in zip(keys[len(found) :], offered[len(found) :].tolist(), strict=True):
            self.naive.pages[key] = page
        self.hold(inserted.lease, keys)

    def release(self, which: int) -> None:
        name = sorted(self.leases)[which % len(self.leases)]
        self.real.release(self.leases.pop(name))
        del self.naive.leases[name]

    def evict(self, count: int) -> None:
        evictable = len(self.naive.pages) - len(self.naive.leased)
        gone = self.real.evict(count).tolist()
        assert len(gone) == min(count, evictable)
        self.naive.drop_pages(gone)

    def drop(self, namespace: str) -> None:
        gone = self.real.drop_namespaces(lambda name: name == namespace).tolist()
        expected = {key for key in self.naive.pages if key[0] == namespace} - self.naive.leased
        assert len(gone) == len(expected)
        self.naive.drop_pages(gone)
        assert not expected & self.naive.pages.keys()

    def check(self) -> None:
        self.real.check()
        assert self.real.num_pages == len(self.naive.pages)
        assert self.real.evictable_pages == len(self.naive.pages) - len(self.naive.leased)
        assert sorted(self.real.held_pages().tolist()) == sorted(self.naive.pages.values())
        assert set(self.real.namespaces) == {key[0] for key in self.naive.pages}


class RadixMachine(RuleBasedStateMachine):
    """Hypothesis drives both; few tokens and namespaces, so that prefixes really meet."""

    page_size = 1
    namespaces = st.sampled_from(["a", "b"])
    tokens = st.lists(st.integers(0, 2), max_size=12)

    def __init__(self) -> None:
        super().__init__()
        self.both = Both(self.page_size)

    @rule(namespace=namespaces, tokens=tokens)
    def match(self, namespace: str, tokens: list[int]) -> None:
        self.both.match(namespace, tokens)

    @rule(namespace=namespaces, tokens=tokens)
    def insert(self, namespace: str, tokens: list[int]) -> None:
        self.both.insert(namespace, tokens)

    @precondition(lambda self: self.both.leases)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.both.release(which)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        self.both.evict(count)

    @rule(namespace=namespaces)
    def drop(self, namespace: str) -> None:
        self.both.drop(namespace)

    @invariant()
    def agree(self) -> None:
        self.both.check()


class PagedRadixMachine(RadixMachine):
    """Pages of four; tokens come in runs so that pages repeat."""

    page_size = 4

    @rule(namespace=RadixMachine.namespaces, runs=st.lists(st.integers(0, 2), max_size=5), cut=st.integers(0, 3))
    def insert_runs(self, namespace: str, runs: list[int], cut: int) -> None:
        tokens = [token for token in runs for _ in range(4)]
        self.both.insert(namespace, tokens[: len(tokens) - cut])


RadixMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
PagedRadixMachine.TestCase.settings = RadixMachine.TestCase.settings
TestRadixMachine = RadixMachine.TestCase
TestPagedRadixMachine = PagedRadixMachine.TestCase


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_long_random_walk(page_size: int) -> None:
    rng = random.Random(page_size)
    both = Both(page_size)
    stems = [[rng.randrange(5) for _ in range(8 * page_size)] for _ in range(3)]
    for step in range(1000):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(0, len(stem))] + [rng.randrange(3) for _ in range(rng.randint(0, 3 * page_size))]
        action = rng.random()
        if action < 0.3:
            both.match(rng.choice("abc"), tokens)
        elif action < 0.6:
            both.insert(rng.choice("abc"), tokens)
        elif action < 0.9:
            if both.leases:
                both.release(rng.randrange(99))
        elif action < 0.99:
            both.evict(rng.randint(0, 12))
        else:
            both.drop(rng.choice("abc"))
        if step % 10 == 0:
            both.check()
    while both.leases:
        both.release(0)
    both.evict(10**6)
    both.check()
    assert both.real.num_pages == 0
    assert both.real.namespaces == ()


def test_a_lease_survives_splits_above_it() -> None:
    cache = RadixCache(2)
    first = cache.insert("", ids([1, 1, 2, 2, 3, 3]), np.array([0, 1, 2], np.int32))
    fork = cache.insert("", ids([1, 1, 2, 2, 9, 9]), np.array([5, 6, 7], np.int32))
    assert fork.present.tolist() == [0, 1]
    cache.release(fork.lease)
    assert cache.evict(99).tolist() == [7], "all that the first lease covers must stay"
    cache.release(first.lease)
    assert cache.evictable_pages == 3
    with pytest.raises(ValueError, match="not held"):
        cache.release(first.lease)
    with pytest.raises(ValueError, match="not held"):
        RadixCache(2).release(fork.lease)
    cache.check()


def test_a_leaf_gives_up_its_end_first() -> None:
    cache = RadixCache(1)
    cache.release(cache.insert("", ids([1, 2, 3, 4]), np.array([10, 11, 12, 13], np.int32)).lease)
    assert cache.evict(2).tolist() == [12, 13]
    assert cache.lookup("", ids([1, 2, 3, 4])) == 2
    cache.check()


def test_the_callers_arrays_are_not_kept() -> None:
    cache = RadixCache(1)
    tokens, pages = ids([1, 2, 3]), np.array([0, 1, 2], np.int32)
    cache.insert("", tokens, pages)
    tokens[:], pages[:] = 9, 9
    assert cache.match("", ids([1, 2, 3])).pages.tolist() == [0, 1, 2]
    assert cache.lookup("", np.array([1, 2, 3], np.int32)) == 3, "any integer type finds the same prefix"


def test_lookup_is_no_use() -> None:
    cache = RadixCache(1)
    for token in (1, 2):
        cache.release(cache.insert("", ids([token]), np.array([token], np.int32)).lease)
    cache.lookup("", ids([1]))
    assert cache.evict(1).tolist() == [1], "looking must not make a prefix recent"


def test_tokens_and_pages_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fill"):
        RadixCache(4).insert("", ids([1, 2, 3]), np.array([0], np.int32))


def test_chunk_cache_holds_nothing() -> None:
    cache = ChunkCache()
    inserted = cache.insert("", ids([1, 2]), np.array([0, 1], np.int32))
    assert inserted.present.size == inserted.lease.num_pages == 0
    match = cache.match("", ids([1, 2]))
    assert match.pages.size == match.lease.num_pages == cache.lookup("", ids([1, 2])) == 0
    cache.release(match.lease)
    assert cache.evict(5).size == cache.drop_namespaces(lambda _: True).size == cache.held_pages().size == 0
    assert cache.num_pages == cache.evictable_pages == 0
    cache.check()
