"""From logits to tokens: greedy or filtered sampling, reproducible per request, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loraserve.sampling import SamplingParams

# Most nuclei lie within this many tokens; only when one does not is the whole vocabulary sorted.
_NUCLEUS_GUESS = 1024


class SamplingRow(NamedTuple):
    """One row to sample: the request's params, its seed, and how many tokens it has generated so far."""

    params: SamplingParams
    seed: int
    step: int
    vocab_size: int | None = None  # leading logits that are this row's; the rest is there for others in the batch


class Logprobs(NamedTuple):
    """Natural log-probabilities of raw logits at one position."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class NotFinite(ValueError):
    """A row's logits hold no finite maximum; the row cannot be sampled."""


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on nothing but `seed` and `step`, so retraction and batching change no draw."""
    key = np.random.Philox(key=seed & (2**64 - 1), counter=[0, 0, 0, step])
    return float(np.random.Generator(key).random())


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Choose one token per row; None where a row's logits are not finite. logits: [num_rows, vocab] fp32.

    Filters apply in the order temperature, top-k, top-p, min-p.
    """
    peaks, best = logits.max(dim=-1)
    tokens: list[int | None] = best.tolist()
    for index, finite in enumerate(torch.isfinite(peaks).tolist()):
        if not finite:
            tokens[index] = None
        elif not rows[index].params.greedy:
            tokens[index] = _draw(logits[index, : rows[index].vocab_size], rows[index])
    return tokens


def _draw(logits: Tensor, row: SamplingRow) -> int:
    """Draw from one row. logits: [vocab]."""
    params = row.params
    # A tiny temperature would overflow the quotient; the shift keeps the largest logit at 0.
    scaled = (logits - logits.max()) / max(params.temperature, 1e-6)
    ids: Tensor | None = None
    vocab = scaled.shape[-1]
    if 0 < params.top_k < vocab:
        scaled, ids = scaled.topk(params.top_k)
    probs = scaled.softmax(dim=-1)
    if params.top_p < 1.0:
        probs, ids = _nucleus(probs, ids, params.top_p)
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, torch.zeros_like(probs))
    mass = probs.to(torch.float64).cumsum(dim=-1)
    target = uniform(row.seed, row.step) * mass[-1]
    index = min(int(torch.searchsorted(mass, target, right=True)), probs.shape[-1] - 1)
    return index if ids is None else int(ids[index])


def _nucleus(probs: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest most likely tokens whose mass reaches `top_p`, best first. probs: [k] → probs, ids: [m]."""
    if ids is None:
        guess, ids = probs.topk(min(_NUCLEUS_GUESS, probs.shape[-1]))
        if float(guess.sum()) < top_p and guess.shape[-1] < probs.shape[-1]:
            guess, ids = probs.sort(descending=True)
        probs = guess
    before = probs.cumsum(dim=-1) - probs
    kept = max(int((before < top_p).sum()), 1)
    return probs[:kept], ids[:kept]


def logprobs_of(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Log-probabilities of `tokens` and of the `counts[i]` best at each row. logits: [num_rows, vocab] fp32."""
    if not tokens:
        return []
    logs = logits.log_softmax(dim=-1)
    own = logs.gather(1, torch.tensor(tokens, device=logs.device).unsqueeze(1)).squeeze(1).tolist()
    most = max(counts)
    values, ids = logs.topk(min(most, logs.shape[-1])) if most else (None, None)
    result = []
    for row, (token, logprob, count) in enumerate(zip(tokens, own, counts, strict=True)):
        top: list[tuple[int, float]] = []
        if count and values is not None and ids is not None:
            top = list(zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True))
        result.append(Logprobs(token, logprob, top))
    return result
