"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loraserve.errors import InvalidRequest
from loraserve.sampling import MAX_LOGPROBS
from loraserve.server.assembly import ShownToken
from loraserve.server.caller import caller_of
from loraserve.server.chat_messages import check_messages
from loraserve.server.fields import CHAT_NEUTRAL, check_best_of, check_fields
from loraserve.server.generation import Delta, Generation, Job, Prompt
from loraserve.server.intake import (
    Logprobs,
    SharedFields,
    check_shared,
    make_generation,
    new_id,
    resolve_adapters,
    same_versions,
)
from loraserve.server.limits import Limits, check_length
from loraserve.server.logprobs import chat_logprobs
from loraserve.server.lora_field import parse_lora_field
from loraserve.server.protocol import ChatRequest
from loraserve.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
)
from loraserve.server.state import ServerState
from loraserve.server.streaming import EventStream, while_connected
from loraserve.server.strict_body import StrictRoute
from loraserve.server.text import Text


class _Format(NamedTuple):
    id: str
    created: int
    model: str
    num_top: int | None
    return_token_ids: bool
    include_usage: bool


def chat_router(state: ServerState) -> APIRouter:
    """The route; `/v1` and authorisation are the app's."""
    router = APIRouter(tags=["generation"], route_class=StrictRoute)

    @router.post("/chat/completions", response_model=ChatResponse, summary="Answer a conversation")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer messages through the model's chat template; `stream: true` answers with events."""
        state.require_ready()
        shared = check_shared(body, caller_of(request.scope))
        check_best_of(body, shared.n)
        check_fields(body, CHAT_NEUTRAL)
        generation, form = await _prepare(state, body, shared, new_id("chatcmpl", request))
        if shared.stream:
            return EventStream(_chunks(generation, form))
        answer = await while_connected(request, _collect(generation, form))
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    return router


async def render_prompt(
    state: ServerState,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool | None,
    go_on: bool,
    template: str | None,
) -> str:
    """Messages → prompt text, special tokens written out, by a `template` from `ChatRenderer.template_of`.

    Raises `InvalidRequest`.
    """
    checked = check_messages(messages)
    if go_on and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    add = (not go_on) if add_generation_prompt is None else add_generation_prompt
    return await state.chats.render(state.text, checked, add, go_on, template)


async def _prepare(
    state: ServerState, body: ChatRequest, shared: SharedFields, request_id: str
) -> tuple[Generation, _Format]:
    num_top = _num_top(body)
    limits = _limits(body)
    blends = parse_lora_field(body.lora, 1, per_prompt=False)
    cold = await state.prepare_adapters(body.model, blends, shared.caller)
    (uses,) = resolve_adapters(state, body.model, blends, shared.caller)  # an unknown name costs no tokenization
    while True:
        template = state.chats.template_of(uses)
        go_on = bool(body.continue_final_message)
        text = await render_prompt(state, body.messages, body.add_generation_prompt, go_on, template)
        tokenizer = await state.text_for(uses)
        check_length(text, tokenizer, limits, state.max_tokens)
        ids = (await state.encode(tokenizer, text, special=False)).ids
        if not ids:
            raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
        # What a name means may have changed meanwhile; from here to the holds nothing is awaited.
        before, (uses,) = uses, resolve_adapters(state, body.model, blends, shared.caller)
        if same_versions([before], [uses]) and state.chats.template_of(uses) == template:
            break
    prompt = Prompt(0, ids, text, [], uses, tokenizer)
    generation = make_generation(state, body, shared, [prompt], limits, Logprobs(num_top), request_id, cold=cold)
    form = _Format(request_id, int(time.time()), body.model, num_top, shared.return_token_ids, shared.include_usage)
    return generation, form


def _num_top(body: ChatRequest) -> int | None:
    if body.logprobs:
        num_top = body.top_logprobs or 0
        if not 0 <= num_top <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {num_top}", param="top_logprobs")
        return num_top
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def _limits(body: ChatRequest) -> Limits:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
    param = "max_tokens" if new is None else "max_completion_tokens"
    return Limits(old if new is None else new, None, param, "messages")


async def _collect(generation: Generation, form: _Format) -> ChatResponse:
    choices = []
    for job, piece, finish_reason in await generation.collect():
        choice = ChatChoice(
            index=job.index,
            message=ChatMessage(role="assistant", content=piece.text, refusal=None),
            logprobs=_logprobs(form, job.prompt.tokenizer, piece.tokens),
            finish_reason=finish_reason,
        )
        if form.return_token_ids:
            choice.token_ids = [shown.token for shown in piece.tokens]
            choice.prompt_token_ids = job.prompt.ids
        choices.append(choice)
    return ChatResponse(
        id=form.id,
        object="chat.completion",
        created=form.created,
        model=form.model,
        choices=choices,
        usage=generation.usage(),
        lora=generation.jobs[0].prompt.lora(),
    )


async def _chunks(generation: Generation, form: _Format) -> AsyncGenerator[ChatChunk, None]:
    begun: set[int] = set()
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            if delta.job.index not in begun:
                begun.add(delta.job.index)
                yield _opening(form, delta.job)
            if delta.piece:
                yield _chunk(form, _part(form, delta))
            if delta.finish_reason is not None:
                last = _chunk(
                    form,
                    ChatChunkChoice(
                        index=delta.job.index, delta=ChatDelta(), logprobs=None, finish_reason=delta.finish_reason
                    ),
                )
                if form.return_token_ids:
                    last.choices[0].token_ids = []
                last.lora = delta.job.prompt.lora()
                yield last
    if form.include_usage:
        usage = _chunk(form, None)
        usage.usage = generation.usage()
        usage.lora = generation.jobs[0].prompt.lora()
        yield usage


def _opening(form: _Format, job: Job) -> ChatChunk:
    delta = ChatDelta(role="assistant", content="")
    choice = ChatChunkChoice(index=job.index, delta=delta, logprobs=None, finish_reason=None)
    if form.return_token_ids:
        choice.token_ids = []
        choice.prompt_token_ids = job.prompt.ids
    return _chunk(form, choice)


def _part(form: _Format, delta: Delta) -> ChatChunkChoice:
    choice = ChatChunkChoice(
        index=delta.job.index,
        delta=ChatDelta(content=delta.piece.text),
        logprobs=_logprobs(form, delta.job.prompt.tokenizer, delta.piece.tokens),
        finish_reason=None,
    )
    if form.return_token_ids:
        choice.token_ids = [shown.token for shown in delta.piece.tokens]
    return choice


def _chunk(form: _Format, choice: ChatChunkChoice | None) -> ChatChunk:
    chunk = ChatChunk(
        id=form.id,
        object="chat.completion.chunk",
        created=form.created,
        model=form.model,
        choices=[] if choice is None else [choice],
    )
    if form.include_usage:
        chunk.usage = None
    return chunk


def _logprobs(form: _Format, tokenizer: Text, tokens: list[ShownToken]) -> ChatLogprobs | None:
    return None if form.num_top is None else chat_logprobs(tokenizer, tokens, form.num_top)
