"""The store's tables: versions, the names that point at them, and the history of every name."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from loraserve.errors import (
    AdapterInUse,
    AdapterNotFound,
    AmbiguousVersion,
    DiskFull,
    LoraserveError,
    NameTaken,
    StorageFailed,
)
from loraserve.lora.names import AdapterName, check_name
from loraserve.lora.spec import AdapterSource, LoadReport
from loraserve.lora.workspace import CopiedFile

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    version TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    report TEXT NOT NULL,
    files TEXT NOT NULL,
    created_at REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS aliases (
    name TEXT PRIMARY KEY,
    version TEXT NOT NULL REFERENCES versions(version),
    source TEXT NOT NULL,
    pinned INTEGER NOT NULL,
    loaded_at REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS history (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    version TEXT,  -- NULL: the name was removed
    source TEXT,
    at REAL NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS history_by_name ON history(name, id);
CREATE INDEX IF NOT EXISTS aliases_by_version ON aliases(version);
"""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version in the store."""

    version: str
    source: AdapterSource  # where it came from the first time
    report: LoadReport
    files: tuple[CopiedFile, ...]
    created_at: float  # seconds since the epoch

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


class VersionUse(NamedTuple):
    """One entry of a name's history."""

    version: str
    source: AdapterSource
    at: float
    current: bool


class Registry:
    """The tables in one SQLite file. Every method may be called from any thread and is one transaction.

    Raises `StorageFailed` or `DiskFull` whenever the file cannot be read or written.
    """

    def __init__(self, file: Path) -> None:
        self._lock = threading.RLock()
        with _database_errors():
            self._connection = sqlite3.connect(file, timeout=30, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute("PRAGMA foreign_keys=ON")
        with self._transaction() as db:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found > SCHEMA_VERSION:
                raise StorageFailed(f"the adapter store was written by a newer version (schema {found})")
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    # -- versions -------------------------------------------------------------------------------------------------

    def add_version(self, record: VersionRecord) -> VersionRecord:
        """Record a version; one that is known stays as it was, but for its list of files. Returns what is recorded."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?) ON CONFLICT(version) DO UPDATE SET files = excluded.files",
                (
                    record.version,
                    _encode(record.source),
                    _encode(record.report),
                    _encode(record.files),
                    record.created_at,
                ),
            )
            return self._version(db, record.version)

    def version(self, version: str) -> VersionRecord:
        """The record of a version. Raises `AdapterNotFound`."""
        with self._transaction(write=False) as db:
            return self._version(db, version)

    def knows(self, version: str) -> bool:
        """Whether the version is recorded."""
        with self._transaction(write=False) as db:
            return db.execute("SELECT 1 FROM versions WHERE version = ?", (version,)).fetchone() is not None

    def versions(self) -> list[VersionRecord]:
        """All versions, oldest first."""
        with self._transaction(write=False) as db:
            rows = db.execute("SELECT * FROM versions ORDER BY created_at, version").fetchall()
        return [_version_record(row) for row in rows]

    def unreferenced(self) -> list[str]:
        """Versions that no name points at, oldest first."""
        query = "SELECT version FROM versions WHERE version NOT IN (SELECT version FROM aliases) ORDER BY created_at"
        with self._transaction(write=False) as db:
            return [row[0] for row in db.execute(query)]

    def delete_version(self, version: str) -> None:
        """Forget a version. Raises `AdapterNotFound`, or `AdapterInUse` while a name points at it."""
        with self._transaction() as db:
            self._version(db, version)
            name = db.execute("SELECT name FROM aliases WHERE version = ?", (version,)).fetchone()
            if name is not None:
                raise AdapterInUse(f"{name[0]!r} points at version {version[:12]}")
            db.execute("DELETE FROM versions WHERE version = ?", (version,))

    # -- names ----------------------------------------------------------------------------------------------------

    def set_alias(
        self,
        name: str,
        version: str,
        *,
        source: AdapterSource | None = None,
        pinned: bool = False,
        replace: bool = False,
    ) -> Alias:
        """Point a name at a version; the same version again changes only the pin. `source` defaults to the version's.

        With another chat template it is another thing to have under a name, as another version is. Raises
        `AdapterNotFound` for an unknown version, `NameTaken` if the name points elsewhere and not `replace`.
        """
        check_name(name)
        with self._transaction() as db:
            record = self._version(db, version)
            current = self._alias(db, name)
            template = (record.source if source is None else source).chat_template
            if current is not None and (current.version, current.source.chat_template) == (version, template):
                db.execute("UPDATE aliases SET pinned = ? WHERE name = ?", (pinned, name))
            elif current is not None and not replace:
                raise NameTaken(f"{name!r} is another adapter; unload it first or set replace", param="name")
            else:
                now, encoded = time.time(), _encode(source or record.source)
                db.execute(
                    "INSERT OR REPLACE INTO aliases VALUES (?, ?, ?, ?, ?)", (name, version, encoded, pinned, now)
                )
                db.execute(
                    "INSERT INTO history(name, version, source, at) VALUES (?, ?, ?, ?)", (name, version, encoded, now)
                )
            alias = self._alias(db, name)
            assert alias is not None
            return alias

    def remove_alias(self, name: str) -> Alias:
        """Take a name away; returns what it was. Raises `AdapterNotFound`."""
        with self._transaction() as db:
            alias = self._require_alias(db, name)
            db.execute("DELETE FROM aliases WHERE name = ?", (name,))
            db.execute("INSERT INTO history(name, version, at) VALUES (?, NULL, ?)", (name, time.time()))
            return alias

    def alias(self, name: str) -> Alias:
        """What a name points at. Raises `AdapterNotFound`."""
        with self._transaction(write=False) as db:
            return self._require_alias(db, name)

    def aliases(self) -> list[Alias]:
        """All names, in order."""
        with self._transaction(write=False) as db:
            return [_alias_record(row) for row in db.execute("SELECT * FROM aliases ORDER BY name")]

    def resolve(self, name: AdapterName) -> str:
        """The version that a name means now, or the one of its versions with the pinned prefix.

        Only versions that the name had since it was last removed count, and only if they are still stored. Raises
        `AdapterNotFound` and `AmbiguousVersion`.
        """
        with self._transaction(write=False) as db:
            alias = self._require_alias(db, name.name)
            fitting = {alias.version} if alias.version.startswith(name.prefix) else set()
            if name.prefix:
                uses = self._uses(db, name.name, since_removal=True)
                stored = (use.version for use in uses if use.version.startswith(name.prefix))
                fitting |= {version for version in stored if self._has(db, version)}
        if not fitting:
            raise AdapterNotFound(f"{name.name!r} has no version that begins with {name.prefix}")
        if len(fitting) > 1:
            raise AmbiguousVersion(f"{name.name!r} has {len(fitting)} versions that begin with {name.prefix}")
        return fitting.pop()

    def versions_of(self, name: str) -> list[VersionUse]:
        """The history of a name, newest first. Raises `AdapterNotFound` if it never existed."""
        with self._transaction(write=False) as db:
            uses = self._uses(db, name, since_removal=False)
        if not uses:
            raise AdapterNotFound(f"no adapter was ever registered as {name!r}")
        return uses

    # -- inside ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock, _database_errors():
            self._connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _version(self, db: sqlite3.Connection, version: str) -> VersionRecord:
        row = db.execute("SELECT * FROM versions WHERE version = ?", (version,)).fetchone()
        if row is None:
            raise AdapterNotFound(f"no version {version[:12]} is stored")
        return _version_record(row)

    def _has(self, db: sqlite3.Connection, version: str) -> bool:
        return db.execute("SELECT 1 FROM versions WHERE version = ?", (version,)).fetchone() is not None

    def _alias(self, db: sqlite3.Connection, name: str) -> Alias | None:
        row = db.execute("SELECT * FROM aliases WHERE name = ?", (name,)).fetchone()
        return None if row is None else _alias_record(row)

    def _require_alias(self, db: sqlite3.Connection, name: str) -> Alias:
        alias = self._alias(db, name)
        if alias is None:
            raise AdapterNotFound(f"no adapter is registered as {name!r}")
        return alias

    def _uses(self, db: sqlite3.Connection, name: str, *, since_removal: bool) -> list[VersionUse]:
        rows = db.execute("SELECT version, source, at FROM history WHERE name = ? ORDER BY id DESC", (name,)).fetchall()
        alias = self._alias(db, name)
        uses: list[VersionUse] = []
        for version, source, at in rows:
            if version is None:
                if since_removal:
                    break
                continue
            current = alias is not None and not uses
            uses.append(VersionUse(version, msgspec.json.decode(source, type=AdapterSource), at, current))
        return uses


def _version_record(row: tuple[str, str, str, str, float]) -> VersionRecord:
    version, source, report, files, created_at = row
    return VersionRecord(
        version=version,
        source=msgspec.json.decode(source, type=AdapterSource),
        report=msgspec.json.decode(report, type=LoadReport),
        files=msgspec.json.decode(files, type=tuple[CopiedFile, ...]),
        created_at=created_at,
    )


def _alias_record(row: tuple[str, str, str, int, float]) -> Alias:
    name, version, source, pinned, loaded_at = row
    return Alias(name, version, msgspec.json.decode(source, type=AdapterSource), bool(pinned), loaded_at)


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


@contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except LoraserveError:
        raise
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL" or "disk is full" in str(error):
            raise DiskFull("no room left for the adapter store's database") from error
        raise StorageFailed(f"the adapter store's database failed: {error}") from error
