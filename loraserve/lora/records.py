"""The records of the store's tables, and how they are written into rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from loraserve.lora.spec import AdapterSource, LoadReport
from loraserve.lora.workspace import CopiedFile

Visibility = Literal["public", "private"]
"""Who may name an adapter: every tenant, or only its owner."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version in the store."""

    version: str
    source: AdapterSource  # where it came from the first time
    report: LoadReport
    files: tuple[CopiedFile, ...]
    created_at: float  # seconds since the epoch
    tier: str = "disk"  # disk, host or device: where a server had it when it last looked

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Alias:
    """A name and the version that it points at."""

    name: str
    version: str
    source: AdapterSource  # where this name was loaded from
    pinned: bool
    loaded_at: float  # seconds since the epoch
    owner: str = ""  # the tenant that a private name belongs to
    visibility: Visibility = "public"
    last_used_at: float | None = None  # seconds since the epoch

    def is_visible_to(self, tenant: str) -> bool:
        """Whether a tenant may name it."""
        return self.visibility == "public" or self.owner == tenant


def version_record(row: tuple[Any, ...]) -> VersionRecord:
    """A row of `versions`."""
    version, source, report, files, created_at, tier = row
    return VersionRecord(
        version=version,
        source=msgspec.json.decode(source, type=AdapterSource),
        report=msgspec.json.decode(report, type=LoadReport),
        files=msgspec.json.decode(files, type=tuple[CopiedFile, ...]),
        created_at=created_at,
        tier=tier,
    )


def alias_record(row: tuple[Any, ...]) -> Alias:
    """A row of `aliases`."""
    name, version, source, pinned, loaded_at, owner, visibility, last_used_at = row
    return Alias(name, version, decode_source(source), bool(pinned), loaded_at, owner, visibility, last_used_at)


def decode_source(text: str) -> AdapterSource:
    """The inverse of `encode` for a source."""
    return msgspec.json.decode(text, type=AdapterSource)


def encode(value: object) -> str:
    """A record's part as JSON."""
    return msgspec.json.encode(value).decode()
