"""A real engine in this process whose logits are all kept."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from loraserve.config import (
    GIB,
    MIB,
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    format_bytes,
)
from loraserve.engine.build import EngineParts, build_engine, resolve_device
from loraserve.engine.messages import AddRequest, RequestOutput
from loraserve.errors import ConfigError, LoraserveError, NonFiniteLogits
from loraserve.inspection import Base
from loraserve.kvcache.pool import KVCache
from loraserve.lora.layout import PoolLayout
from loraserve.lora.spec import AdapterSpec
from loraserve.models.loading import resolve_dtype
from loraserve.sampling import SamplingParams
from loraserve.scheduler.request import AdapterUse
from loraserve.verify.compare import Served, Trace
from loraserve.verify.options import VerifyOptions, within_base

_COPIES = 2  # of the adapter, under other versions: neighbours in the batch, and what pushes it off the device
_MAX_EVICTIONS = 256
_MAX_LOGITS = 8 * GIB
_PAGE = 16
_STALLED_S = 120.0


class Bench:
    """An engine whose logits are all kept. Its device has slots for two adapters only, so that a third evicts."""

    def __init__(self, base: Base, spec: AdapterSpec, options: VerifyOptions, prompts: list[list[int]]) -> None:
        self._prompts, self._max_tokens = prompts, options.max_tokens
        self._vocab, self._num_new_tokens = base.shape.vocab_size, spec.num_new_tokens
        # The first prompt that the adapter applies to; without one it never comes to the device.
        self._using = next((i for i, prompt in enumerate(prompts) if spec.first_token(prompt) is not None), None)
        self._vocab = base.shape.vocab_size
        self._traces: dict[str, Trace] = {}
        self._versions: list[str] = []
        self._ids = itertools.count()
        self.parts: EngineParts = build_engine(engine_config(base, spec, options, prompts), self._see)

    def close(self) -> None:
        """Stop the engine's threads."""
        self.parts.close()

    def load(self, version: str, folder: Path) -> None:
        """Load the adapter and its copies. Raises what the engine answers."""
        copies = (hashlib.sha256(f"{version} copy {i}".encode()).hexdigest() for i in range(_COPIES))
        self._versions = [version, *copies]
        for each in self._versions:
            self._call(lambda done, each=each: self.parts.loop.load_adapter(each, str(folder), False, done))  # type: ignore[misc]

    def reload(self, version: str, folder: Path) -> None:
        """Forget the adapter on device and host, and load it anew."""
        self._call(lambda done: self.parts.loop.drop_adapter(version, False, done))
        self._call(lambda done: self.parts.loop.load_adapter(version, str(folder), False, done))

    def evict(self, version: str) -> None:
        """Use the copies together: they take both slots."""
        if self._using is None:
            return
        # Once is enough unless the copies' requests fail at their first token, one before the other comes in: then the
        # copies take each other's slot until they have been used as often as the adapter.
        for _ in range(_MAX_EVICTIONS):
            self._finish([self._submit(copy, Served.COPY, self._using) for copy in self._versions[1:]])
            statuses = self.parts.loop.adapter_statuses()
            if next(each.residency for each in statuses if each.version == version) != "device":
                return
        raise LoraserveError("the adapter stayed on the device although both slots were needed for others")

    def ask(self, requests: Sequence[tuple[Served, int]]) -> list[Trace]:
        """Submit all at once and step until all are answered. Raises a request's error."""
        versions = {Served.BASE: None, Served.ADAPTER: self._versions[0], Served.COPY: self._versions[1]}
        return self._finish([self._submit(versions[served], served, prompt) for served, prompt in requests])

    def _submit(self, version: str | None, served: Served, prompt: int) -> str:
        request_id = f"verify-{next(self._ids)}"
        tokens, vocab = self._prompts[prompt], self._vocab + self._num_new_tokens
        if served is Served.BASE:
            tokens, vocab = within_base(tokens, self._vocab), self._vocab
        rows = len(tokens) + self._max_tokens - 1
        self._traces[request_id] = Trace(prompt, served, torch.full((rows, vocab), math.nan))
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=self._max_tokens, prompt_logprobs=0)
        uses = [] if version is None else [AdapterUse(version, 1.0)]
        self.parts.loop.add(AddRequest(id=request_id, prompt=tokens, params=params, adapters=uses))
        return request_id

    def _see(self, request_id: str, at: int, logits: Tensor) -> None:
        self._traces[request_id].logits[at : at + logits.shape[0]] = logits

    def _finish(self, requests: list[str]) -> list[Trace]:
        self._run_until(lambda: all(self._traces[request].done for request in requests))
        return [self._traces.pop(request) for request in requests]

    def _call(self, start: Callable[[Callable[[LoraserveError | None], None]], None]) -> None:
        answers: list[LoraserveError | None] = []
        start(answers.append)
        self._run_until(lambda: bool(answers))
        if answers[0] is not None:
            raise answers[0]

    def _run_until(self, finished: Callable[[], bool]) -> None:
        last = time.monotonic()
        while not finished():
            if self.parts.loop.step():
                last = time.monotonic()
            elif time.monotonic() - last > _STALLED_S:
                raise LoraserveError(f"the engine made no progress for {_STALLED_S:g} seconds")
            else:
                time.sleep(0.0005)
            for output in self.parts.loop.take_outputs():
                self._take(output)

    def _take(self, output: RequestOutput) -> None:
        trace = self._traces[output.id]
        if output.error is not None and output.error.code == NonFiniteLogits.code:
            trace.broken = True  # a finding of its own: the row that says so is kept, and the comparison goes on
        elif output.error is not None:
            raise output.error.to_error()
        trace.tokens += output.token_ids
        trace.done = output.finish_reason is not None


def engine_config(base: Base, spec: AdapterSpec, options: VerifyOptions, prompts: list[list[int]]) -> EngineConfig:
    """Pools of just the size that is needed: a comparison should not take the machine's memory."""
    shape, device = base.shape, resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, shape, device)
    longest = max(map(len, prompts)) + options.max_tokens
    if longest > shape.max_context:
        raise ConfigError(f"a prompt with its answer has {longest} tokens, the model takes {shape.max_context}")
    together = len(Served) * len(prompts)
    rows = sum(len(prompt) + options.max_tokens for prompt in prompts)
    kept = (len(Served) + 2) * rows * (shape.vocab_size + spec.num_new_tokens) * 4
    if kept > _MAX_LOGITS:
        raise ConfigError(f"the logits to compare would take {format_bytes(kept)}: give fewer or shorter prompts")
    per_token = KVCache.bytes_per_location(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    tokens = len(Served) * rows + (together + 1) * 2 * _PAGE
    lora = LoraConfig(max_lora_rank=options.max_lora_rank)
    pages = PoolLayout(shape.lora_targets(), lora.lora_page_rows, lora.max_lora_rank).demand(spec)
    adapter = sum(size * count for size, count in pages.items()) * dtype.itemsize
    return EngineConfig(
        model=ModelConfig(
            model=str(base.path),
            device=options.device,
            dtype=options.dtype,
            kernels=options.kernels,
            max_model_len=longest,
        ),
        cache=CacheConfig(kv_memory=tokens * per_token, page_size=_PAGE),
        lora=LoraConfig(
            lora_memory=2 * _COPIES * adapter + 32 * MIB,
            host_lora_memory=2 * (_COPIES + 1) * adapter + 64 * MIB,
            max_lora_rank=options.max_lora_rank,
            max_lora_slots=_COPIES,
        ),
        scheduler=SchedulerConfig(max_running=together),
    )
