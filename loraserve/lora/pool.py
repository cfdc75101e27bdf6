"""`LoraPool`: adapter weights on the device, paged by rank row, and the tables by which the kernels find them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loraserve.config import format_bytes
from loraserve.errors import ConfigError
from loraserve.kernels.huge_pages import map_bytes
from loraserve.kernels.metadata import Kind, LoraTables, LoraTarget, LoraTargetShape, SlotRows
from loraserve.lora.copier import Arrived, Copier, make_copier
from loraserve.lora.layout import VOCABULARY_KINDS, PoolLayout, RankedAdapter
from loraserve.lora.slab import Demand, Offsets, SlabAllocator, SlabCounts
from loraserve.lora.weights import StagedAdapter


class PoolStats(NamedTuple):
    """What the pool holds. `used_bytes` counts pages; `lent_bytes` counts the slabs that these pages keep busy."""

    capacity_bytes: int
    used_bytes: int
    lent_bytes: int
    num_slots: int
    used_slots: int


class _Run(NamedTuple):
    """Neighbouring elements on both sides: `source[begin:end]` goes to `storage` from `offset`."""

    offset: int
    source: Tensor
    begin: int
    end: int


@dataclass(slots=True)
class _KindEntries:
    """One kind's rows of the page tables, gathered on the host until the adapter is written."""

    a: Offsets  # [num_layers, max_pages]
    b: Offsets
    ranks: np.ndarray  # [num_layers] int32
    affine: np.ndarray  # [num_layers] bool


@dataclass(slots=True)
class PoolReservation:
    """A slot and all pages of one adapter. The kernels do not see it until `LoraPool.write` has returned True."""

    slot: int
    num_bytes: int
    pages: dict[int, Offsets]
    counts: SlabCounts
    bytes_written: int = 0
    written: bool = False
    _runs: Iterator[_Run] | None = None
    _rest: _Run | None = None  # the part of a run that did not fit into the last piece
    _arrived: Arrived | None = None  # once everything is on its way
    _entries: dict[Kind, _KindEntries] = field(default_factory=dict)
    _replaced: dict[str, SlotRows] = field(default_factory=dict)


class LoraPool:
    """One flat tensor of adapter weights, a slot table, and `tables` for the kernels. Not thread-safe.

    `storage` is [num_elements] in the pool's dtype. Freed pages are not cleared: rows at or past a slot's rank are
    never read. Page tables start narrow and are replaced by wider tensors when a larger rank arrives.
    """

    def __init__(
        self,
        targets: Sequence[LoraTargetShape],
        capacity_bytes: int,
        page_rows: int,
        max_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        copier: Copier | None = None,
    ) -> None:
        if max_slots < 1:
            raise ConfigError(f"--max-lora-slots must be at least 1, got {max_slots}")
        self.layout = PoolLayout(targets, page_rows, max_rank)
        self.dtype = dtype
        self.device = device
        self.max_slots = max_slots
        self._itemsize = dtype.itemsize
        num_elements = capacity_bytes // dtype.itemsize
        slab = self.layout.slab_elements(num_elements)
        if num_elements < slab:
            need = format_bytes(slab * dtype.itemsize)
            text = f"--lora-memory of {format_bytes(capacity_bytes)} does not hold one page; it needs at least {need}"
            raise ConfigError(text)
        self._slabs = SlabAllocator(num_elements, slab)
        num_elements = self._slabs.num_slabs * slab
        if device.type == "cpu":
            self.storage = map_bytes(num_elements * dtype.itemsize).view(dtype)
        else:
            self.storage = torch.empty(num_elements, dtype=dtype, device=device)
        self.tables = LoraTables()
        self._copier = copier or make_copier(device)
        self._free_slots = list(range(max_slots))
        self._held: dict[int, PoolReservation] = {}

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.storage.numel() * self._itemsize

    def stats(self) -> PoolStats:
        """Bytes and slots in use."""
        lent = (self._slabs.num_slabs - self._slabs.num_free_slabs) * self._slabs.slab_elements
        return PoolStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._slabs.used_elements * self._itemsize,
            lent_bytes=lent * self._itemsize,
            num_slots=self.max_slots,
            used_slots=len(self._held),
        )

    def bytes_needed(self, adapter: RankedAdapter) -> int:
        """Bytes of the pages that an adapter takes. Raises `AdapterRefused` if it does not fit the base model."""
        return _elements(self.layout.demand(adapter)) * self._itemsize

    def fits_empty(self, *adapters: RankedAdapter) -> bool:
        """Whether these adapters would fit together if the pool were empty; False means: never."""
        return len(adapters) <= self.max_slots and self._slabs.fits_empty(self.layout.demand(*adapters))

    def fits(self, demand: Demand, freeing: Sequence[int] = ()) -> bool:
        """Whether `reserve` of an adapter with this `layout.demand` would succeed now, or after freeing these slots."""
        if not self._free_slots and not freeing:
            return False
        return self._slabs.fits(demand, [self._held[slot].counts for slot in freeing])

    def reserve_tables(self) -> None:
        """Make every table as wide as it can get, so that none is replaced later and captured graphs stay valid."""
        for kind in self.layout.shapes:
            self._add_affine(self._target(kind, self.layout.max_entries(kind)))

    def reserve(self, staged: StagedAdapter) -> PoolReservation | None:
        """Take a slot and all pages for an adapter, or None and nothing taken. Raises `AdapterRefused`.

        The adapter's tensors must be kept as they are until `write` has returned True.
        """
        demand = self.layout.demand(staged)
        if staged.dtype != self.dtype:
            raise ValueError(f"the adapter is staged in {staged.dtype}, the pool holds {self.dtype}")
        if not self._free_slots:
            return None
        pages = self._slabs.alloc(demand)
        if pages is None:
            return None
        slot = heapq.heappop(self._free_slots)
        num_bytes = _elements(demand) * self._itemsize
        held = PoolReservation(slot, num_bytes, pages, self._slabs.counts(pages))
        held._runs = self._plan_runs(held, staged)
        self._copier.begin()
        self._held[slot] = held
        return held

    def write(self, held: PoolReservation, max_bytes: int) -> bool:
        """Copy the next piece, at most `max_bytes` (but at least one element). True once the whole adapter is visible.

        Forwards launched before that do not see it, and none waits for it: once all is on its way, this returns False
        until the copier says that it has arrived.
        """
        if self._held.get(held.slot) is not held:
            raise ValueError(f"slot {held.slot} was freed while its adapter was being written")
        if held.written:
            return True
        assert held._runs is not None
        budget = max(1, max_bytes // self._itemsize)
        while True:
            run = held._rest or next(held._runs, None)
            if run is None:
                held._arrived = held._arrived or self._copier.mark()
                if not held._arrived():
                    return False
                self._publish(held)
                return True
            if budget == 0:
                held._rest = run
                return False
            length = min(budget, run.end - run.begin)
            source = run.source[run.begin : run.begin + length]
            self._copier.copy(self.storage[run.offset : run.offset + length], source)
            budget -= length
            held.bytes_written += length * self._itemsize
            rest = run._replace(offset=run.offset + length, begin=run.begin + length)
            held._rest = rest if rest.begin < rest.end else None

    def free(self, slot: int) -> None:
        """Give a slot and its pages back, written or not. Raises `ValueError` if the slot is not in use."""
        held = self._held.pop(slot, None)
        if held is None:
            raise ValueError(f"slot {slot} is not in use")
        if held.written:
            for kind in held._entries:
                target = self.tables.targets[kind]
                target.ranks[:, slot] = 0
                if target.affine is not None:
                    target.affine[:, slot] = False
            self.tables.affine_slots.discard(slot)
            self.tables.replaced.pop(slot, None)
            self.tables.vocabulary_slots.discard(slot)
        held._runs = held._rest = None
        self._slabs.free(held.pages)
        heapq.heappush(self._free_slots, slot)

    def check(self) -> None:
        """Raise `AssertionError` if pages, slots and tables do not agree. Reads device tables; for tests and idle."""
        self._slabs.check()
        starts: set[int] = set()
        for slot, held in self._held.items():
            mine = [int(start) for offsets in held.pages.values() for start in offsets]
            assert starts.isdisjoint(mine), f"slot {slot} shares a page"
            starts.update(mine)
        held_bytes = sum(held.num_bytes for held in self._held.values())
        assert held_bytes == self._slabs.used_elements * self._itemsize, "pages in use and pages held differ"
        free = set(self._free_slots)
        assert len(free) == len(self._free_slots), "a slot is free twice"
        assert free.isdisjoint(self._held), "a slot is free and in use"
        assert len(free) + len(self._held) == self.max_slots, "a slot is lost"
        visible = {slot for slot, held in self._held.items() if held.written}
        for target in self.tables.targets.values():
            seen = set(torch.nonzero(target.ranks.any(dim=0)).flatten().tolist())
            if target.affine is not None:
                seen |= set(torch.nonzero(target.affine.any(dim=0)).flatten().tolist())
            assert seen <= visible, f"slots {seen - visible} are visible without being written"
        assert self.tables.affine_slots <= visible, "a slot that is free scales or shifts"
        assert self.tables.replaced.keys() <= visible, "a slot that is free replaces rows"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _plan_runs(self, held: PoolReservation, staged: StagedAdapter) -> Iterator[_Run]:
        """All copies of an adapter, made on the way so that no step pays for the planning of all layers at once."""
        cursor = dict.fromkeys(held.pages, 0)
        # Plain lists: a matrix has a handful of pages, far too few for array operations to pay.
        starts = {size: offsets.tolist() for size, offsets in held.pages.items()}
        for target in staged.targets:
            kind = target.kind
            into = held._entries.get(kind)
            if into is None:
                into = held._entries[kind] = self._empty_entries(staged, kind)
            into.ranks[target.layer] = target.rank
            into.affine[target.layer] = target.extra_rows > 0
            for side, matrix, table in zip(
                self.layout.sides(kind), (target.a, target.b), (into.a, into.b), strict=True
            ):
                rows = matrix.shape[0]
                if rows == 0:  # A of a module of which only the bias was trained
                    continue
                at, count = cursor[side.page], side.num_pages(rows)
                cursor[side.page] = at + count
                pages = starts[side.page][at : at + count]
                entries = self.layout.entries(kind, side, pages, rows)
                table[target.layer, : len(entries)] = entries
                yield from _runs(entries, matrix, self.layout.table_rows(kind))
        for brought in staged.replaced:
            side = self.layout.rows_side(brought.width)
            at, count = cursor[side.page], side.num_pages(brought.num_rows)
            cursor[side.page] = at + count
            entries = starts[side.page][at : at + count]
            row = np.arange(brought.num_rows)
            offsets = np.array(entries, np.int64)[row // side.rows] + row % side.rows * brought.width
            held._replaced[brought.table] = SlotRows(self.storage, brought.ids, offsets, brought.width)
            yield from _runs(entries, brought.rows, side.rows)

    def _empty_entries(self, staged: StagedAdapter, kind: Kind) -> _KindEntries:
        layers = self.layout.shapes[kind].num_layers
        rows = max(target.rank + target.extra_rows for target in staged.targets if target.kind == kind)
        width = -(-rows // self.layout.table_rows(kind))
        a, b = np.zeros((2, layers, width), np.int64)
        return _KindEntries(a, b, np.zeros(layers, np.int32), np.zeros(layers, np.bool_))

    def _publish(self, held: PoolReservation) -> None:
        for kind, entries in held._entries.items():
            width = entries.a.shape[1]
            target = self._target(kind, width)
            target.a_pages[:, held.slot, :width] = torch.from_numpy(entries.a).to(self.device, non_blocking=True)
            target.b_pages[:, held.slot, :width] = torch.from_numpy(entries.b).to(self.device, non_blocking=True)
            target.ranks[:, held.slot] = torch.from_numpy(entries.ranks).to(self.device, non_blocking=True)
            if entries.affine.any():
                self._add_affine(target)
                assert target.affine is not None
                target.affine[:, held.slot] = torch.from_numpy(entries.affine).to(self.device, non_blocking=True)
                self.tables.affine_slots.add(held.slot)
            if kind in VOCABULARY_KINDS:
                self.tables.vocabulary_slots.add(held.slot)
        if held._replaced:
            self.tables.replaced[held.slot] = held._replaced
        held.written = True
        held._runs = None

    def _add_affine(self, target: LoraTarget) -> None:
        if target.affine is None:
            target.affine = torch.zeros_like(target.ranks, dtype=torch.bool)
            self.tables.revision += 1

    def _target(self, kind: Kind, width: int) -> LoraTarget:
        """The kind's target, with page tables of at least `width` entries."""
        target = self.tables.targets.get(kind)
        if target is None:
            shape = self.layout.shapes[kind]
            target = LoraTarget(
                storage=self.storage,
                a_pages=self._page_table(shape.num_layers, width),
                b_pages=self._page_table(shape.num_layers, width),
                ranks=torch.zeros((shape.num_layers, self.max_slots), dtype=torch.int32, device=self.device),
                page_rows=self.layout.table_rows(kind),
                in_features=shape.in_features,
                out_features=shape.out_features,
                out_offset=shape.out_offset,
                alignment=self.layout.alignment(kind),
            )
            self.tables.targets[kind] = target
            self.tables.revision += 1
        if target.a_pages.shape[2] < width:
            target.a_pages = self._widened(target.a_pages, width)
            target.b_pages = self._widened(target.b_pages, width)
            self.tables.revision += 1
        return target

    def _page_table(self, num_layers: int, width: int) -> Tensor:
        # Powers of two, so that a growing mix of ranks replaces the tables a few times only.
        size = 1 << (width - 1).bit_length()
        return torch.zeros((num_layers, self.max_slots, size), dtype=torch.int64, device=self.device)

    def _widened(self, table: Tensor, width: int) -> Tensor:
        wider = self._page_table(table.shape[0], width)
        wider[:, :, : table.shape[2]] = table
        return wider


def _elements(demand: Demand) -> int:
    return sum(size * count for size, count in demand.items())


def _runs(entries: list[int], matrix: Tensor, rows: int) -> Iterator[_Run]:
    """Copies of a matrix [rank, width] to its table entries of `rows` rows; neighbouring entries become one run."""
    step = rows * matrix.shape[1]
    flat = matrix.view(-1)
    first = 0
    for i in range(1, len(entries) + 1):
        if i == len(entries) or entries[i] - entries[i - 1] != step:
            yield _Run(entries[first], flat, first * step, min(i * step, flat.shape[0]))
            first = i
