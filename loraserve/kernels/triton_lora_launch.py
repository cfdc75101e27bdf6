"""Launching the LoRA kernels: tiles and rounds of a step, groups of targets, splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from loraserve.kernels import triton_lora
from loraserve.kernels.metadata import LoraSegments, LoraTarget
from loraserve.kernels.triton_configs import (
    AFFINE_COLUMNS,
    AFFINE_WARPS,
    OPTIONS,
    Arch,
    LoraTiles,
    dot_precision,
    lora_tiles,
    power_of_two,
    splits_for,
)

MAX_TARGETS = 3  # of one launch: q, k and v


@dataclass(slots=True)
class LoraStep:
    """What one step's segments become: tiles on the device, and the rounds in which blended tokens are changed."""

    segments: LoraSegments
    tiles: LoraTiles
    table: Tensor  # [num_tiles, 3] int32: slot, first triple, number of triples
    rounds: Tensor | None  # [num_triples] int32; None: no token is in two segments
    num_rounds: int
    scratch: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    @property
    def num_triples(self) -> int:
        """Triples, with those of padding."""
        return self.segments.tokens.shape[0]

    def shrunk(self, splits: int, num_targets: int, rank_cap: int) -> Tensor:
        """Room for `lora_shrink`'s results; calls of one step run one after the other and share it."""
        key = (splits, num_targets, rank_cap)
        if key not in self.scratch:
            size = (splits, num_targets, self.num_triples, rank_cap)
            self.scratch[key] = torch.empty(size, dtype=torch.float32, device=self.table.device)
        return self.scratch[key]


class TargetGroup(NamedTuple):
    """Targets of one launch, filled up to `MAX_TARGETS` with the first: those are never asked for."""

    targets: tuple[LoraTarget, ...]
    filled: tuple[LoraTarget, ...]
    rank_cap: int  # no slot's rank is above it

    @staticmethod
    def of(targets: Sequence[LoraTarget]) -> TargetGroup:
        """A group of one to three targets in one storage."""
        cap = max(target.a_pages.shape[2] * target.page_rows for target in targets)
        filled = (*targets, *[targets[0]] * (MAX_TARGETS - len(targets)))
        return TargetGroup(tuple(targets), filled, power_of_two(cap))


def plan_step(segments: LoraSegments, arch: Arch) -> LoraStep:
    """Tiles and rounds of a step, made on the device; waits for it only if the host does not know about blends."""
    device = segments.tokens.device
    num_segments, num_triples = segments.slots.shape[0], segments.tokens.shape[0]
    tiles = lora_tiles(arch, num_triples, segments.max_segment)
    # Each segment begins a tile of its own, and every further tile of it is a full one.
    num_tiles = num_segments + num_triples // tiles.block_m
    table = torch.empty((num_tiles, 3), dtype=torch.int32, device=device)
    triton_lora.plan_tiles[(-(-num_tiles // 64),)](
        segments.indptr, segments.slots, table, num_segments, num_tiles,
        BLOCK_M=tiles.block_m, BLOCK_T=64, BLOCK_S=64, num_warps=8, **OPTIONS,
    )  # fmt: skip
    rounds, num_rounds = None, segments.max_per_token
    if num_rounds is None or num_rounds > 1:
        rounds = rounds_of(segments.tokens)
        if num_rounds is None:
            num_rounds = int(rounds.max()) + 1 if num_triples else 1
        if num_rounds == 1:
            rounds = None
    return LoraStep(segments, tiles, table, rounds, num_rounds)


def rounds_of(tokens: Tensor) -> Tensor:
    """How many earlier triples have the same token. tokens: [num_triples] int32 → [num_triples] int32."""
    order = tokens.argsort(stable=True)
    ordered = tokens[order]
    seen = torch.arange(len(tokens), device=tokens.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(tokens).scatter_(0, order, seen.to(tokens.dtype))


def apply(
    y: Tensor, x: Tensor, targets: tuple[LoraTarget, ...], layer: int, step: LoraStep, wanted_programs: int
) -> None:
    """Shrink and expand for every group of targets."""
    for group in groups_of(targets):
        splits = _shrink_splits(step, group, wanted_programs)
        shrunk = step.shrunk(splits, len(group.targets), group.rank_cap)
        shrink(shrunk, x, group, layer, step, splits)
        expand(y, shrunk, group, layer, step, splits)


def embed(y: Tensor, ids: Tensor, target: LoraTarget, step: LoraStep) -> None:
    """Gather columns of A, then expand."""
    group, tiles, segments = TargetGroup.of((target,)), step.tiles, step.segments
    shrunk = step.shrunk(1, 1, group.rank_cap)
    triton_lora.lora_gather[(step.table.shape[0],)](
        ids, shrunk, target.storage, step.table, segments.tokens, target.a_pages, target.ranks,
        step.num_triples, target.a_pages.shape[2], group.rank_cap, target.in_features,
        PAGE_ROWS=target.page_rows, BLOCK_M=tiles.block_m, BLOCK_R=tiles.block_r, num_warps=4, **OPTIONS,
    )  # fmt: skip
    expand(y, shrunk, group, 0, step, 1)


def shrink(out: Tensor, x: Tensor, group: TargetGroup, layer: int, step: LoraStep, splits: int) -> None:
    """out: [splits, targets, num_triples, rank_cap] fp32; x: [n, in]."""
    first, tiles, targets = group.targets[0], step.tiles, group.filled
    triton_lora.lora_shrink[(step.table.shape[0], splits, len(group.targets))](
        x, out, first.storage, step.table, step.segments.tokens,
        *[t.a_pages for t in targets], *[t.ranks for t in targets],
        layer, step.num_triples, first.ranks.shape[1], *[t.a_pages.shape[2] for t in targets],
        group.rank_cap, first.in_features,
        NUM_TARGETS=len(group.targets), PAGE_ROWS=first.page_rows,
        ALIGN=math.gcd(16, first.in_features, *[t.alignment for t in group.targets]),
        BLOCK_M=tiles.block_m, BLOCK_R=tiles.block_r, BLOCK_K=tiles.block_k, PRECISION=dot_precision(x),
        num_warps=tiles.shrink_warps, num_stages=tiles.shrink_stages, **OPTIONS,
    )  # fmt: skip


def expand(y: Tensor, shrunk: Tensor, group: TargetGroup, layer: int, step: LoraStep, splits: int) -> None:
    """y: [n, width] in place; shrunk: [splits, targets, num_triples, rank_cap] fp32."""
    first, tiles, targets, segments = group.targets[0], step.tiles, group.filled, step.segments
    blocks = [-(-target.out_features // tiles.block_n) for target in group.targets]
    for this_round in range(step.num_rounds):
        triton_lora.lora_expand[(step.table.shape[0], sum(blocks))](
            y, shrunk, first.storage, step.table, segments.tokens, segments.weights,
            segments.tokens if step.rounds is None else step.rounds,
            *[t.b_pages for t in targets], *[t.ranks for t in targets],
            layer, step.num_triples, this_round, first.ranks.shape[1], *[t.b_pages.shape[2] for t in targets],
            group.rank_cap, y.shape[1],
            *[t.out_features for t in targets], *[t.out_offset for t in targets], blocks[0], sum(blocks[:2]), splits,
            NUM_TARGETS=len(group.targets), PAGE_ROWS=first.page_rows,
            ALIGN=math.gcd(16, *[math.gcd(t.alignment, t.out_features) for t in group.targets]),
            ALIGN_Y=math.gcd(16, *[t.out_offset for t in group.targets]), ROUNDS=step.rounds is not None,
            BLOCK_M=tiles.block_m, BLOCK_R=tiles.block_r, BLOCK_N=tiles.block_n, PRECISION=dot_precision(y),
            num_warps=tiles.expand_warps, num_stages=tiles.expand_stages, **OPTIONS,
        )  # fmt: skip


def affine(y: Tensor, targets: tuple[LoraTarget, ...], layer: int, step: LoraStep) -> None:
    """Gain and shift of every target that has any."""
    base, tiles, segments = y if step.rounds is None else y.clone(), step.tiles, step.segments
    for target in targets:
        if target.affine is None:
            continue
        for this_round in range(step.num_rounds):
            triton_lora.lora_affine[(step.table.shape[0], -(-target.out_features // AFFINE_COLUMNS))](
                y, base, target.storage, step.table, segments.tokens, segments.weights,
                segments.tokens if step.rounds is None else step.rounds,
                target.b_pages, target.ranks, target.affine.view(torch.uint8),
                layer, this_round, target.ranks.shape[1], target.b_pages.shape[2], y.shape[1],
                target.out_features, target.out_offset,
                PAGE_ROWS=target.page_rows, ALIGN=math.gcd(16, target.alignment, target.out_features),
                ALIGN_Y=math.gcd(16, target.out_offset), ROUNDS=step.rounds is not None,
                BLOCK_M=tiles.block_m, BLOCK_N=AFFINE_COLUMNS, num_warps=AFFINE_WARPS, **OPTIONS,
            )  # fmt: skip


def groups_of(targets: tuple[LoraTarget, ...]) -> list[TargetGroup]:
    """Runs of targets that one launch can take: up to three, one storage, one size of page; almost always one run."""
    groups = []
    for _, run in groupby(targets, key=lambda t: (id(t.storage), t.page_rows, t.ranks.shape[1])):
        alike = list(run)
        groups += [TargetGroup.of(alike[at : at + MAX_TARGETS]) for at in range(0, len(alike), MAX_TARGETS)]
    return groups


def _shrink_splits(step: LoraStep, group: TargetGroup, wanted_programs: int) -> int:
    programs = step.table.shape[0] * len(group.targets)
    most = group.targets[0].in_features // (2 * step.tiles.block_k)
    return splits_for(programs, wanted_programs, max(1, most))
