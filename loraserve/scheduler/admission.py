"""`PrefillAdder`: all budget arithmetic of one step. Each budget is one object that says whether a request fits."""

from __future__ import annotations

from loraserve.errors import ContextLengthExceeded
from loraserve.scheduler.adapter_turns import AdapterTurns
from loraserve.scheduler.batch import ScheduleEntry
from loraserve.scheduler.interfaces import KVSide
from loraserve.scheduler.request import Request
from loraserve.scheduler.stats import Refusal

_MIN_RESERVE, _MAX_RESERVE = 16, 1024


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def kv_tokens_needed(request: Request) -> int:
    """Tokens whose KV a request needs at its longest: the very last token is sampled but never computed."""
    return max(request.max_total - 1, request.num_prompt)


def check_fits(request: Request, cache: KVSide) -> None:
    """Set `max_total`. Raises `ContextLengthExceeded`, with the numbers, for what could not even run alone."""
    num_prompt, max_tokens = request.num_prompt, request.params.max_tokens
    room = min(max_tokens, 1)
    if num_prompt + room > cache.max_context:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens; the context holds {cache.max_context}"
            + (", of which at least one is for the answer" if room else ""),
            param="prompt",
        )
    request.max_total = min(num_prompt + max_tokens, cache.max_context)
    needed = kv_tokens_needed(request)
    if num_pages_for(needed, cache.page_size) > cache.num_pages:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: that needs {needed} tokens of KV "
            f"cache, which holds {cache.num_pages * cache.page_size}",
            param="max_tokens",
        )


class GrowthReserve:
    """How many tokens ahead every running request is expected to grow before another is let in.

    Too little and the newcomer is soon retracted, its work wasted; too much and memory lies idle. So the reserve
    doubles at each retraction and shrinks slowly while there is none.
    """

    __slots__ = ("_maximum", "_minimum", "_tokens")

    def __init__(self, minimum: int = _MIN_RESERVE, maximum: int = _MAX_RESERVE) -> None:
        self._minimum, self._maximum = minimum, maximum
        self._tokens = float(minimum)

    @property
    def tokens(self) -> int:
        """Tokens kept for each running request."""
        return int(self._tokens)

    def retracted(self) -> None:
        """KV ran out: keep more from now on."""
        self._tokens = min(2 * self._tokens, self._maximum)

    def relax(self) -> None:
        """A step went by without retraction: keep a little less."""
        self._tokens = max(0.99 * self._tokens, self._minimum)

    def pages(self, request: Request, num_pages: int, page_size: int) -> int:
        """Pages that a request which has `num_pages` is expected to need more."""
        ahead = min(request.num_tokens + self.tokens, kv_tokens_needed(request))
        return max(num_pages_for(ahead, page_size) - num_pages, 0)


class TokenBudget:
    """Tokens that still fit this step's forward."""

    __slots__ = ("_left",)

    def __init__(self, left: int) -> None:
        self._left = left

    def can_take(self) -> Refusal | None:
        """None if at least one more token fits."""
        return None if self._left > 0 else Refusal.STEP_TOKENS

    def take(self, wanted: int) -> int:
        """Tokens granted, at most `wanted`."""
        granted = min(wanted, self._left)
        self._left -= granted
        return granted


class RowBudget:
    """Requests that may still start running."""

    __slots__ = ("_left",)

    def __init__(self, left: int) -> None:
        self._left = left

    def can_take(self) -> Refusal | None:
        """None if one more request may run."""
        return None if self._left > 0 else Refusal.REQUEST_ROWS

    def take(self) -> None:
        """One more runs."""
        self._left -= 1


class PageBudget:
    """Free and evictable KV pages, less what the running requests are expected to grow into.

    A request gets the pages of its whole prefill when it is admitted, so an admitted prefill can always finish and two
    half-done prefills can never wait for each other.
    """

    __slots__ = ("_cache", "_growth", "_num_running", "_reserved", "_running")

    def __init__(self, cache: KVSide, growth: GrowthReserve, running: list[Request]) -> None:
        self._cache = cache
        self._growth = growth
        self._running = running  # read once, at the first question: most steps ask none
        self._num_running = len(running)
        self._reserved: int | None = None

    def can_take(self, request: Request, num_tokens: int, have_pages: int) -> Refusal | None:
        """None if `num_tokens` tokens fit, of which `have_pages` pages need not be allocated.

        Without any running request the growth is nobody's concern: the pool is as empty as it gets.
        """
        size = self._cache.page_size
        total = num_pages_for(num_tokens, size)
        available = self._cache.free_pages + self._cache.evictable_pages
        reserve = self._held_back() + self._growth.pages(request, total, size) if self._num_running else 0
        return None if total - have_pages + reserve <= available else Refusal.KV_PAGES

    def take(self, request: Request, num_tokens: int) -> None:
        """The request runs now and will grow."""
        size = self._cache.page_size
        self._reserved = self._held_back() + self._growth.pages(request, num_pages_for(num_tokens, size), size)
        self._num_running += 1

    def _held_back(self) -> int:
        if self._reserved is None:
            size, pages_of = self._cache.page_size, self._cache.pages_of
            rows = [(request, request.row) for request in self._running]
            self._reserved = sum(self._growth.pages(r, pages_of(row), size) for r, row in rows if row is not None)
        return self._reserved


class PrefillAdder:
    """Fills a step with prefill chunks, first of running requests, then of new ones, as far as every budget allows."""

    __slots__ = ("_cache", "_chunk", "_entries", "_now", "_pages", "_rows", "_tokens", "_turns")

    def __init__(
        self,
        *,
        cache: KVSide,
        turns: AdapterTurns,
        tokens: TokenBudget,
        rows: RowBudget,
        pages: PageBudget,
        chunk: int,
        now: float,
    ) -> None:
        self._cache = cache
        self._turns = turns
        self._tokens = tokens
        self._rows = rows
        self._pages = pages
        self._chunk = chunk
        self._now = now
        self._entries: list[ScheduleEntry] = []

    @property
    def entries(self) -> list[ScheduleEntry]:
        """Chunks added so far."""
        return self._entries

    def closed(self) -> Refusal | None:
        """Why nobody at all can be admitted any more in this step; None while somebody might."""
        return self._rows.can_take() or self._tokens.can_take()

    def add_chunk(self, request: Request) -> None:
        """Compute the next chunk of a running request; nothing if the step is full."""
        known = len(request.prefill_ids)
        num_new = self._tokens.take(min(self._chunk, known - request.num_scheduled))
        if num_new > 0:
            done = request.num_scheduled + num_new == known
            samples = done and request.params.max_tokens > 0
            self._entries.append(ScheduleEntry(request, request.num_scheduled, num_new, False, samples))

    def admit(self, request: Request) -> Refusal | None:
        """Let a waiting request run and add its first chunk. On refusal nothing is held and the reason is returned.

        Lacking adapters is the only refusal that lets others pass, so it is only looked at while others could.
        """
        refusal = self.closed() or self._turns.can_take(request, self._now)
        if refusal is not None:
            return refusal
        tokens = request.token_ids()
        reusable = tokens[: _reuse_limit(request, tokens.size)]
        size = self._cache.page_size
        found = self._cache.lookup(request.namespace, reusable, request.overlays)
        # A first look that leaves no trace: a blocked request is asked again in every step.
        refusal = self._pages.can_take(request, tokens.size, num_pages_for(found, size))
        if refusal is not None:
            return refusal
        lease = self._cache.acquire(request.namespace, reusable, request.overlays)
        if lease is None:
            return Refusal.REQUEST_ROWS
        # What was evictable a moment ago is leased now and no longer available, so this look may end otherwise.
        refusal = self._pages.can_take(request, tokens.size, num_pages_for(lease.num_cached, size))
        if refusal is None and not self._turns.acquire(request):
            self._turns.pass_over(request, self._now)
            refusal = Refusal.ADAPTER_LOADING
        if refusal is not None:
            self._cache.release(lease.row, tokens[:0])
            return refusal
        if not self._cache.extend(lease.row, tokens.size):
            raise RuntimeError(f"request {request.id}: pages that the budget had promised are not there")
        self._pages.take(request, tokens.size)
        self._rows.take()
        request.row = lease.row
        request.prefill_ids = tokens
        request.num_computed = request.num_scheduled = lease.num_cached
        self.add_chunk(request)
        return None


def _reuse_limit(request: Request, num_tokens: int) -> int:
    """How many leading tokens may come from the cache.

    The last known token must be computed, for there is nothing to sample from otherwise. Who wants prompt logprobs
    needs every prompt position computed once, except those that were reported before a retraction.
    """
    limit = num_tokens - 1
    if request.params.prompt_logprobs is not None and request.prompt_logprobs_done < request.num_prompt:
        return min(limit, request.prompt_logprobs_done)
    return limit
