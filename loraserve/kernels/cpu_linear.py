"""Base linears on CPU: the weight in panels of columns that a tile of sums in registers streams through once.

A panel is [in_features, TILE_COLUMNS], one after the other, the last one filled up with zeros. Rows are taken in tiles
of nearly equal height; long rows are cut so that a tile's part of x and of the panel stay in the caches. How rows and
workers are cut never changes a result: each is summed over its inputs in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from loraserve.kernels.cpu_math import compiled, compiled_parallel
from loraserve.kernels.cpu_simd import TILE_COLUMNS, TILE_ROWS, TILE_VECTORS, matmul_tile
from loraserve.kernels.huge_pages import Arena

Array = np.ndarray[Any, Any]

_SERIAL_WORK = 1 << 17  # multiply-adds below which one thread is faster than waking the others
_DEPTH = 1024  # inputs of a panel taken at a time: 192 KiB of it with AVX-512


@compiled
def _tile(
    rows: int,
    panels: Array,
    x: int,
    x_stride: int,
    w: int,
    init: int,
    init_stride: int,
    y: int,
    y_stride: int,
    depth: int,
) -> None:
    """One tile of `rows` ≤ TILE_ROWS over a whole panel's columns."""
    # The height must be a constant for the sums to stay in registers.
    columns = TILE_COLUMNS
    if rows == 8:
        matmul_tile(8, TILE_VECTORS, 0, panels, x, x_stride, w, columns, 0, init, init_stride, y, y_stride, 0, depth, 0)
    elif rows == 7:
        matmul_tile(7, TILE_VECTORS, 0, panels, x, x_stride, w, columns, 0, init, init_stride, y, y_stride, 0, depth, 0)
    elif rows == 6:
        matmul_tile(6, TILE_VECTORS, 0, panels, x, x_stride, w, columns, 0, init, init_stride, y, y_stride, 0, depth, 0)
    elif rows == 5:
        matmul_tile(5, TILE_VECTORS, 0, panels, x, x_stride, w, columns, 0, init, init_stride, y, y_stride, 0, depth, 0)
    elif rows == 4:
        matmul_tile(4, TILE_VECTORS, 0, panels, x, x_stride, w, columns, 0, init, init_stride, y, y_stride, 0, depth, 0)
    elif rows == 3:
        matmul_tile(3, TILE_VECTORS, 0, panels, x, x_stride, w, columns, 0, init, init_stride, y, y_stride, 0, depth, 0)
    elif rows == 2:
        matmul_tile(2, TILE_VECTORS, 0, panels, x, x_stride, w, columns, 0, init, init_stride, y, y_stride, 0, depth, 0)
    elif rows == 1:
        matmul_tile(1, TILE_VECTORS, 0, panels, x, x_stride, w, columns, 0, init, init_stride, y, y_stride, 0, depth, 0)


@compiled
def linear_share(x: Array, panels: Array, bias: Array, y: Array, first: int, last: int) -> None:
    """Compute pieces [first, last), where piece p is row tile p % tiles of panel p // tiles.

    x: [n, in]; panels: flat; bias: [panels · TILE_COLUMNS], zeros where there is none; y: [n, out].
    """
    num_rows, num_in = x.shape
    num_out = y.shape[1]
    tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    cuts = (num_in + _DEPTH - 1) // _DEPTH
    x_at, panels_at, bias_at, y_at = x.ctypes.data, panels.ctypes.data, bias.ctypes.data, y.ctypes.data
    spare = np.empty((TILE_ROWS, TILE_COLUMNS), np.float32)  # for the last panel, where y has fewer columns
    piece = first
    while piece < last:
        panel = piece // tiles
        end = min(last, (panel + 1) * tiles)
        column = panel * TILE_COLUMNS
        fits = column + TILE_COLUMNS <= num_out
        for cut in range(cuts):
            begin, stop = num_in * cut // cuts, num_in * (cut + 1) // cuts
            w = panels_at + (panel * num_in + begin) * TILE_COLUMNS * 4
            for tile in range(piece - panel * tiles, end - panel * tiles):
                row, below = num_rows * tile // tiles, num_rows * (tile + 1) // tiles
                source = x_at + (row * num_in + begin) * 4
                if fits:
                    target, stride = y_at + (row * num_out + column) * 4, num_out
                else:
                    target, stride = spare.ctypes.data, TILE_COLUMNS
                    if cut > 0:
                        for i in range(below - row):
                            for j in range(num_out - column):
                                spare[i, j] = y[row + i, column + j]
                init, init_stride = (bias_at + column * 4, 0) if cut == 0 else (target, stride)
                rows, depth = below - row, stop - begin
                _tile(rows, panels, source, num_in, w, init, init_stride, target, stride, depth)
                if not fits:
                    for i in range(below - row):
                        for j in range(num_out - column):
                            y[row + i, column + j] = spare[i, j]
        piece = end


@compiled_parallel
def linear_parallel(x: Array, panels: Array, bias: Array, y: Array, workers: int) -> None:
    pieces = (x.shape[0] + TILE_ROWS - 1) // TILE_ROWS * (bias.shape[0] // TILE_COLUMNS)
    for worker in prange(workers):
        linear_share(x, panels, bias, y, pieces * worker // workers, pieces * (worker + 1) // workers)


@dataclass(slots=True)
class PanelLinear:
    """A float32 weight in panels; the plain copy is not kept."""

    panels: Array  # [num_panels · in · TILE_COLUMNS]
    bias: Array  # [num_panels · TILE_COLUMNS]
    in_features: int
    out_features: int
    workers: int

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in] float32, contiguous → new [n, out]."""
        y = torch.empty(x.shape[0], self.out_features)
        arrays = (x.numpy(), self.panels, self.bias, y.numpy())
        if self.workers == 1 or x.shape[0] * self.in_features * self.out_features < _SERIAL_WORK:
            tiles = (x.shape[0] + TILE_ROWS - 1) // TILE_ROWS
            linear_share(*arrays, 0, tiles * (self.bias.shape[0] // TILE_COLUMNS))
        else:
            linear_parallel(*arrays, self.workers)
        return y


def pack(weight: Tensor, bias: Tensor | None, workers: int, arena: Arena | None = None) -> PanelLinear:
    """Lay out weight [out, in] float32 on CPU, in memory of `arena`, for `workers` threads."""
    num_out, num_in = weight.shape
    num_panels = -(-num_out // TILE_COLUMNS)
    panels = (arena or Arena()).take(num_panels * num_in * TILE_COLUMNS).view(num_panels, num_in, TILE_COLUMNS)
    whole = num_out // TILE_COLUMNS
    panels[:whole] = weight[: whole * TILE_COLUMNS].view(whole, TILE_COLUMNS, num_in).transpose(1, 2)
    if whole < num_panels:
        rest = weight[whole * TILE_COLUMNS :]
        panels[whole, :, : len(rest)] = rest.t()
    padded = torch.zeros(num_panels * TILE_COLUMNS)
    if bias is not None:
        padded[:num_out] = bias
    return PanelLinear(panels.flatten().numpy(), padded.numpy(), num_in, num_out, workers)
