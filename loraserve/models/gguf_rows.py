"""Rows of a GGUF file's tensors under the names of the Hugging Face model, as transformers would load them."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraserve.errors import ModelLoadError
from loraserve.models.config import ModelShape
from loraserve.models.loading import expected_tensors


class GgufTensors:
    """Dequantizes one tensor at a time, on request. Any thread may ask. It has the form of an open safetensors file.

    The last tensor is kept: rows are asked for in order, and one of these tensors is small beside the model.
    """

    def __init__(self, file: Path, shape: ModelShape) -> None:
        """Map the file. Raises `ModelLoadError` for one that is not readable."""
        import gguf

        # Some tensors differ from transformers' (Llama's q and k are permuted); its own rules say how.
        rules: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        try:
            reader = gguf.GGUFReader(file)
            field = reader.fields["general.architecture"]
            architecture = bytes(field.parts[field.data[0]]).decode()
            model_arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        except (OSError, ValueError, KeyError, StopIteration) as error:
            raise ModelLoadError(f"{file.name} is not a readable GGUF file") from error
        heads = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads}
        self._processor = rules.TENSOR_PROCESSORS.get(architecture, rules.TensorProcessor)(config=heads)
        self._dequantize = gguf.dequantize
        stored = {tensor.name: tensor for tensor in reader.tensors}
        name_map = gguf.get_tensor_name_map(model_arch, shape.num_layers)
        self._tensors: dict[str, Any] = {}
        for name in expected_tensors(shape):
            module, _, suffix = name.rpartition(".")
            tensor = stored.get(f"{name_map.get_name(module)}.{suffix}")
            if tensor is not None:
                self._tensors[name] = tensor
        self._lock = threading.Lock()
        self._last: tuple[str, Tensor] | None = None

    def keys(self) -> Iterable[str]:
        """Names of the tensors in the Hugging Face model."""
        return self._tensors.keys()

    def get_slice(self, name: str) -> Tensor:
        """A whole tensor, float32; take rows of it. Raises `KeyError` for an unknown name."""
        with self._lock:
            if self._last is None or self._last[0] != name:
                stored = self._tensors[name]
                self._last = None  # two of them are never held together
                values = self._dequantize(stored.data, stored.tensor_type)
                processed = self._processor.process(
                    weights=values, name=stored.name, tensor_key_mapping={}, parsed_parameters={}
                )
                self._last = name, torch.from_numpy(processed.weights.copy())
            return self._last[1]
