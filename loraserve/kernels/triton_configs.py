"""Block sizes, warps and pipeline stages of the Triton kernels, by architecture and class of shape.

A committed table instead of tuning at serving time: the same request runs the same code on every start. Figures are
chosen by the resources that the compiled kernels take (registers without spills, shared memory); `benchmarks/gpu.py`
measures them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraserve.compat import StrEnum


class Arch(StrEnum):
    """Generations that differ in matrix instructions and on-chip memory; others take their nearest elder's row."""

    SM80 = "sm80"  # also 8.6 and 8.9, so within their 99 KiB of shared memory
    SM90 = "sm90"
    SM100 = "sm100"
    GFX942 = "gfx942"


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """Of the LoRA kernels: rows are triples, `block_r` ranks, `block_k` inputs, `block_n` outputs."""

    block_m: int
    block_r: int
    block_k: int
    block_n: int
    shrink_warps: int
    shrink_stages: int
    expand_warps: int
    expand_stages: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Of one attention kernel: `block_m` rows (decode: at least; it takes all heads of a group), `block_n` keys."""

    block_m: int
    block_n: int
    warps: int
    stages: int


DECODE_LORA = {
    Arch.SM80: LoraTiles(16, 16, 128, 128, 4, 4, 4, 2),
    Arch.SM90: LoraTiles(16, 16, 256, 128, 4, 4, 4, 2),
    Arch.SM100: LoraTiles(16, 16, 256, 128, 4, 4, 4, 2),
    Arch.GFX942: LoraTiles(16, 16, 128, 128, 4, 2, 4, 2),
}
PREFILL_LORA = {
    Arch.SM80: LoraTiles(64, 32, 64, 128, 4, 4, 8, 2),
    Arch.SM90: LoraTiles(64, 32, 64, 128, 4, 4, 8, 2),
    Arch.SM100: LoraTiles(64, 32, 64, 128, 4, 4, 8, 2),
    Arch.GFX942: LoraTiles(64, 32, 64, 128, 4, 2, 8, 2),
}
# By the power of two that holds the head: up to 64, 128, 256.
DECODE_ATTENTION = {
    Arch.SM80: {64: AttentionTiles(16, 64, 4, 3), 128: AttentionTiles(16, 64, 4, 2), 256: AttentionTiles(16, 32, 4, 2)},
    Arch.SM90: {64: AttentionTiles(16, 64, 4, 3), 128: AttentionTiles(16, 64, 4, 3), 256: AttentionTiles(16, 32, 4, 2)},
    Arch.SM100: {
        64: AttentionTiles(16, 64, 4, 3),
        128: AttentionTiles(16, 64, 4, 3),
        256: AttentionTiles(16, 32, 4, 2),
    },
    Arch.GFX942: {
        64: AttentionTiles(16, 64, 4, 1),
        128: AttentionTiles(16, 32, 4, 1),
        256: AttentionTiles(16, 16, 4, 1),
    },
}
EXTEND_ATTENTION = {
    Arch.SM80: {
        64: AttentionTiles(128, 64, 8, 2),
        128: AttentionTiles(64, 32, 4, 2),
        256: AttentionTiles(64, 32, 8, 2),
    },
    Arch.SM90: {
        64: AttentionTiles(128, 64, 8, 2),
        128: AttentionTiles(128, 64, 8, 2),
        256: AttentionTiles(64, 32, 8, 2),
    },
    Arch.SM100: {
        64: AttentionTiles(128, 64, 8, 2),
        128: AttentionTiles(128, 64, 8, 2),
        256: AttentionTiles(64, 32, 8, 2),
    },
    Arch.GFX942: {
        64: AttentionTiles(128, 64, 4, 1),
        128: AttentionTiles(128, 32, 4, 1),
        256: AttentionTiles(64, 16, 4, 1),
    },
}
SHARED_MEMORY = {Arch.SM80: 99 * 1024, Arch.SM90: 227 * 1024, Arch.SM100: 227 * 1024, Arch.GFX942: 64 * 1024}

# Multiplications and additions become one instruction; Triton is about to change its own default.
OPTIONS = {"enable_fp_fusion": True}
AFFINE_COLUMNS, AFFINE_WARPS = 64, 4

# How a kernel may be split over one dimension to fill the machine: few values, so that few variants are compiled.
SPLITS = (1, 4, 16)
DECODE_TRIPLES = 256  # steps of up to so many triples take the decode tiles


def arch_of(device: torch.device) -> Arch:
    """The table's row for a device; the interpreter on the CPU takes that of sm90."""
    if device.type != "cuda":
        return Arch.SM90
    if torch.version.hip is not None:
        return Arch.GFX942
    major, _ = torch.cuda.get_device_capability(device)
    return Arch.SM80 if major < 9 else Arch.SM90 if major == 9 else Arch.SM100


def lora_tiles(arch: Arch, num_triples: int, max_segment: int) -> LoraTiles:
    """Tiles for a step of so many triples, the largest segment having `max_segment`."""
    is_decode = num_triples <= DECODE_TRIPLES or max_segment <= DECODE_LORA[arch].block_m
    return (DECODE_LORA if is_decode else PREFILL_LORA)[arch]


def attention_tiles(
    table: dict[Arch, dict[int, AttentionTiles]], arch: Arch, head_dim: int, dtype: torch.dtype
) -> AttentionTiles:
    """The row of `DECODE_ATTENTION` or `EXTEND_ATTENTION` for heads of up to 256; float32 halves the tiles."""
    tiles = table[arch][64 if head_dim <= 64 else 128 if head_dim <= 128 else 256]
    if dtype is not torch.float32:
        return tiles
    return replace(tiles, block_m=max(16, tiles.block_m // 2), block_n=max(16, tiles.block_n // 2), stages=1)


def splits_for(programs: int, wanted: int, most: int) -> int:
    """The fewest splits that turn `programs` into `wanted` ones, not above `most`, out of `SPLITS`."""
    chosen = 1
    for split in SPLITS:
        if split > most:
            break
        chosen = split
        if programs * split >= wanted:
            break
    return chosen


def power_of_two(count: int, least: int = 16) -> int:
    """The smallest power of two of at least `count` and `least`."""
    return max(least, 1 << (count - 1).bit_length())


def dot_precision(tensor: Tensor) -> str:
    """How `tl.dot` multiplies: 16-bit types are exact on the matrix units, fp32 is not rounded to tf32."""
    return "ieee" if tensor.dtype is torch.float32 else "tf32"
