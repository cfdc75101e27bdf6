"""Keeping the directory's names as the registry has them, whoever changes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from loraserve.errors import StorageFailed
from loraserve.server.entries import Entry
from loraserve.server.inflight import ServedAdapter
from loraserve.server.ports import AdapterLibrary, Registered

logger = logging.getLogger(__name__)


class RegistrySync:
    """Reads the registry into the directory's entries.

    `changing` is held while the registry and the entries change together, so that no half of a change is read.
    """

    def __init__(
        self,
        library: AdapterLibrary,
        entries: dict[str, Entry],
        base_name: str,
        serve: Callable[[Entry, Registered], None],
        leave: Callable[[ServedAdapter], object],
        take_older: Callable[[str], list[ServedAdapter]],
    ) -> None:
        self._take_older = take_older
        self.changing = asyncio.Lock()
        self._library = library
        self._entries = entries
        self._base_name = base_name
        self._serve = serve
        self._leave = leave

    async def sync(self) -> list[Registered]:
        """Take over what the registry says: at the start, and when another process has changed it."""
        async with self.changing:
            found = await asyncio.to_thread(self._library.registered)
            for registered in found:
                if registered.name == self._base_name:
                    logger.warning("adapter %s has the name of the base model and is not served", registered.name)
                    continue
                entry = self._entries.setdefault(registered.name, Entry(registered.name))
                if entry.flight is None:
                    self._serve(entry, registered)
            names = {registered.name for registered in found}
            for name, entry in list(self._entries.items()):
                if entry.served is not None and entry.flight is None and name not in names:
                    logger.info("adapter %s was unregistered by another process", name)
                    del self._entries[name]
                    self._leave(entry.served)
                    for older in self._take_older(name):
                        self._leave(older)
        return found

    async def see_changes(self, *, thorough: bool) -> None:
        """`sync` if another process has changed the registry; quick changes of our own hide that unless `thorough`."""
        try:
            changed = self._library.is_changed(wait=False)
            if thorough and not changed:
                changed = await asyncio.to_thread(self._library.is_changed, wait=True)
            if changed:
                await self.sync()
        except StorageFailed as error:
            # What is being served goes on without the registry.
            logger.warning("the registry could not be looked at: %s", error.message)
