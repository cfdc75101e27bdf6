"""Checkpoint → `Decoder`: every tensor is checked before the first is read, then read, fused and packed one by one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from loraserve.config import Dtype, format_bytes
from loraserve.errors import ModelLoadError, UnsupportedModel
from loraserve.kernels.ops import Ops, PackedLinear
from loraserve.models.checkpoint import TensorSource, check_float, open_checkpoint
from loraserve.models.config import ModelShape, load_shape
from loraserve.models.decoder import Decoder, DecoderWeights, WeightBytes
from loraserve.models.files import find_model_files, resolve_model_path
from loraserve.models.layers import LayerWeights

__all__ = ["load_decoder", "load_shape", "resolve_dtype", "resolve_model_path"]

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHOWN_NAMES = 5  # of a list of tensors in an error


def resolve_dtype(requested: Dtype, shape: ModelShape, device: torch.device | str) -> torch.dtype:
    """dtype of weights and activations.

    `auto` is the checkpoint's dtype on a GPU (bfloat16 for GGUF) and float32 on a CPU, whose fast operators compute in
    it. Raises `UnsupportedModel` for a checkpoint dtype that nothing here computes in.
    """
    if requested != "auto":
        return _TORCH_DTYPES[requested]
    if torch.device(device).type == "cpu":
        return torch.float32
    stored = shape.dtype or "bfloat16"
    if stored not in _TORCH_DTYPES:
        raise UnsupportedModel(f"the checkpoint's dtype is {stored}; choose one with --dtype")
    return _TORCH_DTYPES[stored]


def load_decoder(path: Path, shape: ModelShape, dtype: torch.dtype, device: torch.device | str, ops: Ops) -> Decoder:
    """Load the weights of the model at `path` (a folder or a `.gguf` file) of `shape`, in `dtype` on `device`.

    Raises `UnsupportedModel` and `ModelLoadError`; missing, unknown and misshapen tensors are named.
    """
    started = time.monotonic()
    device = torch.device(device)
    with open_checkpoint(find_model_files(path)) as source:
        plan = _plan(shape, source)
        try:
            weights = _WeightBuilder(shape, source, plan, dtype, device, ops).build()
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(f"the weights of {path} do not fit the memory of {device}") from error
    size = weights.nbytes
    logger.info(
        "loaded %s (%s, %s): layers %s, embedding %s, head %s, in %.1f s",
        path,
        shape.architecture,
        str(dtype).removeprefix("torch."),
        format_bytes(size.layers),
        format_bytes(size.embedding),
        format_bytes(size.head) if size.head else "shared with the embedding",
        time.monotonic() - started,
    )
    return Decoder(shape, weights, ops)


# -- which tensors must be there --------------------------------------------------------------------------------------


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an untied checkpoint of this model."""
    names, hidden, inner = shape.family_data.names, shape.hidden_size, shape.intermediate_size
    found: dict[str, tuple[int, ...]] = {
        f"{names.embed}.weight": (shape.vocab_size, hidden),
        f"{names.final_norm}.weight": (hidden,),
        f"{names.lm_head}.weight": (shape.vocab_size, hidden),
    }

    def linear(path: str, out_features: int, in_features: int, bias: bool) -> None:
        found[f"{path}.weight"] = (out_features, in_features)
        if bias:
            found[f"{path}.bias"] = (out_features,)

    for layer in range(shape.num_layers):
        for norm in (names.input_norm, names.post_norm):
            found[f"{names.in_layer(layer, norm)}.weight"] = (hidden,)
        if shape.qk_norm:
            for norm in (names.q_norm, names.k_norm):
                found[f"{names.in_layer(layer, norm)}.weight"] = (shape.head_dim,)
        for module, rows in _fused_rows(names.qkv, (shape.q_size, shape.kv_size, shape.kv_size)):
            linear(names.in_layer(layer, module), rows, hidden, shape.qkv_bias)
        linear(names.in_layer(layer, names.o), hidden, shape.q_size, shape.o_bias)
        for module, rows in _fused_rows(names.gate_up, (inner, inner)):
            linear(names.in_layer(layer, module), rows, hidden, shape.mlp_bias)
        linear(names.in_layer(layer, names.down), hidden, inner, shape.mlp_bias)
    return found


def _fused_rows(modules: tuple[str, ...], parts: tuple[int, ...]) -> Iterable[tuple[str, int]]:
    """(module, rows) of what is concatenated; a checkpoint that stores it fused has one module of all rows."""
    if len(modules) == 1:
        return [(modules[0], sum(parts))]
    return list(zip(modules, parts, strict=True))


def _plan(shape: ModelShape, source: TensorSource) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors to read, after checking that exactly these are there. Raises `ModelLoadError`."""
    expected = expected_tensors(shape)
    there = source.tensors
    names = shape.family_data.names
    embed, head = f"{names.embed}.weight", f"{names.lm_head}.weight"
    if shape.tie_word_embeddings:
        # Like transformers: a tied checkpoint may hold either of the two, or both.
        for one, other in ((head, embed), (embed, head)):
            if one not in there and other in there:
                del expected[one]
                break
    if missing := [name for name in expected if name not in there]:
        raise ModelLoadError(f"the checkpoint lacks {_listed(missing)}")
    if unknown := [name for name in there if name not in expected and not _ignorable(name)]:
        raise ModelLoadError(f"the checkpoint has tensors that {shape.architecture} does not use: {_listed(unknown)}")
    for name, wanted in expected.items():
        info = there[name]
        check_float(name, info)
        if info.shape != wanted:
            raise ModelLoadError(f"tensor {name} has shape {list(info.shape)}, but the config says {list(wanted)}")
    return expected


def _ignorable(name: str) -> bool:
    # A buffer that old transformers releases saved; it is computed from the config.
    return name.endswith(".rotary_emb.inv_freq")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    rest = len(names) - _SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown


# -- reading and packing ----------------------------------------------------------------------------------------------


class _WeightBuilder:
    """Reads tensors straight into the fused buffers that the backend packs; at most one linear is held twice."""

    def __init__(
        self,
        shape: ModelShape,
        source: TensorSource,
        plan: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self._shape = shape
        self._source = source
        self._plan = plan
        self._dtype = dtype
        self._device = device
        self._ops = ops
        self._names = shape.family_data.names

    def build(self) -> DecoderWeights:
        """All weights, in the order in which a checkpoint usually stores them."""
        names, itemsize = self._names, self._dtype.itemsize
        embed_name, head_name = f"{names.embed}.weight", f"{names.lm_head}.weight"
        embed = self._tensor(embed_name if embed_name in self._plan else head_name)
        layers = tuple(self._layer(index) for index in range(self._shape.num_layers))
        final_norm = self._tensor(f"{names.final_norm}.weight")
        lm_head = self._head(embed, embed_name, head_name)
        # A backend that keeps weights as they come keeps the very embedding as the tied head.
        shares = getattr(lm_head, "weight", None) is embed
        in_layers = sum(math.prod(self._plan[name]) for name in self._plan if name not in (embed_name, head_name))
        table = embed.numel() * itemsize
        return DecoderWeights(
            embed, layers, final_norm, lm_head, WeightBytes(table, in_layers * itemsize, 0 if shares else table)
        )

    def _head(self, embed: Tensor, embed_name: str, head_name: str) -> PackedLinear:
        if not (embed_name in self._plan and head_name in self._plan):
            return self._ops.pack_linear(embed, None)
        head = self._tensor(head_name)
        if self._shape.tie_word_embeddings:
            # Like transformers: two different tensors of a "tied" checkpoint stay two.
            if torch.equal(head, embed):
                return self._ops.pack_linear(embed, None)
            logger.warning(
                "the config ties %s to %s, but the checkpoint's two differ; both are used", head_name, embed_name
            )
        return self._ops.pack_linear(head, None)

    def _layer(self, index: int) -> LayerWeights:
        names, shape = self._names, self._shape

        def norm(module: str) -> Tensor:
            return self._tensor(f"{names.in_layer(index, module)}.weight")

        return LayerWeights(
            input_norm=norm(names.input_norm),
            qkv=self._linear(index, names.qkv, shape.qkv_bias),
            q_norm=norm(names.q_norm) if shape.qk_norm else None,
            k_norm=norm(names.k_norm) if shape.qk_norm else None,
            o=self._linear(index, (names.o,), shape.o_bias),
            post_norm=norm(names.post_norm),
            gate_up=self._linear(index, names.gate_up, shape.mlp_bias),
            down=self._linear(index, (names.down,), shape.mlp_bias),
        )

    def _linear(self, layer: int, modules: tuple[str, ...], has_bias: bool) -> PackedLinear:
        paths = [self._names.in_layer(layer, module) for module in modules]
        weight = self._tensor(*(f"{path}.weight" for path in paths))
        bias = self._tensor(*(f"{path}.bias" for path in paths)) if has_bias else None
        return self._ops.pack_linear(weight, bias)

    def _tensor(self, *names: str) -> Tensor:
        """The named tensors concatenated by rows, in the model's dtype on its device, sharing no memory with a file."""
        shapes = [self._plan[name] for name in names]
        rows = [shape[0] for shape in shapes]
        out = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(out, rows), strict=True):
            self._source.read(name, part)
        return out
