"""How adapters are cut into pages: page sizes of every kind and side, and what an adapter needs of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from loraserve.errors import AdapterFault, AdapterRefused, ConfigError
from loraserve.kernels.metadata import Kind, LoraTargetShape
from loraserve.lora.slab import ALIGNMENT, align, choose_slab

_VOCABULARY_SIDE = {Kind.EMBED: "a", Kind.LM_HEAD: "b"}
VOCABULARY_KINDS = frozenset(_VOCABULARY_SIDE)


class RankedTarget(Protocol):
    """One module of an adapter, as far as memory is concerned; `TargetSpec` and `StagedTarget` are such."""

    @property
    def kind(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def extra_rows(self) -> int: ...  # of B's side


class RowsOfTable(Protocol):
    """Rows that an adapter brings; `ReplacedRows` and `StagedRows` are such."""

    @property
    def num_rows(self) -> int: ...
    @property
    def width(self) -> int: ...


class RankedAdapter(Protocol):
    """Anything with modules of known ranks: `AdapterSpec`, `StagedAdapter`."""

    @property
    def targets(self) -> Sequence[RankedTarget]: ...
    @property
    def replaced(self) -> Sequence[RowsOfTable]: ...


class Side(NamedTuple):
    """A or B of one kind in the pool: rows of `width` elements, `rows` of them to an allocated page."""

    width: int
    rows: int
    page: int  # elements of one allocated page

    def num_pages(self, rank: int) -> int:
        """Allocated pages that hold `rank` rows."""
        return -(-rank // self.rows)


class PoolLayout:
    """Page sizes for the kinds of one base model.

    A page holds `page_rows` rank rows. A vocabulary-wide row (A of embed, B of lm_head) is a page by itself, since
    eight of them would be megabytes; so the tables of these two kinds count single rows, and the narrow side's ordinary
    pages appear in them row by row. Their narrow sides thus share slabs with all other kinds.
    """

    def __init__(self, shapes: Sequence[LoraTargetShape], page_rows: int, max_rank: int) -> None:
        if page_rows < 1 or max_rank < 1:
            raise ConfigError(f"--lora-page-rows and --max-lora-rank must be at least 1, got {page_rows}, {max_rank}")
        self.shapes = {shape.kind: shape for shape in shapes}
        if not shapes or len(self.shapes) < len(shapes):
            raise ConfigError("the base model must offer each target kind at most once, and at least one")
        self.page_rows = page_rows
        self.max_rank = max_rank
        self._sides = {shape.kind: self._sides_of(shape) for shape in shapes}

    def sides(self, kind: Kind) -> tuple[Side, Side]:
        """The sides A and B of a kind."""
        return self._sides[kind]

    def rows_side(self, width: int) -> Side:
        """Pages of rows that replace the base's; rows as wide as the hidden states share slabs with most A's."""
        return Side(width, self.page_rows, align(width * self.page_rows))

    def table_rows(self, kind: Kind) -> int:
        """Rank rows per entry of the kind's page tables."""
        return 1 if kind in _VOCABULARY_SIDE else self.page_rows

    def max_entries(self, kind: Kind) -> int:
        """Entries of the kind's page tables for the largest rank with gain and shift rows."""
        return -(-(self.max_rank + 2) // self.table_rows(kind))

    def alignment(self, kind: Kind) -> int:
        """Every entry of the kind's page tables is a multiple of so many elements."""
        sides = [side for side in self._sides[kind] if side.rows != self.table_rows(kind)]
        return math.gcd(ALIGNMENT, *(side.width for side in sides))  # entries inside a page are whole rows apart

    def slab_elements(self, num_elements: int) -> int:
        """Slab size for a pool of `num_elements`."""
        pages: dict[bool, set[int]] = {False: set(), True: set()}  # vocabulary-wide or not
        for kind, sides in self._sides.items():
            for name, side in zip("ab", sides, strict=True):
                pages[_VOCABULARY_SIDE.get(kind) == name].add(side.page)
        return choose_slab(sorted(pages[False]), sorted(pages[True]), num_elements)

    def demand(self, *adapters: RankedAdapter) -> dict[int, int]:
        """Page size → pages that these adapters need together. Raises `AdapterRefused` if one does not fit the base."""
        needed: Counter[int] = Counter()
        for adapter in adapters:
            for target in adapter.targets:
                kind = self._check(target)
                a, b = self._sides[kind]
                needed[a.page] += a.num_pages(target.rank)
                needed[b.page] += b.num_pages(target.rank + target.extra_rows)
            for rows in adapter.replaced:
                side = self.rows_side(rows.width)
                needed[side.page] += side.num_pages(rows.num_rows)
        return {size: count for size, count in needed.items() if count}

    def entries(self, kind: Kind, side: Side, pages: list[int], rank: int) -> list[int]:
        """Table entries (element offsets, one per `table_rows(kind)` rows) of `rank` rows that lie in `pages`."""
        rows = self.table_rows(kind)
        if side.rows == rows:
            return pages
        within = range(0, side.rows * side.width, rows * side.width)
        return [page + offset for page in pages for offset in within][: -(-rank // rows)]

    def _check(self, target: RankedTarget) -> Kind:
        if target.kind not in self.shapes:
            raise AdapterRefused(AdapterFault.UNKNOWN_MODULE, f"the base model has no {target.kind} to adapt")
        kind = Kind(target.kind)
        layers = self.shapes[kind].num_layers
        if not 0 <= target.layer < layers:
            text = f"{kind} of layer {target.layer} does not exist; the base model has {layers}"
            raise AdapterRefused(AdapterFault.UNKNOWN_MODULE, text)
        if target.rank + target.extra_rows < 1:
            raise AdapterRefused(AdapterFault.ZERO_SIZE, f"{kind} of layer {target.layer} has rank {target.rank}")
        if target.rank > self.max_rank:
            text = f"{kind} of layer {target.layer} has rank {target.rank}; the largest rank served is {self.max_rank}"
            raise AdapterRefused(AdapterFault.RANK_TOO_LARGE, text)
        return kind

    def _sides_of(self, shape: LoraTargetShape) -> tuple[Side, Side]:
        wide = _VOCABULARY_SIDE.get(shape.kind)

        def side(name: str, width: int) -> Side:
            rows = 1 if wide == name else self.page_rows
            return Side(width, rows, align(width * rows))

        return side("a", shape.in_features), side("b", shape.out_features)
