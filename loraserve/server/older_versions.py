"""Versions that a name had before, served to requests that pin them: `name@hashprefix`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loraserve.errors import AdapterNotFound
from loraserve.server.engine_versions import EngineVersions
from loraserve.server.inflight import ServedAdapter
from loraserve.server.ports import AdapterLibrary

MAX_PER_NAME = 8


class OlderVersions:
    """Brought in when they are asked for; a few per name are kept. All methods belong to one event loop."""

    def __init__(
        self, library: AdapterLibrary, versions: EngineVersions, leave: Callable[[ServedAdapter], object]
    ) -> None:
        self._library = library
        self._versions = versions
        self._leave = leave
        self._known: dict[str, dict[str, ServedAdapter]] = {}

    def find(self, current: ServedAdapter, prefix: str) -> ServedAdapter | None:
        """A version of the name of `current` that `prepare` brought in; its owner is the name's."""
        for version, served in self._known.get(current.name, {}).items():
            if version.startswith(prefix):
                served.owner, served.visibility = current.owner, current.visibility
                return served
        return None

    async def prepare(self, current: ServedAdapter, prefix: str) -> ServedAdapter | None:
        """Bind the version that begins with `prefix`, None if the name never had it. Raises `AmbiguousVersion`."""
        found = self.find(current, prefix)
        if found is not None:
            return found
        try:
            stored = await asyncio.to_thread(self._library.find_version, current.name, prefix)
        except AdapterNotFound:
            return None
        known = self._known.setdefault(current.name, {})
        if stored.version not in known:
            served = ServedAdapter(current.name, stored, False, current.loaded_at)
            self._versions.bind(served)
            known[stored.version] = served
            idle = [each for each in known.values() if not each.holds and each is not served]
            for each in idle[: max(0, len(known) - MAX_PER_NAME)]:
                self._leave(known.pop(each.version))
        return self.find(current, prefix)

    def take(self, name: str) -> list[ServedAdapter]:
        """Forget all of a name that is going; the caller retires them."""
        return list(self._known.pop(name, {}).values())
