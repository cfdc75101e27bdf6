"""Parts 3 and 6 of `benchmarks/gpu.py`: whole model steps with many adapters, and captured steps against eager ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_shapes import Machine, clock_eager, make_decoder, make_shape
from loraserve.engine.graphs import MAX_BLEND, CudaGraphs, DecodeGraphs, GraphDevice, GraphStep
from loraserve.engine.location_table import LocationTable
from loraserve.engine.static_step import StaticStep
from loraserve.engine.warm_up import warm_up
from loraserve.kernels.metadata import AttentionBatch
from loraserve.kernels.ops import Ops
from loraserve.kvcache.pool import KVCache
from loraserve.lora.batch import build_segments
from loraserve.lora.pool import LoraPool
from loraserve.lora.weights import StagedAdapter, StagedTarget
from loraserve.models.forward_batch import ForwardBatch
from loraserve.scheduler.batch import ModelWorkerBatch

Row = dict[str, Any]
Slots = list[list[tuple[int, float]]]


class EagerGraphs:
    """Where there are no graphs: a replay runs the computation again."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = run()
        return lambda: output.copy_(run())


class StepBench:
    """A model with random weights, a full LoRA pool and room for `rows` sequences of `context` tokens."""

    def __init__(
        self, machine: Machine, ops: Ops, name: str, folder: Path, rows: int, context: int, ranks: list[int]
    ) -> None:
        self.machine, self.context, self.max_rows = machine, context, rows
        self.shape = shape = make_shape(name, folder)
        self.decoder = make_decoder(shape, machine, ops)
        self.spare = rows * context
        self.kv = KVCache(
            shape.num_layers, self.spare + 1, shape.num_kv_heads, shape.head_dim, machine.dtype, machine.device
        )
        self.table = np.random.default_rng(0).permutation(self.spare).astype(np.int32).reshape(rows, context)
        self.locations = LocationTable(self.table, list, machine.device, self.spare, copies=True)
        self.locations.tensor[:rows] = torch.from_numpy(self.table).to(machine.device)
        self.pool = self._filled_pool(ranks)
        self.decoder.rotary.reserve(context)
        warm_up(self.decoder, self.kv, self.pool.tables, self.locations, self.spare, context)
        device: GraphDevice = CudaGraphs() if machine.device.type == "cuda" else EagerGraphs()
        step = StaticStep(rows, MAX_BLEND, self.locations.tensor, self.locations.spare_row, self.spare, context)
        self.graphs = DecodeGraphs(self.decoder, self.kv, self.pool.tables, step, device)

    def _filled_pool(self, ranks: list[int]) -> LoraPool:
        """Each rank's adapter is drawn once on the host and written to as many slots as have it."""
        machine, targets = self.machine, self.shape.lora_targets()
        linear = [target for target in targets if target.num_layers > 1]
        staged: dict[int, StagedAdapter] = {}
        for rank in set(ranks):
            modules = [
                StagedTarget(
                    target.kind,
                    layer,
                    rank,
                    (torch.randn(rank, target.in_features) * 0.02).to(machine.dtype),
                    (torch.randn(rank, target.out_features) * 0.02).to(machine.dtype),
                )
                for target in linear
                for layer in range(target.num_layers)
            ]
            size = sum(module.a.numel() + module.b.numel() for module in modules) * machine.dtype.itemsize
            staged[rank] = StagedAdapter(tuple(modules), machine.dtype, size, 0)
        need = int(sum(staged[rank].num_bytes for rank in ranks) * 1.3) + (64 << 20)
        pool = LoraPool(targets, need, 8, len(ranks), max(*ranks, 64), machine.dtype, machine.device)
        pool.reserve_tables()
        for rank in ranks:
            held = pool.reserve(staged[rank])
            assert held is not None
            while not pool.write(held, 1 << 40):
                pass
        return pool

    def batch(self, count: int, seq_lens: np.ndarray, seed: int) -> ModelWorkerBatch:
        """A decode step of the first `count` rows."""
        rows = np.arange(count, dtype=np.int32)
        positions = seq_lens.astype(np.int64) - 1
        return ModelWorkerBatch(
            input_ids=np.random.default_rng(seed).integers(0, self.shape.vocab_size, count),
            positions=positions,
            out_loc=self.table[rows, positions],
            context_lens=seq_lens.astype(np.int64),
            req_rows=rows,
            q_indptr=np.arange(count + 1, dtype=np.int32),
            seq_lens=seq_lens.astype(np.int32),
            num_decode=count,
            adapters=[()] * count,
            sample=np.ones(count, np.bool_),
            requests=[None] * count,  # type: ignore[list-item]
        )

    def eager(self, batch: ModelWorkerBatch, slots: Slots, new: int = 1) -> Tensor:
        """The same step without a graph (`new` tokens per sequence), logits of the last tokens."""
        device, count = self.machine.device, len(batch.requests)

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        indptr = np.arange(count + 1, dtype=np.int32) * new
        last = np.arange(count + 1, dtype=np.int32)
        forward = ForwardBatch(
            input_ids=put(batch.input_ids),
            positions=put(batch.positions),
            out_loc=put(batch.out_loc),
            context_lens=put(batch.context_lens),
            attention=AttentionBatch(
                req_rows=put(batch.req_rows),
                q_indptr=put(indptr),
                seq_lens=put(batch.seq_lens),
                locations=self.locations.tensor,
                num_decode=count if new == 1 else 0,
                max_seq_len=int(batch.seq_lens.max()),
                max_q_len=new,
            ),
            logits_rows=put(indptr[1:].astype(np.int64) - 1),
            lora=build_segments(slots, indptr, device, set()),
            lora_logits=build_segments(slots, last, device, set()),
        )
        hidden = self.decoder.forward(forward, self.kv, self.pool.tables)
        return self.decoder.logits(hidden[forward.logits_rows], self.pool.tables, forward.lora_logits)

    def prefill(self, sequences: int, new: int, slots: Slots) -> Callable[[], Tensor]:
        """A step of whole prompts."""
        rows = np.arange(sequences, dtype=np.int32)
        batch = self.batch(sequences, np.full(sequences, new), 0)
        positions = np.tile(np.arange(new), sequences)
        tokens = np.random.default_rng(1).integers(0, self.shape.vocab_size, sequences * new)
        whole = ModelWorkerBatch(
            input_ids=tokens,
            positions=positions,
            out_loc=self.table[np.repeat(rows, new), positions],
            context_lens=positions + 1,
            req_rows=rows,
            q_indptr=np.arange(sequences + 1, dtype=np.int32) * new,
            seq_lens=batch.seq_lens,
            num_decode=0,
            adapters=batch.adapters,
            sample=batch.sample,
            requests=batch.requests,
        )
        return lambda: self.eager(whole, slots, new)


@torch.no_grad()
def step_rates(machine: Machine, bench: StepBench, model: str, adapters: list[int], sizes: list[int]) -> list[Row]:
    """Part 3. Decode and prefill tokens per second; the LoRA tax is 1 − rate / rate of the base."""
    rows: list[Row] = []
    for size in sizes:
        lens = np.full(size, bench.context // 2)
        base = 0.0
        for count in (0, *adapters):
            slots: Slots = [[(i % count, 1.0)] if count else [] for i in range(size)]
            step = bench.graphs.prepare(bench.batch(size, lens, 0), slots)
            assert isinstance(step, GraphStep)
            seconds = clock_eager(machine.device, lambda s=step: bench.graphs.run(s), 10)  # type: ignore[misc]
            base = base or size / seconds
            tax = 1 - size / seconds / base
            rows.append(
                {
                    "model": model,
                    "step": "decode",
                    "batch": size,
                    "adapters": count,
                    "tok_s": size / seconds,
                    "tax": tax,
                }
            )
    sequences, new = (min(4, bench.max_rows), bench.context // 2)
    base = 0.0
    for count in (0, 1, sequences):
        run = bench.prefill(sequences, new, [[(i % count, 1.0)] if count else [] for i in range(sequences)])
        rate = sequences * new / clock_eager(machine.device, run, 3)
        base = base or rate
        rows.append(
            {
                "model": model,
                "step": "prefill",
                "batch": sequences * new,
                "adapters": count,
                "tok_s": rate,
                "tax": 1 - rate / base,
            }
        )
    return rows


@torch.no_grad()
def replay_equals_eager(machine: Machine, bench: StepBench, steps: int) -> Row:
    """Part 6. Mixes of adapters, blends and base change in every step; a replay must give what the eager step gives."""
    rng = np.random.default_rng(5)
    slots_in_all, worst, flips = bench.pool.max_slots, 0.0, 0
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-3}[machine.dtype]
    for seed in range(steps):
        count = int(rng.integers(1, bench.max_rows + 1))
        slots: Slots = [_mix(rng, slots_in_all) for _ in range(count)]
        batch = bench.batch(count, rng.integers(1, bench.context, count), seed)
        step = bench.graphs.prepare(batch, slots)
        assert isinstance(step, GraphStep)
        got = bench.graphs.run(step).clone()
        want = bench.eager(batch, slots)
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
        flips += int((got.argmax(-1) != want.argmax(-1)).sum())
    return {"steps": steps, "error": worst, "other_token": flips, "ok": worst <= tolerance}


def _mix(rng: np.random.Generator, slots: int) -> list[tuple[int, float]]:
    kind = rng.integers(0, 4)
    if kind == 0 or slots < 2:
        return []
    chosen = rng.choice(slots, size=2 if kind == 1 else 1, replace=False)
    return [(int(slot), 0.5 if kind == 1 else 1.0) for slot in chosen]
