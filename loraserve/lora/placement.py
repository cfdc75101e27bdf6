"""The device tier: who gets pages next, who gives theirs up, and the bounded copies in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from loraserve.errors import AdapterFailed, LoraserveError
from loraserve.lora.benefit import device_benefit, warm
from loraserve.lora.pool import LoraPool
from loraserve.lora.states import AdapterEntry, AdapterState

logger = logging.getLogger(__name__)

# How many later adapters are looked at in one step once the first in line is blocked.
_MAX_TRIES = 4
# Victim lists up to this length are thinned out one by one.
_MAX_PRUNE = 16


class DeviceTier:
    """Adapters in the pool. Only the engine's thread calls it.

    The rule of the line. Staged adapters that requests wait for are placed longest wait first. Pages come from
    residents that are neither leased, wanted nor pinned, least worth keeping first; then from unleased ones wanted
    later than the adapter that needs pages, latest first. Nobody is evicted unless that makes room. If the first in
    line cannot be placed, because the rest is leased or wanted earlier, later ones may be, but at most `max_overtakes`
    times; after that all freed pages are kept for the first.
    Pins and earlier wants protect, but not for good. When nothing is leased or being copied and the first in line is
    still blocked: if it would fit beside the protected ones in an empty pool, their pages are merely scattered, and
    all residents are evicted to be placed again side by side; else, once nothing has happened for `last_resort_s`,
    protected ones give way as well. As every registered adapter fits the empty pool, the first in line is then placed.
    """

    def __init__(self, pool: LoraPool, clock: Callable[[], float], max_overtakes: int, last_resort_s: float) -> None:
        self.pool = pool
        self.resident: dict[str, AdapterEntry] = {}
        self.uploading: dict[str, AdapterEntry] = {}
        self.is_waiting = False  # whether the last `write` could only wait for what is on its way
        self.num_uploads = 0
        self.num_evictions = 0
        self.upload_seconds = 0.0
        self.limit_bytes = pool.capacity_bytes
        self._clock = clock
        self._max_overtakes = max_overtakes
        self._last_resort_s = last_resort_s

    def place(self, wanted: Sequence[AdapterEntry], pinned: Sequence[AdapterEntry]) -> None:
        """Reserve pages for staged adapters: `wanted` in the order of their waits, then `pinned` ones in any order."""
        head: AdapterEntry | None = None
        tries = 0
        for entry in wanted:
            if head is not None and (head.overtaken >= self._max_overtakes or tries >= _MAX_TRIES):
                return
            tries += head is not None
            if self._place(entry):
                if head is not None:
                    head.overtaken += 1
            elif head is None:
                if self._force(entry):
                    continue
                head = entry
        if head is None:
            for entry in pinned:
                self._place(entry)

    def could_place(self, entry: AdapterEntry) -> bool:
        """Whether there are pages for an adapter now, by the rule of the line."""
        return self._plan(entry, self._victims(entry)) is not None

    def write(self, max_bytes: int) -> list[tuple[AdapterEntry, LoraserveError]]:
        """Copy at most `max_bytes` of the adapters being uploaded, longest wait first. → those that failed."""
        failed: list[tuple[AdapterEntry, LoraserveError]] = []
        self.is_waiting = True
        for entry in sorted(self.uploading.values(), key=lambda e: (e.since, e.order)):
            if max_bytes <= 0:
                break
            held = entry.held
            assert held is not None
            before = held.bytes_written
            try:
                done = self.pool.write(held, max_bytes)
            except Exception:
                logger.exception("copying adapter version %s to the device failed", entry.version[:12])
                self.cancel(entry)
                failed.append((entry, AdapterFailed("the adapter could not be copied to the device")))
                continue
            max_bytes -= held.bytes_written - before
            self.is_waiting &= not done and held.bytes_written == before
            if done:
                del self.uploading[entry.version]
                self.resident[entry.version] = entry
                entry.move(AdapterState.RESIDENT)
                if entry.wanted_since is not None or entry.pinned:
                    warm(entry, self._clock())
                entry.loads += 1
                self.num_uploads += 1
                self.upload_seconds += self._clock() - entry.placed_at
        return failed

    def cancel(self, entry: AdapterEntry) -> None:
        """Take the pages of an adapter that is being uploaded back; it stays STAGED."""
        held = entry.held
        if held is None or self.uploading.pop(entry.version, None) is None:
            raise RuntimeError(f"adapter version {entry.version[:12]} is not being uploaded")
        self.pool.free(held.slot)
        entry.held = None

    def evict(self, entry: AdapterEntry) -> None:
        """Free a resident's slot and pages. Raises `RuntimeError` if it is leased."""
        held = entry.held
        if held is None or entry.state is not AdapterState.RESIDENT:
            raise RuntimeError(f"adapter version {entry.version[:12]} is not on the device")
        if entry.leases:
            raise RuntimeError(f"adapter version {entry.version[:12]} has {entry.leases} leases; it cannot be freed")
        self.pool.free(held.slot)
        entry.held = None
        del self.resident[entry.version]
        entry.move(AdapterState.ABSENT if entry.host is None else AdapterState.STAGED)

    def trim(self) -> None:
        """Evict residents that nobody needs until the limit holds."""
        if self.pool.stats().used_bytes <= self.limit_bytes:
            return
        idle = [e for e in self.resident.values() if not (e.leases or e.pinned) and e.wanted_since is None]
        for entry in sorted(idle, key=device_benefit):
            self._evict_for_room(entry)
            if self.pool.stats().used_bytes <= self.limit_bytes:
                return

    def check(self, entries: Iterable[AdapterEntry]) -> None:
        """Raise `AssertionError` if the pool and the entries do not agree."""
        self.pool.check()
        held = [entry for entry in entries if entry.held is not None]
        slots = {entry.held.slot for entry in held if entry.held is not None}
        assert len(slots) == len(held) == self.pool.stats().used_slots, "a slot is held by no version or by two"
        resident = {entry.version for entry in held if not entry.uploading}
        assert resident == self.resident.keys(), "a resident is lost"
        assert {entry.version for entry in held} - resident == self.uploading.keys(), "an upload is lost"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _place(self, entry: AdapterEntry) -> bool:
        return self._place_over(entry, self._victims(entry))

    def _force(self, entry: AdapterEntry) -> bool:
        """Place the first in line although only protected residents could make room, if nothing else ever will."""
        now = self._clock()
        if entry.blocked_since is None:
            entry.blocked_since = now
        if self.uploading or any(e.leases for e in self.resident.values()):
            return False
        protected = [e for e in self.resident.values() if e.pinned or e.since <= entry.since]
        protected.sort(key=lambda e: (not e.pinned, -e.since, e.last_used))
        together = entry.device_needed + sum(e.device_needed for e in protected)
        if together <= self.limit_bytes and self.pool.fits_empty(entry.spec, *(e.spec for e in protected)):
            # Only scattered pages are in the way. All must go, so that everybody finds room again side by side.
            for victim in list(self.resident.values()):
                self._evict_for_room(victim)
            return self._place(entry)
        quiet_since = max(entry.blocked_since, *(e.last_used for e in protected))
        if now - quiet_since < self._last_resort_s:
            return False
        logger.warning(
            "adapter version %s was blocked; protected idle adapters or the limit give way", entry.version[:12]
        )
        victims = self._victims(entry)
        # A limit that was lowered below what one request needs at once gives way, or that request would never run.
        return self._place_over(entry, victims, limited=False) or self._place_over(entry, victims + protected)

    def _place_over(self, entry: AdapterEntry, victims: list[AdapterEntry], *, limited: bool = True) -> bool:
        plan = self._plan(entry, victims) if limited else victims
        if not limited and not self.pool.fits(entry.demand, [e.held.slot for e in victims if e.held is not None]):
            plan = None
        if plan is None:
            return False
        for victim in plan:
            self._evict_for_room(victim)
        assert entry.host is not None
        entry.held = self.pool.reserve(entry.host)
        assert entry.held is not None, "the plan promised pages that are not there"
        entry.placed_at = self._clock()
        entry.blocked_since = None
        entry.overtaken = 0
        self.uploading[entry.version] = entry
        return True

    def _evict_for_room(self, victim: AdapterEntry) -> None:
        self.evict(victim)
        victim.evictions += 1
        self.num_evictions += 1

    def _victims(self, entry: AdapterEntry) -> list[AdapterEntry]:
        idle = [e for e in self.resident.values() if not e.leases and not e.pinned]
        unwanted = [e for e in idle if e.wanted_since is None]
        later = [e for e in idle if e.wanted_since is not None and e.since > entry.since]
        unwanted.sort(key=device_benefit)
        later.sort(key=lambda e: e.since, reverse=True)
        return unwanted + later

    def _plan(self, entry: AdapterEntry, victims: list[AdapterEntry]) -> list[AdapterEntry] | None:
        """The shortest beginning of `victims` whose pages make room, without those that turn out not to matter."""
        if self._fits(entry, []):
            return []
        if not self._fits(entry, victims):
            return None
        low, high = 0, len(victims)  # the first `low` are too few, the first `high` are enough
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(entry, victims[:middle]):
                high = middle
            else:
                low = middle
        chosen = victims[:high]
        for victim in reversed(chosen[:-1][:_MAX_PRUNE]):
            rest = [e for e in chosen if e is not victim]
            if self._fits(entry, rest):
                chosen = rest
        return chosen

    def _fits(self, entry: AdapterEntry, freeing: list[AdapterEntry]) -> bool:
        left = self.pool.stats().used_bytes - sum(e.device_needed for e in freeing)
        if left > 0 and left + entry.device_needed > self.limit_bytes:
            return False
        return self.pool.fits(entry.demand, [e.held.slot for e in freeing if e.held is not None])
