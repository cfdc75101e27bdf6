"""Paths of modules, as different model classes spell them → the base's own places."""

from __future__ import annotations

import re
from typing import NamedTuple

from loraserve.lora.spec import FUSED, LAYERLESS, MODULE_PATHS, BaseGeometry

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
