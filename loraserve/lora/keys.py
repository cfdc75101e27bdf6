"""Keys of tensors as trainers write them → the module they belong to and the part they play."""

from __future__ import annotations

from typing import NamedTuple

from loraserve.compat import StrEnum

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_MAX_WRAPS = 4


class Role(StrEnum):
    """What a tensor is to its module."""

    A = "lora_A"
    B = "lora_B"
    EMBED_A = "lora_embedding_A"
    EMBED_B = "lora_embedding_B"
    MLX_A = "lora_a"  # mlx-lm's, [in, r]
    MLX_B = "lora_b"  # mlx-lm's, [r, out]
    MAGNITUDE = "lora_magnitude_vector"  # DoRA
    LORA_BIAS = "lora_B.bias"
    BASE_WEIGHT = "base_layer.weight"  # the base's own matrix, saved beside its LoRA
    BASE_BIAS = "base_layer.bias"
    WEIGHT = "weight"  # a whole matrix under the module's plain name
    BIAS = "bias"
    TOKEN_ROWS = "trainable_tokens_delta"
    ORIGINAL_WEIGHT = "original_module.weight"  # the base's own matrix, saved beside the module that replaces it
    UNKNOWN = "unknown"


LORA_ROLES = frozenset({Role.A, Role.B, Role.EMBED_A, Role.EMBED_B, Role.MLX_A, Role.MLX_B})

_SUFFIXES: tuple[tuple[tuple[str, ...], Role], ...] = (
    (("lora_A", "weight"), Role.A),
    (("lora_A", "default", "weight"), Role.A),
    (("lora_B", "weight"), Role.B),
    (("lora_B", "default", "weight"), Role.B),
    (("lora_embedding_A",), Role.EMBED_A),
    (("lora_embedding_A", "default"), Role.EMBED_A),
    (("lora_embedding_B",), Role.EMBED_B),
    (("lora_embedding_B", "default"), Role.EMBED_B),
    (("lora_a",), Role.MLX_A),
    (("lora_b",), Role.MLX_B),
    (("lora_magnitude_vector",), Role.MAGNITUDE),
    (("lora_magnitude_vector", "weight"), Role.MAGNITUDE),
    (("lora_magnitude_vector", "default"), Role.MAGNITUDE),
    (("lora_magnitude_vector", "default", "weight"), Role.MAGNITUDE),
    (("lora_B", "bias"), Role.LORA_BIAS),
    (("lora_B", "default", "bias"), Role.LORA_BIAS),
    (("token_adapter", "base_layer", "weight"), Role.BASE_WEIGHT),
    (("base_layer", "weight"), Role.BASE_WEIGHT),
    (("base_layer", "bias"), Role.BASE_BIAS),
    (("token_adapter", "trainable_tokens_delta"), Role.TOKEN_ROWS),
    (("token_adapter", "trainable_tokens_delta", "default"), Role.TOKEN_ROWS),
    (("original_module", "weight"), Role.ORIGINAL_WEIGHT),
    (("modules_to_save", "default", "weight"), Role.WEIGHT),
    (("modules_to_save", "default", "bias"), Role.BIAS),
    (("modules_to_save", "weight"), Role.WEIGHT),
    (("modules_to_save", "bias"), Role.BIAS),
    (("weight",), Role.WEIGHT),
    (("bias",), Role.BIAS),
)


class TensorKey(NamedTuple):
    """A key taken apart."""

    module: str  # path in the model that was trained, without PEFT's prefix and wrappers
    role: Role


def parse_key(name: str) -> TensorKey:
    """Take a tensor's name apart. Never fails: a suffix that means nothing here gives `Role.UNKNOWN`.

    Accepted forms of one and the same key: PEFT's canonical one, with the adapter name `default` inside, without
    prefix, with the wrappers of torch.compile, FSDP and activation checkpointing, and wrapped by PEFT twice.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    for _ in range(_MAX_WRAPS):
        if parts[:2] != ["base_model", "model"]:
            break
        parts = parts[2:]
    for suffix, role in _SUFFIXES:
        if len(parts) > len(suffix) and tuple(parts[-len(suffix) :]) == suffix:
            # A longer suffix that ends alike is another tensor: `x.lora_A.other.weight` is not the weight of a module.
            module = parts[: -len(suffix)]
            if any(part.startswith("lora_") for part in module):
                return TensorKey(".".join(parts), Role.UNKNOWN)
            return TensorKey(".".join(module), role)
    return TensorKey(".".join(parts), Role.UNKNOWN)
