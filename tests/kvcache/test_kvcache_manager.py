"""`CacheManager`: rows and pages through whole lives of requests."""

import random

import numpy as np
import pytest

from loraserve.config import CacheConfig
from loraserve.errors import ConfigError
from loraserve.kvcache.manager import CacheManager
from loraserve.scheduler.interfaces import KVSide


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


def manager(
    locations: int = 32, page_size: int = 4, rows: int = 4, context: int = 24, **config: object
) -> CacheManager:
    return CacheManager(CacheConfig(page_size=page_size, **config), locations, rows, context)  # type: ignore[arg-type]


def start(cache: CacheManager, namespace: str, tokens: np.ndarray) -> tuple[int, int]:
    """What admission does: all but the last token may be reused, and everything gets a place."""
    lease = cache.acquire(namespace, tokens[:-1])
    assert lease is not None
    assert cache.extend(lease.row, tokens.size)
    return lease.row, lease.num_cached


def test_it_is_the_schedulers_kv_side() -> None:
    side: KVSide = manager()
    assert (side.page_size, side.num_pages, side.free_pages, side.free_rows, side.max_context) == (4, 8, 8, 4, 24)
    assert side.table.shape == (4, 24)


def test_a_finished_request_leaves_its_full_pages() -> None:
    cache = manager()
    tokens = ids(*range(10))
    row, cached = start(cache, "n", tokens)
    assert (cached, cache.pages_of(row)) == (0, 3)
    assert sorted(cache.table[row, :12].tolist()) == list(range(12))
    places = cache.table[row, :8].tolist()
    cache.release(row, tokens)
    assert (cache.free_pages, cache.evictable_pages) == (6, 2)
    row, cached = start(cache, "n", tokens)
    assert cached == 8
    assert cache.table[row, :8].tolist() == places
    assert cache.evictable_pages == 0
    other, cached = start(cache, "other", tokens)
    assert cached == 0, "namespaces share nothing"
    cache.check()
    for held in (row, other):
        cache.release(held, tokens)
    cache.check()


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = manager()
    tokens = ids(*range(8))
    row, _ = start(cache, "n", tokens)
    cache.release(row, tokens)
    assert cache.lookup("n", tokens) == 8
    _, cached = start(cache, "n", tokens)
    assert cached == 4, "of 7 reusable tokens one whole page"


def test_publishing_shares_before_the_end_and_frees_duplicates() -> None:
    cache = manager()
    tokens = ids(*range(9))
    first, _ = start(cache, "n", tokens)
    second, cached = start(cache, "n", tokens)
    assert cached == 0
    assert cache.free_pages == 2
    cache.publish(first, tokens)
    third, cached = start(cache, "n", tokens)
    assert cached == 8
    before = cache.table[second, 8:12].tolist()
    cache.publish(second, tokens)
    assert cache.free_pages == 8 - 2 - 3, "two shared pages and one own page of each row"
    assert cache.table[second, :8].tolist() == cache.table[first, :8].tolist()
    assert cache.table[second, 8:12].tolist() == before
    cache.publish(second, tokens)  # nothing new
    cache.check()
    for row in (first, second, third):
        cache.release(row, tokens)
    cache.check()
    assert (cache.free_pages, cache.evictable_pages) == (6, 2)


def test_an_overtaken_request_finds_part_of_its_prefix_present() -> None:
    cache = manager()
    long, short = ids(*range(13)), ids(*range(5), 99, 99, 99, 99)
    a, _ = start(cache, "n", long)
    b, _ = start(cache, "n", short)
    cache.publish(b, short)
    cache.publish(a, long)  # its first page is b's now, the others go to the tree
    assert cache.table[a, :4].tolist() == cache.table[b, :4].tolist()
    cache.check()
    cache.release(a, long)
    cache.release(b, short)
    assert cache.evictable_pages == 4
    cache.check()


def test_extend_evicts_or_changes_nothing() -> None:
    cache = manager()
    row, _ = start(cache, "n", ids(*range(16)))
    cache.release(row, ids(*range(16)))
    assert (cache.free_pages, cache.evictable_pages) == (4, 4)
    row, _ = start(cache, "m", ids(*range(24)))
    assert (cache.free_pages, cache.evictable_pages) == (0, 2)
    other, _ = start(cache, "m", ids(*range(8)))
    assert (cache.free_pages, cache.evictable_pages) == (0, 0)
    before = cache.table.copy()
    assert not cache.extend(other, 9)
    assert np.array_equal(before, cache.table)
    assert cache.pages_of(other) == 2
    assert cache.extend(other, 8), "what is there needs no page"
    cache.check()


def test_an_aborted_admission_leaves_no_trace() -> None:
    cache = manager()
    tokens = ids(*range(9))
    row, _ = start(cache, "n", tokens)
    cache.release(row, tokens)
    lease = cache.acquire("n", tokens[:-1])
    assert lease is not None
    assert cache.evictable_pages == 0
    cache.release(lease.row, tokens[:0])
    assert (cache.free_pages, cache.evictable_pages, cache.free_rows) == (6, 2, 4)
    cache.check()


def test_rows_run_out() -> None:
    cache = manager(rows=1)
    assert cache.acquire("n", ids(1)) is not None
    assert cache.acquire("n", ids(1)) is None


def test_misuse_is_named() -> None:
    cache = manager()
    for call in (
        lambda: cache.pages_of(0),
        lambda: cache.extend(0, 1),
        lambda: cache.publish(0, ids(1)),
        lambda: cache.release(0, ids(1)),
        lambda: cache.release(99, ids(1)),
    ):
        with pytest.raises(ValueError, match="not held"):
            call()
    row, _ = start(cache, "n", ids(1, 2))
    with pytest.raises(ValueError, match="cannot have 25 tokens"):
        cache.extend(row, 25)
    with pytest.raises(ValueError, match="has 1 pages, not the 2"):
        cache.publish(row, ids(*range(8)))
    with pytest.raises(ConfigError):
        manager(locations=3)


def test_the_last_page_may_reach_past_the_context() -> None:
    cache = manager(context=10)
    tokens = ids(*range(10))
    row, _ = start(cache, "n", tokens)
    assert cache.pages_of(row) == 3
    cache.release(row, tokens)
    cache.check()
    assert cache.free_pages == 6


def test_dropping_namespaces_spares_what_is_used() -> None:
    cache = manager()
    tokens = ids(*range(9))
    for namespace in ("a", "b"):
        row, _ = start(cache, namespace, tokens)
        cache.release(row, tokens)
    row, cached = start(cache, "a", ids(*range(5)))
    assert cached == 4
    assert cache.drop_namespaces(lambda name: name == "a") == 1, "the second page; the first is leased"
    assert cache.lookup("b", tokens) == 8
    assert cache.lookup("a", tokens) == 4
    cache.release(row, ids(*range(5)))
    assert cache.drop_namespaces(lambda name: name == "a") == 1
    cache.check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_random_lives_read_back_what_they_wrote(page_size: int, prefix_cache: bool) -> None:
    """Each location stores (namespace, prefix); every row must always read its own prefixes."""
    rng = random.Random(page_size)
    cache = manager(
        16 * 16, page_size, rows=5, context=90, prefix_cache=prefix_cache, eviction=rng.choice(["lru", "lfu"])
    )
    stored: dict[int, tuple[str, tuple[int, ...]]] = {}
    stems = [[rng.randrange(4) for _ in range(50)] for _ in range(2)]
    rows: dict[int, tuple[str, list[int], int]] = {}  # row → namespace, tokens, how many are computed
    for step in range(1000):
        if rng.random() < 0.3 and cache.free_rows:
            namespace, tokens = rng.choice("ab"), [*rng.choice(stems)[: rng.randint(1, 50)], rng.randrange(4)]
            lease = cache.acquire(namespace, ids(*tokens[:-1]))
            assert lease is not None
            if cache.extend(lease.row, len(tokens)):
                rows[lease.row] = (namespace, tokens, lease.num_cached)
            else:
                cache.release(lease.row, ids())
        if rows:
            row = rng.choice(list(rows))
            namespace, tokens, done = rows[row]
            action = rng.random()
            if action < 0.7:
                if done == len(tokens) and len(tokens) < 90 and cache.extend(row, len(tokens) + 1):
                    tokens.append(rng.randrange(4))
                for pos in range(done, len(tokens)):
                    stored[int(cache.table[row, pos])] = (namespace, tuple(tokens[: pos + 1]))
                rows[row] = (namespace, tokens, len(tokens))
                if rng.random() < 0.3:
                    cache.publish(row, ids(*tokens))
            else:
                cache.release(row, ids(*tokens[:done]))
                del rows[row]
        for row, (namespace, tokens, done) in rows.items():
            for pos in range(done):
                assert stored[int(cache.table[row, pos])] == (namespace, tuple(tokens[: pos + 1]))
        if step % 20 == 0:
            cache.check()
    for row, (_, tokens, done) in rows.items():
        cache.release(row, ids(*tokens[:done]))
    cache.check()


def test_pages_before_an_overlay_are_everybodys() -> None:
    """Shared are whole pages before the first overlay; from there on only who has the same ones, begun alike."""
    cache = manager(locations=256, rows=8, context=64)
    tokens = ids(*range(30, 50))

    def cached(*overlays: tuple[int, str]) -> int:
        return cache.lookup("n", tokens, overlays)

    row = cache.acquire("n", tokens[:-1], [(10, "x")])
    assert row is not None
    assert row.num_cached == 0
    assert cache.extend(row.row, tokens.size)
    cache.publish(row.row, tokens)
    assert cached((10, "x")) == 20
    # The invocation lies in the third page: two are the base's.
    assert cached() == cached((10, "y")) == cached((9, "x")) == cached((12, "x")) == 8
    assert cached((7, "x")) == cached((4, "y")) == 4
    assert cached((3, "x")) == cached((0, "x")) == 0
    assert cache.lookup("m", tokens, [(10, "x")]) == 0
    # Another overlay that begins later shares what only the first one had a part in.
    assert cached((10, "x"), (16, "y")) == cached((16, "y"), (10, "x")) == 16
    assert cached((10, "x"), (12, "y")) == 12
    assert cached((10, "x"), (30, "y")) == 20
    # Who has no overlay brings pages too, and finds those before.
    plain = cache.acquire("n", tokens[:-1])
    assert plain is not None
    assert plain.num_cached == 8
    assert cache.extend(plain.row, tokens.size)
    cache.release(plain.row, tokens)
    assert cached() == cached((20, "z")) == 20
    assert cached((16, "z")) == 16
    cache.release(row.row, tokens)
    cache.check()


def test_dropping_takes_an_overlays_pages_and_leaves_those_before_it() -> None:
    cache = manager(locations=256, rows=8, context=64)
    tokens = ids(*range(30, 50))
    for overlays in ([(10, "x")], [(10, "x"), (16, "y")], [(4, "y")], [(10, "w")]):
        row = cache.acquire("n", tokens[:-1], overlays)
        assert row is not None
        assert cache.extend(row.row, tokens.size)
        cache.release(row.row, tokens)
    held = cache.acquire("n", tokens, [(10, "w")])
    assert held is not None
    assert cache.evictable_pages == 3 + 1 + 4
    assert cache.drop_namespaces(lambda name: "w" in name) == 0, "a row uses them"
    assert cache.drop_namespaces(lambda name: "x" in name) == 4
    assert cache.lookup("n", tokens, [(10, "x")]) == 8
    assert cache.lookup("n", tokens, [(4, "y")]) == 20
    cache.check()
    cache.release(held.row, tokens)
    assert cache.drop_namespaces(lambda name: "y" in name) == 4
    cache.check()
    assert cache.lookup("n", tokens) == 8
    # A number is never given twice: what was left behind for a row is nobody's now.
    assert cache.lookup("n", tokens, [(10, "w")]) == 8


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_overlays_are_never_mixed_up(page_size: int) -> None:
    """Each location stores its prefix and which overlays each token had; every row must find its own."""
    rng = random.Random(page_size)
    cache = manager(16 * 24, page_size, rows=4, context=64)
    stored: dict[int, tuple[object, ...]] = {}
    stem = [rng.randrange(4) for _ in range(40)]
    reused = 0
    for step in range(600):
        tokens = [*stem[: rng.randint(1, 40)], *(rng.randrange(4) for _ in range(rng.randint(1, 8)))]
        overlays = [(rng.randrange(48), name) for name in rng.sample("xyz", rng.choice([0, 1, 1, 2]))]
        history = tuple((token, frozenset(n for s, n in overlays if s <= at)) for at, token in enumerate(tokens))
        lease = cache.acquire("n", ids(*tokens[:-1]), overlays)
        assert lease is not None
        assert cache.extend(lease.row, len(tokens))
        places = cache.table[lease.row, : len(tokens)].tolist()
        for at in range(lease.num_cached):
            assert stored[places[at]] == history[: at + 1]
        reused += lease.num_cached
        for at in range(lease.num_cached, len(tokens)):
            stored[places[at]] = history[: at + 1]
        cache.release(lease.row, ids(*tokens))
        if rng.random() < 0.02:
            name = rng.choice("xyz")
            cache.drop_namespaces(lambda text, name=name: name in text)  # type: ignore[misc]
        if step % 20 == 0:
            cache.check()
    assert reused > 2000
