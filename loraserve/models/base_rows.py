"""Single rows of the base's weights, read from the checkpoint again: packed weights do not give them back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraserve.errors import AdapterFault, AdapterRefused, LoraserveError
from loraserve.kernels.metadata import Kind
from loraserve.models.config import ModelShape
from loraserve.models.files import find_model_files
from loraserve.models.gguf_rows import GgufTensors


class CheckpointRows:
    """The base's weights as they are served: what the file holds, rounded to the model's dtype. Any thread may ask.

    The files are opened (mapped) on the first question and stay open, so that a checkpoint that is replaced later does
    not mix with the one that is served. Of a GGUF file one tensor at a time is dequantized again.
    """

    def __init__(self, path: Path, shape: ModelShape, dtype: torch.dtype) -> None:
        self._path = path
        self._shape = shape
        self._dtype = dtype
        self._first_rows = {target.kind: target.out_offset for target in shape.lora_targets()}
        self._widths = {target.kind: target.out_features for target in shape.lora_targets()}
        self._lock = threading.Lock()
        self._handles: dict[str, Any] | None = None  # tensor → open file

    def rows(self, kind: Kind, layer: int, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a weight [out, in] (embed: [vocab, hidden]) in float32. Raises `AdapterRefused`."""
        name, first = self._place(kind, layer)
        return self._read(f"{name}.weight", first + begin, first + end)

    def bias(self, kind: Kind, layer: int) -> Tensor | None:
        """A bias [out] in float32, None if the projection has none. Raises `AdapterRefused`."""
        name, first = self._place(kind, layer)
        if f"{name}.bias" not in self._open():
            return None
        return self._read(f"{name}.bias", first, first + self._widths[kind])

    def _place(self, kind: Kind, layer: int) -> tuple[str, int]:
        """The module in the checkpoint, and the first of its rows that belongs to the kind."""
        names = self._shape.family_data.names
        name = self._shape.module_path(kind, layer)
        if kind in (Kind.EMBED, Kind.LM_HEAD):  # a tied checkpoint holds one of the two
            other = names.lm_head if kind is Kind.EMBED else names.embed
            return (name if f"{name}.weight" in self._open() else other), 0
        is_fused = len(names.qkv if kind in (Kind.Q, Kind.K, Kind.V) else names.gate_up) == 1
        return name, self._first_rows[kind] if is_fused and kind not in (Kind.O, Kind.DOWN) else 0

    def _read(self, name: str, begin: int, end: int) -> Tensor:
        try:
            rows: Tensor = self._open()[name].get_slice(name)[begin:end]
        except (KeyError, OSError, SafetensorError) as error:
            raise AdapterRefused(AdapterFault.STAGING_FAILED, "the base model's weights could not be read") from error
        return rows.to(self._dtype).float()

    def _open(self) -> dict[str, Any]:
        with self._lock:
            if self._handles is None:
                self._handles = self._open_files()
            return self._handles

    def _open_files(self) -> dict[str, Any]:
        try:
            files = find_model_files(self._path)
            handles: list[Any] = (
                [GgufTensors(files.gguf, self._shape)]
                if files.gguf is not None
                else [safe_open(shard, framework="pt", device="cpu") for shard in files.shards]
            )
        except (OSError, SafetensorError, LoraserveError) as error:
            raise AdapterRefused(AdapterFault.STAGING_FAILED, "the base model's files could not be opened") from error
        found: dict[str, Any] = {}
        for handle in handles:
            found |= dict.fromkeys(handle.keys(), handle)
        return found
