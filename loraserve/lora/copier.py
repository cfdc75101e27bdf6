"""How staged weights reach the device: at once, or on a stream of their own beside the forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Arrived = Callable[[], bool]
"""Whether the copies before it have reached the device; never waits."""


class Copier(Protocol):
    """Copies pieces of one adapter after another into the pool."""

    def begin(self) -> None:
        """Pages have changed hands: copies from here on come after all forwards launched so far; they may read them."""
        ...

    def copy(self, into: Tensor, source: Tensor) -> None:
        """`into[...] = source`, perhaps later. Both must stay as they are until it has arrived."""
        ...

    def mark(self) -> Arrived:
        """Asks about all copies made so far."""
        ...


class DirectCopier:
    """Copies on the current stream: what is launched later sees them, what was launched before does not."""

    def begin(self) -> None:
        """Nothing: the stream keeps the order."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy now (on a GPU: in the order of the stream)."""
        into.copy_(source, non_blocking=True)

    def mark(self) -> Arrived:
        """Always: whoever looks comes later in the stream."""
        return lambda: True


class StreamCopier:
    """Copies from pinned memory on a side stream, so that no forward waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Let the side stream wait (not the host) for the forwards that are under way."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Queue a copy on the side stream."""
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)

    def mark(self) -> Arrived:
        """Record an event behind the copies; it is asked, never waited for."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.query


def has_streams(device: torch.device) -> bool:
    """Whether the device is a GPU that torch can use: copies run beside it, from pinned memory."""
    return device.type == "cuda" and torch.cuda.is_available()


def make_copier(device: torch.device) -> Copier:
    """A side stream where there is a GPU to have one."""
    return StreamCopier(device) if has_streams(device) else DirectCopier()
