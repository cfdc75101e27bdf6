"""How one step's LoRA work is split on CPU: what all layers share, in arrays that the kernels take as they are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from loraserve.kernels import cpu_lora as kernels
from loraserve.kernels.metadata import LoraSegments, LoraTarget

Array = np.ndarray[Any, Any]

SERIAL_WORK = 1 << 16  # multiply-adds below which one thread is faster than waking the others


@dataclass(slots=True)
class StepPlan:
    """One `LoraSegments` object as plain arrays; empty segments and slot −1 have left nothing."""

    slots: Array  # [num_segments] int64, −1 replaced by 0 (none of its triples is kept)
    counts: Array  # [num_segments] triples kept
    tokens: Array  # [num_triples] int32
    weights: Array  # [num_triples] float32
    segment: Array  # [num_triples] int64
    blocks: Array  # [num_blocks, 3] int64: segment, first triple, number of its triples that are taken together
    distinct: bool  # no token appears in two triples


@dataclass(slots=True)
class GroupPlan:
    """The step as one group of targets (one input, side-by-side outputs) sees it, for every layer."""

    storage: Array
    ranks: Array  # [layers, targets, segments] int64
    a_pages: Array  # [layers, targets, segments, pages] int64
    b_pages: Array
    widths: Array  # [targets, 4] int64: page_rows, in, out, first column
    step: StepPlan
    work: list[int]  # [layers] multiply-adds
    largest: list[int]  # [layers] multiply-adds of the largest unit


def plan_step(segments: LoraSegments) -> StepPlan:
    """Convert the segments once for all groups and layers."""
    slots, indptr = segments.slots.numpy(), segments.indptr.numpy()
    counts = np.diff(indptr)
    segment = np.repeat(np.arange(len(slots)), counts)
    keep = slots[segment] >= 0
    tokens = segments.tokens.numpy()[: len(segment)][keep]
    weights = segments.weights.numpy()[: len(segment)][keep]
    return StepPlan(
        np.maximum(slots, 0).astype(np.int64),
        np.where(slots >= 0, counts, 0),
        tokens,
        weights,
        segment[keep],
        _blocks(np.where(slots >= 0, counts, 0)),
        len(np.unique(tokens)) == len(tokens),
    )


def _blocks(counts: Array) -> Array:
    """Cut each segment's triples into blocks of nearly equal size."""
    ends = np.cumsum(counts)
    rows: list[tuple[int, int, int]] = []
    for segment, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        num = -(-count // kernels.BLOCK)
        cuts = [end - count + count * i // num for i in range(num + 1)] if num else []
        rows += [(segment, first, last - first) for first, last in pairwise(cuts)]
    return np.array(rows, np.int64).reshape(-1, 3)


def plan_group(targets: tuple[LoraTarget, ...], step: StepPlan) -> GroupPlan:
    """Gather the page tables and ranks of the step's slots. The targets share one storage and page size."""
    # Row-major whatever the pieces are: another layout is another type to Numba, which would compile for it mid-step.
    ranks = np.stack([target.ranks.numpy()[:, step.slots] for target in targets], 1).astype(np.int64, order="C")
    num_pages = -(-int(ranks.max(initial=1)) // targets[0].page_rows)  # not the tables' width: this step's slots
    a_pages, b_pages = (np.zeros((*ranks.shape, num_pages), np.int64) for _ in range(2))
    for i, target in enumerate(targets):
        a, b = target.a_pages.numpy(), target.b_pages.numpy()
        width = min(num_pages, a.shape[2])
        a_pages[:, i, :, :width] = a[:, step.slots, :width]
        b_pages[:, i, :, :width] = b[:, step.slots, :width]
    widths = np.array([(t.page_rows, t.in_features, t.out_features, t.out_offset) for t in targets], np.int64)
    costs = ranks * (widths[:, 1] + widths[:, 2])[None, :, None]
    largest = np.zeros(len(step.slots), np.int64)
    np.maximum.at(largest, step.blocks[:, 0], step.blocks[:, 2])
    storage = targets[0].storage.numpy()
    return GroupPlan(
        storage,
        ranks,
        a_pages,
        b_pages,
        widths,
        step,
        (costs * step.counts).sum((1, 2)).tolist(),
        (costs * largest).max((1, 2), initial=0).tolist(),
    )


def apply(y: Tensor, x: Tensor, plan: GroupPlan, layer: int, workers: int) -> None:
    """Add the group's deltas of one layer to y. y, x: contiguous float32."""
    step, work = plan.step, plan.work[layer]
    if work and (workers == 1 or work < SERIAL_WORK):
        kernels.apply_units(*_arguments(y, x, plan, layer), 0, len(step.blocks) * len(plan.widths))
    elif work:
        by_unit = step.distinct and plan.largest[layer] * workers <= work
        run_parallel(y, x, plan, layer, by_unit, workers)


def run_parallel(y: Tensor, x: Tensor, plan: GroupPlan, layer: int, by_unit: bool, workers: int) -> None:
    """The triples on several threads, cut by unit or by column. By unit needs distinct tokens."""
    kernel = kernels.apply_units_parallel if by_unit else kernels.apply_columns_parallel
    kernel(*_arguments(y, x, plan, layer), workers)


def _arguments(y: Tensor, x: Tensor, plan: GroupPlan, layer: int) -> tuple[Any, ...]:
    step = plan.step
    tables = (plan.ranks, plan.a_pages, plan.b_pages, plan.widths)
    return (y.numpy(), x.numpy(), plan.storage, step.tokens, step.weights, step.blocks, *tables, layer)


def embed(y: Tensor, ids: Tensor, plan: GroupPlan) -> None:
    """Add the embedding deltas to y. y: contiguous float32.

    On one thread: it happens once per step, and even 2048 tokens of rank 16 take a few milliseconds.
    """
    step = plan.step
    if not plan.work[0]:
        return
    z = np.empty((1, len(step.tokens), plan.a_pages.shape[3] * int(plan.widths[0, 0])), np.float32)
    shared = (plan.storage, step.tokens)
    kernels.embed_shrink(ids.numpy(), *shared, step.weights, step.blocks, plan.ranks, plan.a_pages, plan.widths, z)
    kernels.expand_columns(y.numpy(), *shared, step.blocks, plan.ranks, plan.b_pages, plan.widths, 0, z, 0, 1)
