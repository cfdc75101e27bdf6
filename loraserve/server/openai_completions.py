"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loraserve.errors import InvalidRequest
from loraserve.server.caller import caller_of
from loraserve.server.fields import COMPLETION_NEUTRAL, check_best_of, check_fields
from loraserve.server.generation import Delta, Generation, Job, Prompt, ResolvedUse
from loraserve.server.intake import (
    MAX_CHOICES,
    Logprobs,
    SharedFields,
    check_shared,
    check_tokens,
    make_generation,
    new_id,
    resolve_adapters,
    same_versions,
)
from loraserve.server.limits import Limits, check_length, room_for
from loraserve.server.logprobs import completion_logprobs
from loraserve.server.lora_field import parse_lora_field
from loraserve.server.protocol import CompletionRequest
from loraserve.server.responses import CompletionChoice, CompletionResponse, LoraUse
from loraserve.server.state import ServerState
from loraserve.server.streaming import EventStream, while_connected
from loraserve.server.strict_body import StrictRoute
from loraserve.server.text import Text

DEFAULT_MAX_TOKENS = 16


class _Format(NamedTuple):
    id: str
    created: int
    model: str
    num_top: int | None
    return_token_ids: bool
    include_usage: bool
    lora_per_choice: bool


def completions_router(state: ServerState) -> APIRouter:
    """The route; `/v1` and authorisation are the app's."""
    router = APIRouter(tags=["generation"], route_class=StrictRoute)

    @router.post("/completions", response_model=CompletionResponse, summary="Complete prompts")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue each prompt with the base model or with adapters; `stream: true` answers with events."""
        state.require_ready()
        shared = check_shared(body, caller_of(request.scope))
        check_best_of(body, shared.n)
        check_fields(body, COMPLETION_NEUTRAL)
        generation, form = await _prepare(state, body, shared, new_id("cmpl", request))
        if shared.stream:
            return EventStream(_chunks(generation, form))
        answer = await while_connected(request, _collect(generation, form))
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    return router


async def _prepare(
    state: ServerState, body: CompletionRequest, shared: SharedFields, request_id: str
) -> tuple[Generation, _Format]:
    values = _split_prompts(body.prompt)
    per_prompt = bool(body.lora_per_prompt)
    blends = parse_lora_field(body.lora, len(values), per_prompt)
    cold = await state.prepare_adapters(body.model, blends, shared.caller)
    uses = resolve_adapters(state, body.model, blends, shared.caller)  # an unknown name costs no tokenization
    echo = bool(body.echo)
    limits = Limits(body.max_tokens, DEFAULT_MAX_TOKENS)
    while True:
        prompts = []
        for index, value in enumerate(values):
            prompts.append(await _tokenize(state, index, value, uses[index], limits, echo=echo))
            await asyncio.sleep(0)  # many short prompts together are long: others go on between two
        # What a name means may have changed meanwhile; from here to the holds nothing is awaited.
        before, uses = uses, resolve_adapters(state, body.model, blends, shared.caller)
        if same_versions(before, uses):
            break
    generation = make_generation(
        state,
        body,
        shared,
        prompts,
        limits,
        Logprobs(body.logprobs, body.logprobs if echo else None),
        request_id,
        echo=echo,
        cold=cold,
    )
    form = _Format(
        request_id,
        int(time.time()),
        body.model,
        body.logprobs,
        shared.return_token_ids,
        shared.include_usage,
        per_prompt,
    )
    return generation, form


def _split_prompts(prompt: Any) -> list[str | list[Any]]:
    problem = InvalidRequest(
        "prompt must be a text, a list of texts, a list of token ids, or a list of lists of token ids", param="prompt"
    )
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise problem
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        if len(prompt) > MAX_CHOICES:
            raise InvalidRequest(f"at most {MAX_CHOICES} prompts in one request", param="prompt")
        return prompt
    if isinstance(prompt[0], str | list | dict):
        raise problem
    return [prompt]


async def _tokenize(
    state: ServerState,
    index: int,
    value: str | list[Any],
    uses: tuple[ResolvedUse, ...],
    limits: Limits,
    *,
    echo: bool,
) -> Prompt:
    if isinstance(value, str):
        tokenizer = await state.text_for(uses)
        check_length(value, tokenizer, limits, state.max_tokens)
        found = await state.encode(tokenizer, value)
        if not found.ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", param="prompt")
        return Prompt(index, found.ids, value, found.starts, uses, tokenizer)
    room_for(limits, len(value), state.max_tokens, echo=echo)  # before any work that grows with the prompt
    ids = check_tokens(value, state.vocab_size_for(uses))
    if not ids:
        raise InvalidRequest("the prompt is empty: it has no tokens", param="prompt")
    tokenizer = await state.text_for(uses)
    if not echo:
        return Prompt(index, ids, "", [], uses, tokenizer)
    return Prompt(index, ids, *await state.beside(len(ids), _spell, tokenizer, ids), uses, tokenizer)


def _spell(tokenizer: Text, ids: list[int]) -> tuple[str, list[int]]:
    """Text of a prompt given as ids, and where each id's text begins in it."""
    text = tokenizer.decode(ids)
    starts, place = [], 0
    for token in ids:
        starts.append(min(place, len(text)))
        if not tokenizer.is_silent(token):
            place += len(tokenizer.token_bytes(token).decode("utf-8", "ignore"))
    return text, starts


async def _collect(generation: Generation, form: _Format) -> CompletionResponse:
    finished = await generation.collect()
    choices = [await _shown(form, Delta(*whole), first=True) for whole in finished]
    return CompletionResponse(
        id=form.id,
        object="text_completion",
        created=form.created,
        model=form.model,
        choices=choices,
        usage=generation.usage(),
        lora=lora_of(generation.jobs),
    )


async def _chunks(generation: Generation, form: _Format) -> AsyncGenerator[CompletionResponse, None]:
    begun: set[int] = set()
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            first = delta.job.index not in begun
            begun.add(delta.job.index)
            chunk = _chunk(form, [await _shown(form, delta, first=first)])
            if delta.finish_reason is not None:
                chunk.lora = delta.job.prompt.lora()
            yield chunk
    if form.include_usage:
        last = _chunk(form, [])
        last.usage = generation.usage()
        last.lora = lora_of(generation.jobs)
        yield last


def _chunk(form: _Format, choices: list[CompletionChoice]) -> CompletionResponse:
    chunk = CompletionResponse(
        id=form.id, object="text_completion", created=form.created, model=form.model, choices=choices
    )
    if form.include_usage:
        chunk.usage = None
    return chunk


async def _shown(form: _Format, delta: Delta, *, first: bool) -> CompletionChoice:
    """A choice; probabilities of a long echoed prompt are written out beside the loop."""
    size = 0 if form.num_top is None else len(delta.piece.tokens) * (1 + form.num_top)
    return await ServerState.beside(size, _choice, form, delta, first=first)


def _choice(form: _Format, delta: Delta, *, first: bool) -> CompletionChoice:
    job, tokens = delta.job, delta.piece.tokens
    logprobs = None if form.num_top is None else completion_logprobs(job.prompt.tokenizer, tokens, form.num_top)
    choice = CompletionChoice(
        index=job.index, text=delta.piece.text, logprobs=logprobs, finish_reason=delta.finish_reason
    )
    if form.return_token_ids:
        # An echoed prompt's tokens are in `prompt_token_ids`.
        echoed = len(job.prompt.ids) if job.echo and first else 0
        choice.token_ids = [shown.token for shown in tokens[echoed:]]
        if first:
            choice.prompt_token_ids = job.prompt.ids
    if form.lora_per_choice and delta.finish_reason is not None:
        choice.lora = job.prompt.lora()
    return choice


def lora_of(jobs: list[Job]) -> list[LoraUse] | None:
    """Every adapter that had a part in the answer, each with its scale; None for the base alone."""
    uses: dict[tuple[str, str, float], LoraUse] = {}
    for job in jobs:
        for use in job.prompt.lora() or []:
            uses.setdefault((use.name, use.version, use.scale), use)
    return list(uses.values()) or None
