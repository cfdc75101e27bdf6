"""`--adapter-source`: where adapters may come from that nobody registered."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from loraserve.errors import ConfigError
from loraserve.server.ports import AdapterPlace

_HUB_PATTERN = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9*?._-]*/[A-Za-z0-9*?][A-Za-z0-9*?._-]*", re.ASCII)


class HubSource(NamedTuple):
    """Repositories whose name fits a pattern like `org/*`."""

    pattern: str

    def find(self, name: str, revision: str | None) -> AdapterPlace | None:
        """Where an adapter of this (valid) name would be."""
        if name.count("/") != 1 or not fnmatchcase(name, self.pattern):
            return None
        return AdapterPlace(repo=name, revision=revision)


class FolderSource(NamedTuple):
    """The folders below one folder, by their path in it."""

    root: Path

    def find(self, name: str, revision: str | None) -> AdapterPlace | None:
        """Where an adapter of this (valid) name would be; None if there is no such folder."""
        if revision is not None or not (self.root / name).is_dir():
            return None
        return AdapterPlace(path=str(self.root / name), root=self.root)


AdapterSources = Sequence[HubSource | FolderSource]


def parse_sources(texts: Sequence[str]) -> AdapterSources:
    """The flag's values. Raises `ConfigError`."""
    found: list[HubSource | FolderSource] = []
    for text in texts:
        kind, _, where = text.partition(":")
        if kind == "hub" and _HUB_PATTERN.fullmatch(where):
            found.append(HubSource(where))
        elif kind == "dir" and where:
            root = Path(where).expanduser().absolute()
            if not root.is_dir():
                raise ConfigError(f"--adapter-source {text!r}: there is no such folder")
            found.append(FolderSource(root))
        else:
            raise ConfigError(f"--adapter-source {text!r} must be hub:ORG/PATTERN or dir:PATH")
    return found


def find_place(sources: AdapterSources, name: str, revision: str | None) -> AdapterPlace | None:
    """Where the first source that allows a name has it; None: no source does. Looks at the disk."""
    return next((place for source in sources if (place := source.find(name, revision)) is not None), None)
