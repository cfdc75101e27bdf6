"""Sequences and their adapters → `LoraSegments`: which tokens of a step go through which slots, with which weight."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import torch
from numpy.typing import NDArray

from loraserve.kernels.metadata import LoraSegments
from loraserve.kernels.transfer import to_device

SlotWeights = Sequence[tuple[int, float]]  # (slot, weight) of every adapter of one sequence; empty: the base


def build_segments(
    slots_per_sequence: Sequence[SlotWeights],
    q_indptr: NDArray[np.integer],
    device: torch.device,
    affine_slots: Set[int] | None = None,
    skips: Sequence[Sequence[int]] | None = None,
) -> LoraSegments | None:
    """Segments over the concatenated tokens of a step; None when no token has an adapter.

    `q_indptr` [num_sequences + 1]: sequence i owns the tokens q_indptr[i] .. q_indptr[i + 1]. A slot named twice in one
    sequence counts once, with the sum of its weights; weights that are (or sum to) zero are left out. Segments are
    sorted by slot, and tokens ascend within each. `affine_slots` are the slots with gain and shift rows; None: unknown.
    `skips` says, for every pair of `slots_per_sequence`, how many of the sequence's first tokens it leaves alone.
    Raises `ValueError` on a negative slot or lengths that do not match.
    """
    if len(q_indptr) != len(slots_per_sequence) + 1:
        raise ValueError(f"{len(slots_per_sequence)} sequences need as many bounds plus one, got {len(q_indptr)}")
    pairs = [(slot, i, weight) for i, adapters in enumerate(slots_per_sequence) for slot, weight in adapters]
    if not pairs:
        return None
    skipped = [0] * len(pairs) if skips is None else [count for sequence in skips for count in sequence]
    if len(skipped) != len(pairs):
        raise ValueError(f"{len(pairs)} slots need as many skips, got {len(skipped)}")
    slots, sequences, weights, skip = _merged(
        np.array([slot for slot, _, _ in pairs], np.int64),
        np.array([i for _, i, _ in pairs], np.int64),
        np.array([weight for _, _, weight in pairs], np.float64),
        np.array(skipped, np.int64),
    )
    starts = q_indptr.astype(np.int64)
    firsts_of = starts[sequences] + skip
    lengths = starts[sequences + 1] - firsts_of
    kept = (weights != 0) & (lengths > 0)
    slots, weights, firsts_of, lengths = slots[kept], weights[kept], firsts_of[kept], lengths[kept]
    if len(slots) == 0:
        return None
    if slots[0] < 0:
        raise ValueError(f"slot {slots[0]} is not a slot of the pool")
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1]) + np.repeat(firsts_of - (ends - lengths), lengths)
    firsts = np.flatnonzero(np.diff(slots, prepend=-1))
    indptr = np.concatenate(([0], ends))[np.append(firsts, len(slots))]

    def put(array: NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
        return to_device(array.astype(dtype), device)

    return LoraSegments(
        tokens=put(tokens, np.int32),
        weights=put(np.repeat(weights, lengths), np.float32),
        slots=put(slots[firsts], np.int32),
        indptr=put(indptr, np.int32),
        max_segment=int(np.diff(indptr).max()),
        affine=affine_slots is None or not affine_slots.isdisjoint(slots.tolist()),
        max_per_token=int(np.bincount(sequences[kept]).max()),
    )


def build_logits_segments(
    slots_per_sequence: Sequence[SlotWeights], rows_per_sequence: NDArray[np.generic], device: torch.device
) -> LoraSegments | None:
    """Segments over the gathered rows whose logits are wanted; None when no row has an adapter.

    `rows_per_sequence` [num_sequences]: how many rows of each sequence were gathered, in order; a bool array says one
    or none (the last token of the sequences that are sampled).
    """
    indptr = np.concatenate(([0], np.cumsum(rows_per_sequence.astype(np.int64))))
    return build_segments(slots_per_sequence, indptr, device)


def _merged(
    slots: NDArray[np.int64], sequences: NDArray[np.int64], weights: NDArray[np.float64], skips: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Pairs sorted by (slot, sequence), equal ones added up; those skip alike, being the same adapter's."""
    order = np.lexsort((sequences, slots))
    slots, sequences, weights, skips = slots[order], sequences[order], weights[order], skips[order]
    changed = (np.diff(slots, prepend=slots[0] - 1) != 0) | (np.diff(sequences, prepend=-1) != 0)
    firsts = np.flatnonzero(changed)
    return slots[firsts], sequences[firsts], np.add.reduceat(weights, firsts), skips[firsts]
