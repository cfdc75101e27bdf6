"""Drives a whole engine in this process: the real loop, scheduler, pools and kernels, without sockets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loraserve.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from loraserve.engine.build import EngineParts, build_engine
from loraserve.engine.messages import AddRequest, EngineStats, RequestOutput
from loraserve.errors import LoraserveError
from loraserve.lora.format import parse_adapter
from loraserve.lora.version import content_version
from loraserve.sampling import SamplingParams
from loraserve.scheduler.request import AdapterUse

MIB = 2**20


@dataclass
class Answer:
    """All outputs of one request, joined."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def finished(self) -> bool:
        return bool(self.outputs) and self.last.finish_reason is not None


def engine_config(
    model: Path,
    *,
    kernels: str = "auto",
    cache: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
) -> EngineConfig:
    """A config for tests: CPU, fp32, small pools unless told otherwise."""
    return EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32", kernels=kernels),  # type: ignore[arg-type]
        cache=CacheConfig(**({"kv_memory": 16 * MIB} | (cache or {}))),
        lora=LoraConfig(**({"lora_memory": 16 * MIB, "host_lora_memory": 64 * MIB} | (lora or {}))),
        scheduler=SchedulerConfig(**(scheduler or {})),
    )


class Driver:
    """One engine. `versions` maps the names given to `load` to content hashes."""

    def __init__(self, config: EngineConfig, device: torch.device | None = None, graph_device: Any = None) -> None:
        self.config = config
        self.logits: dict[str, dict[int, torch.Tensor]] = {}  # request → position → logits [vocab]
        self.parts: EngineParts = build_engine(config, self._watch, device, graph_device)
        self.loop = self.parts.loop
        self.versions: dict[str, str] = {}
        self.answers: dict[str, Answer] = {}
        self._ids = itertools.count()

    def _watch(self, request_id: str, position: int, logits: torch.Tensor) -> None:
        rows = {position + i: row.clone() for i, row in enumerate(logits)}
        self.logits.setdefault(request_id, {}).update(rows)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.parts.close()

    def load(self, name: str, folder: Path) -> str:
        """Register an adapter and wait for it. Raises what the engine answers."""
        spec = parse_adapter(folder, self.parts.info.geometry, self.config.lora.max_lora_rank)
        version = content_version(spec, folder)
        answers: list[LoraserveError | None] = []
        self.loop.load_adapter(version, str(folder), False, answers.append)
        self.run_until(lambda: bool(answers))
        if answers[0] is not None:
            raise answers[0]
        self.versions[name] = version
        return version

    def drop(self, name: str, force: bool = False) -> None:
        """Unregister an adapter and wait until it is freed."""
        answers: list[LoraserveError | None] = []
        self.loop.drop_adapter(self.versions.pop(name), force, answers.append)
        self.run_until(lambda: bool(answers))
        if answers[0] is not None:
            raise answers[0]

    def add(
        self,
        prompt: Sequence[int],
        lora: str | Sequence[tuple[str, float]] | None = None,
        *,
        salt: str | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> str:
        """Send a request; greedy, EOS ignored, 12 tokens unless told otherwise."""
        blend = [(lora, 1.0)] if isinstance(lora, str) else list(lora or [])
        request_id = f"r{next(self._ids)}"
        settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12} | params
        self.answers[request_id] = Answer()
        self.loop.add(
            AddRequest(
                id=request_id,
                prompt=list(prompt),
                params=SamplingParams(**settings),
                adapters=[AdapterUse(self.versions[name], scale) for name, scale in blend],
                cache_salt=salt,
                timeout_s=timeout_s,
            )
        )
        return request_id

    def step(self) -> bool:
        """One step; collects outputs, checks that nothing comes after an end."""
        worked = self.loop.step()
        for output in self.loop.take_outputs():
            answer = self.answers[output.id]
            assert not answer.finished, f"{output.id} got news after its end"
            answer.outputs.append(output)
            answer.tokens += output.token_ids
        return worked

    def run_until(self, done: Any, seconds: float = 60.0) -> None:
        """Step until `done()`."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "the engine did not get there in time"
            if not self.step():
                time.sleep(0.001)

    def finish(self, *ids: str, seconds: float = 120.0) -> list[list[int]]:
        """Step until these (or all) requests have ended; their tokens."""
        wanted = list(ids) or list(self.answers)
        self.run_until(lambda: all(self.answers[request_id].finished for request_id in wanted), seconds)
        return [self.answers[request_id].tokens for request_id in wanted]

    def ask(self, prompt: Sequence[int], lora: Any = None, **settings: Any) -> list[int]:
        """One request alone."""
        return self.finish(self.add(prompt, lora, **settings))[0]

    @property
    def stats(self) -> EngineStats:
        return self.loop.stats()

    def assert_idle(self) -> None:
        """Nothing runs, and every pool balances to zero but for what the prefix cache keeps."""
        while self.step():
            pass  # a step in flight may still compute requests that have ended
        stats = self.stats
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.kv_tokens_used == 0
        self.loop.check()
        assert all(status.leases == 0 for status in self.loop.adapter_statuses())
