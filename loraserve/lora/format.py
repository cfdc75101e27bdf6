"""An adapter's folder → `AdapterSpec`, or a refusal that names the reason. The checks come in one fixed order.

Files (kind, size, path, presence, format) → config (syntax, types, limits) → feature (type, variant, initialisation,
task) → dtypes → names, every one mapped → pairs → ranks → shapes. The first failure names the code. Values are looked
at when the adapter is staged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.adapter_files import AdapterFiles, Layout, read_adapter_files
from loraserve.lora.added_tokens import read_added_tokens
from loraserve.lora.block_diagonal import PLAIN, Sides, stack_of
from loraserve.lora.files import AdapterFolder
from loraserve.lora.keys import Role
from loraserve.lora.mlx_config import MlxConfig, parse_mlx_config, refuse_mlx_features
from loraserve.lora.names import bare_model_name
from loraserve.lora.naming import Halves, NamedTensors, name_tensors, require_consistent
from loraserve.lora.peft_config import PeftConfig, parse_peft_config, refuse_features, refuse_heads, refuse_on_module
from loraserve.lora.saved import collect_rows, refuse_saved_modules
from loraserve.lora.spec import (
    DTYPE_BYTES,
    FUSED,
    KINDS,
    AdapterSpec,
    BaseGeometry,
    Blocks,
    RowsDelta,
    TargetGeometry,
    TargetSpec,
    TensorRef,
)
from loraserve.lora.strict_json import show

_ORDER = (*KINDS, *FUSED)
_ZERO_HINT = "was it saved from ZeRO-3 or FSDP without gathering the weights?"


@dataclass(frozen=True, slots=True)
class _Pair:
    kind: str
    layer: int
    module: str  # as the file spells it
    a: TensorRef | None  # A and B are both None if only the module's bias was trained; the rank is 0 then
    b: TensorRef | None
    rank: int
    scaling: float
    magnitude: TensorRef | None
    lora_bias: TensorRef | None
    bias: TensorRef | None
    sides: Sides = PLAIN  # blocks of A and of B
    b_blocks: Blocks | None = None

    def with_blocks(self) -> _Pair:
        """The pair once its shapes are known to be right: a whole B begins with its first block."""
        return self if self.b is None else replace(self, b_blocks=stack_of(self.sides.b, self.b.shape[0]))

    @property
    def factors(self) -> tuple[TensorRef, ...]:
        return () if self.a is None or self.b is None else (self.a, self.b)

    @property
    def vectors(self) -> tuple[TensorRef, ...]:
        return tuple(ref for ref in (self.magnitude, self.lora_bias, self.bias) if ref is not None)

    def target(self) -> TargetSpec:
        return TargetSpec(
            self.kind,
            self.layer,
            self.rank,
            self.scaling,
            self.a,
            self.b,
            magnitude=self.magnitude,
            lora_bias=self.lora_bias,
            bias=self.bias,
            a_blocks=stack_of(self.sides.a, self.rank),
            b_blocks=self.b_blocks,
        )


def parse_adapter(folder: Path | AdapterFolder, geometry: BaseGeometry | None, max_rank: int) -> AdapterSpec:
    """Check the adapter in `folder` against the base and say what it is. Reads headers, not weights.

    Without `geometry` nothing is known of the base: layers and sizes are not checked. Weights are read where copies of
    a matrix must be equal: one inside the adapter the base's. Raises `AdapterRefused`.
    """
    place = folder if isinstance(folder, AdapterFolder) else AdapterFolder.at(folder)
    files = read_adapter_files(place)
    config = _read_config(files, geometry)
    _refuse_dtypes(files.tensors)
    named = name_tensors(files.tensors, files.layout, geometry)
    if isinstance(config, PeftConfig):
        require_consistent(config, named, geometry)
    pairs = _pair(named, config)
    _check_ranks(pairs, max_rank)
    deltas: dict[str, RowsDelta] = {}
    if geometry is not None:
        pairs, deltas = _split_new_rows(pairs, named, geometry)
        _check_shapes(pairs, geometry)
    has_fused = any(pair.kind in FUSED for pair in pairs)
    pairs = _split([pair.with_blocks() for pair in pairs], geometry)
    brought = collect_rows(config, named, geometry, place, deltas)
    if brought.replaced and isinstance(config, PeftConfig) and config.invocation:
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_VARIANT,
            "alora_invocation_tokens together with rows for new tokens is not supported: these apply before the "
            "invocation too; if they were not trained, save with save_embedding_layers=False",
        )
    added = read_added_tokens(place, brought.replaced, 0 if geometry is None else geometry.vocab_size)
    features = config.features if isinstance(config, PeftConfig) else ("mlx-lm",)
    features += ("fused",) if has_fused else ()
    features += ("bias",) if any(pair.bias is not None for pair in pairs) else ()
    features += tuple(kind for kind in ("embed", "lm_head") if any(pair.kind == kind for pair in pairs))
    features += brought.features + (("added_tokens",) if added.tokens else ())
    return AdapterSpec(
        targets=tuple(pair.target() for pair in pairs),
        features=features + (("sharded",) if len(files.weights) > 1 else ()),
        warnings=_warnings(config, geometry) + brought.warnings + added.warnings,
        base_model_name=config.base_model_name,
        files=files.weights,
        invocation=_invocation(config, pairs, geometry),
        replaced=brought.replaced,
        num_new_tokens=brought.num_new_tokens,
        added_tokens=added.tokens,
    )


def _read_config(files: AdapterFiles, geometry: BaseGeometry | None) -> PeftConfig | MlxConfig:
    if files.layout is Layout.MLX:
        mlx = parse_mlx_config(files.config)
        refuse_mlx_features(mlx)
        return mlx
    config = parse_peft_config(files.config)
    refuse_features(config)
    refuse_heads(config, tuple(ref.name for ref in files.tensors))
    refuse_saved_modules(config, geometry)
    return config


def _invocation(config: PeftConfig | MlxConfig, pairs: list[_Pair], geometry: BaseGeometry | None) -> tuple[int, ...]:
    if not isinstance(config, PeftConfig) or not config.invocation:
        return ()
    if any(pair.kind == "embed" for pair in pairs):
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_VARIANT, "aLoRA on embed_tokens is not supported, nor is it by PEFT"
        )
    embed = None if geometry is None else geometry.target("embed")
    if min(config.invocation) < 0 or (embed is not None and max(config.invocation) >= embed.in_features):
        raise AdapterRefused(
            AdapterFault.INVALID_CONFIG,
            "alora_invocation_tokens has ids that are not in the base model's vocabulary",
        )
    return config.invocation


def _refuse_dtypes(tensors: tuple[TensorRef, ...]) -> None:
    for ref in tensors:
        if ref.dtype not in DTYPE_BYTES:
            raise AdapterRefused(
                AdapterFault.UNSUPPORTED_DTYPE,
                f"tensor {show(ref.name)} has dtype {ref.dtype}; adapters have {', '.join(DTYPE_BYTES)}",
            )


def _pair(named: NamedTensors, config: PeftConfig | MlxConfig) -> list[_Pair]:
    pairs = []
    for place, parts in named.lora.items():
        sides = PLAIN
        only_bias = parts.bias is not None and all(
            ref is None for ref in (parts.a, parts.b, parts.magnitude, parts.lora_bias)
        )
        if not only_bias:
            if isinstance(config, PeftConfig):
                refuse_on_module(place.kind, config)
                sides = config.sides_of(parts.module)
            _require_parts(parts, sides, config)
        rank, scaling = (0, 1.0) if only_bias else config.scaling_of(parts.module)
        pair = _Pair(
            *place, parts.module, parts.a, parts.b, rank, scaling, parts.magnitude, parts.lora_bias, parts.bias
        )
        pairs.append(pair if only_bias else replace(pair, sides=sides))
    return sorted(pairs, key=lambda pair: (pair.layer, _ORDER.index(pair.kind)))


def _require_parts(parts: Halves, sides: Sides, config: PeftConfig | MlxConfig) -> None:
    """A module's tensors must be complete: A and B, and what the config says that every module has."""
    wanted: dict[str, TensorRef | None] = {"lora_A": parts.a, "lora_B": parts.b}
    if isinstance(config, PeftConfig):
        if config.uses_dora:
            wanted["lora_magnitude_vector"] = parts.magnitude
        if config.uses_lora_bias and sides.b is None:
            wanted["lora_B.bias"] = parts.lora_bias
        elif parts.lora_bias is not None:  # PEFT's block-diagonal B has none
            raise AdapterRefused(
                AdapterFault.CONFIG_TENSOR_MISMATCH,
                f"{show(parts.lora_bias.name)} is a bias of a block-diagonal lora_B, which PEFT would leave out",
            )
    have = [name for name, ref in wanted.items() if ref is not None]
    for name, ref in wanted.items():
        if ref is None:
            raise AdapterRefused(
                AdapterFault.MISSING_TENSORS,
                f"module {show(parts.module)} has {' and '.join(have) or 'other tensors'} but no {name}",
            )


def _check_ranks(pairs: list[_Pair], max_rank: int) -> None:
    for pair in pairs:
        for ref in pair.factors:
            if len(ref.shape) < 2 or 0 in ref.shape:
                raise AdapterRefused(
                    AdapterFault.ZERO_SIZE, f"tensor {show(ref.name)} has shape {list(ref.shape)}: {_ZERO_HINT}"
                )
            if len(ref.shape) > 2:
                raise AdapterRefused(
                    AdapterFault.SHAPE_MISMATCH, f"tensor {show(ref.name)} has shape {list(ref.shape)}, not 2 sizes"
                )
        for ref in pair.vectors:
            if ref.shape in ((), (0,)):
                raise AdapterRefused(
                    AdapterFault.ZERO_SIZE, f"tensor {show(ref.name)} has shape {list(ref.shape)}: {_ZERO_HINT}"
                )
            if len(ref.shape) > 1:
                raise AdapterRefused(
                    AdapterFault.SHAPE_MISMATCH, f"tensor {show(ref.name)} has shape {list(ref.shape)}, not 1 size"
                )
    for pair in pairs:
        if pair.a is None or pair.b is None:
            continue
        if not pair.sides.divides(pair.rank):
            raise AdapterRefused(
                AdapterFault.RANK_MISMATCH,
                f"module {show(pair.module)} has rank {pair.rank}, which {pair.sides.a or pair.sides.b} blocks of "
                "use_bdlora do not share out evenly",
            )
        if pair.a.shape[0] != pair.rank or pair.b.shape[1] * (pair.sides.b or 1) != pair.rank:
            raise AdapterRefused(
                AdapterFault.RANK_MISMATCH,
                f"module {show(pair.module)} has rank {pair.rank} by the config, but lora_A is {list(pair.a.shape)} "
                f"and lora_B is {list(pair.b.shape)}; they should be [rank, in] and [out, rank]"
                + (f", that of {pair.sides.b} blocks [out, rank/{pair.sides.b}]" if pair.sides.b else ""),
            )
    for pair in pairs:
        if pair.rank > max_rank:
            raise AdapterRefused(
                AdapterFault.RANK_TOO_LARGE,
                f"module {show(pair.module)} has rank {pair.rank}; the largest rank served is {max_rank} "
                "(--max-lora-rank)",
            )


def _split_new_rows(
    pairs: list[_Pair], named: NamedTensors, geometry: BaseGeometry
) -> tuple[list[_Pair], dict[str, RowsDelta]]:
    """LoRA on a matrix with rows after the base's last, of which the file has a copy: the base's part, and theirs."""
    vocab, deltas = geometry.vocab_size, {}
    copies = {str(w.place.table): w.ref for w in named.whole if w.role is Role.BASE_WEIGHT}
    for i, pair in enumerate(pairs):
        copy, a, b = copies.get(pair.kind), pair.a, pair.b
        if copy is None or a is None or b is None or a.transposed or b.transposed:
            continue
        num_rows = a.shape[1] if pair.kind == "embed" else b.shape[0]
        if copy.shape[:1] != (num_rows,) or num_rows <= vocab:
            continue
        new = num_rows - vocab
        if pair.vectors:
            raise AdapterRefused(
                AdapterFault.UNSUPPORTED_VARIANT,
                f"module {show(pair.module)} has {new} rows for tokens beyond the base model's {vocab}, which are not "
                f"supported together with {'use_dora' if pair.magnitude is not None else 'lora_bias'} on it: train it "
                "without, or save it whole with modules_to_save",
            )
        if pair.kind == "embed":
            pairs[i] = replace(pair, a=a.columns(0, vocab))
            deltas[pair.kind] = RowsDelta(a.columns(vocab, new), b, pair.scaling)
        else:
            pairs[i] = replace(pair, b=b.rows(0, vocab))
            deltas[pair.kind] = RowsDelta(a, b.rows(vocab, new), pair.scaling)
    return pairs, deltas


def _check_shapes(pairs: list[_Pair], geometry: BaseGeometry) -> None:
    for pair in pairs:
        target = _geometry_of(pair.kind, geometry)
        if pair.a is not None and pair.b is not None:
            a_blocks, b_blocks = (count or 1 for count in pair.sides)
            expected = ((pair.rank, target.in_features // a_blocks), (target.out_features, pair.rank // b_blocks))
            divides = target.in_features % a_blocks == target.out_features % b_blocks == 0
            if (pair.a.shape, pair.b.shape) != expected or not divides:
                hint = "; was its vocabulary resized?" if pair.kind in ("embed", "lm_head") else ""
                raise AdapterRefused(
                    AdapterFault.SHAPE_MISMATCH,
                    f"module {show(pair.module)} has lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)}, this "
                    f"base model needs {list(expected[0])} and {list(expected[1])}: it was trained on another "
                    f"base{hint}",
                )
        for ref in pair.vectors:
            if ref.shape != (target.out_features,):
                raise AdapterRefused(
                    AdapterFault.SHAPE_MISMATCH,
                    f"{show(ref.name)} has shape {list(ref.shape)}, this base model needs [{target.out_features}]: it "
                    "was trained on another base",
                )
        if pair.bias is not None and not target.has_bias:
            raise AdapterRefused(
                AdapterFault.UNKNOWN_TENSOR,
                f"{show(pair.bias.name)} replaces a bias, but the base model's {pair.kind} has none",
            )


def _geometry_of(kind: str, geometry: BaseGeometry) -> TargetGeometry:
    """A module's sizes; a fused one has the outputs of all its parts."""
    parts = [geometry.target(part) for part in FUSED.get(kind, (kind,))]
    known = [part for part in parts if part is not None]
    assert len(known) == len(parts)
    return replace(
        known[0],
        kind=kind,
        out_features=sum(part.out_features for part in known),
        has_bias=all(part.has_bias for part in known),
    )


def _split(pairs: list[_Pair], geometry: BaseGeometry | None) -> list[_Pair]:
    """Fused modules become their parts, which share A and have their own rows of all else."""
    found: dict[tuple[int, str], _Pair] = {}
    for pair in pairs:
        for part in _parts_of(pair, geometry) if pair.kind in FUSED else [pair]:
            if (part.layer, part.kind) in found:
                other = found[part.layer, part.kind].module
                raise AdapterRefused(
                    AdapterFault.UNKNOWN_TENSOR,
                    f"{show(pair.module)} and {show(other)} are one and the same module, here split and there fused",
                )
            found[part.layer, part.kind] = part
    return sorted(found.values(), key=lambda pair: (pair.layer, KINDS.index(pair.kind)))


def _parts_of(pair: _Pair, geometry: BaseGeometry | None) -> list[_Pair]:
    if geometry is None:
        raise AdapterRefused(
            AdapterFault.UNKNOWN_MODULE,
            f"{show(pair.module)} holds several modules as one, which the base model's sizes must tell apart: name the "
            "base model",
        )
    if pair.b is not None and pair.b.transposed:
        raise AdapterRefused(
            AdapterFault.UNSUPPORTED_VARIANT, f"{show(pair.module)}: fused modules in mlx-lm's format are not supported"
        )
    parts: list[_Pair] = []
    begin = 0
    for kind in FUSED[pair.kind]:
        count = _geometry_of(kind, geometry).out_features
        b, magnitude, lora_bias, bias = (
            None if ref is None else ref.rows(begin, count)
            for ref in (pair.b, pair.magnitude, pair.lora_bias, pair.bias)
        )
        blocks = None if pair.b_blocks is None else pair.b_blocks._replace(first=begin)
        part = replace(pair, kind=kind, b=b, magnitude=magnitude, lora_bias=lora_bias, bias=bias)
        parts.append(replace(part, b_blocks=blocks))
        begin += count
    return parts


def _warnings(config: PeftConfig | MlxConfig, geometry: BaseGeometry | None) -> tuple[str, ...]:
    found: list[str] = []
    if isinstance(config, PeftConfig):
        for field, table in (("rank_pattern", config.ranks), ("alpha_pattern", config.alphas)):
            if table.unused:
                found.append(f"{field} has entries that no module of the adapter uses, such as {show(table.unused[0])}")
    name = config.base_model_name
    if name is not None and geometry is not None and geometry.names:
        known = {bare_model_name(other) for other in geometry.names}
        if bare_model_name(name) not in known:
            found.append(f"the adapter names the base model {show(name)}, served is {show(geometry.names[0])}")
    return tuple(found)
