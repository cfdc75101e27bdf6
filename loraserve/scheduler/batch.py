"""One step's work: `ScheduleBatch` (which requests, how many tokens) and `ModelWorkerBatch` (plain arrays of it)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraserve.scheduler.request import AdapterUse, Request


class ScheduleEntry(NamedTuple):
    """Tokens `start .. start + num_new` of one request are computed this step."""

    request: Request
    start: int
    num_new: int
    is_decode: bool
    samples: bool  # whether the token after the last of these is sampled

    @property
    def prompt_logprobs_start(self) -> int:
        """First position whose prompt logprobs are new in this step; the end is `min(start + num_new, num_prompt)`.

        Positions below it were reported before the request was retracted. Position p predicts token p + 1, so the
        last prompt position reports nothing.
        """
        return max(self.start, self.request.prompt_logprobs_done)


class StepRows(NamedTuple):
    """Sequences of one step by what they are."""

    base_prefill: int
    base_decode: int
    adapter_prefill: int
    adapter_decode: int


@dataclass(frozen=True, slots=True)
class ModelWorkerBatch:
    """What a model worker needs of one step. T tokens of S sequences, concatenated; decode sequences come first."""

    input_ids: NDArray[np.int64]  # [T]; below 0 (see `pending_id`): a token that the step in flight samples
    positions: NDArray[np.int64]  # [T]
    out_loc: NDArray[np.int32]  # [T], where each token's K and V go
    context_lens: NDArray[np.int64]  # [T], max(prompt length, position + 1)
    req_rows: NDArray[np.int32]  # [S], rows of the level-1 table
    q_indptr: NDArray[np.int32]  # [S + 1], prefix sums of new tokens
    seq_lens: NDArray[np.int32]  # [S], cached and new tokens
    num_decode: int  # leading sequences with one new token each
    adapters: list[tuple[AdapterUse, ...]]  # per sequence; empty: base
    sample: NDArray[np.bool_]  # [S], whether the sequence's last token is sampled from
    requests: list[Request]  # [S]
    has_pending: bool = False  # whether any of `input_ids` is below 0


@dataclass(frozen=True, slots=True)
class ScheduleBatch:
    """The requests of one step; decode entries come first."""

    entries: tuple[ScheduleEntry, ...]
    num_decode: int
    table: NDArray[np.int32]  # the level-1 table, read when the arrays are made
    is_ahead: bool = False  # planned while another step was in flight, whose tokens nobody knew

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(entry.num_new for entry in self.entries)

    @property
    def num_adapters(self) -> int:
        """Distinct adapter versions in this step."""
        return len({version for entry in self.entries for version in entry.request.versions})

    @property
    def rows(self) -> StepRows:
        """Sequences by kind (base, adapter) and phase (prefill, decode)."""
        decode = self.entries[: self.num_decode]
        adapter_decode = sum(1 for entry in decode if entry.request.adapters)
        adapter_prefill = sum(1 for entry in self.entries[self.num_decode :] if entry.request.adapters)
        num_prefill = len(self.entries) - self.num_decode
        return StepRows(
            base_prefill=num_prefill - adapter_prefill,
            base_decode=self.num_decode - adapter_decode,
            adapter_prefill=adapter_prefill,
            adapter_decode=adapter_decode,
        )

    def to_worker_batch(self) -> ModelWorkerBatch:
        """The step as plain arrays. Raises nothing; the entries' pages are already theirs."""
        entries, num_decode = self.entries, self.num_decode
        requests = [entry.request for entry in entries]
        count = len(entries)
        start = np.fromiter((entry.start for entry in entries), np.int64, count)
        num_new = np.fromiter((entry.num_new for entry in entries), np.int64, count)
        req_rows = np.fromiter((request.row for request in requests), np.int32, count)
        num_prompt = np.fromiter((len(request.prompt) for request in requests), np.int64, count)
        q_indptr = np.zeros(count + 1, np.int64)
        np.cumsum(num_new, out=q_indptr[1:])
        positions = np.arange(q_indptr[-1]) + np.repeat(start - q_indptr[:-1], num_new)
        last = _inputs(entries[:num_decode]) if self.is_ahead else (r.output[-1] for r in requests[:num_decode])
        chunks = [np.fromiter(last, np.int64, num_decode)]
        chunks += [e.request.prefill_ids[e.start : e.start + e.num_new] for e in entries[num_decode:]]
        return ModelWorkerBatch(
            input_ids=np.concatenate(chunks),
            positions=positions,
            out_loc=self.table[np.repeat(req_rows, num_new), positions],
            context_lens=np.maximum(np.repeat(num_prompt, num_new), positions + 1),
            req_rows=req_rows,
            q_indptr=q_indptr.astype(np.int32),
            seq_lens=(start + num_new).astype(np.int32),
            num_decode=num_decode,
            adapters=[request.adapters for request in requests],
            sample=np.fromiter((entry.samples for entry in entries), np.bool_, count),
            requests=requests,
            has_pending=self.is_ahead and bool((chunks[0] < 0).any()),
        )


def pending_id(row: int) -> int:
    """The place of a token that is not known yet: what the step in flight samples for this level-1 row."""
    return -1 - row


def _inputs(decode: tuple[ScheduleEntry, ...]) -> Iterator[int]:
    """The token that each decode entry computes."""
    for entry in decode:
        request = entry.request
        index = entry.start - len(request.prompt)
        if index < len(request.output):
            yield request.output[index]
        else:
            assert request.row is not None
            yield pending_id(request.row)
