"""Adapter files → host tensors as the pool wants them: A [r, in] and s·B transposed to [r, out], in its dtype."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraserve.config import format_bytes
from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.kernels.metadata import Kind
from loraserve.lora.affine import BaseWeights, Module, dora_factor, need
from loraserve.lora.block_diagonal import block_places
from loraserve.lora.container import TensorReader
from loraserve.lora.layout import PoolLayout
from loraserve.lora.spec import AdapterSpec, Blocks, ReplacedRows, RowsDelta, TargetSpec, TensorRef
from loraserve.lora.tables import Table

# torch runs an elementwise operation of at most this many elements on the calling thread alone. Staging in tiles of
# this size therefore leaves the cores to the step loop, without touching the process's thread settings.
_TILE = 16384
_PIECE = 1 << 20  # elements of a whole matrix that are read at once


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
    b: Tensor  # [rank + extra_rows, out_features], times the scaling; then gain and shift, if the module has them

    @property
    def extra_rows(self) -> int:
        """0, or 2 if gain and shift follow B."""
        return self.b.shape[0] - self.rank


@dataclass(frozen=True, slots=True)
class StagedRows:
    """The rows of one table on the host; a view of the adapter's one buffer."""

    table: Table
    ids: NDArray[np.int64]  # [num_rows] ascending
    rows: Tensor  # [num_rows, width]

    @property
    def num_rows(self) -> int:
        """Rows that it has."""
        return len(self.ids)

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rows.shape[1]


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """A checked adapter on the host, ready to be copied to the device piece by piece."""

    targets: tuple[StagedTarget, ...]
    dtype: torch.dtype
    num_bytes: int
    checksum: int  # CRC-32 of the files' tensor bytes, to notice that a file changed between two stagings
    replaced: tuple[StagedRows, ...] = ()


def staged_bytes(spec: AdapterSpec, layout: PoolLayout, dtype: torch.dtype) -> int:
    """Host bytes that `stage` will allocate. Raises `AdapterRefused` if the adapter does not fit the base model."""
    layout.demand(spec)
    deltas = sum(_num_elements(target, layout) for target in spec.targets)
    return (deltas + sum(rows.num_rows * rows.width for rows in spec.replaced)) * dtype.itemsize


def _num_elements(target: TargetSpec, layout: PoolLayout) -> int:
    shape = layout.shapes[Kind(target.kind)]
    return target.rank * shape.in_features + (target.rank + target.extra_rows) * shape.out_features


def stage(
    spec: AdapterSpec,
    folder: Path,
    layout: PoolLayout,
    dtype: torch.dtype,
    *,
    pin_memory: bool = False,
    ticket: StagingTicket | None = None,
    base: BaseWeights | None = None,
) -> StagedAdapter:
    """Read an adapter's tensors, one at a time, into one host buffer; the scaling goes into B in float32.

    DoRA and trained biases need the `base`'s weights: their gain and shift are computed here, once.
    Raises `AdapterRefused`: `shape_mismatch` against the base model, `non_finite` if a value is not finite after the
    scaling and the cast to `dtype`, `corrupt_weights` or `missing_weights` for bad files, `staging_failed` if the
    operating system does not give the bytes, `unsupported_variant` if base weights are needed and not to be had;
    `StagingCancelled` once `ticket.cancelled` is set.
    """
    ticket = ticket or StagingTicket()
    num_bytes = staged_bytes(spec, layout, dtype)
    ticket.bytes_total = sum(ref.num_bytes for ref in spec.all_refs)
    try:
        buffer = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, pin_memory=pin_memory)
    except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as RuntimeError
        text = f"there are no {format_bytes(num_bytes)} of host memory for the adapter"
        raise AdapterRefused(AdapterFault.STAGING_FAILED, text) from error
    try:
        with TensorReader(folder) as reader:
            return _fill(spec, reader, layout, buffer, ticket, base)
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise AdapterRefused(AdapterFault.STAGING_FAILED, f"the adapter could not be read: {reason}") from error


def _fill(
    spec: AdapterSpec,
    reader: TensorReader,
    layout: PoolLayout,
    buffer: Tensor,
    ticket: StagingTicket,
    base: BaseWeights | None,
) -> StagedAdapter:
    targets: list[StagedTarget] = []
    source = _Source(reader, ticket)
    position = 0
    for target in spec.targets:
        shape = layout.shapes[Kind(target.kind)]
        middle = position + target.rank * shape.in_features
        end = position + _num_elements(target, layout)
        a = buffer[position:middle].view(target.rank, shape.in_features)
        b = buffer[middle:end].view(target.rank + target.extra_rows, shape.out_features)
        position = end
        staged = StagedTarget(shape.kind, target.layer, target.rank, a, b)
        _stage_target(target, staged, source, base)
        targets.append(staged)
    replaced: list[StagedRows] = []
    for rows in spec.replaced:
        ids = np.unique(np.concatenate([np.asarray(part.ids, np.int64) for part in rows.parts]))
        end = position + len(ids) * rows.width
        staged_rows = StagedRows(rows.table, ids, buffer[position:end].view(len(ids), rows.width))
        position = end
        _stage_rows(rows, staged_rows, source)
        replaced.append(staged_rows)
    num_bytes = buffer.numel() * buffer.itemsize
    return StagedAdapter(tuple(targets), buffer.dtype, num_bytes, source.checksum, tuple(replaced))


@dataclass(slots=True)
class _Source:
    """Reads tensors once each, counting and checking on the way."""

    reader: TensorReader
    ticket: StagingTicket
    checksum: int = 0

    def read(self, target: TargetSpec, ref: TensorRef, expected: tuple[int, ...]) -> Tensor:
        _check_shape(target, ref, expected)
        return self.read_all(ref)

    def read_all(self, ref: TensorRef) -> Tensor:
        if self.ticket.cancelled:
            raise StagingCancelled
        raw = self.reader.read(ref)
        self.checksum = zlib.crc32((raw if raw.flags.c_contiguous else raw.T).data, self.checksum)
        self.ticket.bytes_done += ref.num_bytes
        return _as_tensor(raw, ref)


def _stage_rows(rows: ReplacedRows, into: StagedRows, source: _Source) -> None:
    for part in rows.parts:
        places = np.searchsorted(into.ids, np.asarray(part.ids, np.int64))
        together = bool((np.diff(places) == 1).all())
        step = max(1, _PIECE // rows.width)
        delta = None if part.delta is None else _rows_delta(rows.table, part.delta, source)
        for begin in range(0, len(places), step):
            end = min(begin + step, len(places))
            ref = part.ref if len(part.ref.shape) == 1 else part.ref.rows(begin, end - begin)
            values, name = source.read_all(ref).view(end - begin, rows.width), f"{rows.table} ({part.ref.name})"
            if delta is not None:
                values = values.float() + delta[begin:end]
            if together:
                _convert(values, into.rows[places[begin] : places[begin] + end - begin], None, name)
                continue
            for row, place in zip(values, places[begin:end].tolist(), strict=True):
                _convert(row[None], into.rows[place : place + 1], None, name)


def _rows_delta(table: Table, delta: RowsDelta, source: _Source) -> Tensor:
    """[num_rows, width] float32."""
    a, b = source.read_all(delta.a).float(), source.read_all(delta.b).float()
    found = (b @ a) * delta.scaling
    return found.T if table is Table.EMBED else found


def _stage_target(target: TargetSpec, into: StagedTarget, source: _Source, base: BaseWeights | None) -> None:
    rank, in_features, out_features = target.rank, into.a.shape[1], into.b.shape[1]
    scaling: float | Tensor = target.scaling
    gain = torch.zeros(out_features) if target.vectors else None
    if target.a is not None and target.b is not None:
        a_blocks, b_blocks = (
            1 if blocks is None else blocks.num_blocks for blocks in (target.a_blocks, target.b_blocks)
        )
        a_name, b_name = (f"{target.module} ({ref.name})" for ref in (target.a, target.b))
        a = source.read(target, target.a, (rank, in_features // a_blocks))
        if target.a_blocks is None:
            _convert(a, into.a, None, a_name)
        else:
            _convert_blocks(a, into.a, target.a_blocks, None, a_name)
        b = source.read(target, target.b, (out_features, rank // b_blocks)).T
        if target.magnitude is not None:
            magnitude = source.read(target, target.magnitude, (out_features,)).float()
            over_vocabulary = into.kind is Kind.EMBED
            sizes = (in_features, out_features) if over_vocabulary else (out_features, in_features)
            module = Module(into.kind, target.layer, *sizes)
            factor = dora_factor(module, magnitude, a.float(), b.float() * scaling, need(base))
            gain, scaling = factor - 1, factor * scaling
        if target.b_blocks is None:
            _convert(b, into.b[:rank], scaling, b_name)
        else:  # never together with DoRA, so the scaling is one for all
            _convert_blocks(b.T, into.b[:rank].T, target.b_blocks, target.scaling, b_name)
    if gain is not None:
        names = ", ".join(ref.name for ref in target.vectors)
        shift = _shift(target, gain, source, need(base))
        for row, vector in ((rank, gain), (rank + 1, shift)):
            _convert(vector[None], into.b[row : row + 1], None, f"{target.module} ({names})")


def _shift(target: TargetSpec, gain: Tensor, source: _Source, base: BaseWeights) -> Tensor:
    """What is added to y·gain, y the base's output: the trained biases, less what the gain does to the base's own."""
    kind, layer, width = Kind(target.kind), target.layer, (len(gain),)
    own = None if kind is Kind.EMBED else base.bias(kind, layer)
    shift = torch.zeros_like(gain) if own is None else -gain * own
    if target.lora_bias is not None:
        shift += target.scaling * source.read(target, target.lora_bias, width).float()
    if target.bias is not None:
        shift += source.read(target, target.bias, width).float()
        if own is not None:
            shift -= own
    return shift


def _check_shape(target: TargetSpec, ref: TensorRef, expected: tuple[int, ...]) -> None:
    if ref.shape != expected:
        text = (
            f"{ref.name} of {target.module} has shape {list(ref.shape)}; the base model and rank need {list(expected)}"
        )
        raise AdapterRefused(AdapterFault.SHAPE_MISMATCH, text)


def _as_tensor(raw: np.ndarray[Any, Any], ref: TensorRef) -> Tensor:
    if ref.dtype == "BF16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(raw)


def _convert_blocks(stack: Tensor, into: Tensor, blocks: Blocks, scaling: float | None, name: str) -> None:
    """`_convert` of a block-diagonal matrix [rows, columns], of which `stack` holds the blocks, [rows, of a block]."""
    into.zero_()
    for rows, columns in block_places(blocks, *stack.shape):
        _convert(stack[rows], into[rows, columns], scaling, name)


def _convert(source: Tensor, into: Tensor, scaling: float | Tensor | None, name: str) -> None:
    """`into[...] = (source.float() · scaling)` in into's dtype, tile by tile; refuses values that are not finite.

    The scaling is one for all, or one for each column.
    """
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
            if isinstance(scaling, Tensor):
                tile = tile * scaling[column : column + columns]
            elif scaling is not None:
                tile = tile * scaling
            target = into[row : row + rows, column : column + columns]
            target.copy_(tile)
            if not math.isfinite(target.abs().max().item()):
                dtype = str(into.dtype).removeprefix("torch.")
                text = f"{name} has a value that is not finite in {dtype} after scaling"
                raise AdapterRefused(AdapterFault.NON_FINITE, text)
