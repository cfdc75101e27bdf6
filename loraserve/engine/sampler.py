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

BROKEN = -1  # in a tensor of tokens: of a row whose logits are not finite


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


def choose_on_host(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """`sample` as a tensor: [num_rows] int64, `BROKEN` where a row's logits are not finite."""
    return torch.tensor([BROKEN if token is None else token for token in sample(logits, rows)], dtype=torch.int64)


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


class LogprobTensors(NamedTuple):
    """Log-probabilities of n rows where their logits are, each with the same number k ≥ 0 of alternatives."""

    own: Tensor  # [n], of the rows' tokens
    values: Tensor  # [n, k], of the best, in order
    ids: Tensor  # [n, k] int64, which these are


def logprob_tensors(logits: Tensor, tokens: Tensor, most: int) -> LogprobTensors:
    """Log-probabilities of `tokens` [n] and of the `most` best (fewer if there are fewer). logits: [n, vocab] fp32."""
    logs = logits.log_softmax(dim=-1)
    own = logs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    values, ids = logs.topk(min(most, logs.shape[-1])) if most else (logs[:, :0], tokens.unsqueeze(1)[:, :0])
    return LogprobTensors(own, values, ids)


def logprobs_from(tensors: LogprobTensors, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """The same as values of the host: for row i its token and the `counts[i]` best."""
    values, ids = tensors.values.tolist(), tensors.ids.tolist()
    return [
        Logprobs(token, logprob, list(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, (token, logprob, count) in enumerate(zip(tokens, tensors.own.tolist(), counts, strict=True))
    ]


def logprobs_of(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Log-probabilities of `tokens` and of the `counts[i]` best at each row. logits: [num_rows, vocab] fp32."""
    if not tokens:
        return []
    return logprobs_from(
        logprob_tensors(logits, torch.tensor(tokens, device=logits.device), max(counts)), tokens, counts
    )
