"""The adapter directory: which names are served and by which version; load, replace and unload them under traffic."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from loraserve.errors import (
    AdapterInUse,
    AdapterNotFound,
    LoraserveError,
    NameReserved,
    NameTaken,
    RequestAborted,
)
from loraserve.lora.history import NameVersion
from loraserve.lora.names import check_name
from loraserve.server.arrival import Arrivals
from loraserve.server.background import Background
from loraserve.server.caller import Caller
from loraserve.server.engine_versions import EngineVersions
from loraserve.server.entries import Entry, Failure, Flight, LoadOrder, Retired, Unloaded
from loraserve.server.failed_loads import FailedLoads
from loraserve.server.inflight import InFlight, ServedAdapter, wait_event
from loraserve.server.lora_field import AdapterRef
from loraserve.server.older_versions import OlderVersions
from loraserve.server.on_demand import OnDemand
from loraserve.server.ports import AdapterLibrary, AdapterPlace, EnginePort, Registered, StoredAdapter
from loraserve.server.registry_sync import RegistrySync
from loraserve.server.sources import AdapterSources

logger = logging.getLogger(__name__)

MAX_IMPORTS = 4
# After its requests were told to end, how long unload waits for the slowest client to take its last event.
ABORT_GRACE_S = 10.0
ANYONE = Caller()


class AdapterDirectory:
    """Names, versions and their lifecycle. All methods belong to one event loop."""

    def __init__(
        self,
        engine: EnginePort,
        library: AdapterLibrary,
        inflight: InFlight,
        base_name: str,
        *,
        sources: AdapterSources = (),
        max_on_demand: int = 256,
        max_on_demand_bytes: int = 2 << 30,
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
        self._failed = FailedLoads(self._entries, clock)
        self._versions = EngineVersions(engine, library, clock)
        self._background = Background()
        self._spawn = self._background.spawn
        self._arrivals = Arrivals(library, self._versions, MAX_IMPORTS)
        self._older = OlderVersions(library, self._versions, self._leave)
        self.registry = RegistrySync(
            library, self._entries, base_name, self._serve, self._leave, self._older.take, self._spawn
        )
        self._on_demand = OnDemand(
            sources,
            library,
            self._versions,
            self._spawn,
            lambda served, limit_s: self._spawn(self._finish_unload([served], limit_s, [served.version])),
            max_adapters=max_on_demand,
            max_bytes=max_on_demand_bytes,
            clock=clock,
            wall=wall,
        )

    # -- look up --------------------------------------------------------------------------------------------------

    def entry(self, name: str) -> Entry:
        """The entry of a name. Raises `AdapterNotFound`."""
        entry = self._entries.get(name)
        if entry is None or not self._failed.is_alive(entry):
            served = next((each for each in self._on_demand.served() if each.name == name), None)
            if served is None:
                raise AdapterNotFound(f"no adapter is registered as {name!r}", param="name")
            return Entry(name, served)
        return entry

    def entries(self) -> list[Entry]:
        """All entries, by name; then those that came on demand."""
        found = [entry for _, entry in sorted(self._entries.items()) if self._failed.is_alive(entry)]
        return found + [Entry(served.name, served) for served in self._on_demand.served()]

    def served(self, tenant: str | None = None) -> list[ServedAdapter]:
        """What is registered (and visible to one tenant), by name."""
        alive = (entry for _, entry in sorted(self._entries.items()) if self._failed.is_alive(entry))
        found = [entry.served for entry in alive if entry.served is not None]
        return found if tenant is None else [served for served in found if served.is_visible_to(tenant)]

    def failure_of(self, entry: Entry) -> LoraserveError | None:
        """Why a name's last load failed, or why the engine does not take what it serves."""
        if entry.failure is not None:
            return entry.failure.error
        return None if entry.served is None else self._versions.failure(entry.served.version)

    def find(self, name: str) -> ServedAdapter | None:
        """What a name serves now, if anything."""
        entry = self._entries.get(name)
        return None if entry is None else entry.served

    def resolve(self, ref: AdapterRef, param: str = "lora", caller: Caller = ANYONE) -> ServedAdapter:
        """The adapter that a request names. Raises `AdapterNotFound`, or `AdapterInUse` while its load is under way."""
        entry = self._entries.get(ref.name)
        if ref.revision is not None or entry is None or not self._failed.is_alive(entry):
            found = self._on_demand.resolve(ref, caller)
            if found is not None and found.version.startswith(ref.prefix or ""):
                return found
        if ref.revision is not None:
            raise AdapterNotFound(f"no source has {ref.name!r} at revision {ref.revision[:200]!r}", param=param)
        if entry is None or not self._failed.is_alive(entry) or not entry.is_visible_to(caller.tenant):
            raise AdapterNotFound(f"no adapter is registered as {ref.name!r}", param=param)
        if entry.served is None:
            if entry.flight is not None:
                raise AdapterInUse(f"adapter {ref.name!r} is still being loaded", param=param)
            reason = "" if entry.failure is None else f": {entry.failure.error.message}"
            raise AdapterNotFound(f"adapter {ref.name!r} could not be loaded{reason}", param=param)
        if ref.prefix is not None and not entry.served.version.startswith(ref.prefix):
            older = self._older.find(entry.served, ref.prefix)
            if older is None:
                raise AdapterNotFound(f"adapter {ref.name!r} has no version that begins with {ref.prefix}", param=param)
            return older
        return entry.served

    async def prepare(self, refs: Iterable[AdapterRef], caller: Caller = ANYONE) -> bool:
        """Before `resolve`: see what other processes registered, and have the engine know what the request names.

        True if something had to be brought in. Names that do not exist are left to `resolve`. Raises what the engine
        says of an adapter.
        """
        cold = False
        refs = list(refs)
        if refs:
            await self.registry.see_changes(thorough=any(ref.name not in self._entries for ref in refs))
        for ref in refs:
            entry = self._entries.get(ref.name)
            if ref.revision is not None or entry is None or not self._failed.is_alive(entry):
                cold |= await self._on_demand.prepare(ref, caller)
                continue
            served = None if entry is None or not entry.is_visible_to(caller.tenant) else entry.served
            if served is not None and not served.version.startswith(ref.prefix or ""):
                served = await self._older.prepare(served, ref.prefix or "")
            if served is not None and not self._versions.has(served.version):
                cold = True
                await self.warm(served)
        return cold

    async def warm(
        self, served: ServedAdapter, *, to: str | None = None, idle_s: float = 0.0, at_once: bool = False
    ) -> None:
        """Have the engine know an adapter that came from the registry. Raises what the engine says (or said) of it.

        It is also brought `to` host or device, as far as there is room; it was used last `idle_s` seconds ago. What the
        engine refused waits for its back-off, unless the call is to go ahead `at_once`.
        """
        self._versions.use(served.version)
        try:
            await self._versions.ensure(served.stored, at_once=at_once)
            if to is not None:
                await self._engine.prefetch_adapter(served.version, to == "device", idle_s)
        finally:
            await self._versions.release(served.stored)

    # -- load -----------------------------------------------------------------------------------------------------

    async def load(self, order: LoadOrder, *, wait: bool = True) -> Entry:
        """Load and register. With `wait` the result is final and errors are raised; without it, look at the entry.

        Raises `AdapterRefused`, `NameReserved`, `NameTaken`, `AdapterInUse`, and what the engine raises.
        """
        check_name(order.name)
        if order.name == self._base_name:
            raise NameReserved(f"{order.name!r} is the name of the base model", param="name")
        self._failed.trim()
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
            await self._arrivals.bring(order.place, flight.progress, lambda stored: self._install(entry, order, stored))
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
            self.registry.landed(entry.name)
            if not self._failed.is_alive(entry) and self._entries.get(entry.name) is entry:
                del self._entries[entry.name]

    def _note_failure(self, entry: Entry, flight: Flight, error: LoraserveError) -> None:
        logger.warning("adapter %s was not loaded: %s: %s", entry.name, error.code, error.message)
        if flight.keep_failure:
            self._failed.keep(entry, Failure(flight.order, error, self._clock()))

    async def _install(self, entry: Entry, order: LoadOrder, stored: StoredAdapter) -> None:
        before = entry.served
        if before is not None and before.stored.meaning != stored.meaning and not order.replace:
            raise NameTaken(
                f"{order.name!r} is taken by version {before.version[:12]}; replace it with replace: true", param="name"
            )
        pinned = order.pin or (before is not None and before.pinned)
        await self._versions.ensure(stored, pin=pinned, at_once=True)
        async with self.registry.changing:
            found = await asyncio.to_thread(
                self._library.point,
                order.name,
                stored,
                pinned=pinned,
                replace=order.replace,
                owner=order.owner,
                visibility=order.visibility,
                tenant=order.tenant,
            )
            self._serve(entry, found)

    def _serve(self, entry: Entry, found: Registered) -> None:
        """Let a name serve what the registry says."""
        before = entry.served
        if before is not None and before.stored.meaning == found.stored.meaning:
            before.pinned, before.owner, before.visibility = found.pinned, found.owner, found.visibility
            return
        served = ServedAdapter(
            found.name,
            found.stored,
            found.pinned,
            found.loaded_at,
            found.owner,
            found.visibility,
            last_used_at=found.last_used_at,
        )
        self._versions.bind(served)
        entry.served = served
        former = "" if before is None else f" instead of {before.version[:12]}, which stays in its history"
        logger.info("adapter %s serves version %s%s", entry.name, served.version[:12], former)
        if before is not None:
            self._leave(before)

    # -- versions, pins -------------------------------------------------------------------------------------------

    async def roll_back(self, name: str, to: str | None = None) -> Entry:
        """Let a name serve a version that it had. Running requests finish on theirs.

        Raises `AdapterNotFound`, `NoOlderVersion`, `AmbiguousVersion`, `AdapterInUse`, and what the engine raises.
        """
        entry = self._settled(name)
        entry.flight = flight = Flight(LoadOrder(name=name, place=AdapterPlace()))
        flight.task = self._spawn(self._roll_back(entry, to))
        await asyncio.shield(flight.task)
        return entry

    async def _roll_back(self, entry: Entry, to: str | None) -> None:
        try:
            stored = await asyncio.to_thread(self._library.rollback_target, entry.name, to)
            self._versions.use(stored.version)
            try:
                pinned = entry.served is not None and entry.served.pinned
                await self._versions.ensure(stored, pin=pinned, at_once=True)
                async with self.registry.changing:
                    self._serve(entry, await asyncio.to_thread(self._library.roll_back, entry.name, to))
            finally:
                await self._versions.release(stored)
        finally:
            entry.flight = None
            self.registry.landed(entry.name)

    async def versions(self, name: str) -> list[NameVersion]:
        """The versions of a name, newest first. Raises `AdapterNotFound`."""
        await self.registry.see_changes(thorough=check_name(name) not in self._entries)
        self.entry(name)
        return await asyncio.to_thread(self._library.versions, name)

    async def pin(self, name: str, pinned: bool) -> Entry:
        """Keep a name's adapter on the device, or let it go when room is needed. Raises as `unload`."""
        entry, served = self._settled_and_served(name)
        if pinned:
            await self.warm(served, at_once=True)  # what the engine refuses is not pinned
        async with self.registry.changing:
            await asyncio.to_thread(self._library.set_pinned, name, pinned)
            served.pinned = pinned
        if self._versions.has(served.version):
            await self.warm(served)
        return entry

    async def prefetch(self, name: str, to: str) -> Entry:
        """Stage a name's adapter on the host, and start to bring it to the device. Raises as `pin`."""
        entry, served = self._settled_and_served(name)
        await self.warm(served, to=to, at_once=True)
        return entry

    # -- unload ---------------------------------------------------------------------------------------------------

    async def unload(
        self, name: str, *, force: bool = False, deadline_s: float = 60.0, purge: bool = False, wait: bool = True
    ) -> Unloaded:
        """Take the name away now; return (unless not to `wait`) when its requests have ended and its memory is free.

        With `purge` its files are deleted too, unless another name has or had the same version. Raises
        `AdapterNotFound`, or `AdapterInUse` while the name is being loaded.
        """
        self._settled(name)
        limit_s = 0.0 if force else deadline_s
        if name not in self._entries:
            return await self._on_demand.unload(name, limit_s, wait=wait)
        async with self.registry.changing:
            entry = self._settled(name)  # again: waiting for the lock took time
            del self._entries[name]
            going = [] if entry.served is None else [entry.served, *self._older.take(name)]
            running = sum(len(served.holds) for served in going)
            try:
                had = [] if entry.served is None else await asyncio.to_thread(self._library.forget, name)
            except AdapterNotFound:  # another process was faster
                had = []
            except LoraserveError:
                self._entries[name] = entry
                raise
        if entry.served is None:
            return Unloaded(name, None, 0, 0, True)
        rest = self._spawn(self._finish_unload(going, limit_s, had if purge else []))
        if not wait:
            return Unloaded(name, entry.served.version, 0, 0, False)
        aborted, freed = await asyncio.shield(rest)
        return Unloaded(name, entry.served.version, running - aborted, aborted, freed)

    async def _finish_unload(self, going: list[ServedAdapter], deadline_s: float, purge: list[str]) -> Retired:
        retired = Retired.all(await asyncio.gather(*(self._retire(served, deadline_s) for served in going)))
        logger.info("adapter %s unloaded (%d requests aborted)", going[0].name, retired.aborted)
        await self._arrivals.purge(purge)
        return retired

    def _settled(self, name: str) -> Entry:
        entry = self.entry(check_name(name))
        if entry.flight is not None:
            raise AdapterInUse(f"{name!r} is being loaded", param="name")
        return entry

    def _leave(self, served: ServedAdapter) -> None:
        self._spawn(self._retire(served))

    def _settled_and_served(self, name: str) -> tuple[Entry, ServedAdapter]:
        entry = self._settled(name)
        if entry.served is None:
            raise AdapterNotFound(f"adapter {name!r} could not be loaded", param="name")
        return entry, entry.served

    async def _retire(self, served: ServedAdapter, deadline_s: float | None = None) -> Retired:
        """Wait for an adapter's requests, end those left at the deadline, free its version."""
        aborted = 0
        if deadline_s is None:
            await served.idle.wait()
        elif deadline_s <= 0 or not await wait_event(served.idle, deadline_s):
            error = RequestAborted(f"adapter {served.name!r} was unloaded while this request ran")
            aborted = await self._inflight.abort(served.holds, error)
            await wait_event(served.idle, ABORT_GRACE_S)
        return Retired(aborted, await self._versions.unbind(served))

    async def close(self) -> None:
        """End what is under way, at the end of the server."""
        await self._background.close()
        self._arrivals.close()
        self._on_demand.close()
