"""Paged attention of every backend against dense attention."""

from __future__ import annotations

import pytest
import torch
from lora_cases import expected_attention, make_attention

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


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]()


def check(
    ops: Ops, lens, new, heads, kv_heads, head_dim, window=None, seed=0, dtype=torch.float32, atol=2e-5, page_size=4
):
    generator = torch.Generator().manual_seed(seed)
    case = make_attention(lens, new, heads, kv_heads, head_dim, page_size=page_size, dtype=dtype, generator=generator)
    scale = head_dim**-0.5
    out = ops.attention(case.q, case.k_cache, case.v_cache, case.batch, scale, window)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected_attention(case, scale, window), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (8, 2), (8, 1)])
def test_decode(ops, heads, kv_heads, head_dim):
    check(ops, [1, 2, 31, 32, 33, 110, 257], [1] * 7, heads, kv_heads, head_dim)


@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_decode_and_chunks_see_only_the_window(ops, window):
    check(ops, [1, 40, 333, 90, 70], [1, 1, 1, 65, 70], 6, 2, 64, window)


def test_mixed_decode_and_prefill(ops):
    check(ops, [5, 300, 64, 130, 20, 3, 90, 40], [1, 1, 64, 129, 7, 2, 16, 17], 9, 3, 64)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes_and_the_widest_head(ops, page_size):
    check(ops, [70, 3, 65, 20], [1, 1, 40, 20], 4, 2, 256, page_size=page_size)


def test_soft_cap(ops):
    case = make_attention([5, 140, 64, 90], [1, 1, 64, 30], 6, 2, 64, generator=torch.Generator().manual_seed(4))
    case.q *= 5
    got = ops.attention(case.q, case.k_cache, case.v_cache, case.batch, 0.3, None, 12.0)
    begin = 0
    for i, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        num = int(case.batch.q_indptr[i + 1]) - begin
        q = case.q[begin : begin + num].double().view(num, 2, 3, 64)
        scores = 12 * torch.tanh(torch.einsum("mkgd,lkd->mkgl", q, k.double()) * 0.3 / 12)
        hidden = torch.arange(len(k)) > torch.arange(len(k) - num, len(k))[:, None]
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        want = torch.einsum("mkgl,lkd->mkgd", weights, v.double()).flatten(1)
        torch.testing.assert_close(got[begin : begin + num].double(), want, atol=2e-5, rtol=1e-5)
        begin += num


def test_nan_in_one_sequence_stays_in_it(ops):
    case = make_attention([40, 50, 60], [1, 1, 20], 6, 2, 64, generator=torch.Generator().manual_seed(2))
    for i in (0, 2):
        where = case.batch.locations[case.batch.req_rows[i], 7].long()
        case.k_cache[where, 0, 3] = float("nan")
    out = ops.attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125, None)
    bad = out.view(-1, 6, 64).isnan()
    assert bad[0, :3].all()
    assert not bad[0, 3:].any()
    assert not bad[1].any()
    assert bad[2:, :3].all()
    assert not bad[2:, 3:].any()


def test_long_context_alone_is_split_between_workers(ops):
    check(ops, [2111], [1], 9, 3, 64)


def test_unequal_lengths_are_cut_inside_sequences(ops):
    check(ops, [1, 1500, 3, 2, 611, 1, 1], [1] * 7, 8, 2, 80)


def test_many_workers_cut_one_sequence_several_times():
    check(CpuOps(num_threads=2), [700], [1], 9, 3, 64)
    ops = CpuOps(num_threads=2)
    ops.workers = 7  # more shares than threads: each share is still one cut
    check(ops, [900, 3, 50, 5], [1, 1, 1, 1], 9, 3, 64)
    check(ops, [900, 3, 50, 5], [1, 1, 1, 1], 9, 3, 64, window=200)


def test_large_scores_do_not_overflow(ops):
    case = make_attention([200, 50], [1, 30], 4, 2, 64, generator=torch.Generator().manual_seed(3))
    case.q *= 60
    out = ops.attention(case.q, case.k_cache, case.v_cache, case.batch, 1.0, None)
    torch.testing.assert_close(out.double(), expected_attention(case, 1.0, None), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("name", BACKENDS)
def test_half_precision(name, dtype, atol):
    if name == "triton" and dtype is torch.bfloat16:
        return  # Triton's interpreter multiplies bfloat16 matrices wrongly
    check(BACKENDS[name](), [5, 60, 33], [1, 1, 20], 6, 2, 64, dtype=dtype, atol=atol)


def test_a_plan_is_not_reused_for_another_batch():
    ops = CpuOps(num_threads=1)
    check(ops, [9, 40], [1, 1], 4, 2, 64, seed=1)
    check(ops, [30, 12, 5], [1, 1, 1], 4, 2, 64, seed=2)
    check(ops, [30, 12, 5], [1, 1, 1], 4, 2, 64, window=3, seed=2)


def test_sequences_without_new_tokens_and_empty_steps(ops):
    case = make_attention([7, 9], [1, 1], 4, 2, 64, generator=torch.Generator().manual_seed(5))
    case.batch.q_indptr.zero_()
    out = ops.attention(case.q[:0], case.k_cache, case.v_cache, case.batch, 0.1, None)
    assert out.shape == (0, 256)
