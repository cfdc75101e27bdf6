"""Folders for work in progress inside the store: safe against other processes, swept after a crash."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from loraserve.config import format_bytes
from loraserve.errors import AdapterFault, AdapterRefused, DiskFull, StorageFailed
from loraserve.lora.adapter_files import CONFIG_NAME, needed_files
from loraserve.lora.files import CHUNK, AdapterFolder

Progress = Callable[[int, int], None]
"""Receives (bytes done, bytes in all)."""


class CopiedFile(NamedTuple):
    """One file of a version as it was copied."""

    name: str
    size: int
    sha256: str


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn what the operating system says into `DiskFull` or `StorageFailed`; paths are not repeated."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no room left in the adapter store while {doing}") from error
        raise StorageFailed(f"the adapter store failed while {doing}: {error.strerror}") from error


@contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Hold the file's lock against every other thread and process."""
    lock = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def fsync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Workspace:
    """One process's own folder under `root`, locked while it lives. Create it and sweep under the store's lock."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        name = secrets.token_hex(8)
        self._lock_file = root / f"{name}.lock"
        self._lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.folder = root / name
        self.folder.mkdir()

    def sweep(self) -> bool:
        """Delete the workspaces of processes that are gone; returns whether no other process lives."""
        alone = True
        for lock_file in self._root.glob("*.lock"):
            if lock_file == self._lock_file:
                continue
            lock = os.open(lock_file, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
                continue
            finally:
                os.close(lock)
            shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
            lock_file.unlink(missing_ok=True)
        for folder in self._root.iterdir():  # what an earlier sweep or close could not delete
            if folder.is_dir() and not folder.with_suffix(".lock").exists():
                shutil.rmtree(folder, ignore_errors=True)
        return alone

    def new_path(self) -> Path:
        """A path in the workspace that does not exist."""
        return self.folder / secrets.token_hex(8)

    def discard(self, path: Path) -> None:
        """Move a folder here and delete it, so that it is gone at once for everyone else."""
        grave = self.new_path()
        os.rename(path, grave)
        shutil.rmtree(grave, ignore_errors=True)

    def close(self) -> None:
        """Delete the workspace and give its lock back."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock_file.unlink(missing_ok=True)
        os.close(self._lock)


def copy_adapter(source: AdapterFolder, into: Path, max_bytes: int, progress: Progress) -> tuple[CopiedFile, ...]:
    """Copy the adapter's files into the new folder `into`, durably.

    Raises `AdapterRefused` for files that may not be read or that together exceed `max_bytes`, `DiskFull` and
    `StorageFailed`.
    """
    names = needed_files(source.names())
    total = _total_size(source, names)
    if total > max_bytes:
        raise _too_large(max_bytes)
    done = 0
    copied: list[CopiedFile] = []
    with storage_errors("copying an adapter"):
        into.mkdir()
    for name in names:
        with source.open(name, _missing_fault(name)) as reading, storage_errors("copying an adapter"):
            file = _copy_file(reading, into / name, max_bytes, done, lambda now: progress(now, max(total, now)))
        done += file.size
        copied.append(file)
    with storage_errors("copying an adapter"):
        fsync_folder(into)
    return tuple(copied)


def _copy_file(reading: BinaryIO, to: Path, max_bytes: int, before: int, progress: Callable[[int], None]) -> CopiedFile:
    digest, size = hashlib.sha256(), 0
    with open(to, "xb", buffering=0) as writing:
        while piece := reading.read(CHUNK):
            size += len(piece)
            if before + size > max_bytes:  # it grew while it was read
                raise _too_large(max_bytes)
            digest.update(piece)
            _write_all(writing.fileno(), piece)
            progress(before + size)
        os.fsync(writing.fileno())
    return CopiedFile(to.name, size, digest.hexdigest())


def _total_size(source: AdapterFolder, names: tuple[str, ...]) -> int:
    total = 0
    for name in names:
        with source.open(name, _missing_fault(name)) as file:
            total += os.fstat(file.fileno()).st_size
    return total


def _missing_fault(name: str) -> AdapterFault:
    return AdapterFault.MISSING_CONFIG if name == CONFIG_NAME else AdapterFault.MISSING_WEIGHTS


def _too_large(limit: int) -> AdapterRefused:
    return AdapterRefused(
        AdapterFault.ADAPTER_TOO_LARGE, f"the adapter's files have more than the {format_bytes(limit)} that are stored"
    )


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
