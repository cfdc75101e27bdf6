"""How an adapter's files come in and are used, although somebody may purge the same content meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from loraserve.errors import AdapterError
from loraserve.server.engine_versions import EngineVersions
from loraserve.server.ports import AdapterLibrary, AdapterPlace, Progress, StoredAdapter

logger = logging.getLogger(__name__)

ATTEMPTS = 3


class Arrivals:
    """Fetches adapters, a few at a time. All methods belong to one event loop.

    In threads of its own: sources may take minutes to answer, and what everything else waits for (the registry, the
    tokenizer) runs in the loop's few threads.
    """

    def __init__(self, library: AdapterLibrary, versions: EngineVersions, max_fetches: int) -> None:
        self._library = library
        self._versions = versions
        self._threads = ThreadPoolExecutor(max_fetches, thread_name_prefix="adapter-fetch")

    async def bring(
        self, place: AdapterPlace, progress: Progress, use: Callable[[StoredAdapter], Awaitable[None]]
    ) -> None:
        """Fetch an adapter, then `use` it while its version counts as used. What could not be used is not kept.

        Nobody deletes its files meanwhile. Should they be gone all the same (another program took them away, or an
        older one shares the data folder), both are done again. Raises what they raise.
        """
        for attempt in range(1, ATTEMPTS + 1):
            stored = await asyncio.get_running_loop().run_in_executor(self._threads, self._library.add, place, progress)
            self._versions.use(stored.version)
            try:
                await use(stored)
                return
            except AdapterError as error:
                problem = error
            finally:
                await self._versions.release(stored)
                await self._versions.let_go(stored)
            if attempt == ATTEMPTS or await asyncio.to_thread(self._library.has, stored.version):
                await self.purge([stored.version])
                raise problem
            logger.info("version %s was purged while it was being loaded; once more", stored.version[:12])

    async def check_access(self, place: AdapterPlace) -> None:
        """Ask the Hub whether the place's token opens its repository. Raises what it says."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._library.check_access, place)

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def purge(self, versions: Iterable[str]) -> None:
        """Delete the files of those versions that nothing needs here and no name has or could be rolled back to."""
        versions = list(versions)
        if versions:
            unused = [version for version in versions if not self._versions.is_used(version)]
            # Also with none: the name may have had a chat template of its own.
            await asyncio.to_thread(self._library.purge, unused)
