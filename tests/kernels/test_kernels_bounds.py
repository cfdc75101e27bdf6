"""The CPU kernels take addresses: what they read and write ends exactly where the arrays end."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

import numpy as np
import pytest
import torch

from loraserve.kernels import cpu_attention_plan
from loraserve.kernels.cpu_backend import CpuOps
from loraserve.kernels.cpu_linear import linear_parallel, pack
from loraserve.kernels.cpu_simd import LANES, TILE_COLUMNS, TILE_ROWS
from loraserve.kernels.metadata import AttentionBatch

Array = np.ndarray[Any, Any]
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(params=["before", "behind"])
def fenced(request: pytest.FixtureRequest) -> Any:
    """Makes copies of arrays that touch a page which nobody may read, on one side: an access there ends the process."""
    libc, page, held = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, list[tuple[int, Any]]()

    def make(array: Array) -> Array:
        pages = -(-array.nbytes // page)
        memory = mmap.mmap(-1, (pages + 2) * page)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for fence in (at, at + (pages + 1) * page):
            assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0
        held.append((at, memory))
        begin = page if request.param == "before" else (pages + 1) * page - array.nbytes
        copy = np.frombuffer(memory, array.dtype, array.size, begin).reshape(array.shape)
        copy[...] = array
        return copy

    yield make
    for at, memory in held:
        assert libc.mprotect(ctypes.c_void_p(at), len(memory), mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_the_fence_holds(fenced: Any) -> None:
    array = fenced(np.arange(5, dtype=np.float32))
    assert array.tolist() == [0, 1, 2, 3, 4]
    reader, writer = os.pipe()
    errors = 0
    for beside in (array.ctypes.data - 1, array.ctypes.data + array.nbytes):
        try:
            os.write(writer, (ctypes.c_char * 1).from_address(beside))
        except OSError as error:  # the system's way to refuse what would end the process here
            errors += error.errno == errno.EFAULT
    assert errors == 1
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("head_dim", [1, LANES + 3, 80])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("lens", [(12, 5, 12, 12), (40, 7, 40, 33)])
def test_attention(
    fenced: Any, head_dim: int, workers: int, lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's last row comes between others, and is shorter than what is asked for ahead."""
    monkeypatch.setattr(cpu_attention_plan, "_SERIAL_WORK", 0)
    rows, heads, kv_heads, width = [0, 3, 1, 2], 5, 1, max(lens)
    ops = CpuOps(2)
    ops.workers = workers
    table = np.full((4, width), 2**31 - 1, np.int32)  # a location that no cache has, wherever no token is
    places = np.random.default_rng(0).permutation(sum(lens)).astype(np.int32)
    for row, where in zip(rows, np.split(places, np.cumsum(lens)[:-1]), strict=True):
        table[row, : len(where)] = where
    torch.manual_seed(0)
    keys, values = torch.randn(2, sum(lens), kv_heads, head_dim)
    q = torch.randn(4, heads, head_dim)
    batch = AttentionBatch(
        req_rows=torch.tensor(rows, dtype=torch.int32),
        q_indptr=torch.arange(5, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        locations=torch.from_numpy(fenced(table)),
        num_decode=4,
        max_seq_len=width,
        max_q_len=1,
    )
    k_cache, v_cache, queries = (torch.from_numpy(fenced(tensor.numpy())) for tensor in (keys, values, q))
    for window in (None, 4):
        got = ops.attention(queries, k_cache, v_cache, batch, 0.3, window).double()
        for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
            seen = table[row, max(0, length - (window or length)) : length]
            weights = (q[i].double() @ keys[seen, 0].double().t() * 0.3).softmax(-1)
            torch.testing.assert_close(got[i].view(heads, -1), weights @ values[seen, 0].double(), **CLOSE)


@pytest.mark.parametrize("num_out", [1, TILE_COLUMNS - 1, TILE_COLUMNS, 2 * TILE_COLUMNS + 5])
@pytest.mark.parametrize("num_in", [1, 70, 1025])
def test_linear(fenced: Any, num_in: int, num_out: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(num_out, num_in) / num_in**0.5, torch.randn(num_out)
    linear = pack(weight, bias, 3)
    panels, shift = fenced(linear.panels), fenced(linear.bias)
    for rows in (1, TILE_ROWS, TILE_ROWS + 1):
        x, y = torch.randn(rows, num_in), fenced(np.full((rows, num_out), np.nan, np.float32))
        linear_parallel(fenced(x.numpy()), panels, shift, y, 3)
        want = x.double() @ weight.double().t() + bias.double()
        torch.testing.assert_close(torch.from_numpy(y).double(), want, **CLOSE)
