"""Small arrays between host and device, such that the host never waits for what the device is computing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def has_copies_behind(device: torch.device) -> bool:
    """Whether copies can be queued on a stream: a GPU whose runtime is up (it is, once anything lies on it)."""
    return device.type == "cuda" and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor there; on a CPU it shares the array's memory.

    A copy from pageable memory may wait for all that is queued on the stream, one from pinned memory never does. Its
    block is not used again before the copy is through.
    """
    tensor = torch.from_numpy(array)
    if has_copies_behind(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Returning(NamedTuple):
    """A tensor on its way to the host."""

    tensor: Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The tensor, as soon as it and all that was queued before it is there. Raises what the device raised."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensor


def to_host(tensor: Tensor) -> Returning:
    """Queue a copy to the host behind what computes the tensor."""
    if not has_copies_behind(tensor.device):
        return Returning(tensor.to("cpu"), None)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return Returning(host, event)
