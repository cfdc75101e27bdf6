"""Which adapter versions the engine knows, who needs them there, and whether they are pinned."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from loraserve.errors import EngineDead, EngineNotReady
from loraserve.server.inflight import ServedAdapter
from loraserve.server.ports import EnginePort, StoredAdapter


class EngineVersions:
    """Counts the users of each version (names, draining requests, loads); the last one frees it in the engine.

    A version that is used need not be in the engine: names that come from the registry are installed when they are
    first needed. All methods belong to one event loop.
    """

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._uses: Counter[str] = Counter()
        self._served_by: dict[str, set[ServedAdapter]] = {}
        self._installed: dict[str, bool] = {}  # versions that the engine has → whether pinned there
        self._locks: dict[str, asyncio.Lock] = {}

    def has(self, version: str) -> bool:
        """Whether the engine has it."""
        return version in self._installed

    def is_used(self, version: str) -> bool:
        """Whether anything needs its files."""
        return self._uses[version] > 0

    def use(self, version: str) -> None:
        """One more user; `release` must follow."""
        self._uses[version] += 1

    def bind(self, served: ServedAdapter) -> None:
        """A name serves its version from now on; `unbind` must follow."""
        self.use(served.version)
        self._served_by.setdefault(served.version, set()).add(served)

    async def unbind(self, served: ServedAdapter) -> None:
        """The name and its last request are gone."""
        self._served_by[served.version].discard(served)
        await self.release(served.stored)

    async def ensure(self, stored: StoredAdapter, *, pin: bool = False) -> None:
        """Have the engine know a version, pinned if any of its names is. The caller must use it meanwhile."""
        version = stored.version
        async with self._lock(version):
            pinned = pin or self._is_pinned(version)
            if self._installed.get(version) != pinned:
                await self._engine.load_adapter(version, str(stored.folder), pinned)
                self._installed[version] = pinned

    async def release(self, stored: StoredAdapter) -> None:
        """One user less: the last one frees the version in the engine, the last pinned one unpins it."""
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

    def _is_pinned(self, version: str) -> bool:
        return any(served.pinned for served in self._served_by.get(version, ()))

    def _lock(self, version: str) -> asyncio.Lock:
        return self._locks.setdefault(version, asyncio.Lock())
