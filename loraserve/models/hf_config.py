"""Hugging Face config → `ModelShape`, refusing by name all that would change the math and is not implemented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from loraserve.errors import ModelLoadError, UnsupportedModel
from loraserve.models.config import ModelShape, RopeSpec, RopeType
from loraserve.models.families import FAMILIES, Family, Windowing, family_of, supported_architectures
from loraserve.models.files import ModelFiles, find_model_files, read_json

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}

# Config fields that change the math somewhere and that no family here implements, with the values that change nothing.
_NOT_IMPLEMENTED: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "scale_emb": (None, 1),
    "scale_depth": (None,),
    "clip_qkv": (None,),
    "use_qk_norm": (None, False),
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "num_nextn_predict_layers": (None, 0),
    "is_heterogeneous": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}

_ROPE_NEEDS = {
    RopeType.DEFAULT: (),
    RopeType.LINEAR: ("factor",),
    RopeType.DYNAMIC: ("factor",),
    RopeType.YARN: ("factor", "original_max_position_embeddings"),
    RopeType.LLAMA3: ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    RopeType.LONGROPE: ("original_max_position_embeddings", "short_factor", "long_factor"),
}
# Read elsewhere, or without effect: `finetuned` and `type` are what older configs carry.
_ROPE_KEYS_ELSEWHERE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_ROPE_NUMBERS = (
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "low_freq_factor",
    "high_freq_factor",
)
_ROPE_LISTS = ("short_factor", "long_factor")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_shape(path: Path) -> ModelShape:
    """See `loraserve.models.config.load_shape`."""
    files = find_model_files(path)
    config, stated = _read_config(files)
    family = _family(config)
    _refuse_features(config)
    return _shape(config, family, files, stated)


def _read_config(files: ModelFiles) -> tuple[PretrainedConfig, frozenset[str]]:
    """The config, and the names of the fields that its file states (the others are the class's defaults)."""
    kwargs: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    if files.gguf is not None:
        kwargs["gguf_file"] = files.gguf.name
        source = files.gguf
        raw = None
    else:
        source = files.folder / "config.json"
        if not source.is_file():
            raise ModelLoadError(f"{files.folder} has no config.json")
        raw = read_json(source)
        _check_raw(raw)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(files.folder, **kwargs)
    # transformers raises KeyError, ValueError, TypeError and its own classes for the many ways to be wrong.
    except Exception as error:
        raise ModelLoadError(f"{source} is not a config that transformers can read: {error}") from error
    return config, frozenset(config.to_dict() if raw is None else raw)


def _check_raw(raw: dict[str, Any]) -> None:
    """Name an unsupported architecture even where this transformers release does not know it."""
    architectures = raw.get("architectures")
    if isinstance(architectures, list) and architectures and family_of(str(architectures[0])) is None:
        raise _unsupported_architecture(str(architectures[0]))
    custom = raw.get("auto_map")
    if isinstance(custom, dict) and "AutoModelForCausalLM" in custom:
        raise UnsupportedModel("config field auto_map: the model brings its own modelling code, which is never run")


def _unsupported_architecture(name: str) -> UnsupportedModel:
    return UnsupportedModel(f"architecture {name} is not supported; supported are {supported_architectures()}")


def _family(config: PretrainedConfig) -> Family:
    model_type = str(config.model_type)
    architectures = config.architectures
    if architectures:
        family = family_of(architectures[0])
        if family is None:
            raise _unsupported_architecture(architectures[0])
        # transformers picks the class by model_type, so a config whose two names disagree is ambiguous.
        if family.model_type != model_type:
            raise UnsupportedModel(f"architecture {architectures[0]} does not go with model_type {model_type}")
        return family
    # GGUF files and hand-written configs name only the model type.
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    raise _unsupported_architecture(f"of model_type {model_type}")


def _refuse_features(config: PretrainedConfig) -> None:
    for field, harmless in _NOT_IMPLEMENTED.items():
        value = getattr(config, field, None)
        if value not in harmless:
            raise UnsupportedModel(f"config field {field} = {_short(value)} is not implemented")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _shape(config: PretrainedConfig, family: Family, files: ModelFiles, stated: frozenset[str]) -> ModelShape:
    hidden = _positive(config, "hidden_size")
    num_layers = _positive(config, "num_hidden_layers")
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads")
    head_dim = getattr(config, "head_dim", None) or hidden // num_heads
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    rope = _rope(config, family, head_dim)
    generation = _generation_config(files)
    return ModelShape(
        family=family.name,
        architecture=family.architecture,
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_positive(config, "vocab_size"),
        max_context=_max_context(rope),
        rms_norm_eps=float(config.rms_norm_eps),
        activation=_activation(config),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=_switch(config, family.qkv_bias),
        o_bias=_switch(config, family.o_bias),
        mlp_bias=_switch(config, family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_windows(config, family, num_layers),
        rope=rope,
        eos_token_ids=_eos_ids(config, generation, stated),
        bos_token_id=_first_given(config.bos_token_id, generation, "bos_token_id"),
        pad_token_id=_first_given(config.pad_token_id, generation, "pad_token_id"),
        dtype=_checkpoint_dtype(config, files),
    )


def _positive(config: PretrainedConfig, field: str) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config field {field} must be a positive integer, got {_short(value)}")
    return value


def _switch(config: PretrainedConfig, switch: bool | str) -> bool:
    return bool(getattr(config, switch, False)) if isinstance(switch, str) else switch


def _activation(config: PretrainedConfig) -> str:
    if config.hidden_act not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModel(f"config field hidden_act = {config.hidden_act!r} is not implemented; known are {known}")
    return _ACTIVATIONS[config.hidden_act]


def _windows(config: PretrainedConfig, family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if window is not None and family.windowing is Windowing.NONE:
        raise UnsupportedModel(f"config field sliding_window = {window} is not implemented for {family.architecture}")
    if window is not None:
        window = _positive(config, "sliding_window")
    uniform = ["full_attention" if window is None else "sliding_attention"] * num_layers
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layer_types = uniform
    known = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
    mixed = family.windowing is not Windowing.LAYER_TYPES and list(layer_types) != uniform
    if len(layer_types) != num_layers or not set(layer_types) <= known or mixed:
        raise UnsupportedModel(
            f"config field layer_types = {_short(layer_types)} is not implemented for {family.architecture} "
            f"with {num_layers} layers and sliding_window = {window}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


# -- rotary embedding -------------------------------------------------------------------------------------------------


def _rope(config: PretrainedConfig, family: Family, head_dim: int) -> RopeSpec:
    given: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    name = given.get("rope_type", "default")
    if any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedModel("config field rope_parameters differs by layer type, which is not implemented")
    try:
        rope_type = RopeType(name)
    except ValueError:
        known = ", ".join(RopeType)
        raise UnsupportedModel(f"rope type {name!r} is not implemented; known are {known}") from None
    known_keys = {*_ROPE_NUMBERS, *_ROPE_LISTS, "original_max_position_embeddings", "truncate"}
    if unknown := sorted(given.keys() - known_keys - _ROPE_KEYS_ELSEWHERE):
        raise UnsupportedModel(f"rope_parameters field {unknown[0]} of rope type {name} is not implemented")
    for key in _ROPE_NEEDS[rope_type]:
        if given.get(key) is None:
            raise ModelLoadError(f"rope type {name} needs the rope_parameters field {key}")
    partial = given.get("partial_rotary_factor")
    if partial not in (None, 1) and not family.partial_rotary:
        raise UnsupportedModel(f"partial_rotary_factor = {partial} is not implemented for {family.architecture}")
    rotary_dim = int(head_dim * (1 if partial is None else partial))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ModelLoadError(f"{rotary_dim} rotary dimensions of a head of {head_dim}; expected an even part of it")
    return RopeSpec(
        rope_type=rope_type,
        theta=_number(given, "rope_theta") or 10_000.0,
        rotary_dim=rotary_dim,
        max_position_embeddings=_positive(config, "max_position_embeddings"),
        original_max_position_embeddings=given.get("original_max_position_embeddings"),
        truncate=given.get("truncate"),
        **{key: _number(given, key) for key in _ROPE_NUMBERS},
        **{key: _factors(given, key, rotary_dim // 2) for key in _ROPE_LISTS},
    )


def _number(given: dict[str, Any], key: str) -> Any:
    value = given.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        raise ModelLoadError(f"rope_parameters field {key} must be a positive number, got {_short(value)}")
    return value


def _factors(given: dict[str, Any], key: str, length: int) -> Any:
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != length:
        raise ModelLoadError(f"rope_parameters field {key} must be a list of {length} numbers")
    return tuple(float(factor) for factor in value)


def _max_context(rope: RopeSpec) -> int:
    """The longest context that the model claims.

    linear and dynamic configs keep `max_position_embeddings` at the length before scaling; yarn configs do so or not.
    """
    stretched = float(rope.max_position_embeddings)
    if rope.rope_type in (RopeType.LINEAR, RopeType.DYNAMIC):
        stretched *= rope.factor or 1.0
    elif rope.rope_type is RopeType.YARN:
        stretched = max(stretched, (rope.original_max_position_embeddings or 0) * (rope.factor or 1.0))
    return int(stretched)


# -- special tokens and dtype -----------------------------------------------------------------------------------------


def _generation_config(files: ModelFiles) -> GenerationConfig | None:
    file = files.folder / "generation_config.json"
    if files.gguf is not None or not file.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(files.folder, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"{file} is not a generation config that transformers can read: {error}") from error


def _eos_ids(config: PretrainedConfig, generation: GenerationConfig | None, stated: frozenset[str]) -> tuple[int, ...]:
    generated = _ids(generation.eos_token_id) if generation is not None else set()
    # The class's default id (2 for Llama) may be an ordinary token of this vocabulary.
    if generated and "eos_token_id" not in stated:
        return tuple(sorted(generated))
    return tuple(sorted(generated | _ids(config.eos_token_id)))


def _ids(value: object) -> set[int]:
    if value is None:
        return set()
    ids = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(token, int) for token in ids):
        raise ModelLoadError(f"eos_token_id must be a token id or a list of them, got {_short(value)}")
    return set(ids)


def _first_given(value: int | None, generation: GenerationConfig | None, field: str) -> int | None:
    if value is None and generation is not None:
        value = getattr(generation, field)
    return value


def _checkpoint_dtype(config: PretrainedConfig, files: ModelFiles) -> str | None:
    if files.gguf is not None:
        return None
    if config.dtype is not None:
        return str(config.dtype).removeprefix("torch.")
    return _first_dtype(files.shards[0])


def _first_dtype(shard: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                return _DTYPES.get(opened.get_slice(name).get_dtype())
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{shard} is not a readable safetensors file: {error}") from error
    return None
