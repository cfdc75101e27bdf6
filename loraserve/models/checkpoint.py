"""Tensors of a checkpoint, one at a time: safetensors files, or the state dict that transformers makes of a GGUF."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraserve.errors import ModelLoadError, UnsupportedModel
from loraserve.models.files import ModelFiles

logger = logging.getLogger(__name__)

_FLOATS = ("F64", "F32", "F16", "BF16")


class TensorInfo(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


class TensorSource(Protocol):
    """A checkpoint that is read once, tensor by tensor."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the checkpoint by name."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Copy a tensor into `out` (same shape), converting dtype and device. Each name is read at most once."""
        ...


@contextmanager
def open_checkpoint(files: ModelFiles) -> Iterator[TensorSource]:
    """Open the weights of `files` for reading. Raises `ModelLoadError`."""
    if files.gguf is not None:
        yield _StateDictSource(_gguf_state(files.gguf))
        return
    with ExitStack() as stack:
        yield _SafetensorsSource(files, stack)


class _SafetensorsSource:
    """Memory-mapped files: a tensor costs host memory only while it is copied out."""

    def __init__(self, files: ModelFiles, stack: ExitStack) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._place: dict[str, tuple[Path, Any]] = {}
        for shard in files.shards:
            with _naming(shard):
                handle = stack.enter_context(safe_open(shard, framework="pt", device="cpu"))
                for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    self._add(name, shard, handle)
        for name, shard_name in files.index.items():
            place = self._place.get(name)
            if place is None or place[0].name != shard_name:
                raise ModelLoadError(f"the index puts tensor {name} in {shard_name}, but it is not there")

    def _add(self, name: str, shard: Path, handle: Any) -> None:
        if name in self._place:
            raise ModelLoadError(f"tensor {name} is in both {self._place[name][0].name} and {shard.name}")
        view = handle.get_slice(name)
        self.tensors[name] = TensorInfo(tuple(view.get_shape()), view.get_dtype())
        self._place[name] = (shard, handle)

    def read(self, name: str, out: Tensor) -> None:
        shard, handle = self._place[name]
        with _naming(shard):
            out.copy_(handle.get_tensor(name))


class _StateDictSource:
    """Tensors already in memory, each dropped as soon as it is read."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self._state = state
        self.tensors = {name: TensorInfo(tuple(tensor.shape), "F32") for name, tensor in state.items()}

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self._state.pop(name))


@contextmanager
def _naming(shard: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{shard} is not a readable safetensors file: {error}") from error


def check_float(name: str, info: TensorInfo) -> None:
    """Refuse a base weight that is not plain floating point. Raises `UnsupportedModel`."""
    if info.dtype not in _FLOATS:
        raise UnsupportedModel(f"tensor {name} has dtype {info.dtype}; only unquantized weights are supported")


def _gguf_state(gguf: Path) -> dict[str, Tensor]:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    try:
        names = {tensor.name for tensor in GGUFReader(gguf).tensors}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{gguf} is not a readable GGUF file: {error}") from error
    # transformers drops this tensor, which holds the RoPE scaling of Llama 3.1 and later.
    if "rope_freqs.weight" in names:
        raise UnsupportedModel(f"{gguf.name} has the GGUF tensor rope_freqs.weight, which is not implemented")
    logger.info("reading %s through transformers", gguf)
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    # transformers reports broken or unknown GGUF files through many exception classes.
    except Exception as error:
        raise ModelLoadError(f"{gguf} could not be loaded by transformers: {error}") from error
    return dict(model.state_dict())
