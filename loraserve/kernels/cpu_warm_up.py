"""Run every CPU kernel once on tiny inputs of the types that serving uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from loraserve.kernels import cpu_affine, cpu_attention, cpu_attention_plan, cpu_linear, cpu_lora_plan, cpu_pointwise
from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTarget
from loraserve.kernels.reference import ACTIVATIONS

if TYPE_CHECKING:
    from loraserve.kernels.cpu_backend import CpuOps

_HEADS, _HEAD_DIM = 2, 8


def compile_all(ops: CpuOps) -> None:
    """Call the serial and the parallel form of each kernel, whatever thresholds and thread count would choose."""
    x = torch.ones(2, 16)
    ops.rms_norm(x, x[0], 1e-6)
    ops.add_rms_norm(x, x.clone(), x[0], 1e-6)
    for activation in ACTIVATIONS:
        ops.act_and_mul(x, activation)
    linear = cpu_linear.pack(torch.ones(8, 16), None, ops.workers)
    linear(x)
    cpu_linear.linear_parallel(x.numpy(), linear.panels, linear.bias, torch.empty(2, 8).numpy(), ops.workers)
    _attention(ops)
    _lora(ops)
    _parallel_pointwise(ops.workers)


def _attention(ops: CpuOps) -> None:
    cache = torch.ones(8, 1, _HEAD_DIM)
    qkv = torch.ones(2, (_HEADS + 2) * _HEAD_DIM)
    angle = torch.ones(2, _HEAD_DIM // 2)
    loc = torch.arange(2, dtype=torch.int32)
    norm = torch.ones(_HEAD_DIM)
    ops.rope_write_kv(qkv, angle, angle, cache, cache.clone(), loc, norm, norm, 1e-6)
    q = ops.rope_write_kv(qkv, angle, angle, cache, cache.clone(), loc, None, None, 1e-6)
    batch = AttentionBatch(
        req_rows=torch.arange(2, dtype=torch.int32),
        q_indptr=torch.arange(3, dtype=torch.int32),
        seq_lens=torch.tensor([3, 5], dtype=torch.int32),
        locations=torch.arange(8, dtype=torch.int32).repeat(2, 1),
        num_decode=2,
        max_seq_len=5,
        max_q_len=1,
    )
    ops.attention(q, cache, cache, batch, 1.0, None)
    plan = cpu_attention_plan.plan_attention(batch, None)
    arrays = [q.numpy(), cache.numpy(), cache.numpy(), plan.locations, plan.items, plan.ends]
    cpu_attention.decode_parallel(*arrays, np.float32(1), torch.empty_like(q).numpy(), ops.workers)


def _lora(ops: CpuOps) -> None:
    width, page_rows = 8, 4
    target = LoraTarget(
        storage=torch.ones(2 * page_rows * width),
        a_pages=torch.zeros(1, 1, 1, dtype=torch.int64),
        b_pages=torch.full((1, 1, 1), page_rows * width, dtype=torch.int64),
        ranks=torch.full((1, 1), 2, dtype=torch.int32),
        page_rows=page_rows,
        in_features=width,
        out_features=width,
        affine=torch.ones((1, 1), dtype=torch.bool),
    )
    segments = LoraSegments(
        tokens=torch.zeros(1, dtype=torch.int32),
        weights=torch.ones(1),
        slots=torch.zeros(1, dtype=torch.int32),
        indptr=torch.tensor([0, 1], dtype=torch.int32),
        max_segment=1,
    )
    x, y = torch.ones(1, width), torch.zeros(1, width)
    ops.lora_apply(y, x, (target,), 0, segments)
    ids = torch.zeros(1, dtype=torch.int64)
    ops.lora_embed(y, ids, target, segments)
    step = cpu_lora_plan.plan_step(segments)
    plan = cpu_lora_plan.plan_group((target,), step)
    for by_unit in (True, False):
        cpu_lora_plan.run_parallel(y, x, plan, 0, by_unit, ops.workers)
    ops.lora_affine(y, (target,), 0, segments)
    affine = cpu_affine.plan_affine((target,), step)
    assert affine is not None
    arrays = (y.numpy(), y.numpy(), affine.storage, step.tokens, step.weights, step.segment, affine.rows, affine.widths)
    cpu_affine.affine_parallel(*arrays, 0, ops.workers)


def _parallel_pointwise(workers: int) -> None:
    x = torch.ones(2, 16).numpy()
    eps = np.float32(1e-6)
    cpu_pointwise.add_norm_parallel(x, x.copy(), x[0], eps, x.copy(), workers)
    cpu_pointwise.silu_parallel(x, x[:, :8].copy(), workers)
    cache, angle = torch.ones(4, 1, _HEAD_DIM).numpy(), torch.ones(2, _HEAD_DIM // 2).numpy()
    qkv, q = torch.ones(2, 3 * _HEAD_DIM).numpy(), torch.ones(2, 1, _HEAD_DIM).numpy()
    loc, norm = torch.arange(2, dtype=torch.int32).numpy(), torch.ones(_HEAD_DIM).numpy()
    cpu_pointwise.rope_parallel(qkv, angle, angle, cache, cache.copy(), loc, norm, norm, eps, q, workers)
