"""Parts 1 and 2 of `benchmarks/gpu.py`: every kernel against the reference, then how fast each is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_shapes import Machine, clock, make_attention, make_segments, make_targets
from loraserve.kernels.metadata import LoraSegments, LoraTarget
from loraserve.kernels.ops import Ops
from loraserve.kernels.reference import ReferenceOps, slot_factors

Row = dict[str, Any]


def verify(machine: Machine, ops: Ops, smoke: bool) -> list[Row]:
    """Part 1. Each kernel's largest difference from the reference, in units of the result's own size."""
    truth, rows = ReferenceOps(), []
    device, dtype = machine.device, machine.dtype
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device).to(dtype)

    def compare(name: str, call: Callable[[Ops], Tensor]) -> None:
        got, want = call(ops).float(), call(truth).float()
        error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
        rows.append({"kernel": name, "error": error, "ok": bool(error <= tolerance and got.isfinite().all())})

    width, tokens = (64, 9) if smoke else (4096, 300)
    x, residual, weight = random(tokens, width), random(tokens, width), random(width)
    compare("rms_norm", lambda o: o.rms_norm(x, weight, 1e-5))
    compare("add_rms_norm", lambda o: o.add_rms_norm(x, residual.clone(), weight, 1e-5))
    for activation in ("silu", "gelu", "gelu_tanh"):
        compare(activation, lambda o, a=activation: o.act_and_mul(x, a))  # type: ignore[misc]
    for heads, kv_heads, head_dim in (
        ((4, 2, 64),) if smoke else ((32, 8, 128), (14, 2, 64), (32, 32, 80), (16, 8, 256))
    ):
        _verify_attention(machine, compare, random, heads, kv_heads, head_dim, smoke)
    widths = [(64, 48), (64, 16), (64, 16)] if smoke else [(4096, 4096), (4096, 1024), (4096, 1024)]
    ranks = [8, 3, 16, 1, 33] if smoke else [8, 16, 64, 3, 128, 100, 33, 1]
    targets = make_targets(machine, widths, ranks, 2)
    for count in (5, 20) if smoke else (1, 32, 256, 2048):
        owners = torch.randint(len(ranks), (count,), generator=torch.Generator().manual_seed(count))
        segments = make_segments(machine, owners, len(ranks))
        inputs, start = random(count, widths[0][0]), random(count, sum(out for _, out in widths))
        compare(f"lora {count} tokens", lambda o, s=segments, i=inputs, y=start: _applied(o, y, i, targets, s))  # type: ignore[misc]
    return rows


def _verify_attention(
    machine: Machine, compare: Any, random: Any, heads: int, kv_heads: int, head_dim: int, smoke: bool
) -> None:
    lengths = ((20, 1), (24, 7)) if smoke else ((1000, 1), (4096, 1), (700, 300))
    for length, new in lengths:
        num = 2 if smoke else 5
        batch, used = make_attention(machine, num, length, new)
        k, v = random(used, kv_heads, head_dim), random(used, kv_heads, head_dim)
        q = random(num * new, heads, head_dim)
        name = f"attention {new} of {length}, {heads}/{kv_heads} heads of {head_dim}"
        for window in (None, length // 2):
            compare(
                f"{name}, window {window}",
                lambda o, w=window, q=q, k=k, v=v, b=batch: o.attention(q, k, v, b, head_dim**-0.5, w),
            )
    qkv = random(3, (heads + 2 * kv_heads) * head_dim)
    angle = torch.rand(3, head_dim // 2, device=machine.device)
    norm = random(head_dim)
    loc = torch.arange(3, dtype=torch.int32, device=machine.device)

    def rope(ops: Ops) -> Tensor:
        cache = torch.zeros(2, 4, kv_heads, head_dim, dtype=machine.dtype, device=machine.device)
        q = ops.rope_write_kv(qkv, angle.cos(), angle.sin(), cache[0], cache[1], loc, norm, norm, 1e-5)
        return torch.cat((q.flatten(), cache.flatten()))

    compare(f"rope_write_kv, heads of {head_dim}", rope)


def _applied(ops: Ops, y: Tensor, x: Tensor, targets: tuple[LoraTarget, ...], segments: LoraSegments) -> Tensor:
    y = y.clone()
    ops.lora_apply(y, x, targets, 1, segments)
    return y


def kernel_table(machine: Machine, ops: Ops, smoke: bool) -> list[Row]:
    """Part 2. LoRA and attention at the shape of an 8B model, beside other ways to compute the same."""
    rows = []
    groups = {
        "qkv": [(4096, 4096), (4096, 1024), (4096, 1024)],
        "gate_up": [(4096, 14336)] * 2,
        "down": [(14336, 4096)],
    }
    cases = [(1, 1), (32, 1), (32, 32), (256, 32), (256, 256)]
    ranks: list[tuple[str, list[int]]] = [("8", [8]), ("16", [16]), ("64", [64]), ("mixed", [8, 16, 32, 64])]
    prefill = [(2048, 1), (2048, 8)]
    if smoke:
        groups, cases, ranks, prefill = {"qkv": [(64, 48), (64, 16), (64, 16)]}, [(2, 2)], ranks[:1], [(20, 1)]
    for name, widths in groups.items():
        for label, pattern in ranks:
            for tokens, adapters in cases + prefill:
                own = [pattern[i % len(pattern)] for i in range(adapters)]
                rows.append(_time_lora(machine, ops, name, widths, label, own, tokens, (tokens, adapters) in prefill))
    contexts = [(2, 40)] if smoke else [(1, 8192), (32, 1024), (32, 8192), (128, 1024)]
    for num, length in contexts:
        rows.append(_time_attention(machine, ops, num, length, smoke))
    return rows


def _time_lora(
    machine: Machine, ops: Ops, name: str, widths: Any, label: str, ranks: list[int], tokens: int, is_prefill: bool
) -> Row:
    width_in, width_out = widths[0][0], sum(out for _, out in widths)
    item = machine.dtype.itemsize
    per_layer = sum(rank * (w_in + w_out) for rank in ranks for w_in, w_out in widths) * item
    # Enough layers that none is still in the cache when its turn comes again.
    layers = max(1, min(16, -(-(256 << 20) // per_layer))) if machine.device.type == "cuda" else 1
    targets = make_targets(machine, widths, ranks, layers)
    owners = torch.arange(tokens) % len(ranks) if not is_prefill else torch.arange(tokens) * len(ranks) // tokens
    segments = make_segments(machine, owners, len(ranks))
    x = torch.randn(tokens, width_in, device=machine.device).to(machine.dtype)
    y = torch.zeros(tokens, width_out, dtype=machine.dtype, device=machine.device)
    weights = [
        torch.zeros(width_out, width_in, dtype=machine.dtype, device=machine.device) for _ in range(min(layers, 4))
    ]

    def ours() -> None:
        for layer in range(layers):
            ops.lora_apply(y, x, targets, layer, segments)

    seconds = clock(machine.device, ours, 20) / layers
    base = clock(machine.device, lambda: [x @ weight.T for weight in weights], 20) / len(weights)
    moved = per_layer + tokens * (width_in * len(widths) + 2 * width_out) * item
    flops = sum(2 * sum(w_in + w_out for w_in, w_out in widths) * ranks[int(owner)] for owner in owners)
    row: Row = {"kernel": f"lora {name}", "rank": label, "tokens": tokens, "adapters": len(ranks), "us": seconds * 1e6}
    row |= {"copy_share": moved / seconds / 1e9 / machine.copy_gbs, "tflops": flops / seconds / 1e12}
    row |= {"matmul_share": flops / seconds / 1e12 / machine.matmul_tflops, "base_gemm_us": base * 1e6}
    row["vs_base"] = seconds / base
    return row | _rivals(machine, x, y, targets, owners, ranks)


def _rivals(machine: Machine, x: Tensor, y: Tensor, targets: Any, owners: Tensor, ranks: list[int]) -> Row:
    """The same by a `torch.mm` loop over adapters, and by gathered `bmm` over matrices padded to one rank."""
    pairs = [[slot_factors(target, 0, slot) for slot in range(len(ranks))] for target in targets]
    where = [(owners == slot).nonzero().flatten().to(machine.device) for slot in range(len(ranks))]

    def loop() -> None:
        for target, own in zip(targets, pairs, strict=True):
            columns = slice(target.out_offset, target.out_offset + target.out_features)
            for rows, pair in zip(where, own, strict=True):
                y[:, columns].index_add_(0, rows, x[rows] @ pair[0].T @ pair[1])  # type: ignore[index]

    row = {"mm_loop_us": clock(machine.device, loop, 5) * 1e6}
    most = max(ranks)
    if len(owners) > 256:
        return row  # a copy of the matrices for each token would fill the memory
    who = owners.to(machine.device)
    padded = []
    for target, own in zip(targets, pairs, strict=True):
        a = torch.zeros(len(ranks), target.in_features, most, dtype=x.dtype, device=x.device)
        b = torch.zeros(len(ranks), most, target.out_features, dtype=x.dtype, device=x.device)
        for slot, pair in enumerate(own):
            a[slot, :, : ranks[slot]], b[slot, : ranks[slot]] = pair[0].T, pair[1]  # type: ignore[index]
        padded.append((slice(target.out_offset, target.out_offset + target.out_features), a, b))

    def gathered() -> None:
        for columns, a, b in padded:
            y[:, columns] += torch.bmm(torch.bmm(x[:, None], a[who]), b[who]).squeeze(1)

    try:
        return row | {"bmm_us": clock(machine.device, gathered, 5) * 1e6}
    except torch.OutOfMemoryError:
        return row


def _time_attention(machine: Machine, ops: Ops, num: int, length: int, smoke: bool) -> Row:
    heads, kv_heads, head_dim = (4, 2, 64) if smoke else (32, 8, 128)
    batch, used = make_attention(machine, num, length, 1)
    k = torch.randn(used, kv_heads, head_dim, device=machine.device).to(machine.dtype)
    v, q = k.clone(), torch.randn(num, heads, head_dim, device=machine.device).to(machine.dtype)
    seconds = clock(machine.device, lambda: ops.attention(q, k, v, batch, head_dim**-0.5, None), 20)
    moved = 2 * num * length * kv_heads * head_dim * machine.dtype.itemsize
    row: Row = {"kernel": "attention decode", "tokens": num, "context": length, "us": seconds * 1e6}
    return row | {"copy_share": moved / seconds / 1e9 / machine.copy_gbs}
