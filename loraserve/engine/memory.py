"""The memory plan: how much the KV pool, the LoRA pool and the host staging get."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from loraserve.config import GIB, MIB, EngineConfig, format_bytes
from loraserve.errors import ConfigError
from loraserve.models.config import ModelShape

_CPU_KV_SHARE, _CPU_LORA_SHARE, _CPU_HOST_SHARE = 0.30, 0.08, 0.12
# Of a GPU, which belongs to the engine alone: all that is free but a margin and what a step needs, most of it for KV.
_GPU_SHARE, _GPU_LORA_SHARE = 0.95, 0.15
_CPU_KV_CAP, _CPU_LORA_CAP, _HOST_CAP = 4 * GIB, 2 * GIB, 16 * GIB
_MIN_LORA, _MIN_HOST = 32 * MIB, 64 * MIB
_RUNTIME_BYTES = 256 * MIB  # libraries' workspaces and the fragments that an allocator leaves
_SAMPLER_BYTES = 48  # per logit: its 16-bit form, fp32, and what sorting and summing make of it


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes; `lines` tell a person where each comes from."""

    kv_tokens: int
    kv_bytes: int
    lora_bytes: int
    host_lora_bytes: int
    lines: tuple[str, ...]


def available_host_memory() -> int:
    """Bytes this process may still take: the machine's available memory or what its cgroup leaves, if that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            available = min(available, max(int(limit) - int(usage), 0))
    return available


def step_bytes(shape: ModelShape, config: EngineConfig, itemsize: int) -> int:
    """Device memory that the largest step takes beside weights and pools, as an upper estimate."""
    tokens, rows = config.scheduler.max_step_tokens, config.scheduler.max_running
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    width = 4 * shape.hidden_size + 2 * qkv + 3 * shape.intermediate_size
    shrunk = 3 * 4 * config.lora.max_lora_rank  # q, k and v in fp32
    return tokens * (width * itemsize + shrunk) + rows * shape.vocab_size * _SAMPLER_BYTES + _RUNTIME_BYTES


def free_device_memory(device: torch.device) -> int:
    """Bytes of a GPU that nobody holds, without what torch's allocator keeps for nothing."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def plan_memory(
    config: EngineConfig,
    device: torch.device,
    bytes_per_token: int,
    max_context: int,
    step_need: int = 0,
    free: int | None = None,
) -> MemoryPlan:
    """Size the pools after the weights are loaded. Explicit sizes win; the rest comes from what is `free` (measured).

    On a GPU `step_need` bytes are left for the step itself. Raises `ConfigError` if the KV pool would not hold even one
    page, or if the GPU is too small for what was asked.
    """
    host = available_host_memory()
    kv_bytes, lora_bytes = config.cache.kv_memory, config.lora.lora_memory
    kv_from, lora_from = "--kv-memory", "--lora-memory"
    wanted = config.scheduler.max_running * max_context * bytes_per_token
    if device.type == "cuda":
        # Explicit sizes need no measurement, and then none of its failures either.
        if free is None and (kv_bytes is None or lora_bytes is None):
            free = free_device_memory(device)
        usable = max(int((free or 0) * _GPU_SHARE) - step_need, 0)
        if lora_bytes is None:
            left = usable if kv_bytes is None else max(usable - kv_bytes, 0)
            share = _GPU_LORA_SHARE if kv_bytes is None else 1.0
            lora_bytes, lora_from = max(int(left * share), _MIN_LORA), f"default, {format_bytes(free or 0)} free"
        if kv_bytes is None:
            kv_bytes, kv_from = min(max(usable - lora_bytes, 0), wanted), f"default, {format_bytes(free or 0)} free"
    else:
        free = host if free is None else free
        if kv_bytes is None:
            kv_bytes = min(int(free * _CPU_KV_SHARE), _CPU_KV_CAP, wanted)
            kv_from = f"default, {format_bytes(free)} free"
        if lora_bytes is None:
            lora_bytes = max(min(int(free * _CPU_LORA_SHARE), _CPU_LORA_CAP), _MIN_LORA)
            lora_from = "default"
    host_bytes, host_from = config.lora.host_lora_memory, "--host-lora-memory"
    if host_bytes is None:
        host_bytes, host_from = max(min(int(host * _CPU_HOST_SHARE), _HOST_CAP), _MIN_HOST), "default"
    page = config.cache.page_size
    kv_tokens = kv_bytes // bytes_per_token // page * page
    if kv_tokens < page:
        least = format_bytes(page * bytes_per_token)
        raise ConfigError(f"--kv-memory {format_bytes(kv_bytes)} does not hold one page of {page} tokens ({least})")
    lines = (
        f"KV pool         {format_bytes(kv_bytes):>10}  {kv_tokens} tokens in pages of {page} ({kv_from})",
        f"LoRA pool       {format_bytes(lora_bytes):>10}  on {device} ({lora_from})",
        f"LoRA host tier  {format_bytes(host_bytes):>10}  ({host_from})",
        *([f"step            {format_bytes(step_need):>10}  left for activations and logits"] if step_need else []),
    )
    return MemoryPlan(kv_tokens, kv_bytes, lora_bytes, host_bytes, lines)
