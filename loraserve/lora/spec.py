"""The nouns of the lora room that both processes share: what an adapter is, and what a base offers to adapters.

Nothing here needs torch. Kinds are plain strings with the values of `kernels.metadata.Kind`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from loraserve.lora.tables import Table

MODULE_PATHS: dict[str, str] = {
    "q": "model.layers.{layer}.self_attn.q_proj",
    "k": "model.layers.{layer}.self_attn.k_proj",
    "v": "model.layers.{layer}.self_attn.v_proj",
    "o": "model.layers.{layer}.self_attn.o_proj",
    "gate": "model.layers.{layer}.mlp.gate_proj",
    "up": "model.layers.{layer}.mlp.up_proj",
    "down": "model.layers.{layer}.mlp.down_proj",
    "embed": "model.embed_tokens",
    "lm_head": "lm_head",
}
"""Where each kind lies in a Hugging Face decoder; the canonical name of a module in this package."""

FUSED: dict[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Modules of fused models such as Phi-3, and the kinds whose rows lie one after the other in them."""

KINDS: tuple[str, ...] = tuple(MODULE_PATHS)
LAYERLESS: frozenset[str] = frozenset(kind for kind, path in MODULE_PATHS.items() if "{layer}" not in path)

DTYPE_BYTES: dict[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""safetensors dtypes that an adapter may have, and the size of one element."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where one tensor lies. `shape` is PEFT's orientation, A [r, in] and B [out, r], whatever the file holds."""

    file: str  # name inside the adapter's folder
    name: str  # the tensor's key in that file
    dtype: str  # safetensors spelling: F64, F32, F16 or BF16
    shape: tuple[int, ...]
    begin: int  # absolute byte offsets in the file
    end: int
    transposed: bool = False  # the bytes are those of shape[::-1]; `TensorReader` gives the transposed view
    pitch: int = 0  # bytes from one row to the next, where these are some columns of a matrix; 0: rows adjoin

    def columns(self, begin: int, count: int) -> TensorRef:
        """Some columns of a matrix that is not transposed."""
        assert not self.transposed
        assert not self.pitch
        row = self.num_bytes // self.shape[0]
        first = self.begin + begin * (row // self.shape[1])
        size = count * (row // self.shape[1])
        end = first + (self.shape[0] - 1) * row + size
        return replace(self, shape=(self.shape[0], count), begin=first, end=end, pitch=row)

    def rows(self, begin: int, count: int) -> TensorRef:
        """Some rows of a tensor that is not transposed (elements, if it is a vector)."""
        assert not self.transposed
        row = self.num_bytes // self.shape[0]
        first = self.begin + begin * row
        return replace(self, shape=(count, *self.shape[1:]), begin=first, end=first + count * row)

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_elements * DTYPE_BYTES[self.dtype] if self.pitch else self.end - self.begin

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(begin, number of bytes) of what adjoins in the file."""
        if not self.pitch:
            return ((self.begin, self.num_bytes),)
        row = self.num_bytes // self.shape[0]
        return tuple((self.begin + i * self.pitch, row) for i in range(self.shape[0]))


class Blocks(NamedTuple):
    """A block-diagonal matrix, of which the file holds the blocks one above the other, all of one size."""

    num_blocks: int
    rows: int  # of a block
    first: int = 0  # which row of the stack is the first here: a part of a fused module may begin inside a block


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """One module's delta: y += scaling · B(A x). For `embed`, A is [r, vocab] and B is [hidden, r].

    With `a_blocks` or `b_blocks` that factor is block-diagonal: the file has A [r, in / num_blocks], or
    B [out, r / num_blocks]. DoRA and trained biases add vectors of `out_features`. A module of which only the bias was
    trained has rank 0 and neither A nor B.
    """

    kind: str  # a value of kernels.metadata.Kind
    layer: int  # 0 for layer-less kinds
    rank: int
    scaling: float  # s = alpha/r or alpha/sqrt(r); may be negative or zero, always finite in float32
    a: TensorRef | None  # [rank, in_features]
    b: TensorRef | None  # [out_features, rank]
    magnitude: TensorRef | None = None  # DoRA: the norm that each row of W + scaling · BA is brought to
    lora_bias: TensorRef | None = None  # added to B(A x), before the scaling
    bias: TensorRef | None = None  # replaces the base's bias
    a_blocks: Blocks | None = None
    b_blocks: Blocks | None = None

    @property
    def module(self) -> str:
        """The module's canonical path."""
        return MODULE_PATHS[self.kind].format(layer=self.layer)

    @property
    def vectors(self) -> tuple[TensorRef, ...]:
        """The tensors that scale or shift the base's output."""
        return tuple(ref for ref in (self.magnitude, self.lora_bias, self.bias) if ref is not None)

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """All tensors, in the order in which they are hashed and read."""
        return tuple(ref for ref in (self.a, self.b) if ref is not None) + self.vectors

    @property
    def extra_rows(self) -> int:
        """Rows that follow those of B in the pool: gain and shift of the base's output, or none."""
        return 2 if self.vectors else 0


@dataclass(frozen=True, slots=True)
class RowsDelta:
    """LoRA of rows that the adapter brings, added to them once: scaling · BA for lm_head, its transpose for embed."""

    a: TensorRef  # [rank, hidden]; embed: [rank, len(ids)]
    b: TensorRef  # [len(ids), rank]; embed: [hidden, rank]
    scaling: float


@dataclass(frozen=True, slots=True)
class RowsPart:
    """The rows that one tensor brings, in its order."""

    ids: Sequence[int]  # distinct; a range where they follow each other, since a vocabulary has many
    ref: TensorRef  # [len(ids), width], or [width] for a single row
    delta: RowsDelta | None = None

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """All tensors, in the order in which they are read."""
        return (self.ref,) if self.delta is None else (self.ref, self.delta.a, self.delta.b)


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """All rows of one table that an adapter brings: in place of the base's, or after the base's last one."""

    table: Table
    width: int
    parts: tuple[RowsPart, ...]  # where two parts have a row, the later one's counts

    @property
    def num_rows(self) -> int:
        """Distinct rows."""
        if len(self.parts) == 1:
            return len(self.parts[0].ids)
        return len(set().union(*(part.ids for part in self.parts)))

    @property
    def stop(self) -> int:
        """One past the largest row."""
        return 1 + max(max(part.ids) for part in self.parts)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that the adapter's own tokenizer knows beyond the base model's vocabulary."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A checked adapter: every tensor of its files is here, with its place in the model and its scaling."""

    targets: tuple[TargetSpec, ...]  # sorted by layer, then by the order of KINDS; at least one
    features: tuple[str, ...] = ()  # what the config used beyond r and alpha, e.g. "rslora", "rank_pattern"
    warnings: tuple[str, ...] = ()
    base_model_name: str | None = None  # a hint from the config, never trusted
    files: tuple[str, ...] = ()  # the weight files, in the adapter's folder
    invocation: tuple[int, ...] = ()  # aLoRA: applied from the last occurrence of these tokens in the prompt on
    replaced: tuple[ReplacedRows, ...] = ()  # at most one of each table, in the order of Table
    num_new_tokens: int = 0  # token ids beyond the base's vocabulary, which the adapter brings rows for
    added_tokens: tuple[AddedToken, ...] = ()  # by id; of the tokenizer that ships with the adapter

    def first_token(self, prompt: Sequence[int]) -> int | None:
        """Where in a prompt the adapter begins to apply: 0, or for aLoRA its last invocation; None: nowhere."""
        if not self.invocation:
            return 0
        first, length, wanted = self.invocation[0], len(self.invocation), list(self.invocation)
        for start in range(len(prompt) - length, -1, -1):
            if prompt[start] == first and list(prompt[start : start + length]) == wanted:
                return start
        return None

    @property
    def max_rank(self) -> int:
        """Largest rank of any module."""
        return max(target.rank for target in self.targets)

    @property
    def tensors(self) -> frozenset[TensorRef]:
        """All tensors; the A of a fused module counts once, although each of its parts has it."""
        return frozenset(self.all_refs)

    @property
    def all_refs(self) -> tuple[TensorRef, ...]:
        """All tensors in the order in which they are read; some more than once."""
        deltas = tuple(ref for target in self.targets for ref in target.refs)
        return deltas + tuple(ref for rows in self.replaced for part in rows.parts for ref in part.refs)

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(ref.num_elements for ref in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored in the files."""
        return sum(ref.num_bytes for ref in self.tensors)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that the adapter changes, in the order of KINDS."""
        used = {target.kind for target in self.targets}
        return tuple(kind for kind in KINDS if kind in used)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Distinct dtypes of the tensors, sorted."""
        return tuple(sorted({ref.dtype for ref in self.all_refs}))

    @property
    def scalings(self) -> tuple[float, ...]:
        """Distinct scalings, sorted."""
        return tuple(sorted({target.scaling for target in self.targets if target.rank > 0}))

    def ranks(self, kind: str) -> dict[int, int]:
        """Layer → rank, for the layers where the adapter targets `kind`."""
        return {target.layer: target.rank for target in self.targets if target.kind == kind}


@dataclass(frozen=True, slots=True)
class TargetGeometry:
    """One kind of module of the base: its size and how many layers have it (1 for layer-less kinds)."""

    kind: str
    in_features: int  # for `embed`: the vocabulary
    out_features: int  # for `embed`: the hidden size; for `lm_head`: the vocabulary
    num_layers: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class BaseGeometry:
    """What the served base offers to adapters; built from the model's shape, without weights."""

    targets: tuple[TargetGeometry, ...]
    names: tuple[str, ...] = ()  # ids under which the base is known, to warn of an adapter made for another one
    tied_head: bool = False  # lm_head shares embed's matrix
    folder: str | None = None  # the checkpoint, to recognise unchanged copies of base matrices inside an adapter
    head_norm_width: int = 0  # of the norms on q and k; 0: there are none

    def target(self, kind: str) -> TargetGeometry | None:
        """The geometry of `kind`, or None if the base has no such module."""
        return next((target for target in self.targets if target.kind == kind), None)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return max(target.num_layers for target in self.targets)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        embed = self.target("embed")
        return 0 if embed is None else embed.in_features

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        embed = self.target("embed")
        return 0 if embed is None else embed.out_features


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where an adapter came from, as clients see it."""

    kind: str  # "local" or "hub"
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    commit: str | None = None
    subfolder: str | None = None
    chat_template: str | None = None  # sha256 of the adapter's own template, None if chats use the base's
    on_demand: bool = False  # a request named it; nobody registered it


class KindReport(NamedTuple):
    """How an adapter uses one kind."""

    kind: str
    num_modules: int
    layers: str  # ranges such as "0-3,7"; "" for layer-less kinds
    ranks: tuple[int, ...]  # distinct, sorted
    scalings: tuple[float, ...]  # distinct, sorted


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was understood of an adapter, for people and for the API. Plain data: `dataclasses.asdict` is JSON."""

    version: str
    rank: int
    targets: tuple[str, ...]
    kinds: tuple[KindReport, ...]
    scaling: tuple[float, ...]
    dtype: str  # one dtype, or several joined by "+"
    parameters: int
    bytes: int
    features: tuple[str, ...]
    warnings: tuple[str, ...]
    base_model_name: str | None
    replaced: tuple[str, ...] = ()  # tables of which it brings rows itself, with their number: "lm_head:32000"
    new_tokens: int = 0  # token ids beyond the base's vocabulary that it brings rows for
    added_tokens: tuple[AddedToken, ...] = ()  # what its own tokenizer calls such ids

    def plain(self) -> dict[str, object]:
        """As JSON knows it."""
        return asdict(self) | {"kinds": [kind._asdict() for kind in self.kinds]}

    @classmethod
    def of(cls, spec: AdapterSpec, version: str) -> LoadReport:
        """The report of a checked adapter."""
        return cls(
            version=version,
            rank=spec.max_rank,
            targets=spec.kinds,
            kinds=tuple(_kind_report(spec, kind) for kind in spec.kinds),
            scaling=spec.scalings,
            dtype="+".join(_DTYPE_NAMES[dtype] for dtype in spec.dtypes),
            parameters=spec.num_parameters,
            bytes=spec.num_bytes,
            features=spec.features,
            warnings=spec.warnings,
            base_model_name=spec.base_model_name,
            replaced=tuple(f"{rows.table}:{rows.num_rows}" for rows in spec.replaced),
            new_tokens=spec.num_new_tokens,
            added_tokens=spec.added_tokens,
        )


_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _kind_report(spec: AdapterSpec, kind: str) -> KindReport:
    used = [target for target in spec.targets if target.kind == kind]
    return KindReport(
        kind=kind,
        num_modules=len(used),
        layers="" if kind in LAYERLESS else _ranges(sorted(target.layer for target in used)),
        ranks=tuple(sorted(Counter(target.rank for target in used))),
        scalings=tuple(sorted({target.scaling for target in used if target.rank > 0})),
    )


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
