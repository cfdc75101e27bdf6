"""Sampling all rows of a step at once, where the logits are: one array there, one array back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loraserve.engine.sampler import BROKEN, SamplingRow, uniform
from loraserve.kernels.transfer import to_device


def sample_on_device(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Choose one token per row; None where a row's logits are not finite. logits: [num_rows, vocab] fp32.

    The same filters in the same order as `sampler.sample`, and the same draw for the same seed and step; but the mass
    is always summed from the most likely token on, so that a draw may fall on another token than on the CPU.
    """
    return [token if token != BROKEN else None for token in choose_on_device(logits, rows).tolist()]


def choose_on_device(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """`sample_on_device` without waiting for the outcome: [num_rows] int64, `BROKEN` where logits are not finite."""
    if any(row.vocab_size is not None and row.vocab_size < logits.shape[-1] for row in rows):
        widths = to_device(np.array([row.vocab_size or logits.shape[-1] for row in rows]), logits.device)
        beyond = torch.arange(logits.shape[-1], device=logits.device)[None, :] >= widths[:, None]
        logits = logits.masked_fill(beyond, float("-inf"))
    peaks, best = logits.max(dim=-1)
    chosen = torch.where(torch.isfinite(peaks), best, BROKEN)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        picked, told = _settings(rows, drawn, logits.device)
        subset = logits if len(drawn) == len(rows) else logits[picked]
        tokens = _draw(subset, told, any(row.params.top_k > 0 for row in rows))
        chosen[picked] = torch.where(chosen[picked] < 0, chosen[picked], tokens)
    return chosen


def _settings(rows: Sequence[SamplingRow], drawn: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the rows to draw, [m] int64, and their numbers, [5, m] float64: see `_draw`."""
    params = [rows[i].params for i in drawn]
    table = [
        [max(p.temperature, 1e-6) for p in params],  # a tiny temperature would overflow the quotient
        [float(p.top_k) for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [uniform(rows[i].seed, rows[i].step) for i in drawn],
        [float(i) for i in drawn],
    ]
    sent = to_device(np.array(table), device)
    return sent[5].long(), sent[:5]


def _draw(logits: Tensor, settings: Tensor, has_top_k: bool) -> Tensor:
    """Draw one token per row. logits: [m, vocab]; settings: temperature, top_k, top_p, min_p, draw in [0, 1)."""
    temperature, top_k, top_p, min_p, draw = (row[:, None] for row in settings)
    ordered, ids = logits.sort(dim=-1, descending=True)
    scaled = (ordered - ordered[:, :1]) / temperature.float()
    if has_top_k:
        rank = torch.arange(logits.shape[-1], device=logits.device)[None, :]
        scaled = scaled.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    probs = scaled.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    # The first token always stays; top_p = 1 keeps all although rounding may bring the sum to 1 before the end.
    kept = (before < top_p) | (top_p >= 1.0)
    kept[:, 0] = True
    kept &= probs >= min_p * probs[:, :1]
    mass = (probs * kept).to(torch.float64).cumsum(dim=-1)
    index = torch.searchsorted(mass, draw * mass[:, -1:], right=True)
    last = (kept.sum(dim=-1, keepdim=True) - 1).clamp(
        min=0
    )  # what is kept is a beginning: all filters follow the order
    return ids.gather(-1, torch.minimum(index, last)).squeeze(-1)
