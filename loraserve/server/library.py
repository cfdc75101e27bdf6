"""The adapter library of a real server: sources, checks against the served base, and the store on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from loraserve.errors import HubError
from loraserve.lora.history import NameVersion
from loraserve.lora.hub import HubRepo, check_access, fetch_hub, is_offline
from loraserve.lora.names import AdapterName
from loraserve.lora.records import Alias, VersionRecord, Visibility
from loraserve.lora.remote import fetch_url, is_url
from loraserve.lora.sources import FetchedFolder, resolve_local
from loraserve.lora.spec import AdapterSource, BaseGeometry
from loraserve.lora.store import MAX_ADAPTER_BYTES, AdapterStore
from loraserve.server.ports import AdapterPlace, Progress, Registered, StoredAdapter

_EVERYWHERE = (Path(os.sep),)


class Names(Protocol):
    """The part of `AdapterStore` that knows names."""

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
    ) -> Alias: ...
    def roll_back(self, name: str, to: str | None = None) -> Alias: ...
    def rollback_target(self, name: str, to: str | None = None) -> str: ...
    def set_pinned(self, name: str, pinned: bool) -> Alias: ...
    def remove_alias(self, name: str) -> Alias: ...
    def delete_unneeded(self, versions: Iterable[str]) -> list[str]: ...
    def versions_now(self, name: str) -> list[NameVersion]: ...
    def version(self, version: str) -> VersionRecord: ...
    def knows(self, version: str) -> bool: ...
    def registered(self) -> list[tuple[Alias, VersionRecord]]: ...
    def note_use(self, last_used: Mapping[str, float], tiers: Mapping[str, str] | None = None) -> None: ...
    def num_bytes(self) -> int: ...


class NameBook:
    """The names of an adapter library over the registry that keeps them."""

    def __init__(self, names: Names, folder: Callable[[str], Path]) -> None:
        self._names = names
        self._folder = folder

    def point(
        self,
        name: str,
        stored: StoredAdapter,
        *,
        pinned: bool,
        replace: bool,
        owner: str = "",
        visibility: Visibility | None = None,
        tenant: str | None = None,
    ) -> Registered:
        """See `AdapterLibrary`."""
        alias = self._names.set_alias(
            name,
            stored.version,
            source=stored.source,
            pinned=pinned,
            replace=replace,
            owner=owner,
            visibility=visibility,
            tenant=tenant,
        )
        return self._registered(alias, self._names.version(stored.version))

    def rollback_target(self, name: str, to: str | None) -> StoredAdapter:
        """See `AdapterLibrary`."""
        return self._stored_of(name, self._names.rollback_target(name, to))

    def roll_back(self, name: str, to: str | None) -> Registered:
        """See `AdapterLibrary`."""
        alias = self._names.roll_back(name, to)
        return self._registered(alias, self._names.version(alias.version))

    def set_pinned(self, name: str, pinned: bool) -> None:
        """See `AdapterLibrary`."""
        self._names.set_pinned(name, pinned)

    def forget(self, name: str) -> list[str]:
        """See `AdapterLibrary`."""
        had = [entry.version for entry in self._names.versions_now(name)]
        self._names.remove_alias(name)
        return had

    def purge(self, versions: Iterable[str]) -> None:
        """See `AdapterLibrary`."""
        self._names.delete_unneeded(versions)

    def has(self, version: str) -> bool:
        """See `AdapterLibrary`."""
        return self._names.knows(version)

    def versions(self, name: str) -> list[NameVersion]:
        """See `AdapterLibrary`."""
        return self._names.versions_now(name)

    def registered(self) -> list[Registered]:
        """See `AdapterLibrary`."""
        return [self._registered(alias, record) for alias, record in self._names.registered()]

    def note_use(self, last_used: Mapping[str, float], tiers: Mapping[str, str] | None) -> None:
        """See `AdapterLibrary`."""
        self._names.note_use(last_used, tiers)

    def disk_bytes(self) -> int:
        """See `AdapterLibrary`."""
        return self._names.num_bytes()

    def _registered(self, alias: Alias, record: VersionRecord) -> Registered:
        return Registered(
            name=alias.name,
            stored=self._stored(record, alias.source),
            pinned=alias.pinned,
            loaded_at=alias.loaded_at,
            owner=alias.owner,
            visibility=alias.visibility,
            last_used_at=alias.last_used_at,
            tier=record.tier,
        )

    def _stored_of(self, name: str, version: str) -> StoredAdapter:
        """A version as the name had it, which tells its source and chat template."""
        had = next((entry.source for entry in self._names.versions_now(name) if entry.version == version), None)
        return self._stored(self._names.version(version), had)

    def _stored(self, record: VersionRecord, source: AdapterSource | None = None) -> StoredAdapter:
        return StoredAdapter(record.version, self._folder(record.version), record.report, source or record.source)


class StoreLibrary(NameBook):
    """Fetches adapters into an `AdapterStore`. `geometry` is asked at each load: the engine must be up by then."""

    def __init__(
        self,
        store: AdapterStore,
        geometry: Callable[[], BaseGeometry],
        max_rank: int,
        allowed: tuple[Path, ...],
        allowed_urls: tuple[str, ...] = (),
        chat_templates: bool = True,
    ) -> None:
        """`chat_templates`: whether adapters' own are read and kept."""
        super().__init__(store, store.place)
        self._store = store
        self._geometry = geometry
        self._max_rank = max_rank
        self._allowed = allowed
        self._chat_templates = chat_templates
        self._allowed_urls = allowed_urls

    def add(self, place: AdapterPlace, progress: Progress) -> StoredAdapter:
        """Copy an adapter into the store. Raises `AdapterRefused`, `HubError`, `StorageFailed`, `EngineNotReady`."""
        geometry = self._geometry()
        with self._store.scratch() as scratch:
            fetched = self._fetch(place, progress, scratch)
            fetched = fetched._replace(source=replace(fetched.source, on_demand=place.on_demand))
            # What was fetched has been counted already; copying it into the store must not count it again.
            record, source = self._store.keep(
                fetched,
                geometry,
                self._max_rank,
                progress if fetched.source.kind == "local" else _silent,
                max_bytes=place.max_bytes,
                chat_templates=self._chat_templates,
            )
        folder = self._store.place(record.version)
        return StoredAdapter(record.version, folder, record.report, source, fetched.restricted)

    def hold(self, stored: StoredAdapter) -> None:
        """See `AdapterLibrary`."""
        self._store.hold(*stored.meaning)

    def let_go(self, stored: StoredAdapter) -> None:
        """See `AdapterLibrary`."""
        self._store.let_go(*stored.meaning)

    def chat_template(self, digest: str) -> str:
        """A template that was kept with an adapter. Raises `StorageFailed`."""
        return self._store.templates.read(digest)

    def check_access(self, place: AdapterPlace) -> None:
        """See `AdapterLibrary`."""
        assert place.repo is not None
        check_access(HubRepo(place.repo, place.revision, place.subfolder), place.token)

    def find_version(self, name: str, prefix: str) -> StoredAdapter:
        """See `AdapterLibrary`."""
        return self._stored_of(name, self._store.resolve(str(AdapterName(name, prefix))))

    def is_changed(self, *, wait: bool) -> bool:
        """See `AdapterLibrary`."""
        return self._store.changed_by_others(wait=wait)

    def _fetch(self, place: AdapterPlace, progress: Progress, scratch: Path) -> FetchedFolder:
        limit = place.max_bytes or MAX_ADAPTER_BYTES
        if place.path is not None and is_url(place.path):
            return fetch_url(place.path, self._allowed_urls, scratch, limit, progress)
        if place.path is not None:
            # The operator's own paths may lie anywhere; a client's must lie under --adapter-dir.
            allowed = self._allowed if place.root is None else (place.root,)
            return resolve_local(place.path, _EVERYWHERE if place.trusted else allowed, place.subfolder)
        assert place.repo is not None
        repo = HubRepo(place.repo, place.revision, place.subfolder)
        if place.on_demand and is_offline():
            raise HubError(f"{place.repo} cannot be fetched on demand: the Hub may not be asked (HF_HUB_OFFLINE)")
        # What requests make the server fetch is bounded in the store, so it must not pile up in the Hub cache instead.
        cache = scratch if place.on_demand else None
        return fetch_hub(repo, token=place.token, cache_dir=cache, progress=progress, max_bytes=limit)


def _silent(done: int, total: int) -> None:
    pass
