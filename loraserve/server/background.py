"""Work that goes on after the request that began it has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Background:
    """Tasks of one event loop, kept until they end."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Begin; who wants the result awaits the task (shielded, if others do too)."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """End what is under way."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        # Retrieved here, because perhaps nobody waits for it.
        if not task.cancelled() and task.exception() is not None:
            logger.info("an adapter operation failed: %s", task.exception())
