"""What the server needs of the engine and of the adapter library; both are given to it from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from loraserve.engine.client import EngineHealth
from loraserve.engine.messages import AdapterStatus, AddRequest, EngineInfo, EngineStats, RequestOutput
from loraserve.errors import LoraserveError
from loraserve.lora.history import NameVersion
from loraserve.lora.records import Visibility
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
    async def prefetch_adapter(self, version: str, to_device: bool = True, idle_s: float = 0.0) -> None: ...
    async def set_limits(self, lora_memory: int | None, host_lora_memory: int | None) -> None: ...
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
    token: str | bool | None = field(default=None, repr=False)  # None: this machine's own; False: none at all
    trusted: bool = False  # given by the operator: the allow-list of folders does not apply
    root: Path | None = None  # the allow-list for this path, instead of the server's
    max_bytes: int | None = None  # of its files, besides the store's own limit
    on_demand: bool = False  # named by a request: what the cache holds is not for it unless the Hub is asked


class StoredAdapter(NamedTuple):
    """A version that lies in the store."""

    version: str
    folder: Path
    report: LoadReport
    source: AdapterSource
    restricted: bool = False  # it came from a repository that is not open to everybody

    @property
    def meaning(self) -> tuple[str, str | None]:
        """What a name stands for: the weights, and the chat template that makes prompts for them."""
        return self.version, self.source.chat_template


Progress = Callable[[int, int], None]
"""Receives (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A name as the registry has it."""

    name: str
    stored: StoredAdapter
    pinned: bool
    loaded_at: float  # seconds since the epoch
    owner: str
    visibility: Visibility
    last_used_at: float | None
    tier: str  # where the version was when a server last looked


class AdapterLibrary(Protocol):
    """Fetches, checks and keeps adapters on disk. Its methods block; they run in threads, several at a time.

    All of them may raise `StorageFailed` and `DiskFull`.
    """

    def add(self, place: AdapterPlace, progress: Progress) -> StoredAdapter:
        """Copy the adapter into the store, and `hold` it. Raises `AdapterRefused` and other named errors; then nothing
        is kept."""
        ...

    def hold(self, stored: StoredAdapter) -> None:
        """Keep every process from deleting its files and its chat template, until as many `let_go`.

        Raises `AdapterNotFound` if the version is gone already.
        """
        ...

    def let_go(self, stored: StoredAdapter) -> None:
        """One hold less. The last one of all processes deletes what one of them wanted to purge."""
        ...

    def chat_template(self, digest: str) -> str:
        """The text of a template that a `StoredAdapter.source` names. Raises `StorageFailed`."""
        ...

    def check_access(self, place: AdapterPlace) -> None:
        """Ask the Hub whether the place's token opens its repository. Raises `HubError` and its kind."""
        ...

    def point(
        self,
        name: str,
        stored: StoredAdapter,
        *,
        pinned: bool,
        replace: bool,
        owner: str = "",
        visibility: Visibility | None = None,
        tenant: str | None = None,
    ) -> Registered:
        """Make a name mean a version; see `Registry.set_alias`.

        Raises `NameTaken`, or `AdapterNotFound` if the version was deleted meanwhile.
        """
        ...

    def rollback_target(self, name: str, to: str | None) -> StoredAdapter:
        """What `roll_back` would choose. Raises `AdapterNotFound`, `NoOlderVersion`, `AmbiguousVersion`."""
        ...

    def roll_back(self, name: str, to: str | None) -> Registered:
        """Make a name mean a version that it had before. Raises as `rollback_target`."""
        ...

    def set_pinned(self, name: str, pinned: bool) -> None:
        """Pin or unpin a name. Raises `AdapterNotFound`."""
        ...

    def forget(self, name: str) -> list[str]:
        """Take a name away; returns the versions that it had. Raises `AdapterNotFound`."""
        ...

    def has(self, version: str) -> bool:
        """Whether a version is stored."""
        ...

    def purge(self, versions: Iterable[str]) -> None:
        """Delete the files of those versions that no name has or could be rolled back to, when nobody holds them."""
        ...

    def versions(self, name: str) -> list[NameVersion]:
        """The versions of a name, newest first. Raises `AdapterNotFound`."""
        ...

    def find_version(self, name: str, prefix: str) -> StoredAdapter:
        """The version of a name that begins with `prefix`. Raises `AdapterNotFound`, `AmbiguousVersion`."""
        ...

    def registered(self) -> list[Registered]:
        """Every name."""
        ...

    def is_changed(self, *, wait: bool) -> bool:
        """Whether another process has changed the registry since the last call. Without `wait` it takes no time."""
        ...

    def note_use(self, last_used: Mapping[str, float], tiers: Mapping[str, str] | None) -> None:
        """Remember when names were last used, and which versions are not on disk alone."""
        ...

    def disk_bytes(self) -> int:
        """Bytes of everything that is stored."""
        ...
