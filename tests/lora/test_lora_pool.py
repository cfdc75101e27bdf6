"""The device pool: pages, tables, content, and books that always balance."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_adapters import (
    LAYERS,
    LINEAR_KINDS,
    SHAPES,
    VOCAB,
    WIDTHS,
    TinyAdapter,
    make_adapter,
    make_pool,
    read_back,
    uniform_ranks,
)

from loraserve.errors import AdapterFault, AdapterRefused, ConfigError
from loraserve.kernels.metadata import Kind, LoraSegments
from loraserve.kernels.reference import ReferenceOps
from loraserve.lora.pool import LoraPool, PoolReservation
from loraserve.lora.slab import ALIGNMENT, SlabAllocator, choose_slab
from loraserve.lora.weights import StagedAdapter, stage

KIB = 1024

# -- slabs --------------------------------------------------------------------------------------------------------


def test_slabs_are_lent_and_come_back() -> None:
    slabs = SlabAllocator(10 * 64, 64)
    assert slabs.num_slabs == 10
    first = slabs.alloc({16: 5, 32: 2, 192: 1})
    assert first is not None
    slabs.check()
    assert {size: len(offsets) for size, offsets in first.items()} == {16: 5, 32: 2, 192: 1}
    assert slabs.used_elements == 5 * 16 + 2 * 32 + 192
    assert slabs.num_free_slabs == 10 - 2 - 1 - 3
    slabs.free({16: first[16]})
    assert slabs.num_free_slabs == 10 - 1 - 3
    second = slabs.alloc({32: 2 * (10 - 1 - 3)})
    assert second is not None
    assert slabs.alloc({16: 1}) is None
    assert not slabs.fits({16: 1})
    assert slabs.fits({16: 1}, [slabs.counts({32: second[32][:2]})])
    slabs.free(second)
    slabs.free({32: first[32], 192: first[192]})
    slabs.check()
    assert slabs.num_free_slabs == 10
    assert slabs.used_elements == 0


def test_a_run_needs_neighbouring_slabs() -> None:
    slabs = SlabAllocator(6 * 64, 64)
    pages = slabs.alloc({64: 6})
    assert pages is not None
    slabs.free({64: pages[64][1::2]})
    assert slabs.num_free_slabs == 3
    assert not slabs.fits({128: 1})
    assert slabs.fits({128: 1}, [slabs.counts({64: pages[64][:1]})])
    slabs.free({64: pages[64][:1]})
    assert slabs.alloc({128: 1}) is not None
    slabs.check()


@pytest.mark.parametrize("size", [16, 128])
def test_freeing_twice_is_an_error(size: int) -> None:
    slabs = SlabAllocator(10 * 64, 64)
    pages = slabs.alloc({size: 2})
    other = slabs.alloc({16: 1})
    assert pages is not None
    assert other is not None
    slabs.free({size: pages[size][:1]})
    with pytest.raises(ValueError, match="in use"):
        slabs.free({size: pages[size][:1]})
    slabs.check()


STEPS = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from([16, 48, 64, 80, 160]), st.integers(1, 7), min_size=1), st.integers(0, 50)
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_slabs_never_overlap_and_fits_tells_the_truth(steps: list[dict[int, int] | int]) -> None:
    slabs = SlabAllocator(24 * 64 + 30, 64)
    held: list[dict[int, np.ndarray]] = []
    for step in steps:
        if isinstance(step, dict):
            promised = slabs.fits(step)
            pages = slabs.alloc(step)
            assert promised == (pages is not None)
            if pages is None:
                # What the plan promises for after freeing must be true as well.
                if held and slabs.fits(step, [slabs.counts(held[0])]):
                    slabs.free(held.pop(0))
                    pages = slabs.alloc(step)
                    assert pages is not None
                    held.append(pages)
            else:
                held.append(pages)
        elif held:
            slabs.free(held.pop(step % len(held)))
        slabs.check()
        owned = np.zeros(24 * 64 + 30, np.int64)
        for pages in held:
            for size, offsets in pages.items():
                for offset in offsets.tolist():
                    assert offset % ALIGNMENT == 0
                    owned[offset : offset + size] += 1
        assert owned.max() <= 1, "two pages share an element"
        assert owned.sum() == slabs.used_elements
    for pages in held:
        slabs.free(pages)
    assert slabs.num_free_slabs == 24


@pytest.mark.parametrize(
    ("small", "large", "num_elements"),
    [
        ([4608, 1536, 12288], [49152], 134_217_728),
        ([8 * 4096, 8 * 1024, 8 * 14336], [128256], 10**9),
        ([8 * 896, 8 * 128, 8 * 4864], [151936], 10**7),
        ([512, 256, 1024], [1008], 100_000),
    ],
    ids=["smollm2", "llama-8b", "qwen-0.5b", "tiny"],
)
def test_the_slab_size_wastes_little(small: list[int], large: list[int], num_elements: int) -> None:
    slab = choose_slab(small, large, num_elements)
    assert slab % ALIGNMENT == 0
    assert max(small) <= slab <= max(max(small), num_elements // 16)
    for size in (*small, *large):
        taken = slab // size * size / slab if size <= slab else size / (-(-size // slab) * slab)
        assert taken >= 0.87, f"pages of {size} leave {1 - taken:.0%} of their slabs unused"


# -- adapters in pages --------------------------------------------------------------------------------------------


def put(pool: LoraPool, staged: StagedAdapter, max_bytes: int = 1 << 30) -> PoolReservation:
    held = pool.reserve(staged)
    assert held is not None
    while not pool.write(held, max_bytes):
        pass
    return held


def assert_content(pool: LoraPool, slot: int, adapter: TinyAdapter) -> None:
    for shape in SHAPES:
        for layer in range(shape.num_layers):
            found = read_back(pool, slot, shape.kind, layer)
            expected = adapter.factors.get((shape.kind, layer))
            if expected is None:
                assert found is None, f"{shape.kind} of layer {layer} is not targeted"
                continue
            assert found is not None
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def staged_of(adapter: TinyAdapter, pool: LoraPool) -> StagedAdapter:
    return stage(adapter.spec, adapter.folder, pool.layout, pool.dtype)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[TinyAdapter]:
    """Mixed ranks, kinds and layers: uniform, per-layer, one layer only, vocabulary kinds, odd ranks."""
    root = tmp_path_factory.mktemp("adapters")
    mixed = {(kind, layer): 1 + (3 * layer + i) % 13 for layer in range(LAYERS) for i, kind in enumerate(LINEAR_KINDS)}
    ranks = [
        uniform_ranks(4),
        uniform_ranks(8, LINEAR_KINDS),
        mixed,
        {(Kind.DOWN, 1): 5},
        {(Kind.EMBED, 0): 3, (Kind.LM_HEAD, 0): 6, (Kind.Q, 2): 1},
        {(Kind.LM_HEAD, 0): 9},
        uniform_ranks(33, [Kind.GATE]),
    ]
    return [make_adapter(root / str(i), r, seed=i, scaling=0.5 + i) for i, r in enumerate(ranks)]


@pytest.mark.parametrize("page_rows", [1, 3, 4, 8])
def test_every_shape_of_adapter_is_stored_exactly(adapters: list[TinyAdapter], page_rows: int) -> None:
    pool = make_pool(600 * KIB, page_rows=page_rows)
    slots = [put(pool, staged_of(adapter, pool)).slot for adapter in adapters]
    assert len(set(slots)) == len(slots)
    for slot, adapter in zip(slots, adapters, strict=True):
        assert_content(pool, slot, adapter)
        assert pool.bytes_needed(adapter.spec) == pool.bytes_needed(staged_of(adapter, pool))
    pool.check()
    for slot in slots:
        pool.free(slot)
    pool.check()
    stats = pool.stats()
    assert (stats.used_bytes, stats.lent_bytes, stats.used_slots) == (0, 0, 0)


def test_bytes_are_pages_of_the_real_ranks(tmp_path: Path) -> None:
    pool = make_pool(600 * KIB, page_rows=4)
    few = make_adapter(tmp_path / "few", {(Kind.Q, 0): 4, (Kind.Q, 1): 5})
    q = WIDTHS[Kind.Q]
    pages = 1 + 2
    assert pool.bytes_needed(few.spec) == 4 * pages * 4 * (q.in_features + q.out_features)
    held = put(pool, staged_of(few, pool))
    assert pool.stats().used_bytes == held.num_bytes == pool.bytes_needed(few.spec)
    # Single vocabulary-wide rows, not whole pages of them.
    head = make_adapter(tmp_path / "head", {(Kind.LM_HEAD, 0): 5})
    row = -(-VOCAB // ALIGNMENT) * ALIGNMENT
    assert pool.bytes_needed(head.spec) == 4 * (2 * 4 * WIDTHS[Kind.LM_HEAD].in_features + 5 * row)


def test_wide_rows_span_slabs(tmp_path: Path) -> None:
    pool = make_pool(4 * KIB, page_rows=1)
    adapter = make_adapter(tmp_path / "a", {(Kind.EMBED, 0): 2, (Kind.LM_HEAD, 0): 1, (Kind.K, 0): 2})
    assert pool.layout.sides(Kind.EMBED)[0].page > pool.layout.slab_elements(KIB)
    held = put(pool, staged_of(adapter, pool), max_bytes=100)
    assert_content(pool, held.slot, adapter)
    pool.check()


def test_random_walk(adapters: list[TinyAdapter]) -> None:
    pool = make_pool(70 * KIB, max_slots=5)
    staged = [staged_of(adapter, pool) for adapter in adapters]
    walk = random.Random(7)
    held: dict[int, int] = {}  # slot → adapter
    refused = 0
    for step in range(200):
        if held and walk.random() < 0.45:
            slot = walk.choice(sorted(held))
            pool.free(slot)
            del held[slot]
        else:
            i = walk.randrange(len(adapters))
            promised = pool.fits(pool.layout.demand(adapters[i].spec))
            reservation = pool.reserve(staged[i])
            assert promised == (reservation is not None)
            if reservation is None:
                refused += 1
                continue
            while not pool.write(reservation, 5000):
                pass
            held[reservation.slot] = i
        pool.check()
        assert pool.stats().used_bytes == sum(pool.bytes_needed(adapters[i].spec) for i in held.values())
        for slot, i in held.items() if step % 8 == 0 else ():
            assert_content(pool, slot, adapters[i])
    assert refused > 10
    for slot in held:
        pool.free(slot)
    pool.check()
    assert pool.stats().lent_bytes == 0


def test_planned_evictions_really_make_room(adapters: list[TinyAdapter]) -> None:
    pool = make_pool(70 * KIB, max_slots=4)
    staged = [staged_of(adapter, pool) for adapter in adapters]
    walk = random.Random(3)
    held: list[int] = []
    planned = 0
    for _ in range(100):
        i = walk.randrange(len(adapters))
        while not pool.fits(pool.layout.demand(adapters[i].spec)):
            victims = walk.sample(held, walk.randint(1, len(held)))
            if pool.fits(pool.layout.demand(adapters[i].spec), victims):
                planned += len(victims)
                for slot in victims:
                    pool.free(slot)
                    held.remove(slot)
        held.append(put(pool, staged[i]).slot)
    assert planned > 20
    pool.check()


def test_an_adapter_is_invisible_until_it_is_whole(adapters: list[TinyAdapter]) -> None:
    pool = make_pool(600 * KIB)
    staged = staged_of(adapters[1], pool)
    held = pool.reserve(staged)
    assert held is not None
    pieces, before = 0, 0
    while not pool.write(held, 1000):
        pieces += 1
        assert held.bytes_written - before <= 1000, "a piece is larger than allowed"
        before = held.bytes_written
        assert all(not target.ranks.any() for target in pool.tables.targets.values())
        pool.check()
    assert pieces >= staged.num_bytes // 1000
    assert held.bytes_written == staged.num_bytes
    assert_content(pool, held.slot, adapters[1])
    assert pool.write(held, 1000), "writing on is harmless"


def test_a_reservation_can_be_given_up(adapters: list[TinyAdapter]) -> None:
    pool = make_pool(600 * KIB)
    held = pool.reserve(staged_of(adapters[1], pool))
    assert held is not None
    assert not pool.write(held, 1000)
    pool.free(held.slot)
    pool.check()
    assert pool.stats().used_bytes == 0
    with pytest.raises(ValueError, match="freed"):
        pool.write(held, 1000)
    with pytest.raises(ValueError, match="not in use"):
        pool.free(held.slot)


def test_tables_grow_with_the_ranks_that_come(adapters: list[TinyAdapter], tmp_path: Path) -> None:
    pool = make_pool(600 * KIB, page_rows=4)
    assert pool.tables.targets == {}
    small = put(pool, staged_of(adapters[0], pool))
    assert set(pool.tables.targets) == {Kind.Q, Kind.V}
    target = pool.tables.targets[Kind.Q]
    assert tuple(target.a_pages.shape) == (LAYERS, 8, 1)
    large = make_adapter(tmp_path / "large", uniform_ranks(19, [Kind.Q]), seed=3)
    put(pool, staged_of(large, pool))
    assert target is pool.tables.targets[Kind.Q]
    assert target.a_pages.shape == target.b_pages.shape == (LAYERS, 8, 8)
    assert_content(pool, small.slot, adapters[0])
    pool.free(small.slot)
    assert not target.ranks[:, small.slot].any()
    assert Kind.V in pool.tables.targets
    assert target.a_pages.dtype == torch.int64
    assert target.ranks.dtype == torch.int32


def test_two_kinds_in_one_slot_do_not_leak_into_the_next(adapters: list[TinyAdapter]) -> None:
    pool = make_pool(600 * KIB, max_slots=1)
    for i in (2, 4, 0, 5, 1, 3, 6):
        held = put(pool, staged_of(adapters[i], pool))
        assert held.slot == 0
        assert_content(pool, 0, adapters[i])
        assert pool.reserve(staged_of(adapters[0], pool)) is None
        pool.free(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_find_the_adapter(adapters: list[TinyAdapter], dtype: torch.dtype) -> None:
    pool = make_pool(600 * KIB, dtype=dtype)
    slots = [put(pool, staged_of(adapter, pool)).slot for adapter in adapters]
    ops = ReferenceOps()
    segments = LoraSegments(
        tokens=torch.arange(2 * len(slots), dtype=torch.int32),
        weights=torch.ones(2 * len(slots)),
        slots=torch.tensor(slots, dtype=torch.int32),
        indptr=torch.arange(0, 2 * len(slots) + 1, 2, dtype=torch.int32),
        max_segment=2,
    )
    generator = torch.Generator().manual_seed(1)
    for kinds, width in (((Kind.Q, Kind.K, Kind.V), 64), ((Kind.GATE, Kind.UP), 96), ((Kind.LM_HEAD,), VOCAB)):
        x = torch.randn(2 * len(slots), 32, generator=generator)
        for layer in range(WIDTHS[kinds[0]].num_layers):
            y = torch.zeros(2 * len(slots), width)
            ops.lora_apply(y, x, pool.tables.group(*kinds), layer, segments)
            expected = torch.zeros_like(y)
            for i, adapter in enumerate(adapters):
                for kind in kinds:
                    if (kind, layer) in adapter.factors:
                        a, b = (m.to(dtype).float() for m in adapter.factors[kind, layer])
                        columns = slice(WIDTHS[kind].out_offset, WIDTHS[kind].out_offset + WIDTHS[kind].out_features)
                        expected[2 * i : 2 * i + 2, columns] += x[2 * i : 2 * i + 2] @ a.T @ b
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    ids = torch.randint(VOCAB, (2 * len(slots),), generator=generator)
    y = torch.zeros(2 * len(slots), 32)
    ops.lora_embed(y, ids, pool.tables.targets[Kind.EMBED], segments)
    a, b = (m.to(dtype).float() for m in adapters[4].factors[Kind.EMBED, 0])
    expected = torch.zeros_like(y)
    expected[8:10] = a.T[ids[8:10]] @ b
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


# -- refusals -----------------------------------------------------------------------------------------------------


def test_what_never_fits_is_told_from_what_does_not_fit_now(adapters: list[TinyAdapter]) -> None:
    pool = make_pool(40 * KIB, max_slots=2)
    assert pool.fits_empty(adapters[0].spec)
    first = put(pool, staged_of(adapters[0], pool))
    assert pool.bytes_needed(adapters[1].spec) > pool.capacity_bytes
    assert not pool.fits_empty(adapters[1].spec)
    second = put(pool, staged_of(adapters[3], pool))
    demand = pool.layout.demand(adapters[3].spec)
    assert not pool.fits(demand)
    assert pool.fits(demand, [first.slot])
    assert not pool.fits_empty(*[adapters[3].spec] * 3), "more adapters than slots"
    pool.free(first.slot)
    pool.free(second.slot)
    pool.check()


def test_an_adapter_for_another_base_is_refused(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", {(Kind.DOWN, 2): 12})
    few = make_pool(64 * KIB, max_rank=8)
    with pytest.raises(AdapterRefused) as caught:
        few.bytes_needed(adapter.spec)
    assert caught.value.fault is AdapterFault.RANK_TOO_LARGE
    other = make_pool(64 * KIB, shapes=[shape for shape in SHAPES if shape.kind is Kind.Q])
    with pytest.raises(AdapterRefused) as caught:
        other.fits_empty(adapter.spec)
    assert caught.value.fault is AdapterFault.UNKNOWN_MODULE
    shallow = make_pool(64 * KIB, shapes=[shape._replace(num_layers=2) for shape in SHAPES])
    with pytest.raises(AdapterRefused, match="layer 2") as caught:
        shallow.bytes_needed(adapter.spec)
    assert caught.value.fault is AdapterFault.UNKNOWN_MODULE
    pool = make_pool(64 * KIB)
    with pytest.raises(ValueError, match="staged in"):
        make_pool(64 * KIB, dtype=torch.float16).reserve(staged_of(adapter, pool))


def test_a_pool_that_holds_nothing_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--lora-memory"):
        make_pool(100)
    with pytest.raises(ConfigError, match="--max-lora-slots"):
        make_pool(64 * KIB, max_slots=0)
    with pytest.raises(ConfigError, match="--lora-page-rows"):
        make_pool(64 * KIB, page_rows=0)
    with pytest.raises(ConfigError, match="at most once"):
        make_pool(64 * KIB, shapes=[SHAPES[0], SHAPES[0]])


def test_poison_is_there() -> None:
    assert math.isnan(float(make_pool(64 * KIB).storage[0])), "the tests above rely on it"
