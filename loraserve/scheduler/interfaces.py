"""What the scheduler needs from the KV cache and from the adapters. Others implement these; it owns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loraserve.compat import StrEnum
from loraserve.errors import LoraserveError
from loraserve.scheduler.request import Overlays, Tokens


class AdapterState(StrEnum):
    """Where an adapter version is. Compare by value: the adapters' side has its own enum of the same texts."""

    ABSENT = "absent"
    FETCHING = "fetching"
    STAGED = "staged"
    RESIDENT = "resident"
    FAILED = "failed"


class AdapterGate(Protocol):
    """Whether adapter versions are on the device, and leases that keep them there. Called by the engine's thread."""

    def state(self, version: str) -> str:
        """An `AdapterState` value. Cheap: asked for every wanted version in every step."""

    def want(self, version: str, since: float) -> None:
        """A waiting request needs the version on the device since then. Idempotent; holds until `unwant`.

        Implementations give device pages to the earliest `since` first, and never evict a wanted resident version for
        one that is wanted later: a blend needs all of its versions at the same time.
        """

    def unwant(self, version: str) -> None:
        """No waiting request needs the version any more."""

    def acquire(self, version: str) -> bool:
        """Take a device lease; False (and no lease) unless the version is resident."""

    def release(self, version: str) -> None:
        """Give one lease back."""

    def failure(self, version: str) -> LoraserveError | None:
        """Why the version failed; None if it has not."""


class RowLease(Protocol):
    """A request's place in the cache."""

    @property
    def row(self) -> int:
        """Its level-1 row."""

    @property
    def num_cached(self) -> int:
        """Leading tokens that already have their KV."""


class KVSide(Protocol):
    """The KV cache as the scheduler sees it: rows, pages, and prefixes that may be reused."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def num_pages(self) -> int:
        """Pages in all."""

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""

    @property
    def evictable_pages(self) -> int:
        """Pages that only the prefix cache holds; `extend` takes them when the free ones are gone."""

    @property
    def free_rows(self) -> int:
        """Level-1 rows that no request holds."""

    @property
    def max_context(self) -> int:
        """Longest sequence that fits a row."""

    @property
    def table(self) -> NDArray[np.int32]:
        """Level 1, [num_rows, max_context]: where each position of each row lies."""

    def pages_of(self, row: int) -> int:
        """Pages a row has, shared ones included."""

    def lookup(self, namespace: str, tokens: Tokens, overlays: Overlays = ()) -> int:
        """How many leading tokens could be reused. Takes no lease and does not count as use."""

    def acquire(self, namespace: str, tokens: Tokens, overlays: Overlays = ()) -> RowLease | None:
        """Take a row and a lease on the longest cached prefix of `tokens`; None when no row is free.

        `overlays` decide the KV from their positions on, as `namespace` does from the first.
        """

    def extend(self, row: int, num_tokens: int) -> bool:
        """Give the row locations for positions below `num_tokens`, evicting if needed; False and no change if short."""

    def publish(self, row: int, tokens: Tokens) -> None:
        """Offer the row's full pages for reuse; `tokens` are those whose KV is complete. The row goes on."""

    def release(self, row: int, tokens: Tokens) -> None:
        """End the row: full pages of `tokens` (KV complete) stay for reuse, everything else is free again."""

    def drop_namespaces(self, matches: Callable[[str], bool]) -> int:
        """Free what no request uses in every namespace and under every set of overlays that `matches`; pages freed."""

    def check(self) -> None:
        """Raise AssertionError if pages or rows do not add up."""
