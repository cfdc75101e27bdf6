"""Memory on the CPU in large pages where the system has them: big tables are read all over, and small pages miss."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence

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


_POPULATE_WRITE = 23  # madvise: take the pages as if they were written, contents as they are; Linux 5.14
_LEAST_URGENT = 19


def fill_ahead(tensors: Sequence[Tensor], num_bytes: int) -> threading.Thread | None:
    """Take the memory of the first bytes of tensors, `num_bytes` in all, while the processor has nothing else to do.

    Who writes to a large page first waits for all of it to be cleared, milliseconds on a virtual machine. None where
    the system cannot do this.
    """
    if not sys.platform.startswith("linux"):
        return None
    share = num_bytes // max(1, len(tensors))
    page = mmap.PAGESIZE
    spans = []
    for tensor in tensors:
        first = -(-tensor.data_ptr() // page) * page
        last = (tensor.data_ptr() + min(share, tensor.numel() * tensor.itemsize)) // page * page
        if last > first:
            spans.append((first, last - first))

    def fill() -> None:
        # The closure keeps the tensors: their memory must not become somebody else's meanwhile.
        assert len(tensors) >= len(spans)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_URGENT)
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for first, size in spans:
            if advise(first, size, _POPULATE_WRITE) != 0:  # an older kernel, or no memory: then as it is written
                return

    thread = threading.Thread(target=fill, name="fill-ahead", daemon=True)
    thread.start()
    return thread
