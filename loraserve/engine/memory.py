"""The memory plan: how much the KV pool, the LoRA pool and the host staging get."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from loraserve.config import GIB, MIB, EngineConfig, format_bytes
from loraserve.errors import ConfigError

_CPU_KV_SHARE, _CPU_LORA_SHARE, _CPU_HOST_SHARE = 0.30, 0.08, 0.12
_GPU_KV_SHARE, _GPU_LORA_SHARE = 0.75, 0.12
_CPU_KV_CAP, _LORA_CAP, _HOST_CAP = 4 * GIB, 2 * GIB, 16 * GIB
_MIN_LORA, _MIN_HOST = 32 * MIB, 64 * MIB


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


def plan_memory(config: EngineConfig, device: torch.device, bytes_per_token: int, max_context: int) -> MemoryPlan:
    """Size the pools after the weights are loaded. Explicit sizes win; the rest comes from what is free.

    Raises `ConfigError` if the KV pool would not hold even one page.
    """
    host = available_host_memory()
    if device.type == "cuda":
        # Explicit sizes need no measurement, and then none of its failures either.
        sized = config.cache.kv_memory is not None and config.lora.lora_memory is not None
        free = 0 if sized else torch.cuda.mem_get_info(device)[0]
        kv_share, lora_share, kv_cap = _GPU_KV_SHARE, _GPU_LORA_SHARE, free
    else:
        free = host
        kv_share, lora_share, kv_cap = _CPU_KV_SHARE, _CPU_LORA_SHARE, _CPU_KV_CAP
    wanted = config.scheduler.max_running * max_context * bytes_per_token
    kv_bytes = config.cache.kv_memory
    kv_from = "--kv-memory"
    if kv_bytes is None:
        kv_bytes, kv_from = min(int(free * kv_share), kv_cap, wanted), f"default, {format_bytes(free)} free"
    lora_bytes, lora_from = config.lora.lora_memory, "--lora-memory"
    if lora_bytes is None:
        lora_bytes, lora_from = max(min(int(free * lora_share), _LORA_CAP), _MIN_LORA), "default"
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
    )
    return MemoryPlan(kv_tokens, kv_bytes, lora_bytes, host_bytes, lines)
