"""Adapters written byte by byte, without PEFT or torch, so that every part of them can be wrong on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from loraserve.lora.spec import KINDS, BaseGeometry, TargetGeometry

HIDDEN, INTER, KV, VOCAB, LAYERS = 32, 48, 16, 128, 3
SIZES = {
    "q": (HIDDEN, HIDDEN),
    "k": (HIDDEN, KV),
    "v": (HIDDEN, KV),
    "o": (HIDDEN, HIDDEN),
    "gate": (HIDDEN, INTER),
    "up": (HIDDEN, INTER),
    "down": (INTER, HIDDEN),
    "embed": (VOCAB, HIDDEN),
    "lm_head": (HIDDEN, VOCAB),
}
GEOMETRY = BaseGeometry(
    tuple(TargetGeometry(kind, *SIZES[kind], 1 if kind in ("embed", "lm_head") else LAYERS) for kind in KINDS),
    names=("tiny/base",),
)
PREFIX = "base_model.model."
Q0 = "model.layers.0.self_attn.q_proj"
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1, "I32": 4}


class Tensor:
    """A tensor of a file: dtype, shape, bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "F32", seed: int = 0) -> None:
        self.shape, self.dtype = shape, dtype
        count = int(np.prod(shape)) if shape else 1
        values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
        if dtype == "F32":
            self.data = values.tobytes()
        elif dtype == "F64":
            self.data = values.astype(np.float64).tobytes()
        elif dtype == "F16":
            self.data = values.astype(np.float16).tobytes()
        elif dtype == "BF16":
            self.data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            self.data = bytes(count * BYTES[dtype])


def container(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    return raw_container(header, b"".join(tensor.data for tensor in tensors.values()))


def raw_container(header: dict[str, Any] | str | bytes, data: bytes = b"") -> bytes:
    """A file of any header and any data."""
    text = header if isinstance(header, bytes | str) else json.dumps(header)
    encoded = text.encode() if isinstance(text, str) else text
    return len(encoded).to_bytes(8, "little") + encoded + data


def lora(module: str, rank: int = 4, kind: str = "q", dtype: str = "F32", prefix: str = PREFIX) -> dict[str, Tensor]:
    """A and B of one linear module."""
    fan_in, fan_out = SIZES[kind]
    seed = len(module) * 31 + sum(map(ord, module))
    return {
        f"{prefix}{module}.lora_A.weight": Tensor((rank, fan_in), dtype, seed),
        f"{prefix}{module}.lora_B.weight": Tensor((fan_out, rank), dtype, seed + 1),
    }


def plain_config(**changes: Any) -> dict[str, Any]:
    """A config that is fine; a value of `...` takes a field away."""
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "base_model_name_or_path": "tiny/base",
    } | changes
    return {name: value for name, value in config.items() if value is not ...}


def plain_tensors(**options: Any) -> dict[str, Tensor]:
    """q_proj of every layer."""
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        tensors |= lora(f"model.layers.{layer}.self_attn.q_proj", **options)
    return tensors


def write(
    folder: Path,
    config: dict[str, Any] | bytes | str | None = None,
    weights: dict[str, Tensor] | bytes | None = None,
    name: str = "adapter_model.safetensors",
) -> Path:
    """Write an adapter; what is not given is the plain one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = plain_config() if config is None else config
    text = json.dumps(config) if isinstance(config, dict) else config
    (folder / "adapter_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    weights = plain_tensors() if weights is None else weights
    (folder / name).write_bytes(container(weights) if isinstance(weights, dict) else weights)
    return folder
