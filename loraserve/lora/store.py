"""Adapters on disk: every version once, under its hash, with a registry of names. Survives a kill at any moment.

```
DATA/registry.sqlite3     names, versions, history
DATA/versions/<hash>/     the files of one version, never changed once they are there
DATA/templates/<hash>.jinja   chat templates that adapters brought
DATA/tmp/<random>/        copies under way, one folder per living process
DATA/store.lock           held while folders are moved in or out
DATA/holds.lock           which versions and templates living processes use
```
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from loraserve.errors import AdapterFault, AdapterInUse, AdapterNotFound, AdapterRefused
from loraserve.lora.adapter_files import read_adapter_files
from loraserve.lora.chat_template import TemplateFolder, digest_of, read_chat_template
from loraserve.lora.files import AdapterFolder, read_chunks
from loraserve.lora.format import parse_adapter
from loraserve.lora.holds import Holds
from loraserve.lora.names import parse_name
from loraserve.lora.records import Visibility
from loraserve.lora.registry import Alias, NameVersion, Registry, VersionRecord, VersionUse
from loraserve.lora.sources import FetchedFolder
from loraserve.lora.spec import AdapterSource, BaseGeometry, LoadReport
from loraserve.lora.version import content_version
from loraserve.lora.workspace import (
    CopiedFile,
    Progress,
    Workspace,
    copy_adapter,
    exclusive,
    fsync_folder,
    storage_errors,
)

MAX_ADAPTER_BYTES = 32 << 30


def _no_progress(done: int, total: int) -> None:
    pass


class AdapterStore:
    """The adapters of one data folder. Thread-safe; several processes may use one data folder at a time."""

    def __init__(self, data_dir: Path, *, max_adapter_bytes: int = MAX_ADAPTER_BYTES) -> None:
        """Open or create; remove what crashed processes left. Raises `StorageFailed`, `DiskFull`."""
        self._versions = data_dir / "versions"
        self._lock_file = data_dir / "store.lock"
        self._max_adapter_bytes = max_adapter_bytes
        self._closed = False
        self._close_lock = threading.Lock()
        self._seen: int | None = 0
        with storage_errors("opening it"):
            self._versions.mkdir(parents=True, exist_ok=True)
            with exclusive(self._lock_file):
                self._registry, self._holds = Registry(data_dir / "registry.sqlite3"), Holds(data_dir / "holds.lock")
                self._workspace = Workspace(data_dir / "tmp")
                alone = self._workspace.sweep()
                self.templates = TemplateFolder(data_dir / "templates", self._workspace)
                # What requests made a former process fetch is known to nobody any more.
                left = self._registry.doomed() + (self._registry.demanded() if alone else [])
                self._forget_free(left)
                orphans = self._take_orphans()
                self._collect_templates()
                self._seen, self._mark = self._registry.data_version(), self._registry.names_mark()
            _empty(orphans)

    def __enter__(self) -> AdapterStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the data folder."""
        with self._close_lock:
            if not self._closed:
                self._closed = True
                for part in (self._registry, self._holds, self._workspace):
                    part.close()

    # -- versions -------------------------------------------------------------------------------------------------

    def ingest(
        self,
        folder: AdapterFolder,
        source: AdapterSource,
        geometry: BaseGeometry | None,
        max_rank: int,
        progress: Progress = _no_progress,
        *,
        max_bytes: int | None = None,
        hold: bool = False,
        template: str | None = None,
    ) -> VersionRecord:
        """Copy an adapter in, check the copy, and keep it under its hash; known content is kept once.

        The copy is what is checked and hashed, so a source that is edited meanwhile cannot differ from its hash. A
        refusal leaves nothing. With `hold` it is held then. Raises `AdapterRefused`, `StorageFailed`, `DiskFull`.
        """
        read_adapter_files(folder)  # before gigabytes are copied, and while files that are not copied can be named
        copy = self._workspace.new_path()
        try:
            files = copy_adapter(folder, copy, min(self._max_adapter_bytes, max_bytes or MAX_ADAPTER_BYTES), progress)
            spec = parse_adapter(copy, geometry, max_rank)
            version = content_version(spec, copy)
            record = VersionRecord(version, source, LoadReport.of(spec, version), files, time.time())
            # Outside of the lock, as it reads all bytes: damaged files are replaced by the copy.
            damaged = self._registry.knows(version) and not self.verify(version)
            with storage_errors("keeping an adapter"), exclusive(self._lock_file):
                kept = None if damaged else self._kept_files(version)
                if kept is None:
                    self._move_in(copy, version)
                if template is not None:  # not before, as a refused adapter leaves nothing, nor after its record
                    self.templates.keep(template)
                added = self._registry.add_version(record if kept is None else replace(record, files=kept))
                if hold:
                    self._holds.hold(version)
                return added
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def keep(
        self,
        fetched: FetchedFolder,
        geometry: BaseGeometry | None,
        max_rank: int,
        progress: Progress = _no_progress,
        *,
        max_bytes: int | None = None,
        chat_templates: bool = True,
    ) -> tuple[VersionRecord, AdapterSource]:
        """`ingest` what a source brought, with its chat template; returns the source that names the template.

        Both are held from then on. Raises as `ingest`.
        """
        template = read_chat_template(fetched.folder) if chat_templates else None
        source = fetched.source
        if template is not None:
            source = replace(source, chat_template=digest_of(template))
            self._holds.hold(digest_of(template))
        try:
            record = self.ingest(
                fetched.folder, source, geometry, max_rank, progress, max_bytes=max_bytes, hold=True, template=template
            )
        except BaseException:
            if template is not None:
                self._holds.let_go(digest_of(template))
            raise
        return record, source

    def hold(self, version: str, template: str | None = None) -> None:
        """Keep every process from deleting a version and a chat template, until as many `let_go`.

        Raises `AdapterNotFound`, `StorageFailed`.
        """
        self._holds.hold(version)
        try:
            self._registry.version(version)
        except BaseException:
            self._holds.let_go(version)
            raise
        if template is not None:
            self._holds.hold(template)

    def let_go(self, version: str, template: str | None = None) -> None:
        """One hold less; the last one of all processes deletes what was to be deleted. Raises `StorageFailed`."""
        if template is not None:
            self._holds.let_go(template)
        if self._holds.let_go(version) and version in self._registry.doomed():
            self.delete_unneeded([version])

    def folder(self, version: str) -> Path:
        """Where a version's files lie. Raises `AdapterNotFound`; `AdapterRefused` if someone took the files away."""
        self._registry.version(version)
        folder = self._versions / version
        if not folder.is_dir():
            raise AdapterRefused(AdapterFault.MISSING_WEIGHTS, f"the files of version {version[:12]} are gone")
        return folder

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A path for files on their way in; it does not exist yet, and is deleted at the end."""
        path = self._workspace.new_path()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def place(self, version: str) -> Path:
        """Where the files of a version lie if it is stored; nothing is looked up."""
        return self._versions / version

    def version(self, version: str) -> VersionRecord:
        """The record of a version. Raises `AdapterNotFound`."""
        return self._registry.version(version)

    def knows(self, version: str) -> bool:
        """Whether a version is stored."""
        return self._registry.knows(version)

    def versions(self) -> list[VersionRecord]:
        """All versions, oldest first."""
        return self._registry.versions()

    def num_bytes(self) -> int:
        """Bytes of the files of all versions."""
        return self._registry.num_bytes()

    def verify(self, version: str) -> bool:
        """Whether every file of a version still has the bytes that were copied. Raises `AdapterNotFound`."""
        files = self._registry.version(version).files
        try:
            folder = AdapterFolder.at(self._versions / version)
            return all(_sha256(folder, file.name) == file.sha256 for file in files)
        except AdapterRefused:
            return False

    def unreferenced(self) -> list[str]:
        """Versions that no name points at, oldest first."""
        return self._registry.unreferenced()

    def delete_version(self, version: str) -> None:
        """Delete a version and its files. Raises `AdapterNotFound`, `AdapterInUse` while it is a name's or is held."""
        with storage_errors("deleting an adapter"), exclusive(self._lock_file), self._holds.free([version]) as free:
            if version not in free:
                raise AdapterInUse(f"version {version[:12]} is in use")
            self._registry.delete_version(version)
            graves = self._bury([version])
        _empty(graves)

    def delete_unneeded(self, versions: Iterable[str]) -> list[str]:
        """Delete those of the versions, with their files, that no name has or could be rolled back to; returns them.

        Those that a process holds go when it lets go of them. Chat templates that nobody has any more go, too.
        """
        with storage_errors("deleting adapters"), exclusive(self._lock_file):
            gone = self._forget_free([*versions, *self._registry.doomed()])
            graves = self._bury(gone)
            self._collect_templates()
        _empty(graves)
        return gone

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
        """Point a name at a version; see `Registry.set_alias`."""
        set_alias = partial(self._registry.set_alias, name, version, source=source, pinned=pinned, replace=replace)
        return set_alias(owner=owner, visibility=visibility, tenant=tenant)

    def roll_back(self, name: str, to: str | None = None) -> Alias:
        """Point a name at a version that it had; see `Registry.roll_back`."""
        return self._registry.roll_back(name, to)

    def rollback_target(self, name: str, to: str | None = None) -> str:
        """The version that `roll_back` would choose now. Raises as it does."""
        return self._registry.rollback_target(name, to)

    def set_pinned(self, name: str, pinned: bool) -> Alias:
        """Pin or unpin a name. Raises `AdapterNotFound`."""
        return self._registry.set_pinned(name, pinned)

    def note_use(self, last_used: Mapping[str, float], tiers: Mapping[str, str] | None = None) -> None:
        """Record when names were last used and where versions are; see `Registry.note_use`."""
        self._registry.note_use(last_used, tiers)

    def registered(self) -> list[tuple[Alias, VersionRecord]]:
        """Every name with its version, by name."""
        return self._registry.registered()

    def changed_by_others(self, *, wait: bool = True) -> bool:
        """Whether another process has changed what names mean since the last call.

        Without `wait` it never waits for a write of this process; then a change may be told by a later call.
        """
        found = self._registry.data_version(wait=wait)
        if found is None or found == self._seen:
            return False
        self._seen, before, self._mark = found, self._mark, self._registry.names_mark()
        return self._mark != before  # else it noted their use only

    def remove_alias(self, name: str) -> Alias:
        """Take a name away; its version stays. Raises `AdapterNotFound`."""
        return self._registry.remove_alias(name)

    def alias(self, name: str) -> Alias:
        """What a name points at. Raises `AdapterNotFound`."""
        return self._registry.alias(name)

    def aliases(self) -> list[Alias]:
        """All names, in order."""
        return self._registry.aliases()

    def resolve(self, text: str) -> str:
        """`name` or `name@prefix` → version. Raises `AdapterRefused`, `AdapterNotFound`, `AmbiguousVersion`."""
        return self._registry.resolve(parse_name(text))

    def versions_of(self, name: str) -> list[VersionUse]:
        """See `Registry.versions_of`."""
        return self._registry.versions_of(name)

    def versions_now(self, name: str) -> list[NameVersion]:
        """See `Registry.versions_now`."""
        return self._registry.versions_now(name)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _kept_files(self, version: str) -> tuple[CopiedFile, ...] | None:
        """The files of a version that is here and looks whole; None if the new copy has to take its place."""
        try:
            files = self._registry.version(version).files
        except AdapterNotFound:
            return None
        for file in files:
            path = self._versions / version / file.name
            if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
                return None
        return files

    def _forget_free(self, versions: Iterable[str]) -> list[str]:
        wanted = set(versions)
        with self._holds.free(wanted) as free:
            return self._registry.delete_unneeded(wanted, free)

    def _collect_templates(self) -> None:
        unknown = set(self.templates.kept()) - self._registry.templates()
        with self._holds.free(unknown) as free:
            self.templates.delete(free)

    def _move_in(self, copy: Path, version: str) -> None:
        place = self._versions / version
        if place.exists():
            self._workspace.discard(place)
        os.rename(copy, place)
        fsync_folder(self._versions)

    def _bury(self, versions: Iterable[str]) -> list[Path]:
        """Move the folders of versions out of the way: at once, and durably."""
        graves = []
        for version in versions:
            folder = self._versions / version
            if folder.exists():
                graves.append(self._workspace.new_path())
                os.rename(folder, graves[-1])
        if graves:
            fsync_folder(self._versions)
        return graves

    def _take_orphans(self) -> list[Path]:
        """Move folders that no record knows (a crash between move and record, or record and delete) out of the way."""
        graves = []
        for folder in self._versions.iterdir():
            if not self._registry.knows(folder.name):
                grave = self._workspace.new_path()
                os.rename(folder, grave)
                graves.append(grave)
        return graves


def _empty(graves: Iterable[Path]) -> None:
    for grave in graves:
        shutil.rmtree(grave, ignore_errors=True)


def _sha256(folder: AdapterFolder, name: str) -> str:
    digest = hashlib.sha256()
    with folder.open(name, AdapterFault.MISSING_WEIGHTS) as file:
        for piece in read_chunks(file, os.fstat(file.fileno()).st_size + 1):
            digest.update(piece)
    return digest.hexdigest()
