"""What the scheduler tells others: events of requests, and numbers for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from loraserve.compat import StrEnum
from loraserve.errors import LoraserveError
from loraserve.scheduler.request import FinishReason, Request


class Refusal(StrEnum):
    """Why a waiting request was not admitted in the last step."""

    QUEUED = "queued"  # behind one that had to wait itself, or not looked at yet
    STEP_TOKENS = "step_tokens"  # the forward is full
    REQUEST_ROWS = "request_rows"  # as many run as may
    KV_PAGES = "kv_pages"  # free and evictable pages do not suffice
    ADAPTER_LOADING = "adapter_loading"  # its adapter is not on the device yet
    ADAPTER_TURN = "adapter_turn"  # another adapter has waited past the limit and goes first


class ReasonCount(NamedTuple):
    """How many times a reason occurred."""

    reason: Refusal
    times: int


class WaitingReason(NamedTuple):
    """Why one request waits; `since` is its arrival."""

    request_id: str
    reason: Refusal
    since: float


class RequestEvent(NamedTuple):
    """New tokens of a request, or its end. Each request gets exactly one event with a `finish_reason`.

    `new_tokens` are `request.output[start : start + len(new_tokens)]`; none or one.
    """

    request: Request
    new_tokens: tuple[int, ...]
    start: int
    finish_reason: FinishReason | None
    error: LoraserveError | None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Numbers for metrics. Totals only grow; the rest is now."""

    waiting: int
    running: int
    prefilling: int  # of the running
    pages_total: int
    pages_free: int
    pages_evictable: int
    waiting_reasons: tuple[ReasonCount, ...]  # of those waiting now; their sum is `waiting`
    refusals_total: tuple[ReasonCount, ...]
    retractions_total: int
    admitted_total: int
    finished_total: int
    prompt_tokens_total: int  # of first admissions
    cached_tokens_total: int  # of those, reused
    output_tokens_total: int
    running_versions: tuple[str, ...]  # adapters of the running requests, each once
    waiting_versions: tuple[str, ...]

    @property
    def pages_used(self) -> int:
        """Pages that running requests hold."""
        return self.pages_total - self.pages_free - self.pages_evictable


@dataclass(slots=True)
class Totals:
    """Counters since the start; `SchedulerStats` says what they mean."""

    retractions: int = 0
    admitted: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Refusals:
    """Why waiting requests were not admitted: in the last step, and how often since the start."""

    __slots__ = ("_last", "_total")

    def __init__(self) -> None:
        self._last: dict[str, Refusal] = {}
        self._total: Counter[Refusal] = Counter()

    def clear(self) -> None:
        """Another step begins."""
        self._last.clear()

    def note(self, request: Request, refusal: Refusal) -> None:
        """A request was looked at and not admitted."""
        self._last[request.id] = refusal
        self._total[refusal] += 1

    def forget(self, request: Request) -> None:
        """The request waits no more."""
        self._last.pop(request.id, None)

    def explain(self, waiting: Iterable[Request]) -> list[WaitingReason]:
        """The reason of each waiting request; those that nobody looked at are queued."""
        return [WaitingReason(r.id, self._last.get(r.id, Refusal.QUEUED), r.arrival) for r in waiting]

    def now(self, num_waiting: int) -> tuple[ReasonCount, ...]:
        """Reasons in the last step of so many waiting requests."""
        reasons = Counter(self._last.values())
        if num_waiting > len(self._last):
            reasons[Refusal.QUEUED] += num_waiting - len(self._last)
        return _reason_counts(reasons)

    def total(self) -> tuple[ReasonCount, ...]:
        """All refusals so far."""
        return _reason_counts(self._total)

    def check(self, waiting: set[str]) -> None:
        """Raise AssertionError if a request is refused that does not wait."""
        assert self._last.keys() <= waiting, "a request that does not wait counts as refused"


def _reason_counts(reasons: Counter[Refusal]) -> tuple[ReasonCount, ...]:
    """A counter as an immutable histogram, most frequent first."""
    return tuple(ReasonCount(reason, times) for reason, times in reasons.most_common())
