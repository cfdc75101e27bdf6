"""What all routes of one server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from loraserve.config import ServeConfig
from loraserve.errors import AdapterNotFound, AdapterRefused, EngineNotReady, ModelNotFound
from loraserve.server.adapter_texts import AdapterTexts, num_new_tokens
from loraserve.server.auth import Auth
from loraserve.server.caller import Caller
from loraserve.server.chats import ChatRenderer
from loraserve.server.directory import AdapterDirectory
from loraserve.server.generation import ResolvedUse
from loraserve.server.inflight import InFlight
from loraserve.server.lora_field import AdapterRef, Blend, parse_model
from loraserve.server.metrics import Metrics, RequestMeter
from loraserve.server.ports import EnginePort
from loraserve.server.text import SHORT, Encoding, Text

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class ServerState:
    """One server. `text` is missing until the model's files are there; `draining` turns new work away."""

    config: ServeConfig
    engine: EnginePort
    base_name: str
    directory: AdapterDirectory
    inflight: InFlight
    metrics: Metrics
    disk_bytes: Callable[[], int]  # of stored adapters; blocks
    meter: RequestMeter
    auth: Auth
    chats: ChatRenderer
    text_or_none: Text | None
    adapter_texts: AdapterTexts = field(default_factory=AdapterTexts)
    starting: bool = False
    draining: bool = False
    started: float = field(default_factory=time.time)

    @property
    def text(self) -> Text:
        """The tokenizer. Raises `EngineNotReady` while the model is still being prepared."""
        if self.text_or_none is None:
            raise EngineNotReady("the model is still being loaded")
        return self.text_or_none

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Give the tokenizer that was missing."""
        self.text_or_none = Text(tokenizer)

    def require_ready(self) -> None:
        """Raise `EngineNotReady` when no new work can be taken."""
        if self.draining:
            raise EngineNotReady("the server is shutting down")
        if self.starting:
            raise EngineNotReady("the server is starting")
        _ = self.text, self.engine.info

    @property
    def max_tokens(self) -> int:
        """Most tokens that a prompt and its answer may have together."""
        return min(self.engine.info.max_context, self.engine.info.kv_tokens)

    def uses_of(self, model: str | None, caller: Caller) -> tuple[ResolvedUse, ...]:
        """The adapter that a `model` field names, if any. Raises `ModelNotFound`."""
        named = None if model is None else self.adapter_of(model, caller)
        if named is None:
            return ()
        return (ResolvedUse(self.directory.resolve(named, "model", caller=caller), named.scale),)

    async def text_for(self, uses: Sequence[ResolvedUse]) -> Text:
        """What reads and writes the texts of a request with these adapters."""
        return await self.adapter_texts.text_for(self.text, uses)

    def vocab_size_for(self, uses: Sequence[ResolvedUse]) -> int:
        """Token ids that a request with these adapters may have."""
        return self.engine.info.vocab_size + num_new_tokens(uses)

    async def prepare_adapters(self, model: str, lora: Sequence[Blend | None], caller: Caller) -> bool:
        """Make what a request names ready to be resolved; see `AdapterDirectory.prepare`. What is wrong comes later."""
        try:
            named = parse_model(model, self.base_name)
        except AdapterRefused:
            named = None
        refs = {ref: None for blend in (() if named is None else (named,), *lora) for ref in blend or ()}
        return bool(refs) and await self.directory.prepare(refs, caller)

    def adapter_of(self, model: str, caller: Caller) -> AdapterRef | None:
        """The served adapter that a `model` field names, None for the base. Raises `ModelNotFound`, `AdapterInUse`."""
        try:
            named = parse_model(model, self.base_name)
            if named is not None:
                self.directory.resolve(named, "model", caller)
        except (AdapterNotFound, AdapterRefused) as error:
            detail = error.message if isinstance(error, AdapterNotFound) else "no adapter can have this name"
            raise ModelNotFound(
                f"{model[:200]!r} is neither the base model {self.base_name!r} nor an adapter ({detail})", param="model"
            ) from error
        return named

    @staticmethod
    async def beside(size: int, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `work`, in a thread if so many characters or ids (`size`) would hold up other requests."""
        return work(*args, **kwargs) if size <= SHORT else await asyncio.to_thread(work, *args, **kwargs)

    async def encode(self, tokenizer: Text, text: str, *, special: bool = True) -> Encoding:
        """Tokenize without holding up other requests."""
        return await self.beside(len(text), tokenizer.encode, text, special=special)

    async def decode(self, tokenizer: Text, ids: list[int], *, skip_special: bool = True) -> str:
        """The inverse, likewise."""
        return await self.beside(len(ids), tokenizer.decode, ids, skip_special=skip_special)
