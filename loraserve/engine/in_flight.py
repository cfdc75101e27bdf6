"""Tokens of a step that the device may still be computing: kept there for the next step, and on their way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraserve.engine.sampler import BROKEN, Logprobs, LogprobTensors, logprobs_from
from loraserve.kernels.transfer import to_device, to_host


class StepOutput(NamedTuple):
    """Per sequence of the step: the sampled token, or None if none was due or its logits were not finite."""

    tokens: list[int | None]
    logprobs: list[Logprobs | None]
    broken: list[int]  # sequences whose logits were not finite, be it those of the prompt


class LaunchedStep(Protocol):
    """A step that was given to the device."""

    @property
    def may_wait(self) -> bool:
        """Whether the next step can be launched before this one's output is known."""

    def wait(self) -> StepOutput:
        """The output, as soon as the device has it. Raises whatever went wrong there. To be called once."""


class ComputedStep(NamedTuple):
    """A step that was computed when it was launched."""

    output: StepOutput
    may_wait: bool = False

    def wait(self) -> StepOutput:
        """The output."""
        return self.output


class NextTokens:
    """For every level-1 row the token that was sampled last, on the device: the input of the row's next step."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def put(self, rows: NDArray[np.integer], chosen: Tensor) -> None:
        """Keep what was sampled for these rows. chosen: [num_rows] int64, `BROKEN` becomes token 0.

        Whoever got `BROKEN` has ended, but the next step may have a row of it, which must not read past the tables.
        """
        self._tokens.index_copy_(0, to_device(rows.astype(np.int64), self._tokens.device), chosen.clamp(min=0))

    def fill_in(self, input_ids: Tensor) -> None:
        """Put tokens in the place of their `pending_id`s. input_ids: [n] int64, in place."""
        known = self._tokens[(-1 - input_ids).clamp_(min=0)]
        input_ids.copy_(torch.where(input_ids < 0, known, input_ids))


class PendingStep:
    """A step whose output comes back in one copy while the host does other things.

    `due` are the sequences with a token in `chosen` [len(due)], `counts[i]` how many alternatives the log-probabilities
    of `due[i]` have (None: not wanted), `logprobs` those of the wanted, in order. `broken` are known before.
    """

    def __init__(
        self,
        num_sequences: int,
        due: Sequence[int],
        chosen: Tensor,
        counts: Sequence[int | None],
        logprobs: LogprobTensors | None,
        may_wait: bool,
        broken: Sequence[int] = (),
    ) -> None:
        self.may_wait = may_wait
        self._num_sequences = num_sequences
        self._due = due
        self._counts = counts
        self._broken = broken
        self._shapes = [] if logprobs is None else [part.shape for part in logprobs]
        # float64 holds both token ids and float32 exactly, so that everything is one piece.
        parts = [chosen, *([] if logprobs is None else logprobs)]
        self._returning = to_host(chosen if logprobs is None else torch.cat([p.double().flatten() for p in parts]))

    def wait(self) -> StepOutput:
        """The output, as soon as the device has it. Raises whatever went wrong there."""
        packed = self._returning.wait()
        tokens: list[int | None] = [None] * self._num_sequences
        logprobs: list[Logprobs | None] = [None] * self._num_sequences
        broken = list(self._broken)
        chosen = [int(token) for token in packed[: len(self._due)].tolist()]
        for i, token in zip(self._due, chosen, strict=True):
            if token == BROKEN:
                broken.append(i)
            else:
                tokens[i] = token
        wanted = [
            (i, token, count)
            for i, token, count in zip(self._due, chosen, self._counts, strict=True)
            if count is not None
        ]
        if wanted:
            pieces = torch.split(packed[len(self._due) :], [shape.numel() for shape in self._shapes])
            own, values, ids = (piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True))
            tensors = LogprobTensors(own, values, ids.long())
            found = logprobs_from(tensors, [token for _, token, _ in wanted], [count for *_, count in wanted])
            for (i, token, _), value in zip(wanted, found, strict=True):
                logprobs[i] = None if token == BROKEN else value
        return StepOutput(tokens, logprobs, broken)
