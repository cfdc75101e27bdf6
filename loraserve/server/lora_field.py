"""The `lora` and `model` fields: from what clients write to which adapters they mean."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from loraserve.errors import AdapterRefused, InvalidRequest, UnsupportedField
from loraserve.lora.names import parse_name

MAX_BLEND = 64
MAX_SCALE = 1e4


class AdapterRef(NamedTuple):
    """An adapter as a request names it. `prefix` pins the version by the beginning of its hash."""

    name: str
    prefix: str | None = None
    scale: float = 1.0
    revision: str | None = None  # of an adapter that is fetched on demand


Blend = tuple[AdapterRef, ...]


def parse_ref(text: str, scale: float = 1.0, param: str = "lora") -> AdapterRef:
    """`name` or `name@hashprefix` → reference. Raises `AdapterRefused` (`invalid_name`)."""
    try:
        name, prefix = parse_name(text)
    except AdapterRefused as error:
        raise AdapterRefused(error.fault, error.message, param=param) from None
    return AdapterRef(name, prefix or None, scale)


def parse_lora(value: object, param: str = "lora") -> Blend:
    """One `lora` value → its adapters, empty for the base. Raises `InvalidRequest`."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (parse_ref(value, param=param),)
    if isinstance(value, dict):
        return (_parse_object(value, param),)
    if isinstance(value, list):
        if len(value) > MAX_BLEND:
            raise InvalidRequest(f"a blend has at most {MAX_BLEND} adapters, got {len(value)}", param=param)
        if any(not isinstance(item, dict) for item in value):
            raise InvalidRequest(
                f'{param} as a list is a blend of objects like {{"name": "a", "scale": 0.5}}; for one adapter per '
                "prompt set lora_per_prompt",
                param=param,
            )
        return tuple(_parse_object(item, f"{param}[{index}]") for index, item in enumerate(value))
    raise InvalidRequest(
        f"{param} must be null, a name, an object with name and scale, or a list of those", param=param
    )


def parse_lora_field(value: object, num_prompts: int, per_prompt: bool) -> list[Blend | None]:
    """The whole field → one value per prompt; None where the field says nothing (it was null or absent)."""
    if not per_prompt:
        blend = None if value is None else parse_lora(value)
        return [blend] * num_prompts
    if not isinstance(value, list) or len(value) != num_prompts:
        found = f"{len(value)} values" if isinstance(value, list) else "no list"
        raise InvalidRequest(
            f"with lora_per_prompt, lora is a list with one value per prompt: {num_prompts} prompts, {found}",
            param="lora",
        )
    return [parse_lora(item, f"lora[{index}]") for index, item in enumerate(value)]


def parse_model(model: str, base: str) -> AdapterRef | None:
    """`model` → the adapter it names, None for the base. The caller reports names that do not exist."""
    if model == base:
        return None
    left, colon, right = model.rpartition(":")
    return parse_ref(right if colon and left == base else model, param="model")


def combine(model: AdapterRef | None, lora: Blend | None) -> Blend:
    """What `model` and `lora` ask for together. Raises `InvalidRequest` when they contradict each other."""
    if model is None:
        return lora or ()
    if lora is None:
        return (model,)
    if any(ref.name != model.name for ref in lora) or not lora:
        named = ", ".join(ref.name for ref in lora) or "the base"
        raise InvalidRequest(f"model names the adapter {model.name}, but lora names {named}", param="lora")
    # Each of them is resolved, so two pins of different versions of one name cannot both be found.
    return lora


def _parse_object(value: dict[str, object], param: str) -> AdapterRef:
    for key in value:
        if key not in ("name", "scale", "revision"):
            raise UnsupportedField(f"unknown field {param}.{key}", param=f"{param}.{key}")
    name, scale = value.get("name"), value.get("scale", 1.0)
    if not isinstance(name, str):
        raise InvalidRequest(f"{param}.name must be the name of an adapter", param=f"{param}.name")
    if scale is None:
        scale = 1.0
    # The bound comes before isfinite, which overflows on huge whole numbers.
    real = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not real or abs(scale) > MAX_SCALE or not isfinite(scale):  # type: ignore[arg-type]
        raise InvalidRequest(
            f"{param}.scale must be a number from {-MAX_SCALE:g} to {MAX_SCALE:g}, got {scale!r:.40}",
            param=f"{param}.scale",
        )
    revision = value.get("revision")
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise InvalidRequest(f"{param}.revision must be a branch, tag or commit", param=f"{param}.revision")
    ref = parse_ref(name, float(scale), param)  # type: ignore[arg-type]
    if revision is not None and ref.prefix is not None:
        raise InvalidRequest(f"{param} has both a revision and a pinned version", param=f"{param}.revision")
    return ref._replace(revision=revision)
