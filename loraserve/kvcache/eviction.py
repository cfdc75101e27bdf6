"""Which cached prefix goes first: policies that order leaves, and the queue of leaves that may go."""

from __future__ import annotations

import heapq
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loraserve.errors import ConfigError
from loraserve.kvcache.allocator import Pages


class RadixNode:
    """An edge of the tree with its tokens (whole pages) and the pages that hold their KV."""

    __slots__ = ("children", "created", "hits", "last_used", "pages", "parent", "queue_ticket", "refs", "tokens")

    def __init__(self, parent: RadixNode | None, tokens: NDArray[np.int64], pages: Pages, now: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, RadixNode] = {}
        self.refs = 0  # leases on this node or below it
        self.created = now
        self.last_used = now
        self.hits = 0
        self.queue_ticket = 0  # of its live entry in the eviction queue; 0: it has none


class EvictionPolicy(Protocol):
    """Orders leaves: the smallest key is evicted first."""

    def key(self, node: RadixNode) -> tuple[int, int]:
        """Sort key of an unleased leaf; it cannot change while the leaf stays unleased."""


class LeastRecentlyUsed:
    """The leaf that was used longest ago goes first."""

    def key(self, node: RadixNode) -> tuple[int, int]:
        """Time of last use."""
        return node.last_used, 0


class LeastFrequentlyUsed:
    """The leaf that was matched least often goes first; among equals the one used longest ago."""

    def key(self, node: RadixNode) -> tuple[int, int]:
        """Matches, then time of last use."""
        return node.hits, node.last_used


class FirstInFirstOut:
    """The leaf that was made first goes first."""

    def key(self, node: RadixNode) -> tuple[int, int]:
        """Time of making."""
        return node.created, 0


def make_policy(name: str) -> EvictionPolicy:
    """The policy called `lru`, `lfu` or `fifo`. Raises `ConfigError` for another name."""
    policies: dict[str, type[EvictionPolicy]] = {
        "lru": LeastRecentlyUsed,
        "lfu": LeastFrequentlyUsed,
        "fifo": FirstInFirstOut,
    }
    if name not in policies:
        raise ConfigError(f"eviction must be one of {', '.join(policies)}, got {name!r}")
    return policies[name]()


class EvictionQueue:
    """Unleased leaves in the policy's order.

    A heap whose entries die in place: `discard` only clears the node's ticket, and dead entries are dropped when they
    come up or when they outnumber the live ones. So `add`, `discard` and `first` cost O(log n) amortised.
    """

    __slots__ = ("_heap", "_last_ticket", "_num_live", "_policy")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, int], int, RadixNode]] = []  # key, ticket (unique), node
        self._last_ticket = 0
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __contains__(self, node: RadixNode) -> bool:
        return node.queue_ticket != 0

    def add(self, node: RadixNode) -> None:
        """The node became an unleased leaf."""
        assert node.queue_ticket == 0, "a leaf is queued twice"
        self._last_ticket += 1
        node.queue_ticket = self._last_ticket
        self._num_live += 1
        heapq.heappush(self._heap, (self._policy.key(node), node.queue_ticket, node))

    def discard(self, node: RadixNode) -> None:
        """The node is leased, got a child or is gone; nothing happens if it was not queued."""
        if node.queue_ticket == 0:
            return
        node.queue_ticket = 0
        self._num_live -= 1
        if len(self._heap) > 64 + 2 * self._num_live:
            self._heap = [entry for entry in self._heap if entry[2].queue_ticket == entry[1]]
            heapq.heapify(self._heap)

    def first(self) -> RadixNode | None:
        """The leaf to evict next; None if there is none. It stays queued."""
        while self._heap:
            _, ticket, node = self._heap[0]
            if node.queue_ticket == ticket:
                return node
            heapq.heappop(self._heap)
        return None
