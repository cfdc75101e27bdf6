"""Adapters that requests name although nobody registered them, fetched from `--adapter-source` when they are asked for.

Safe for several tenants. Only allow-listed sources are asked, and only for valid names; requests for one adapter share
one fetch; what failed is not tried again for a while; count, size and concurrency are bounded. What a private or gated
repository holds is served only to requests whose own `X-Hub-Token` the Hub accepts, checked again every minute.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from loraserve.errors import AdapterNotFound, LoraserveError, Overloaded
from loraserve.lora.records import Visibility
from loraserve.server.arrival import Arrivals
from loraserve.server.caller import Caller
from loraserve.server.engine_versions import EngineVersions
from loraserve.server.entries import Retired, Unloaded
from loraserve.server.inflight import ServedAdapter
from loraserve.server.lora_field import AdapterRef
from loraserve.server.misses import Misses
from loraserve.server.ports import AdapterLibrary, AdapterPlace, StoredAdapter
from loraserve.server.sources import AdapterSources, find_place

logger = logging.getLogger(__name__)

MAX_FETCHING, MAX_AT_ONCE = 64, 4
ALLOWED_S = 60.0
# Between the check and the use of a permission a long prompt may be tokenized.
ALLOWED_GRACE_S = 60.0
REFUSED_S, TROUBLE_S = 30.0, 5.0
MAX_REMEMBERED = 4096
# Between its fetch and its request's hold on it an adapter must not go.
SETTLE_S, TRIM_EVERY_S = 5.0, 1.0

Key = tuple[str, str | None]
"""Name and revision."""


class Refusal(NamedTuple):
    """Why a fetch or a permission failed, and until when that is not tried again."""

    error: LoraserveError
    until: float


@dataclass(slots=True, eq=False)
class Demanded:
    """One adapter of a source."""

    key: Key
    served: ServedAdapter | None = None
    restricted: bool = False
    task: asyncio.Task[None] | None = None
    fetching_for: str = ""  # whose token it is fetched with
    allowed: dict[str, float] = field(default_factory=dict)  # token digest → when the Hub accepted it
    refused: dict[str, Refusal] = field(default_factory=dict)
    used_at: float = 0.0


class OnDemand:
    """All adapters that came on demand. They are remembered by this process only. One event loop."""

    def __init__(
        self,
        sources: AdapterSources,
        library: AdapterLibrary,
        versions: EngineVersions,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        retire: Callable[[ServedAdapter, float], asyncio.Task[Retired]],
        *,
        max_adapters: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._sources = sources
        self._versions = versions
        self._spawn = spawn
        self._retire = retire
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._clock = clock
        self._wall = wall
        self._known: dict[Key, Demanded] = {}
        self._arrivals = Arrivals(library, versions, MAX_AT_ONCE)
        # Of their own: who has an adapter must not wait for others' fetches.
        self._checks = Arrivals(library, versions, MAX_AT_ONCE)
        self._misses = Misses(clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._trimming: asyncio.Task[None] | None = None

    def served(self) -> list[ServedAdapter]:
        """What is here, by name."""
        found = [entry.served for _, entry in sorted(self._known.items(), key=str)]
        return [served for served in found if served is not None]

    def resolve(self, ref: AdapterRef, caller: Caller) -> ServedAdapter | None:
        """The adapter, if it is here and the caller was let in by `prepare`."""
        entry = self._known.get((ref.name, ref.revision))
        if entry is None or entry.served is None:
            return None
        if entry.restricted:
            since = entry.allowed.get(_digest(caller), float("-inf"))
            if self._clock() - since > ALLOWED_S + ALLOWED_GRACE_S:
                return None
        return entry.served

    async def prepare(self, ref: AdapterRef, caller: Caller) -> bool:
        """Fetch what is not here, and ask the Hub whether this caller may have it. Names no source allows do nothing.

        True if something was brought in. Raises what the fetch raises, what the Hub says of the caller's token, and
        `Overloaded`.
        """
        if not self._sources:
            return False
        key = (ref.name, ref.revision)
        entry = self._known.get(key)
        place: AdapterPlace | None = None
        if entry is None or entry.served is None or entry.restricted:
            place = await asyncio.to_thread(find_place, self._sources, *key)
            if place is None:
                return False
        if entry is None:
            if place is not None and place.repo is not None:
                self._misses.check(caller.tenant)
            self._forget_old()
            entry = self._known.setdefault(key, Demanded(key))
        entry.used_at = self._clock()
        cold = entry.served is None
        if place is not None:
            if place.repo is not None:
                place = replace(place, token=caller.hub_token or False)
            await self._obtain(entry, replace(place, max_bytes=self._max_bytes, on_demand=True), caller)
        assert entry.served is not None
        if not self._versions.has(entry.served.version):
            self._versions.use(entry.served.version)
            stored = entry.served.stored
            try:
                await self._versions.ensure(stored)
            finally:
                await self._versions.release(stored)
            cold = True
        return cold

    async def unload(self, name: str, deadline_s: float, *, wait: bool) -> Unloaded:
        """Forget all revisions of a name, with their files; it comes again when it is named again."""
        gone = [self._known.pop(key) for key in list(self._known) if key[0] == name]
        served = [entry.served for entry in gone if entry.served is not None]
        running = sum(len(each.holds) for each in served)
        rests = [self._retire(each, deadline_s) for each in served]
        version = served[0].version if served else None
        if not wait:
            return Unloaded(name, version, 0, 0, not rests)
        aborted, freed = Retired.all(await asyncio.shield(asyncio.gather(*rests)))
        return Unloaded(name, version, running - aborted, aborted, freed)

    def close(self) -> None:
        """Begin nothing more."""
        self._arrivals.close()
        self._checks.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _obtain(self, entry: Demanded, place: AdapterPlace, caller: Caller) -> None:
        who = _digest(caller)
        while entry.served is None or (entry.restricted and not self._is_allowed(entry, who)):
            refusal = entry.refused.get(who)
            if refusal is not None and self._clock() < refusal.until:
                # Raised many times: without this it would keep the frames of every request that saw it.
                raise refusal.error.with_traceback(None)
            if entry.task is None:
                if len(self._tasks) >= MAX_FETCHING:
                    raise Overloaded("too many adapters are being fetched; try again later")
                # A token that opened it before must not suffer from wrong ones; folders cost nobody anything.
                payer = None if who in entry.allowed or place.repo is None else caller.tenant
                if payer is not None:
                    self._misses.spend(payer)
                entry.fetching_for = who
                work = self._fetch(entry, place, who) if entry.served is None else self._check(entry, place, who)
                entry.task = self._spawn(self._paid(work, payer))
                self._tasks.add(entry.task)
                entry.task.add_done_callback(self._tasks.discard)
            mine = entry.fetching_for == who
            try:
                # Whoever goes away must not end what others wait for.
                await asyncio.shield(entry.task)
            except LoraserveError:
                if mine:
                    raise
                # It was another caller's token that did not open it.

    async def _paid(self, work: Coroutine[Any, Any, None], payer: str | None) -> None:
        await work
        if payer is not None:
            self._misses.give_back(payer)

    async def _fetch(self, entry: Demanded, place: AdapterPlace, who: str) -> None:
        try:
            await self._arrivals.bring(place, lambda done, total: None, lambda stored: self._keep(entry, stored, who))
            if self._trimming is None or self._trimming.done():
                self._trimming = self._spawn(self._make_room())
        except Exception as error:
            raise self._refuse(entry, who, error) from error
        finally:
            entry.task = None

    async def _keep(self, entry: Demanded, stored: StoredAdapter, who: str) -> None:
        await self._versions.ensure(stored, at_once=True)
        name = entry.key[0]
        if self._known.get(entry.key) is not entry:
            raise AdapterNotFound(f"adapter {name!r} was unloaded while it was fetched", param="lora")
        visibility: Visibility = "private" if stored.restricted else "public"
        served = ServedAdapter(name, stored, False, self._wall(), visibility=visibility)
        entry.restricted = stored.restricted
        entry.allowed[who] = self._clock()
        self._versions.bind(served)
        entry.served, entry.used_at = served, self._clock()
        logger.info("adapter %s was fetched on demand: version %s", name, stored.version[:12])

    async def _check(self, entry: Demanded, place: AdapterPlace, who: str) -> None:
        try:
            await self._checks.check_access(place)
            entry.allowed[who] = self._clock()
            if len(entry.allowed) > MAX_REMEMBERED:
                del entry.allowed[min(entry.allowed, key=lambda digest: entry.allowed[digest])]
        except Exception as error:
            entry.allowed.pop(who, None)
            raise self._refuse(entry, who, error) from error
        finally:
            entry.task = None

    def _refuse(self, entry: Demanded, who: str, error: Exception) -> LoraserveError:
        if not isinstance(error, LoraserveError):
            logger.error("fetching adapter %s on demand failed", entry.key[0], exc_info=error)
            error = LoraserveError("internal error while the adapter was fetched")
        logger.warning("adapter %s was not fetched on demand: %s: %s", entry.key[0], error.code, error.message)
        wait = REFUSED_S if error.http_status < 500 else TROUBLE_S
        now = self._clock()
        entry.refused = {key: refusal for key, refusal in entry.refused.items() if refusal.until > now}
        entry.refused[who] = Refusal(error, now + wait)
        if len(entry.refused) > MAX_REMEMBERED:
            del entry.refused[next(iter(entry.refused))]
        return error

    def _is_allowed(self, entry: Demanded, who: str) -> bool:
        return self._clock() - entry.allowed.get(who, float("-inf")) <= ALLOWED_S

    async def _make_room(self) -> None:
        """Let go of what was asked for longest ago, with its files, until as many are left as may be."""
        while True:
            here = sorted((e for e in self._known.values() if e.served is not None), key=lambda e: e.used_at)
            excess = len(here) - self._max_adapters
            if excess <= 0:
                return
            settled = self._clock() - SETTLE_S
            idle = [e for e in here if e.served is not None and not e.served.holds and e.task is None]
            for entry in [e for e in idle if e.used_at <= settled][:excess]:
                assert entry.served is not None
                del self._known[entry.key]
                self._retire(entry.served, 0.0)
                excess -= 1
            if excess > 0:
                await asyncio.sleep(TRIM_EVERY_S)

    def _forget_old(self) -> None:
        """Keep the memory of failures bounded, whatever names are asked for."""
        if len(self._known) < MAX_REMEMBERED:
            return
        for entry in sorted(self._known.values(), key=lambda e: e.used_at):
            if entry.served is None and entry.task is None:
                del self._known[entry.key]
                return


def _digest(caller: Caller) -> str:
    """Stands for a token; the token itself is not kept."""
    return "" if caller.hub_token is None else hashlib.sha256(caller.hub_token.encode()).hexdigest()
