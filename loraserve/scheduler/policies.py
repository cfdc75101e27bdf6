"""In which order waiting requests are looked at. A policy orders; it never decides whether something fits."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from loraserve.errors import ConfigError
from loraserve.scheduler.queue import WaitingQueue
from loraserve.scheduler.request import Request

Lookup = Callable[[Request], int]  # how many of its tokens the prefix cache could give

LOOKUP_WINDOW = 128  # requests whose prefix is looked up in one step
OVERDUE_S = 10.0  # after this wait a request no longer lets longer prefixes pass
OUTPUT_WEIGHT = 2  # an output token costs a tenant as much as this many input tokens
_PRUNE_AT = 1024  # tenants remembered before idle ones are forgotten


class Policy(Protocol):
    """Orders the waiting requests and hears of everything that could matter for it."""

    def order(self, waiting: WaitingQueue, now: float) -> Iterator[Request]:
        """Requests to look at, best first. The queue may change while the answer is consumed."""

    def added(self, request: Request) -> None:
        """A new request waits."""

    def admitted(self, request: Request) -> None:
        """A request runs for the first time; `num_cached` is known."""

    def sampled(self, request: Request) -> None:
        """A request got one more output token."""

    def ended(self, request: Request) -> None:
        """A request is finished, whether it ran or not."""


class _Uninformed:
    """A policy that keeps nothing."""

    def added(self, request: Request) -> None:
        """Nothing to note."""

    def admitted(self, request: Request) -> None:
        """Nothing to note."""

    def sampled(self, request: Request) -> None:
        """Nothing to note."""

    def ended(self, request: Request) -> None:
        """Nothing to note."""


class FirstComeFirstServed(_Uninformed):
    """As they came."""

    def order(self, waiting: WaitingQueue, now: float) -> Iterator[Request]:
        """Retracted ones, then the others as they came."""
        return iter(list(waiting))


class ByPriority(_Uninformed):
    """Smaller priority numbers first, whether retracted or not; among equals as they came."""

    def order(self, waiting: WaitingQueue, now: float) -> Iterator[Request]:
        """By priority; the sort is stable, so retracted ones come first among equals."""
        return iter(sorted(waiting, key=lambda request: request.priority))


class LongestPrefix(_Uninformed):
    """Requests that reuse most first, so that a prefix is used before it is evicted.

    Only the first `LOOKUP_WINDOW` requests are compared, which bounds the work of a step; a request that has waited
    for `OVERDUE_S` goes before all comparisons, which bounds its wait.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def order(self, waiting: WaitingQueue, now: float) -> Iterator[Request]:
        """Retracted ones, overdue ones, the window by reusable tokens, then the others as they came."""
        fresh = waiting.fresh()
        overdue = [request for request in fresh if now - request.arrival >= OVERDUE_S]
        if overdue:
            fresh = [request for request in fresh if now - request.arrival < OVERDUE_S]
        window = sorted(fresh[:LOOKUP_WINDOW], key=self._lookup, reverse=True)  # stable: as they came among equals
        return iter([*waiting.returned(), *overdue, *window, *fresh[LOOKUP_WINDOW:]])


class FairShare(_Uninformed):
    """The tenant that was served least goes first; a tenant's own requests as they came.

    Service is counted in tokens: computed input once, output `OUTPUT_WEIGHT` times. A tenant that comes back from
    idleness is lifted to the least-served active one, so nobody saves up a claim by being away; one that is ahead
    keeps its debt.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._open: dict[str, int] = {}  # unfinished requests of each active tenant
        self._last_level = 0  # of the tenant that became idle last

    def served(self, tenant: str) -> int:
        """Tokens counted for a tenant, with its lifts."""
        return self._served.get(tenant, 0)

    def order(self, waiting: WaitingQueue, now: float) -> Iterator[Request]:
        """Retracted ones, then again and again the first request of the tenant served least at that moment."""
        yield from waiting.returned()
        queues: dict[str, deque[Request]] = {}
        for request in waiting.fresh():
            queues.setdefault(request.tenant, deque()).append(request)
        heap = [(self._served[tenant], queue[0].order, tenant) for tenant, queue in queues.items()]
        heapq.heapify(heap)
        while heap:
            tenant = heap[0][2]
            queue = queues[tenant]
            yield queue.popleft()  # the consumer may charge the tenant before it asks for the next
            if queue:
                heapq.heapreplace(heap, (self._served[tenant], queue[0].order, tenant))
            else:
                heapq.heappop(heap)

    def added(self, request: Request) -> None:
        """Count the request as open; lift its tenant if it was idle."""
        tenant = request.tenant
        if tenant not in self._open:
            level = min((self._served[other] for other in self._open), default=self._last_level)
            self._served[tenant] = max(self._served.get(tenant, 0), level)
        self._open[tenant] = self._open.get(tenant, 0) + 1

    def admitted(self, request: Request) -> None:
        """Charge the prompt tokens that are computed for it."""
        self._served[request.tenant] += request.num_prompt - request.num_cached

    def sampled(self, request: Request) -> None:
        """Charge one output token."""
        self._served[request.tenant] += OUTPUT_WEIGHT

    def ended(self, request: Request) -> None:
        """Count the request as closed; the tenant is idle after its last one."""
        tenant = request.tenant
        self._open[tenant] -= 1
        if self._open[tenant]:
            return
        del self._open[tenant]
        self._last_level = self._served[tenant]
        if len(self._served) > _PRUNE_AT + 2 * len(self._open):
            level = min((self._served[other] for other in self._open), default=self._last_level)
            # Whoever is idle and not ahead of this level would be lifted to it anyway.
            self._served = {name: n for name, n in self._served.items() if name in self._open or n > level}


def make_policy(name: str, lookup: Lookup) -> Policy:
    """The policy of `SchedulerConfig.policy`. Raises `ConfigError` for an unknown name."""
    if name == "fcfs":
        return FirstComeFirstServed()
    if name == "longest-prefix":
        return LongestPrefix(lookup)
    if name == "priority":
        return ByPriority()
    if name == "fair-share":
        return FairShare()
    raise ConfigError(f"policy must be fcfs, longest-prefix, priority or fair-share, got {name!r}")
