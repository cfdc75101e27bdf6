"""How one step's LoRA work is split on CPU: what all layers share, in arrays that the kernels take as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraserve.kernels import cpu_lora as kernels
from loraserve.kernels.metadata import LoraSegments, LoraTarget

Array = np.ndarray[Any, Any]

# A segment is multiplied by torch if it has many tokens of a high rank; below, the fused kernel needs half the time.
GEMM_TOKENS, GEMM_RANK, GEMM_SIZE = 64, 32, 4096  # tokens, rank, tokens × rank
SERIAL_WORK = 1 << 16  # multiply-adds below which one thread is faster than waking the others


@dataclass(slots=True)
class GemmSegment:
    """A prefill-shaped segment."""

    segment: int  # its place in the step's segments
    rows: Tensor  # [num] int64 token rows
    first: int | None  # the first of the rows, if they follow each other
    weights: Tensor | None  # [num, 1], None if all are 1


@dataclass(slots=True)
class StepPlan:
    """One `LoraSegments` object as plain arrays; empty segments and slot −1 have left nothing."""

    slots: Array  # [num_segments] int64, −1 replaced by 0 (none of its triples is kept)
    counts: Array  # [num_segments] triples kept
    tokens: Array  # [num_triples] int32
    weights: Array  # [num_triples] float32
    segment: Array  # [num_triples] int64
    distinct: bool  # no token appears in two triples


@dataclass(slots=True)
class GroupPlan:
    """The step as one group of targets (one input, side-by-side outputs) sees it, for every layer."""

    storage: Array
    ranks: Array  # [layers, targets, segments] int64
    a_pages: Array  # [layers, targets, segments, pages] int64
    b_pages: Array
    widths: Array  # [targets, 4] int64: page_rows, in, out, first column
    fused: StepPlan  # the triples for the fused kernel
    gemms: list[GemmSegment]  # the segments for torch
    work: list[int]  # [layers] multiply-adds of the fused triples
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
        len(np.unique(tokens)) == len(tokens),
    )


def plan_group(targets: tuple[LoraTarget, ...], step: StepPlan, *, allow_gemm: bool = True) -> GroupPlan:
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
    fused, gemms = _split(step, ranks.max((0, 1), initial=0)) if allow_gemm else (step, [])
    widths = np.array([(t.page_rows, t.in_features, t.out_features, t.out_offset) for t in targets], np.int64)
    costs = ranks * (widths[:, 1] + widths[:, 2])[None, :, None]
    counts = np.bincount(fused.segment, minlength=len(step.slots))
    return GroupPlan(
        targets[0].storage.numpy(),
        ranks,
        a_pages,
        b_pages,
        widths,
        fused,
        gemms,
        (costs * counts).sum((1, 2)).tolist(),
        (costs * (counts > 0)).max((1, 2), initial=0).tolist(),
    )


def _split(step: StepPlan, ranks: Array) -> tuple[StepPlan, list[GemmSegment]]:
    """Take the segments that are worth a GEMM out of the fused triples. ranks: [segments] highest over the layers."""
    by_gemm = (step.counts >= GEMM_TOKENS) & (ranks >= GEMM_RANK) & (step.counts * ranks >= GEMM_SIZE)
    if not by_gemm.any():
        return step, []
    gemms = [
        _gemm_segment(index, step.tokens[step.segment == index], step.weights[step.segment == index])
        for index in np.flatnonzero(by_gemm).tolist()
    ]
    keep = ~by_gemm[step.segment]
    rest = replace(step, tokens=step.tokens[keep], weights=step.weights[keep], segment=step.segment[keep])
    return rest, gemms


def _gemm_segment(index: int, tokens: Array, scale: Array) -> GemmSegment:
    rows = tokens.astype(np.int64)
    consecutive = bool(np.all(np.diff(rows) == 1))
    return GemmSegment(
        index,
        torch.from_numpy(rows),
        int(rows[0]) if consecutive else None,
        None if np.all(scale == 1) else torch.from_numpy(scale.copy())[:, None],
    )


def apply(y: Tensor, x: Tensor, plan: GroupPlan, layer: int, workers: int) -> None:
    """Add the group's deltas of one layer to y. y, x: contiguous float32."""
    step, work = plan.fused, plan.work[layer]
    if work and (workers == 1 or work < SERIAL_WORK):
        kernels.apply_units(*_arguments(y, x, plan, layer), 0, len(step.tokens) * len(plan.widths))
    elif work:
        by_unit = step.distinct and plan.largest[layer] * workers <= work
        run_parallel(y, x, plan, layer, by_unit, workers)
    for gemm in plan.gemms:
        _apply_gemm(y, x, plan, layer, gemm)


def run_parallel(y: Tensor, x: Tensor, plan: GroupPlan, layer: int, by_unit: bool, workers: int) -> None:
    """The fused triples on several threads, cut by unit or by column. By unit needs distinct tokens."""
    kernel = kernels.apply_units_parallel if by_unit else kernels.apply_columns_parallel
    kernel(*_arguments(y, x, plan, layer), workers)


def _arguments(y: Tensor, x: Tensor, plan: GroupPlan, layer: int) -> tuple[Any, ...]:
    step = plan.fused
    tables = (plan.ranks, plan.a_pages, plan.b_pages, plan.widths)
    return (y.numpy(), x.numpy(), plan.storage, step.tokens, step.weights, step.segment, *tables, layer)


def _apply_gemm(y: Tensor, x: Tensor, plan: GroupPlan, layer: int, gemm: GemmSegment) -> None:
    ranks = plan.ranks[layer, :, gemm.segment].tolist()
    if not any(ranks):
        return
    num = len(gemm.rows)
    picked = x[gemm.rows] if gemm.first is None else x[gemm.first : gemm.first + num]
    storage = torch.from_numpy(plan.storage)
    for target, rank in enumerate(ranks):
        if rank == 0:
            continue
        page_rows, in_width, out_width, column = plan.widths[target].tolist()
        a = rank_rows(storage, plan.a_pages[layer, target, gemm.segment], rank, page_rows, in_width)
        b = rank_rows(storage, plan.b_pages[layer, target, gemm.segment], rank, page_rows, out_width)
        z = torch.mm(picked, a.t())
        if gemm.weights is not None:
            z *= gemm.weights
        if gemm.first is None:
            y[:, column : column + out_width].index_add_(0, gemm.rows, torch.mm(z, b))
        else:
            y[gemm.first : gemm.first + num, column : column + out_width].addmm_(z, b)


def rank_rows(storage: Tensor, pages: Array, rank: int, page_rows: int, width: int) -> Tensor:
    """The first `rank` rows of a slot, [rank, width]: a view where its pages follow each other, else a copy."""
    page = page_rows * width
    num_pages = -(-rank // page_rows)
    starts = pages[:num_pages]
    if num_pages == 1 or np.all(np.diff(starts) == page):
        return storage[int(starts[0]) : int(starts[0]) + rank * width].view(rank, width)
    pieces = [storage[at : at + min(page, rank * width - i * page)] for i, at in enumerate(starts.tolist())]
    return torch.cat(pieces).view(rank, width)


def embed(y: Tensor, ids: Tensor, plan: GroupPlan) -> None:
    """Add the embedding deltas to y. y: contiguous float32; the plan's step has no GEMM segments.

    On one thread: it happens once per step, and even 2048 tokens of rank 16 take a few milliseconds.
    """
    step = plan.fused
    if not plan.work[0]:
        return
    z = np.empty((len(step.tokens), 1, plan.a_pages.shape[3] * int(plan.widths[0, 0])), np.float32)
    shared = (plan.storage, step.tokens)
    kernels.embed_shrink(ids.numpy(), *shared, step.weights, step.segment, plan.ranks, plan.a_pages, plan.widths, z)
    kernels.expand_columns(y.numpy(), *shared, step.segment, plan.ranks, plan.b_pages, plan.widths, 0, z, 0, 1)
