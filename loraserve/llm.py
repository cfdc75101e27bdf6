"""`LLM`: the engine inside your own process, for scripts and notebooks. Same code as the server's engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from loraserve.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig, parse_bytes
from loraserve.engine.messages import AddRequest, RequestOutput, TokenLogprobs
from loraserve.errors import (
    AdapterNotFound,
    ConfigError,
    EngineDead,
    InvalidRequest,
    InvalidToken,
    LoraserveError,
    NameTaken,
    RequestTimedOut,
)
from loraserve.kernels.threads import configure_threads
from loraserve.lora.format import parse_adapter
from loraserve.lora.names import check_name
from loraserve.lora.spec import LoadReport
from loraserve.lora.version import content_version
from loraserve.sampling import SamplingParams
from loraserve.scheduler.request import AdapterUse
from loraserve.server.assembly import Assembler
from loraserve.server.fields import check_text
from loraserve.server.limits import Limits, room_for
from loraserve.server.lora_field import parse_lora
from loraserve.server.text import Text, load_tokenizer

Prompt = str | Sequence[int]
_T = TypeVar("_T")
_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "lora": LoraConfig,
    "scheduler": SchedulerConfig,
}


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer. An answer that failed is raised instead."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str  # stop or length
    cached_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class _Running:
    """One request on its way."""

    prompt: list[int]
    assembler: Assembler
    silent: frozenset[int]  # tokens that end the answer without adding text
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    reason: str | None = None
    cached_tokens: int = 0


class LLM:
    """One base model and its adapters. Not thread-safe; `close` it or use it in a `with` block.

    `options` are the fields of the config classes, as the flags of `loraserve serve` without dashes; sizes may be
    text: `LLM("folder", adapters={"sql": "adapters/sql"}, kv_memory="1GiB", page_size=16)`.
    """

    def __init__(
        self, model: str | None = None, adapters: Mapping[str, str | Path] | None = None, **options: Any
    ) -> None:
        config = _config(model, options)
        configure_threads(config.model.threads)
        from loraserve.engine.build import build_engine

        self._config = config
        self._parts = build_engine(config)
        self._loop = self._parts.loop
        self._max_total = min(self._parts.info.max_context, self._parts.info.kv_tokens)
        self._text = Text(load_tokenizer(Path(self._parts.info.model_path)))
        self._versions: dict[str, str] = {}
        self._reports: dict[str, LoadReport] = {}  # of every version that is loaded
        self._texts: dict[str, Text] = {}  # of versions that bring tokens of their own
        self._ids = itertools.count()
        self._closed = False
        try:
            for name, path in (adapters or {}).items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine's threads. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._parts.close()

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> str:
        """Check and stage an adapter folder; returns its version. Raises `AdapterRefused`, `NameTaken`."""
        self._require_open()
        check_name(name)
        folder = Path(path)
        spec = parse_adapter(folder, self._parts.info.geometry, self._config.lora.max_lora_rank)
        version = content_version(spec, folder)
        if self._versions.get(name, version) != version and not replace:
            raise NameTaken(f"{name} is another adapter; give replace=True to change it")
        old = self._versions.get(name)
        self._call(lambda done: self._loop.load_adapter(version, str(folder), False, done))
        self._versions[name] = version
        self._reports[version] = LoadReport.of(spec, version)
        if old is not None and old not in self._versions.values():
            self._drop(old)
        return version

    def unload_adapter(self, name: str) -> None:
        """Forget a name and free its weights. Raises `AdapterNotFound`."""
        self._require_open()
        version = self._version(name)
        del self._versions[name]
        if version not in self._versions.values():
            self._drop(version)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: Any = None,
    ) -> list[Completion]:
        """Complete all prompts together, each under its own adapter.

        `params` and `lora` are one value for all or a list with one for each prompt. A `lora` value is None (the base),
        a name, `{"name": …, "scale": …}`, or, inside the list only, a list of such objects (a blend). Raises the first
        failure.
        """
        self._require_open()
        many = _prompts(prompts)
        all_params = _spread(params if params is not None else SamplingParams(), len(many), "params")
        all_loras = _spread(lora, len(many), "lora")
        # All of them are checked before the first one starts.
        plans = [self._plan(*each) for each in zip(many, all_params, all_loras, strict=True)]
        running = {request.id: state for request, state in plans}
        try:
            for request, _ in plans:
                self._loop.add(request)
            self._run(running)
        except BaseException:
            for request_id in running:
                self._loop.abort(request_id)
            raise
        finally:
            # What was ended early (also by a stop string) leaves the engine in its next step.
            self._loop.step()
            self._loop.take_outputs()
        return [_completion(state) for state in running.values()]

    # -- inside ---------------------------------------------------------------------------------------------------

    def _plan(self, prompt: Prompt, params: SamplingParams, lora: Any) -> tuple[AddRequest, _Running]:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, got {params!r:.60}", param="params")
        scales: dict[str, float] = {}
        for ref in parse_lora(lora):
            # Two names of one version are one adapter whose scales add up.
            version = self._version(ref.name, ref.prefix)
            scales[version] = scales.get(version, 0.0) + ref.scale
        uses = [AdapterUse(version, scale) for version, scale in scales.items()]
        text = self._text_of(uses)
        ids = self._encode(prompt, text, max((self._reports[use.version].new_tokens for use in uses), default=0))
        # As over HTTP: an answer is never cut shorter than it was asked for.
        limits = Limits(params.max_tokens, None)
        room_for(limits, len(ids), self._max_total, echo=params.prompt_logprobs is not None)
        request_id = f"llm-{next(self._ids)}"
        silent = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            silent |= frozenset(self._parts.info.eos_token_ids)
        state = _Running(ids, Assembler(text, params.stop, ids), silent)
        return AddRequest(id=request_id, prompt=ids, params=params, adapters=uses), state

    def _drop(self, version: str) -> None:
        self._call(lambda done: self._loop.drop_adapter(version, False, done))
        self._reports.pop(version, None)
        self._texts.pop(version, None)

    def _text_of(self, uses: list[AdapterUse]) -> Text:
        """The tokenizer of a request: the base's, unless its one adapter brings tokens of its own."""
        added = self._reports[uses[0].version].added_tokens if len(uses) == 1 else ()
        if not added:
            return self._text
        version = uses[0].version
        if version not in self._texts:
            self._texts[version] = self._text.with_tokens(added) or self._text
        return self._texts[version]

    def _encode(self, prompt: Prompt, text: Text, num_new_tokens: int) -> list[int]:
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            ids = text.encode(prompt).ids
        else:
            ids = list(prompt)
        vocab_size = self._parts.info.vocab_size + num_new_tokens
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidRequest(f"prompt has {token!r:.40} among its token ids", param="prompt")
            if not 0 <= token < vocab_size:
                raise InvalidToken(f"prompt has token id {token}; the vocabulary has {vocab_size}", param="prompt")
        if not ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", param="prompt")
        return ids

    def _require_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM has been closed")

    def _run(self, running: dict[str, _Running]) -> None:
        while any(state.reason is None for state in running.values()):
            worked = self._loop.step()
            for output in self._loop.take_outputs():
                if output.id in running:
                    self._take(output, running[output.id])
            if not worked:
                time.sleep(0.0005)

    def _take(self, output: RequestOutput, state: _Running) -> None:
        if state.reason is not None:
            return
        if output.error is not None:
            raise output.error.to_error()
        if output.finish_reason == "timeout":
            raise RequestTimedOut("the request's time limit passed")
        state.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            state.prompt_logprobs = output.prompt_logprobs
        state.token_ids = state.token_ids or []
        for index, token in enumerate(output.token_ids):
            last = output.finish_reason == "stop" and index == len(output.token_ids) - 1
            logprobs = output.logprobs[index] if output.logprobs else None
            self._show(state, state.assembler.push(token, logprobs, silent=last and token in state.silent))
            if state.assembler.stopped:
                state.reason = "stop"
                self._loop.abort(output.id)
                return
        if output.finish_reason is not None:
            self._show(state, state.assembler.end())
            state.reason = "stop" if state.assembler.stopped else output.finish_reason

    @staticmethod
    def _show(state: _Running, piece: Any) -> None:
        state.text += piece.text
        assert state.token_ids is not None
        for shown in piece.tokens:
            state.token_ids.append(shown.token)
            if shown.logprobs is not None:
                state.logprobs = [*(state.logprobs or []), shown.logprobs]

    def _version(self, name: str, prefix: str | None = None) -> str:
        if name not in self._versions:
            raise AdapterNotFound(f"no adapter named {name}")
        version = self._versions[name]
        if not version.startswith(prefix or ""):
            raise AdapterNotFound(f"adapter {name!r} has no version that begins with {prefix}")
        return version

    def _call(self, start: Any) -> None:
        answers: list[LoraserveError | None] = []
        start(answers.append)
        while not answers:
            if not self._loop.step():
                time.sleep(0.0005)
        if answers[0] is not None:
            raise answers[0]


def _config(model: str | None, options: dict[str, Any]) -> EngineConfig:
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    sections["model"]["model"] = model
    known = {field.name: (section, field) for section, cls in _SECTIONS.items() for field in fields(cls)}
    for name, value in options.items():
        if name not in known or name in ("model", "adapter", "adapter_dir"):
            raise ConfigError(f"unknown option {name}")
        section, field = known[name]
        sections[section][name] = parse_bytes(value) if field.metadata["size"] and isinstance(value, str) else value
    return replace(EngineConfig(), **{name: cls(**sections[name]) for name, cls in _SECTIONS.items()})


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequest("prompts must be a text, token ids, or a list of those", param="prompts")
    if any(not isinstance(prompt, Sequence | int) or isinstance(prompt, bytes) for prompt in prompts):
        raise InvalidRequest("each prompt must be a text or a list of token ids", param="prompts")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _spread(value: _T | Sequence[_T], count: int, name: str) -> list[_T]:
    if not isinstance(value, list | tuple):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} values for {count} prompts", param=name)
    return list(value)


def _completion(state: _Running) -> Completion:
    assert state.reason is not None
    return Completion(
        prompt_token_ids=state.prompt,
        token_ids=state.token_ids or [],
        text=state.text,
        finish_reason=state.reason,
        cached_tokens=state.cached_tokens,
        logprobs=state.logprobs,
        prompt_logprobs=state.prompt_logprobs,
    )
