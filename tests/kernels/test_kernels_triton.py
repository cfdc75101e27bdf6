"""What is particular to the Triton backend: tiles, rounds, splits, and that no kernel reads what none has written.

The other files of this folder compare it with the same oracles as every backend. All runs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lora_cases import (
    MIXES,
    expected_attention,
    expected_lora,
    make_attention,
    make_pool,
    make_segments,
    popularity,
)

from loraserve.kernels.metadata import LoraSegments
from loraserve.kernels.triton_backend import TritonOps
from loraserve.kernels.triton_configs import (
    DECODE_ATTENTION,
    DECODE_LORA,
    DECODE_TRIPLES,
    EXTEND_ATTENTION,
    PREFILL_LORA,
    SHARED_MEMORY,
    Arch,
    power_of_two,
    splits_for,
)
from loraserve.kernels.triton_lora_launch import plan_step, rounds_of

CPU = torch.device("cpu")
RANKS = [1, 5, 0, 16, 33, 64, 100, 128]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, and the largest integers."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def check_lora(ops: TritonOps, pool, assignments, generator, **changes) -> None:
    segments = make_segments(assignments, extra=[2])
    if changes:
        fields = {name: getattr(segments, name) for name in ("tokens", "weights", "slots", "indptr", "max_segment")}
        segments = LoraSegments(**(fields | changes))
    x = torch.randn(len(assignments), pool.targets[0].in_features, generator=generator)
    y = torch.randn(len(assignments), sum(t.out_features for t in pool.targets), generator=generator)
    want = expected_lora(y, x, pool, 1, assignments)
    ops.lora_apply(y, x, pool.targets, 1, segments)
    scale = float(want.abs().max())
    torch.testing.assert_close(y.double() / scale, want / scale, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mix", MIXES)
def test_prefill_tiles(generator, mix):
    pool = make_pool([(80, 144), (80, 35)], [RANKS, [8, 0, 0, 2, 128, 1, 17, 3]], page_rows=8, generator=generator)
    slots = popularity(mix, DECODE_TRIPLES + 41, len(RANKS), generator)
    # Every tenth token is a blend of its own adapter and another, every seventh is the base's.
    assignments = [
        [] if i % 7 == 3 else [(slot, 1.0)] if i % 10 else [(slot, 0.5), ((slot + 3) % 8, -2.0)]
        for i, slot in enumerate(slots)
    ]
    check_lora(TritonOps(CPU), pool, assignments, generator)


@pytest.mark.parametrize("num_units", [1, 100])
@pytest.mark.parametrize("known", [True, False])
def test_blends_with_and_without_the_hosts_knowledge(generator, num_units, known):
    pool = make_pool([(600, 48), (600, 16)], [RANKS, RANKS[::-1]], page_rows=8, generator=generator)
    three = [(0, 1.0), (4, -0.5), (7, 0.25)]
    assignments = [three if i % 3 == 0 else [(i % 8, 1.0)] for i in range(20)]
    changes = {"max_per_token": 3} if known else {}
    check_lora(TritonOps(CPU, num_units=num_units), pool, assignments, generator, **changes)


def test_split_shrink_of_an_input_that_is_no_multiple_of_anything(generator):
    pool = make_pool([(8197, 19)], [[7, 3, 0]], layers=2, generator=generator, scale=0.02)
    check_lora(TritonOps(CPU, num_units=1000), pool, [[(0, 1.0)], [(1, 2.0)], []], generator)


def test_padding_after_the_last_segment_is_not_touched(generator):
    """A captured graph's arrays are longer than the step: spare segments have slot −1, spare triples no segment."""
    pool = make_pool([(64, 48)], [RANKS], generator=generator)
    x, y = torch.randn(6, 64, generator=generator), torch.randn(6, 48, generator=generator)
    assignments = [[(3, 1.0)], [(5, 0.5)], [(3, 2.0)], [], [], []]
    plain = make_segments(assignments)
    padded = LoraSegments(
        tokens=torch.cat((plain.tokens, torch.full((5,), 1 << 30, dtype=torch.int32))),
        weights=torch.cat((plain.weights, torch.full((5,), float("nan")))),
        slots=torch.cat((plain.slots, torch.full((4,), -1, dtype=torch.int32))),
        indptr=torch.cat((plain.indptr, plain.indptr[-1:].repeat(4))),
        max_segment=6,
        max_per_token=1,
    )
    want = expected_lora(y, x, pool, 0, assignments)
    TritonOps(CPU).lora_apply(y, x, pool.targets, 0, padded)
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("count", "slots"), [(1, 1), (16, 3), (17, 1), (200, 150), (300, 2)])
def test_tiles_cover_every_triple_once(generator, count, slots):
    owner = popularity("uniform", count, slots, generator)
    segments = make_segments([[(slot, 1.0)] for slot in owner], extra=[slots, slots + 1])
    segments.slots[-1] = -1
    step = plan_step(segments, Arch.SM90)
    seen: list[tuple[int, int]] = []
    for slot, first, num in step.table.tolist():
        assert 0 <= num <= step.tiles.block_m
        seen += [(slot, triple) for triple in range(first, first + num)]
    bounds = segments.indptr.tolist()
    want = [(int(s), i) for g, s in enumerate(segments.slots) if s >= 0 for i in range(bounds[g], bounds[g + 1])]
    assert sorted(seen) == sorted(want)


def test_rounds_count_earlier_triples_of_the_same_token():
    tokens = torch.tensor([4, 0, 4, 2, 0, 4, 9], dtype=torch.int32)
    assert rounds_of(tokens).tolist() == [0, 0, 1, 0, 1, 2, 0]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_units", [1, 200])
def test_attention_with_few_and_many_splits(generator, head_dim, num_units):
    ops = TritonOps(CPU, num_units=num_units)
    for heads, kv_heads, window in ((6, 2, None), (5, 1, 40)):
        case = make_attention([90, 1, 150, 70], [1, 1, 37, 5], heads, kv_heads, head_dim, generator=generator)
        out = ops.attention(case.q, case.k_cache, case.v_cache, case.batch, 0.1, window)
        torch.testing.assert_close(out.double(), expected_attention(case, 0.1, window), atol=2e-5, rtol=1e-5)


def test_every_table_has_every_architecture_and_fits_it():
    for table in (DECODE_LORA, PREFILL_LORA, DECODE_ATTENTION, EXTEND_ATTENTION, SHARED_MEMORY):
        assert set(table) == set(Arch)
    for table in (DECODE_ATTENTION, EXTEND_ATTENTION):
        assert all(set(row) == {64, 128, 256} for row in table.values())


def test_splits_and_powers():
    assert [splits_for(programs, 264, 100) for programs in (1, 20, 100, 300)] == [16, 16, 4, 1]
    assert [splits_for(1, 264, most) for most in (1, 3, 4, 15, 16)] == [1, 1, 4, 4, 16]
    assert [power_of_two(n) for n in (1, 16, 17, 96)] == [16, 16, 32, 128]
