"""Paths of modules, as different model classes spell them → the base's own places."""

from __future__ import annotations

import re
from typing import NamedTuple

from loraserve.lora.spec import FUSED, LAYERLESS, MODULE_PATHS, BaseGeometry
from loraserve.lora.tables import (
    FINAL_NORM,
    FINAL_NORM_ROW,
    INPUT_NORM,
    K_NORM,
    POST_NORM,
    Q_NORM,
    VOCABULARY,
    Table,
    head_norm_row,
    norm_row,
)

# The text model of a multimodal class lies deeper; the decoder served here is that text model.
_PREFIXES: tuple[tuple[str, str], ...] = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
_IN_LAYER = re.compile(r"(model\.layers)\.([0-9]+)\.(.+)", re.ASCII)
_LAYERED = {
    path.split("{layer}.")[1]: kind for kind, path in MODULE_PATHS.items() if kind not in LAYERLESS
}  # "self_attn.q_proj" → "q"
_LAYERED |= {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": "gate_up"}
_FIXED = {MODULE_PATHS[kind]: kind for kind in LAYERLESS}
_MAX_LAYER_DIGITS = 6


class Place(NamedTuple):
    """A module of the base that an adapter may change."""

    kind: str  # also a key of FUSED: several kinds' modules as one
    layer: int


class Misplaced(NamedTuple):
    """A path that is no module of the base, and why."""

    reason: str


def canonical_path(module: str) -> str:
    """The path with a multimodal class's prefix taken off."""
    for prefix, plain in _PREFIXES:
        if module.startswith(prefix):
            return plain + module[len(prefix) :]
    return module


def place_of(module: str, geometry: BaseGeometry | None) -> Place | Misplaced:
    """Where the module lies in the base; without a geometry every layer exists.

    A fused module has its place in every base: served are its parts, however the checkpoint stores them.
    """
    path = canonical_path(module)
    kind, layer = _FIXED.get(path), 0
    if kind is None:
        match = _IN_LAYER.fullmatch(path)
        kind = None if match is None else _LAYERED.get(match[3])
        if match is None or kind is None:
            return Misplaced("the base model has no such module")
        if match[2] != str(int(match[2][:_MAX_LAYER_DIGITS])):
            return Misplaced("its layer index is malformed")
        layer = int(match[2])
    if geometry is None:
        return Place(kind, layer)
    target = geometry.target(FUSED[kind][0] if kind in FUSED else kind)
    if target is None:
        return Misplaced("the base model has no such module")
    if layer >= target.num_layers:
        return Misplaced(f"the base model has {target.num_layers} layers")
    return Place(kind, layer)


class RowPlace(NamedTuple):
    """A module whose whole weight an adapter may bring: a table of the vocabulary, or a row of a table of norms."""

    table: Table
    row: int | None  # None: the whole table

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm's weight."""
        return self.row is not None


_TABLES = {MODULE_PATHS[table]: table for table in VOCABULARY}


def row_place_of(module: str, geometry: BaseGeometry | None) -> RowPlace | Misplaced | None:
    """Where a whole weight lies; None for a module of another sort, whose weight an adapter may not bring."""
    path = canonical_path(module)
    if path in _TABLES:
        return RowPlace(_TABLES[path], None)
    if path == FINAL_NORM:
        return RowPlace(Table.NORM, FINAL_NORM_ROW)
    match = _IN_LAYER.fullmatch(path)
    if match is None or match[3] not in (INPUT_NORM, POST_NORM, Q_NORM, K_NORM):
        return None
    if match[2] != str(int(match[2][:_MAX_LAYER_DIGITS])):
        return Misplaced("its layer index is malformed")
    layer, in_head = int(match[2]), match[3] in (Q_NORM, K_NORM)
    if geometry is not None and layer >= geometry.num_layers:
        return Misplaced(f"the base model has {geometry.num_layers} layers")
    if in_head and geometry is not None and not geometry.head_norm_width:
        return Misplaced("the base model has no such module")
    if in_head:
        return RowPlace(Table.HEAD_NORM, head_norm_row(layer, match[3]))
    return RowPlace(Table.NORM, norm_row(layer, match[3]))


_LAYERS_ASSUMED = 256  # where the base is not known


def savable_modules(geometry: BaseGeometry | None) -> tuple[str, ...]:
    """Paths of all modules whose whole weight an adapter may bring."""
    names = [INPUT_NORM, POST_NORM] + ([Q_NORM, K_NORM] if geometry is None or geometry.head_norm_width else [])
    return (*_TABLES, FINAL_NORM, *(f"{layer}.{name}" for layer in _layer_paths(geometry) for name in names))


def other_modules(geometry: BaseGeometry | None) -> tuple[str, ...]:
    """Paths of the other modules that have weights, those that only hold modules included."""
    layers = _layer_paths(geometry)
    inside = (*_LAYERED, "self_attn", "mlp")
    return ("model", "model.layers", *layers, *(f"{layer}.{name}" for layer in layers for name in inside))


def _layer_paths(geometry: BaseGeometry | None) -> list[str]:
    count = _LAYERS_ASSUMED if geometry is None else geometry.num_layers
    return [f"model.layers.{layer}" for layer in range(count)]
