"""The history of names: which versions each one had, and the steps back through them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from loraserve.errors import AdapterNotFound, AmbiguousVersion, NoOlderVersion
from loraserve.lora.records import decode_source
from loraserve.lora.spec import AdapterSource


class VersionUse(NamedTuple):
    """One entry of a name's history."""

    version: str
    source: AdapterSource
    at: float
    current: bool


class NameVersion(NamedTuple):
    """A version that a name had: since when it had it last by being loaded, not by going back to it."""

    version: str
    source: AdapterSource
    created_at: float  # seconds since the epoch
    current: bool


class HistoryRow(NamedTuple):
    """A row of `history` that sets a version."""

    id: int
    version: str
    source: str  # JSON
    at: float
    origin: int | None

    @property
    def position(self) -> int:
        """Where in the history the name stood after it: a rollback stands where it went back to."""
        return self.id if self.origin is None else self.origin


def note(
    db: sqlite3.Connection, name: str, version: str | None, source: str | None, at: float, origin: int | None = None
) -> None:
    """Append to a name's history; version None: the name was removed."""
    db.execute(
        "INSERT INTO history(name, version, source, at, origin) VALUES (?, ?, ?, ?, ?)",
        (name, version, source, at, origin),
    )


def live_rows(db: sqlite3.Connection, name: str) -> list[HistoryRow]:
    """What a name pointed at since it was last removed, newest first."""
    rows = db.execute(
        "SELECT id, version, source, at, origin FROM history WHERE name = ? AND id > COALESCE("
        "(SELECT MAX(id) FROM history WHERE name = ? AND version IS NULL), 0) ORDER BY id DESC",
        (name, name),
    )
    return [HistoryRow(*row) for row in rows]


def live_versions(db: sqlite3.Connection) -> set[str]:
    """Versions that a name points at or could be rolled back to."""
    rows = db.execute(
        "SELECT version FROM aliases UNION SELECT h.version FROM history h JOIN aliases a ON a.name = h.name "
        "WHERE h.version IS NOT NULL AND h.id > COALESCE("
        "(SELECT MAX(id) FROM history x WHERE x.name = h.name AND x.version IS NULL), 0)"
    )
    return {row[0] for row in rows}


def live_templates(db: sqlite3.Connection) -> set[str]:
    """Hashes of the chat templates of versions, of names, and of what names could be rolled back to."""
    rows = db.execute(
        "SELECT json_extract(source, '$.chat_template') FROM ("
        "SELECT source FROM versions UNION ALL SELECT source FROM aliases UNION ALL "
        "SELECT h.source FROM history h JOIN aliases a ON a.name = h.name WHERE h.version IS NOT NULL AND h.id > "
        "COALESCE((SELECT MAX(id) FROM history x WHERE x.name = h.name AND x.version IS NULL), 0))"
    )
    return {row[0] for row in rows if row[0] is not None}


def all_uses(db: sqlite3.Connection, name: str, exists: bool) -> list[VersionUse]:
    """A name's whole history, newest first; the first is the current one if the name `exists`."""
    rows = db.execute(
        "SELECT version, source, at FROM history WHERE name = ? AND version IS NOT NULL ORDER BY id DESC", (name,)
    )
    return [
        VersionUse(version, decode_source(source), at, exists and index == 0)
        for index, (version, source, at) in enumerate(rows)
    ]


def names_versions(rows: Sequence[HistoryRow], current: str) -> list[NameVersion]:
    """Each version of the rows once, the one that was loaded last first."""
    found: dict[str, NameVersion] = {}
    for row in rows:
        if row.origin is None and row.version not in found:
            found[row.version] = NameVersion(row.version, decode_source(row.source), row.at, row.version == current)
    return list(found.values())


def step_back(name: str, rows: Sequence[HistoryRow]) -> HistoryRow:
    """Of the rows, newest first, the one before the version that the name has now. Raises `NoOlderVersion`."""
    position = rows[0].position
    for row in rows:
        if row.id >= position:
            continue
        if row.version != rows[0].version:
            return row
        position = row.position
    raise NoOlderVersion(f"{name!r} has no version older than {rows[0].version[:12]}", param="name")


def chosen_step(name: str, rows: Sequence[HistoryRow], prefix: str) -> HistoryRow:
    """The latest row whose version begins with `prefix`. Raises `AdapterNotFound`, `AmbiguousVersion`."""
    fitting = [row for row in rows if row.version.startswith(prefix)]
    if not fitting:
        raise AdapterNotFound(f"{name!r} has no version that begins with {prefix}", param="to")
    if len({row.version for row in fitting}) > 1:
        raise AmbiguousVersion(f"{name!r} has several versions that begin with {prefix}", param="to")
    return fitting[0]
