"""Which adapter versions the engine knows, who needs them there, and whether they are pinned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from loraserve.errors import (
    AdapterFailed,
    AdapterRefused,
    EngineDead,
    EngineNotReady,
    EngineStuck,
    LoraserveError,
    StorageFailed,
)
from loraserve.server.inflight import ServedAdapter
from loraserve.server.ports import AdapterLibrary, EnginePort, StoredAdapter

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0


@dataclass(slots=True)
class Refused:
    """What the engine said of a version that it would not take, and when it is asked again (monotonic seconds)."""

    error: LoraserveError
    times: int
    retry_at: float


class EngineVersions:
    """Counts the users of each version (names, draining requests, loads); the last one frees it in the engine.

    A version that is used need not be in the engine: names that come from the registry are installed when they are
    first needed. One that the engine refused is tried again by requests after a back-off only: 1 s, doubling to 60 s.
    What the engine was asked to take is held in the library as long as it is used, so that no other process of the data
    folder deletes its files. All methods belong to one event loop.
    """

    def __init__(
        self, engine: EnginePort, library: AdapterLibrary, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._library = library
        self._clock = clock
        self._refused: dict[str, Refused] = {}
        self._uses: Counter[str] = Counter()
        self._served_by: dict[str, set[ServedAdapter]] = {}
        self._installed: dict[str, bool] = {}  # versions that the engine has → whether pinned there
        self._held: dict[str, dict[str | None, StoredAdapter]] = {}  # version → by chat template
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

    async def unbind(self, served: ServedAdapter) -> bool:
        """The name and its last request are gone; see `release`."""
        self._served_by[served.version].discard(served)
        return await self.release(served.stored)

    def failure(self, version: str) -> LoraserveError | None:
        """Why the engine does not have a version that it was asked to take; None if it was not asked or has it."""
        refused = self._refused.get(version)
        return None if refused is None else refused.error

    async def ensure(self, stored: StoredAdapter, *, pin: bool = False, at_once: bool = False) -> None:
        """Have the engine know a version, pinned if any of its names is. The caller must use it meanwhile.

        Raises `AdapterNotFound` if its files were deleted, and what the engine says of it; until the back-off has
        passed (or the call is to go ahead `at_once`) what it said last.
        """
        version, template = stored.meaning
        async with self._lock(version):
            if template not in self._held.get(version, {}):
                await asyncio.to_thread(self._library.hold, stored)
                self._held.setdefault(version, {})[template] = stored
            pinned = pin or self._is_pinned(version)
            if self._installed.get(version) == pinned:
                return
            refused = self._refused.get(version)
            if refused is not None and not at_once and self._clock() < refused.retry_at:
                # Raised many times: without this it would keep the frames of every request that saw it.
                raise refused.error.with_traceback(None)
            try:
                await self._engine.load_adapter(version, str(stored.folder), pinned)
            except (AdapterRefused, AdapterFailed) as error:
                times = 0 if refused is None else refused.times
                wait = min(FIRST_RETRY_S * 2**times, LONGEST_RETRY_S)
                self._refused[version] = Refused(error, min(times + 1, 16), self._clock() + wait)
                raise
            self._refused.pop(version, None)
            self._installed[version] = pinned

    async def release(self, stored: StoredAdapter) -> bool:
        """One user less: the last one frees the version in the engine, the last pinned one unpins it.

        False if the engine is stuck, so that it will be free only when the engine goes on.
        """
        version, freed = stored.version, True
        self._uses[version] -= 1
        async with self._lock(version):
            if self._uses[version] > 0:
                pinned = self._is_pinned(version)
                if self._installed.get(version, pinned) != pinned:
                    await self._engine.load_adapter(version, str(stored.folder), pinned)
                    self._installed[version] = pinned
            elif self._installed.pop(version, None) is not None:
                # An engine that is down holds nothing, and its client forgets the version first.
                try:
                    await self._engine.drop_adapter(version, force=True)
                except EngineStuck:
                    freed = False
                except (EngineDead, EngineNotReady):
                    pass
            if self._uses[version] <= 0:
                for held in self._held.pop(version, {}).values():
                    await self.let_go(held)
        if self._uses[version] <= 0:
            del self._uses[version]
            self._refused.pop(version, None)
            self._served_by.pop(version, None)
            self._locks.pop(version, None)
        return freed

    async def let_go(self, stored: StoredAdapter) -> None:
        """Undo one `hold` of the library."""
        try:
            await asyncio.to_thread(self._library.let_go, stored)
        except StorageFailed as error:
            # It is free all the same; what was to be purged with it goes at the next start.
            logger.warning("version %s could not be let go of: %s", stored.version[:12], error.message)

    def _is_pinned(self, version: str) -> bool:
        return any(served.pinned for served in self._served_by.get(version, ()))

    def _lock(self, version: str) -> asyncio.Lock:
        return self._locks.setdefault(version, asyncio.Lock())
