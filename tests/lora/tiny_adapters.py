"""Small real adapters for the lora room's tests: safetensors files, their specs, and the matrices to compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from loraserve.kernels.metadata import Kind, LoraTargetShape
from loraserve.lora.container import read_header
from loraserve.lora.files import AdapterFolder
from loraserve.lora.pool import LoraPool
from loraserve.lora.spec import AdapterSpec, TargetSpec

HIDDEN, KV, INNER, VOCAB, LAYERS = 32, 16, 48, 100, 3
SHAPES = [
    LoraTargetShape(Kind.Q, HIDDEN, HIDDEN, 0, LAYERS),
    LoraTargetShape(Kind.K, HIDDEN, KV, HIDDEN, LAYERS),
    LoraTargetShape(Kind.V, HIDDEN, KV, HIDDEN + KV, LAYERS),
    LoraTargetShape(Kind.O, HIDDEN, HIDDEN, 0, LAYERS),
    LoraTargetShape(Kind.GATE, HIDDEN, INNER, 0, LAYERS),
    LoraTargetShape(Kind.UP, HIDDEN, INNER, INNER, LAYERS),
    LoraTargetShape(Kind.DOWN, INNER, HIDDEN, 0, LAYERS),
    LoraTargetShape(Kind.EMBED, VOCAB, HIDDEN, 0, 1),
    LoraTargetShape(Kind.LM_HEAD, HIDDEN, VOCAB, 0, 1),
]
WIDTHS = {shape.kind: shape for shape in SHAPES}
LINEAR_KINDS = [shape.kind for shape in SHAPES if shape.num_layers > 1]

Ranks = Mapping[tuple[Kind, int], int]
FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class TinyAdapter:
    """An adapter on disk, and its factors in float32."""

    folder: Path
    spec: AdapterSpec
    factors: dict[tuple[Kind, int], tuple[Tensor, Tensor]]  # A [r, in], s·B transposed [r, out]


def uniform_ranks(rank: int, kinds: Sequence[Kind] = (Kind.Q, Kind.V)) -> dict[tuple[Kind, int], int]:
    """The same rank in every layer of `kinds`."""
    return {(kind, layer): rank for kind in kinds for layer in range(WIDTHS[kind].num_layers)}


def make_adapter(
    folder: Path,
    ranks: Ranks,
    *,
    seed: int = 0,
    scaling: float | Mapping[tuple[Kind, int], float] = 2.0,
    a_dtype: torch.dtype = torch.float32,
    b_dtype: torch.dtype = torch.float32,
) -> TinyAdapter:
    """Write random matrices of these ranks and describe them from the file's own header."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    factors: dict[tuple[Kind, int], tuple[Tensor, Tensor]] = {}
    scalings: dict[tuple[Kind, int], float] = {}
    for (kind, layer), rank in ranks.items():
        shape = WIDTHS[kind]
        a = torch.randn(rank, shape.in_features, generator=generator).to(a_dtype)
        b = torch.randn(shape.out_features, rank, generator=generator).to(b_dtype)
        tensors[f"{kind}.{layer}.a"], tensors[f"{kind}.{layer}.b"] = a, b
        s = scaling if isinstance(scaling, float) else scaling[kind, layer]
        scalings[kind, layer] = s
        factors[kind, layer] = (a.float(), (b.float() * s).T.contiguous())
    save_file(tensors, folder / FILE)
    return TinyAdapter(folder, spec_of(folder, scalings), factors)


def spec_of(folder: Path, scalings: Mapping[tuple[Kind, int], float]) -> AdapterSpec:
    """The spec of a file written by `make_adapter`."""
    refs = {ref.name: ref for ref in read_header(AdapterFolder.at(folder), FILE)}
    targets = [
        TargetSpec(
            str(kind),
            layer,
            refs[f"{kind}.{layer}.a"].shape[0],
            scaling,
            refs[f"{kind}.{layer}.a"],
            refs[f"{kind}.{layer}.b"],
        )
        for (kind, layer), scaling in sorted(scalings.items(), key=lambda item: (item[0][1], str(item[0][0])))
    ]
    return AdapterSpec(tuple(targets), files=(FILE,))


def make_pool(
    capacity_bytes: int,
    *,
    page_rows: int = 4,
    max_slots: int = 8,
    max_rank: int = 64,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[LoraTargetShape] = SHAPES,
) -> LoraPool:
    """A pool on the CPU whose storage is NaN wherever nothing was written."""
    pool = LoraPool(shapes, capacity_bytes, page_rows, max_slots, max_rank, dtype, torch.device("cpu"))
    pool.storage.fill_(math.nan)
    return pool


def read_back(pool: LoraPool, slot: int, kind: Kind, layer: int) -> tuple[Tensor, Tensor] | None:
    """A and B of one module as the tables say, row by row; None where the rank is 0."""
    target = pool.tables.targets.get(kind)
    if target is None or int(target.ranks[layer, slot]) == 0:
        return None
    rank = int(target.ranks[layer, slot])

    def rows(pages: Tensor, width: int) -> Tensor:
        starts = [int(pages[layer, slot, i // target.page_rows]) + i % target.page_rows * width for i in range(rank)]
        return torch.stack([target.storage[start : start + width] for start in starts])

    return rows(target.a_pages, target.in_features), rows(target.b_pages, target.out_features)
