"""The store's tables: versions, the names that point at them, and the history of every name."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from loraserve.errors import (
    AdapterInUse,
    AdapterNotFound,
    AmbiguousVersion,
    NameTaken,
)
from loraserve.lora.database import Database
from loraserve.lora.history import (
    HistoryRow,
    NameVersion,
    VersionUse,
    all_uses,
    chosen_step,
    live_rows,
    live_templates,
    live_versions,
    names_versions,
    note,
    step_back,
)
from loraserve.lora.names import AdapterName, check_name
from loraserve.lora.records import Alias, VersionRecord, Visibility, alias_record, encode, version_record
from loraserve.lora.spec import AdapterSource

__all__ = ["Alias", "NameVersion", "Registry", "VersionRecord", "VersionUse"]

_VERSION = "SELECT version, source, report, files, created_at, tier FROM versions"
_ALIAS = "SELECT name, version, source, pinned, loaded_at, owner, visibility, last_used_at FROM aliases"


class Registry:
    """The tables in one SQLite file. Every method may be called from any thread and is one transaction.

    Raises `StorageFailed` or `DiskFull` whenever the file cannot be read or written.
    """

    def __init__(self, file: Path) -> None:
        self._database = Database(file)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    # -- versions -------------------------------------------------------------------------------------------------

    def add_version(self, record: VersionRecord) -> VersionRecord:
        """Record a version. One that is known stays as it was, but for its list of files and the report, whose warnings
        are of the config that was read last. Returns what is recorded."""
        with self._database.transaction() as db:
            db.execute(
                "INSERT INTO versions(version, source, report, files, created_at) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT(version) DO UPDATE SET files = excluded.files, report = excluded.report, doomed = 0",
                (
                    record.version,
                    encode(record.source),
                    encode(record.report),
                    encode(record.files),
                    record.created_at,
                ),
            )
            return self._version(db, record.version)

    def version(self, version: str) -> VersionRecord:
        """The record of a version. Raises `AdapterNotFound`."""
        with self._database.transaction(write=False) as db:
            return self._version(db, version)

    def knows(self, version: str) -> bool:
        """Whether the version is recorded."""
        with self._database.transaction(write=False) as db:
            return db.execute("SELECT 1 FROM versions WHERE version = ?", (version,)).fetchone() is not None

    def versions(self) -> list[VersionRecord]:
        """All versions, oldest first."""
        with self._database.transaction(write=False) as db:
            rows = db.execute(f"{_VERSION} ORDER BY created_at, version").fetchall()
        return [version_record(row) for row in rows]

    def unreferenced(self) -> list[str]:
        """Versions that no name points at, oldest first."""
        return self._versions_where("version NOT IN (SELECT version FROM aliases)")

    def demanded(self) -> list[str]:
        """Versions that came first on demand, oldest first."""
        return self._versions_where("json_extract(source, '$.on_demand')")

    def doomed(self) -> list[str]:
        """Versions that are to be deleted when nobody holds them, oldest first."""
        return self._versions_where("doomed")

    def delete_version(self, version: str) -> None:
        """Forget a version. Raises `AdapterNotFound`, or `AdapterInUse` while a name points at it."""
        with self._database.transaction() as db:
            self._version(db, version)
            name = db.execute("SELECT name FROM aliases WHERE version = ?", (version,)).fetchone()
            if name is not None:
                raise AdapterInUse(f"{name[0]!r} points at version {version[:12]}")
            db.execute("DELETE FROM versions WHERE version = ?", (version,))

    def delete_unneeded(self, versions: Iterable[str], free: Collection[str] | None = None) -> list[str]:
        """Forget those of the versions that no name points at and no name could be rolled back to; returns them.

        Only those that are `free` (None: all) go now, the others are doomed.
        """
        with self._database.transaction() as db:
            unneeded = sorted(set(versions) - live_versions(db))
            unneeded = [version for version in unneeded if self._has(db, version)]
            gone = [version for version in unneeded if free is None or version in free]
            db.executemany("DELETE FROM versions WHERE version = ?", [(version,) for version in gone])
            rest = [(version,) for version in unneeded if version not in gone]
            db.executemany("UPDATE versions SET doomed = 1 WHERE version = ?", rest)
            return gone

    def templates(self) -> set[str]:
        """Hashes of the chat templates that a version, a name, or what a name could be rolled back to has."""
        with self._database.transaction(write=False) as db:
            return live_templates(db)

    def num_bytes(self) -> int:
        """Bytes of the files of all versions."""
        query = "SELECT COALESCE(SUM(json_extract(value, '$[1]')), 0) FROM versions, json_each(versions.files)"
        with self._database.transaction(write=False) as db:
            return int(db.execute(query).fetchone()[0])

    # -- names ----------------------------------------------------------------------------------------------------

    def set_alias(
        self,
        name: str,
        version: str,
        *,
        source: AdapterSource | None = None,
        pinned: bool = False,
        replace: bool = False,
        owner: str = "",
        visibility: Visibility | None = None,
        tenant: str | None = None,
    ) -> Alias:
        """Point a name at a version. `source` defaults to the version's, `visibility` to what it was, or public.

        With another chat template it is another thing to have under a name, as another version is. The same thing again
        changes only the pin, and owner and visibility if `visibility` is given. `tenant`: who asks (None: an operator).
        Raises `AdapterNotFound` for an unknown version, `NameTaken` if the name points elsewhere and not `replace`, or
        is private and not this tenant's.
        """
        check_name(name)
        with self._database.transaction() as db:
            record = self._version(db, version)
            current = self._alias(db, name)
            if current is not None and tenant is not None and not current.is_visible_to(tenant):
                raise NameTaken(f"{name!r} is taken", param="name")
            template = (record.source if source is None else source).chat_template
            if current is not None and (current.version, current.source.chat_template) == (version, template):
                db.execute("UPDATE aliases SET pinned = ? WHERE name = ?", (pinned, name))
                if visibility is not None:
                    db.execute("UPDATE aliases SET owner = ?, visibility = ? WHERE name = ?", (owner, visibility, name))
            elif current is not None and not replace:
                raise NameTaken(f"{name!r} is another adapter; unload it first or set replace", param="name")
            else:
                now, encoded = time.time(), encode(source or record.source)
                used = None if current is None else current.last_used_at
                if visibility is None and current is not None:  # a private name's next content is as private
                    owner, visibility = current.owner, current.visibility
                row = (name, version, encoded, pinned, now, owner, visibility or "public", used)
                db.execute("INSERT OR REPLACE INTO aliases VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                db.execute("UPDATE versions SET doomed = 0 WHERE version = ?", (version,))
                note(db, name, version, encoded, now)
            return self._require_alias(db, name)

    def roll_back(self, name: str, to: str | None = None) -> Alias:
        """Point a name at a version that it had: one step further back each time, or the one that begins with `to`.

        Raises `AdapterNotFound`, `NoOlderVersion`, `AmbiguousVersion`.
        """
        with self._database.transaction() as db:
            alias = self._require_alias(db, name)
            target = self._target(db, name, to)
            if target.version != alias.version:
                now = time.time()
                db.execute(
                    "UPDATE aliases SET version = ?, source = ?, loaded_at = ? WHERE name = ?",
                    (target.version, target.source, now, name),
                )
                note(db, name, target.version, target.source, now, target.position)
            return self._require_alias(db, name)

    def rollback_target(self, name: str, to: str | None = None) -> str:
        """The version that `roll_back` would choose now. Raises as it does."""
        with self._database.transaction(write=False) as db:
            self._require_alias(db, name)
            return self._target(db, name, to).version

    def set_pinned(self, name: str, pinned: bool) -> Alias:
        """Pin or unpin a name. Raises `AdapterNotFound`."""
        with self._database.transaction() as db:
            self._require_alias(db, name)
            db.execute("UPDATE aliases SET pinned = ? WHERE name = ?", (pinned, name))
            return self._require_alias(db, name)

    def remove_alias(self, name: str) -> Alias:
        """Take a name away; returns what it was. Raises `AdapterNotFound`."""
        with self._database.transaction() as db:
            alias = self._require_alias(db, name)
            db.execute("DELETE FROM aliases WHERE name = ?", (name,))
            note(db, name, None, None, time.time())
            return alias

    def note_use(self, last_used: Mapping[str, float], tiers: Mapping[str, str] | None = None) -> None:
        """Record when names were last used and, if given, the only versions that are not on disk alone."""
        with self._database.transaction() as db:
            db.executemany(
                "UPDATE aliases SET last_used_at = ? WHERE name = ?", [(at, name) for name, at in last_used.items()]
            )
            if tiers is not None:
                db.execute("UPDATE versions SET tier = 'disk' WHERE tier != 'disk'")
                db.executemany(
                    "UPDATE versions SET tier = ? WHERE version = ?", [(tier, ver) for ver, tier in tiers.items()]
                )

    def registered(self) -> list[tuple[Alias, VersionRecord]]:
        """Every name with its version, by name."""
        with self._database.transaction(write=False) as db:
            records = {row[0]: version_record(row) for row in db.execute(_VERSION)}
            aliases = [alias_record(row) for row in db.execute(f"{_ALIAS} ORDER BY name")]
        return [(alias, records[alias.version]) for alias in aliases]

    def data_version(self, *, wait: bool = True) -> int | None:
        """See `Database.data_version`."""
        return self._database.data_version(wait=wait)

    def names_mark(self) -> int:
        """A number that changes with what names mean and whose they are, but not with their use."""
        with self._database.transaction(write=False) as db:
            query = "SELECT name, version, pinned, loaded_at, owner, visibility FROM aliases ORDER BY name"
            return hash(tuple(db.execute(query)))

    def alias(self, name: str) -> Alias:
        """What a name points at. Raises `AdapterNotFound`."""
        with self._database.transaction(write=False) as db:
            return self._require_alias(db, name)

    def aliases(self) -> list[Alias]:
        """All names, in order."""
        with self._database.transaction(write=False) as db:
            return [alias_record(row) for row in db.execute(f"{_ALIAS} ORDER BY name")]

    def resolve(self, name: AdapterName) -> str:
        """The version that a name means now, or the one of its versions with the pinned prefix.

        Only versions that the name had since it was last removed count, and only if they are still stored. Raises
        `AdapterNotFound` and `AmbiguousVersion`.
        """
        with self._database.transaction(write=False) as db:
            alias = self._require_alias(db, name.name)
            fitting = {alias.version} if alias.version.startswith(name.prefix) else set()
            if name.prefix:
                had = (row.version for row in live_rows(db, name.name) if row.version.startswith(name.prefix))
                fitting |= {version for version in had if self._has(db, version)}
        if not fitting:
            raise AdapterNotFound(f"{name.name!r} has no version that begins with {name.prefix}")
        if len(fitting) > 1:
            raise AmbiguousVersion(f"{name.name!r} has {len(fitting)} versions that begin with {name.prefix}")
        return fitting.pop()

    def versions_of(self, name: str) -> list[VersionUse]:
        """The whole history of a name, newest first. Raises `AdapterNotFound` if it never existed."""
        with self._database.transaction(write=False) as db:
            uses = all_uses(db, name, self._alias(db, name) is not None)
        if not uses:
            raise AdapterNotFound(f"no adapter was ever registered as {name!r}")
        return uses

    def versions_now(self, name: str) -> list[NameVersion]:
        """The stored versions that a name had since it was last removed, each once, newest first.

        Raises `AdapterNotFound`.
        """
        with self._database.transaction(write=False) as db:
            alias = self._require_alias(db, name)
            rows = [row for row in live_rows(db, name) if self._has(db, row.version)]
        return names_versions(rows, alias.version)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _versions_where(self, condition: str) -> list[str]:
        with self._database.transaction(write=False) as db:
            return [row[0] for row in db.execute(f"SELECT version FROM versions WHERE {condition} ORDER BY created_at")]

    def _version(self, db: sqlite3.Connection, version: str) -> VersionRecord:
        row = db.execute(f"{_VERSION} WHERE version = ?", (version,)).fetchone()
        if row is None:
            raise AdapterNotFound(f"no version {version[:12]} is stored")
        return version_record(row)

    def _target(self, db: sqlite3.Connection, name: str, to: str | None) -> HistoryRow:
        rows = [row for row in live_rows(db, name) if self._has(db, row.version)]
        return step_back(name, rows) if to is None else chosen_step(name, rows, to)

    def _has(self, db: sqlite3.Connection, version: str) -> bool:
        return db.execute("SELECT 1 FROM versions WHERE version = ?", (version,)).fetchone() is not None

    def _alias(self, db: sqlite3.Connection, name: str) -> Alias | None:
        row = db.execute(f"{_ALIAS} WHERE name = ?", (name,)).fetchone()
        return None if row is None else alias_record(row)

    def _require_alias(self, db: sqlite3.Connection, name: str) -> Alias:
        alias = self._alias(db, name)
        if alias is None:
            raise AdapterNotFound(f"no adapter is registered as {name!r}")
        return alias
