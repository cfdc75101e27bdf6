"""`Scheduler`: decides what every step computes, and follows each request from arrival to its one terminal event."""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from loraserve.config import SchedulerConfig
from loraserve.errors import InvalidRequest, LoraserveError, Overloaded, RequestTimedOut
from loraserve.scheduler.adapter_turns import AdapterTurns
from loraserve.scheduler.admission import GrowthReserve, PageBudget, PrefillAdder, RowBudget, TokenBudget, check_fits
from loraserve.scheduler.batch import ScheduleBatch, ScheduleEntry
from loraserve.scheduler.deadlines import Deadlines
from loraserve.scheduler.interfaces import AdapterGate, KVSide
from loraserve.scheduler.pace import StepPace
from loraserve.scheduler.policies import make_policy
from loraserve.scheduler.queue import WaitingQueue
from loraserve.scheduler.request import FinishReason, Request, RequestState, namespace_uses
from loraserve.scheduler.stats import Refusal, RequestEvent, SchedulerStats, Totals, WaitingReason, reason_counts

log = logging.getLogger(__name__)

_PREFETCH = 8  # waiting requests behind the first refused one whose adapters are asked for ahead


class Scheduler:
    """Continuous batching over the KV side and the adapters' gate. Single-threaded; one step is in flight at a time.

    `get_next_batch` and `commit` (or `fail`) alternate. `clock` gives monotonic seconds. Raises `ConfigError` for an
    unknown policy.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVSide,
        adapters: AdapterGate,
        clock: Callable[[], float] = time.monotonic,
        adapter_wait_limit_s: float = 2.0,
        growth: GrowthReserve | None = None,
    ) -> None:
        self._config = config
        self._cache = cache
        self._clock = clock
        self._policy = make_policy(config.policy, lambda r: cache.lookup(r.namespace, r.prompt_ids, r.overlays))
        self._growth = growth or GrowthReserve()
        # Every running request may decode in every step, so there are never more of them than tokens in a step.
        self._pace = StepPace(config.max_step_s, config.max_step_tokens)
        self._max_running = min(config.max_running, config.max_step_tokens, cache.free_rows)
        self._turns = AdapterTurns(adapters, adapter_wait_limit_s, max_riders=self._max_running)
        self._requests: dict[str, Request] = {}  # unfinished
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # by rank: who is retracted last comes first
        self._deadlines = Deadlines()
        self._refusals: dict[str, Refusal] = {}  # of waiting requests looked at in the last step
        self._in_flight: ScheduleBatch | None = None
        self._events: list[RequestEvent] = []
        self._num_added = 0
        self._totals = Totals()

    # -- what others call -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest`, `ContextLengthExceeded` or `Overloaded`; then nothing happened."""
        if request.id in self._requests or request.order >= 0:
            raise InvalidRequest(f"a request with id {request.id!r} was added before")
        if not request.prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        check_fits(request, self._cache)
        if len(self._waiting) >= self._config.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already; try again later")
        request.arrival = request.arrival or self._clock()
        if request.deadline is None:
            request.deadline = request.arrival + self._config.request_timeout_s
        request.order = self._num_added
        self._num_added += 1
        self._requests[request.id] = request
        self._waiting.add(request)
        self._deadlines.add(request)
        self._policy.added(request)

    def abort(self, request_id: str, reason: FinishReason, error: LoraserveError | None = None) -> bool:
        """End a request early. False if it is unknown or already ending.

        A request in the step in flight ends at its commit: its pages are still being written.
        """
        request = self._requests.get(request_id)
        if request is None or request.aborting is not None:
            return False
        if self._in_flight is not None and any(entry.request is request for entry in self._in_flight.entries):
            request.aborting, request.error = reason, error
        else:
            self._end(request, reason, error)
        return True

    def abort_version(self, version: str, error: LoraserveError) -> int:
        """End every request that uses an adapter version; how many these are."""
        users = [request for request in self.requests() if version in request.versions]
        return sum(self.abort(request.id, FinishReason.ABORT, error) for request in users)

    def forget_version(self, version: str) -> int:
        """Free the cached KV of an adapter version, as far as no running request uses it; pages freed."""
        return self._cache.drop_namespaces(lambda namespace: namespace_uses(namespace, version))

    def get_next_batch(self) -> ScheduleBatch | None:
        """The next step's work; None if nothing can run now. Raises RuntimeError while a batch is in flight."""
        if self._in_flight is not None:
            raise RuntimeError("commit or fail the batch in flight first")
        now = self._clock()
        self._expire(now)
        retracted_before = self._totals.retractions
        decode = self._decode_entries()
        adder = self._make_adder(len(decode), now)
        for request in self._running:
            if request.is_prefilling:
                adder.add_chunk(request)
        self._refusals.clear()
        for request, error in self._turns.refresh(now):
            self._end(request, FinishReason.ERROR, error)
        if self._totals.retractions == retracted_before:
            self._growth.relax()
        self._admit(adder, now)  # cannot let a request back that was just retracted: somebody took one of its pages
        entries = (*decode, *adder.entries)
        if not entries:
            return None
        self._in_flight = ScheduleBatch(entries, len(decode), self._cache.table)
        return self._in_flight

    def commit(self, batch: ScheduleBatch, tokens: Sequence[int | None]) -> None:
        """The step was computed: take its sampled tokens, one per entry, None where `samples` is false.

        Raises ValueError, and changes nothing, if the batch is not the one in flight or the tokens do not fit it.
        """
        self._check_commit(batch, tokens)
        self._in_flight = None
        for entry, token in zip(batch.entries, tokens, strict=True):
            request = entry.request
            request.num_computed = entry.start + entry.num_new
            if request.params.prompt_logprobs is not None:
                done = max(request.prompt_logprobs_done, request.num_computed)
                request.prompt_logprobs_done = min(done, request.num_prompt)
            if request.aborting is not None:
                self._end(request, request.aborting, request.error)
                continue
            if not entry.is_decode and not request.is_prefilling:
                self._prefilled(request)
            if entry.samples and token is not None:
                self._append(request, int(token))

    def note_step(self, batch: ScheduleBatch, seconds: float) -> None:
        """The step took so long; the next ones are made accordingly."""
        self._pace.note(sum(entry.num_new for entry in batch.entries[batch.num_decode :]), seconds)

    def fail(self, batch: ScheduleBatch, error: LoraserveError) -> None:
        """The step in flight was not computed: end its requests with `error` and trust nothing that it wrote."""
        if batch is not self._in_flight:
            raise ValueError("the batch is not in flight")
        self._in_flight = None
        for entry in batch.entries:
            request = entry.request
            if request.aborting is not None:
                self._end(request, request.aborting, request.error)
            else:
                self._end(request, FinishReason.ERROR, error)

    def requests(self) -> list[Request]:
        """All unfinished requests."""
        return list(self._requests.values())

    def take_events(self) -> list[RequestEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def has_work(self) -> bool:
        """Whether any request is unfinished or any event untaken."""
        return bool(self._requests or self._events)

    def explain_waiting(self) -> list[WaitingReason]:
        """Why each waiting request was not admitted in the last step."""
        return [
            WaitingReason(request.id, self._refusals.get(request.id, Refusal.QUEUED), request.arrival)
            for request in self._waiting
        ]

    def stats(self) -> SchedulerStats:
        """Numbers for metrics."""
        reasons = Counter(self._refusals.values())
        queued = len(self._waiting) - len(self._refusals)
        if queued:
            reasons[Refusal.QUEUED] += queued
        totals = self._totals
        return SchedulerStats(
            waiting=len(self._waiting),
            running=len(self._running),
            prefilling=sum(1 for request in self._running if request.is_prefilling),
            pages_total=self._cache.num_pages,
            pages_free=self._cache.free_pages,
            pages_evictable=self._cache.evictable_pages,
            waiting_reasons=reason_counts(reasons),
            running_versions=tuple({version for request in self._running for version in request.versions}),
            waiting_versions=tuple({version for request in self._waiting for version in request.versions}),
            refusals_total=reason_counts(totals.refusals),
            retractions_total=totals.retractions,
            admitted_total=totals.admitted,
            finished_total=totals.finished,
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            output_tokens_total=totals.output_tokens,
        )

    def check(self) -> None:
        """Raise AssertionError if requests, rows, pages and wants do not add up."""
        self._cache.check()
        waiting, running = list(self._waiting), self._running
        assert len(waiting) + len(running) == len(self._requests), "a request is neither waiting nor running"
        for request in waiting:
            assert request.state == RequestState.WAITING
            assert request.row is None
            assert request.num_computed == 0
        for request in running:
            assert request.state == RequestState.RUNNING
            assert request.row is not None
            assert request.num_computed <= self._cache.pages_of(request.row) * self._cache.page_size
        assert running == sorted(running, key=Request.rank), "running requests are out of order"
        assert len({request.row for request in running}) == len(running), "two requests share a row"
        assert len(running) <= self._max_running
        self._turns.check({request.id for request in waiting})
        assert self._refusals.keys() <= {request.id for request in waiting}
        if not running:
            free = self._cache.free_pages + self._cache.evictable_pages
            assert free == self._cache.num_pages, "nothing runs but pages are held"

    # -- a step ---------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for request_id in self._deadlines.expired(now):
            request = self._requests.get(request_id)
            if request is not None and request.deadline is not None and request.deadline <= now:
                limit = request.deadline - request.arrival
                error = RequestTimedOut(f"the request did not finish within its time limit of {limit:.3g} s")
                self._end(request, FinishReason.TIMEOUT, error)

    def _decode_entries(self) -> list[ScheduleEntry]:
        """One token of every running request that is past its prefill; who finds no page retracts the last in rank."""
        entries = []
        for request in list(self._running):
            if request.row is None or request.is_prefilling:
                continue
            while request.row is not None and not self._cache.extend(request.row, request.num_computed + 1):
                if len(self._running) == 1:
                    raise RuntimeError(f"request {request.id} runs alone and yet finds no page")
                self._retract(self._running[-1])
            if request.row is not None:
                entries.append(ScheduleEntry(request, request.num_computed, 1, True, True))
        return entries

    def _retract(self, request: Request) -> None:
        """Take a running request's pages; what was computed stays in the prefix cache for when it comes back."""
        self._leave_row(request, request.num_computed)
        request.state = RequestState.WAITING
        request.num_retractions += 1
        self._waiting.put_back(request)
        self._totals.retractions += 1
        self._growth.retracted()
        log.info("request %s gives its KV pages back after %d tokens", request.id, request.num_tokens)

    def _make_adder(self, num_decode: int, now: float) -> PrefillAdder:
        return PrefillAdder(
            cache=self._cache,
            turns=self._turns,
            tokens=TokenBudget(min(self._config.max_step_tokens - num_decode, self._pace.limit)),
            rows=RowBudget(self._max_running - len(self._running)),
            pages=PageBudget(self._cache, self._growth, self._running),
            chunk=self._config.prefill_chunk,
            now=now,
        )

    def _admit(self, adder: PrefillAdder, now: float) -> None:
        """Look at waiting requests in the policy's order until one must wait for something that all need."""
        closed = adder.closed()
        if closed is not None:
            self._refuse(self._waiting, closed, now)
            return
        order = self._policy.order(self._waiting, now)
        for request in order:
            failure = self._turns.failure(request)
            if failure is not None:
                self._end(request, FinishReason.ERROR, failure)
                continue
            refusal = adder.admit(request)
            if refusal is None:
                self._start(request)
            elif refusal in (Refusal.ADAPTER_LOADING, Refusal.ADAPTER_TURN):
                self._note_refusal(request, refusal)
            else:
                self._refuse([request, *islice(order, _PREFETCH)], refusal, now)
                return

    def _refuse(self, waiting: Iterable[Request], refusal: Refusal, now: float) -> None:
        """The first of `waiting` is refused and all behind it queue; the next few get their adapters asked for."""
        for place, request in enumerate(islice(waiting, _PREFETCH + 1)):
            if place == 0:
                self._note_refusal(request, refusal)
            self._turns.want(request, now)

    def _note_refusal(self, request: Request, refusal: Refusal) -> None:
        self._refusals[request.id] = refusal
        self._totals.refusals[refusal] += 1

    def _start(self, request: Request) -> None:
        self._waiting.remove(request)
        request.was_passed_over |= request.passed_over_at is not None
        self._turns.forget(request)
        request.state = RequestState.RUNNING
        insort(self._running, request, key=Request.rank)
        if not request.admitted:
            request.admitted, request.admitted_at = True, self._clock()
            request.num_cached = request.num_computed
            self._totals.admitted += 1
            self._totals.prompt_tokens += request.num_prompt
            self._totals.cached_tokens += request.num_cached
            self._policy.admitted(request)

    # -- after a step ---------------------------------------------------------------------------------------------

    def _prefilled(self, request: Request) -> None:
        """All known tokens have their KV: let others share it from now on; end if nothing is to be sampled."""
        assert request.row is not None
        if request.params.max_tokens == 0:
            self._end(request, FinishReason.LENGTH)
        else:
            self._cache.publish(request.row, request.prefill_ids)

    def _append(self, request: Request, token: int) -> None:
        start = len(request.output)
        request.output.append(token)
        self._totals.output_tokens += 1
        self._policy.sampled(request)
        params = request.params
        if (not params.ignore_eos and token in request.eos_ids) or token in params.stop_token_ids:
            request.stop_token = token
            self._end(request, FinishReason.STOP, new_tokens=(token,))
        elif start + 1 >= params.max_tokens or request.num_tokens >= request.max_total:
            self._end(request, FinishReason.LENGTH, new_tokens=(token,))
        else:
            self._events.append(RequestEvent(request, (token,), start, None, None))

    def _leave_row(self, request: Request, num_reusable: int) -> None:
        """Give back everything that a running request holds; the KV of its first tokens stays for reuse."""
        assert request.row is not None
        self._cache.release(request.row, request.token_ids()[:num_reusable])
        self._turns.release(request)
        self._running.remove(request)
        request.row = None
        request.num_computed = 0

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        error: LoraserveError | None = None,
        new_tokens: tuple[int, ...] = (),
    ) -> None:
        """The one place where requests end: free all they hold and make the terminal event."""
        if request.state == RequestState.RUNNING:
            # After an error (a broken forward, numbers that are not finite) its KV may be garbage that no later request
            # should meet.
            self._leave_row(request, 0 if reason == FinishReason.ERROR else request.num_computed)
        else:
            self._waiting.remove(request)
            self._turns.forget(request)
            self._refusals.pop(request.id, None)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        del self._requests[request.id]
        self._deadlines.prune(self._requests)
        self._policy.ended(request)
        self._totals.finished += 1
        start = len(request.output) - len(new_tokens)
        self._events.append(RequestEvent(request, new_tokens, start, reason, error))

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check_commit(self, batch: ScheduleBatch, tokens: Sequence[int | None]) -> None:
        if batch is not self._in_flight:
            raise ValueError("the batch is not in flight")
        if len(tokens) != len(batch.entries):
            raise ValueError(f"{len(tokens)} tokens for a batch of {len(batch.entries)} sequences")
        for entry, token in zip(batch.entries, tokens, strict=True):
            if entry.samples and token is None and entry.request.aborting is None:
                raise ValueError(f"request {entry.request.id} was to be sampled but has no token")
