"""The tensors of the KV cache."""

import pytest
import torch

from loraserve.errors import ConfigError
from loraserve.kvcache.pool import KVCache


def test_shapes_bytes_and_zeros() -> None:
    cache = KVCache(3, 10, 2, 8, torch.float16, "cpu")
    assert (cache.num_layers, cache.num_locations) == (3, 10)
    assert len(cache.k) == len(cache.v) == 3
    tensors = [*cache.k, *cache.v]
    assert all(t.shape == (10, 2, 8) and t.dtype == torch.float16 and not t.any() for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == 6
    assert cache.num_bytes == 10 * KVCache.bytes_per_location(3, 2, 8, torch.float16) == 10 * 2 * 3 * 2 * 8 * 2


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_empty_caches_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError):
        KVCache(*sizes, torch.float32, "cpu")
