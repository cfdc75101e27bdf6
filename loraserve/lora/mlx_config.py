"""`adapter_config.json` as mlx-lm writes it: the trainer's arguments, of which `lora_parameters` change the result."""

from __future__ import annotations

from dataclasses import dataclass

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora import field_types as types
from loraserve.lora.field_types import is_empty, type_name
from loraserve.lora.peft_config import Scaling
from loraserve.lora.strict_json import Json, parse_json, show

_FLOAT32_MAX = 3.4028234663852886e38
_IGNORED = frozenset({"dropout", "keys"})  # training only; the tensors say which modules are targeted


@dataclass(frozen=True, slots=True)
class MlxConfig:
    """A parsed config: one rank and one factor for every module. The factor is not divided by the rank."""

    rank: int
    scale: float
    fine_tune_type: str
    uses_dora: bool
    parameters: dict[str, Json]
    base_model_name: str | None

    def scaling_of(self, module: str) -> Scaling:
        """Rank and scaling of any module."""
        return Scaling(self.rank, self.scale)


def parse_mlx_config(data: bytes) -> MlxConfig:
    """Syntax, types and limits. Raises `AdapterRefused(invalid_config)`."""
    fields = parse_json(data, what="adapter_config.json", fault=AdapterFault.INVALID_CONFIG, bom=True)
    if not isinstance(fields, dict):
        raise AdapterRefused(AdapterFault.INVALID_CONFIG, "adapter_config.json is not an object")
    parameters = fields.get("lora_parameters")
    if not isinstance(parameters, dict):
        found = type_name(parameters) if "lora_parameters" in fields else "none"
        raise _invalid("lora_parameters", f"must be an object beside adapters.safetensors, found {found}")
    rank, scale = parameters.get("rank"), parameters.get("scale")
    if not types.is_rank(rank):
        raise _invalid("lora_parameters.rank", f"must be an int of at least 1, found {type_name(rank)}")
    if not types.is_number(scale) or abs(scale) > _FLOAT32_MAX:
        raise _invalid("lora_parameters.scale", "must be a number that float32 holds")
    fine_tune_type = fields.get("fine_tune_type", "lora")
    if not isinstance(fine_tune_type, str):
        raise _invalid("fine_tune_type", f"must be a string, found {type_name(fine_tune_type)}")
    model = fields.get("model")
    return MlxConfig(
        rank=rank,
        scale=float(scale),
        fine_tune_type=fine_tune_type,
        uses_dora=not is_empty(fields.get("use_dora")),
        parameters=parameters,
        base_model_name=model if isinstance(model, str) and model else None,
    )


def refuse_mlx_features(config: MlxConfig) -> None:
    """Refuse what cannot be served exactly. Raises `AdapterRefused`: `unsupported_variant`, `unsupported_format`."""
    if config.fine_tune_type != "lora" or config.uses_dora:
        kind = config.fine_tune_type if config.fine_tune_type != "lora" else "dora"
        raise AdapterRefused(AdapterFault.UNSUPPORTED_VARIANT, f"fine_tune_type {show(kind)} is not supported")
    if "alpha" in config.parameters:
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_FORMAT,
            "lora_parameters.alpha is of an early mlx-lm, whose scaling differed between versions; convert it with a "
            "current one",
        )
    for name, value in config.parameters.items():
        if name not in _IGNORED | {"rank", "scale"} and not is_empty(value):
            raise AdapterRefused(
                AdapterFault.UNSUPPORTED_VARIANT, f"lora_parameters.{show(name)} is not known here and is set"
            )


def _invalid(field: str, problem: str) -> AdapterRefused:
    return AdapterRefused(AdapterFault.INVALID_CONFIG, f"{field} {problem}")
