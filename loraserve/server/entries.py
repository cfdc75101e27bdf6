"""The entries of the adapter directory: what a name serves, and the loads that change it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from loraserve.errors import LoraserveError
from loraserve.lora.records import Visibility
from loraserve.server.inflight import ServedAdapter
from loraserve.server.ports import AdapterPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """One call to load an adapter under a name."""

    name: str
    place: AdapterPlace
    pin: bool = False
    replace: bool = False
    owner: str = ""
    visibility: Visibility | None = None  # None: what the name has, or public
    tenant: str | None = None  # who may only replace what it can see; None: an operator


@dataclass(slots=True, eq=False)
class Flight:
    """A load (or a rollback, which nobody shares) under way. Calls with the same order share it."""

    order: LoadOrder
    task: asyncio.Task[None] | None = None
    keep_failure: bool = False
    bytes_done: int = 0
    bytes_total: int = 0

    def progress(self, done: int, total: int) -> None:
        """Called from the importing thread."""
        self.bytes_done, self.bytes_total = done, total


class Failure(NamedTuple):
    """Why the last load of a name failed, and when (monotonic seconds)."""

    order: LoadOrder
    error: LoraserveError
    at: float


@dataclass(slots=True, eq=False)
class Entry:
    """A name: what it serves now, the load under way, the last load's failure. At least one of them is there."""

    name: str
    served: ServedAdapter | None = None
    flight: Flight | None = None
    failure: Failure | None = None

    def is_visible_to(self, tenant: str) -> bool:
        """Whether a tenant may know what the name serves."""
        return self.served is None or self.served.is_visible_to(tenant)


class Retired(NamedTuple):
    """What became of an adapter that is served no more: how many requests were ended, whether its memory is free."""

    aborted: int = 0
    freed: bool = True

    @staticmethod
    def all(of: Iterable[Retired]) -> Retired:
        """Several together."""
        found = list(of)
        return Retired(sum(each.aborted for each in found), all(each.freed for each in found))


class Unloaded(NamedTuple):
    """Result of an unload: how many running requests ended by themselves, and how many were ended."""

    name: str
    version: str | None
    drained: int
    aborted: int
    freed: bool  # False: nobody waited, or the engine is stuck and frees the memory when it goes on
