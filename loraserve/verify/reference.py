"""PEFT itself, as the measure of what is served: Hugging Face's model and `PeftModel`, on the CPU."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraserve.errors import LoraserveError
from loraserve.lora.adapter_files import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles, Layout, read_adapter_files
from loraserve.lora.files import AdapterFolder
from loraserve.lora.keys import LORA_ROLES, Role, parse_key
from loraserve.lora.modules import canonical_path
from loraserve.lora.strict_json import show
from loraserve.models.files import find_model_files
from loraserve.verify.double import DoublePrecision
from loraserve.verify.patterns import endless_patterns

logger = logging.getLogger(__name__)

_PEFT_SUFFIXES: dict[Role, str] = {
    Role.A: "lora_A.weight",
    Role.B: "lora_B.weight",
    Role.EMBED_A: "lora_embedding_A",
    Role.EMBED_B: "lora_embedding_B",
    Role.MAGNITUDE: "lora_magnitude_vector",
    Role.LORA_BIAS: "lora_B.bias",
    Role.BASE_WEIGHT: "base_layer.weight",
    Role.BASE_BIAS: "base_layer.bias",
    Role.WEIGHT: "weight",
    Role.BIAS: "bias",
    Role.TOKEN_ROWS: "token_adapter.trainable_tokens_delta",
}
"""How PEFT spells what a tensor is, in the files that it writes."""


class ReferenceUnavailable(LoraserveError):
    """PEFT or transformers cannot load what should be compared."""

    code = "reference_unavailable"


class Reference:
    """A model of transformers, with or without an adapter, on the CPU."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        configs = getattr(model, "peft_config", {})
        self._is_activated = any(getattr(config, "alora_invocation_tokens", None) for config in configs.values())

    @classmethod
    def base(cls, path: Path, dtype: torch.dtype = torch.float32) -> Reference:
        """The base model in a folder (also of one GGUF file) or `.gguf` file. Raises `ReferenceUnavailable`."""
        from transformers import AutoModelForCausalLM

        with _quiet(), _named("transformers cannot load the base model"):
            gguf = find_model_files(path).gguf
            where = (path, {}) if gguf is None else (gguf.parent, {"gguf_file": gguf.name})
            # Eager attention is the plain definition; the fused one hides a NaN in the keys.
            model = AutoModelForCausalLM.from_pretrained(where[0], dtype=dtype, attn_implementation="eager", **where[1])
        return cls(model)

    def adapted(self, folder: Path, vocab_size: int | None = None) -> Reference:
        """The adapter in `folder` on this base, which is used up: PEFT changes it in place.

        With a `vocab_size` the base is resized first, as it was in training; the adapter brings the new rows.

        PEFT must take every tensor. Files whose keys it would pass over are given to it once more, with the keys as it
        writes them and the config untouched; but a `target_modules` that its regular expressions would not come to an
        end with is replaced by the names of the modules that have tensors. Raises `ReferenceUnavailable`.
        """
        files = read_adapter_files(AdapterFolder.at(folder))
        if files.layout is not Layout.PEFT:
            raise ReferenceUnavailable(f"PEFT cannot read {files.layout} adapters, so there is nothing to compare with")
        targets = self._safe_targets(files)
        with _quiet(), _named("PEFT cannot load the adapter"):
            if vocab_size is not None:
                self._model.resize_token_embeddings(vocab_size, mean_resizing=False)
            if files.weights == (WEIGHTS_NAME,) and targets is None:
                model, left_out = _attach(self._model, folder)
                if not left_out:
                    return Reference(model)
                logger.info("PEFT leaves out %s; giving it the tensors under its own names", left_out[0])
                self._model = model.unload()
            with tempfile.TemporaryDirectory(prefix="loraserve-verify-") as respelled:
                _respell(folder, files.weights, Path(respelled), targets)
                model, left_out = _attach(self._model, Path(respelled))
        if left_out:
            raise ReferenceUnavailable(f"PEFT leaves out {len(left_out)} tensors, such as {show(left_out[0])}")
        return Reference(model)

    def _safe_targets(self, files: AdapterFiles) -> list[str] | None:
        """Names for PEFT to use as `target_modules`; None if the config's own can be left to it."""
        try:
            config = json.loads(files.config)
        except ValueError:
            config = None
        if not isinstance(config, dict):
            return None  # PEFT says what is wrong
        endless = endless_patterns(config, [name for name, _ in self._model.named_modules()])
        for field in endless:
            if field != "target_modules":
                raise ReferenceUnavailable(
                    f"the patterns of {field} keep Python's regular expressions busy for too long"
                )
        if not endless:
            return None
        logger.info("the pattern of target_modules takes too long; giving PEFT the modules that have tensors")
        keys = [parse_key(ref.name) for ref in files.tensors]
        return sorted({canonical_path(key.module) for key in keys if key.role in LORA_ROLES})

    def logits(self, tokens: Sequence[int], start: int | None = 0) -> Tensor:
        """Logits at every position, [num_tokens, vocab] float32.

        An activated LoRA applies from position `start` on, nowhere if that is None. PEFT is told so: it would look for
        the invocation in the answer too.
        """
        precise = DoublePrecision() if self._model.dtype == torch.float64 else nullcontext()
        more = {"alora_offsets": [None if start is None else len(tokens) - start]} if self._is_activated else {}
        with torch.no_grad(), _quiet(), precise:
            ids = torch.tensor([list(tokens)])
            found: Tensor = self._model(input_ids=ids, use_cache=False, **more).logits[0]
        return found.float()


def _attach(model: Any, folder: Path) -> tuple[Any, list[str]]:
    """The model with the adapter, and the keys of the file that PEFT did not use."""
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
    # The first load does not say what was left out; a second one of the same adapter does.
    result = adapted.load_adapter(str(folder), "default", torch_device="cpu")
    return adapted, [key for key in result.unexpected_keys if not _is_repetition(key)]


def _is_repetition(key: str) -> bool:
    """Whether PEFT writes this beside a tensor of the same values, and reads that one only."""
    module, role = parse_key(key)
    repeated = role is Role.WEIGHT and ".modules_to_save." in key
    return repeated or role is Role.ORIGINAL_WEIGHT or (role is Role.TOKEN_ROWS and module.endswith("lm_head"))


def _respell(folder: Path, weights: tuple[str, ...], target: Path, targets: list[str] | None) -> None:
    """Copy an adapter with every key as PEFT writes it, and with `targets`, if given, as its `target_modules`."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for file in weights:
        with safe_open(folder / file, framework="pt") as source:
            for name in source.keys():  # noqa: SIM118  (not a dict)
                key = parse_key(name)
                suffix = _PEFT_SUFFIXES.get(key.role)
                if key.role is Role.BASE_WEIGHT and ".token_adapter." in name:
                    suffix = f"token_adapter.{suffix}"
                spelled = name if suffix is None else f"base_model.model.{canonical_path(key.module)}.{suffix}"
                tensors[spelled] = source.get_tensor(name)
    save_file(tensors, target / WEIGHTS_NAME)
    shutil.copyfile(folder / CONFIG_NAME, target / CONFIG_NAME)
    if targets is not None:
        config = json.loads((folder / CONFIG_NAME).read_bytes())
        (target / CONFIG_NAME).write_text(json.dumps(config | {"target_modules": targets}), encoding="utf-8")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Anything that the two libraries raise becomes one named error."""
    try:
        yield
    except LoraserveError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ReferenceUnavailable(f"{what}: {type(error).__name__}: {first}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither progress bars nor warnings: what PEFT warns of is either harmless here or found by the comparison."""
    settings: Any = importlib.import_module("transformers.utils.logging")
    verbosity, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        settings.set_verbosity(verbosity)
        if bars:
            settings.enable_progress_bar()
