"""The CPU backend: Numba kernels in float32. Anything else goes to the reference, op by op."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import groupby

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loraserve.kernels import cpu_affine, cpu_attention_plan, cpu_linear, cpu_lora_plan, cpu_pointwise
from loraserve.kernels.huge_pages import Arena
from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTarget
from loraserve.kernels.ops import PackedLinear
from loraserve.kernels.reference import ReferenceOps, unknown_activation
from loraserve.kernels.threads import use_best_layer

logger = logging.getLogger(__name__)

_SERIAL_ELEMENTS = 1 << 16  # norms and rotation: below so many elements one thread is faster than waking the others
_SERIAL_EXPONENTIALS = 1 << 15  # the same for SwiGLU
_NO_NORM = np.empty(0, np.float32)


@dataclass(slots=True)
class _LoraStep:
    """Plans of one step's segments."""

    segments: LoraSegments
    step: cpu_lora_plan.StepPlan
    groups: dict[tuple[int, ...], cpu_lora_plan.GroupPlan] = field(default_factory=dict)
    affine: dict[tuple[int, ...], cpu_affine.AffinePlan | None] = field(default_factory=dict)
    targets: list[LoraTarget] = field(default_factory=list)  # keeps the ids in `groups`, `affine` from being reused


@dataclass(slots=True)
class _AttentionStep:
    """Plans of one step's attention, one per window size."""

    batch: AttentionBatch
    plans: dict[int | None, cpu_attention_plan.AttentionPlan] = field(default_factory=dict)


class CpuOps:
    """The `Ops` protocol in float32 on CPU.

    Plans for a step are kept while its `AttentionBatch` and `LoraSegments` objects are the last ones seen; the pool's
    tables must not change for the slots of a step while it runs. Call from one thread only.
    """

    name = "cpu"

    def __init__(self, num_threads: int | None = None) -> None:
        """Use `num_threads` workers (None: as many as torch)."""
        self.threading_layer = use_best_layer()
        self.workers = max(1, min(num_threads or torch.get_num_threads(), numba.get_num_threads()))
        self._reference = ReferenceOps()
        self._arena = Arena()
        self._attention: _AttentionStep | None = None
        self._lora: list[_LoraStep] = []  # the newest first: over tokens, over rows of logits

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Lay out weight [out, in] in panels; other dtypes are kept as they are. Semantics: see the reference."""
        if _is_plain(weight) and (bias is None or _is_plain(bias)):
            return cpu_linear.pack(weight, bias, self.workers, self._arena)
        return self._reference.pack_linear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [n, width] → new [n, width]. Semantics: see the reference."""
        if not (_is_plain(x, weight) and x.dim() == 2):
            return self._reference.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        # One thread: only the first norm of a step is not fused with an addition.
        cpu_pointwise.norm_rows(x.numpy(), weight.numpy(), np.float32(eps), out.numpy(), 0, len(x))
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place → new [n, width], its norm. Semantics: see the reference."""
        if not (_is_plain(x, residual, weight) and x.dim() == 2 and x.shape == residual.shape):
            return self._reference.add_rms_norm(x, residual, weight, eps)
        out = torch.empty_like(x)
        arrays = (x.numpy(), residual.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        if self.workers == 1 or x.numel() < _SERIAL_ELEMENTS:
            cpu_pointwise.add_norm_rows(*arrays, 0, len(x))
        else:
            cpu_pointwise.add_norm_parallel(*arrays, self.workers)
        return out

    def rope_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        loc: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Shapes: see `Ops.rope_write_kv`. Semantics: see the reference."""
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        if not (_is_plain(qkv, cos, sin, k_cache, v_cache, *norms) and loc.is_contiguous()):
            return self._reference.rope_write_kv(qkv, cos, sin, k_cache, v_cache, loc, q_norm, k_norm, eps)
        num_tokens, kv_heads, head_dim = qkv.shape[0], k_cache.shape[1], k_cache.shape[2]
        q = torch.empty(num_tokens, qkv.shape[1] // head_dim - 2 * kv_heads, head_dim)
        arrays = (
            qkv.numpy(),
            cos.numpy(),
            sin.numpy(),
            k_cache.numpy(),
            v_cache.numpy(),
            loc.numpy(),
            _NO_NORM if q_norm is None else q_norm.numpy(),
            _NO_NORM if k_norm is None else k_norm.numpy(),
            np.float32(eps),
            q.numpy(),
        )
        if self.workers == 1 or qkv.numel() < _SERIAL_ELEMENTS:
            cpu_pointwise.rope_rows(*arrays, 0, num_tokens)
        else:
            cpu_pointwise.rope_parallel(*arrays, self.workers)
        return q

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """q: [n, heads, head_dim] → new [n, heads·head_dim]. Semantics: see the reference."""
        if soft_cap is not None or not _is_plain(q, k_cache, v_cache):
            return self._reference.attention(q, k_cache, v_cache, batch, scale, window, soft_cap)
        if self._attention is None or self._attention.batch is not batch:
            self._attention = _AttentionStep(batch)
        plans = self._attention.plans
        if window not in plans:
            plans[window] = cpu_attention_plan.plan_attention(batch, window)
        return cpu_attention_plan.attend(q, k_cache, v_cache, plans[window], scale, self.workers)

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        """x: [n, 2·m] → new [n, m]. Semantics: see the reference. Raises `ConfigError` for an unknown activation."""
        if not _is_plain(x):
            return self._reference.act_and_mul(x, activation)
        width = x.shape[1] // 2
        if activation == "silu":
            out = torch.empty(len(x), width)
            if self.workers == 1 or out.numel() < _SERIAL_EXPONENTIALS:
                cpu_pointwise.silu_rows(x.numpy(), out.numpy(), 0, len(x))
            else:
                cpu_pointwise.silu_parallel(x.numpy(), out.numpy(), self.workers)
            return out
        if activation not in ("gelu", "gelu_tanh"):
            raise unknown_activation(activation)
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return F.gelu(x[:, :width], approximate=approximate).mul_(x[:, width:])

    def lora_apply(
        self, y: Tensor, x: Tensor, targets: tuple[LoraTarget, ...], layer: int, segments: LoraSegments
    ) -> None:
        """y: [n, out of the fused projection], in place; x: [n, in]. Semantics: see the reference."""
        if not targets:
            return
        if not _is_plain(y, x, *[target.storage for target in targets]):
            self._reference.lora_apply(y, x, targets, layer, segments)
            return
        for group in _same_pool(targets):
            cpu_lora_plan.apply(y, x, self._group_plan(group, segments), layer, self.workers)

    def lora_affine(self, y: Tensor, targets: tuple[LoraTarget, ...], layer: int, segments: LoraSegments) -> None:
        """y: [n, out of the fused projection], in place. Semantics: see the reference."""
        if not targets:
            return
        if not _is_plain(y, *[target.storage for target in targets]):
            self._reference.lora_affine(y, targets, layer, segments)
            return
        for group in _same_pool(targets):
            plan = self._affine_plan(group, segments)
            if plan is not None:
                cpu_affine.apply(y, plan, layer, self.workers)

    def lora_embed(self, y: Tensor, ids: Tensor, target: LoraTarget, segments: LoraSegments) -> None:
        """y: [n, hidden], in place; ids: [n] token ids. Semantics: see the reference."""
        if not (_is_plain(y, target.storage) and ids.is_contiguous()):
            self._reference.lora_embed(y, ids, target, segments)
            return
        step = cpu_lora_plan.plan_step(segments)
        cpu_lora_plan.embed(y, ids, cpu_lora_plan.plan_group((target,), step))

    def _group_plan(self, targets: tuple[LoraTarget, ...], segments: LoraSegments) -> cpu_lora_plan.GroupPlan:
        cached = self._lora_step(segments)
        key = tuple(map(id, targets))
        plan = cached.groups.get(key)
        if plan is None:
            plan = cached.groups[key] = cpu_lora_plan.plan_group(targets, cached.step)
            cached.targets += targets
        return plan

    def _affine_plan(self, targets: tuple[LoraTarget, ...], segments: LoraSegments) -> cpu_affine.AffinePlan | None:
        cached = self._lora_step(segments)
        key = tuple(map(id, targets))
        if key not in cached.affine:
            cached.affine[key] = cpu_affine.plan_affine(targets, cached.step)
            cached.targets += targets
        return cached.affine[key]

    def _lora_step(self, segments: LoraSegments) -> _LoraStep:
        cached = next((entry for entry in self._lora if entry.segments is segments), None)
        if cached is None:
            cached = _LoraStep(segments, cpu_lora_plan.plan_step(segments))
            self._lora = [cached, *self._lora[:1]]
        return cached

    def warm_up(self) -> None:
        """Compile every kernel now (or load it from Numba's cache), so that no request waits for it."""
        from loraserve.kernels.cpu_warm_up import compile_all

        start = time.perf_counter()
        compile_all(self)
        logger.info("CPU kernels ready in %.1f s", time.perf_counter() - start)


def _is_plain(*tensors: Tensor) -> bool:
    """Whether the kernels can take the tensors as they are."""
    return all(t.dtype is torch.float32 and t.is_contiguous() for t in tensors)


def _same_pool(targets: tuple[LoraTarget, ...]) -> list[tuple[LoraTarget, ...]]:
    """Split a group into runs that share storage and page size; almost always there is one."""
    first = targets[0]
    if all(target.storage is first.storage and target.page_rows == first.page_rows for target in targets):
        return [targets]
    return [tuple(run) for _, run in groupby(targets, key=lambda t: (id(t.storage), t.page_rows))]
