"""Why loads failed that nobody waited for: told for a while, and never by more than so many entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from loraserve.server.entries import Entry, Failure

KEEP_FAILURE_S = 600.0
MAX_FAILURES = 1024


class FailedLoads:
    """Takes failures out of the directory's entries again, also if nobody ever looks."""

    def __init__(self, entries: dict[str, Entry], clock: Callable[[], float]) -> None:
        self._entries = entries
        self._clock = clock
        self._kept: OrderedDict[str, Entry] = OrderedDict()  # the oldest failure first

    def keep(self, entry: Entry, failure: Failure) -> None:
        """Let an entry tell of a failure."""
        entry.failure = failure
        self._kept.pop(entry.name, None)
        self._kept[entry.name] = entry
        self.trim()

    def trim(self) -> None:
        """Forget what is old or too much."""
        while self._kept:
            entry = next(iter(self._kept.values()))
            if len(self._kept) <= MAX_FAILURES and self._is_told(entry):
                return
            del self._kept[entry.name]
            entry.failure = None
            if self._entries.get(entry.name) is entry and entry.served is None and entry.flight is None:
                del self._entries[entry.name]

    def is_alive(self, entry: Entry) -> bool:
        """Whether an entry still has something to tell."""
        return entry.served is not None or entry.flight is not None or self._is_told(entry)

    def _is_told(self, entry: Entry) -> bool:
        if entry.failure is not None and self._clock() - entry.failure.at >= KEEP_FAILURE_S:
            entry.failure = None
        return entry.failure is not None
