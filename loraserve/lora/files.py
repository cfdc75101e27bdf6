"""Opening files that someone else named: regular files only, and never outside the folders that are allowed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.strict_json import show

MAX_ENTRIES = 20_000  # files in one folder; a training run's folder has dozens
CHUNK = 1 << 20

_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not wait for its writer
    | getattr(os, "O_NOCTTY", 0)
)
_KIND_NAMES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}


def is_inside(path: Path, roots: tuple[Path, ...]) -> bool:
    """Whether a resolved path is one of the resolved roots or lies under one."""
    return any(path == root or root in path.parents for root in roots)


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """One folder of an adapter and the roots that its files may lie under once links are resolved.

    The Hub's cache is made of links, so links are followed, but only as far as `roots` reach. Every component below
    the root is opened without following links, so a link swapped in between check and use is not followed either.
    """

    path: Path  # resolved
    roots: tuple[Path, ...]  # resolved; at least one

    @classmethod
    def at(cls, path: Path, roots: tuple[Path, ...] = ()) -> AdapterFolder:
        """The folder at `path`; without `roots` its files must lie in the folder itself. Raises `AdapterRefused`."""
        resolved = Path(os.path.realpath(path))
        try:
            found = stat.S_ISDIR(resolved.stat().st_mode)
        except (OSError, ValueError):
            found = False
        if not found:
            raise AdapterRefused(AdapterFault.NOT_AN_ADAPTER, "the adapter's path is not a folder that can be read")
        return cls(resolved, tuple(Path(os.path.realpath(root)) for root in roots) or (resolved,))

    def names(self) -> frozenset[str]:
        """Names of all entries. Raises `AdapterRefused` for a folder that cannot be listed or is absurdly large."""
        found: set[str] = set()
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    found.add(entry.name)
                    if len(found) > MAX_ENTRIES:
                        raise AdapterRefused(
                            AdapterFault.NOT_AN_ADAPTER, f"the adapter's folder has more than {MAX_ENTRIES} entries"
                        )
        except OSError as error:
            raise AdapterRefused(AdapterFault.NOT_AN_ADAPTER, "the adapter's folder cannot be listed") from error
        return frozenset(found)

    def open(self, name: str, missing: AdapterFault) -> BinaryIO:
        """Open a file of the folder for reading, unbuffered.

        Raises `AdapterRefused`: `path_escape` if it lies outside the roots, `missing` if it is absent, unreadable or
        not a regular file.
        """
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise AdapterRefused(AdapterFault.PATH_ESCAPE, f"{show(name)} is not a plain file name")
        real = Path(os.path.realpath(self.path / name))
        root = next((root for root in self.roots if root in real.parents), None)
        if root is None:
            raise AdapterRefused(AdapterFault.PATH_ESCAPE, f"{show(name)} is a link that leaves the allowed folders")
        try:
            return os.fdopen(_open_beneath(root, real.relative_to(root).parts, name, missing), "rb", buffering=0)
        except FileNotFoundError as error:
            raise AdapterRefused(missing, f"{show(name)} is missing") from error
        except OSError as error:
            raise AdapterRefused(missing, f"{show(name)} cannot be read") from error

    def read(self, name: str, limit: int, *, missing: AdapterFault, too_large: AdapterFault) -> bytes:
        """All bytes of a small file; `too_large` if there are more than `limit`."""
        with self.open(name, missing) as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise AdapterRefused(too_large, f"{show(name)} is larger than {limit} bytes")
            data = b"".join(read_chunks(file, limit + 1))
        if len(data) > limit:
            raise AdapterRefused(too_large, f"{show(name)} is larger than {limit} bytes")
        return data


def read_chunks(file: BinaryIO, limit: int) -> Iterator[bytes]:
    """The first `limit` bytes of an unbuffered file in pieces, fewer if it ends before."""
    while limit > 0 and (piece := file.read(min(CHUNK, limit))):
        limit -= len(piece)
        yield piece


def _open_beneath(root: Path, parts: tuple[str, ...], name: str, missing: AdapterFault) -> int:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | getattr(os, "O_CLOEXEC", 0))
    try:
        for part in parts[:-1]:
            inner = os.open(part, _OPEN_FLAGS | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Looked at before it is opened: opening some devices has effects.
        _require_regular(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode, name, missing)
        file = os.open(parts[-1], _OPEN_FLAGS, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _require_regular(os.fstat(file).st_mode, name, missing)
    except AdapterRefused:
        os.close(file)
        raise
    return file


def _require_regular(mode: int, name: str, missing: AdapterFault) -> None:
    if not stat.S_ISREG(mode):
        kind = _KIND_NAMES.get(stat.S_IFMT(mode), "a special file")
        raise AdapterRefused(missing, f"{show(name)} is {kind}, not a regular file")
