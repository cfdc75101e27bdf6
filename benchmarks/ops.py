"""Verify every operator of a backend against the reference, then time it, at the demo model's shapes.

`python -m benchmarks.ops --rows 16 --context 110 --adapters 8 --rank 16`. Times are the best and the median of many
rounds over all layers' own weights and caches, so nothing stays in the processor's caches that would not in serving.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

from loraserve.kernels.threads import configure_threads


@dataclass(frozen=True)
class Shape:
    """SmolLM2-135M."""

    layers: int = 30
    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152


@dataclass(frozen=True)
class Result:
    name: str
    calls: int  # per step
    best_us: float
    median_us: float

    @property
    def step_ms(self) -> float:
        return self.best_us * self.calls / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--rows", type=int, default=16, help="decode rows, or tokens of the prefill chunk")
    parser.add_argument("--context", type=int, default=110)
    parser.add_argument("--prefill", action="store_true", help="one sequence with `rows` new tokens")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, for busy machines; --threads 1")
    args = parser.parse_args()
    configure_threads(args.threads)

    import torch

    from loraserve.kernels.dispatch import select_ops
    from loraserve.kernels.reference import ReferenceOps

    torch.manual_seed(0)
    ops = select_ops(args.kernels, torch.device("cpu"), torch.float32)
    ops.warm_up()
    with torch.inference_mode():
        results = run(args, Shape(), ops, ReferenceOps())
    print(f"{'operator':<24}{'calls':>6}{'best µs':>10}{'median µs':>11}{'step ms':>9}")
    for r in results:
        print(f"{r.name:<24}{r.calls:>6}{r.best_us:>10.1f}{r.median_us:>11.1f}{r.step_ms:>9.2f}")
    base = sum(r.step_ms for r in results if not r.name.startswith("lora"))
    lora = sum(r.step_ms for r in results if r.name.startswith("lora"))
    print(f"step: {base:.1f} ms base, {base + lora:.1f} ms with {args.adapters} adapters of rank {args.rank}")


def run(args: argparse.Namespace, shape: Shape, ops: object, truth: object) -> list[Result]:
    """Time each operator over the layers; every first result is compared with the reference's."""
    import torch

    layers, rows = range(shape.layers), args.rows
    clock = time.process_time if args.cpu_time else time.perf_counter
    qkv_width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    results: list[Result] = []

    def measure(name: str, per_layer: int, call: Callable[[object, int], object], check: bool = True) -> None:
        if check:
            torch.testing.assert_close(call(ops, 0), call(truth, 0), atol=1e-4, rtol=1e-4)
        times = []
        for _ in range(args.rounds):
            start = clock()
            for layer in layers:
                call(ops, layer)
            times.append((clock() - start) / len(layers) * 1e6)
        times.sort()
        results.append(Result(name, per_layer * len(layers), times[0], times[len(times) // 2]))

    linears = {"qkv": (shape.hidden, qkv_width), "o": (shape.heads * shape.head_dim, shape.hidden)}
    linears |= {"gate_up": (shape.hidden, 2 * shape.intermediate), "down": (shape.intermediate, shape.hidden)}
    for name, (width_in, width_out) in linears.items():
        weights = [torch.randn(width_out, width_in) * 0.02 for _ in layers]
        packed = {
            id(ops): [ops.pack_linear(w, None) for w in weights],
            id(truth): [truth.pack_linear(weights[0], None)],
        }
        x = torch.randn(rows, width_in)
        measure(f"linear {name}", 1, lambda o, i, packed=packed, x=x: packed[id(o)][i](x))
    head = ops.pack_linear(torch.randn(shape.vocab, shape.hidden) * 0.02, None)
    last = torch.randn(1 if args.prefill else rows, shape.hidden)
    measure("linear lm_head /layers", 1, lambda o, i: head(last) if i == 0 else None, check=False)

    x, weight = torch.randn(rows, shape.hidden), torch.rand(shape.hidden)
    measure("add_rms_norm", 2, lambda o, i: o.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5))
    gate_up = torch.randn(rows, 2 * shape.intermediate)
    measure("act_and_mul", 1, lambda o, i: o.act_and_mul(gate_up, "silu"))

    batch, num_locations = make_batch(args)
    caches = [torch.randn(2, num_locations, shape.kv_heads, shape.head_dim) for _ in layers]
    qkv, angle = torch.randn(rows, qkv_width), torch.randn(rows, shape.head_dim // 2)
    cos, sin = angle.cos(), angle.sin()
    spare = torch.arange(num_locations - rows, num_locations, dtype=torch.int32)

    def rope(o: object, i: int) -> object:
        return o.rope_write_kv(qkv, cos, sin, *caches[i], spare, None, None, 1e-5)

    q = rope(ops, 0)
    measure("rope_write_kv", 1, rope)
    measure("attention", 1, lambda o, i: o.attention(q, *caches[i], batch, shape.head_dim**-0.5, None))
    for name, widths in {
        "qkv": [(shape.hidden, 576), (shape.hidden, 192), (shape.hidden, 192)],
        "o": [(576, shape.hidden)],
        "gate_up": [(shape.hidden, shape.intermediate)] * 2,
        "down": [(shape.intermediate, shape.hidden)],
    }.items():
        targets, segments = make_lora(args, shape.layers, widths)
        x = torch.randn(rows, widths[0][0])

        def lora(o: object, i: int, targets=targets, segments=segments, x=x) -> object:
            y = torch.zeros(rows, sum(target.out_features for target in targets))
            o.lora_apply(y, x, targets, i, segments)
            return y

        measure(f"lora {name}", 1, lora)
    return results


def make_batch(args: argparse.Namespace) -> tuple[object, int]:
    """A decode batch of `rows` sequences, or one prefill chunk, over shuffled pages of 16."""
    import torch

    from loraserve.kernels.metadata import AttentionBatch

    num, new = (1, args.rows) if args.prefill else (args.rows, 1)
    length = max(args.context, new)
    pages = -(-length // 16)
    order = torch.randperm(num * pages).view(num, pages)
    locations = (order[:, :, None] * 16 + torch.arange(16)).flatten(1).to(torch.int32)
    batch = AttentionBatch(
        req_rows=torch.arange(num, dtype=torch.int32),
        q_indptr=torch.arange(num + 1, dtype=torch.int32) * new,
        seq_lens=torch.full((num,), length, dtype=torch.int32),
        locations=locations,
        num_decode=0 if args.prefill else num,
        max_seq_len=length,
        max_q_len=new,
    )
    return batch, num * pages * 16 + args.rows


def make_lora(args: argparse.Namespace, layers: int, widths: list[tuple[int, int]]) -> tuple[object, object]:
    """Targets with `adapters` slots of one rank each over shuffled pages of 8 rows, and rows spread over the slots."""
    import torch

    from loraserve.kernels.metadata import LoraSegments, LoraTarget

    slots, page_rows = args.adapters, 8
    pages = -(-args.rank // page_rows)
    count = layers * slots * pages
    page_size = page_rows * max(max(w) for w in widths)
    storage = torch.randn(2 * len(widths) * count * page_size) * 0.05
    order = torch.randperm(2 * len(widths) * count).view(len(widths), 2, layers, slots, pages) * page_size
    column, targets = 0, []
    for i, (width_in, width_out) in enumerate(widths):
        ranks = torch.full((layers, slots), args.rank, dtype=torch.int32)
        a, b = order[i, 0].contiguous(), order[i, 1].contiguous()
        targets.append(LoraTarget(storage, a, b, ranks, page_rows, width_in, width_out, column))
        column += width_out
    owner = torch.zeros(args.rows) if args.prefill else torch.arange(args.rows) % slots
    counts = torch.bincount(owner.long(), minlength=slots)
    segments = LoraSegments(
        tokens=owner.argsort(stable=True).to(torch.int32),
        weights=torch.ones(args.rows),
        slots=torch.arange(slots, dtype=torch.int32),
        indptr=torch.cat((torch.zeros(1), counts.cumsum(0))).to(torch.int32),
        max_segment=int(counts.max()),
    )
    return tuple(targets), segments


if __name__ == "__main__":
    main()
