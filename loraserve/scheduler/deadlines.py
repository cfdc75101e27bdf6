"""`Deadlines`: which requests have run out of time, without looking at all of them in every step."""

from __future__ import annotations

import heapq

from loraserve.scheduler.request import Request


class Deadlines:
    """A heap of deadlines. It keeps ids, not requests, so a finished request's tokens are not held until its deadline.

    An id that comes up may be of a request that has ended meanwhile; the caller knows.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request whose deadline is set."""
        assert request.deadline is not None
        heapq.heappush(self._heap, (request.deadline, request.id))

    def expired(self, now: float) -> list[str]:
        """Ids whose deadline has come, each once."""
        ids = []
        while self._heap and self._heap[0][0] <= now:
            ids.append(heapq.heappop(self._heap)[1])
        return ids

    def prune(self, unfinished: dict[str, Request]) -> None:
        """Drop ids that are not unfinished, once they are the majority; O(1) amortised per ended request."""
        if len(self._heap) > 64 + 2 * len(unfinished):
            self._heap = [
                (when, name) for when, name in self._heap if name in unfinished and unfinished[name].deadline == when
            ]
            heapq.heapify(self._heap)
