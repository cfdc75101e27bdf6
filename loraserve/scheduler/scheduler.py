"""`Scheduler`: decides what every step computes, and follows each request from arrival to its one terminal event."""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from loraserve.config import SchedulerConfig
from loraserve.errors import InvalidRequest, LoraserveError, Overloaded, RequestTimedOut
from loraserve.scheduler.adapter_turns import AdapterTurns
from loraserve.scheduler.admission import GrowthReserve, PageBudget, PrefillAdder, RowBudget, TokenBudget, check_fits
from loraserve.scheduler.batch import ScheduleBatch, ScheduleEntry
from loraserve.scheduler.deadlines import Deadlines
from loraserve.scheduler.in_flight import MAX_IN_FLIGHT, StepsInFlight
from loraserve.scheduler.interfaces import AdapterGate, KVSide
from loraserve.scheduler.pace import StepPace
from loraserve.scheduler.policies import make_policy
from loraserve.scheduler.queue import WaitingQueue
from loraserve.scheduler.request import FinishReason, Request, RequestState, namespace_uses
from loraserve.scheduler.stats import Refusal, Refusals, RequestEvent, SchedulerStats, Totals, WaitingReason

log = logging.getLogger(__name__)

_PREFETCH = 8  # waiting requests behind the first refused one whose adapters are asked for ahead


class Scheduler:
    """Continuous batching over the KV side and the adapters' gate. Single-threaded.

    Each batch of `get_next_batch` is in flight until its `commit` or `fail`. The caller may ask for the next one
    before: then that is planned *ahead*, knowing where every request in flight will be but not its token. Two are in
    flight at most, they must be computed in their order, and what the tokens show to be too much (a request that had
    ended) is dropped at the second commit. `clock` gives monotonic seconds. Raises `ConfigError` for an unknown policy.
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
        self._refusals = Refusals()
        self._in_flight = StepsInFlight()
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
        """End a request early. False if it is unknown or has ended.

        What steps in flight compute for it comes to nothing, but until they are over its pages stay its own.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason, error)
        return True

    def abort_version(self, version: str, error: LoraserveError) -> int:
        """End every request that uses an adapter version; how many these are."""
        users = [request for request in self.requests() if version in request.versions]
        return sum(self.abort(request.id, FinishReason.ABORT, error) for request in users)

    def forget_version(self, version: str) -> int:
        """Free the cached KV of an adapter version, once its last device lease is back; pages freed."""
        return self._cache.drop_namespaces(lambda namespace: namespace_uses(namespace, version))

    def get_next_batch(self) -> ScheduleBatch | None:
        """The next step's work; None if nothing can run now, or not before the step in flight is committed.

        Raises RuntimeError while two are in flight.
        """
        if len(self._in_flight) == MAX_IN_FLIGHT:
            raise RuntimeError("commit or fail a batch in flight first")
        now = self._clock()
        self._expire(now)
        retracted_before = self._totals.retractions
        decode = self._decode_entries()
        if decode is None:
            return None
        adder = self._make_adder(len(decode), now)
        for request in self._running:
            if request.has_prefill_left:
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
        batch = ScheduleBatch(entries, len(decode), self._cache.table, is_ahead=len(self._in_flight) > 0)
        self._in_flight.launch(batch)
        return batch

    def commit(self, batch: ScheduleBatch, tokens: Sequence[int | None]) -> None:
        """The step was computed: take its sampled tokens, one per entry, None where `samples` is false.

        Raises ValueError, and changes nothing, if the batch is not the oldest in flight or the tokens do not fit it.
        """
        self._in_flight.check_outcome(batch, tokens)
        self._in_flight.land(batch)
        for entry, token in zip(batch.entries, tokens, strict=True):
            request = entry.request
            if request.is_finished:
                self._leave_late(request)
                continue
            request.num_computed = entry.start + entry.num_new
            if request.params.prompt_logprobs is not None:
                done = max(request.prompt_logprobs_done, request.num_computed)
                request.prompt_logprobs_done = min(done, request.num_prompt)
            if not entry.is_decode and not request.is_prefilling:
                self._prefilled(request)
            if entry.samples and token is not None:
                self._append(request, int(token))

    def note_step(self, batch: ScheduleBatch, seconds: float) -> None:
        """The step took so long; the next ones are made accordingly."""
        self._pace.note(sum(entry.num_new for entry in batch.entries[batch.num_decode :]), seconds)

    def fail(self, batch: ScheduleBatch, error: LoraserveError) -> None:
        """A step in flight was not computed: end its requests with `error` and trust nothing that it wrote.

        Raises ValueError if the batch is not in flight.
        """
        self._in_flight.land(batch)
        for entry in batch.entries:
            if entry.request.is_finished:
                self._leave_late(entry.request)
            else:
                self._end(entry.request, FinishReason.ERROR, error)

    def requests(self) -> list[Request]:
        """All unfinished requests."""
        return list(self._requests.values())

    def take_events(self) -> list[RequestEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def has_work(self) -> bool:
        """Whether any request is unfinished, any step in flight or any event untaken."""
        return bool(self._requests or self._events or self._in_flight)

    def explain_waiting(self) -> list[WaitingReason]:
        """Why each waiting request was not admitted in the last step."""
        return self._refusals.explain(self._waiting)

    def stats(self) -> SchedulerStats:
        """Numbers for metrics."""
        totals = self._totals
        return SchedulerStats(
            waiting=len(self._waiting),
            running=len(self._running),
            prefilling=sum(1 for request in self._running if request.is_prefilling),
            pages_total=self._cache.num_pages,
            pages_free=self._cache.free_pages,
            pages_evictable=self._cache.evictable_pages,
            waiting_reasons=self._refusals.now(len(self._waiting)),
            running_versions=tuple({version for request in self._running for version in request.versions}),
            waiting_versions=tuple({version for request in self._waiting for version in request.versions}),
            refusals_total=self._refusals.total(),
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
            assert request.num_computed <= request.num_scheduled
            assert request.num_scheduled <= self._cache.pages_of(request.row) * self._cache.page_size
            assert request.num_in_flight or request.num_scheduled == request.num_computed
        self._in_flight.check()
        assert running == sorted(running, key=Request.rank), "running requests are out of order"
        rows = [request.row for request in (*running, *self._in_flight.leaving)]
        assert len(set(rows)) == len(rows), "two requests share a row"
        assert len(rows) <= self._max_running
        self._turns.check({request.id for request in waiting})
        self._refusals.check({request.id for request in waiting})
        if not rows:
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

    def _decode_entries(self) -> list[ScheduleEntry] | None:
        """One token of every running request that is past its prefill; who finds no page retracts the last in rank.

        None if pages are short while a step is in flight: it may end requests, and nobody's pages can be taken before.
        """
        entries = []
        ahead = len(self._in_flight) > 0
        for request in list(self._running):
            if request.row is None or request.has_prefill_left or (ahead and request.is_all_scheduled):
                continue
            while request.row is not None and not self._cache.extend(request.row, request.num_scheduled + 1):
                if ahead:
                    return None
                if len(self._running) == 1:
                    raise RuntimeError(f"request {request.id} runs alone and yet finds no page")
                self._retract(self._running[-1])
            if request.row is not None:
                entries.append(ScheduleEntry(request, request.num_scheduled, 1, True, True))
        return entries

    def _retract(self, request: Request) -> None:
        """Take a running request's pages; what was computed stays in the prefix cache for when it comes back."""
        self._running.remove(request)
        self._leave_row(request)
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
            rows=RowBudget(self._max_running - len(self._running) - len(self._in_flight.leaving)),
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
                self._refusals.note(request, refusal)
            else:
                self._refuse([request, *islice(order, _PREFETCH)], refusal, now)
                return

    def _refuse(self, waiting: Iterable[Request], refusal: Refusal, now: float) -> None:
        """The first of `waiting` is refused and all behind it queue; the next few get their adapters asked for."""
        for place, request in enumerate(islice(waiting, _PREFETCH + 1)):
            if place == 0:
                self._refusals.note(request, refusal)
            self._turns.want(request, now)

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

    def _leave_row(self, request: Request) -> None:
        """Give back everything that a request holds which ran; the KV of its computed tokens stays for reuse."""
        assert request.row is not None
        self._cache.release(request.row, request.token_ids()[: request.num_computed])
        self._turns.release(request)
        request.row = None
        request.num_computed = request.num_scheduled = 0

    def _leave_late(self, request: Request) -> None:
        """A step of a request that has ended is over; with the last of them it gives everything back."""
        if self._in_flight.take_left(request):
            self._leave_row(request)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        error: LoraserveError | None = None,
        new_tokens: tuple[int, ...] = (),
    ) -> None:
        """The one place where requests end: make the terminal event, free all they hold (see `StepsInFlight`)."""
        if request.state == RequestState.RUNNING:
            self._running.remove(request)
            if reason == FinishReason.ERROR:
                # A broken forward, numbers that are not finite: its KV may be garbage that nobody else should meet.
                request.num_computed = 0
            if not self._in_flight.keep(request):
                self._leave_row(request)
        else:
            self._waiting.remove(request)
            self._turns.forget(request)
            self._refusals.forget(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.error = error
        del self._requests[request.id]
        self._deadlines.prune(self._requests)
        self._policy.ended(request)
        self._totals.finished += 1
        start = len(request.output) - len(new_tokens)
        self._events.append(RequestEvent(request, new_tokens, start, reason, error))
