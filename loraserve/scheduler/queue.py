"""`WaitingQueue`: requests that are to run, retracted ones in front."""

from __future__ import annotations

from collections.abc import Iterator

from loraserve.scheduler.request import Request


class WaitingQueue:
    """Waiting requests by id, in the order they came; those that were retracted come before all others.

    Policies reorder what it yields; it only knows who waits. All operations but iteration cost O(1).
    """

    __slots__ = ("_fresh", "_returned")

    def __init__(self) -> None:
        self._returned: dict[str, Request] = {}
        self._fresh: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._returned) + len(self._fresh)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._returned or request.id in self._fresh

    def __iter__(self) -> Iterator[Request]:
        """Retracted requests by rank, then the others as they came. The queue must not change meanwhile."""
        yield from self.returned()
        yield from self._fresh.values()

    def returned(self) -> list[Request]:
        """Retracted requests, the one that loses its pages last first."""
        return sorted(self._returned.values(), key=Request.rank)

    def fresh(self) -> list[Request]:
        """Requests that wait for their first turn, as they came."""
        return list(self._fresh.values())

    def add(self, request: Request) -> None:
        """A new request waits."""
        assert request not in self, f"request {request.id} waits already"
        self._fresh[request.id] = request

    def put_back(self, request: Request) -> None:
        """A retracted request waits again, in front."""
        assert request not in self, f"request {request.id} waits already"
        self._returned[request.id] = request

    def remove(self, request: Request) -> None:
        """A request runs or ended. Raises KeyError if it does not wait."""
        if self._returned.pop(request.id, None) is None:
            del self._fresh[request.id]
