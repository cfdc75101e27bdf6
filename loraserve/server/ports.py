"""What the server needs of the engine and of the adapter library; both are given to it from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from loraserve.engine.client import EngineHealth
from loraserve.engine.messages import AdapterStatus, AddRequest, EngineInfo, EngineStats, RequestOutput
from loraserve.errors import LoraserveError
from loraserve.lora.spec import AdapterSource, LoadReport


class EnginePort(Protocol):
    """The part of `engine.client.EngineClient` that the routes use."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    def health(self) -> EngineHealth: ...
    def generate(self, request: AddRequest) -> AsyncIterator[RequestOutput]: ...
    async def abort(self, request_id: str, error: LoraserveError | None = None) -> None: ...
    async def load_adapter(self, version: str, folder: str, pinned: bool = False) -> None: ...
    async def drop_adapter(self, version: str, force: bool = False) -> None: ...
    async def adapter_statuses(self) -> dict[str, AdapterStatus]: ...


class EngineProcess(EnginePort, Protocol):
    """An engine that can be started and stopped."""

    async def start(self) -> None: ...
    async def stop(self, drain_s: float = 0.0) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlace:
    """Where an adapter is to be fetched from: a local folder or a Hub repository."""

    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    subfolder: str | None = None
    token: str | None = field(default=None, repr=False)
    trusted: bool = False  # given by the operator: the allow-list of folders does not apply


class StoredAdapter(NamedTuple):
    """A version that lies in the store."""

    version: str
    folder: Path
    report: LoadReport
    source: AdapterSource


Progress = Callable[[int, int], None]
"""Receives (bytes done, bytes in all)."""


class AdapterLibrary(Protocol):
    """Fetches, checks and keeps adapters on disk. Its methods block; they run in threads, several at a time."""

    def add(self, place: AdapterPlace, progress: Progress) -> StoredAdapter:
        """Copy the adapter into the store. Raises `AdapterRefused` and other named errors; then nothing is kept."""
        ...

    def chat_template(self, digest: str) -> str:
        """The text of a template that a `StoredAdapter.source` names. Raises `StorageFailed`."""
        ...
