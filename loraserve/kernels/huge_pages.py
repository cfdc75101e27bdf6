"""Memory on the CPU in large pages where the system has them: big tables are read all over, and small pages miss."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_LARGE = 2**21  # bytes of a large page on x86-64 and most of ARM
_CHUNK = 32 * _LARGE
_LINE = 64


def map_bytes(num_bytes: int) -> Tensor:
    """Zeros as uint8 that take memory only as they are written."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    mapped = mmap.mmap(-1, -(-num_bytes // _LARGE) * _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: ordinary pages do too
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]


class Arena:
    """Many tables that live as long as each other, side by side: small ones share large pages. Not thread-safe."""

    def __init__(self) -> None:
        self._chunk = map_bytes(0)

    def take(self, num_floats: int) -> Tensor:
        """Zeros, [num_floats] float32, at the beginning of a cache line."""
        size = -(-num_floats * 4 // _LINE) * _LINE
        if size > len(self._chunk):
            self._chunk = map_bytes(max(size, _CHUNK))
        taken, self._chunk = self._chunk[:size], self._chunk[size:]
        return taken[: num_floats * 4].view(torch.float32)
