"""`AdapterTurns`: which adapters the waiting requests need, and whose turn it is when they do not all fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, nextafter
from typing import NamedTuple

from loraserve.errors import AdapterFailed, LoraserveError
from loraserve.scheduler.interfaces import AdapterGate, AdapterState
from loraserve.scheduler.request import Request
from loraserve.scheduler.stats import Refusal


class FailedRequest(NamedTuple):
    """A waiting request whose adapter failed, and how."""

    request: Request
    error: LoraserveError


@dataclass(slots=True)
class _Want:
    """One version and the waiting requests that need it, the one that asked first in front."""

    since: float
    requests: dict[str, Request] = field(default_factory=dict)


class AdapterTurns:
    """The adapter budget of admission.

    A request whose adapters are not all on the device is passed over, and its adapters are wanted from the gate. In
    return overtaking is bounded: once a request has been passed over for longer than `wait_limit_s` and its adapters
    only lack device pages (their files are staged), it holds the turn, the one passed over first before the others.
    While it does, running leases end and pages come free, for of the requests with other adapters than the holder's
    only these are admitted, as far as their adapters are here:

    - Those that asked for their adapters before the holder did. The gate keeps those adapters before it makes room for
      the holder's, so the holder would wait for them anyway.
    - At most `max_riders` others in a turn, which all came before the turn began. Without these an adapter would come
      in, serve the one request that was first in line, leave for the next holder, and come back for its other requests
      one by one.

    Requests of the base hold no adapter pages and always go on. A request that waits for a download holds no turn:
    keeping others off the device would not speed it up.

    The bound. Whatever comes during a turn waits for its end, so a turn is over when what runs at its beginning and the
    two kinds above have run. With rows and KV for all of them at once this takes D + U: the longest run and one change
    of adapters. If riders wait for rows first it takes 2 D + U, for no more of them ride than can run together; those
    that asked earlier than the holder take what any queue in front takes. A request that is overdue waits only for
    holders that were passed over before it. When a turn ends, all that wait for the same adapters ride in the next one
    (more than `max_riders` of them: in the next ones), so there is one such turn for each different set of adapters.
    With S sets wanted nobody is passed over for longer than `wait_limit_s + S * (2 * D + U)` once its files are staged
    and nobody ahead lacks rows, however many requests come.
    """

    __slots__ = (
        "_gate",
        "_holder",
        "_last_wanted",
        "_max_riders",
        "_num_riders",
        "_passed",
        "_states",
        "_turn_began",
        "_wait_limit_s",
        "_wants",
    )

    def __init__(self, gate: AdapterGate, wait_limit_s: float, max_riders: int) -> None:
        self._gate = gate
        self._max_riders = max_riders
        self._wait_limit_s = wait_limit_s
        self._wants: dict[str, _Want] = {}
        self._passed: dict[str, Request] = {}  # waiting and passed over at least once, the first in front
        self._states: dict[str, str] = {}  # seen in this step
        self._holder: Request | None = None
        self._turn_began = -inf  # of the holder
        self._num_riders = 0  # admitted in this turn
        self._last_wanted = -inf

    @property
    def holder(self) -> Request | None:
        """The request that holds the turn in this step."""
        return self._holder

    def refresh(self, now: float) -> list[FailedRequest]:
        """Begin a step: look at every wanted version anew. Returns waiting requests whose adapter has failed."""
        self._states.clear()
        failed: dict[str, FailedRequest] = {}
        for version, want in self._wants.items():
            if self._state(version) == AdapterState.FAILED:
                error = self._error(version)
                failed |= {name: FailedRequest(request, error) for name, request in want.requests.items()}
            else:
                self._gate.want(version, want.since)
        holder = self._find_holder(now)
        if holder is not self._holder:
            self._holder, self._turn_began, self._num_riders = holder, now, 0
        return list(failed.values())

    def failure(self, request: Request) -> LoraserveError | None:
        """Why the request can never run: one of its adapters has failed."""
        for version in request.versions:
            if self._state(version) == AdapterState.FAILED:
                return self._error(version)
        return None

    def can_take(self, request: Request, now: float) -> Refusal | None:
        """None if its adapters are here and nobody else has the turn; else why not. Asks the gate for what lacks."""
        if not request.versions:
            return None
        if any(self._state(version) != AdapterState.RESIDENT for version in request.versions):
            self.pass_over(request, now)
            return Refusal.ADAPTER_LOADING
        if not self._overtakes(request) or self._may_ride(request):
            return None
        self.want(request, now)
        return Refusal.ADAPTER_TURN

    def pass_over(self, request: Request, now: float) -> None:
        """Later requests may go first because this one's adapters are not here; they are asked for."""
        if request.passed_over_at is None:
            request.passed_over_at = now
            self._passed[request.id] = request
        self.want(request, now)

    def want(self, request: Request, now: float) -> None:
        """Ask the gate for the request's adapters; those that are here already stay preferably."""
        if request.wanted_at is not None or not request.versions:
            return
        # No two requests ask at the same time: half of one blend and half of another must not tie for the device.
        since = self._last_wanted = max(now, nextafter(self._last_wanted, inf))
        request.wanted_at = since
        for version in request.versions:
            want = self._wants.get(version)
            if want is None:
                want = self._wants[version] = _Want(since)
                self._gate.want(version, since)
            want.requests[request.id] = request

    def acquire(self, request: Request) -> bool:
        """Take device leases on all of the request's adapters, or none of them."""
        for count, version in enumerate(request.versions):
            if not self._gate.acquire(version):
                for taken in request.versions[:count]:
                    self._gate.release(taken)
                self._states[version] = str(self._gate.state(version))
                return False
        self._num_riders += self._overtakes(request)
        return True

    def release(self, request: Request) -> None:
        """Give the request's device leases back."""
        for version in request.versions:
            self._gate.release(version)

    def forget(self, request: Request) -> None:
        """The request waits no more: it runs or ended."""
        self._passed.pop(request.id, None)
        request.passed_over_at = None
        if self._holder is request:
            self._holder = None
        if request.wanted_at is None:
            return
        request.wanted_at = None
        for version in request.versions:
            want = self._wants[version]
            del want.requests[request.id]
            if want.requests:
                first = next(iter(want.requests.values()))
                want.since = first.wanted_at if first.wanted_at is not None else want.since
            else:
                del self._wants[version]
                self._gate.unwant(version)

    def check(self, waiting: set[str]) -> None:
        """Raise AssertionError if something is wanted for a request that does not wait."""
        assert self._passed.keys() <= waiting, "a request that does not wait counts as passed over"
        for version, want in self._wants.items():
            assert want.requests, f"{version} is wanted by nobody"
            assert want.requests.keys() <= waiting, f"{version} is wanted for a request that does not wait"
            assert want.since == min(r.wanted_at for r in want.requests.values() if r.wanted_at is not None)

    def _state(self, version: str) -> str:
        state = self._states.get(version)
        if state is None:
            state = self._states[version] = str(self._gate.state(version))
        return state

    def _error(self, version: str) -> LoraserveError:
        error = self._gate.failure(version)
        return error if error is not None else AdapterFailed(f"adapter version {version[:12]} could not be loaded")

    def _overtakes(self, request: Request) -> bool:
        """Whether the holder of the turn would come later because this request is admitted now."""
        holder = self._holder
        if holder is None or set(request.versions) <= set(holder.versions):
            return False
        if request.wanted_at is None or holder.wanted_at is None:
            return True
        return request.wanted_at > holder.wanted_at

    def _may_ride(self, request: Request) -> bool:
        """Whether a request may overtake the holder of the turn; the policy's order says who does while some may."""
        return request.arrival < self._turn_began and self._num_riders < self._max_riders

    def _find_holder(self, now: float) -> Request | None:
        for request in self._passed.values():
            assert request.passed_over_at is not None
            if now - request.passed_over_at <= self._wait_limit_s:
                return None  # the others were passed over later still
            missing = [version for version in request.versions if self._state(version) != AdapterState.RESIDENT]
            if missing and all(self._state(version) == AdapterState.STAGED for version in missing):
                return request
        return None
