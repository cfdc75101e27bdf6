"""Eviction policies and the queue of leaves."""

import random

import numpy as np
import pytest

from loraserve.errors import ConfigError
from loraserve.kvcache.eviction import EvictionQueue, LeastRecentlyUsed, RadixNode, make_policy
from loraserve.kvcache.radix_cache import RadixCache


def node(used: int) -> RadixNode:
    return RadixNode(None, np.zeros(1, np.int64), np.zeros(1, np.int32), used)


def test_queue_against_a_sorted_list() -> None:
    rng = random.Random(1)
    queue, live = EvictionQueue(LeastRecentlyUsed()), []
    for now in range(3000):
        if rng.random() < 0.5:
            live.append(node(now))
            queue.add(live[-1])
        elif live:
            gone = live.pop(rng.randrange(len(live)))
            queue.discard(gone)
            queue.discard(gone)  # twice is once
            if rng.random() < 0.6:  # used again
                gone.last_used = now
                queue.add(gone)
                live.append(gone)
        assert len(queue) == len(live)
        assert queue.first() is (min(live, key=lambda n: n.last_used) if live else None)
        assert len(queue._heap) <= 64 + 2 * len(live) + 1, "dead entries must not pile up"


def test_queue_refuses_a_leaf_twice() -> None:
    queue, leaf = EvictionQueue(LeastRecentlyUsed()), node(1)
    queue.add(leaf)
    with pytest.raises(AssertionError, match="twice"):
        queue.add(leaf)


@pytest.mark.parametrize(("name", "order"), [("lru", "bca"), ("lfu", "cba"), ("fifo", "abc")])
def test_policies_evict_in_their_own_order(name: str, order: str) -> None:
    cache = RadixCache(1, make_policy(name))
    prefixes = {letter: np.array([i], np.int64) for i, letter in enumerate("abc")}
    for i, letter in enumerate("abc"):  # made in this order, one page each
        cache.release(cache.insert("", prefixes[letter], np.array([i], np.int32)).lease)
    for letter in "aaabbca":  # a most often and last; b twice; c once, but after b
        cache.release(cache.match("", prefixes[letter]).lease)
    assert "".join("abc"[int(cache.evict(1)[0])] for _ in range(3)) == order
    cache.check()


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="lru, lfu, fifo"):
        make_policy("random")
