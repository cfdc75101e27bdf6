"""The adapter library of a real server: sources, checks against the served base, and the store on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from loraserve.lora.chat_template import digest_of, read_chat_template
from loraserve.lora.hub import HubRepo, fetch_hub
from loraserve.lora.sources import FetchedFolder, resolve_local
from loraserve.lora.spec import BaseGeometry
from loraserve.lora.store import AdapterStore
from loraserve.server.ports import AdapterPlace, Progress, StoredAdapter

_EVERYWHERE = (Path(os.sep),)


class StoreLibrary:
    """Fetches adapters into an `AdapterStore`. `geometry` is asked at each load: the engine must be up by then."""

    def __init__(
        self,
        store: AdapterStore,
        geometry: Callable[[], BaseGeometry],
        max_rank: int,
        allowed: tuple[Path, ...],
        chat_templates: bool = True,
    ) -> None:
        """`chat_templates`: whether adapters' own are read and kept."""
        self._store = store
        self._geometry = geometry
        self._max_rank = max_rank
        self._allowed = allowed
        self._chat_templates = chat_templates

    def add(self, place: AdapterPlace, progress: Progress) -> StoredAdapter:
        """Copy an adapter into the store. Raises `AdapterRefused`, `HubError`, `StorageFailed`, `EngineNotReady`."""
        geometry = self._geometry()
        fetched = self._fetch(place, progress)
        template = read_chat_template(fetched.folder) if self._chat_templates else None
        if template is not None:
            fetched = fetched._replace(source=replace(fetched.source, chat_template=digest_of(template)))
        record = self._store.ingest(fetched.folder, fetched.source, geometry, self._max_rank, progress)
        if template is not None:  # a refused adapter leaves nothing
            self._store.templates.keep(template)
        return StoredAdapter(record.version, self._store.folder(record.version), record.report, fetched.source)

    def chat_template(self, digest: str) -> str:
        """A template that was kept with an adapter. Raises `StorageFailed`."""
        return self._store.templates.read(digest)

    def _fetch(self, place: AdapterPlace, progress: Progress) -> FetchedFolder:
        if place.path is not None:
            # The operator's own paths may lie anywhere; a client's must lie under --adapter-dir.
            return resolve_local(place.path, _EVERYWHERE if place.trusted else self._allowed, place.subfolder)
        assert place.repo is not None
        repo = HubRepo(place.repo, place.revision, place.subfolder)
        return fetch_hub(repo, token=place.token, progress=progress)
