"""A model whose KV can be checked, adapters that come and go, a clock that stands still.

The "model" writes into each location a hash of everything that real KV would depend on (namespace, all tokens up to
there). Every step first compares what a sequence would attend to with what it must be, so stale, shared-by-mistake or
overwritten KV is found at the step that reads it. The next token is a function of that hash alone.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from loraserve.errors import AdapterFailed, LoraserveError
from loraserve.scheduler.batch import ModelWorkerBatch, ScheduleBatch
from loraserve.scheduler.interfaces import AdapterState
from loraserve.scheduler.request import Request

MASK = 2**64 - 1
VOCAB = 50
EOS = 7
GARBAGE = 0xDEAD


def chain(previous: int, token: int) -> int:
    """KV of one more token."""
    mixed = (previous * 6364136223846793005 + (token + 1) * 1442695040888963407) & MASK
    return mixed ^ (mixed >> 29)


def root_hash(namespace: str) -> int:
    """What the chain of a namespace starts from."""
    return zlib.crc32(namespace.encode()) + 1


def advance(previous: int, request: Request, position: int, token: int) -> int:
    """KV of one more token of a request, whose overlays have a part in it from their positions on."""
    for start, name in request.overlays:
        if position >= start:
            previous = chain(previous, zlib.crc32(name.encode()))
    return chain(previous, token)


def next_token(kv: int) -> int:
    """The model's answer after the token whose KV this is."""
    return (kv >> 33) % VOCAB


def answer_alone(request: Request, max_context: int) -> list[int]:
    """What the model answers when nothing else exists."""
    kv = root_hash(request.namespace)
    for position, token in enumerate(request.prompt):
        kv = advance(kv, request, position, token)
    output: list[int] = []
    limit = min(request.params.max_tokens, max_context - request.num_prompt)
    while len(output) < limit:
        token = next_token(kv)
        output.append(token)
        if (not request.params.ignore_eos and token in request.eos_ids) or token in request.params.stop_token_ids:
            break
        kv = advance(kv, request, request.num_prompt + len(output) - 1, token)
    return output


@dataclass
class Launched:
    """What a device has of a step once it is launched: nothing that the host does later changes it."""

    batch: ScheduleBatch
    worker: ModelWorkerBatch
    rows: np.ndarray  # [num_sequences, max_context], the sequences' rows of the level-1 table


class FakeModel:
    """Reads and writes the KV array exactly where the worker batch says; steps run in the order of their launch."""

    def __init__(self, num_locations: int) -> None:
        self.kv = np.zeros(num_locations, np.uint64)
        self.known: dict[str, list[int]] = {}  # request id → chain of its tokens
        self.sampled: dict[int, int] = {}  # level-1 row → the token sampled last for it
        self.num_wasted = 0  # rows computed for requests that had ended

    def expected(self, request: Request, upto: int) -> list[int]:
        """The chain of the request's first tokens, from its own tokens and not from the cache."""
        known = self.known.setdefault(request.id, [])
        tokens = request.prompt + request.output
        while len(known) < upto:
            previous = known[-1] if known else root_hash(request.namespace)
            known.append(advance(previous, request, len(known), tokens[len(known)]))
        return known[:upto]

    def launch(self, batch: ScheduleBatch, table: np.ndarray) -> Launched:
        """Send a step to the device."""
        worker = batch.to_worker_batch()
        assert len(np.unique(worker.out_loc)) == len(worker.out_loc), "two tokens write to one location"
        assert worker.has_pending == bool((worker.input_ids < 0).any())
        return Launched(batch, worker, table[worker.req_rows].copy())

    def run(self, launched: Launched, table: np.ndarray, *, broken: bool = False) -> list[int | None]:
        """Compute the step. A broken one writes garbage."""
        worker = launched.worker
        for i, request in enumerate(worker.requests):
            span = slice(int(worker.positions[worker.q_indptr[i]]), int(worker.seq_lens[i]))
            assert request.row == worker.req_rows[i], f"{request.id} lost its row before the device came to it"
            assert np.array_equal(table[request.row, span], launched.rows[i, span]), "a write goes to lost pages"
        if broken:
            self.kv[worker.out_loc] = GARBAGE
            return [None] * len(worker.requests)
        ends: list[np.ndarray] = []
        for i, request in enumerate(worker.requests):
            begin, end = int(worker.q_indptr[i]), int(worker.q_indptr[i + 1])
            positions = worker.positions[begin:end]
            assert positions.tolist() == list(range(int(positions[0]), int(worker.seq_lens[i])))
            ids = [int(t) if t >= 0 else self.sampled.get(int(-1 - t), 0) for t in worker.input_ids[begin:end]]
            tokens = (request.prompt + request.output)[positions[0] : positions[-1] + 1]
            assert request.is_finished or ids == tokens, "wrong input ids"
            chain_of = list(self.expected(request, int(positions[0])))
            for token in ids:
                before = chain_of[-1] if chain_of else root_hash(request.namespace)
                chain_of.append(advance(before, request, len(chain_of), token))
            ends.append(np.array(chain_of, np.uint64))
            self.kv[worker.out_loc[begin:end]] = ends[-1][positions]
        tokens_out: list[int | None] = []
        for i, request in enumerate(worker.requests):  # every layer attends after all tokens of the step have written
            seen = self.kv[launched.rows[i, : worker.seq_lens[i]]]
            self.num_wasted += request.is_finished
            assert request.is_finished or np.array_equal(seen, ends[i]), f"{request.id} attends to KV not its own"
            tokens_out.append(next_token(int(seen[-1])) if worker.sample[i] else None)
            if worker.sample[i]:
                self.sampled[int(worker.req_rows[i])] = next_token(int(seen[-1]))
        return tokens_out

    def forward(self, batch: ScheduleBatch, table: np.ndarray, *, broken: bool = False) -> list[int | None]:
        """One step at once."""
        return self.run(self.launch(batch, table), table, broken=broken)


@dataclass
class FakeAdapter:
    """One version in the fake gate."""

    size: int
    fetch_s: float
    broken: bool = False
    state: AdapterState = AdapterState.ABSENT
    ready_at: float = 0.0
    leases: int = 0
    used: int = 0


@dataclass
class FakeGate:
    """An `AdapterGate` with limited room, slow fetches and failures; it moves only in `advance`."""

    room: int
    adapters: dict[str, FakeAdapter]
    wants: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    uses: int = 0
    uploads: int = 0

    def state(self, version: str) -> str:
        return self.adapters[version].state

    def want(self, version: str, since: float) -> None:
        adapter = self.adapters[version]
        self.wants[version] = since
        if adapter.state == AdapterState.ABSENT:
            adapter.state, adapter.ready_at = AdapterState.FETCHING, self.now + adapter.fetch_s

    def unwant(self, version: str) -> None:
        del self.wants[version]  # KeyError: it was not wanted

    def acquire(self, version: str) -> bool:
        adapter = self.adapters[version]
        if adapter.state != AdapterState.RESIDENT:
            return False
        adapter.leases += 1
        self.uses += 1
        adapter.used = self.uses
        return True

    def release(self, version: str) -> None:
        self.adapters[version].leases -= 1
        assert self.adapters[version].leases >= 0, f"{version} is released more often than acquired"

    def failure(self, version: str) -> LoraserveError | None:
        failed = self.adapters[version].state == AdapterState.FAILED
        return AdapterFailed(f"{version} is broken") if failed else None

    def advance(self, now: float) -> None:
        """Fetches arrive; whoever is wanted longest gets room, from adapters that nobody leases or wants earlier."""
        self.now = now
        for adapter in self.adapters.values():
            if adapter.state == AdapterState.FETCHING and adapter.ready_at <= now:
                adapter.state = AdapterState.FAILED if adapter.broken else AdapterState.STAGED
        for version, since in sorted(self.wants.items(), key=lambda item: item[1]):
            adapter = self.adapters[version]
            if adapter.state != AdapterState.STAGED:
                continue
            idle = [
                (other.used, name)
                for name, other in self.adapters.items()
                if other.state == AdapterState.RESIDENT
                and not other.leases
                and self.wants.get(name, float("inf")) > since
            ]
            taken = sum(other.size for other in self.adapters.values() if other.state == AdapterState.RESIDENT)
            for _, name in sorted(idle):
                if taken + adapter.size <= self.room:
                    break
                self.adapters[name].state = AdapterState.STAGED
                taken -= self.adapters[name].size
            if taken + adapter.size > self.room:
                return  # nobody behind may take what this one waits for
            adapter.state = AdapterState.RESIDENT
            self.uploads += 1

    @property
    def leases(self) -> int:
        return sum(adapter.leases for adapter in self.adapters.values())


class Clock:
    """Time that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
