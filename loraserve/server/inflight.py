"""Requests that are being answered, and which adapters they hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from loraserve.errors import LoraserveError
from loraserve.lora.records import Visibility
from loraserve.lora.spec import AdapterSource
from loraserve.server.ports import EnginePort, StoredAdapter


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """One version under one name, from the moment requests can use it until its last request has ended."""

    name: str
    stored: StoredAdapter
    pinned: bool
    loaded_at: float  # seconds since the epoch
    owner: str = ""  # the tenant that a private adapter belongs to
    visibility: Visibility = "public"
    last_used_at: float | None = None
    num_requests: int = 0
    holds: set[Hold] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def version(self) -> str:
        """Content hash of what is served."""
        return self.stored.version

    def is_visible_to(self, tenant: str) -> bool:
        """Whether requests of this tenant may name it."""
        return self.visibility == "public" or self.owner == tenant

    @property
    def source(self) -> AdapterSource:
        """Where it came from."""
        return self.stored.source


@dataclass(slots=True, eq=False)
class Hold:
    """A running request's right to its adapters. `error` is set when an operator ends the request."""

    request_id: str
    adapters: tuple[ServedAdapter, ...]
    error: LoraserveError | None = None


class InFlight:
    """All running requests of one server."""

    def __init__(self, engine: EnginePort, wall: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._wall = wall
        self._holds: set[Hold] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._holds)

    def acquire(self, request_id: str, adapters: Iterable[ServedAdapter]) -> Hold:
        """Hold the adapters for a request; `release` must follow."""
        hold = Hold(request_id, tuple(dict.fromkeys(adapters)))
        self._holds.add(hold)
        self._idle.clear()
        now = self._wall()
        for adapter in hold.adapters:
            adapter.holds.add(hold)
            adapter.idle.clear()
            adapter.num_requests += 1
            adapter.last_used_at = now
        return hold

    def release(self, hold: Hold) -> None:
        """Give the adapters back; a second call does nothing."""
        self._holds.discard(hold)
        if not self._holds:
            self._idle.set()
        for adapter in hold.adapters:
            adapter.holds.discard(hold)
            if not adapter.holds:
                adapter.idle.set()

    def adapters(self) -> set[ServedAdapter]:
        """What running requests hold."""
        return {adapter for hold in self._holds for adapter in hold.adapters}

    @contextmanager
    def holding(self, hold: Hold) -> Iterator[Hold]:
        """Release `hold` at the end of the block."""
        try:
            yield hold
        finally:
            self.release(hold)

    async def abort(self, holds: Iterable[Hold], error: LoraserveError) -> int:
        """End these requests with `error`; returns how many were still running."""
        ended = 0
        for hold in list(holds):
            if hold.error is None and hold in self._holds:
                hold.error = error
                ended += 1
                await self._engine.abort(hold.request_id, error)
        return ended

    async def abort_all(self, error: LoraserveError) -> int:
        """End every running request with `error`."""
        return await self.abort(self._holds, error)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False when the time is over first."""
        return await wait_event(self._idle, timeout_s)


async def wait_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event for at most `timeout_s` seconds; False when the time is over first."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        return False
    return True
