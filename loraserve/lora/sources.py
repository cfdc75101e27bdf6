"""Where adapters come from: folders of this machine, within an allow-list."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from loraserve.errors import AdapterFault, AdapterRefused, SubfolderNotFound
from loraserve.lora.files import AdapterFolder, is_inside
from loraserve.lora.spec import AdapterSource
from loraserve.lora.strict_json import show


class FetchedFolder(NamedTuple):
    """An adapter's folder on this machine, ready to be copied into the store, and where it came from."""

    folder: AdapterFolder
    source: AdapterSource
    restricted: bool = False  # not everybody may have it: a private or gated repository


def resolve_local(path: str, allow: tuple[Path, ...], subfolder: str | None = None) -> FetchedFolder:
    """The folder at `path`, which must lie under one of `allow` once all links are resolved; so must its files.

    Raises `AdapterRefused`: `path_escape` (403) for anything outside, whether it exists or not; `not_an_adapter` if
    there is no folder. `SubfolderNotFound` if only the subfolder is missing. Messages repeat nothing but what was sent.
    """
    inner = check_subfolder(subfolder)
    if not path or "\0" in path:
        raise AdapterRefused(AdapterFault.PATH_ESCAPE, "path is not a path", param="path")
    roots = tuple(Path(os.path.realpath(root)) for root in allow)
    resolved = Path(os.path.realpath(os.path.expanduser(path)))
    if not is_inside(resolved, roots):
        raise AdapterRefused(
            AdapterFault.PATH_ESCAPE, f"{show(path, 200)} is not under a folder given by --adapter-dir", param="path"
        )
    if not resolved.is_dir():
        what = "is not a folder" if resolved.exists() else "does not exist"
        raise AdapterRefused(AdapterFault.NOT_AN_ADAPTER, f"{show(path, 200)} {what}", param="path")
    source = AdapterSource("local", path=path, subfolder=subfolder or None)
    if inner is None:
        return FetchedFolder(AdapterFolder(resolved, roots), source)
    below = Path(os.path.realpath(resolved / inner))
    if not is_inside(below, roots):
        raise AdapterRefused(
            AdapterFault.PATH_ESCAPE, f"subfolder {show(str(inner), 200)} leaves the allowed folders", param="subfolder"
        )
    if not below.is_dir():
        raise SubfolderNotFound(f"{show(path, 200)} has no subfolder {show(str(inner), 200)}", param="subfolder")
    return FetchedFolder(AdapterFolder(below, roots), source)


def check_subfolder(subfolder: str | None) -> PurePosixPath | None:
    """A relative path without `..`, or None for none. Raises `AdapterRefused(path_escape)`."""
    if not subfolder or subfolder in (".", "./"):
        return None
    path = PurePosixPath(subfolder)
    if path.is_absolute() or ".." in path.parts or "\0" in subfolder or "\\" in subfolder:
        raise AdapterRefused(
            AdapterFault.PATH_ESCAPE,
            f"subfolder {show(subfolder, 200)} must be a relative path without '..'",
            param="subfolder",
        )
    return path
