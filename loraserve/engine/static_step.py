"""One decode step in arrays that stay where they are: what a captured graph reads, filled anew before each replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraserve.kernels.metadata import AttentionBatch, LoraSegments
from loraserve.kernels.transfer import has_copies_behind
from loraserve.models.forward_batch import ForwardBatch
from loraserve.scheduler.batch import ModelWorkerBatch

Arrays = dict[str, NDArray[np.generic]]

_ALIGNMENT = 16  # bytes; vector loads of the kernels start there


class LoraShape(NamedTuple):
    """What a graph can hold of adapters: whether its tokens have any, and how many at most one token has."""

    max_per_token: int
    affine: bool


class _Field(NamedTuple):
    """One array: per row (`rows`), plus fixed elements."""

    dtype: type[np.generic]
    rows: int
    extra: int


def _fields(blend: int) -> dict[str, _Field]:
    return {
        "input_ids": _Field(np.int64, 1, 0),
        "positions": _Field(np.int64, 1, 0),
        "context_lens": _Field(np.int64, 1, 0),
        "out_loc": _Field(np.int32, 1, 0),
        "req_rows": _Field(np.int32, 1, 0),
        "seq_lens": _Field(np.int32, 1, 0),
        "tokens": _Field(np.int32, blend, 0),
        "weights": _Field(np.float32, blend, 0),
        "slots": _Field(np.int32, blend, 0),
        "indptr": _Field(np.int32, blend, 1),
    }


class _Staging:
    """One step's arrays on the host, on their way to the device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._is_pinned = has_copies_behind(device)
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        self.arrays: Arrays = {}
        self._sent: torch.cuda.Event | None = None

    def writable(self) -> Arrays:
        """The arrays, once the last copy out of them is through."""
        if self._sent is not None:
            self._sent.synchronize()
        return self.arrays

    def send(self, into: Tensor) -> None:
        """Queue a copy of everything."""
        into.copy_(self.memory, non_blocking=True)
        if self._is_pinned:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()


class StaticStep:
    """Room for decode steps of up to `max_rows` sequences; smaller steps use the beginnings of the same arrays.

    All arrays lie in one piece of memory on each side, so that a step is one copy. Rows past the step's own compute
    on a spare location of the cache and a spare row of the level-1 table, and belong to no adapter.
    """

    def __init__(
        self, max_rows: int, max_blend: int, locations: Tensor, spare_row: int, spare_location: int, max_context: int
    ) -> None:
        self.max_rows = max_rows
        self.max_blend = max_blend
        self._locations = locations
        self._spare = (spare_row, spare_location)
        self._max_context = max_context
        device = locations.device
        sizes, offsets, total = _fields(max_blend), {}, 0
        for name, (dtype, rows, extra) in sizes.items():
            offsets[name] = total
            total += -(-(rows * max_rows + extra) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._tensors: dict[str, Tensor] = {}
        # Two, for the next step is written while the copy of this one may still wait for the device to come to it.
        self._staging = (_Staging(total, device), _Staging(total, device))
        for name, (dtype, rows, extra) in sizes.items():
            begin = offsets[name]
            end = begin + (rows * max_rows + extra) * np.dtype(dtype).itemsize
            for staging in self._staging:
                staging.arrays[name] = staging.memory[begin:end].numpy().view(dtype)
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            self._tensors[name] = self._device[begin:end].view(kind)
        self._q_indptr = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, dtype=torch.int64, device=device)
        for staging in self._staging:
            self._pad(staging.arrays, 0, max_rows, 0, 0)
        self._staging[0].send(self._device)

    def input_ids(self, size: int) -> Tensor:
        """The device's input ids of a step of `size` sequences, [size] int64."""
        return self._tensors["input_ids"][:size]

    def forward_batch(self, size: int, lora: LoraShape | None) -> ForwardBatch:
        """The device's tensors as a step of `size` sequences, all sampled."""
        first = {name: tensor[:size] for name, tensor in self._tensors.items()}
        segments = None
        if lora is not None:
            count = size * lora.max_per_token
            segments = LoraSegments(
                tokens=self._tensors["tokens"][:count],
                weights=self._tensors["weights"][:count],
                slots=self._tensors["slots"][:count],
                indptr=self._tensors["indptr"][: count + 1],
                max_segment=size,
                affine=lora.affine,
                max_per_token=lora.max_per_token,
            )
        return ForwardBatch(
            input_ids=first["input_ids"],
            positions=first["positions"],
            out_loc=first["out_loc"],
            context_lens=first["context_lens"],
            attention=AttentionBatch(
                req_rows=first["req_rows"],
                q_indptr=self._q_indptr[: size + 1],
                seq_lens=first["seq_lens"],
                locations=self._locations,
                num_decode=size,
                max_seq_len=self._max_context,
                max_q_len=1,
            ),
            logits_rows=self._rows[:size],
            lora=segments,
            lora_logits=segments,
        )

    def fill(self, batch: ModelWorkerBatch, size: int, segments: HostSegments | None) -> None:
        """Write a step's own rows and padding up to `size` rows, and send all of it to the device."""
        self._staging = staging, _ = self._staging[::-1]
        arrays, count = staging.writable(), len(batch.requests)
        for name in ("input_ids", "positions", "context_lens", "seq_lens", "out_loc", "req_rows"):
            arrays[name][:count] = getattr(batch, name)
        triples, groups = 0, 0
        if segments is not None:
            triples, groups = len(segments.tokens), len(segments.slots)
            arrays["tokens"][:triples] = segments.tokens
            arrays["weights"][:triples] = segments.weights
            arrays["slots"][:groups] = segments.slots
            arrays["indptr"][: groups + 1] = segments.indptr
        self._pad(arrays, count, size, triples, groups)
        staging.send(self._device)

    def _pad(self, arrays: Arrays, count: int, size: int, triples: int, groups: int) -> None:
        """Make rows from `count` on, and whatever of the segments is past their ends, harmless."""
        spare_row, spare_location = self._spare
        padding = {"input_ids": 0, "positions": 0, "context_lens": 1, "seq_lens": 1}
        padding |= {"out_loc": spare_location, "req_rows": spare_row}
        for name, value in padding.items():
            arrays[name][count:size] = value
        # A number that is no row: rounds of a blend are counted over all triples, and these share none with the real.
        arrays["tokens"][triples:] = np.iinfo(np.int32).max
        arrays["weights"][triples:] = 0.0
        arrays["slots"][groups:] = -1
        arrays["indptr"][groups + 1 :] = triples
        arrays["indptr"][0] = 0


class HostSegments(NamedTuple):
    """`LoraSegments` of a step before they go to the device."""

    tokens: NDArray[np.integer]
    weights: NDArray[np.floating]
    slots: NDArray[np.integer]
    indptr: NDArray[np.integer]


def decode_segments(slots_per_row: Sequence[Sequence[tuple[int, float]]]) -> HostSegments | None:
    """Segments of rows of one token each; slots named twice in a row count once, weights of 0 are left out."""
    from loraserve.lora.batch import build_segments

    indptr = np.arange(len(slots_per_row) + 1, dtype=np.int32)
    made = build_segments(slots_per_row, indptr, torch.device("cpu"))
    if made is None:
        return None
    return HostSegments(made.tokens.numpy(), made.weights.numpy(), made.slots.numpy(), made.indptr.numpy())
