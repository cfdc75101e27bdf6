"""What crosses the process boundary between server and engine, one msgspec struct per message."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loraserve.config import EngineConfig
from loraserve.errors import LoraserveError, from_wire
from loraserve.lora.spec import BaseGeometry
from loraserve.sampling import SamplingParams
from loraserve.scheduler.request import AdapterUse


class ErrorInfo(NamedTuple):
    """An error on the wire: its stable code and its message."""

    code: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Describe any exception; foreign ones become `internal_error` without their text."""
        if isinstance(error, LoraserveError):
            return cls(error.code, error.message)
        return cls(LoraserveError.code, "internal error")

    def to_error(self) -> LoraserveError:
        """The exception this describes."""
        return from_wire(self.code, self.message)


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities at one position: the token's own, and the most likely ones, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


# -- server → engine ----------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag="add", kw_only=True):
    """One sequence to generate. `timeout_s` is the request's whole life in seconds."""

    id: str
    prompt: list[int]
    params: SamplingParams
    adapters: list[AdapterUse] = []
    cache_salt: str | None = None
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None


class AbortRequest(msgspec.Struct, tag="abort", kw_only=True):
    """End a request without waiting for it; unknown ids are fine (it may just have ended)."""

    id: str
    error: ErrorInfo | None = None


class LoadAdapter(msgspec.Struct, tag="load_adapter", kw_only=True):
    """Stage a version from its folder; answered by `Reply`."""

    call: int
    version: str
    folder: str
    pinned: bool = False


class DropAdapter(msgspec.Struct, tag="drop_adapter", kw_only=True):
    """Forget a version and free what it holds; answered by `Reply` when that is so."""

    call: int
    version: str
    force: bool = False


class PrefetchAdapter(msgspec.Struct, tag="prefetch_adapter", kw_only=True):
    """Bring a version that the engine knows nearer, as far as there is room that nobody needs; `Reply` at once."""

    call: int
    version: str
    to_device: bool = True
    idle_s: float = 0.0  # how long ago it was used last


class SetLimits(msgspec.Struct, tag="set_limits", kw_only=True):
    """Change the memory that adapters may take; None leaves a limit as it is; `Reply` at once."""

    call: int
    lora_memory: int | None = None
    host_lora_memory: int | None = None


class DescribeAdapters(msgspec.Struct, tag="describe_adapters", kw_only=True):
    """Ask for the state of all versions; answered by `AdapterStatuses`."""

    call: int


class Shutdown(msgspec.Struct, tag="shutdown", kw_only=True):
    """End the engine process; open requests end with `request_aborted`."""


ToEngine = (
    AddRequest | AbortRequest | LoadAdapter | DropAdapter | PrefetchAdapter | SetLimits | DescribeAdapters | Shutdown
)


# -- engine → server ----------------------------------------------------------------------------------------------


class RequestOutput(msgspec.Struct, tag="output", kw_only=True):
    """News of one request. Exactly one per request has a `finish_reason`, and it is the last."""

    id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = 0
    queued_s: float | None = None  # with the first token: how long it waited to be admitted
    cold: bool = False  # with the first token: whether it had to wait for its adapter


class Outputs(msgspec.Struct, tag="outputs", kw_only=True):
    """All news of one step."""

    outputs: list[RequestOutput]


class Reply(msgspec.Struct, tag="reply", kw_only=True):
    """The end of a call; `error` says that it failed."""

    call: int
    error: ErrorInfo | None = None


class AdapterStatus(msgspec.Struct, kw_only=True):
    """Where one version is and what it holds. Bytes are those of the tier's own copy."""

    version: str
    state: str  # fetching | staged | resident | failed
    residency: str  # disk | host | device
    device_bytes: int = 0
    host_bytes: int = 0
    leases: int = 0
    error: ErrorInfo | None = None


class AdapterStatuses(msgspec.Struct, tag="adapter_statuses", kw_only=True):
    """Answer to `DescribeAdapters`."""

    call: int
    adapters: list[AdapterStatus]


class EngineStats(msgspec.Struct, tag="stats", kw_only=True):
    """Sent about once a second; also the sign that the step loop lives. `*_total` only grow."""

    steps_total: int = 0
    slowest_step_s: float = 0.0
    waiting: int = 0
    running: int = 0
    waiting_reasons: dict[str, int] = {}
    kv_tokens_used: int = 0
    kv_tokens_cached: int = 0
    kv_tokens_total: int = 0
    lora_bytes_used: int = 0
    lora_bytes_total: int = 0
    host_lora_bytes_used: int = 0
    host_lora_bytes_total: int = 0
    adapters_resident: int = 0
    adapters_registered: int = 0
    adapter_loads_total: int = 0
    adapter_evictions_total: int = 0
    adapter_stagings_total: int = 0
    adapter_host_evictions_total: int = 0
    adapter_failures_total: int = 0
    adapter_hits_total: int = 0  # requests that found their adapter on the device
    adapter_misses_total: int = 0
    adapters_by_state: dict[str, int] = {}
    adapter_staging_seconds_total: float = 0.0
    adapter_upload_seconds_total: float = 0.0
    running_adapters: list[str] = []  # versions
    waiting_adapters: list[str] = []
    retractions_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    output_tokens_total: int = 0
    requests_total: dict[str, int] = {}  # by finish reason
    rows_total: dict[str, int] = {}  # "base/prefill", "base/decode", "adapter/prefill", "adapter/decode"
    step_adapters: dict[int, int] = {}  # distinct adapters in one forward → number of forwards
    mixed_steps_total: int = 0  # forwards with prefill and decode rows together
    rss_bytes: int = 0


class EngineInfo(msgspec.Struct, tag="info", kw_only=True):
    """What the engine serves, sent once when it is ready."""

    model_path: str
    architecture: str
    geometry: BaseGeometry
    vocab_size: int
    max_context: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    kernels: str
    kv_tokens: int
    kv_bytes: int
    page_size: int
    lora_bytes: int
    host_lora_bytes: int
    max_lora_rank: int
    max_running: int
    plan: list[str]  # the memory plan, line by line, for people


class StartFailed(msgspec.Struct, tag="start_failed", kw_only=True):
    """The engine cannot start; it ends after this."""

    error: ErrorInfo


ToServer = Outputs | Reply | AdapterStatuses | EngineStats | EngineInfo | StartFailed


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot send {type(value).__name__}")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise TypeError(f"cannot receive {kind.__name__}")


class Codec:
    """Encodes messages and decodes those of one direction."""

    def __init__(self, incoming: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_path)
        self._decoder = msgspec.msgpack.Decoder(incoming, dec_hook=_decode_path)

    def encode(self, message: ToEngine | ToServer) -> bytes:
        """Message → bytes."""
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> Any:
        """Bytes → message; raises `msgspec.ValidationError` on anything else."""
        return self._decoder.decode(data)


def encode_config(config: EngineConfig) -> bytes:
    """Config → JSON, for the engine process's standard input."""
    return msgspec.json.encode(config, enc_hook=_encode_path)


def decode_config(data: bytes) -> EngineConfig:
    """The inverse of `encode_config`."""
    return msgspec.json.decode(data, type=EngineConfig, dec_hook=_decode_path)
