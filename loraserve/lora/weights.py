"""Adapter files → host tensors as the pool wants them: A [r, in] and s·B transposed to [r, out], in its dtype."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraserve.config import format_bytes
from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.kernels.metadata import Kind
from loraserve.lora.container import TensorReader
from loraserve.lora.layout import PoolLayout
from loraserve.lora.spec import AdapterSpec, TargetSpec, TensorRef

# torch runs an elementwise operation of at most this many elements on the calling thread alone. Staging in tiles of
# this size therefore leaves the cores to the step loop, without touching the process's thread settings.
_TILE = 16384


class StagingCancelled(Exception):
    """Nobody wants the result any more; raised inside the loader only."""


@dataclass(slots=True)
class StagingTicket:
    """Shared by the engine thread and the loader: how far a staging is, and whether it should stop."""

    bytes_total: int = 0
    bytes_done: int = 0
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class StagedTarget:
    """One module's matrices on the host; views of the adapter's one buffer."""

    kind: Kind
    layer: int
    rank: int
    a: Tensor  # [rank, in_features]
    b: Tensor  # [rank, out_features], times the scaling


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """A checked adapter on the host, ready to be copied to the device piece by piece."""

    targets: tuple[StagedTarget, ...]
    dtype: torch.dtype
    num_bytes: int
    checksum: int  # CRC-32 of the files' tensor bytes, to notice that a file changed between two stagings


def staged_bytes(spec: AdapterSpec, layout: PoolLayout, dtype: torch.dtype) -> int:
    """Host bytes that `stage` will allocate. Raises `AdapterRefused` if the adapter does not fit the base model."""
    layout.demand(spec)
    shapes = layout.shapes
    widths = {kind: shapes[kind].in_features + shapes[kind].out_features for kind in shapes}
    return sum(target.rank * widths[Kind(target.kind)] for target in spec.targets) * dtype.itemsize


def stage(
    spec: AdapterSpec,
    folder: Path,
    layout: PoolLayout,
    dtype: torch.dtype,
    *,
    pin_memory: bool = False,
    ticket: StagingTicket | None = None,
) -> StagedAdapter:
    """Read an adapter's tensors, one at a time, into one host buffer; the scaling goes into B in float32.

    Raises `AdapterRefused`: `shape_mismatch` against the base model, `non_finite` if a value is not finite after the
    scaling and the cast to `dtype`, `corrupt_weights` or `missing_weights` for bad files, `staging_failed` if the
    operating system does not give the bytes; `StagingCancelled` once `ticket.cancelled` is set.
    """
    ticket = ticket or StagingTicket()
    num_bytes = staged_bytes(spec, layout, dtype)
    ticket.bytes_total = spec.num_bytes
    try:
        buffer = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, pin_memory=pin_memory)
    except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as RuntimeError
        text = f"there are no {format_bytes(num_bytes)} of host memory for the adapter"
        raise AdapterRefused(AdapterFault.STAGING_FAILED, text) from error
    try:
        with TensorReader(folder) as reader:
            return _fill(spec, reader, layout, buffer, ticket)
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise AdapterRefused(AdapterFault.STAGING_FAILED, f"the adapter could not be read: {reason}") from error


def _fill(
    spec: AdapterSpec, reader: TensorReader, layout: PoolLayout, buffer: Tensor, ticket: StagingTicket
) -> StagedAdapter:
    targets: list[StagedTarget] = []
    checksum = 0
    position = 0
    for target in spec.targets:
        shape = layout.shapes[Kind(target.kind)]
        _check_shape(target, target.a, (target.rank, shape.in_features))
        _check_shape(target, target.b, (shape.out_features, target.rank))
        middle = position + target.rank * shape.in_features
        end = middle + target.rank * shape.out_features
        a = buffer[position:middle].view(target.rank, shape.in_features)
        b = buffer[middle:end].view(target.rank, shape.out_features)
        position = end
        for ref, into, scaling in ((target.a, a, None), (target.b, b, target.scaling)):
            if ticket.cancelled:
                raise StagingCancelled
            raw = reader.read(ref)
            checksum = zlib.crc32((raw if raw.flags.c_contiguous else raw.T).data, checksum)
            source = _as_tensor(raw, ref)
            _convert(source if scaling is None else source.T, into, scaling, f"{target.module} ({ref.name})")
            ticket.bytes_done += ref.num_bytes
        targets.append(StagedTarget(shape.kind, target.layer, target.rank, a, b))
    return StagedAdapter(tuple(targets), buffer.dtype, buffer.numel() * buffer.itemsize, checksum)


def _check_shape(target: TargetSpec, ref: TensorRef, expected: tuple[int, int]) -> None:
    if ref.shape != expected:
        text = (
            f"{ref.name} of {target.module} has shape {list(ref.shape)}; the base model and rank need {list(expected)}"
        )
        raise AdapterRefused(AdapterFault.SHAPE_MISMATCH, text)


def _as_tensor(raw: np.ndarray[Any, Any], ref: TensorRef) -> Tensor:
    if ref.dtype == "BF16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(raw)


def _convert(source: Tensor, into: Tensor, scaling: float | None, name: str) -> None:
    """`into[...] = (source.float() · scaling)` in into's dtype, tile by tile; refuses values that are not finite."""
    rank, width = into.shape
    if source.stride(1) == 1:
        columns = min(width, _TILE)
        rows = max(1, _TILE // columns)
    else:  # neighbours in memory are neighbours along the rank: take all of it at once
        rows = min(rank, _TILE)
        columns = max(1, _TILE // rows)
    for row in range(0, rank, rows):
        for column in range(0, width, columns):
            tile = source[row : row + rows, column : column + columns].float()
            if scaling is not None:
                tile = tile * scaling
            target = into[row : row + rows, column : column + columns]
            target.copy_(tile)
            if not math.isfinite(target.abs().max().item()):
                dtype = str(into.dtype).removeprefix("torch.")
                text = f"{name} has a value that is not finite in {dtype} after scaling"
                raise AdapterRefused(AdapterFault.NON_FINITE, text)
