"""The life of one adapter version in an engine: its states, the one transition table, and what is kept about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loraserve.compat import StrEnum
from loraserve.errors import LoraserveError
from loraserve.lora.pool import PoolReservation
from loraserve.lora.slab import Demand
from loraserve.lora.spec import AdapterSpec
from loraserve.lora.weights import StagedAdapter, StagingTicket


class AdapterState(StrEnum):
    """Where a version is on its way to the device."""

    ABSENT = "absent"  # registered; only its files exist
    FETCHING = "fetching"  # waits for the loader or is being read by it
    STAGED = "staged"  # checked and laid out on the host; perhaps being copied to the device
    RESIDENT = "resident"  # on the device; may or may not have a host copy too
    FAILED = "failed"  # could not be staged or copied; tried again after a while


class Tier(StrEnum):
    """The nearest place of a complete copy."""

    DISK = "disk"
    HOST = "host"
    DEVICE = "device"


TRANSITIONS: Mapping[AdapterState, frozenset[AdapterState]] = {
    AdapterState.ABSENT: frozenset({AdapterState.FETCHING}),
    AdapterState.FETCHING: frozenset({AdapterState.STAGED, AdapterState.FAILED, AdapterState.ABSENT}),
    AdapterState.STAGED: frozenset({AdapterState.RESIDENT, AdapterState.ABSENT, AdapterState.FAILED}),
    AdapterState.RESIDENT: frozenset({AdapterState.STAGED, AdapterState.ABSENT}),
    AdapterState.FAILED: frozenset({AdapterState.ABSENT}),
}
"""Every legal move. FETCHING → ABSENT: nobody wants it any more. RESIDENT → STAGED or ABSENT: evicted, with or without
a host copy. FAILED → ABSENT: the back-off has passed, or it was registered anew."""


@dataclass(slots=True)
class AdapterEntry:
    """All that the engine keeps about one registered version."""

    version: str
    folder: Path
    spec: AdapterSpec
    pinned: bool
    order: int  # registrations are staged in this order
    demand: Demand  # its pages
    device_needed: int  # their bytes
    host_needed: int  # bytes of its staged copy
    state: AdapterState = AdapterState.ABSENT
    host: StagedAdapter | None = None
    held: PoolReservation | None = None  # slot and pages: uploading (STAGED) or RESIDENT
    ticket: StagingTicket | None = None  # handed to the loader and not back yet
    checksum: int | None = None  # of the first staging; None: never staged, so not known to be good
    wanted_since: float | None = None
    leases: int = 0
    holds: int = 0
    leaving: bool = False  # unregistered; ends with its last lease, hold and want
    last_used: float = 0.0
    heat: float = 0.0  # uses, halved over time: as of `heat_at`
    heat_at: float = 0.0
    placed_at: float = 0.0  # when it was given its pages
    blocked_since: float | None = None  # first in line for pages that are not there
    overtaken: int = 0  # uploads that went ahead while it was blocked
    error: LoraserveError | None = None
    retry_at: float = 0.0
    failures: int = 0  # in a row
    loads: int = 0
    evictions: int = 0

    def move(self, state: AdapterState) -> None:
        """Change the state. Raises `RuntimeError` on a move that the table does not have."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"adapter version {self.version[:12]} cannot go from {self.state} to {state}")
        self.state = state

    @property
    def uploading(self) -> bool:
        """Whether it has pages but is not wholly copied."""
        return self.held is not None and not self.held.written

    @property
    def in_use(self) -> bool:
        """Whether any request still depends on it."""
        return self.leases > 0 or self.holds > 0 or self.wanted_since is not None

    @property
    def placeable(self) -> bool:
        """Whether it may be given pages: staged, and without a reservation."""
        return self.state is AdapterState.STAGED and self.held is None

    @property
    def since(self) -> float:
        """Since when it is wanted; infinity if no request waits for it."""
        return float("inf") if self.wanted_since is None else self.wanted_since

    @property
    def tier(self) -> Tier:
        """Nearest complete copy."""
        if self.state is AdapterState.RESIDENT:
            return Tier.DEVICE
        return Tier.DISK if self.host is None else Tier.HOST

    def info(self) -> ResidencyInfo:
        """The entry for people and the API."""
        return ResidencyInfo(
            version=self.version,
            state=self.state,
            tier=self.tier,
            pinned=self.pinned,
            leaving=self.leaving,
            device_bytes=0 if self.held is None else self.held.num_bytes,
            host_bytes=0 if self.host is None else self.host_needed,
            leases=self.leases,
            holds=self.holds,
            wanted=self.wanted_since is not None,
            loads=self.loads,
            evictions=self.evictions,
            last_used=self.last_used,
            bytes_done=0 if self.ticket is None else self.ticket.bytes_done,
            bytes_total=0 if self.ticket is None else self.ticket.bytes_total,
            error=self.error,
        )

    def check(self) -> None:
        """Raise `AssertionError` if the parts contradict the state."""
        resident = self.state is AdapterState.RESIDENT
        assert resident == (self.held is not None and self.held.written), f"{self.version}: pages, but {self.state}"
        assert resident or not self.leases, f"{self.version} is leased but {self.state}"
        assert self.host is not None or self.state is not AdapterState.STAGED, f"{self.version} has no staged copy"
        assert self.ticket is None or self.state is AdapterState.FETCHING, f"{self.version} is read but {self.state}"
        assert (self.error is not None) == (self.state is AdapterState.FAILED), f"{self.version}: error, {self.state}"


# Events are not tuples: an AdapterReady must never equal the AdapterDropped of the same version.


@dataclass(frozen=True, slots=True)
class AdapterReady:
    """A registered version was read, checked and found good."""

    version: str


@dataclass(frozen=True, slots=True)
class AdapterFailedEvent:
    """A version could not be staged or copied to the device."""

    version: str
    error: LoraserveError


@dataclass(frozen=True, slots=True)
class AdapterDropped:
    """An unregistered version holds nothing any more, and its folder is not read any more."""

    version: str


ResidencyEvent = AdapterReady | AdapterFailedEvent | AdapterDropped


class ResidencyInfo(NamedTuple):
    """One version. `bytes_done` of `bytes_total` file bytes are read while it is FETCHING, else both are 0."""

    version: str
    state: AdapterState
    tier: Tier
    pinned: bool
    leaving: bool
    device_bytes: int
    host_bytes: int
    leases: int
    holds: int
    wanted: bool
    loads: int
    evictions: int
    last_used: float
    bytes_done: int
    bytes_total: int
    error: LoraserveError | None


class ResidencyStats(NamedTuple):
    """All versions together. Counters only grow: `hits` are wants and leases that found the adapter on the device."""

    registered: int
    absent: int
    fetching: int
    staged: int
    resident: int
    failed: int
    wanted: int
    uploading: int
    leases: int
    device_bytes: int
    device_capacity: int
    host_bytes: int
    host_capacity: int
    stagings: int
    uploads: int
    evictions: int
    host_evictions: int
    failures: int
    hits: int
    misses: int
    staging_seconds: float
    upload_seconds: float

    @property
    def by_state(self) -> dict[str, int]:
        """Versions by where they are."""
        return {
            "absent": self.absent,
            "fetching": self.fetching,
            "staged": self.staged,
            "resident": self.resident,
            "failed": self.failed,
        }
