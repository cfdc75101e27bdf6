"""Gain and shift of the base's output on CPU, float32: what DoRA and trained biases need besides A and B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange
from torch import Tensor

from loraserve.kernels.cpu_lora_plan import StepPlan
from loraserve.kernels.cpu_math import compiled, compiled_parallel
from loraserve.kernels.metadata import LoraTarget

Array = np.ndarray[Any, Any]

_SERIAL_WORK = 1 << 16  # elements of y below which one thread is faster than waking the others


@dataclass(slots=True)
class AffinePlan:
    """The step's gain and shift rows as one group of targets sees them, for every layer."""

    storage: Array
    rows: Array  # [layers, targets, segments, 2] int64 element offsets of gain and shift, −1 where there are none
    widths: Array  # [targets, 2] int64: out, first column
    step: StepPlan
    work: list[int]  # [layers] elements of y that change


def plan_affine(targets: tuple[LoraTarget, ...], step: StepPlan) -> AffinePlan | None:
    """Find the rows of the step's slots; None if no slot has any. The targets share one storage."""
    num_layers = targets[0].ranks.shape[0]
    rows = np.full((num_layers, len(targets), len(step.slots), 2), -1, np.int64)
    for i, target in enumerate(targets):
        if target.affine is None:
            continue
        layers, places = np.nonzero(target.affine.numpy()[:, step.slots])
        slots = step.slots[places]
        ranks = target.ranks.numpy()[layers, slots].astype(np.int64)
        pages = target.b_pages.numpy()
        for which in range(2):
            page, row = np.divmod(ranks + which, target.page_rows)
            rows[layers, i, places, which] = pages[layers, slots, page] + row * target.out_features
    counts = np.bincount(step.segment, minlength=len(step.slots))
    widths = np.array([(target.out_features, target.out_offset) for target in targets], np.int64)
    work = ((rows[..., 0] >= 0) * counts * widths[None, :, :1]).sum((1, 2)).tolist()
    if not any(work):
        return None
    return AffinePlan(targets[0].storage.numpy(), rows, widths, step, work)


def apply(y: Tensor, plan: AffinePlan, layer: int, workers: int) -> None:
    """Change y in place by one layer's gains and shifts. y: contiguous float32."""
    work = plan.work[layer]
    if not work:
        return
    step = plan.step
    # A token of several segments must see the base's output in each; otherwise y may change as it is read.
    before = y if step.distinct else y.clone()
    arrays = (y.numpy(), before.numpy(), plan.storage, step.tokens, step.weights, step.segment, plan.rows, plan.widths)
    if workers == 1 or work < _SERIAL_WORK or not step.distinct:
        affine_rows(*arrays, layer, 0, len(step.tokens))
    else:
        affine_parallel(*arrays, layer, workers)


@compiled
def affine_rows(
    y: Array,
    before: Array,
    storage: Array,
    tokens: Array,
    weights: Array,
    segment: Array,
    rows: Array,
    widths: Array,
    layer: int,
    begin: int,
    end: int,
) -> None:
    """y[t] += weight · (before[t] · gain + shift) for triples [begin, end) and all targets."""
    for triple in range(begin, end):
        token, group, weight = tokens[triple], segment[triple], weights[triple]
        for target in range(widths.shape[0]):
            at, then = rows[layer, target, group]
            if at >= 0:
                width, column = widths[target]
                gain, shift = storage[at : at + width], storage[then : then + width]
                base, out = before[token, column : column + width], y[token, column : column + width]
                for j in range(width):
                    out[j] += weight * (base[j] * gain[j] + shift[j])


@compiled_parallel
def affine_parallel(
    y: Array,
    before: Array,
    storage: Array,
    tokens: Array,
    weights: Array,
    segment: Array,
    rows: Array,
    widths: Array,
    layer: int,
    workers: int,
) -> None:
    num = tokens.shape[0]
    for worker in prange(workers):
        begin, end = num * worker // workers, num * (worker + 1) // workers
        affine_rows(y, before, storage, tokens, weights, segment, rows, widths, layer, begin, end)
