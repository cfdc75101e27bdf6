"""Keeping the directory's names as the registry has them, whoever changes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from loraserve.errors import StorageFailed
from loraserve.server.entries import Entry
from loraserve.server.inflight import ServedAdapter
from loraserve.server.ports import AdapterLibrary, Registered

logger = logging.getLogger(__name__)


class RegistrySync:
    """Reads the registry into the directory's entries.

    `changing` is held while the registry and the entries change together, so that no half of a change is read. A change
    is told once only; whoever asks while it is being read waits for that.
    """

    def __init__(
        self,
        library: AdapterLibrary,
        entries: dict[str, Entry],
        base_name: str,
        serve: Callable[[Entry, Registered], None],
        leave: Callable[[ServedAdapter], object],
        take_older: Callable[[str], list[ServedAdapter]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._spawn = spawn
        self._stale = False
        self._passed_over: set[str] = set()
        self._reading: asyncio.Task[None] | None = None
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
                else:
                    self._passed_over.add(registered.name)
            names = {registered.name for registered in found}
            for name, entry in list(self._entries.items()):
                if entry.served is not None and name not in names:
                    if entry.flight is not None:
                        self._passed_over.add(name)
                        continue
                    logger.info("adapter %s was unregistered by another process", name)
                    del self._entries[name]
                    self._leave(entry.served)
                    for older in self._take_older(name):
                        self._leave(older)
        return found

    def landed(self, name: str) -> None:
        """A load or rollback of a name has ended: what was read meanwhile of this name may be news."""
        self._stale |= name in self._passed_over
        self._passed_over.discard(name)

    async def see_changes(self, *, thorough: bool) -> None:
        """`sync` if another process has changed the registry; quick changes of our own hide that unless `thorough`."""
        try:
            changed = self._library.is_changed(wait=False)
            if thorough and not changed:
                changed = await asyncio.to_thread(self._library.is_changed, wait=True)
            self._stale |= changed
        except StorageFailed as error:
            _warn(error)
        if self._reading is not None:
            await asyncio.shield(self._reading)
        if self._stale:  # what was just read may be older than the change
            if self._reading is None:
                self._reading = self._spawn(self._read())
            await asyncio.shield(self._reading)

    async def _read(self) -> None:
        self._stale = False
        try:
            await self.sync()
        except StorageFailed as error:
            self._stale = True
            _warn(error)
        finally:
            self._reading = None


def _warn(error: StorageFailed) -> None:
    # What is being served goes on without the registry.
    logger.warning("the registry could not be looked at: %s", error.message)
