"""The step loop: intake → schedule → forward → sample → commit → emit. One thread owns it and all device state.

Where a step can wait for its commit (see `LaunchedStep`), the next one is scheduled and launched before, so that the
device always has work while the host does its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import psutil
import torch

from loraserve.engine.adapters import AdapterDesk
from loraserve.engine.counters import StepCounters
from loraserve.engine.in_flight import LaunchedStep, StepOutput
from loraserve.engine.messages import (
    AdapterStatus,
    AddRequest,
    EngineStats,
    ErrorInfo,
    RequestOutput,
    TokenLogprobs,
)
from loraserve.engine.runner import ModelRunner
from loraserve.engine.sampler import Logprobs
from loraserve.errors import InvalidToken, LoraserveError, NonFiniteLogits, RequestAborted
from loraserve.scheduler.batch import ScheduleBatch
from loraserve.scheduler.request import AdapterUse, FinishReason, Request, namespace_of
from loraserve.scheduler.scheduler import Scheduler
from loraserve.scheduler.stats import RequestEvent

logger = logging.getLogger(__name__)

# Adapter weights are copied to the device between two forwards, in pieces, for at most this share of a forward's time:
# a cold adapter lengthens the gap between two tokens of a running stream by that much, far from a second decode step.
UPLOAD_SHARE = 0.25
UPLOAD_PIECE_BYTES = 2**20
SHORTEST_UPLOAD_S, IDLE_UPLOAD_S = 0.001, 0.02


class _Flying(NamedTuple):
    """A launched step; `step` is None if the launch went wrong."""

    batch: ScheduleBatch
    step: LaunchedStep | None
    started: float


class EngineLoop:
    """Requests in, outputs out, one `step()` at a time. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        adapters: AdapterDesk,
        page_size: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        default_timeout_s: float,
        shareable_context: int | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._adapters = adapters
        self._page_size = page_size
        self._eos = eos_token_ids
        self._vocab_size = vocab_size
        self._default_timeout_s = default_timeout_s
        self._shareable_context = shareable_context
        self._outputs: list[RequestOutput] = []
        self._open: set[str] = set()
        self._upload_s = IDLE_UPLOAD_S
        self._flying: _Flying | None = None  # launched and not committed yet
        self._finished_at = 0.0  # monotonic seconds of the last step's end
        self._counters = StepCounters()
        self._process = psutil.Process(os.getpid())

    def step(self) -> bool:
        """Move everything on by one forward at most; False when there was nothing to run."""
        self._move_adapters()
        batch = self._scheduler.get_next_batch()
        earlier, self._flying = self._flying, None
        if batch is None and earlier is None:
            self._upload_s = IDLE_UPLOAD_S
            self._emit(None, None)
            return False
        launched = None if batch is None else self._launch(batch)
        if earlier is not None:
            self._finish(earlier)
        if launched is not None and launched.step is not None and launched.step.may_wait:
            self._flying = launched
        elif launched is not None:
            self._finish(launched)
        return True

    @property
    def busy(self) -> bool:
        """Whether requests or adapters are on their way, even if no forward can run now."""
        return self._scheduler.has_work() or self._adapters.busy

    # -- intake ---------------------------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> None:
        """Take a request; what cannot be taken ends at once with its error."""
        try:
            adapters = self._adapters.activate(message.adapters, message.prompt)
        except LoraserveError as error:
            self._outputs.append(_failed(message.id, error))
            return
        now = time.monotonic()
        params = message.params
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(62))
        request = Request(
            id=message.id,
            prompt=message.prompt,
            params=params,
            adapters=adapters,
            namespace=self._namespace(message, adapters),
            tenant=message.tenant,
            priority=message.priority,
            arrival=now,
            deadline=now + (self._default_timeout_s if message.timeout_s is None else message.timeout_s),
            eos_ids=frozenset() if params.ignore_eos else self._eos,
        )
        try:
            self._check_tokens(message.prompt, self._vocab_size + self._adapters.num_new_tokens(adapters))
            self._adapters.hold(request.adapters)
            try:
                self._scheduler.add(request)
            except LoraserveError:
                self._adapters.unhold(request.adapters)
                raise
        except LoraserveError as error:
            self._outputs.append(_failed(message.id, error))
        else:
            self._open.add(message.id)

    @staticmethod
    def _check_tokens(prompt: list[int], vocab_size: int) -> None:
        # An id outside the tables would be read as memory by the kernels, in the middle of everybody's forward.
        if prompt and not (min(prompt) >= 0 and max(prompt) < vocab_size):
            raise InvalidToken(f"token ids must be from 0 to {vocab_size - 1}", param="prompt")

    def _namespace(self, message: AddRequest, adapters: tuple[AdapterUse, ...]) -> str:
        salt = message.cache_salt or ""
        limit = self._shareable_context
        if limit is not None and len(message.prompt) + message.params.max_tokens > limit:
            # The rotary frequencies depend on this request's own length: its KV is of no use to any other.
            salt += f"\0{message.id}"
        return namespace_of(adapters, salt)

    def abort(self, request_id: str, error: LoraserveError | None = None) -> bool:
        """End a request; with `error` its terminal output carries it."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        return self._scheduler.abort(request_id, reason, error)

    def abort_all(self, error: LoraserveError) -> None:
        """End every open request with `error`."""
        for request_id in list(self._open):
            self._scheduler.abort(request_id, FinishReason.ERROR, error)
        self._emit(None, None)

    def load_adapter(
        self, version: str, folder: str, pinned: bool, done: Callable[[LoraserveError | None], None]
    ) -> None:
        """Check and stage a version beside the loop; `done` is called from a later `step`."""
        self._adapters.load(version, folder, pinned, done)

    def drop_adapter(self, version: str, force: bool, done: Callable[[LoraserveError | None], None]) -> None:
        """Forget a version once its requests have ended (`force`: end them now); `done` when all is freed."""
        if force:
            self._scheduler.abort_version(version, RequestAborted("the adapter was unloaded by force"))
        self._adapters.drop(version, done)

    def prefetch_adapter(self, version: str, to_device: bool, idle_s: float) -> None:
        """Start to bring a version to the host or device. Raises `AdapterNotFound`."""
        self._adapters.prefetch(version, to_device, idle_s)

    def set_limits(self, lora_memory: int | None, host_lora_memory: int | None) -> None:
        """Change the memory that adapters may take; what is over goes as soon as nobody needs it."""
        self._adapters.set_limits(lora_memory, host_lora_memory)

    # -- out ------------------------------------------------------------------------------------------------------

    def take_outputs(self) -> list[RequestOutput]:
        """All news since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def adapter_statuses(self) -> list[AdapterStatus]:
        """State of every version."""
        return self._adapters.statuses()

    def check(self) -> None:
        """Raise `AssertionError` if any pool, row or lease does not add up."""
        self._scheduler.check()
        self._adapters.check()

    def stats(self) -> EngineStats:
        """A snapshot for metrics and health."""
        counters, queue, lora = self._counters, self._scheduler.stats(), self._adapters.stats()
        return EngineStats(
            steps_total=counters.steps,
            slowest_step_s=counters.slowest_step_s,
            waiting=queue.waiting,
            running=queue.running,
            waiting_reasons={str(reason): count for reason, count in queue.waiting_reasons},
            kv_tokens_used=queue.pages_used * self._page_size,
            kv_tokens_cached=queue.pages_evictable * self._page_size,
            kv_tokens_total=queue.pages_total * self._page_size,
            lora_bytes_used=lora.device_bytes,
            lora_bytes_total=lora.device_capacity,
            host_lora_bytes_used=lora.host_bytes,
            host_lora_bytes_total=lora.host_capacity,
            adapters_resident=lora.resident,
            adapters_registered=lora.registered,
            adapter_loads_total=lora.uploads,
            adapter_evictions_total=lora.evictions,
            adapter_stagings_total=lora.stagings,
            adapter_host_evictions_total=lora.host_evictions,
            adapter_failures_total=lora.failures,
            adapter_hits_total=lora.hits,
            adapter_misses_total=lora.misses,
            adapters_by_state=lora.by_state,
            adapter_staging_seconds_total=lora.staging_seconds,
            adapter_upload_seconds_total=lora.upload_seconds,
            running_adapters=list(queue.running_versions),
            waiting_adapters=list(queue.waiting_versions),
            retractions_total=queue.retractions_total,
            prompt_tokens_total=queue.prompt_tokens_total,
            cached_tokens_total=queue.cached_tokens_total,
            output_tokens_total=queue.output_tokens_total,
            requests_total=dict(counters.requests),
            rows_total=dict(counters.rows),
            step_adapters=dict(counters.step_adapters),
            mixed_steps_total=counters.mixed_steps,
            rss_bytes=self._process.memory_info().rss,
        )

    # -- inside a step --------------------------------------------------------------------------------------------

    def _move_adapters(self) -> None:
        """Collect what was staged, answer calls, and copy weights to the device for as long as the last step allows."""
        end = time.monotonic() + self._upload_s
        while self._adapters.advance(UPLOAD_PIECE_BYTES) and time.monotonic() < end:
            pass

    def _launch(self, batch: ScheduleBatch) -> _Flying:
        """Give a step to the device."""
        started = time.monotonic()
        step = None
        try:
            with torch.no_grad():
                step = self._runner.launch(batch.to_worker_batch())
        except Exception as error:
            self._fail(batch, error)
        return _Flying(batch, step, started)

    def _finish(self, flying: _Flying) -> None:
        """Take a step's outcome: commit and emit it."""
        batch, output = flying.batch, None
        if flying.step is not None:
            try:
                output = flying.step.wait()
            except Exception as error:
                self._fail(batch, error)
            else:
                self._end_broken(batch, output)
                self._scheduler.commit(batch, output.tokens)
        now = time.monotonic()
        seconds = now - max(flying.started, self._finished_at)
        self._finished_at = now
        self._upload_s = max(SHORTEST_UPLOAD_S, UPLOAD_SHARE * seconds)
        self._scheduler.note_step(batch, seconds)
        self._counters.count_step(batch, seconds)
        self._emit(batch, output)

    def _fail(self, batch: ScheduleBatch, error: Exception) -> None:
        """A step went wrong: its requests end with the error and everybody else goes on."""
        ids = ", ".join(entry.request.id for entry in batch.entries)
        logger.error("a step failed; its requests end: %s", ids, exc_info=error)
        known = error if isinstance(error, LoraserveError) else LoraserveError("internal error in a forward")
        self._scheduler.fail(batch, known)

    def _end_broken(self, batch: ScheduleBatch, output: StepOutput) -> None:
        """End whoever's logits were not finite."""
        for index in output.broken:
            request = batch.entries[index].request
            if not request.is_finished:
                logger.error("request %s: logits are not finite", request.id)
                self._scheduler.abort(request.id, FinishReason.ERROR, NonFiniteLogits("the logits are not finite"))

    def _emit(self, batch: ScheduleBatch | None, output: StepOutput | None) -> None:
        logprobs: dict[str, Logprobs] = {}
        if batch is not None and output is not None:
            for entry, value in zip(batch.entries, output.logprobs, strict=True):
                if value is not None:
                    logprobs[entry.request.id] = value
        for event in self._scheduler.take_events():
            self._outputs.append(self._output_of(event, logprobs.get(event.request.id)))

    def _output_of(self, event: RequestEvent, logprobs: Logprobs | None) -> RequestOutput:
        request = event.request
        prompt_logprobs = self._runner.take_prompt_logprobs(request)
        if event.finish_reason is not None:
            self._runner.forget(request.id)
            self._open.discard(request.id)
            self._adapters.unhold(request.adapters)
            self._counters.requests[str(event.finish_reason)] += 1
        first = event.start == 0 and bool(event.new_tokens) and request.admitted_at is not None
        return RequestOutput(
            id=request.id,
            queued_s=(request.admitted_at or 0.0) - request.arrival if first else None,
            cold=first and request.was_passed_over,
            token_ids=list(event.new_tokens),
            logprobs=[_wire(logprobs)] if logprobs is not None and event.new_tokens else None,
            prompt_logprobs=None if prompt_logprobs is None else [v and _wire(v) for v in prompt_logprobs],
            finish_reason=None if event.finish_reason is None else str(event.finish_reason),
            error=None if event.error is None else ErrorInfo.of(event.error),
            cached_tokens=request.num_cached,
        )


def _wire(value: Logprobs) -> TokenLogprobs:
    return TokenLogprobs(value.token, value.logprob, value.top)


def _failed(request_id: str, error: LoraserveError) -> RequestOutput:
    return RequestOutput(id=request_id, finish_reason="error", error=ErrorInfo.of(error))
