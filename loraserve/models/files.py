"""Where a base model's files are: resolving a name to a local path, and which weight files lie there. No torch here."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraserve.errors import ModelLoadError

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Weights as safetensors only: a pickle can run code. `consolidated*` repeats the weights in their maker's own layout.
HUB_ALLOW = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
HUB_IGNORE = ["*/*.safetensors", "consolidated*", "*.bin.index.json"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The weight files of one model; exactly one of `gguf` and `shards` is given."""

    folder: Path
    gguf: Path | None
    shards: tuple[Path, ...]
    index: dict[str, str]  # tensor → shard name as the index says it; empty when there is no index


def resolve_model_path(model: str, revision: str | None = None) -> Path:
    """Local folder (or `.gguf` file) of `model`: itself if it is a path, else its Hub snapshot, downloaded if need be.

    Only safetensors, JSON, template and tokenizer files are downloaded, never pickles. Raises `ModelLoadError`.
    """
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise ModelLoadError(f"--revision {revision} is for Hub models, but {model} is a local path")
        if path.is_dir() or path.suffix == ".gguf":
            return path.absolute()
        raise ModelLoadError(f"{model} is neither a model folder nor a .gguf file")
    if _HUB_ID.fullmatch(model) is None:
        raise ModelLoadError(f"{model} does not exist, and it is not a Hub id like org/name")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = f"{model} at revision {revision}" if revision else model
    logger.info("fetching %s from the Hub (or its local cache)", wanted)
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=HUB_ALLOW, ignore_patterns=HUB_IGNORE)
    # The Hub client raises its own, httpx's and OS errors; each means that the files are not to be had.
    except Exception as error:
        raise ModelLoadError(
            f"{model} is not a local folder, and {wanted} could not be fetched from the Hub: {_first_line(error)}"
        ) from error
    return Path(folder)


def find_model_files(path: Path) -> ModelFiles:
    """The weight files at `path`, a folder or a `.gguf` file. Raises `ModelLoadError` saying what is there instead."""
    if path.suffix == ".gguf" and path.is_file():
        return ModelFiles(path.parent, path, (), {})
    if not path.is_dir():
        raise ModelLoadError(f"{path} is neither a model folder nor a .gguf file")
    if (path / _INDEX).is_file():
        index = _read_index(path / _INDEX)
        shards = tuple(path / name for name in sorted(set(index.values())))
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise ModelLoadError(f"{path} lacks the weight files {', '.join(missing)} that {_INDEX} names")
        return ModelFiles(path, None, shards, index)
    if (path / _SINGLE).is_file():
        return ModelFiles(path, None, (path / _SINGLE,), {})
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(path, ggufs[0], (), {})
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ModelLoadError(f"{path} has several GGUF files ({names}); name the one to load")
    raise ModelLoadError(_no_weights(path))


def _no_weights(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return f"{path} is an adapter, not a base model; serve its base model and load it as an adapter"
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        return f"{path} has weights only as pickles ({pickles[0]}), which are never read; convert them to safetensors"
    return f"{path} has no weights: neither {_SINGLE}, nor {_INDEX}, nor a .gguf file"


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{file} has no weight_map")
    index: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        # A shard lies beside its index; anything else would let an index name any file of the machine.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelLoadError(f"{file} names {shard!r} as the file of {tensor}; expected a .safetensors name")
        index[tensor] = shard
    return index


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises `ModelLoadError`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} is not a JSON object")
    return content


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
