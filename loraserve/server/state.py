"""What all routes of one server share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from loraserve.config import ServeConfig
from loraserve.errors import EngineNotReady, ModelNotFound
from loraserve.server.auth import Auth
from loraserve.server.directory import AdapterDirectory
from loraserve.server.inflight import InFlight
from loraserve.server.metrics import Metrics, RequestMeter
from loraserve.server.ports import EnginePort
from loraserve.server.text import Encoding, Text

# Shorter texts are tokenized faster than a thread would be started.
INLINE_CHARS = 2000


@dataclass(slots=True, kw_only=True)
class ServerState:
    """One server. `text` is missing until the model's files are there; `draining` turns new work away."""

    config: ServeConfig
    engine: EnginePort
    base_name: str
    directory: AdapterDirectory
    inflight: InFlight
    metrics: Metrics
    meter: RequestMeter
    auth: Auth
    text_or_none: Text | None
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

    def check_model(self, model: str | None) -> None:
        """Raise `ModelNotFound` unless `model` is absent, the base, or a served adapter (they share the tokenizer)."""
        names = {self.base_name} | {served.name for served in self.directory.served()}
        if model is not None and model not in names and model.removeprefix(f"{self.base_name}:") not in names:
            raise ModelNotFound(f"there is no model {model!r}", param="model")

    async def encode(self, text: str, *, special: bool = True) -> Encoding:
        """Tokenize without holding up other requests."""
        if len(text) <= INLINE_CHARS:
            return self.text.encode(text, special=special)
        return await asyncio.to_thread(self.text.encode, text, special=special)
