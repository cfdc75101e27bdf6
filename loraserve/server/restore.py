"""What a server remembers over a restart: when adapters were used, where they were, and how they come back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from loraserve.errors import EngineDead, EngineNotReady, LoraserveError
from loraserve.server.directory import AdapterDirectory
from loraserve.server.ports import AdapterLibrary, EnginePort, Registered

logger = logging.getLogger(__name__)

NOTE_EVERY_S = 2.0


class UseJournal:
    """Writes last use and residency into the registry now and then, so that also a killed server is remembered."""

    def __init__(self, directory: AdapterDirectory, engine: EnginePort, library: AdapterLibrary) -> None:
        self._directory = directory
        self._engine = engine
        self._library = library
        self._used: dict[str, float] = {}
        self._tiers: dict[str, str] | None = None
        self._counts: tuple[int, ...] = ()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            await self.write()

    async def write(self) -> None:
        """Write what has changed since the last time. Failures are only logged."""
        used = {served.name: served.last_used_at for served in self._directory.served() if served.last_used_at}
        news = {name: at for name, at in used.items() if self._used.get(name) != at}
        try:
            tiers = await self._find_tiers()
            if not news and tiers is None:
                return
            await asyncio.to_thread(self._library.note_use, news, tiers)
        except LoraserveError as error:
            logger.warning("the use of adapters could not be noted: %s", error.message)
            return
        self._used = used
        self._tiers = self._tiers if tiers is None else tiers

    async def _find_tiers(self) -> dict[str, str] | None:
        """Where versions are, None if that is as it was. The engine is asked only when something has moved."""
        stats = self._engine.stats
        counts = (
            stats.adapter_loads_total,
            stats.adapter_evictions_total,
            stats.adapter_stagings_total,
            stats.adapter_host_evictions_total,
            stats.adapters_registered,
        )
        if counts == self._counts:
            return None
        try:
            statuses = await self._engine.adapter_statuses()
        except (EngineDead, EngineNotReady):
            return None
        self._counts = counts
        tiers = {version: status.residency for version, status in statuses.items() if status.residency != "disk"}
        return None if tiers == self._tiers else tiers


async def bring_back(
    registered: Sequence[Registered],
    directory: AdapterDirectory,
    wall: Callable[[], float] = time.time,
) -> None:
    """Load what was in memory when the last server ended, pinned ones first, then the one used last before others.

    An adapter that cannot come back is logged and skipped; its name stays, and says why when it is asked for.
    """
    wanted = [each for each in registered if each.pinned or each.tier != "disk"]
    wanted.sort(key=lambda each: (not each.pinned, -(each.last_used_at or 0.0)))
    num_back = 0
    for each in wanted:
        served = directory.find(each.name)
        if served is None or served.version != each.stored.version:
            continue  # it was unloaded or replaced meanwhile
        try:
            idle_s = max(0.0, wall() - (each.last_used_at or each.loaded_at))
            await directory.warm(served, to=None if each.pinned else each.tier, idle_s=idle_s)
            num_back += 1
        except LoraserveError as error:
            logger.warning("adapter %s did not come back: %s: %s", each.name, error.code, error.message)
    if wanted:
        logger.info("%d of %d adapters that the last run had in memory were brought back", num_back, len(wanted))
