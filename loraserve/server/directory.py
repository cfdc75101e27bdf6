"""The adapter directory: which names are served and by which version; load, replace and unload them under traffic."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple

from loraserve.errors import (
    AdapterInUse,
    AdapterNotFound,
    EngineDead,
    EngineNotReady,
    LoraserveError,
    NameReserved,
    NameTaken,
    RequestAborted,
)
from loraserve.lora.names import check_name
from loraserve.server.inflight import InFlight, ServedAdapter, wait_event
from loraserve.server.lora_field import AdapterRef
from loraserve.server.ports import AdapterLibrary, AdapterPlace, EnginePort, StoredAdapter

logger = logging.getLogger(__name__)

KEEP_FAILURE_S = 600.0
MAX_IMPORTS = 4
# After its requests were told to end, how long unload waits for the slowest client to take its last event.
ABORT_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """One call to load an adapter under a name."""

    name: str
    place: AdapterPlace
    pin: bool = False
    replace: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """A load under way. Calls with the same order share it."""

    order: LoadOrder
    task: asyncio.Task[None] | None = None
    keep_failure: bool = False
    bytes_done: int = 0
    bytes_total: int = 0

    def progress(self, done: int, total: int) -> None:
        """Called from the importing thread."""
        self.bytes_done, self.bytes_total = done, total


class Failure(NamedTuple):
    """Why the last load of a name failed, and when (monotonic seconds)."""

    order: LoadOrder
    error: LoraserveError
    at: float


@dataclass(slots=True, eq=False)
class Entry:
    """A name: what it serves now, the load under way, the last load's failure. At least one of them is there."""

    name: str
    served: ServedAdapter | None = None
    flight: Flight | None = None
    failure: Failure | None = None


class Unloaded(NamedTuple):
    """Result of an unload: how many running requests ended by themselves, and how many were ended."""

    name: str
    version: str | None
    drained: int
    aborted: int


class AdapterDirectory:
    """Names, versions and their lifecycle. All methods belong to one event loop."""

    def __init__(
        self,
        engine: EnginePort,
        library: AdapterLibrary,
        inflight: InFlight,
        base_name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._library = library
        self._inflight = inflight
        self._base_name = base_name
        self._clock = clock
        self._wall = wall
        self._entries: dict[str, Entry] = {}
        self._uses: Counter[str] = Counter()  # version → names, draining requests and loads that need it
        self._served_by: dict[str, set[ServedAdapter]] = {}
        self._installed: dict[str, bool] = {}  # versions that the engine has → whether pinned there
        self._locks: dict[str, asyncio.Lock] = {}
        self._imports = asyncio.Semaphore(MAX_IMPORTS)
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- look up --------------------------------------------------------------------------------------------------

    def entry(self, name: str) -> Entry:
        """The entry of a name. Raises `AdapterNotFound`."""
        entry = self._entries.get(name)
        if entry is None or not self._is_alive(entry):
            raise AdapterNotFound(f"no adapter is registered as {name!r}", param="name")
        return entry

    def entries(self) -> list[Entry]:
        """All entries, by name."""
        return [entry for _, entry in sorted(self._entries.items()) if self._is_alive(entry)]

    def served(self) -> list[ServedAdapter]:
        """What requests can name, by name."""
        return [entry.served for entry in self.entries() if entry.served is not None]

    def resolve(self, ref: AdapterRef, param: str = "lora") -> ServedAdapter:
        """The adapter that a request names. Raises `AdapterNotFound`, or `AdapterInUse` while its load is under way."""
        entry = self._entries.get(ref.name)
        if entry is None or not self._is_alive(entry):
            raise AdapterNotFound(f"no adapter is registered as {ref.name!r}", param=param)
        if entry.served is None:
            if entry.flight is not None:
                raise AdapterInUse(f"adapter {ref.name!r} is still being loaded", param=param)
            reason = "" if entry.failure is None else f": {entry.failure.error.message}"
            raise AdapterNotFound(f"adapter {ref.name!r} could not be loaded{reason}", param=param)
        if ref.prefix is not None and not entry.served.version.startswith(ref.prefix):
            raise AdapterNotFound(f"adapter {ref.name!r} has no version that begins with {ref.prefix}", param=param)
        return entry.served

    # -- load -----------------------------------------------------------------------------------------------------

    async def load(self, order: LoadOrder, *, wait: bool = True) -> Entry:
        """Load and register. With `wait` the result is final and errors are raised; without it, look at the entry.

        Raises `AdapterRefused`, `NameReserved`, `NameTaken`, `AdapterInUse`, and what the engine raises.
        """
        check_name(order.name)
        if order.name == self._base_name:
            raise NameReserved(f"{order.name!r} is the name of the base model", param="name")
        entry = self._entries.setdefault(order.name, Entry(order.name))
        flight = entry.flight
        if flight is None:
            entry.failure = None
            flight = entry.flight = Flight(order)
            flight.task = self._spawn(self._fly(entry, flight))
        elif flight.order != order:
            raise AdapterInUse(f"another load of {order.name!r} is under way", param="name")
        if not wait:
            flight.keep_failure = True
            return entry
        assert flight.task is not None
        # A caller that goes away must not end a load that others wait for.
        await asyncio.shield(flight.task)
        return entry

    async def _fly(self, entry: Entry, flight: Flight) -> None:
        order = flight.order
        try:
            async with self._imports:
                stored = await asyncio.to_thread(self._library.add, order.place, flight.progress)
            self._uses[stored.version] += 1
            try:
                await self._install(entry, order, stored)
            finally:
                await self._unuse(stored)
        except LoraserveError as error:
            self._note_failure(entry, flight, error)
            raise
        except Exception as error:
            logger.exception("loading adapter %s failed", order.name)
            known = LoraserveError("internal error while the adapter was loaded")
            self._note_failure(entry, flight, known)
            raise known from error
        finally:
            entry.flight = None
            if not self._is_alive(entry) and self._entries.get(entry.name) is entry:
                del self._entries[entry.name]

    def _note_failure(self, entry: Entry, flight: Flight, error: LoraserveError) -> None:
        logger.warning("adapter %s was not loaded: %s: %s", entry.name, error.code, error.message)
        if flight.keep_failure:
            entry.failure = Failure(flight.order, error, self._clock())

    async def _install(self, entry: Entry, order: LoadOrder, stored: StoredAdapter) -> None:
        before = entry.served
        # With another chat template the name means something else, though the weights are the same.
        same = before is not None and (before.version, before.source.chat_template) == (
            stored.version,
            stored.source.chat_template,
        )
        if before is not None and not same and not order.replace:
            raise NameTaken(
                f"{order.name!r} is taken by version {before.version[:12]}; replace it with replace: true", param="name"
            )
        async with self._lock(stored.version):
            pinned = order.pin or self._is_pinned(stored.version)
            if self._installed.get(stored.version) != pinned:
                await self._engine.load_adapter(stored.version, str(stored.folder), pinned)
                self._installed[stored.version] = pinned
            if before is not None and same:
                before.pinned = before.pinned or order.pin
                return
            served = ServedAdapter(order.name, stored, order.pin, self._wall())
            self._uses[stored.version] += 1
            self._served_by.setdefault(stored.version, set()).add(served)
            entry.served = served
        logger.info("adapter %s serves version %s", order.name, stored.version[:12])
        if before is not None:
            self._spawn(self._retire(before))

    # -- unload ---------------------------------------------------------------------------------------------------

    async def unload(self, name: str, *, force: bool = False, deadline_s: float = 60.0) -> Unloaded:
        """Take the name away now; return when its requests have ended and its memory is free.

        Raises `AdapterNotFound`, or `AdapterInUse` while the name is being loaded.
        """
        entry = self.entry(check_name(name))
        if entry.flight is not None:
            raise AdapterInUse(f"{name!r} is being loaded", param="name")
        del self._entries[name]
        if entry.served is None:
            return Unloaded(name, None, 0, 0)
        running = len(entry.served.holds)
        aborted = await asyncio.shield(self._spawn(self._retire(entry.served, 0.0 if force else deadline_s)))
        drained = running - aborted
        logger.info("adapter %s unloaded (%d requests drained, %d aborted)", name, drained, aborted)
        return Unloaded(name, entry.served.version, drained, aborted)

    async def _retire(self, served: ServedAdapter, deadline_s: float | None = None) -> int:
        """Wait for an adapter's requests, end those left at the deadline, free its version; returns how many ended."""
        aborted = 0
        if deadline_s is None:
            await served.idle.wait()
        elif deadline_s <= 0 or not await wait_event(served.idle, deadline_s):
            error = RequestAborted(f"adapter {served.name!r} was unloaded while this request ran")
            aborted = await self._inflight.abort(served.holds, error)
            await wait_event(served.idle, ABORT_GRACE_S)
        self._served_by[served.version].discard(served)
        await self._unuse(served.stored)
        return aborted

    async def _unuse(self, stored: StoredAdapter) -> None:
        """One user of a version less: the last one frees it in the engine, the last pinned one unpins it."""
        version = stored.version
        self._uses[version] -= 1
        async with self._lock(version):
            if self._uses[version] > 0:
                pinned = self._is_pinned(version)
                if self._installed.get(version, pinned) != pinned:
                    await self._engine.load_adapter(version, str(stored.folder), pinned)
                    self._installed[version] = pinned
            elif self._installed.pop(version, None) is not None:
                # An engine that is down holds nothing, and its client forgets the version first.
                with contextlib.suppress(EngineDead, EngineNotReady):
                    await self._engine.drop_adapter(version, force=True)
        if self._uses[version] <= 0:
            del self._uses[version]
            self._served_by.pop(version, None)
            self._locks.pop(version, None)

    # -- small ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End what is under way, at the end of the server."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_alive(self, entry: Entry) -> bool:
        if entry.failure is not None and self._clock() - entry.failure.at >= KEEP_FAILURE_S:
            entry.failure = None
        return entry.served is not None or entry.flight is not None or entry.failure is not None

    def _is_pinned(self, version: str) -> bool:
        return any(served.pinned for served in self._served_by.get(version, ()))

    def _lock(self, version: str) -> asyncio.Lock:
        return self._locks.setdefault(version, asyncio.Lock())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Retrieved here, because nobody waits for a load with wait: false.
        if not task.cancelled() and task.exception() is not None:
            logger.info("an adapter operation failed: %s", task.exception())
