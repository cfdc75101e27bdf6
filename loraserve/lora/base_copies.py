"""Copies of base matrices that PEFT saves beside an adapter: an unchanged copy is no change to the base."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.container import MAX_HEADER, TensorReader, read_header
from loraserve.lora.files import AdapterFolder
from loraserve.lora.spec import TensorRef
from loraserve.lora.strict_json import parse_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMES = {
    "embed": ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    "lm_head": ("lm_head.weight", "language_model.lm_head.weight"),
}
_ELEMENTS = 1 << 18


def is_unchanged_copy(copy: TensorRef, reader: TensorReader, kind: str, base_folder: str, *, tied_head: bool) -> bool:
    """Whether a matrix of an adapter equals the base's own `embed` or `lm_head`, cast to the copy's dtype.

    Reads both in pieces. A base whose checkpoint has no such matrix gives False. Raises `AdapterRefused` if the
    adapter's file fails while it is read.
    """
    # The operator chose the base, and a Hub snapshot is made of links to elsewhere: any root is fine for it.
    folder = AdapterFolder.at(Path(base_folder), roots=(Path("/"),))
    try:
        original = _find(folder, "embed" if kind == "lm_head" and tied_head else kind)
    except AdapterRefused:
        return False
    if original is None or original.shape != copy.shape:
        return False
    with TensorReader(folder) as base:
        pairs = itertools.zip_longest(base.pieces(original, _ELEMENTS), reader.pieces(copy, _ELEMENTS))
        return all(np.array_equal(_cast(ours, original.dtype, copy.dtype), theirs) for ours, theirs in pairs)


def _find(folder: AdapterFolder, kind: str) -> TensorRef | None:
    for file in _checkpoint_files(folder, kind):
        for ref in read_header(folder, file):
            if ref.name in _NAMES[kind]:
                return ref
    return None


def _checkpoint_files(folder: AdapterFolder, kind: str) -> tuple[str, ...]:
    if _SINGLE in folder.names():
        return (_SINGLE,)
    missing = AdapterFault.MISSING_WEIGHTS
    data = folder.read(_INDEX, MAX_HEADER, missing=missing, too_large=missing)
    parsed = parse_json(data, what=_INDEX, fault=missing)
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict):
        return ()
    return tuple(file for name in _NAMES[kind] if isinstance(file := weight_map.get(name), str))


def _cast(values: np.ndarray[Any, Any], source: str, target: str) -> np.ndarray[Any, Any]:
    """Cast between safetensors dtypes with rounding to nearest even; BF16 is held as uint16."""
    if source == target:
        return values
    if source == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if target != "BF16":
        with np.errstate(over="ignore"):
            return values.astype({"F64": np.float64, "F32": np.float32, "F16": np.float16}[target])
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
