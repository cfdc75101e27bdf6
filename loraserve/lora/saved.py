"""What an adapter brings whole: saved modules, trained token rows, and rows for tokens that the base does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, NoReturn

import numpy as np

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.base_copies import is_unchanged_copy
from loraserve.lora.container import TensorReader
from loraserve.lora.files import AdapterFolder
from loraserve.lora.keys import Role
from loraserve.lora.mlx_config import MlxConfig
from loraserve.lora.modules import Place, RowPlace, canonical_path, other_modules, row_place_of, savable_modules
from loraserve.lora.naming import NamedTensors, WholeWeight
from loraserve.lora.peft_config import PeftConfig
from loraserve.lora.spec import MODULE_PATHS, BaseGeometry, ReplacedRows, RowsDelta, RowsPart, TensorRef
from loraserve.lora.strict_json import show
from loraserve.lora.tables import VOCABULARY, Table

MAX_SAVED_NAMES = 1024
_OTHER = {Table.EMBED: Table.LM_HEAD, Table.LM_HEAD: Table.EMBED}


class Brought(NamedTuple):
    """All rows that an adapter brings; `num_new_tokens` of them for token ids beyond the base's vocabulary."""

    replaced: tuple[ReplacedRows, ...] = ()
    num_new_tokens: int = 0
    features: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def refuse_saved_modules(config: PeftConfig, geometry: BaseGeometry | None) -> None:
    """Refuse fully trained modules that cannot be served.

    Raises `AdapterRefused`: `unsupported_variant`, or `invalid_config` for what PEFT cannot load either.
    """
    names = config.saved_modules
    if len(names) > MAX_SAVED_NAMES:
        _invalid(f"modules_to_save has {len(names)} entries, at most {MAX_SAVED_NAMES} are read")
    others = other_modules(geometry) if names or config.token_rows else ()
    for path in others:
        if names and path.endswith(names):
            raise AdapterRefused(
                AdapterFault.UNSUPPORTED_VARIANT,
                f"modules_to_save means {show(path)} too; only embed_tokens, lm_head and norms are served as whole "
                "modules: train the others with LoRA",
            )
    if len(config.token_rows) > MAX_SAVED_NAMES:
        _invalid(f"trainable_token_indices has {len(config.token_rows)} entries, at most {MAX_SAVED_NAMES} are read")
    vocabulary = tuple(MODULE_PATHS[table] for table in VOCABULARY)
    for name, ids in config.token_rows.items():
        if any(path.endswith(name) for path in (*others, *savable_modules(geometry)) if path not in vocabulary):
            raise AdapterRefused(
                AdapterFault.UNSUPPORTED_VARIANT,
                f"trainable_token_indices means modules other than embed_tokens and lm_head with {show(name)}",
            )
        if not any(path.endswith(name) for path in vocabulary):
            _invalid(f"trainable_token_indices names {show(name)}, which is neither embed_tokens nor lm_head")
        if not ids:
            _invalid(f"trainable_token_indices has no ids for {show(name)}")
        if min(ids) < 0 or len(set(ids)) < len(ids):
            _invalid("trainable_token_indices must be distinct ids from 0 on")


def collect_rows(
    config: PeftConfig | MlxConfig,
    named: NamedTensors,
    geometry: BaseGeometry | None,
    folder: AdapterFolder,
    deltas: Mapping[str, RowsDelta],
) -> Brought:
    """Check and gather all rows that an adapter brings. Copies of base matrices are compared with the base's.

    `deltas` are LoRA of rows after the base's last, by table.

    Raises `AdapterRefused`: `config_tensor_mismatch`, `missing_tensors`, `unknown_tensor`, `zero_size`,
    `shape_mismatch`, `invalid_config` for ids out of the vocabulary, `unsupported_variant` for what PEFT cannot
    compute and for copies that differ from the base's.
    """
    with TensorReader(folder) as reader:
        gathering = _Gathering(config, named, geometry, reader, deltas)
        gathering.require_tied_pair()
        gathering.sort_whole_weights()
        gathering.add_token_rows()
        return gathering.finish()


@dataclass(slots=True)
class _Gathering:
    config: PeftConfig | MlxConfig
    named: NamedTensors
    geometry: BaseGeometry | None
    reader: TensorReader
    deltas: Mapping[str, RowsDelta]
    saved: dict[RowPlace, TensorRef] = field(default_factory=dict)
    copies: dict[Table, TensorRef] = field(default_factory=dict)
    token_rows: dict[Table, RowsPart] = field(default_factory=dict)

    @property
    def tied(self) -> bool:
        return self.geometry is not None and self.geometry.tied_head

    @property
    def saved_names(self) -> tuple[str, ...]:
        return self.config.saved_modules if isinstance(self.config, PeftConfig) else ()

    def require_tied_pair(self) -> None:
        """LoRA of modules that were trained as one is the same twice; PEFT would let one half overwrite the other."""
        if not (self.tied and isinstance(self.config, PeftConfig) and self.config.ties_weights):
            return
        embed, head = (self.named.lora.get(Place(table, 0)) for table in VOCABULARY)
        if embed is None or head is None:
            return
        for one, other in ((embed.b, head.a), (embed.a, head.b)):
            if one is None or other is None:  # only a bias was trained
                return
            same = (one.dtype, one.shape) == (other.dtype, other.shape[::-1])
            if not same or not np.array_equal(self.reader.read(one), self.reader.read(other).T, equal_nan=True):
                _unsupported(
                    f"{show(one.name)} and {show(other.name)} are not each other's transpose, but ensure_weight_tying "
                    "makes them one adapter"
                )

    def sort_whole_weights(self) -> None:
        """Tell saved modules from copies of the base's."""
        by_place: dict[RowPlace, list[WholeWeight]] = {}
        for weight in self.named.whole:
            by_place.setdefault(weight.place, []).append(weight)
        for place, weights in by_place.items():
            if self._is_saved(weights[0]):
                self._add_saved(place, weights)
            else:
                self._add_copies(place, weights)
        self._require_all_saved()
        if self.tied and self.copies and not any(place.table in _OTHER for place in self.saved):
            # One matrix, which the file holds once or twice.
            first, *second = self.copies.values()
            for other in second:
                self._require_equal(first, other, "the base model has them as one matrix")
        if self.tied and len(self.copies) == 1:
            (table,) = self.copies
            if RowPlace(_OTHER[table], None) not in self.saved:
                self.copies[_OTHER[table]] = self.copies[table]

    def _is_saved(self, weight: WholeWeight) -> bool:
        paths = (weight.module, canonical_path(weight.module))
        if self.saved_names and any(path.endswith(self.saved_names) for path in paths):
            return True
        if not (isinstance(self.config, PeftConfig) and self.config.ties_weights and self.tied and self.saved_names):
            return False
        # Trained as one module, which is saved under both names.
        other = _OTHER.get(weight.place.table)
        return other is not None and MODULE_PATHS[other].endswith(self.saved_names)

    def _add_saved(self, place: RowPlace, weights: list[WholeWeight]) -> None:
        plain = [weight.ref for weight in weights if weight.role is Role.WEIGHT]
        wrong = next((weight.ref for weight in weights if weight.role is Role.BASE_WEIGHT), None)
        if wrong is not None or not plain:
            name = (wrong or weights[0].ref).name
            _contradicts(f"{show(name)} does not fit modules_to_save, which replaces the module")
        path = weights[0].module
        if place.row is None and Place(place.table, 0) in self.named.lora:
            _contradicts(f"modules_to_save names {show(path)}, but the file holds LoRA tensors for it")
        for other in plain[1:]:  # PEFT writes the same weight under two names when the vocabulary was resized
            self._require_equal(plain[0], other, f"both are {show(path)}", AdapterFault.UNKNOWN_TENSOR)
        self._check_shape(place, plain[0])
        self.saved[place] = plain[0]

    def _add_copies(self, place: RowPlace, weights: list[WholeWeight]) -> None:
        for weight in weights:
            if place.is_norm or weight.role is Role.ORIGINAL_WEIGHT:
                raise AdapterRefused(
                    AdapterFault.UNKNOWN_TENSOR,
                    f"{show(weight.ref.name)} belongs to a whole module, which modules_to_save does not name",
                )
            self._check_shape(place, weight.ref)
        for weight in weights[1:]:
            self._require_equal(weights[0].ref, weight.ref, "both are one matrix", AdapterFault.UNKNOWN_TENSOR)
        self.copies[place.table] = weights[0].ref

    def _require_all_saved(self) -> None:
        for path in savable_modules(self.geometry) if self.saved_names else ():
            if not path.endswith(self.saved_names):
                continue
            place = row_place_of(path, self.geometry)
            if self.geometry is None and (not isinstance(place, RowPlace) or place.is_norm):
                continue  # how many layers there are is not known
            if place not in self.saved:
                _lacks(path)
        whole = [RowPlace(table, None) for table in VOCABULARY]
        ties = isinstance(self.config, PeftConfig) and self.config.ties_weights and self.tied
        if ties and any(place in self.saved for place in whole):
            for place in whole:
                if place not in self.saved:
                    _lacks(MODULE_PATHS[place.table])
            embed, head = (self.saved[place] for place in whole)
            self._require_equal(embed, head, "ensure_weight_tying makes them one matrix")

    def _check_shape(self, place: RowPlace, ref: TensorRef) -> None:
        if 0 in ref.shape or not ref.shape:
            raise AdapterRefused(
                AdapterFault.ZERO_SIZE,
                f"tensor {show(ref.name)} has shape {list(ref.shape)}: was it saved from ZeRO-3 or FSDP without "
                "gathering the weights?",
            )
        if len(ref.shape) != (1 if place.is_norm else 2):
            _misshapen(ref, "1 size" if place.is_norm else "2 sizes")
        if self.geometry is None:
            return
        width = self.geometry.head_norm_width if place.table is Table.HEAD_NORM else self.geometry.hidden_size
        if ref.shape[-1] != width or (not place.is_norm and ref.shape[0] < self.geometry.vocab_size):
            wanted = f"[{width}]" if place.is_norm else f"at least [{self.geometry.vocab_size}, {width}]"
            _misshapen(ref, f"{wanted}: it was trained on another base")

    # -- trained tokens -------------------------------------------------------------------------------------------

    def add_token_rows(self) -> None:
        """Give trained token rows their ids; on a tied base the head's rows follow the embedding's."""
        if not isinstance(self.config, PeftConfig):
            return
        ids_of: dict[Table, tuple[int, ...]] = {}
        for name, ids in self.config.token_rows.items():
            for table in VOCABULARY:
                if MODULE_PATHS[table].endswith(name):
                    if table in ids_of:
                        _invalid(f"trainable_token_indices names {table} twice")
                    ids_of[table] = ids
        tensors = {rows.table: rows.ref for rows in self.named.token_rows}
        follows = (
            self.tied
            and Table.EMBED in ids_of
            and ids_of.get(Table.LM_HEAD, ids_of[Table.EMBED]) == (ids_of[Table.EMBED])
        )
        if self.tied and len(ids_of) == 2 and not follows and self.config.ties_weights:
            _invalid("trainable_token_indices has different ids for tied modules, but ensure_weight_tying is on")
        for table, ids in ids_of.items():
            if not (follows and table is Table.LM_HEAD):
                self._add_token_part(table, ids, tensors.get(table))
        if follows:
            self._follow(tensors)
        for table, ref in tensors.items():
            if table not in self.token_rows:
                _contradicts(f"trainable_token_indices has no ids for {show(ref.name)}")

    def _add_token_part(self, table: Table, ids: tuple[int, ...], ref: TensorRef | None) -> None:
        if ref is None:
            raise AdapterRefused(
                AdapterFault.MISSING_TENSORS,
                f"trainable_token_indices names {MODULE_PATHS[table]}, but the file has no rows for it",
            )
        self._refuse_second(table)
        if Place(table, 0) in self.named.lora:
            _unsupported(
                f"LoRA and trainable_token_indices on {table} together are not supported, nor are they by PEFT"
            )
        if 0 in ref.shape or not ref.shape:
            raise AdapterRefused(AdapterFault.ZERO_SIZE, f"tensor {show(ref.name)} has shape {list(ref.shape)}")
        width = ref.shape[-1] if self.geometry is None else self.geometry.hidden_size
        if ref.shape != (len(ids), width):
            _misshapen(ref, f"[{len(ids)}, {width}], a row for each of the trainable_token_indices")
        self.token_rows[table] = RowsPart(ids, ref)

    def _follow(self, tensors: dict[Table, TensorRef]) -> None:
        own, part = tensors.get(Table.LM_HEAD), self.token_rows[Table.EMBED]
        self._refuse_second(Table.LM_HEAD)
        head = self.named.lora.get(Place(Table.LM_HEAD, 0))
        if head is not None and head.magnitude is not None:
            _unsupported("trainable_token_indices together with DoRA on the tied lm_head is not supported")
        if own is not None:
            self._require_equal(part.ref, own, "the base model has them as one matrix")
        self.token_rows[Table.LM_HEAD] = part

    def _refuse_second(self, table: Table) -> None:
        if RowPlace(table, None) in self.saved:
            _unsupported(
                f"modules_to_save and trainable_token_indices on {table} together are not supported, nor by PEFT"
            )

    # -- all together ---------------------------------------------------------------------------------------------

    def finish(self) -> Brought:
        """Put the rows of each table together. Compares copies with the base's last, since that reads matrices."""
        parts: dict[Table, list[RowsPart]] = {table: [] for table in Table}
        vocab = 0 if self.geometry is None else self.geometry.vocab_size
        for table, ref in self.copies.items():
            if self.geometry is not None and ref.shape[0] > vocab:
                parts[table].append(
                    RowsPart(range(vocab, ref.shape[0]), ref.rows(vocab, ref.shape[0] - vocab), self.deltas.get(table))
                )
        for place, ref in sorted(self.saved.items(), key=lambda item: item[0].row or 0):
            ids = range(ref.shape[0]) if place.row is None else range(place.row, place.row + 1)
            parts[place.table].append(RowsPart(ids, ref))
        for table, part in self.token_rows.items():
            parts[table].append(part)
        replaced = tuple(
            ReplacedRows(table, found[0].ref.shape[-1], tuple(found)) for table, found in parts.items() if found
        )
        num_new = self._count_new_tokens(parts, vocab) if self.geometry is not None else 0
        self._compare_copies(vocab)
        features = ("new_tokens",) if num_new else ()
        return Brought(replaced, num_new, features + (("base_copy",) if self.copies else ()), self._warnings())

    def _count_new_tokens(self, parts: dict[Table, list[RowsPart]], vocab: int) -> int:
        stop = max((max(part.ids) + 1 for table in VOCABULARY for part in parts[table]), default=0)
        new = range(vocab, stop)
        if not new:
            return 0
        resized = any(
            len(ref.shape) == 2 and ref.shape[0] > vocab for ref in (*self.copies.values(), *self.saved.values())
        )
        for table in VOCABULARY:
            covered: set[int] = set()
            for part in parts[table]:
                covered.update(token for token in part.ids if token >= vocab)
            missing = next((token for token in new if token not in covered), None)
            if missing is None:
                continue
            if resized:
                raise AdapterRefused(
                    AdapterFault.SHAPE_MISMATCH,
                    f"the adapter has rows for {len(new)} tokens beyond the base model's {vocab}, but its {table} has "
                    f"none for token {missing}: save with save_embedding_layers=True, which writes both matrices only "
                    "if LoRA is on both or on neither",
                )
            _invalid(
                f"trainable_token_indices has ids up to {stop - 1}, but the base model's vocabulary has {vocab} tokens "
                f"and the adapter brings no row of {table} for token {missing}"
            )
        return len(new)

    def _compare_copies(self, vocab: int) -> None:
        base = self.geometry
        compared: set[TensorRef] = set()
        for table, ref in self.copies.items() if base is not None else ():
            assert base is not None
            if self.tied and ref in compared:
                continue
            compared.add(ref)
            if base.folder is None or not is_unchanged_copy(
                ref.rows(0, vocab), self.reader, table, base.folder, tied_head=base.tied_head
            ):
                raise AdapterRefused(
                    AdapterFault.UNSUPPORTED_VARIANT,
                    f"{show(ref.name)} is a whole matrix that differs from the base model's; if it was not trained, "
                    "save with save_embedding_layers=False, else name it in modules_to_save",
                )

    def _warnings(self) -> tuple[str, ...]:
        found = []
        if self.geometry is None:
            found += [f"{show(ref.name)} was not compared with the base model's" for ref in self.copies.values()]
        spelled = [path for weight in self.named.whole for path in (weight.module, canonical_path(weight.module))]
        for name in self.saved_names:
            if not any(path.endswith(name) for path in spelled):
                found.append(f"modules_to_save names {show(name)}, which no module of the base model is called")
        return tuple(found)

    def _require_equal(
        self, one: TensorRef, other: TensorRef, why: str, fault: AdapterFault = AdapterFault.UNSUPPORTED_VARIANT
    ) -> None:
        """Refuse two tensors that must hold the same bytes and do not."""
        if one is other:
            return
        same = (one.shape, one.dtype) == (other.shape, other.dtype)
        if not same or any(a != b for a, b in zip_longest(self.reader.chunks(one), self.reader.chunks(other))):
            raise AdapterRefused(fault, f"{show(one.name)} and {show(other.name)} differ, but {why}")


def _misshapen(ref: TensorRef, wanted: str) -> NoReturn:
    raise AdapterRefused(
        AdapterFault.SHAPE_MISMATCH, f"{show(ref.name)} has shape {list(ref.shape)}, this base model needs {wanted}"
    )


def _lacks(path: str) -> NoReturn:
    raise AdapterRefused(
        AdapterFault.MISSING_TENSORS, f"modules_to_save names {show(path)}, but the file has no weight of it"
    )


def _contradicts(problem: str) -> NoReturn:
    raise AdapterRefused(AdapterFault.CONFIG_TENSOR_MISMATCH, problem)


def _unsupported(problem: str) -> NoReturn:
    raise AdapterRefused(AdapterFault.UNSUPPORTED_VARIANT, problem)


def _invalid(problem: str) -> NoReturn:
    raise AdapterRefused(AdapterFault.INVALID_CONFIG, problem)
