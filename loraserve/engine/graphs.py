"""Captured decode steps: a ladder of batch sizes, each with and without adapters, replayed on static arrays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from loraserve.compat import StrEnum
from loraserve.engine.static_step import LoraShape, StaticStep, decode_segments
from loraserve.kernels.metadata import Kind, LoraTables
from loraserve.kvcache.pool import KVCache
from loraserve.models.decoder import Decoder
from loraserve.scheduler.batch import ModelWorkerBatch

logger = logging.getLogger(__name__)

MAX_BLEND = 4  # adapters of one token that a captured step can hold
_VOCABULARY = (Kind.EMBED, Kind.LM_HEAD)
_KNOWN_TABLES = {"targets", "affine_slots", "vocabulary_slots", "revision", "replaced"}

Replay = Callable[[], Tensor]


class GraphDevice(Protocol):
    """Turns a computation on static arrays into one that can be repeated."""

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        """Record `run`; the result repeats it on what the same arrays hold then, and gives the same output tensor."""
        ...


class CudaGraphs:
    """CUDA (and HIP) graphs that share one memory pool: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor]) -> Replay:
        """Run twice beside the main stream, so that nothing is compiled or set up while it is recorded; then record."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class Flavour(StrEnum):
    """What a captured step does about adapters."""

    BASE = "base"  # nothing: no token has any
    LINEAR = "linear"  # any mix of one adapter per token on the layers' linears
    FULL = "full"  # blends, vocabulary-sized kinds, gains and shifts as well


_SHAPES = {Flavour.BASE: None, Flavour.LINEAR: LoraShape(1, False), Flavour.FULL: LoraShape(MAX_BLEND, True)}


class GraphStep(NamedTuple):
    """A step that a graph can run, already in the static arrays."""

    size: int
    flavour: Flavour
    num_rows: int


@dataclass(slots=True)
class _Captured:
    replay: Replay
    revision: int  # of the adapter tables it was recorded with


def ladder_of(max_running: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, 8, then every eighth up to 64, then every thirty-second, and the largest."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, max_running + 32, 32)]
    return tuple(sorted({min(size, max_running) for size in sizes}))


class DecodeGraphs:
    """Decode steps as graphs. Belongs to the engine's thread.

    A step that no graph can hold (prefill in it, more rows, larger blends) is None from `prepare` and runs as it would
    without graphs. When the tables of the adapters are replaced, graphs with adapters are captured again at their next
    use.
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, tables: LoraTables, step: StaticStep, device: GraphDevice
    ) -> None:
        self.ladder = ladder_of(step.max_rows)
        self._decoder = decoder
        self._kv = kv
        self._tables = tables
        self._step = step
        self._device = device
        self._captured: dict[tuple[int, Flavour], _Captured] = {}
        self.num_captures = 0

    def capture_all(self) -> None:
        """Capture every size and flavour, the largest first so that the others fit into its memory."""
        started = time.monotonic()
        with torch.no_grad():
            for size in reversed(self.ladder):
                for flavour in Flavour:
                    self._graph(size, flavour)
        logger.info("%d decode graphs captured in %.1f s", len(self._captured), time.monotonic() - started)

    def prepare(self, batch: ModelWorkerBatch, slots: Sequence[Sequence[tuple[int, float]]]) -> GraphStep | None:
        """Put a step into the static arrays; None, and nothing done, if no graph can run it.

        `slots` are the (slot, weight) pairs of every sequence.
        """
        count = len(batch.requests)
        if batch.num_decode < count or not 0 < count <= self.ladder[-1] or not batch.sample.all():
            return None
        if any(use.start >= int(batch.seq_lens[i]) for i, uses in enumerate(batch.adapters) for use in uses):
            return None  # an activated adapter that this token does not use yet
        segments = decode_segments(slots)
        flavour = self._flavour(slots) if segments is not None else Flavour.BASE
        if flavour is None:
            return None
        size = next(size for size in self.ladder if size >= count)
        self._step.fill(batch, size, segments)
        return GraphStep(size, flavour, count)

    def input_ids(self, step: GraphStep) -> Tensor:
        """The step's input ids in the static arrays, [num_rows] int64, to be completed before `run`."""
        return self._step.input_ids(step.num_rows)

    def run(self, step: GraphStep) -> Tensor:
        """The step's logits, [num_rows, vocab] float32; the next run overwrites them."""
        return self._graph(step.size, step.flavour).replay()[: step.num_rows]

    def _flavour(self, slots: Sequence[Sequence[tuple[int, float]]]) -> Flavour | None:
        tables = self._tables
        if any(getattr(tables, f.name) for f in fields(tables) if f.name not in _KNOWN_TABLES):
            return None  # something that adapters may bring and no captured step computes
        if max(len(pairs) for pairs in slots) > MAX_BLEND:
            return None
        used = {slot for pairs in slots for slot, _ in pairs}
        if not used.isdisjoint(tables.replaced):
            return None  # rows in place of the base's are planned on the host, for each step anew
        is_plain = used.isdisjoint(tables.affine_slots) and used.isdisjoint(tables.vocabulary_slots)
        return Flavour.LINEAR if is_plain and all(len(pairs) <= 1 for pairs in slots) else Flavour.FULL

    def _graph(self, size: int, flavour: Flavour) -> _Captured:
        found = self._captured.get((size, flavour))
        if found is None or (flavour is not Flavour.BASE and found.revision != self._tables.revision):
            replay = self._device.capture(self._computation(size, flavour))
            found = self._captured[size, flavour] = _Captured(replay, self._tables.revision)
            self.num_captures += 1
        return found

    def _computation(self, size: int, flavour: Flavour) -> Callable[[], Tensor]:
        tables = _tables_of(self._tables, flavour)

        def run() -> Tensor:
            # Anew in every run: operators keep what they derive from a step's objects, a graph must derive it itself.
            batch = self._step.forward_batch(size, _SHAPES[flavour])
            hidden = self._decoder.forward(batch, self._kv, tables)
            return self._decoder.logits(hidden, tables, batch.lora_logits)

        return run


def _tables_of(tables: LoraTables, flavour: Flavour) -> LoraTables | None:
    """The tables as a captured step sees them: not what is in use now, but all that may come to be."""
    if flavour is Flavour.BASE:
        return None
    if flavour is Flavour.LINEAR:
        targets = {kind: target for kind, target in tables.targets.items() if kind not in _VOCABULARY}
        return replace(tables, targets=targets, affine_slots=set())
    return replace(tables, targets=dict(tables.targets), affine_slots={0})
