"""Sampling on the device against the sampler of the CPU."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from pretend_cuda import DEVICE, PretendCuda

from loraserve.engine.device_sampler import sample_on_device
from loraserve.engine.sampler import SamplingRow, sample
from loraserve.sampling import SamplingParams


def rows_of(count: int, **params: Any) -> list[SamplingRow]:
    return [SamplingRow(SamplingParams(**params), seed, seed % 3) for seed in range(count)]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 0.9, "top_p": 0.95, "min_p": 0.05},
        {"temperature": 1e-9, "top_k": 3},
    ],
)
def test_filters_give_the_draws_of_the_cpu(params: dict[str, Any]) -> None:
    # These filters sort on the CPU as well, so that both sum the mass in one order.
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * 3
    rows = rows_of(200, **params)
    assert sample_on_device(logits.clone(), rows) == sample(logits, rows)


def test_unfiltered_draws_have_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0]).repeat(4000, 1)
    counts = Counter(sample_on_device(logits, rows_of(4000, temperature=1.0)))
    for token, share in enumerate(logits[0].softmax(-1).tolist()):
        assert counts[token] / 4000 == pytest.approx(share, abs=4 * math.sqrt(share / 4000))


def test_rows_of_all_kinds_in_one_step() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    logits[1] = float("nan")
    logits[3, 7] = float("inf")
    rows = [*rows_of(2, temperature=0.0), *rows_of(3, temperature=1.0, top_k=2)]
    tokens = sample_on_device(logits.clone(), rows)
    assert tokens == sample(logits, rows)
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[1] is tokens[3] is None


def test_a_row_draws_from_its_own_vocabulary_alone() -> None:
    logits = torch.zeros(300, 12)
    rows = [row._replace(vocab_size=4 if i % 2 else None) for i, row in enumerate(rows_of(300, temperature=1.0))]
    tokens = sample_on_device(logits, rows)
    assert set(tokens[1::2]) == {0, 1, 2, 3}
    assert set(tokens[::2]) == set(range(12))


def test_one_wait_for_each_step() -> None:
    with PretendCuda():
        logits = torch.randn(6, 40).to(DEVICE)
        before = PretendCuda.num_waits
        sample_on_device(logits, [*rows_of(3, temperature=0.0), *rows_of(3, temperature=1.0, top_p=0.9)])
        assert PretendCuda.num_waits == before + 1
