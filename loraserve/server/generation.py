"""Running a request's choices in the engine and putting together what they produce."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

from loraserve.engine.messages import AddRequest, RequestOutput, TokenLogprobs
from loraserve.errors import LoraserveError, RequestAborted, RequestTimedOut
from loraserve.server.assembly import Assembler, Piece, ShownToken
from loraserve.server.inflight import Hold, InFlight, ServedAdapter
from loraserve.server.metrics import ChoiceMeter, RequestMeter
from loraserve.server.ports import EnginePort
from loraserve.server.responses import FinishReason, LoraUse, PromptTokensDetails, Usage
from loraserve.server.text import Text

T = TypeVar("T")


class ResolvedUse(NamedTuple):
    """An adapter of a request, with the version that the name meant when the request came."""

    adapter: ServedAdapter
    scale: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, its text and where each id's text begins (to echo it), its adapters, what reads its ids."""

    index: int
    ids: list[int]
    text: str
    starts: list[int]
    uses: tuple[ResolvedUse, ...]
    tokenizer: Text

    def lora(self) -> list[LoraUse] | None:
        """The adapters as the answer names them."""
        if not self.uses:
            return None
        return [LoraUse(name=use.adapter.name, version=use.adapter.version, scale=use.scale) for use in self.uses]


@dataclass(slots=True, eq=False)
class Job:
    """One choice to generate."""

    index: int
    prompt: Prompt
    request: AddRequest
    hold: Hold
    echo: bool = False
    num_generated: int = 0
    num_cached: int = 0


class Delta(NamedTuple):
    """News of one choice. The last one has a `finish_reason`."""

    job: Job
    piece: Piece
    finish_reason: FinishReason | None = None


class Finished(NamedTuple):
    """A whole choice."""

    job: Job
    piece: Piece
    finish_reason: FinishReason


@dataclass(slots=True)
class Generation:
    """All choices of one HTTP request. `deltas` may be consumed once; `close` gives everything back."""

    engine: EnginePort
    inflight: InFlight
    meter: RequestMeter
    jobs: list[Job]
    started: float = field(default_factory=time.monotonic)  # when the request came
    cold: bool = False  # whether an adapter had to be brought in before

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices as they come. Raises the first error of any choice; the others are ended."""
        try:
            async with aclosing(merge([self._run(job) for job in self.jobs])) as merged:
                async for delta in merged:
                    yield delta
        finally:
            self.close()

    async def collect(self) -> list[Finished]:
        """All choices, whole. Raises the first error of any."""
        pieces = {job.index: Piece() for job in self.jobs}
        reasons: dict[int, FinishReason] = {}
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                pieces[delta.job.index].extend(delta.piece)
                if delta.finish_reason is not None:
                    reasons[delta.job.index] = delta.finish_reason
        return [Finished(job, pieces[job.index], reasons[job.index]) for job in self.jobs]

    def close(self) -> None:
        """Release the adapters. Needed when `deltas` was never begun; otherwise it changes nothing."""
        for job in self.jobs:
            self.inflight.release(job.hold)

    def usage(self) -> Usage:
        """Tokens so far."""
        firsts = {job.prompt.index: job for job in reversed(self.jobs)}
        num_prompt = sum(len(job.prompt.ids) for job in firsts.values())
        num_generated = sum(job.num_generated for job in self.jobs)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(job.num_cached for job in firsts.values())),
        )

    async def _run(self, job: Job) -> AsyncGenerator[Delta, None]:
        """One choice. Leaving early, also by a stop string, ends it in the engine."""
        meter = self.meter.begin(job.request, self.started, job.hold.adapters)
        reason = "error"
        try:
            with self.inflight.holding(job.hold):
                if job.hold.error is not None:
                    raise job.hold.error
                # Both engines' `generate` are async generators; only their declared type is the wider one.
                outputs = cast("AsyncGenerator[RequestOutput, None]", self.engine.generate(job.request))
                async with aclosing(outputs):
                    async for delta in self._follow(job, outputs, meter):
                        reason = delta.finish_reason or reason
                        yield delta
        except LoraserveError as error:
            reason = error.code
            raise
        except (GeneratorExit, asyncio.CancelledError):
            reason = "disconnected" if reason == "error" else reason
            raise
        finally:
            meter.end(reason, job.num_generated, job.num_cached)

    async def _follow(
        self, job: Job, outputs: AsyncGenerator[RequestOutput, None], meter: ChoiceMeter
    ) -> AsyncGenerator[Delta, None]:
        params = job.request.params
        context = job.prompt.ids if job.echo else ()
        offset = len(job.prompt.text) if job.echo else 0
        assembler = Assembler(job.prompt.tokenizer, params.stop, context, offset)
        prompt_logprobs: list[TokenLogprobs | None] = []
        echoed = not job.echo
        async for output in outputs:
            failure = _failure(output, job.hold)
            if failure is not None:
                raise failure
            job.num_cached = max(job.num_cached, output.cached_tokens)
            prompt_logprobs += output.prompt_logprobs or []
            piece = Piece()
            if not echoed and (output.token_ids or output.finish_reason):
                echoed = True
                piece = _echo(job.prompt, prompt_logprobs)
            _take(output, assembler, piece)
            job.num_generated += len(output.token_ids)
            if output.queued_s is not None:
                meter.admitted(output.queued_s, self.cold or output.cold)
            if output.token_ids:
                meter.tokens(len(output.token_ids))
            if assembler.stopped:
                yield Delta(job, piece, "stop")
                return
            if output.finish_reason is not None:
                piece.extend(assembler.end())
                stopped = assembler.stopped or output.finish_reason == "stop"
                yield Delta(job, piece, "stop" if stopped else "length")
                return
            if piece:
                yield Delta(job, piece)
        raise LoraserveError("the engine ended the request without saying why")


def _take(output: RequestOutput, assembler: Assembler, piece: Piece) -> None:
    last = len(output.token_ids) - 1
    for index, token in enumerate(output.token_ids):
        # What ends a sequence (EOS, a stop token) is one of its tokens, but no part of its text.
        silent = output.finish_reason == "stop" and index == last
        logprobs = output.logprobs[index] if output.logprobs else None
        piece.extend(assembler.push(token, logprobs, silent=silent))
        if assembler.stopped:
            return


def _failure(output: RequestOutput, hold: Hold) -> LoraserveError | None:
    if output.error is None and output.finish_reason in (None, "stop", "length"):
        return None
    if hold.error is not None:
        return hold.error
    if output.error is not None:
        return output.error.to_error()
    if output.finish_reason == "timeout":
        return RequestTimedOut("the request's time limit passed before it was finished")
    if output.finish_reason == "abort":
        return RequestAborted("the request was ended before it was finished")
    return LoraserveError("the engine ended the request with an error")


def _echo(prompt: Prompt, logprobs: Sequence[TokenLogprobs | None]) -> Piece:
    padded = [*logprobs, *([None] * (len(prompt.ids) - len(logprobs)))]
    return Piece(prompt.text, [ShownToken(*shown) for shown in zip(prompt.ids, prompt.starts, padded, strict=True)])


class _End(NamedTuple):
    """The last item of a stream in `merge`."""

    error: BaseException | None


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams as they come. The first error is raised; leaving closes every stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[T | _End] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        error: BaseException | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait(item)
        except Exception as caught:
            error = caught
        queue.put_nowait(_End(error))

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            news = await queue.get()
            if not isinstance(news, _End):
                yield news
            elif news.error is not None:
                raise news.error
            else:
                open_streams -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
