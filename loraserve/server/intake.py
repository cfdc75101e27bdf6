"""From a request body to jobs for the engine: everything that completions and chat check alike."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

from starlette.requests import Request

from loraserve.engine.messages import AddRequest
from loraserve.errors import InvalidRequest, InvalidToken
from loraserve.sampling import MAX_SEED, SamplingParams, check_stops
from loraserve.scheduler.request import AdapterUse
from loraserve.server.adapter_texts import num_new_tokens
from loraserve.server.caller import Caller
from loraserve.server.fields import STREAM_NEUTRAL, check_fields
from loraserve.server.generation import Generation, Job, Prompt, ResolvedUse
from loraserve.server.limits import Limits, room_for
from loraserve.server.lora_field import Blend, combine
from loraserve.server.protocol import GenerationBody
from loraserve.server.state import ServerState

MAX_CHOICES = 1024
MAX_N = 128
MAX_SALT = 256
MAX_TIMEOUT_S = 86_400.0
MAX_PRIORITY = 2**31 - 1


class Logprobs(NamedTuple):
    """Alternatives wanted per generated and per prompt token; None: no probabilities at all."""

    output: int | None = None
    prompt: int | None = None


class SharedFields(NamedTuple):
    """Checked values of the fields that do not go into `SamplingParams`."""

    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    priority: int
    timeout_s: float | None
    cache_salt: str | None
    caller: Caller
    started: float  # monotonic seconds


def check_shared(body: GenerationBody, caller: Caller) -> SharedFields:
    """Check the common fields. Raises `InvalidRequest` naming the field."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n must be from 1 to {MAX_N}, got {n}", param="n")
    priority = body.priority or 0
    if abs(priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="priority")
    timeout_s = body.timeout_s
    if timeout_s is not None and not (isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise InvalidRequest(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}", param="timeout_s")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_SALT:
        raise InvalidRequest(f"cache_salt must have 1 to {MAX_SALT} characters", param="cache_salt")
    check_stops(_stops(body), body.stop_token_ids or ())  # before any work that grows with them
    stream = bool(body.stream)
    if body.stream_options is not None:
        if not stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        check_fields(body.stream_options, STREAM_NEUTRAL, "stream_options.")
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return SharedFields(
        n,
        stream,
        include_usage,
        bool(body.return_token_ids),
        priority,
        timeout_s,
        body.cache_salt,
        caller,
        time.monotonic(),
    )


def resolve_adapters(
    state: ServerState, model: str, lora: Sequence[Blend | None], caller: Caller
) -> list[tuple[ResolvedUse, ...]]:
    """Adapters of each prompt, from `model` and `lora`. Raises `ModelNotFound`, `AdapterNotFound`, `InvalidRequest`."""
    named = state.adapter_of(model, caller)
    resolve = state.directory.resolve
    found = [
        tuple(ResolvedUse(resolve(ref, caller=caller), ref.scale) for ref in combine(named, blend)) for blend in lora
    ]
    for uses in found:
        _require_alone(uses)
    return found


def _require_alone(uses: tuple[ResolvedUse, ...]) -> None:
    """Rows that replace the base's can be neither scaled nor added to another adapter's; the engine refuses it too."""
    own = next((use.adapter.name for use in uses if use.adapter.stored.report.replaced), None)
    if own is not None and [use.scale for use in _merged(uses)] != [1.0]:
        raise InvalidRequest(
            f"the adapter {own} replaces whole modules or token rows, so it is served alone and at scale 1 only",
            param="lora",
        )


def same_versions(some: Sequence[tuple[ResolvedUse, ...]], others: Sequence[tuple[ResolvedUse, ...]]) -> bool:
    """Whether the prompts have the same versions, so that what was tokenized for one is right for the other."""

    def versions(uses: Sequence[tuple[ResolvedUse, ...]]) -> list[list[str]]:
        return [[use.adapter.version for use in prompt] for prompt in uses]

    return versions(some) == versions(others)


def check_tokens(ids: Sequence[object], vocab_size: int, param: str = "prompt") -> list[int]:
    """Return ids that lie in the vocabulary. Raises `InvalidToken`, or `InvalidRequest` for an empty prompt."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequest(f"{param} has {token!r:.40} among its token ids", param=param)
        if not 0 <= token < vocab_size:
            raise InvalidToken(f"{param} has token id {token}; the vocabulary has {vocab_size}", param=param)
    return [token for token in ids if isinstance(token, int)]


def sampling_params(body: GenerationBody, max_tokens: int, logprobs: Logprobs) -> SamplingParams:
    """The sampler's view of a body; null is a field's default. Raises `InvalidRequest`."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k is None else body.top_k,
        min_p=0.0 if body.min_p is None else body.min_p,
        seed=body.seed,
        stop=tuple(_stops(body)),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs.output,
        prompt_logprobs=logprobs.prompt,
    )


def make_generation(
    state: ServerState,
    body: GenerationBody,
    shared: SharedFields,
    prompts: Sequence[Prompt],
    limits: Limits,
    logprobs: Logprobs,
    request_id: str,
    *,
    echo: bool = False,
    cold: bool = False,
) -> Generation:
    """Jobs for every choice of every prompt, holding their adapters until they end."""
    if len(prompts) * shared.n > MAX_CHOICES:
        raise InvalidRequest(f"at most {MAX_CHOICES} choices in one request", param="n" if shared.n > 1 else "prompt")
    plans = []
    for prompt in prompts:
        max_tokens = room_for(limits, len(prompt.ids), state.max_tokens, echo=echo)
        if max_tokens == 0 and logprobs.prompt is None:
            # Without anything to compute there would be nothing for the engine to answer.
            logprobs = logprobs._replace(prompt=0)
        plans.append((prompt, sampling_params(body, max_tokens, logprobs)))
    vocab_size = state.engine.info.vocab_size + max((num_new_tokens(prompt.uses) for prompt in prompts), default=0)
    check_tokens(body.stop_token_ids or (), vocab_size, "stop_token_ids")
    jobs = []
    for prompt, params in plans:
        for choice in range(shared.n):
            index = prompt.index * shared.n + choice
            # Nothing may fail from here on: the adapters held so far would stay held.
            seeded = params if params.seed is None else replace(params, seed=_nth_seed(params.seed, choice))
            request = AddRequest(
                id=f"{request_id}-{index}",
                prompt=prompt.ids,
                params=seeded,
                adapters=_merged(prompt.uses),
                cache_salt=shared.cache_salt,
                tenant=shared.caller.tenant,
                priority=shared.priority,
                timeout_s=shared.timeout_s,
            )
            hold = state.inflight.acquire(request.id, [use.adapter for use in prompt.uses])
            jobs.append(Job(index, prompt, request, hold, echo))
    return Generation(state.engine, state.inflight, state.meter, jobs, shared.started, cold)


def _stops(body: GenerationBody) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


def new_id(prefix: str, request: Request) -> str:
    """Id of an answer, made of the request's own so that logs and answers can be matched."""
    return f"{prefix}-{request.scope.get('request_id') or uuid.uuid4().hex}"


def _nth_seed(seed: int, choice: int) -> int:
    """The seeds after `seed`; the lowest follows the highest."""
    return (seed + choice + MAX_SEED) % (2 * MAX_SEED + 1) - MAX_SEED


def _merged(uses: Sequence[ResolvedUse]) -> list[AdapterUse]:
    """Two names of one version are one adapter whose scales add up."""
    scales: dict[str, float] = {}
    for use in uses:
        scales[use.adapter.version] = scales.get(use.adapter.version, 0.0) + use.scale
    return [AdapterUse(version, scale) for version, scale in scales.items()]
