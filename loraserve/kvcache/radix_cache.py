"""`RadixCache`: a tree of token prefixes for each namespace; edges are whole pages of KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from loraserve.kvcache.allocator import Pages
from loraserve.kvcache.eviction import EvictionPolicy, EvictionQueue, LeastRecentlyUsed, RadixNode
from loraserve.kvcache.overlays import marks_of
from loraserve.kvcache.prefix import NO_PAGES, Inserted, Lease, Match, Tokens

_NO_TOKENS: Tokens = np.empty(0, np.int64)


def _as_key_type(tokens: Tokens) -> Tokens:
    """Children are found by the bytes of their first page, so every token array must have one type."""
    return np.ascontiguousarray(tokens, np.int64)


class RadixLease:
    """A lease on the path from a root to one node. Splits above the node do not touch it."""

    __slots__ = ("_num_pages", "node", "owner")

    def __init__(self, owner: RadixCache, node: RadixNode | None, num_pages: int) -> None:
        self.owner: RadixCache | None = owner  # None once released
        self.node = node  # None: a lease on nothing
        self._num_pages = num_pages

    @property
    def num_pages(self) -> int:
        """Pages of the path."""
        return self._num_pages


class RadixCache:
    """The `PrefixCache` that shares.

    A node is leased if any lease ends at it or below it, so unleased nodes always hang together at the bottom and all
    of them can be evicted, leaf by leaf. Namespaces share nothing; the root of one goes when its last page does.
    """

    def __init__(self, page_size: int, policy: EvictionPolicy | None = None) -> None:
        self.page_size = page_size
        self._roots: dict[str, RadixNode] = {}
        self._namespaces: dict[RadixNode, str] = {}  # of each root
        self._queue = EvictionQueue(policy or LeastRecentlyUsed())
        self._now = 0  # counts uses; a wall clock could stand still
        self._num_pages = 0
        self._evictable = 0

    @property
    def num_pages(self) -> int:
        """Pages that the tree owns."""
        return self._num_pages

    @property
    def evictable_pages(self) -> int:
        """Of those, pages without a lease."""
        return self._evictable

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespaces that have pages."""
        return tuple(self._roots)

    def lookup(self, namespace: str, tokens: Tokens) -> int:
        """Pages that `match` would find. Takes no lease and does not count as use."""
        tokens = _as_key_type(tokens)
        node, pos, found = self._roots.get(namespace), 0, 0
        while node is not None:
            node = node.children.get(self._key(tokens, pos))
            if node is None:
                break
            common = self._common_pages(node, tokens, pos)
            found += common
            pos += common * self.page_size
            if common < node.pages.size:
                break
        return found

    def match(self, namespace: str, tokens: Tokens) -> Match:
        """The longest cached prefix of whole pages of `tokens`, under a new lease."""
        path = self._descend(namespace, _as_key_type(tokens))
        for node in path:
            node.hits += 1
        pages = np.concatenate([node.pages for node in path]) if path else NO_PAGES
        return Match(pages, self._protect(path[-1] if path else None, pages.size))

    def insert(self, namespace: str, tokens: Tokens, pages: Pages) -> Inserted:
        """Offer the KV of `tokens` (whole pages) in `pages`; what is new becomes the tree's own.

        Raises ValueError if tokens and pages do not fit together.
        """
        if tokens.size != pages.size * self.page_size:
            raise ValueError(f"{tokens.size} tokens do not fill {pages.size} pages of {self.page_size}")
        if pages.size == 0:
            return Inserted(NO_PAGES, self._protect(None, 0))
        tokens = _as_key_type(tokens)
        path = self._descend(namespace, tokens)
        present = np.concatenate([node.pages for node in path]) if path else NO_PAGES
        end = path[-1] if path else None
        if present.size < pages.size:
            end = self._add_leaf(end or self._root(namespace), tokens[present.size * self.page_size :], pages, present)
        return Inserted(present, self._protect(end, pages.size))

    def release(self, lease: Lease) -> None:
        """Give a lease back. Raises ValueError if it was given back before or belongs to another cache."""
        if not isinstance(lease, RadixLease) or lease.owner is not self:
            raise ValueError("the lease is not held")
        lease.owner = None
        node = lease.node
        while node is not None and node.parent is not None:
            node.refs -= 1
            if node.refs == 0:
                self._evictable += node.pages.size
                if not node.children:
                    self._queue.add(node)
            node = node.parent

    def evict(self, num_pages: int) -> Pages:
        """Give up `num_pages` unleased pages (fewer if there are fewer), from the ends of leaves inwards."""
        freed: list[Pages] = []
        while num_pages > 0:
            leaf = self._queue.first()
            if leaf is None:
                break
            if leaf.pages.size <= num_pages:
                num_pages -= leaf.pages.size
                freed.append(leaf.pages)
                self._remove_leaf(leaf)
                continue
            keep = leaf.pages.size - num_pages
            freed.append(leaf.pages[keep:])
            self._shorten(leaf, keep)
            break
        return np.concatenate(freed) if freed else NO_PAGES

    def drop_namespaces(self, matches: Callable[[str], bool]) -> Pages:
        """Give up all unleased pages of the namespaces that `matches`."""
        freed: list[Pages] = []
        for namespace in [name for name in self._roots if matches(name)]:
            # Children come after their parents, so from behind every unleased node is a leaf when its turn comes.
            for node in reversed(list(self._below(self._roots[namespace]))):
                if node.refs == 0:
                    freed.append(node.pages)
                    self._remove_leaf(node)
        return np.concatenate(freed) if freed else NO_PAGES

    def drop_marked(self, marks: frozenset[int]) -> Pages:
        """Give up all unleased pages whose keys carry one of these overlay marks."""
        freed: list[Pages] = []
        wanted = np.fromiter(marks, np.int64, len(marks))
        for root in list(self._roots.values()) if marks else []:
            # As above; and overlays do not end, so below a marked page there are only marked ones.
            for node in reversed(list(self._below(root))):
                marked = np.isin(marks_of(node.tokens[:: self.page_size]), wanted)
                if node.refs or not marked.any():
                    continue
                keep = int(marked.argmax())
                freed.append(node.pages[keep:])
                if keep:
                    self._shorten(node, keep)
                else:
                    self._remove_leaf(node)
        return np.concatenate(freed) if freed else NO_PAGES

    def held_pages(self) -> Pages:
        """All pages that the tree owns."""
        pages = [node.pages for root in self._roots.values() for node in self._below(root)]
        return np.concatenate(pages) if pages else NO_PAGES

    def check(self) -> None:
        """Raise AssertionError if counts and structure differ."""
        owned = evictable = queued = 0
        for namespace, root in self._roots.items():
            assert root.children, f"namespace {namespace!r} has a root but no page"
            assert self._namespaces[root] == namespace
            for node in self._below(root):
                assert node.parent is not None
                assert node.pages.size > 0
                assert node.tokens.size == node.pages.size * self.page_size
                assert node.parent.children[self._key(node.tokens, 0)] is node, "a child hangs under a wrong key"
                below = sum(child.refs for child in node.children.values())
                assert node.refs >= below, "a lease below is not counted above"
                owned += node.pages.size
                evictable += node.pages.size if node.refs == 0 else 0
                may_go = node.refs == 0 and not node.children
                assert (node in self._queue) == may_go, "the eviction queue holds other leaves than may go"
                queued += may_go
        assert len(self._namespaces) == len(self._roots)
        assert len(self._queue) == queued
        assert self._num_pages == owned, f"{owned} pages in the tree, {self._num_pages} counted"
        assert self._evictable == evictable, f"{evictable} pages evictable, {self._evictable} counted"

    # -- structure ------------------------------------------------------------------------------------------------

    def _key(self, tokens: Tokens, pos: int) -> bytes:
        return tokens[pos : pos + self.page_size].tobytes()

    def _common_pages(self, node: RadixNode, tokens: Tokens, pos: int) -> int:
        rest = tokens[pos : pos + node.tokens.size]
        differs = node.tokens[: rest.size] != rest
        first = int(differs.argmax())
        return (first if differs[first] else rest.size) // self.page_size

    def _descend(self, namespace: str, tokens: Tokens) -> list[RadixNode]:
        """Nodes of the longest cached prefix, marked as used; the last one is split to end where the prefix ends."""
        self._now += 1
        path: list[RadixNode] = []
        node, pos = self._roots.get(namespace), 0
        while node is not None:
            node = node.children.get(self._key(tokens, pos))
            if node is None:
                break
            common = self._common_pages(node, tokens, pos)
            pos += common * self.page_size
            partial = common < node.pages.size
            if partial:
                node = self._split(node, common)
            node.last_used = self._now
            path.append(node)
            if partial:
                break
        # An unleased leaf on the path has a queue entry with its old key; whoever descends protects the path next,
        # which takes it out of the queue, and a later release enters it anew.
        return path

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Put a new node with the first `num_pages` above `node`, which keeps the rest, its leases and children."""
        parent, cut = node.parent, num_pages * self.page_size
        assert parent is not None
        head = RadixNode(parent, node.tokens[:cut], node.pages[:num_pages], node.created)
        head.refs, head.hits, head.last_used = node.refs, node.hits, node.last_used
        parent.children[self._key(node.tokens, 0)] = head
        node.parent, node.tokens, node.pages = head, node.tokens[cut:], node.pages[num_pages:]
        head.children[self._key(node.tokens, 0)] = node
        return head

    def _root(self, namespace: str) -> RadixNode:
        root = self._roots.get(namespace)
        if root is None:
            root = RadixNode(None, _NO_TOKENS, NO_PAGES, self._now)
            self._roots[namespace] = root
            self._namespaces[root] = namespace
        return root

    def _add_leaf(self, parent: RadixNode, tokens: Tokens, pages: Pages, present: Pages) -> RadixNode:
        """A new unleased leaf under `parent`; the caller protects it next. Arrays are copied: the caller's may live."""
        leaf = RadixNode(parent, tokens.copy(), pages[present.size :].copy(), self._now)
        parent.children[self._key(leaf.tokens, 0)] = leaf
        self._queue.discard(parent)
        self._num_pages += leaf.pages.size
        self._evictable += leaf.pages.size
        return leaf

    def _shorten(self, leaf: RadixNode, num_pages: int) -> None:
        """Leave an unleased leaf its first `num_pages`."""
        assert not leaf.children
        assert leaf.refs == 0
        gone = leaf.pages.size - num_pages
        leaf.pages, leaf.tokens = leaf.pages[:num_pages], leaf.tokens[: num_pages * self.page_size]
        self._num_pages -= gone
        self._evictable -= gone

    def _remove_leaf(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        assert leaf.refs == 0
        self._queue.discard(leaf)
        self._num_pages -= leaf.pages.size
        self._evictable -= leaf.pages.size
        del parent.children[self._key(leaf.tokens, 0)]
        leaf.parent = None
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[self._namespaces.pop(parent)]
        elif parent.refs == 0:
            self._queue.add(parent)

    def _protect(self, end: RadixNode | None, num_pages: int) -> RadixLease:
        node = end
        while node is not None and node.parent is not None:
            if node.refs == 0:
                self._evictable -= node.pages.size
                self._queue.discard(node)
            node.refs += 1
            node = node.parent
        return RadixLease(self, end, num_pages)

    def _below(self, root: RadixNode) -> Iterator[RadixNode]:
        """All nodes below `root`, parents before their children."""
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
