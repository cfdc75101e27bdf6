"""`AdapterResidency`: every registered adapter version, where it is, and the leases that keep it there.

It is the scheduler's adapter side (`state`, `want`, `unwant`, `acquire`, `release`, `failure`) and the engine's (all
else). Only the engine's thread calls it; files are read by a loader thread of its own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from loraserve.config import format_bytes
from loraserve.errors import AdapterNotFound, BlendTooLarge, LoraserveError
from loraserve.kernels.metadata import LoraTables
from loraserve.lora.affine import BaseWeights
from loraserve.lora.benefit import warm
from loraserve.lora.copier import has_streams
from loraserve.lora.new_entry import new_entry
from loraserve.lora.placement import DeviceTier
from loraserve.lora.pool import LoraPool
from loraserve.lora.residency_stats import residency_stats
from loraserve.lora.spec import AdapterSpec
from loraserve.lora.staging import HostTier
from loraserve.lora.states import (
    AdapterDropped,
    AdapterEntry,
    AdapterFailedEvent,
    AdapterReady,
    AdapterState,
    ResidencyEvent,
    ResidencyInfo,
    ResidencyStats,
    Tier,
)

__all__ = [
    "AdapterDropped",
    "AdapterFailedEvent",
    "AdapterReady",
    "AdapterResidency",
    "AdapterState",
    "ResidencyEvent",
    "ResidencyInfo",
    "ResidencyStats",
    "Tier",
]

logger = logging.getLogger(__name__)

_UNDER_WAY = (AdapterState.FETCHING, AdapterState.STAGED)
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0


class AdapterResidency:
    """All adapter versions of one engine. See `DeviceTier` and `HostTier` for the rules of who goes first.

    A version that failed is tried again when it is wanted after a back-off (1 s, doubling to 60 s), or at once when it
    is registered anew. `close` must be called to end the loader thread.
    """

    def __init__(
        self,
        pool: LoraPool,
        host_capacity_bytes: int,
        *,
        num_loaders: int = 1,
        max_overtakes: int = 8,
        last_resort_s: float = 1.0,
        base: BaseWeights | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._clock = clock
        pin = has_streams(pool.device)
        self._host = HostTier(
            host_capacity_bytes, pool.layout, pool.dtype, pin_memory=pin, num_threads=num_loaders, base=base
        )
        self._device = DeviceTier(pool, clock, max_overtakes, last_resort_s)
        self._entries: dict[str, AdapterEntry] = {}
        self._wanted: dict[str, AdapterEntry] = {}
        self._pinned: dict[str, AdapterEntry] = {}
        self._prefetched: dict[str, AdapterEntry] = {}
        self._unannounced: dict[str, AdapterEntry] = {}  # registered, not yet reported as ready or failed
        self._events: list[ResidencyEvent] = []
        self._counts: Counter[str] = Counter()

    # -- registration ---------------------------------------------------------------------------------------------

    def register(self, version: str, folder: Path, spec: AdapterSpec, pinned: bool = False) -> None:
        """Make a version known and stage it; `AdapterReady` or `AdapterFailedEvent` follows from a later `advance`.

        A version that is already good is ready at once. A version that is being dropped is kept instead, and its drop
        ends with `AdapterDropped`. Raises `AdapterRefused`, and registers nothing, if the adapter does not fit the
        base model or would not fit the empty pool.
        """
        entry = self._entries.get(version)
        if entry is None:
            entry = new_entry(self._pool, version, folder, spec, order=self._counts["registered"] + 1)
            self._counts["registered"] += 1
            entry.last_used = self._clock()
            self._entries[version] = entry
        elif entry.leaving:
            entry.leaving = False
            self._events.append(AdapterDropped(version))
        entry.folder, entry.spec = folder, spec
        self.set_pinned(version, pinned)
        if entry.state is AdapterState.FAILED:
            entry.retry_at = self._clock()
            self._retry_if_due(entry)
            entry.failures = 0
        elif entry.checksum is not None:
            self._events.append(AdapterReady(version))
            return
        self._unannounced[version] = entry
        if entry.state is AdapterState.ABSENT:
            self._host.request(entry)
            self._host.pump()

    def unregister(self, version: str) -> None:
        """Forget a version once no request needs it; `AdapterDropped` follows. Raises `AdapterNotFound`."""
        entry = self._known(version)
        entry.leaving = True
        self._drop_if_free(entry)

    def knows(self, version: str) -> bool:
        """Whether a version is registered and not on its way out."""
        entry = self._entries.get(version)
        return entry is not None and not entry.leaving

    def spec(self, version: str) -> AdapterSpec:
        """What a version is. Raises `AdapterNotFound`."""
        return self._known(version).spec

    def set_pinned(self, version: str, pinned: bool) -> None:
        """Pin or unpin. A pinned version goes to the device by itself and is evicted only as the last resort."""
        entry = self._known(version)
        entry.pinned = pinned
        if pinned:
            self._pinned[version] = entry
        else:
            self._pinned.pop(version, None)

    def prefetch(self, version: str, *, to_device: bool = True, idle_s: float = 0.0) -> None:
        """Bring a version to the host or device before it is asked for, over others that nobody needs. Tried once.

        `idle_s` is how long ago it was used last, as far as the caller knows. Raises `AdapterNotFound`.
        """
        entry = self._known(version)
        warm(entry, self._clock() - idle_s)
        if to_device:
            self._prefetched[version] = entry
        self._retry_if_due(entry)
        if entry.state is AdapterState.ABSENT:
            self._host.request(entry)
            self._host.pump()

    def hold(self, version: str) -> None:
        """A request that uses this version has come; until `unhold` an `unregister` waits. Raises `AdapterNotFound`."""
        if not self.knows(version):
            raise _not_found(version)
        self._entries[version].holds += 1

    def unhold(self, version: str) -> None:
        """A request that held this version has ended. Raises `ValueError` without a `hold`."""
        entry = self._entries.get(version)
        if entry is None or entry.holds == 0:
            raise ValueError(f"adapter version {version[:12]} is not held")
        entry.holds -= 1
        self._drop_if_free(entry)

    # -- the scheduler's side -------------------------------------------------------------------------------------

    def state(self, version: str) -> AdapterState:
        """Where a version is. One that is not registered counts as FAILED, so that its requests end."""
        entry = self._entries.get(version)
        if entry is None:
            return AdapterState.FAILED
        self._retry_if_due(entry)
        return entry.state

    def failure(self, version: str) -> LoraserveError | None:
        """Why a version is FAILED; None if it is not."""
        entry = self._entries.get(version)
        if entry is None:
            return _not_found(version)
        self._retry_if_due(entry)
        return entry.error

    def want(self, version: str, since: float) -> None:
        """Waiting requests need this version on the device, the first of them since `since`. The latest call counts."""
        entry = self._entries.get(version)
        if entry is None:
            return
        if entry.wanted_since is None:
            hit = entry.state is AdapterState.RESIDENT
            self._counts["hits" if hit else "misses"] += 1
            self._wanted[version] = entry
        entry.wanted_since = since
        self._retry_if_due(entry)
        if entry.state is AdapterState.ABSENT:
            self._host.request(entry)
            self._host.pump()

    def unwant(self, version: str) -> None:
        """No waiting request needs this version any more."""
        entry = self._wanted.pop(version, None)
        if entry is None:
            return
        entry.wanted_since = None
        entry.blocked_since = None
        entry.overtaken = 0
        if entry.state is AdapterState.FETCHING and entry.ticket is None and entry.checksum is not None:
            self._host.cancel(entry)
        self._drop_if_free(entry)

    def acquire(self, version: str) -> bool:
        """Take a device lease: the slot and its pages stay until `release`. False if the version is not resident."""
        entry = self._entries.get(version)
        if entry is None or entry.state is not AdapterState.RESIDENT:
            return False
        entry.leases += 1
        entry.last_used = self._clock()
        self._counts["hits"] += entry.wanted_since is None
        return True

    def release(self, version: str) -> None:
        """Give a device lease back. Raises `ValueError` if there is none."""
        entry = self._entries.get(version)
        if entry is None or entry.leases == 0:
            raise ValueError(f"adapter version {version[:12]} is not leased")
        entry.leases -= 1
        warm(entry, self._clock())
        self._drop_if_free(entry)

    # -- the engine's side ----------------------------------------------------------------------------------------

    @property
    def tables(self) -> LoraTables:
        """What the kernels read."""
        return self._pool.tables

    @property
    def busy(self) -> bool:
        """Whether the loader or the copying has work that goes on without any request."""
        return bool(self._host.num_fetching or self._device.uploading or self._events)

    def require_room(self, versions: list[str]) -> None:
        """Raise `BlendTooLarge` if these versions can never be on the device together, `AdapterNotFound` if unknown."""
        entries = [self._known(version) for version in dict.fromkeys(versions)]
        over_limit = len(entries) > 1 and sum(entry.device_needed for entry in entries) > self._device.limit_bytes
        if over_limit or not self._pool.fits_empty(*(entry.spec for entry in entries)):
            need = format_bytes(sum(entry.device_needed for entry in entries))
            text = f"{len(entries)} adapters in one request need {need} of device memory together; "
            raise BlendTooLarge(text + f"the LoRA pool has {format_bytes(self._device.limit_bytes)}")

    def slot(self, version: str) -> int:
        """The slot of a leased version. Raises `RuntimeError` without a lease: the slot could change hands."""
        entry = self._known(version)
        if entry.held is None or entry.leases == 0:
            raise RuntimeError(f"adapter version {version[:12]} has no device lease")
        return entry.held.slot

    def advance(self, max_bytes: int) -> bool:
        """Move everything on: finished stagings in, pages to the first in line, at most `max_bytes` copied.

        Never waits. True while an upload is under way, that is, while another call makes progress at once.
        """
        self._collect()
        self._refetch()
        self._host.pump()
        waiting = (e for e in self._wanted.values() if e.placeable)
        unasked = {e.version: e for e in (*self._pinned.values(), *self._prefetched.values()) if e.wanted_since is None}
        idle = [e for e in unasked.values() if e.placeable]
        self._device.place(sorted(waiting, key=lambda e: (e.since, e.order)), idle)
        for entry, error in self._device.write(max_bytes):
            self._fail(entry, error)
        self._prefetched = {v: e for v, e in self._prefetched.items() if e.state in _UNDER_WAY}
        self._device.trim()
        self._host.trim()
        return bool(self._device.uploading) and not self._device.is_waiting

    def take_events(self) -> list[ResidencyEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def info(self, version: str) -> ResidencyInfo:
        """One version. Raises `AdapterNotFound`."""
        return self._known(version).info()

    def infos(self) -> list[ResidencyInfo]:
        """Every version, in the order of registration."""
        return [entry.info() for entry in self._entries.values()]

    def stats(self) -> ResidencyStats:
        """Counts and bytes of all tiers."""
        return residency_stats(self._entries.values(), len(self._wanted), self._device, self._host, self._counts)

    def set_limits(self, *, device_bytes: int | None = None, host_bytes: int | None = None) -> None:
        """Change how much of the device pool is used and how much host memory staged copies may take.

        What is over a smaller limit goes as soon as nobody needs it. `device_bytes` beyond the pool is the whole pool.
        """
        if device_bytes is not None:
            self._device.limit_bytes = min(device_bytes, self._pool.capacity_bytes)
        if host_bytes is not None:
            self._host.capacity_bytes = host_bytes

    def check(self) -> None:
        """Raise `AssertionError` if states, tiers and the pool do not agree. For tests and idle moments."""
        for entry in self._entries.values():
            entry.check()
            assert (entry.wanted_since is not None) == (entry.version in self._wanted), f"{entry.version}: wanted"
        self._device.check(self._entries.values())
        self._host.check(self._entries.values())

    def close(self) -> None:
        """Stop and join the loader thread."""
        self._host.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _known(self, version: str) -> AdapterEntry:
        entry = self._entries.get(version)
        if entry is None:
            raise _not_found(version)
        return entry

    def _collect(self) -> None:
        for entry, staged, error, _ in self._host.collect():
            if error is not None:
                self._fail(entry, error)
            elif staged is not None:
                self._counts["stagings"] += 1
                entry.failures = 0
                if entry.heat == 0.0:
                    warm(entry, self._clock())
                if self._unannounced.pop(entry.version, None) is not None:
                    self._events.append(AdapterReady(entry.version))
            self._drop_if_free(entry)

    def _refetch(self) -> None:
        """Fetch what is needed and was evicted, cancelled or due for another try since it was asked for."""
        for entry in (*self._wanted.values(), *self._unannounced.values()):
            self._retry_if_due(entry)
            if entry.state is AdapterState.ABSENT:
                self._host.request(entry)
        for entry in self._pinned.values():
            self._retry_if_due(entry)
            # Only if there is a place for it: else it would be read again and again in vain.
            if entry.state is AdapterState.ABSENT and self._device.could_place(entry):
                self._host.request(entry)

    def _retry_if_due(self, entry: AdapterEntry) -> None:
        if entry.state is AdapterState.FAILED and self._clock() >= entry.retry_at:
            entry.move(AdapterState.ABSENT)
            entry.error = None

    def _fail(self, entry: AdapterEntry, error: LoraserveError) -> None:
        """A staging or an upload failed: keep the reason, drop what is left, announce it."""
        entry.move(AdapterState.FAILED)
        self._host.release(entry)
        wait = min(_FIRST_RETRY_S * 2**entry.failures, _LONGEST_RETRY_S)
        entry.error = error
        entry.failures += 1
        entry.retry_at = self._clock() + wait
        self._counts["failures"] += 1
        self._unannounced.pop(entry.version, None)
        self._events.append(AdapterFailedEvent(entry.version, error))
        logger.warning("adapter version %s failed (next try in %.0f s): %s", entry.version[:12], wait, error.message)

    def _drop_if_free(self, entry: AdapterEntry) -> None:
        """End an unregistered version as soon as no request and no loader needs it."""
        if not entry.leaving or entry.in_use:
            return
        if entry.state is AdapterState.FETCHING:
            self._host.cancel(entry)
        if entry.ticket is not None:
            return  # the loader still reads the folder; `advance` comes back here
        if entry.uploading:
            self._device.cancel(entry)
        elif entry.state is AdapterState.RESIDENT:
            self._device.evict(entry)
        self._host.release(entry)
        for table in (self._entries, self._pinned, self._prefetched, self._unannounced):
            table.pop(entry.version, None)
        self._events.append(AdapterDropped(entry.version))


def _not_found(version: str) -> AdapterNotFound:
    return AdapterNotFound(f"adapter version {version[:12]} is not loaded")
