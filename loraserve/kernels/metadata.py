"""What the kernels are told about a step: which tokens attend to what, and which tokens belong to which adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loraserve.compat import StrEnum


class Kind(StrEnum):
    """A place in the model that an adapter may change."""

    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - the projection's own name
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    EMBED = "embed"
    LM_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step. Tokens are concatenated sequence by sequence; decode sequences come first.

    A decode sequence has exactly one new token. `seq_lens` counts all tokens of a sequence, cached and new; the new
    ones are its last `q_indptr[i+1] - q_indptr[i]`. `locations[req_rows[i], p]` is where position p of sequence i
    lies in the KV cache. Made anew for every step: backends keep what they derive from it while it is the last one.
    """

    req_rows: Tensor  # [num_seqs] int32
    q_indptr: Tensor  # [num_seqs + 1] int32, q_indptr[-1] == num_tokens
    seq_lens: Tensor  # [num_seqs] int32
    locations: Tensor  # [num_rows, max_context] int32, the whole level-1 table
    num_decode: int  # the first num_decode sequences have one new token each
    max_seq_len: int  # largest of seq_lens, known on the host
    max_q_len: int  # largest number of new tokens of one sequence, known on the host


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """(token, slot, weight) triples sorted by slot; segment g holds the triples of `slots[g]`.

    A token may appear in several segments (a blend) but at most once in each. Tokens of the base appear in none. Made
    anew for every step: backends keep what they derive from it and from its slots' pages and ranks, which must not
    change while the step runs.
    """

    tokens: Tensor  # [num_triples] int32, row of x and y
    weights: Tensor  # [num_triples] float32
    slots: Tensor  # [num_segments] int32, -1 is a no-op
    indptr: Tensor  # [num_segments + 1] int32
    max_segment: int  # largest number of triples in one segment, known on the host
    affine: bool = True  # False: the host knows that no slot has gain and shift rows, so `lora_affine` is not needed
    max_per_token: int | None = None  # largest number of segments that one token is in; None: the host does not know


class LoraTargetShape(NamedTuple):
    """The sizes of one kind of projection in the base model, from which the pool makes its `LoraTarget`."""

    kind: Kind
    in_features: int
    out_features: int
    out_offset: int  # first column of the fused output
    num_layers: int
    has_bias: bool = False  # of the base's projection


@dataclass(slots=True)
class LoraTarget:
    """The device pool as one kind of projection sees it: for every layer and slot, pages of A and B rows.

    Row i of A of (layer, slot) is the `in_features` elements of `storage` from
    `a_pages[layer, slot, i // page_rows] + (i % page_rows) * in_features`; row i of B, stored transposed so that it has
    `out_features` elements, likewise from `b_pages`. The adapter's scaling
    is already in B. Rows at or past `ranks[layer, slot]` are not to be read. Slots that do not target this kind have
    rank 0. Layer-less kinds (embed, lm_head) have one layer.

    Where `affine[layer, slot]` is set, two more rows follow those of B: row `rank` is the gain and row `rank + 1` the
    shift that `lora_affine` applies to the base's output. A slot may have these with rank 0.
    """

    storage: Tensor  # [num_elements], the whole pool, in the pool's dtype
    a_pages: Tensor  # [num_layers, num_slots, max_pages] int64, element offsets
    b_pages: Tensor  # [num_layers, num_slots, max_pages] int64, element offsets
    ranks: Tensor  # [num_layers, num_slots] int32
    page_rows: int
    in_features: int
    out_features: int
    out_offset: int = 0  # first column of the fused output that this projection writes
    affine: Tensor | None = None  # [num_layers, num_slots] bool; None: no slot has had gain and shift rows yet
    alignment: int = 1  # pages start at multiples of so many elements


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of one of the base's tables that one slot brings itself. Where they lie is known on the host only."""

    storage: Tensor  # [num_elements], the whole pool
    ids: NDArray[np.int64]  # [num_rows] ascending: which rows of the table
    offsets: NDArray[np.int64]  # [num_rows] element offset of each row
    width: int

    def row(self, index: int) -> Tensor | None:
        """A view of the row, [width], or None if the slot does not bring it."""
        at = int(np.searchsorted(self.ids, index))
        if at == len(self.ids) or self.ids[at] != index:
            return None
        begin = int(self.offsets[at])
        return self.storage[begin : begin + self.width]

    def find(self, wanted: NDArray[np.integer]) -> NDArray[np.int64]:
        """Element offsets of rows, −1 where the slot does not bring one."""
        at = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        return np.where(self.ids[at] == wanted, self.offsets[at], -1)

    def runs(self) -> list[tuple[int, int]]:
        """Ranges of `ids` whose rows follow each other in memory."""
        edges = np.flatnonzero(np.diff(self.offsets) != self.width) + 1
        bounds = [0, *edges.tolist(), len(self.ids)]
        return list(pairwise(bounds))


@dataclass(slots=True)
class LoraTables:
    """Every kind's target, and the groups that share one input (fused outputs, columns side by side)."""

    targets: dict[Kind, LoraTarget] = field(default_factory=dict)
    affine_slots: set[int] = field(default_factory=set)  # slots with gain and shift rows of any kind
    replaced: dict[int, dict[str, SlotRows]] = field(default_factory=dict)  # slot → table of `lora.tables` → its rows
    vocabulary_slots: set[int] = field(default_factory=set)  # slots that target embed or lm_head
    revision: int = 0  # grows when a target is added or a tensor of one replaced

    def group(self, *kinds: Kind) -> tuple[LoraTarget, ...]:
        """Targets of `kinds` that any slot uses at all, in order."""
        return tuple(self.targets[kind] for kind in kinds if kind in self.targets)
