"""The sampler: greedy, filters, distribution, reproducibility, log-probabilities."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from loraserve.engine.sampler import SamplingRow, logprobs_of, sample, uniform
from loraserve.sampling import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draws(count: int = 1200, **params: float | int) -> Counter[int | None]:
    settings = SamplingParams(**({"temperature": 1.0} | params))  # type: ignore[arg-type]
    rows = [SamplingRow(settings, seed=7, step=step) for step in range(count)]
    return Counter(sample(LOGITS.repeat(count, 1), rows))


def test_greedy_takes_the_largest() -> None:
    row = SamplingRow(SamplingParams(temperature=0.0), 0, 0)
    assert sample(torch.stack([LOGITS, -LOGITS]), [row, row]) == [0, 5]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    counts = draws(temperature=temperature)
    expected = (LOGITS / temperature).softmax(-1)
    for token, share in enumerate(expected.tolist()):
        assert counts[token] / 1200 == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_k": -1}, {0, 1, 2, 3, 4, 5}),
        # Probabilities: 0.56 0.21 0.13 0.076 0.028 0.004
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.57}, {0, 1}),
        ({"top_p": 0.85}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),
        ({"temperature": 1e-4}, {0}),
    ],
)
def test_filters_leave_exactly_the_allowed_tokens(params: dict[str, float], allowed: set[int]) -> None:
    assert set(draws(**params)) == allowed


def test_nucleus_beyond_the_first_guess() -> None:
    flat = torch.zeros(1, 5000)
    rows = [SamplingRow(SamplingParams(temperature=1.0, top_p=0.9), seed=1, step=step) for step in range(300)]
    tokens = {sample(flat, [row])[0] for row in rows}
    assert len(tokens) > 250


def test_draws_depend_on_seed_and_step_only() -> None:
    params = SamplingParams(temperature=1.0)
    alone = [sample(LOGITS[None], [SamplingRow(params, 3, step)])[0] for step in range(50)]
    batch = sample(LOGITS.repeat(50, 1), [SamplingRow(params, 3, step) for step in range(50)])
    assert alone == batch
    other = sample(LOGITS.repeat(50, 1), [SamplingRow(params, 4, step) for step in range(50)])
    assert other != batch
    assert uniform(-5, 2) == uniform(-5, 2)


def test_logits_without_a_finite_maximum_are_refused_row_by_row() -> None:
    row = SamplingRow(SamplingParams(temperature=0.0), 0, 0)
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, torch.nan), LOGITS])
    logits[2, 3] = torch.inf
    assert sample(logits, [row] * 3) == [0, None, None]


def test_logprobs_match_log_softmax() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    first, second = logprobs_of(logits, [1, 4], [3, 0])
    expected = LOGITS.log_softmax(-1)
    assert first.token == 1
    assert first.logprob == pytest.approx(float(expected[1]), abs=1e-6)
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [value for _, value in first.top] == pytest.approx(expected[:3].tolist(), abs=1e-6)
    assert second.top == []
    assert second.logprob == pytest.approx(float(expected[1]), abs=1e-6)
    assert logprobs_of(logits[:0], [], []) == []


def test_what_is_beyond_a_rows_vocabulary_is_never_drawn() -> None:
    # An adapter beside it has more tokens; were the padding drawn from, even 0 mass could be hit by rounding.
    logits = torch.tensor([[0.0, 0.0, 50.0]] * 64)
    rows = [SamplingRow(SamplingParams(temperature=1.0), seed, 0, vocab_size=2) for seed in range(64)]
    assert set(sample(logits, rows)) == {0, 1}
