"""Rows that adapters bring in place of the base's, within one step: embeddings, norms, weights of logits.

The base computes every token; where an adapter has a row of its own the result of its tokens is computed again with
that row and put in its place. Which tokens these are is planned on the host, so that layers only ask "is there any".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from loraserve.kernels.metadata import SlotRows
from loraserve.kernels.transfer import to_device
from loraserve.lora.tables import Table

Replaced = Mapping[int, Mapping[str, SlotRows]]  # slot → table → rows, as in `LoraTables.replaced`
Slots = Sequence[Sequence[tuple[int, float]]]  # of each sequence: (slot, weight), as for `build_segments`


class TokensOfSlot(NamedTuple):
    """The tokens of a step that use one slot, and its rows of one table."""

    tokens: Tensor  # [n] int64
    rows: SlotRows


@dataclass(frozen=True, slots=True)
class EmbedRows:
    """Tokens whose embedding their adapter brings."""

    tokens: Tensor  # [n] int64
    elements: Tensor  # [n, hidden] int64, places in `storage`
    storage: Tensor


@dataclass(frozen=True, slots=True)
class StepRows:
    """All rows that the adapters of a step bring for its tokens."""

    embed: EmbedRows | None
    norms: tuple[TokensOfSlot, ...]
    head_norms: tuple[TokensOfSlot, ...]

    def replace_embeddings(self, hidden: Tensor) -> None:
        """Put the adapters' embeddings in place. hidden: [num_tokens, hidden]."""
        if self.embed is not None:
            hidden[self.embed.tokens] = self.embed.storage[self.embed.elements]

    def norms_of(self, row: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(tokens, weight) for every adapter that brings this row of NORM."""
        for tokens, rows in self.norms:
            weight = rows.row(row)
            if weight is not None:
                yield tokens, weight


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Rows of logits whose adapters bring rows of the head. Tokens are rows of the gathered hidden states."""

    heads: tuple[TokensOfSlot, ...]
    vocab_size: int  # largest of these adapters

    def replace(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """The logits with the adapters' own in place; as wide as the largest vocabulary, −inf where a row has none.

        logits: [R, vocab], hidden: [R, hidden] → [R, at least vocab].
        """
        if self.vocab_size > logits.shape[1]:
            logits = F.pad(logits, (0, self.vocab_size - logits.shape[1]), value=float("-inf"))
        for tokens, rows in self.heads:
            mine = hidden[tokens]
            for begin, end in rows.runs():
                first = int(rows.offsets[begin])
                weight = rows.storage[first : first + (end - begin) * rows.width].view(end - begin, rows.width)
                # Few tokens, many rows: as W·xᵀ this is several times as fast on CPUs as x·Wᵀ.
                found, ids = torch.mm(weight, mine.T).T, rows.ids[begin:end]
                if ids[-1] - ids[0] == end - begin - 1:
                    logits[tokens, int(ids[0]) : int(ids[-1]) + 1] = found
                else:
                    logits[tokens[:, None], to_device(ids, logits.device)] = found
        return logits


def plan_step_rows(
    replaced: Replaced,
    slots: Slots,
    q_indptr: NDArray[np.integer],
    input_ids: NDArray[np.integer],
    device: torch.device,
) -> StepRows | None:
    """What the adapters of a step bring; None if nothing. Sequence i owns the tokens q_indptr[i] .. q_indptr[i + 1]."""
    mine = _tokens_of(replaced, slots, q_indptr)
    if not mine:
        return None
    embeds: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    storage, width = None, 0
    for slot, tokens in mine.items():
        rows = replaced[slot].get(Table.EMBED)
        if rows is not None:
            offsets = rows.find(input_ids[tokens])
            embeds.append((tokens[offsets >= 0], offsets[offsets >= 0]))
            storage, width = rows.storage, rows.width
    embed = None
    if storage is not None and any(len(tokens) for tokens, _ in embeds):
        elements = np.concatenate([offsets for _, offsets in embeds])[:, None] + np.arange(width)
        embed = EmbedRows(
            to_device(np.concatenate([tokens for tokens, _ in embeds]), device), to_device(elements, device), storage
        )

    def having(table: Table) -> tuple[TokensOfSlot, ...]:
        found = ((tokens, replaced[slot].get(table)) for slot, tokens in mine.items())
        return tuple(TokensOfSlot(to_device(tokens, device), rows) for tokens, rows in found if rows is not None)

    return StepRows(embed, having(Table.NORM), having(Table.HEAD_NORM))


def plan_logits_rows(
    replaced: Replaced, slots: Slots, row_indptr: NDArray[np.integer], device: torch.device
) -> LogitsRows | None:
    """The same for rows of logits; sequence i owns the rows row_indptr[i] .. row_indptr[i + 1]."""
    heads = []
    for slot, rows in _tokens_of(replaced, slots, row_indptr).items():
        head = replaced[slot].get(Table.LM_HEAD)
        if head is not None and len(rows):
            heads.append(TokensOfSlot(to_device(rows, device), head))
    return LogitsRows(tuple(heads), max(int(head.rows.ids[-1]) + 1 for head in heads)) if heads else None


def vocab_size_of(replaced: Replaced, slots: Sequence[tuple[int, float]], base: int) -> int:
    """Token ids that a sequence may have: the base's, and those that its adapter brings rows for."""
    heads = [replaced.get(slot, {}).get(Table.LM_HEAD) for slot, _ in slots]
    return max([base, *(int(head.ids[-1]) + 1 for head in heads if head is not None)])


def _tokens_of(replaced: Replaced, slots: Slots, indptr: NDArray[np.integer]) -> dict[int, NDArray[np.int64]]:
    """Slot → its tokens, in order; of slots that bring any rows."""
    ranges: dict[int, list[NDArray[np.int64]]] = {}
    for i, uses in enumerate(slots) if replaced else ():
        for slot, _ in uses:
            if slot in replaced:
                ranges.setdefault(slot, []).append(np.arange(indptr[i], indptr[i + 1], dtype=np.int64))
    return {slot: np.concatenate(found) for slot, found in ranges.items()}
