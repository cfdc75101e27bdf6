"""Segments of a step against a loop over tokens that says the same thing slowly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.kernels.metadata import LoraSegments
from loraserve.lora.batch import build_logits_segments, build_segments

CPU = torch.device("cpu")
Slots = Sequence[Sequence[tuple[int, float]]]


def naive(slots: Slots, lengths: Sequence[int]) -> dict[int, dict[int, float]]:
    """slot → token → weight."""
    found: dict[int, dict[int, float]] = {}
    token = 0
    for adapters, length in zip(slots, lengths, strict=True):
        summed: dict[int, float] = {}
        for slot, weight in adapters:
            summed[slot] = summed.get(slot, 0.0) + weight
        for _ in range(length):
            for slot, weight in summed.items():
                if weight != 0:
                    found.setdefault(slot, {})[token] = weight
            token += 1
    return found


def as_mapping(segments: LoraSegments | None) -> dict[int, dict[int, float]]:
    if segments is None:
        return {}
    slots, indptr = segments.slots.tolist(), segments.indptr.tolist()
    assert indptr[0] == 0
    assert indptr[-1] == len(segments.tokens) == len(segments.weights)
    assert slots == sorted(set(slots)), "segments are sorted by slot, one for each"
    assert segments.max_segment == max(b - a for a, b in pairwise(indptr))
    found = {}
    for g, slot in enumerate(slots):
        tokens = segments.tokens[indptr[g] : indptr[g + 1]].tolist()
        assert tokens
        assert tokens == sorted(set(tokens)), "a token is at most once in a segment"
        found[slot] = dict(zip(tokens, segments.weights[indptr[g] : indptr[g + 1]].tolist(), strict=True))
    return found


def indptr_of(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


WEIGHTS = st.sampled_from([1.0, 0.5, -1.0, 0.0, 2.25])
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.tuples(st.integers(0, 4), WEIGHTS), max_size=3)), max_size=9
)


@settings(max_examples=200, deadline=None)
@given(SEQUENCES)
def test_segments_say_what_the_loop_says(sequences: list[tuple[int, list[tuple[int, float]]]]) -> None:
    lengths = [length for length, _ in sequences]
    slots = [adapters for _, adapters in sequences]
    assert as_mapping(build_segments(slots, indptr_of(lengths), CPU)) == naive(slots, lengths)


def test_dtypes_are_those_of_the_contract() -> None:
    segments = build_segments([[(2, 1.0)], [], [(0, 0.5), (2, 1.0)]], indptr_of([1, 4, 3]), CPU)
    assert segments is not None
    assert (segments.tokens.dtype, segments.slots.dtype, segments.indptr.dtype) == (torch.int32,) * 3
    assert segments.weights.dtype == torch.float32
    assert segments.slots.tolist() == [0, 2]
    assert segments.tokens.tolist() == [5, 6, 7, 0, 5, 6, 7]
    assert segments.weights.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert segments.indptr.tolist() == [0, 3, 7]
    assert segments.max_segment == 4


@pytest.mark.parametrize(
    ("slots", "lengths"),
    [([], []), ([[]], [3]), ([[(1, 0.0)]], [3]), ([[(1, 1.0), (1, -1.0)]], [3]), ([[(1, 1.0)]], [0])],
    ids=["no sequences", "base", "weight zero", "weights cancel", "no tokens"],
)
def test_nothing_to_do_is_none(slots: Slots, lengths: list[int]) -> None:
    assert build_segments(slots, indptr_of(lengths), CPU) is None


def test_the_same_adapter_twice_in_a_blend_is_added_up() -> None:
    segments = build_segments([[(3, 0.25), (1, 1.0), (3, 0.5)]], indptr_of([2]), CPU)
    assert as_mapping(segments) == {1: {0: 1.0, 1: 1.0}, 3: {0: 0.75, 1: 0.75}}


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="bounds"):
        build_segments([[(0, 1.0)]], indptr_of([1, 2]), CPU)
    with pytest.raises(ValueError, match="slot -1"):
        build_segments([[(-1, 1.0)]], indptr_of([1]), CPU)


def test_logits_rows() -> None:
    slots: Slots = [[(1, 1.0)], [(0, 1.0)], [], [(1, 2.0)]]
    sampled = build_logits_segments(slots, np.array([True, False, True, True]), CPU)
    assert as_mapping(sampled) == {1: {0: 1.0, 2: 2.0}}
    several = build_logits_segments(slots, np.array([0, 2, 1, 3]), CPU)
    assert as_mapping(several) == {0: {0: 1.0, 1: 1.0}, 1: {3: 2.0, 4: 2.0, 5: 2.0}}
    assert build_logits_segments(slots, np.zeros(4, bool), CPU) is None


def test_skipped_tokens_are_left_to_the_base() -> None:
    slots = [[(2, 1.0)], [(2, 1.0), (0, 0.5)], [(2, 1.0)], []]
    segments = build_segments(slots, indptr_of([3, 4, 2, 2]), CPU, skips=[[1], [0, 3], [2], []])
    assert as_mapping(segments) == {0: {6: 0.5}, 2: {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}}
    # More than a sequence has in this step: it begins later.
    assert build_segments([[(0, 1.0)]], indptr_of([3]), CPU, skips=[[7]]) is None
    with pytest.raises(ValueError, match="skips"):
        build_segments([[(0, 1.0)]], indptr_of([3]), CPU, skips=[[]])


def test_slots_that_scale_and_shift_mark_the_step() -> None:
    for slots, affine in (({3}, True), ({1, 2}, False), (set(), False)):
        segments = build_segments([[(0, 1.0)], [(3, 1.0)]], indptr_of([1, 1]), CPU, slots)
        assert segments is not None
        assert segments.affine is affine
