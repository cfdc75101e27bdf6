"""`adapter_config.json` as PEFT writes it: one rule for every field that is known, and none is passed over silently."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from loraserve.compat import StrEnum
from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora import field_types as types
from loraserve.lora.block_diagonal import PLAIN, BlockDiagonal, Sides, parse_block_diagonal
from loraserve.lora.field_types import FieldType, is_empty, type_name
from loraserve.lora.patterns import MAX_PATTERNS, MatchBudget, PatternTable
from loraserve.lora.strict_json import Json, parse_json, show

_FLOAT32_MAX = 3.4028234663852886e38


class Treatment(StrEnum):
    """What is done with a field."""

    HONOURED = "honoured"  # it changes the result, exactly as in PEFT
    CHECKED = "checked"  # it must not contradict the tensors
    IGNORED = "ignored"  # it has no effect at inference
    REFUSED = "refused"  # refused when it asks for anything


class FieldRule(NamedTuple):
    """One field of the config."""

    name: str
    type: FieldType
    treatment: Treatment
    note: str  # for REFUSED: what the field turns on; else why it is treated so
    nullable: bool = True


_H, _C, _I, _R = Treatment.HONOURED, Treatment.CHECKED, Treatment.IGNORED, Treatment.REFUSED

FIELD_RULES: tuple[FieldRule, ...] = (
    FieldRule("peft_type", types.TEXT, _H, "must be LORA", nullable=False),
    FieldRule("r", types.RANK, _H, "rank; must be the tensors'", nullable=False),
    FieldRule("lora_alpha", types.NUMBER, _H, "numerator of the scaling; may be a float, zero or negative", False),
    FieldRule("use_rslora", types.BOOL, _H, "scaling is alpha/sqrt(r)"),
    FieldRule("rank_pattern", types.RANKS, _H, "rank by module, first match in file order"),
    FieldRule("alpha_pattern", types.NUMBERS, _H, "alpha by module, first match in file order"),
    FieldRule("init_lora_weights", types.BOOL_OR_TEXT, _H, "initialisations that changed the base are refused"),
    FieldRule("target_modules", types.TEXT_OR_TEXTS, _C, "tensors decide; a list must cover them, a regex is not run"),
    FieldRule("exclude_modules", types.TEXT_OR_TEXTS, _C, "a list must not name modules that have tensors"),
    FieldRule("layers_to_transform", types.INT_OR_INTS, _C, "must not leave out layers that have tensors"),
    FieldRule(
        "layers_pattern", types.TEXT_OR_TEXTS, _C, "with layers_to_transform must lead to layers that have tensors"
    ),
    FieldRule("alora_invocation_tokens", types.INTS, _H, "applied from their last occurrence in the prompt on"),
    FieldRule("bias", types.TEXT, _H, "bias tensors replace the base's"),
    FieldRule("ensure_weight_tying", types.BOOL, _C, "embed_tokens and lm_head are taken as two adapters"),
    FieldRule("base_model_name_or_path", types.TEXT, _C, "a hint; shapes decide, a mismatch is a warning"),
    FieldRule("task_type", types.TEXT, _C, "unreliable; refused if the file holds a classification head"),
    FieldRule("lora_dropout", types.NUMBER, _I, "training only"),
    FieldRule("inference_mode", types.BOOL, _I, "training only"),
    FieldRule("auto_mapping", types.OBJECT, _I, "names Python classes"),
    FieldRule("peft_version", types.TEXT, _I, "who wrote the file"),
    FieldRule("revision", types.TEXT, _I, "of the base model"),
    FieldRule("fan_in_fan_out", types.BOOL, _I, "layout of Conv1D bases; no effect on Linear"),
    FieldRule("megatron_core", types.TEXT, _I, "names a Python module"),
    FieldRule("qalora_group_size", types.INT, _I, "has no effect without use_qalora"),
    FieldRule("runtime_config", types.OBJECT, _I, "where PEFT computes"),
    FieldRule("loftq_config", types.OBJECT, _I, "read at initialisation only; init_lora_weights decides"),
    FieldRule("eva_config", types.OBJECT, _I, "read at initialisation only; the result is plain LoRA"),
    FieldRule("corda_config", types.OBJECT, _I, "read at initialisation only; init_lora_weights decides"),
    FieldRule("lora_ga_config", types.OBJECT, _I, "read at initialisation only; init_lora_weights decides"),
    FieldRule("use_dora", types.BOOL, _H, "rows of the adapted weight are brought to the trained magnitudes"),
    FieldRule("lora_bias", types.BOOL, _H, "a bias on lora_B, scaled like it; not together with use_dora"),
    FieldRule("use_bdlora", types.BOOL_OR_OBJECT, _H, "BD-LoRA: block-diagonal factors; names modules by substring"),
    FieldRule("modules_to_save", types.TEXTS, _H, "whole embed_tokens, lm_head and norms in place of the base's"),
    FieldRule("trainable_token_indices", types.TOKEN_ROWS, _H, "rows of tokens in place of the base's, or after them"),
    FieldRule("target_parameters", types.TEXTS, _R, "LoRA on bare parameters"),
    FieldRule("layer_replication", types.LIST, _R, "replicated layers"),
    FieldRule("use_qalora", types.BOOL, _R, "QA-LoRA"),
    FieldRule("kasa_config", types.OBJECT, _R, "KaSA"),
    FieldRule("arrow_config", types.OBJECT, _R, "Arrow routing"),
    FieldRule("velora_config", types.OBJECT, _R, "VeLoRA"),
    FieldRule("monteclora_config", types.OBJECT, _R, "MonteCLoRA"),
    FieldRule("megatron_config", types.OBJECT, _R, "Megatron layers"),
)

_RULES = {rule.name: rule for rule in FIELD_RULES}
_BIAS_MODES = ("none", "all", "lora_only")
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
# These ask for something even when they are empty: PEFT tests them with `is not None`.
_SET_WHEN_EMPTY = frozenset({"kasa_config", "arrow_config", "velora_config"})
_SET_WHEN_EMPTY |= {"monteclora_config", "megatron_config"}
HEAD_NAMES = frozenset({"score", "classifier", "classification_head", "qa_outputs", "v_head"})
"""Modules of models that classify instead of generate."""


class Scaling(NamedTuple):
    """What the config says of one module."""

    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """A parsed config; which of its features can be served is `refuse_features`'s question."""

    fields: dict[str, Json]  # as written, types checked; unknown fields too
    rank: int
    alpha: float
    rslora: bool
    ranks: PatternTable
    alphas: PatternTable
    budget: MatchBudget
    block_diagonal: BlockDiagonal | None = None

    def sides_of(self, module: str) -> Sides:
        """Which factor of a module is block-diagonal. Raises `AdapterRefused` where PEFT would not load it."""
        return PLAIN if self.block_diagonal is None else self.block_diagonal.sides(module)

    def scaling_of(self, module: str) -> Scaling:
        """Rank and scaling of the module at `module`, by PEFT's rules. Raises `AdapterRefused(invalid_config)`."""
        rank = int(self.ranks.lookup(module, self.rank))
        alpha = self.alphas.lookup(module, self.alpha)
        scaling = alpha / math.sqrt(rank) if self.rslora else alpha / rank
        return Scaling(rank, scaling)

    def texts(self, field: str) -> tuple[str, ...] | None:
        """A field that is a list of strings; None if it is absent, null or one string."""
        value = self.fields.get(field)
        return tuple(value) if types.is_texts(value) else None

    @property
    def layers(self) -> frozenset[int] | None:
        """`layers_to_transform` where PEFT would apply it, else None."""
        value = self.fields.get("layers_to_transform")
        if isinstance(self.fields.get("target_modules"), str):
            return None
        if types.is_int(value):
            return frozenset({value})
        return frozenset(value) if types.is_ints(value) and value else None

    @property
    def base_model_name(self) -> str | None:
        """The base that the config names."""
        value = self.fields.get("base_model_name_or_path")
        return value if types.is_text(value) and value else None

    @property
    def ties_weights(self) -> bool:
        """Whether embed_tokens and lm_head were trained as one."""
        return self.fields.get("ensure_weight_tying") is True

    @property
    def invocation(self) -> tuple[int, ...]:
        """aLoRA's token ids, from the last occurrence of which in the prompt on the adapter applies; else empty."""
        value = self.fields.get("alora_invocation_tokens")
        return tuple(value) if types.is_ints(value) else ()

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """`modules_to_save`: a module is meant if its path ends so, wherever in a name that is."""
        return self.texts("modules_to_save") or ()

    @property
    def token_rows(self) -> dict[str, tuple[int, ...]]:
        """`trainable_token_indices`, a list of which is the input embedding's; modules are meant as above."""
        value = self.fields.get("trainable_token_indices")
        if types.is_ints(value):
            return {"embed_tokens": tuple(value)} if value else {}
        if not types.is_object(value):
            return {}
        return {name: tuple(ids) for name, ids in value.items() if types.is_ints(ids)}

    @property
    def uses_dora(self) -> bool:
        """Whether every module has a magnitude."""
        return self.fields.get("use_dora") is True

    @property
    def uses_lora_bias(self) -> bool:
        """Whether every module's B has a bias."""
        return self.fields.get("lora_bias") is True

    @property
    def bias(self) -> str:
        """Which biases were trained: none, all or lora_only."""
        value = self.fields.get("bias")
        return value if types.is_text(value) else "none"

    @property
    def features(self) -> tuple[str, ...]:
        """What the config uses beyond r and alpha."""
        used = {
            "rslora": self.rslora,
            "rank_pattern": bool(self.fields.get("rank_pattern")),
            "alpha_pattern": bool(self.fields.get("alpha_pattern")),
            "eva": self.fields.get("init_lora_weights") == "eva",
            "dora": self.uses_dora,
            "lora_bias": self.uses_lora_bias,
            "alora": bool(self.invocation),
            "modules_to_save": bool(self.saved_modules),
            "trainable_token_indices": bool(self.token_rows),
            "bdlora": self.block_diagonal is not None,
        }
        return tuple(name for name, is_used in used.items() if is_used)


def parse_peft_config(data: bytes) -> PeftConfig:
    """Syntax, types and limits. Raises `AdapterRefused`, mostly with `invalid_config`."""
    fields = parse_json(data, what="adapter_config.json", fault=AdapterFault.INVALID_CONFIG, bom=True)
    if not isinstance(fields, dict):
        raise AdapterRefused(AdapterFault.INVALID_CONFIG, "adapter_config.json is not an object")
    _require_lora(fields)
    for name, value in fields.items():
        rule = _RULES.get(name)
        if rule is not None and not (rule.type.accepts(value) or (value is None and rule.nullable)):
            _invalid(name, f"must be {rule.type.name}, found {type_name(value)}")
    rank, alpha = fields.get("r", 8), fields.get("lora_alpha", 8)
    assert types.is_int(rank)
    assert types.is_number(alpha)
    budget = MatchBudget()
    config = PeftConfig(
        fields=fields,
        rank=rank,
        alpha=float(alpha),
        rslora=fields.get("use_rslora") is True,
        ranks=_pattern_table("rank_pattern", fields, budget),
        alphas=_pattern_table("alpha_pattern", fields, budget),
        budget=budget,
        block_diagonal=parse_block_diagonal(fields.get("use_bdlora")),
    )
    if config.bias not in _BIAS_MODES:
        _invalid("bias", f"must be one of {', '.join(_BIAS_MODES)}, found {show(config.bias)}")
    _require_finite_scalings(config)
    return config


def refuse_features(config: PeftConfig) -> None:
    """Refuse what the config asks for and cannot be served exactly: variants first, then initialisations.

    Raises `AdapterRefused`: `unsupported_variant` or `unsupported_init`.
    """
    for name, value in config.fields.items():
        rule = _RULES.get(name)
        if rule is None and not is_empty(value):
            raise AdapterRefused(
                AdapterFault.UNSUPPORTED_VARIANT, f"the field {show(name)} is not known here and is set"
            )
        if rule is None or rule.treatment is not Treatment.REFUSED:
            continue
        if value is None or (is_empty(value) and name not in _SET_WHEN_EMPTY):
            continue
        raise AdapterRefused(AdapterFault.UNSUPPORTED_VARIANT, f"{name} asks for {rule.note}, which is not supported")
    if config.uses_dora and config.uses_lora_bias:
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_VARIANT, "use_dora and lora_bias together are not supported, nor are they by PEFT"
        )
    _refuse_alora(config)
    other = "use_dora" if config.uses_dora else "alora_invocation_tokens" if config.invocation else None
    if config.block_diagonal is not None and other is not None:
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_VARIANT, f"use_bdlora and {other} together are not supported, nor are they by PEFT"
        )
    init = config.fields.get("init_lora_weights")
    if isinstance(init, str) and init not in _PLAIN_INITS:
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_INIT,
            f"init_lora_weights is {show(init)}: such training changes the base weights or is unknown, so the tensors "
            "alone are not the trained model; save with path_initial_model_for_weight_conversion",
        )


def _refuse_alora(config: PeftConfig) -> None:
    name = "alora_invocation_tokens"
    if config.fields.get(name) is None:
        return
    problem = None
    if not config.invocation:
        problem = "is empty, so nothing can invoke the adapter"
    elif config.uses_dora:
        problem = "together with use_dora is not supported, nor is it by PEFT"
    elif config.bias != "none":
        problem = "together with trained base biases is not supported: they apply before the invocation too"
    elif config.saved_modules or config.token_rows:
        problem = "together with modules_to_save or trainable_token_indices is not supported: these apply everywhere"
    if problem is not None:
        raise AdapterRefused(AdapterFault.UNSUPPORTED_VARIANT, f"{name} {problem}")


def refuse_heads(config: PeftConfig, names: tuple[str, ...]) -> None:
    """Refuse classification heads, by tensor or by `modules_to_save`. Raises `AdapterRefused(unsupported_task)`."""
    saved = config.texts("modules_to_save") or ()
    head = next((name for name in (*saved, *names) if not HEAD_NAMES.isdisjoint(name.split("."))), None)
    if head is not None:
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_TASK, f"{show(head)} belongs to a classification head; only generation is served"
        )


def refuse_on_module(kind: str, config: PeftConfig) -> None:
    """Refuse variants that this kind of module cannot have. Raises `AdapterRefused(unsupported_variant)`."""
    for field, used in (("use_bdlora", config.block_diagonal is not None), ("lora_bias", config.uses_lora_bias)):
        if kind == "embed" and used:
            raise AdapterRefused(
                AdapterFault.UNSUPPORTED_VARIANT, f"{field} on embed_tokens is not supported, nor is it by PEFT"
            )


def _require_lora(fields: dict[str, Json]) -> None:
    if "peft_type" not in fields:
        if "lora_parameters" in fields:
            raise AdapterRefused(
                AdapterFault.UNSUPPORTED_FORMAT,
                "adapter_config.json is mlx-lm's, but the weights are not named adapters.safetensors",
            )
        _invalid("peft_type", "is missing")
    peft_type = fields["peft_type"]
    if not isinstance(peft_type, str):
        _invalid("peft_type", f"must be a string, found {type_name(peft_type)}")
    if peft_type != "LORA":
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_PEFT_TYPE,
            f"peft_type is {show(peft_type)}, only LORA is served",
        )


def _pattern_table(name: str, fields: dict[str, Json], budget: MatchBudget) -> PatternTable:
    entries = fields.get(name) or {}
    assert isinstance(entries, dict)
    if len(entries) > MAX_PATTERNS:
        _invalid(name, f"has {len(entries)} entries, at most {MAX_PATTERNS} are read")
    numbers = tuple((key, float(value)) for key, value in entries.items() if types.is_number(value))
    return PatternTable(name, numbers, budget)


def _require_finite_scalings(config: PeftConfig) -> None:
    """No module's scaling may overflow float32, in which it is folded into B: the largest alpha by the smallest r."""
    alphas, ranks = (config.fields.get(name) or {} for name in ("alpha_pattern", "rank_pattern"))
    assert types.is_object(alphas)
    assert types.is_object(ranks)
    pairs = [("lora_alpha", config.alpha)]
    pairs += [(f"alpha_pattern[{show(key)}]", float(value)) for key, value in alphas.items() if types.is_number(value)]
    smallest = min([config.rank, *(rank for rank in ranks.values() if types.is_int(rank))])
    for name, alpha in pairs:
        if abs(alpha) / (math.sqrt(smallest) if config.rslora else smallest) > _FLOAT32_MAX:
            _invalid(name.partition("[")[0], f"{name} gives a scaling that is not finite")


def _invalid(field: str, problem: str) -> NoReturn:
    raise AdapterRefused(AdapterFault.INVALID_CONFIG, f"{field} {problem}")
