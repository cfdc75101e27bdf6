"""Which files of a folder make up an adapter, and whether they are in a format that can be read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from loraserve.compat import StrEnum
from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.container import MAX_HEADER, read_header
from loraserve.lora.files import AdapterFolder
from loraserve.lora.spec import TensorRef
from loraserve.lora.strict_json import parse_json, show

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MLX_WEIGHTS_NAME = "adapters.safetensors"
PICKLE_NAME = "adapter_model.bin"
INDEX_NAMES = ("adapter_model.safetensors.index.json", "model.safetensors.index.json")
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Small files beside an adapter that are kept with it."""

MAX_CONFIG = 1 << 20

_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
_FOREIGN_FILES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"adapter_\d+\.pt|adapter_model\.pt", re.ASCII), "a torchtune checkpoint"),
    (re.compile(r".*\.nemo", re.ASCII | re.DOTALL), "a NeMo archive"),
    (re.compile(r"pytorch_lora_weights\.safetensors"), "a diffusers LoRA"),
    (re.compile(r".*\.gguf", re.ASCII | re.DOTALL), "a GGUF file"),
)
_FOREIGN_KEYS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"lora_(te\d?|unet)_|.*\.(lora_down|lora_up)\.weight"), "kohya's"),
    (
        re.compile(r".*\.adapter\.linear_(in|out)\.|.*decoder\.layers\.\d+\..*linear_(qkv|proj|fc1|fc2)\."),
        "NeMo's or Megatron's",
    ),
    (re.compile(r"layers\.\d+\.(attn|mlp)\.\w+\.(lora_a|lora_b|magnitude)"), "torchtune's"),
)


class Layout(StrEnum):
    """Who wrote the files."""

    PEFT = "peft"
    MLX = "mlx-lm"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of one adapter: the config's bytes and every tensor's header."""

    layout: Layout
    config: bytes
    weights: tuple[str, ...]
    tensors: tuple[TensorRef, ...]  # names are unique over all files


def read_adapter_files(folder: AdapterFolder) -> AdapterFiles:
    """Find and read what is small: the config and the headers.

    Raises `AdapterRefused` in this order: kind, size and place of the config; presence, kind and validity of the
    weights; formats that other tools write.
    """
    names = folder.names()
    layout, weights = _find_weights(folder, names)
    if CONFIG_NAME not in names:
        raise AdapterRefused(AdapterFault.MISSING_CONFIG, f"the adapter's folder has no {CONFIG_NAME}")
    config = folder.read(
        CONFIG_NAME, MAX_CONFIG, missing=AdapterFault.MISSING_CONFIG, too_large=AdapterFault.CONFIG_TOO_LARGE
    )
    index = _read_index(folder, names) if len(weights) != 1 or _SHARD.fullmatch(weights[0]) else None
    tensors: dict[str, TensorRef] = {}
    for file in weights:
        for ref in read_header(folder, file):
            if ref.name in tensors:
                _corrupt(f"tensor {show(ref.name)} is in two files")
            tensors[ref.name] = ref
    if index is not None and index != {name: ref.file for name, ref in tensors.items()}:
        _corrupt("the index does not list exactly the tensors of the files")
    _refuse_foreign_keys(tensors)
    return AdapterFiles(layout, config, weights, tuple(tensors.values()))


def needed_files(names: Iterable[str]) -> tuple[str, ...]:
    """Of a folder's names those that belong to the adapter, in a fixed order; never pickles."""
    found = set(names)
    fixed = (CONFIG_NAME, WEIGHTS_NAME, *INDEX_NAMES, MLX_WEIGHTS_NAME, *SIDE_FILES)
    return tuple(name for name in fixed if name in found) + tuple(
        sorted(name for name in found if _SHARD.fullmatch(name))
    )


def _find_weights(folder: AdapterFolder, names: frozenset[str]) -> tuple[Layout, tuple[str, ...]]:
    if WEIGHTS_NAME in names:
        return Layout.PEFT, (WEIGHTS_NAME,)
    shards = tuple(sorted(name for name in names if _SHARD.fullmatch(name)))
    if shards:
        return Layout.PEFT, shards
    if MLX_WEIGHTS_NAME in names:
        return Layout.MLX, (MLX_WEIGHTS_NAME,)
    raise _no_weights(names)


def _no_weights(names: frozenset[str]) -> AdapterRefused:
    if PICKLE_NAME in names:
        return AdapterRefused(
            AdapterFault.UNSAFE_PICKLE,
            f"{PICKLE_NAME} is a pickle, which can run code when it is opened; make it safe with "
            "`loraserve adapters convert PATH OUT`",
        )
    for pattern, what in _FOREIGN_FILES:
        name = next((name for name in sorted(names) if pattern.fullmatch(name)), None)
        if name is not None:
            return AdapterRefused(
                AdapterFault.UNSUPPORTED_FORMAT, f"{show(name)} is {what}; export the adapter in PEFT's format"
            )
    if CONFIG_NAME in names:
        return AdapterRefused(AdapterFault.MISSING_WEIGHTS, f"the adapter's folder has no {WEIGHTS_NAME}")
    hint = "; it holds a whole model" if "config.json" in names else ""
    return AdapterRefused(AdapterFault.NOT_AN_ADAPTER, f"the folder has neither {CONFIG_NAME} nor {WEIGHTS_NAME}{hint}")


def _read_index(folder: AdapterFolder, names: frozenset[str]) -> dict[str, str]:
    file = next((name for name in INDEX_NAMES if name in names), None)
    if file is None:
        raise AdapterRefused(
            AdapterFault.MISSING_WEIGHTS, f"the adapter's folder has shards but no index such as {INDEX_NAMES[1]}"
        )
    data = folder.read(file, MAX_HEADER, missing=AdapterFault.MISSING_WEIGHTS, too_large=AdapterFault.CORRUPT_WEIGHTS)
    parsed = parse_json(data, what=show(file), fault=AdapterFault.CORRUPT_WEIGHTS)
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict):
        _corrupt(f"{show(file)} has no weight_map")
    index: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            _corrupt(f"{show(file)} does not name a file for {show(tensor)}")
        if "/" in shard or "\\" in shard or shard == "..":
            raise AdapterRefused(AdapterFault.PATH_ESCAPE, f"{show(file)} names the file {show(shard)} elsewhere")
        if _SHARD.fullmatch(shard) is None:
            _corrupt(f"{show(file)} names {show(shard)}, which is no shard of an adapter")
        if shard not in names:
            raise AdapterRefused(AdapterFault.MISSING_WEIGHTS, f"{show(shard)}, named by the index, is missing")
        index[tensor] = shard
    return index


def _refuse_foreign_keys(tensors: dict[str, TensorRef]) -> None:
    for name in tensors:
        for pattern, whose in _FOREIGN_KEYS:
            if pattern.match(name) is not None:
                raise AdapterRefused(
                    AdapterFault.UNSUPPORTED_FORMAT,
                    f"tensor {show(name)} is in {whose} format; export the adapter in PEFT's format",
                )


def _corrupt(problem: str) -> NoReturn:
    raise AdapterRefused(AdapterFault.CORRUPT_WEIGHTS, problem)
