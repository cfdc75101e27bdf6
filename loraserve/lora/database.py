"""The SQLite file of the store: its tables, their former forms, and transactions on them."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraserve.errors import DiskFull, LoraserveError, StorageFailed

SCHEMA_VERSION = 3

_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    version TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    report TEXT NOT NULL,
    files TEXT NOT NULL,
    created_at REAL NOT NULL,
    tier TEXT NOT NULL DEFAULT 'disk',  -- where a server had it when it last looked
    doomed INTEGER NOT NULL DEFAULT 0  -- to be deleted when the last process lets go of it
) STRICT;
CREATE TABLE IF NOT EXISTS aliases (
    name TEXT PRIMARY KEY,
    version TEXT NOT NULL REFERENCES versions(version),
    source TEXT NOT NULL,
    pinned INTEGER NOT NULL,
    loaded_at REAL NOT NULL,
    owner TEXT NOT NULL DEFAULT '',  -- the tenant that a private name belongs to
    visibility TEXT NOT NULL DEFAULT 'public',
    last_used_at REAL
) STRICT;
CREATE TABLE IF NOT EXISTS history (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    version TEXT,  -- NULL: the name was removed
    source TEXT,
    at REAL NOT NULL,
    origin INTEGER  -- of a rollback: the entry that it went back to
) STRICT;
CREATE INDEX IF NOT EXISTS history_by_name ON history(name, id);
CREATE INDEX IF NOT EXISTS aliases_by_version ON aliases(version);
"""
_MIGRATIONS: dict[int, str] = {
    1: """
ALTER TABLE versions ADD COLUMN tier TEXT NOT NULL DEFAULT 'disk';
ALTER TABLE aliases ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE aliases ADD COLUMN visibility TEXT NOT NULL DEFAULT 'public';
ALTER TABLE aliases ADD COLUMN last_used_at REAL;
ALTER TABLE history ADD COLUMN origin INTEGER;
""",
    2: "ALTER TABLE versions ADD COLUMN doomed INTEGER NOT NULL DEFAULT 0",
}
"""From each former schema to the next."""


class Database:
    """One connection, used by any thread in turn. Everything raises `StorageFailed` or `DiskFull` if the file fails."""

    def __init__(self, file: Path) -> None:
        """Open or create, and bring tables of a former schema up to date."""
        self._lock = threading.RLock()
        with _database_errors():
            self._connection = sqlite3.connect(file, timeout=30, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute("PRAGMA foreign_keys=ON")
        with self.transaction() as db:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found > SCHEMA_VERSION:
                raise StorageFailed(f"the adapter store was written by a newer version (schema {found})")
            if found == SCHEMA_VERSION:
                return  # nothing is written, so that a full disk is no reason not to start
            # 0 is a new file. Each statement by itself: `executescript` would end the transaction.
            scripts = [_MIGRATIONS[number] for number in range(found, SCHEMA_VERSION) if found] or [_SCHEMA]
            for statement in ";".join(scripts).split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        """All of the block or nothing of it; what it reads is of one moment."""
        with self._lock, _database_errors():
            self._connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException as error:
                self._give_up(error)
                raise

    def _give_up(self, error: BaseException) -> None:
        if self._connection.in_transaction:  # some errors have ended it
            self._connection.execute("ROLLBACK")
        if _is_full(error):
            # The log of changes may be larger than all tables: what is in them need not be there as well.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def data_version(self, *, wait: bool = True) -> int | None:
        """A number that changes when another connection has changed the file; None if not `wait` and it is in use."""
        if not self._lock.acquire(blocking=wait):
            return None
        try:
            with _database_errors():
                return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        finally:
            self._lock.release()


@contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except LoraserveError:
        raise
    except sqlite3.Error as error:
        if _is_full(error):
            raise DiskFull("no room left for the adapter store's database") from error
        raise StorageFailed(f"the adapter store's database failed: {error}") from error


def _is_full(error: BaseException) -> bool:
    # Python 3.10 does not tell the code.
    return isinstance(error, sqlite3.Error) and "disk is full" in str(error)
