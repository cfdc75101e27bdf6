"""Frozen, composed configs. Every field carries the text of its CLI flag; the CLI and the docs are made from them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from loraserve.errors import ConfigError

MAX_SIZE = 2.0**60
MAX_SECONDS = 30 * 86_400.0
KIB, MIB, GIB = 1024, 1024**2, 1024**3
_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3}
_UNITS |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024**4, "tb": 1000**4, "t": 1000**4}

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Kernels = Literal["auto", "triton", "cpu", "reference"]
Policy = Literal["fcfs", "longest-prefix", "priority", "fair-share"]
Eviction = Literal["lru", "lfu", "fifo"]


def parse_bytes(text: str) -> int:
    """`'2GiB'`, `'512 MiB'`, `'1.5gb'` or a plain number of bytes → bytes. Raises `ConfigError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write for example 512MiB or 2GiB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size > MAX_SIZE:
        raise ConfigError(f"{text:.40} is more than any machine has")
    return int(size)


def format_bytes(count: int) -> str:
    """Bytes as a short text with a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f}{unit}" if unit == "B" else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.2f}GiB"


def check_least(least: int, **values: int | None) -> None:
    """Raise `ConfigError` naming the flag of a value that is no whole number from `least` on; None is always fine."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigError(f"{_flag(name)} must be a whole number of at least {least}, got {value!r}")


def check_seconds(name: str, value: float, *, zero: bool) -> None:
    """Raise `ConfigError` for a time that is negative, endless or (unless `zero`) nothing."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not (0 <= value <= MAX_SECONDS) or (value == 0 and not zero):
        raise ConfigError(f"{_flag(name)} must be {'from' if zero else 'above'} 0 to {MAX_SECONDS:g} s, got {value!r}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def option(default: Any, help: str, *, size: bool = False) -> Any:
    """A config field with its flag's help. `size` fields are bytes, given as text like `2GiB` on the command line."""
    return field(default=default, metadata={"help": help, "size": size})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The base model and how it is computed."""

    model: str | None = option(None, "Local folder or Hub id of the base model; without it the demo model is prepared.")
    revision: str | None = option(None, "Branch, tag or commit of a Hub model.")
    served_model_name: str | None = option(None, "Name clients use for the base model (default: derived from --model).")
    device: Device = option("auto", "Where the model runs.")
    dtype: Dtype = option("auto", "Weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU.")
    kernels: Kernels = option("auto", "Which implementation of the operators runs.")
    max_model_len: int | None = option(None, "Longest context in tokens (default: the model's own limit).")
    cuda_graphs: bool = option(True, "Capture decode steps as CUDA graphs (Triton kernels only).")
    threads: int | None = option(None, "CPU threads of the engine (default: all cores).")

    def __post_init__(self) -> None:
        check_least(2, max_model_len=self.max_model_len)
        check_least(1, threads=self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    kv_memory: int | None = option(None, "Memory of the KV pool (default: from the machine's free memory).", size=True)
    page_size: int = option(16, "Tokens per KV page, 1 to 64.")
    prefix_cache: bool = option(True, "Share KV of common prefixes between requests.")
    eviction: Eviction = option("lru", "Which cached prefix goes first when KV pages run out.")

    def __post_init__(self) -> None:
        check_least(1, kv_memory=self.kv_memory, page_size=self.page_size)
        if self.page_size > 64:
            raise ConfigError(f"--page-size must be from 1 to 64, got {self.page_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters: where they may come from and how much memory they get."""

    adapter_dir: tuple[Path, ...] = option((), "Folder that local adapter paths must lie under (repeatable).")
    adapter_url: tuple[str, ...] = option(
        (), "Address that s3://, gs://, https:// and file:// paths must lie under (repeatable)."
    )
    adapter: tuple[str, ...] = option((), "NAME=PATH to register at start (repeatable).")
    adapter_source: tuple[str, ...] = option(
        (), "hub:ORG/PATTERN or dir:PATH whose adapters requests may name without a load (repeatable)."
    )
    adapter_source_size: int = option(2 * GIB, "Largest adapter that is fetched because a request names it.", size=True)
    adapter_source_count: int = option(256, "Most adapters kept that came because requests named them.")
    lora_memory: int | None = option(None, "Device pool of adapter weights (default: from free memory).", size=True)
    host_lora_memory: int | None = option(None, "Host memory for staged adapters (default: from memory).", size=True)
    max_lora_rank: int = option(256, "Largest rank served; adapters above it are refused.")
    max_lora_slots: int = option(256, "Most adapters on the device at once, whatever their size.")
    lora_page_rows: int = option(8, "Rank rows per page of the device pool.")
    adapter_wait_limit_s: float = option(2.0, "How long requests of resident adapters may overtake a waiting adapter.")

    def __post_init__(self) -> None:
        check_least(1, lora_memory=self.lora_memory, host_lora_memory=self.host_lora_memory)
        check_least(1, max_lora_rank=self.max_lora_rank, max_lora_slots=self.max_lora_slots)
        check_least(1, lora_page_rows=self.lora_page_rows)
        check_least(1, adapter_source_size=self.adapter_source_size, adapter_source_count=self.adapter_source_count)
        check_seconds("adapter_wait_limit_s", self.adapter_wait_limit_s, zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold and who goes first."""

    max_running: int = option(64, "Most requests generating at once.")
    max_step_tokens: int = option(2048, "Most tokens in one forward.")
    prefill_chunk: int = option(512, "Most prompt tokens of one request in one forward.")
    max_step_s: float = option(
        0.5, "About the longest a forward with prompt tokens may take: it gets as many as that allows; 0: no limit."
    )
    overlap_schedule: bool | None = option(
        None, "Schedule and launch a step while the one before it is computed (default: on a GPU only)."
    )
    max_waiting: int = option(4096, "Requests that may wait before new ones get 429.")
    policy: Policy = option("fcfs", "Order in which waiting requests are admitted.")
    request_timeout_s: float = option(600.0, "Longest life of a request that sets no timeout_s itself.")

    def __post_init__(self) -> None:
        check_least(1, max_running=self.max_running, max_step_tokens=self.max_step_tokens)
        check_least(1, prefill_chunk=self.prefill_chunk, max_waiting=self.max_waiting)
        check_seconds("max_step_s", self.max_step_s, zero=True)
        check_seconds("request_timeout_s", self.request_timeout_s, zero=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP front."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = option((), "Key that opens /v1 (repeatable). Without any, /v1 is open.")
    admin_key: str | None = option(None, "Key that opens the admin endpoints (and /v1).")
    open_lora_doors: bool = option(
        False, "Let vLLM's and SGLang's calls to load and unload adapters in without the admin key, as their own do."
    )
    data_dir: Path | None = option(None, "Where registered adapters are kept (default: the user's data folder).")
    drain_deadline_s: float = option(30.0, "How long a stopping server lets running requests finish.")
    max_body: int = option(16 * MIB, "Largest request body.", size=True)
    ignore_adapter_chat_templates: bool = option(False, "Render every chat with the base model's template.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "How much is logged.")

    def __post_init__(self) -> None:
        check_least(0, port=self.port)
        check_least(1, max_body=self.max_body)
        check_seconds("drain_deadline_s", self.drain_deadline_s, zero=True)
        for flag, key in (*(("--api-key", key) for key in self.api_key), ("--admin-key", self.admin_key)):
            # A header cannot carry any other, so nobody would ever get in.
            if key is not None and (not key or key != key.strip() or not key.isprintable()):
                raise ConfigError(f"{flag} must be a printable text that neither begins nor ends with a space")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """A whole server: engine and front."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
