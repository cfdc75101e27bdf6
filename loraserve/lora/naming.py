"""Every tensor of an adapter gets its place in the model, or the adapter is refused naming the first that has none."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.adapter_files import Layout
from loraserve.lora.keys import LORA_ROLES, Role, TensorKey, parse_key
from loraserve.lora.modules import Misplaced, Place, RowPlace, canonical_path, place_of, row_place_of
from loraserve.lora.path_rules import PathRules
from loraserve.lora.peft_config import PeftConfig
from loraserve.lora.spec import LAYERLESS, MODULE_PATHS, BaseGeometry, TensorRef
from loraserve.lora.strict_json import show
from loraserve.lora.tables import Table

_SHOWN = 3


@dataclass(slots=True)
class Halves:
    """The A and B found for one module, and what a variant adds to them."""

    module: str  # as the file spells it, which is what patterns match
    a: TensorRef | None = None
    b: TensorRef | None = None
    magnitude: TensorRef | None = None
    lora_bias: TensorRef | None = None
    bias: TensorRef | None = None


@dataclass(frozen=True, slots=True)
class WholeWeight:
    """A module's whole weight inside the adapter's file: saved in place of the base's, or a copy of it."""

    place: RowPlace
    module: str  # as the file spells it
    role: Role
    ref: TensorRef


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Trained rows of a table of the vocabulary; which ones they are only the config says."""

    table: Table
    ref: TensorRef


@dataclass(slots=True)
class NamedTensors:
    """All tensors of an adapter by what they are."""

    lora: dict[Place, Halves] = field(default_factory=dict)
    whole: list[WholeWeight] = field(default_factory=list)
    token_rows: list[TokenRows] = field(default_factory=list)
    others: list[tuple[TensorKey, TensorRef]] = field(default_factory=list)  # of variants that are not plain LoRA


_VECTOR_ROLES = {
    Role.MAGNITUDE: "magnitude",
    Role.LORA_BIAS: "lora_bias",
    Role.BASE_BIAS: "bias",
    Role.BIAS: "bias",
}
_WHOLE_ROLES = frozenset({Role.BASE_WEIGHT, Role.WEIGHT, Role.ORIGINAL_WEIGHT})


def name_tensors(tensors: tuple[TensorRef, ...], layout: Layout, geometry: BaseGeometry | None) -> NamedTensors:
    """Map every tensor. Raises `AdapterRefused`: `no_lora_tensors`, `unknown_module`, `unknown_tensor`."""
    keys = [parse_key(ref.name) for ref in tensors]
    if not any(key.role in LORA_ROLES for key in keys):
        some = f": it has {show(tensors[0].name)}" if tensors else ""
        raise AdapterRefused(AdapterFault.NO_LORA_TENSORS, f"the file holds no LoRA tensors{some}")
    named = NamedTensors()
    lost_modules: list[tuple[str, str]] = []
    lost_tensors: list[str] = []
    for key, ref in zip(keys, tensors, strict=True):
        if key.role in LORA_ROLES or key.role in _VECTOR_ROLES:
            place = place_of(key.module, geometry)
            if isinstance(place, Misplaced):
                lost_modules.append((ref.name, place.reason))
            elif not _add_part(named, place, key, ref, layout):
                lost_tensors.append(ref.name)
            elif key.role in _VECTOR_ROLES:
                named.others.append((key, ref))
        elif key.role in _WHOLE_ROLES or key.role is Role.TOKEN_ROWS:
            row_place = row_place_of(key.module, geometry)
            if isinstance(row_place, Misplaced):
                lost_modules.append((ref.name, row_place.reason))
            elif row_place is None or not _add_rows(named, row_place, key, ref):
                lost_tensors.append(ref.name)
        else:
            lost_tensors.append(ref.name)
    if lost_modules:
        names, reason = [name for name, _ in lost_modules], lost_modules[0][1]
        raise AdapterRefused(AdapterFault.UNKNOWN_MODULE, f"no place for {_some(names)}: {reason}")
    if lost_tensors:
        raise AdapterRefused(
            AdapterFault.UNKNOWN_TENSOR,
            f"{_some(lost_tensors)}: not a tensor of a LoRA adapter, or a second one for the same module",
        )
    return named


def require_consistent(config: PeftConfig, named: NamedTensors, geometry: BaseGeometry | None) -> None:
    """The config and the tensors must tell one story.

    Raises `AdapterRefused`: `config_tensor_mismatch` for tensors that PEFT would leave out when it loads this config,
    `unsupported_variant` for half of a pair of tied modules.
    """
    announced = {
        Role.MAGNITUDE: config.uses_dora,
        Role.LORA_BIAS: config.uses_lora_bias,
        Role.BASE_BIAS: config.bias != "none",
        Role.BIAS: config.bias != "none",
        Role.TOKEN_ROWS: bool(config.token_rows),
    }
    for key, ref in named.others:
        if not announced.get(key.role, False):
            raise AdapterRefused(
                AdapterFault.CONFIG_TENSOR_MISMATCH,
                f"{show(ref.name)} belongs to a variant that adapter_config.json does not turn on",
            )
    targets, excluded = config.texts("target_modules"), config.texts("exclude_modules") or ()
    tied = {MODULE_PATHS[kind] for kind in LAYERLESS} if _trained_as_one(config, geometry) else set()
    rules = PathRules(config)
    for place, halves in named.lora.items():
        if halves.a is None and halves.b is None:
            continue  # only its bias was trained, which `bias: all` does to modules that are not targeted
        paths = {halves.module, canonical_path(halves.module)}
        aliases = paths | tied if place.kind in LAYERLESS else paths
        if targets is not None and not _covers(targets, aliases):
            _contradicts(halves, "target_modules does not name it")
        if _covers(excluded, paths):
            _contradicts(halves, "exclude_modules names it")
        by_full_path = not aliases.isdisjoint(targets or ())  # PEFT does not look at the layer then
        in_layers = config.layers is None or (place.kind not in LAYERLESS and place.layer in config.layers)
        if not by_full_path and not in_layers:
            _contradicts(halves, "layers_to_transform leaves it out")
        if not by_full_path and not rules.in_layers_pattern(halves.module):
            _contradicts(halves, "layers_pattern does not lead to its layer, so layers_to_transform leaves it out")
        if (name := rules.saved_name(halves.module)) is not None:
            _contradicts(
                halves, f"modules_to_save names it with {show(name)}, and PEFT puts no LoRA inside such a module"
            )
    kinds = {place.kind for place in named.lora}
    if geometry is not None and _trained_as_one(config, geometry) and len(kinds & {"embed", "lm_head"}) == 1:
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_VARIANT,
            "ensure_weight_tying makes embed_tokens and lm_head one adapter, but the file holds only one of them",
        )


def _add_rows(named: NamedTensors, place: RowPlace, key: TensorKey, ref: TensorRef) -> bool:
    """Keep a whole weight or trained token rows; False if the role does not fit the module."""
    if key.role is Role.TOKEN_ROWS:
        if place.is_norm or any(rows.table is place.table for rows in named.token_rows):
            return False
        named.token_rows.append(TokenRows(place.table, ref))
        named.others.append((key, ref))
        return True
    if place.is_norm and key.role is not Role.WEIGHT:
        return False
    named.whole.append(WholeWeight(place, key.module, key.role, ref))
    return True


def _add_part(named: NamedTensors, place: Place, key: TensorKey, ref: TensorRef, layout: Layout) -> bool:
    """Put a tensor in its place; False if the role does not fit the module or the place is taken."""
    fitting: dict[Role, str]
    if key.role in _VECTOR_ROLES:
        fitting = {} if layout is Layout.MLX else _VECTOR_ROLES
    elif layout is Layout.MLX:
        fitting = {Role.MLX_A: "a", Role.MLX_B: "b"}
        ref = TensorRef(ref.file, ref.name, ref.dtype, ref.shape[::-1], ref.begin, ref.end, transposed=True)
    elif place.kind == "embed":
        fitting = {Role.EMBED_A: "a", Role.EMBED_B: "b"}
    else:
        fitting = {Role.A: "a", Role.B: "b"}
    side = fitting.get(key.role)
    halves = named.lora.setdefault(place, Halves(key.module))
    if side is None or halves.module != key.module or getattr(halves, side) is not None:
        return False
    setattr(halves, side, ref)
    return True


def _trained_as_one(config: PeftConfig, geometry: BaseGeometry | None) -> bool:
    """Whether a target that is embed_tokens or lm_head means both."""
    return config.ties_weights and (geometry is None or geometry.tied_head)


def _covers(names: tuple[str, ...], paths: set[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names for path in paths)


def _contradicts(halves: Halves, reason: str) -> None:
    raise AdapterRefused(
        AdapterFault.CONFIG_TENSOR_MISMATCH,
        f"the file holds LoRA tensors for {show(halves.module)}, but {reason}",
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(show(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
