"""`KVCache`: the tensors that hold keys and values. The only part of this room that touches the device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from loraserve.errors import ConfigError


class KVCache:
    """Keys and values of every location: `k[layer]` and `v[layer]` are [num_locations, kv_heads, head_dim].

    All zero at first, so that a masked read of an unused location meets a finite number. On a GPU the memory is taken
    at once; on a CPU the system hands out pages as they are first written, so that a large pool costs no start-up
    time and hardly any memory that is not used. Raises `ConfigError` for a size without elements.
    """

    def __init__(
        self,
        num_layers: int,
        num_locations: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if min(num_layers, num_locations, kv_heads, head_dim) < 1:
            raise ConfigError(
                f"a KV cache of {num_layers} layers, {num_locations} locations, {kv_heads} heads of {head_dim} is empty"
            )
        shape = (num_locations, kv_heads, head_dim)
        self.k: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.v: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_location(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that the K and V of one token take over all layers."""
        return 2 * num_layers * kv_heads * head_dim * dtype.itemsize

    @property
    def num_layers(self) -> int:
        """Layers that have keys and values."""
        return len(self.k)

    @property
    def num_locations(self) -> int:
        """Tokens that fit."""
        return self.k[0].shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.numel() * tensor.itemsize for tensor in (*self.k, *self.v))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch writes its zeros; numpy asks the system for pages that are zero already.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
