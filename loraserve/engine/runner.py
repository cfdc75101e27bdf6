"""The model runner: plain arrays of a step → device tensors → decoder → sampled tokens and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from loraserve.engine.device_sampler import choose_on_device, sample_on_device
from loraserve.engine.graphs import DecodeGraphs, GraphStep
from loraserve.engine.in_flight import ComputedStep, LaunchedStep, NextTokens, PendingStep, StepOutput
from loraserve.engine.location_table import LocationTable
from loraserve.engine.sampler import Logprobs, SamplingRow, choose_on_host, logprob_tensors, logprobs_of, sample
from loraserve.kernels.metadata import AttentionBatch
from loraserve.kernels.transfer import to_device
from loraserve.kvcache.pool import KVCache
from loraserve.lora.batch import build_segments
from loraserve.lora.residency import AdapterResidency
from loraserve.lora.tables import Table
from loraserve.models.decoder import Decoder
from loraserve.models.forward_batch import ForwardBatch
from loraserve.models.replaced import plan_logits_rows, plan_step_rows, vocab_size_of
from loraserve.scheduler.batch import ModelWorkerBatch
from loraserve.scheduler.request import AdapterUse, Request

# Logits of this many rows are held at once when a prompt's log-probabilities are wanted.
_PROMPT_ROWS_BLOCK = 128

LogitsWatch = Callable[[str, int, Tensor], None]
"""Sees every row of logits that is computed: request id, position of the first row, logits [num_rows, vocab] fp32."""


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens as they are computed, chunk by chunk; the first token has none."""

    values: list[Logprobs | None] = field(default_factory=lambda: [None])
    emitted: bool = False
    is_broken: bool = False  # some are not numbers: their logits were not finite


class ModelRunner:
    """Runs steps on the device. Belongs to the engine's thread.

    With `next_tokens` a step's tokens stay there for the next one, which may be launched before anybody has seen them.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        residency: AdapterResidency,
        locations: LocationTable,
        device: torch.device,
        watch: LogitsWatch | None = None,
        graphs: DecodeGraphs | None = None,
        next_tokens: NextTokens | None = None,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._residency = residency
        self._locations = locations
        self._device = device
        self._watch = watch
        self._graphs = graphs
        self._next_tokens = next_tokens
        self._sample = sample if device.type == "cpu" else sample_on_device
        self._choose = choose_on_host if device.type == "cpu" else choose_on_device
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}

    def prepare(self, batch: ModelWorkerBatch) -> ForwardBatch | GraphStep:
        """Put a step's arrays on the device, in a captured graph's own if one can run it."""
        slots = [[(self._residency.slot(use.version), use.scale) for use in adapters] for adapters in batch.adapters]
        self._locations.update()
        if self._graphs is not None and (step := self._graphs.prepare(batch, slots)) is not None:
            self._fill_in(batch, self._graphs.input_ids(step))
            return step
        affine, replaced = self._residency.tables.affine_slots, self._residency.tables.replaced
        sampled = np.flatnonzero(batch.sample)
        last = (batch.q_indptr[1:] - 1)[sampled].astype(np.int64)
        logits_indptr = np.arange(len(sampled) + 1, dtype=np.int32)
        sampled_slots = [slots[i] for i in sampled]
        input_ids = self._tensor(batch.input_ids)
        self._fill_in(batch, input_ids)
        return ForwardBatch(
            input_ids=input_ids,
            positions=self._tensor(batch.positions),
            out_loc=self._tensor(batch.out_loc),
            context_lens=self._tensor(batch.context_lens),
            attention=self._attention(batch),
            logits_rows=self._tensor(last),
            lora=build_segments(slots, batch.q_indptr, self._device, affine, _skips(batch)),
            lora_logits=build_segments(sampled_slots, logits_indptr, self._device, affine),
            rows=plan_step_rows(replaced, slots, batch.q_indptr, batch.input_ids, self._device),
            rows_logits=plan_logits_rows(replaced, sampled_slots, logits_indptr, self._device),
        )

    def launch(self, batch: ModelWorkerBatch) -> LaunchedStep:
        """Give a step to the device; without `next_tokens` this computes it. Steps run in the order of their launch."""
        prepared = self.prepare(batch)
        if self._next_tokens is None:
            return ComputedStep(self.execute(batch, prepared))
        due = np.flatnonzero(batch.sample)
        logits = self._logits(batch, prepared)
        if logits is None:
            nothing = torch.empty(0, device=self._device)
            return PendingStep(len(batch.requests), [], nothing, [], None, True, self._broken_prompts(batch))
        chosen = self._choose(logits, self._sampling_rows(batch, due.tolist(), logits))
        self._next_tokens.put(batch.req_rows[due], chosen)
        counts = [batch.requests[i].params.logprobs for i in due]
        logprobs = None
        if any(count is not None for count in counts):
            rows = self._tensor(np.array([row for row, count in enumerate(counts) if count is not None]))
            most = max(count or 0 for count in counts)
            logprobs = logprob_tensors(logits[rows], chosen[rows].clamp(min=0), most)
        may_wait = not self._needs_ids(batch.adapters)
        broken = self._broken_prompts(batch)
        return PendingStep(len(batch.requests), due.tolist(), chosen, counts, logprobs, may_wait, broken)

    def execute(self, batch: ModelWorkerBatch, prepared: ForwardBatch | GraphStep) -> StepOutput:
        """Compute the step and choose the next token of every sequence that is due one."""
        tokens: list[int | None] = [None] * len(batch.requests)
        logprobs: list[Logprobs | None] = [None] * len(batch.requests)
        due = np.flatnonzero(batch.sample).tolist()
        logits = self._logits(batch, prepared)
        broken = self._broken_prompts(batch)
        if logits is not None:
            chosen = self._sample(logits, self._sampling_rows(batch, due, logits))
            for i, token in zip(due, chosen, strict=True):
                tokens[i] = token
                if token is None:
                    broken.append(i)
            self._sampled_logprobs(batch, due, logits, chosen, logprobs)
        return StepOutput(tokens, logprobs, broken)

    def _sampling_rows(self, batch: ModelWorkerBatch, due: list[int], logits: Tensor) -> list[SamplingRow]:
        """How to sample each row of logits; shows them to the watch."""
        widths = [self._vocab_size(batch, i) for i in due]
        if self._watch is not None:
            for row, i in enumerate(due):
                at = int(batch.positions[batch.q_indptr[i + 1] - 1])
                self._watch(batch.requests[i].id, at, logits[row : row + 1, : widths[row]])
        return [_sampling_row(batch, i, width) for i, width in zip(due, widths, strict=True)]

    def _needs_ids(self, adapters: Iterable[tuple[AdapterUse, ...]]) -> bool:
        """Whether the host must know the tokens of such sequences to compute them: it looks up rows for them."""
        replaced = self._residency.tables.replaced
        return bool(replaced) and any(
            Table.EMBED in replaced.get(self._residency.slot(use.version), ()) for uses in adapters for use in uses
        )

    def _fill_in(self, batch: ModelWorkerBatch, input_ids: Tensor) -> None:
        """Complete the ids on the device with tokens that the host does not know."""
        if batch.has_pending:
            pending = np.flatnonzero(batch.input_ids < 0).tolist()  # only decode sequences, which come first
            assert not self._needs_ids(batch.adapters[i] for i in pending), "planned ahead of a token that is needed"
            assert self._next_tokens is not None
            self._next_tokens.fill_in(input_ids)

    def _logits(self, batch: ModelWorkerBatch, prepared: ForwardBatch | GraphStep) -> Tensor | None:
        """Run the model; logits of the sequences that are due a token, None if none is."""
        if isinstance(prepared, GraphStep):
            assert self._graphs is not None
            return self._graphs.run(prepared)
        tables = self._residency.tables
        hidden = self._decoder.forward(prepared, self._kv, tables)
        self._collect_prompt_logprobs(batch, hidden)
        if not batch.sample.any():
            return None
        rows = prepared.rows_logits
        return self._decoder.logits(hidden[prepared.logits_rows], tables, prepared.lora_logits, rows)

    def _broken_prompts(self, batch: ModelWorkerBatch) -> list[int]:
        """Sequences of which some prompt token's log-probability is not a number."""
        found = [self.prompt_logprobs.get(request.id) for request in batch.requests] if self.prompt_logprobs else []
        return [i for i, kept in enumerate(found) if kept is not None and kept.is_broken]

    def take_prompt_logprobs(self, request: Request) -> list[Logprobs | None] | None:
        """A prompt's log-probabilities, once, as soon as all are known; None before and after, or if they are none."""
        found = self.prompt_logprobs.get(request.id)
        if found is None or found.emitted or found.is_broken or len(found.values) < len(request.prompt):
            return None
        found.emitted = True
        return found.values

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that ended."""
        self.prompt_logprobs.pop(request_id, None)

    def _vocab_size(self, batch: ModelWorkerBatch, sequence: int) -> int:
        """Token ids that may come next: the adapter may bring some of its own."""
        slots = [(self._residency.slot(use.version), use.scale) for use in batch.adapters[sequence]]
        return vocab_size_of(self._residency.tables.replaced, slots, self._decoder.shape.vocab_size)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)

    def _attention(self, batch: ModelWorkerBatch) -> AttentionBatch:
        q_lens = np.diff(batch.q_indptr)
        return AttentionBatch(
            req_rows=self._tensor(batch.req_rows),
            q_indptr=self._tensor(batch.q_indptr),
            seq_lens=self._tensor(batch.seq_lens),
            locations=self._locations.tensor,
            num_decode=batch.num_decode,
            max_seq_len=int(batch.seq_lens.max()),
            max_q_len=int(q_lens.max()),
        )

    def _sampled_logprobs(
        self,
        batch: ModelWorkerBatch,
        due: list[int],
        logits: Tensor,
        chosen: list[int | None],
        into: list[Logprobs | None],
    ) -> None:
        wanted: list[tuple[int, int, int, int]] = []  # sequence, row of logits, token, number of alternatives
        for row, (i, token) in enumerate(zip(due, chosen, strict=True)):
            count = batch.requests[i].params.logprobs
            if count is not None and token is not None:
                wanted.append((i, row, token, count))
        if not wanted:
            return
        picked = logits[[row for _, row, _, _ in wanted]]
        found = logprobs_of(picked, [token for *_, token, _ in wanted], [count for *_, count in wanted])
        for (i, *_), value in zip(wanted, found, strict=True):
            into[i] = value

    def _collect_prompt_logprobs(self, batch: ModelWorkerBatch, hidden: Tensor) -> None:
        for i, request in enumerate(batch.requests):
            count = request.params.prompt_logprobs
            if count is None:
                continue
            kept = self.prompt_logprobs.setdefault(request.id, PromptLogprobs())
            start, stop = int(batch.q_indptr[i]), int(batch.q_indptr[i + 1])
            first = int(batch.positions[start])
            # The row at position p predicts token p + 1; rows already counted come again after a retraction.
            low = max(len(kept.values) - 1, first)
            high = min(first + stop - start, len(request.prompt) - 1)
            for at in range(low, high, _PROMPT_ROWS_BLOCK):
                end = min(at + _PROMPT_ROWS_BLOCK, high)
                block = self._prompt_block(batch, i, hidden[start + at - first : start + end - first], at, count)
                kept.values += block
                kept.is_broken |= any(math.isnan(value.logprob) for value in block)

    def _prompt_block(
        self, batch: ModelWorkerBatch, sequence: int, hidden: Tensor, at: int, count: int
    ) -> list[Logprobs]:
        slots = [(self._residency.slot(use.version), use.scale) for use in batch.adapters[sequence]]
        indptr = np.array([0, hidden.shape[0]], dtype=np.int32)
        segments = build_segments(
            [slots], indptr, self._device, self._residency.tables.affine_slots, [_skips_of(batch, sequence, at)]
        )
        rows = plan_logits_rows(self._residency.tables.replaced, [slots], indptr, self._device)
        logits = self._decoder.logits(hidden.contiguous(), self._residency.tables, segments, rows)
        if self._watch is not None:
            self._watch(batch.requests[sequence].id, at, logits)
        tokens = batch.requests[sequence].prompt[at + 1 : at + 1 + hidden.shape[0]]
        return logprobs_of(logits, tokens, [count] * len(tokens))


def _skips(batch: ModelWorkerBatch) -> list[list[int]] | None:
    """How many tokens of each sequence of the step each of its adapters leaves alone; None if all apply to all."""
    if all(use.start == 0 for adapters in batch.adapters for use in adapters):
        return None
    firsts = batch.positions[batch.q_indptr[:-1]].tolist()
    return [_skips_of(batch, i, first) for i, first in enumerate(firsts)]


def _skips_of(batch: ModelWorkerBatch, sequence: int, first: int) -> list[int]:
    """The same for one sequence, of which the token at position `first` is the first."""
    return [max(0, use.start - first) for use in batch.adapters[sequence]]


def _sampling_row(batch: ModelWorkerBatch, sequence: int, vocab_size: int) -> SamplingRow:
    request = batch.requests[sequence]
    seed = request.params.seed
    assert seed is not None  # the loop gives every request one
    # Not the length of its output, which may lack the tokens of a step in flight.
    step = int(batch.seq_lens[sequence]) - len(request.prompt)
    return SamplingRow(request.params, seed, step, vocab_size)
