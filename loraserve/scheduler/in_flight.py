"""`StepsInFlight`: launched steps whose outcome nobody knows yet, and what must stay as it is until they are over."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from loraserve.scheduler.batch import ScheduleBatch
from loraserve.scheduler.request import Request

MAX_IN_FLIGHT = 2  # the one that the device computes, and the one that is launched behind it


class StepsInFlight:
    """Batches from `get_next_batch` to `commit` or `fail`, the oldest first.

    A request that ends meanwhile is *leaving*: no later step gets it, but the steps in flight read and write its pages
    and its adapters, so it keeps row, pages and leases until the last of them is over.
    """

    __slots__ = ("_batches", "_leaving")

    def __init__(self) -> None:
        self._batches: list[ScheduleBatch] = []
        self._leaving: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def leaving(self) -> Collection[Request]:
        """Ended requests that still hold their rows."""
        return self._leaving.keys()

    def launch(self, batch: ScheduleBatch) -> None:
        """A step begins: its tokens count as scheduled."""
        for entry in batch.entries:
            request = entry.request
            request.num_scheduled = entry.start + entry.num_new
            request.num_in_flight += 1
        self._batches.append(batch)

    def check_outcome(self, batch: ScheduleBatch, tokens: Sequence[int | None]) -> None:
        """Raise ValueError unless the batch is the oldest in flight and these can be its tokens."""
        if not self._batches or batch is not self._batches[0]:
            raise ValueError("the batch is not in flight, or not the oldest")
        if len(tokens) != len(batch.entries):
            raise ValueError(f"{len(tokens)} tokens for a batch of {len(batch.entries)} sequences")
        for entry, token in zip(batch.entries, tokens, strict=True):
            if entry.samples and token is None and not entry.request.is_finished:
                raise ValueError(f"request {entry.request.id} was to be sampled but has no token")

    def land(self, batch: ScheduleBatch) -> None:
        """A step is over, whatever came of it. Raises ValueError if it is not in flight."""
        if not any(batch is other for other in self._batches):
            raise ValueError("the batch is not in flight")
        self._batches = [other for other in self._batches if other is not batch]
        for entry in batch.entries:
            entry.request.num_in_flight -= 1

    def keep(self, request: Request) -> bool:
        """A running request ends; whether steps in flight still need what it holds. If so it is leaving."""
        if request.num_in_flight:
            self._leaving[request] = None
        return request.num_in_flight > 0

    def take_left(self, request: Request) -> bool:
        """Whether an ended request can give back what it holds now; True once for each that was kept."""
        if request.num_in_flight or request not in self._leaving:
            return False
        del self._leaving[request]
        return True

    def check(self) -> None:
        """Raise AssertionError if steps and requests do not agree."""
        assert len(self._batches) <= MAX_IN_FLIGHT
        counts: dict[Request, int] = {}
        for batch in self._batches:
            for entry in batch.entries:
                counts[entry.request] = counts.get(entry.request, 0) + 1
        for request, count in counts.items():
            assert request.num_in_flight == count, f"{request.id} is in {count} steps, not {request.num_in_flight}"
            assert request.row is not None, f"{request.id} lost its row while it is computed"
            assert request.is_finished == (request in self._leaving)
        assert self._leaving.keys() <= counts.keys(), "a request that is in no step is leaving"
