"""The host tier: a loader thread that stages adapters beside the step loop, and the memory budget of staged copies."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from loraserve.errors import AdapterFault, AdapterRefused, LoraserveError
from loraserve.lora.affine import BaseWeights
from loraserve.lora.benefit import host_benefit
from loraserve.lora.layout import PoolLayout
from loraserve.lora.states import AdapterEntry, AdapterState
from loraserve.lora.weights import StagedAdapter, StagingCancelled, StagingTicket, stage

logger = logging.getLogger(__name__)

# Tasks handed to the loader beyond those it works on. Few, so that an urgent adapter does not queue behind many that
# were merely registered; more than none, so that the loader need not wait for the next step.
_LOOKAHEAD = 2


class StagingTask(NamedTuple):
    """What the loader needs of an entry; the entry itself belongs to the engine's thread."""

    entry: AdapterEntry
    ticket: StagingTicket
    work: Callable[[], StagedAdapter]


class StagingResult(NamedTuple):
    """How a task ended: with a staged adapter, with an error, or (neither) cancelled."""

    entry: AdapterEntry
    staged: StagedAdapter | None
    error: LoraserveError | None
    seconds: float = 0.0  # that the work took


class Loader:
    """Threads that run staging tasks in order. Every task submitted before `close` comes back from `collect` once."""

    def __init__(self, num_threads: int) -> None:
        self._tasks: queue.SimpleQueue[StagingTask | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StagingResult] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"adapter-loader-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: StagingTask) -> None:
        """Queue a task."""
        self._tasks.put(task)

    def collect(self) -> list[StagingResult]:
        """All results since the last call; does not wait."""
        results: list[StagingResult] = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except queue.Empty:
                return results

    def close(self) -> None:
        """Stop after the running tasks and join the threads. Cancel the tickets first to make that quick."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._results.put(_perform(task))


def _perform(task: StagingTask) -> StagingResult:
    try:
        if task.ticket.cancelled:
            return StagingResult(task.entry, None, None)
        begun = time.monotonic()
        staged = task.work()
        return StagingResult(task.entry, staged, None, time.monotonic() - begun)
    except StagingCancelled:
        return StagingResult(task.entry, None, None)
    except LoraserveError as error:
        return StagingResult(task.entry, None, error)
    except BaseException:  # whatever it is, the engine must hear of it and the thread must live
        logger.exception("staging adapter version %s failed unexpectedly", task.entry.version[:12])
        unknown = AdapterRefused(AdapterFault.STAGING_FAILED, "internal error while the adapter was staged")
        return StagingResult(task.entry, None, unknown)


class HostTier:
    """Staged copies within a budget. Only the engine's thread calls it.

    Room is taken before a staging starts, since its size is known from the headers; so the budget holds at every
    moment. The one exception is a single adapter larger than the whole budget: it may pass through when it is alone.
    Order of staging: adapters that requests wait for, longest wait first; then those merely registered, oldest first;
    nobody overtakes, so a large adapter is not starved by small ones. Room comes from copies nobody waits for, least
    worth keeping first, then from copies wanted later than the one that needs room, latest first.
    """

    def __init__(
        self,
        capacity_bytes: int,
        layout: PoolLayout,
        dtype: torch.dtype,
        *,
        pin_memory: bool,
        num_threads: int,
        base: BaseWeights | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0  # staged copies and the ones being made
        self.num_evictions = 0
        self.staging_seconds = 0.0
        self._layout = layout
        self._dtype = dtype
        self._pin_memory = pin_memory
        self._base = base
        self._loader = Loader(num_threads)
        self._max_outstanding = num_threads + _LOOKAHEAD
        self._queue: dict[str, AdapterEntry] = {}  # FETCHING, not handed to the loader yet
        self._loading: dict[str, AdapterEntry] = {}
        self._copies: dict[str, AdapterEntry] = {}

    @property
    def num_fetching(self) -> int:
        """Versions on their way to the host."""
        return len(self._queue) + len(self._loading)

    def request(self, entry: AdapterEntry) -> None:
        """Ask for a staged copy of an ABSENT version; `pump` starts it."""
        entry.move(AdapterState.FETCHING)
        self._queue[entry.version] = entry

    def cancel(self, entry: AdapterEntry) -> None:
        """Give a FETCHING version up: at once if it is only queued, else `collect` hands it back after the loader."""
        if self._queue.pop(entry.version, None) is not None:
            entry.move(AdapterState.ABSENT)
        elif entry.ticket is not None:
            entry.ticket.cancelled = True

    def pump(self) -> None:
        """Hand queued versions to the loader while there is room."""
        while self._queue and len(self._loading) < self._max_outstanding:
            entry = min(self._queue.values(), key=lambda e: (e.since, e.order))
            if not self._make_room(entry):
                return
            del self._queue[entry.version]
            self._loading[entry.version] = entry
            self.used_bytes += entry.host_needed
            entry.ticket = ticket = StagingTicket()
            self._loader.submit(StagingTask(entry, ticket, self._work(entry, ticket)))

    def collect(self) -> list[StagingResult]:
        """Take what the loader finished. Entries are STAGED, or ABSENT if cancelled; failed ones stay FETCHING."""
        results = self._loader.collect()
        for i, (entry, staged, error, seconds) in enumerate(results):
            self.staging_seconds += seconds
            del self._loading[entry.version]
            entry.ticket = None
            if staged is not None and entry.checksum not in (None, staged.checksum):
                error = AdapterRefused(
                    AdapterFault.CORRUPT_WEIGHTS, "the adapter's files changed since they were checked"
                )
                results[i] = StagingResult(entry, None, error)
                staged = None
            if staged is None:
                self.used_bytes -= entry.host_needed
                if error is None:
                    entry.move(AdapterState.ABSENT)
                continue
            entry.host = staged
            entry.checksum = staged.checksum
            self._copies[entry.version] = entry
            entry.move(AdapterState.STAGED)
        return results

    def release(self, entry: AdapterEntry) -> None:
        """Drop a staged copy, if there is one; a version that is nowhere else becomes ABSENT."""
        if entry.host is None:
            return
        if entry.uploading:
            raise RuntimeError(f"the staged copy of {entry.version[:12]} is being copied to the device")
        entry.host = None
        del self._copies[entry.version]
        self.used_bytes -= entry.host_needed
        if entry.state is AdapterState.STAGED:
            entry.move(AdapterState.ABSENT)

    def trim(self) -> None:
        """Drop copies that nobody waits for until the budget holds again (after an oversized one passed through)."""
        for entry in self._victims(float("-inf")):
            if self.used_bytes <= self.capacity_bytes:
                return
            self._evict(entry)

    def check(self, entries: Iterable[AdapterEntry]) -> None:
        """Raise `AssertionError` if the copies and the bytes do not agree with the entries."""
        known = list(entries)
        copies = {entry.version for entry in known if entry.host is not None}
        loading = {entry.version for entry in known if entry.ticket is not None}
        assert copies == self._copies.keys(), "a staged copy is lost"
        assert loading == self._loading.keys(), "a staging is lost"
        fetching = {entry.version for entry in known if entry.state is AdapterState.FETCHING}
        assert fetching == self._queue.keys() | loading, "a fetch is lost"
        held = sum(entry.host_needed for entry in known if entry.version in copies | loading)
        assert held == self.used_bytes, f"{held} host bytes held, {self.used_bytes} counted"

    def close(self) -> None:
        """Stop and join the loader."""
        for entry in self._loading.values():
            if entry.ticket is not None:
                entry.ticket.cancelled = True
        self._loader.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _work(self, entry: AdapterEntry, ticket: StagingTicket) -> Callable[[], StagedAdapter]:
        spec, folder, base = entry.spec, entry.folder, self._base
        pin = self._pin_memory
        return lambda: stage(spec, folder, self._layout, self._dtype, pin_memory=pin, ticket=ticket, base=base)

    def _make_room(self, entry: AdapterEntry) -> bool:
        excess = self.used_bytes + entry.host_needed - self.capacity_bytes
        victims: list[AdapterEntry] = []
        for victim in self._victims(entry.since):
            if excess <= 0:
                break
            victims.append(victim)
            excess -= victim.host_needed
        alone = self.used_bytes == sum(victim.host_needed for victim in victims)
        if excess > 0 and not alone:
            return False
        for victim in victims:
            self._evict(victim)
        return True

    def _victims(self, since: float) -> list[AdapterEntry]:
        """Copies that may go for an adapter wanted `since`, in order."""
        idle, later = [], []
        for entry in self._copies.values():
            if entry.uploading:
                continue
            if entry.state is AdapterState.RESIDENT or entry.wanted_since is None:
                idle.append(entry)
            elif entry.since > since > float("-inf"):
                later.append(entry)
        idle.sort(key=lambda e: (e.pinned, host_benefit(e)))
        later.sort(key=lambda e: e.since, reverse=True)
        return idle + later

    def _evict(self, entry: AdapterEntry) -> None:
        self.release(entry)
        self.num_evictions += 1
