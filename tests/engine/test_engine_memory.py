"""The memory plan of a GPU: what is free is shared out, explicit sizes win, the step keeps what it needs."""

from __future__ import annotations

import pytest
import torch

from loraserve.config import GIB, MIB, CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraserve.engine.memory import plan_memory
from loraserve.errors import ConfigError

CUDA = torch.device("cuda", 0)
PER_TOKEN = 128 * 1024


def config(kv: int | None = None, lora: int | None = None, running: int = 64) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(kv_memory=kv),
        lora=LoraConfig(lora_memory=lora, host_lora_memory=64 * MIB),
        scheduler=SchedulerConfig(max_running=running),
    )


def test_pools_and_step_share_what_is_free() -> None:
    plan = plan_memory(config(), CUDA, PER_TOKEN, 1 << 17, step_need=2 * GIB, free=60 * GIB)
    usable = int(60 * GIB * 0.95) - 2 * GIB
    assert plan.lora_bytes == int(usable * 0.15)
    assert plan.kv_bytes + plan.lora_bytes == usable
    assert plan.kv_tokens == plan.kv_bytes // PER_TOKEN // 16 * 16
    assert "2.00GiB" in plan.lines[-1]


def test_explicit_sizes_win_and_leave_the_rest() -> None:
    plan = plan_memory(config(kv=10 * GIB), CUDA, PER_TOKEN, 1 << 17, GIB, free=40 * GIB)
    assert plan.kv_bytes == 10 * GIB
    assert plan.lora_bytes == int(40 * GIB * 0.95) - GIB - 10 * GIB
    plan = plan_memory(config(lora=3 * GIB), CUDA, PER_TOKEN, 1 << 17, GIB, free=40 * GIB)
    assert (plan.lora_bytes, plan.kv_bytes) == (3 * GIB, int(40 * GIB * 0.95) - GIB - 3 * GIB)
    # Both given: nothing is measured, which on this machine would fail.
    plan = plan_memory(config(kv=GIB, lora=2 * GIB), CUDA, PER_TOKEN, 1 << 17, GIB)
    assert (plan.kv_bytes, plan.lora_bytes) == (GIB, 2 * GIB)


def test_kv_is_no_larger_than_all_requests_can_fill() -> None:
    plan = plan_memory(config(running=2), CUDA, PER_TOKEN, 4096, GIB, free=70 * GIB)
    assert plan.kv_bytes == 2 * 4096 * PER_TOKEN


def test_a_gpu_that_is_full_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="does not hold one page"):
        plan_memory(config(), CUDA, PER_TOKEN, 4096, step_need=GIB, free=GIB)
