"""LoRA of every backend against merged matrices."""

from __future__ import annotations

import pytest
import torch
from lora_cases import MIXES, NAN, expected_lora, make_pool, make_segments, popularity

from loraserve.kernels import cpu_lora_plan
from loraserve.kernels.cpu_backend import CpuOps
from loraserve.kernels.ops import Ops
from loraserve.kernels.reference import ReferenceOps
from loraserve.kernels.triton_backend import TritonOps

BACKENDS = {
    "reference": ReferenceOps,
    "cpu_serial": lambda: CpuOps(num_threads=1),
    "cpu_parallel": lambda: CpuOps(num_threads=2),
    "triton": lambda: TritonOps(torch.device("cpu")),
}
MIXED_RANKS = [4, 1, 0, 17, 8, 64, 3, 128]
QKV = [(64, 48), (64, 16), (64, 16)]


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def check(ops, pool, assignments, generator, *, extra=(), dtype=torch.float32, tol=1e-5):
    segments = make_segments(assignments, extra=list(extra))
    width_in = pool.targets[0].in_features
    width_out = sum(target.out_features for target in pool.targets)
    for layer in range(pool.targets[0].ranks.shape[0]):
        x = torch.randn(len(assignments), width_in, generator=generator).to(dtype)
        y = torch.randn(len(assignments), width_out, generator=generator).to(dtype)
        want = expected_lora(y, x, pool, layer, assignments)
        ops.lora_apply(y, x, pool.targets, layer, segments)
        scale = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(y.double() / scale, want / scale, atol=tol, rtol=tol)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 70])
def test_popularity_mixes(ops, generator, mix, num_tokens):
    ranks = [MIXED_RANKS, [0, *MIXED_RANKS[1:]], [8] * 8]
    pool = make_pool(QKV, ranks, generator=generator)
    slots = popularity(mix, num_tokens, len(MIXED_RANKS), generator)
    check(ops, pool, [[(slot, 1.0)] for slot in slots], generator)


@pytest.mark.parametrize("page_rows", [1, 3, 4, 8])
@pytest.mark.parametrize("rank", [1, 5, 8, 13, 33])
def test_page_sizes_and_odd_widths(ops, generator, page_rows, rank):
    pool = make_pool([(37, 51), (37, 7)], [[rank, 2], [1, rank]], page_rows=page_rows, generator=generator)
    check(ops, pool, [[(i % 2, 1.0)] for i in range(9)], generator)


def test_base_tokens_empty_segments_and_slot_minus_one_change_nothing(ops, generator):
    pool = make_pool(QKV, [[4, 8, 0]] * 3, generator=generator)
    assignments = [[], [(0, 1.0)], [(-1, 1.0)], [], [(2, 1.0)], [(1, 0.5)]]
    check(ops, pool, assignments, generator, extra=[1, 2, 0])
    segments = make_segments([[(-1, 1.0)], [(2, 3.0)]], extra=[0])
    x, y = torch.full((2, 64), NAN), torch.ones(2, 80)
    ops.lora_apply(y, x, pool.targets, 0, segments)
    assert torch.equal(y, torch.ones(2, 80))
    ops.lora_apply(y, x, (), 0, segments)
    assert torch.equal(y, torch.ones(2, 80))


@pytest.mark.parametrize("num_tokens", [6, 24, 70])
def test_blends_and_weights(ops, generator, num_tokens):
    pool = make_pool([(320, 288), (320, 40)], [[16, 5, 64], [8, 8, 8]], generator=generator)
    blend = [(0, 0.5), (2, -1.5)]
    assignments = [
        blend if i % 3 == 0 else [(1, 1.0)] if i % 3 == 1 else [(0, 1.0), (1, 2.0)] for i in range(num_tokens)
    ]
    check(ops, pool, assignments, generator)


def test_only_steps_without_blends_are_cut_by_unit():
    plain = make_segments([[(0, 1.0)], [], [(1, 1.0)], [(-1, 1.0)]])
    blend = make_segments([[(0, 1.0), (1, 1.0)], [(0, 1.0)]])
    assert cpu_lora_plan.plan_step(plain).distinct
    assert not cpu_lora_plan.plan_step(blend).distinct


def test_one_high_rank_unit_among_small_ones(ops, generator):
    pool = make_pool([(576, 576)], [[128, 1, 2, 4]], generator=generator)
    check(ops, pool, [[(0, 1.0)], [(1, 1.0)], [(2, 1.0)], [(3, 1.0)]], generator)


def test_large_decode_step_runs_parallel_by_unit(ops, generator):
    pool = make_pool([(576, 576), (576, 192)], [[16] * 8] * 2, page_rows=8, generator=generator)
    check(ops, pool, [[(i % 8, 1.0)] for i in range(16)], generator)


@pytest.mark.parametrize("ranks", [[8, 3, 16, 0], [64, 33, 128, 40]])
def test_decode_rows_and_prefill_chunks_together(ops, generator, ranks):
    pool = make_pool(QKV, [ranks, [4, 0, 16, 2], [0, 5, 1, 2]], generator=generator)
    assignments = [[(0, 1.0)], [], [(1, 1.0)]] + [[(2, 1.0)]] * 70 + [[(0, 1.0)]] * 64 + [[(3, 2.0)]] * 130 + [[]]
    check(ops, pool, assignments, generator)


def test_blends_of_prefill_chunks_at_high_rank(ops, generator):
    pool = make_pool(QKV, [[64, 48], [8, 3], [0, 40]], generator=generator)
    assignments = [[(0, 0.5), (1, -2.0)]] * 128 + [[], [(1, 1.0)]]
    check(ops, pool, assignments, generator)


def test_half_precision_pools(ops, generator):
    for dtype, tol in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        if ops.name == "triton" and dtype is torch.bfloat16:
            continue  # Triton's interpreter multiplies bfloat16 matrices wrongly
        pool = make_pool(QKV, [[8, 3, 16]] * 3, dtype=dtype, generator=generator)
        check(ops, pool, [[(i % 3, 1.0)] for i in range(20)], generator, dtype=dtype, tol=tol)


def test_targets_of_different_storages_in_one_group(generator):
    first = make_pool([(32, 16)], [[4, 2]], generator=generator)
    second = make_pool([(32, 24)], [[3, 9]], page_rows=8, generator=generator)
    second.targets[0].out_offset = 16
    first.targets += second.targets
    first.factors += second.factors
    check(CpuOps(num_threads=1), first, [[(i % 2, 1.0)] for i in range(5)], generator)


def test_a_widened_table_is_seen_in_the_next_step(generator):
    ops = CpuOps(num_threads=1)
    pool = make_pool([(32, 16)], [[4, 2]], generator=generator)
    check(ops, pool, [[(0, 1.0)], [(1, 1.0)]], generator)
    wider = make_pool([(32, 16)], [[40, 2, 9]], generator=generator)
    for name in ("storage", "a_pages", "b_pages", "ranks"):
        setattr(pool.targets[0], name, getattr(wider.targets[0], name))
    pool.factors = wider.factors
    check(ops, pool, [[(2, 1.0)], [(0, 1.0)], [(1, 1.0)]], generator)


@pytest.mark.parametrize("num_tokens", [1, 7, 60])
def test_embedding_deltas(ops, generator, num_tokens):
    vocab, hidden = 101, 48
    pool = make_pool([(vocab, hidden)], [[4, 13, 0]], layers=1, generator=generator)
    ids = torch.randint(vocab, (num_tokens,), generator=generator)
    assignments = [
        [(0, 1.0)] if i % 4 == 0 else [(1, 0.5), (0, 2.0)] if i % 4 == 1 else [(2, 1.0)] if i % 4 == 2 else []
        for i in range(num_tokens)
    ]
    y = torch.randn(num_tokens, hidden, generator=generator)
    one_hot = torch.nn.functional.one_hot(ids, vocab).float()
    want = expected_lora(y, one_hot, pool, 0, assignments)
    ops.lora_embed(y, ids, pool.targets[0], make_segments(assignments))
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=1e-5)


def test_embedding_deltas_in_half_precision(ops, generator):
    dtype = torch.float16 if ops.name == "triton" else torch.bfloat16
    pool = make_pool([(33, 16)], [[4]], layers=1, dtype=dtype, generator=generator)
    ids = torch.arange(5)
    y = torch.zeros(5, 16, dtype=dtype)
    assignments = [[(0, 1.0)]] * 5
    want = expected_lora(y, torch.nn.functional.one_hot(ids, 33).float(), pool, 0, assignments)
    ops.lora_embed(y, ids, pool.targets[0], make_segments(assignments))
    torch.testing.assert_close(y.double(), want, atol=1e-2, rtol=1e-2)
