"""What the processes of a data folder use just now, so that none deletes what another one needs.

A hold is a shared lock on one byte of a file, at the place that the hash of a version or template gives. The system
takes it back from a process that ends, however it ends; there is nothing to write, and nothing to clean up.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loraserve.lora.workspace import storage_errors

_FREE = (errno.EACCES, errno.EAGAIN)


class Holds:
    """The holds of one store. Thread-safe."""

    def __init__(self, file: Path) -> None:
        """Raises `StorageFailed`."""
        with storage_errors("opening it"):
            self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def hold(self, digest: str) -> None:
        """Keep what has this hash from being deleted, until as many `let_go`. Waits for a deletion under way."""
        with self._lock:
            if not self._counts[digest]:
                with storage_errors("holding an adapter"):
                    _lock(self._file, fcntl.F_RDLCK, digest, wait=True)
            self._counts[digest] += 1

    def let_go(self, digest: str) -> bool:
        """One hold less; whether this process has no other. More of them than holds do nothing."""
        with self._lock:
            self._counts[digest] -= 1
            if self._counts[digest] > 0:
                return False
            del self._counts[digest]
            with storage_errors("letting go of an adapter"):
                _lock(self._file, fcntl.F_UNLCK, digest)
            return True

    @contextmanager
    def free(self, digests: Iterable[str]) -> Iterator[set[str]]:
        """Those that no process holds; nobody can hold them until the end of the block."""
        with self._lock:
            mine: set[str] = set()
            try:
                for digest in set(digests) - set(self._counts):
                    if self._is_free(digest):
                        mine.add(digest)
                yield mine
            finally:
                for digest in mine:
                    _lock(self._file, fcntl.F_UNLCK, digest)

    def close(self) -> None:
        """Let go of everything."""
        os.close(self._file)

    def _is_free(self, digest: str) -> bool:
        try:
            _lock(self._file, fcntl.F_WRLCK, digest)
        except OSError as error:
            if error.errno in _FREE:
                return False
            raise
        return True


def _lock(file: int, kind: int, digest: str, *, wait: bool = False) -> None:
    at = int(digest[:15], 16)
    if sys.platform == "linux":
        # Locks of the open file, not of the process: they do not end when anyone else here closes the same file.
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        fcntl.fcntl(file, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0))
        return
    names = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}
    fcntl.lockf(file, names[kind] | (0 if wait or kind == fcntl.F_UNLCK else fcntl.LOCK_NB), 1, at)
