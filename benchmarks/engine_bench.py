"""A whole engine in this process for benchmarks: real loop, scheduler, pools and kernels, no sockets."""

from __future__ import annotations

import dataclasses
import itertools
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.make_adapters import make_adapter
from loraserve.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from loraserve.engine.build import build_engine
from loraserve.engine.messages import AddRequest
from loraserve.lora.format import parse_adapter
from loraserve.lora.version import content_version
from loraserve.models.decoder import Decoder
from loraserve.models.demo import prepare_demo_model
from loraserve.sampling import SamplingParams
from loraserve.scheduler.request import AdapterUse

GIB = 2**30


@dataclass
class OpClock:
    """Seconds and calls per kind of operator over the steps that were kept; `steps` are these steps' own seconds."""

    steps: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _seen: list[tuple[str, float]] = field(default_factory=list)  # since the last step ended

    def end_step(self, seconds: float, keep: bool) -> None:
        """Add what was seen since the last call, or forget it."""
        if keep:
            self.steps.append(seconds)
            for kind, spent in self._seen:
                self.seconds[kind] += spent
                self.calls[kind] += 1
        self._seen.clear()

    def timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, seen as `kind`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self._seen.append((kind, time.perf_counter() - start))
            return result

        return run


class TimedOps:
    """A backend whose every operator is counted by an `OpClock`."""

    def __init__(self, ops: Any, clock: OpClock) -> None:
        self._ops, self._clock = ops, clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return self._clock.timed(name, found) if callable(found) else found


@dataclass
class TimedLinear:
    """A base linear counted by an `OpClock`."""

    inner: Any
    kind: str
    clock: OpClock

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The linear of x."""
        result: torch.Tensor = self.clock.timed(self.kind, self.inner)(x)
        return result


class BenchEngine:
    """The engine, adapters of several ranks made on demand, and decode steps of a wanted shape."""

    def __init__(self, *, max_running: int = 64, kv_bytes: int = 4 * GIB, lora_bytes: int = 2 * GIB, **model: Any):
        self.path = Path(model["model"]) if model.get("model") else prepare_demo_model()
        settings = {"device": "cpu", "dtype": "float32"} | model | {"model": str(self.path)}
        self.config = EngineConfig(
            model=ModelConfig(**settings),
            cache=CacheConfig(kv_memory=kv_bytes),
            lora=LoraConfig(lora_memory=lora_bytes, host_lora_memory=4 * GIB),
            scheduler=SchedulerConfig(max_running=max_running, max_step_tokens=2048, max_step_s=60.0),
        )
        self.parts = build_engine(self.config)
        self.loop = self.parts.loop
        self._folder = tempfile.TemporaryDirectory(prefix="loraserve-bench-")
        self._versions: dict[tuple[int, int], str] = {}
        self._random = random.Random(0)
        self._ids = itertools.count()

    def close(self) -> None:
        """Stop the engine's threads and delete the adapters."""
        self.parts.close()
        self._folder.cleanup()

    @property
    def decoder(self) -> Decoder:
        """The decoder that the runner uses now."""
        found: Decoder = self.loop._runner._decoder
        return found

    def adapter(self, index: int, rank: int) -> str:
        """Version of a random adapter on all linears, loaded on first use."""
        key = (index, rank)
        if key not in self._versions:
            folder = Path(self._folder.name) / f"a{index}-r{rank}"
            make_adapter(self.path, folder, rank, seed=index)
            spec = parse_adapter(folder, self.parts.info.geometry, self.config.lora.max_lora_rank)
            version = content_version(spec, folder)
            answers: list[Any] = []
            self.loop.load_adapter(version, str(folder), False, answers.append)
            while not answers:
                self.loop.step()
            if answers[0] is not None:
                raise answers[0]
            self._versions[key] = version
        return self._versions[key]

    def ask(self, prompt: list[int], max_tokens: int, version: str | None = None) -> str:
        """Queue one greedy request that runs to `max_tokens`; its id."""
        request_id = f"b{next(self._ids)}"
        uses = [] if version is None else [AdapterUse(version, 1.0)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.loop.add(AddRequest(id=request_id, prompt=prompt, params=params, adapters=uses))
        return request_id

    def prompt(self, length: int) -> list[int]:
        """Random token ids; no two prompts share a prefix."""
        return self._random.choices(range(1000, self.parts.info.vocab_size), k=length)

    def decode_steps(
        self, rows: int, context: int, steps: int, adapters: int = 0, rank: int = 16, clock: OpClock | None = None
    ) -> list[float]:
        """Seconds of `steps` decode steps of `rows` sequences near `context`, request i under adapter i mod `adapters`.

        Everything a step does counts: intake, scheduling, forward, sampling, commit, outputs. `clock` ends up holding
        decode steps alone.
        """
        versions = [self.adapter(index, rank) for index in range(adapters)]
        length = max(1, context - steps // 2)
        for row in range(rows):
            self.ask(self.prompt(length), steps + 4, versions[row % adapters] if adapters else None)
        times: list[float] = []
        while self.loop.busy:
            before = self.loop._counters.rows.copy()
            start = time.perf_counter()
            self.loop.step()
            self.loop.take_outputs()
            seconds = time.perf_counter() - start
            after = self.loop._counters.rows
            decoded = sum(after[key] - before.get(key, 0) for key in after if "decode" in str(key))
            prefilled = sum(after[key] - before.get(key, 0) for key in after if "prefill" in str(key))
            wanted = decoded == rows and not prefilled
            if wanted:
                times.append(seconds)
            if clock is not None:
                clock.end_step(seconds, wanted)
        return times[1:][:steps]

    def prefill_steps(self, tokens: int, steps: int, adapters: int = 0, rank: int = 16) -> list[float]:
        """Seconds of `steps` steps, each of which prefills one new prompt of `tokens`, of the adapters in turn."""
        versions = [self.adapter(index, rank) for index in range(adapters)]
        times: list[float] = []
        for index in range(steps):
            self.ask(self.prompt(tokens), 1, versions[index % adapters] if adapters else None)
            start = time.perf_counter()
            count = 0
            while self.loop.busy:
                count += self.loop.step()
                self.loop.take_outputs()
            times.append(time.perf_counter() - start)
            if count != 1:
                raise RuntimeError(f"a prompt of {tokens} tokens took {count} steps")
        return times

    def gemms(self, rows: int, head_rows: int | None = None) -> Callable[[], float]:
        """A call that runs the base linears of one step over `rows` rows and returns its seconds.

        lm_head sees `head_rows` (None: all), as of prompts only the last token goes through it.
        """
        layers, head = self.decoder.weights.layers, self.decoder.weights.lm_head
        inputs = {linear.in_features: torch.randn(rows, linear.in_features) for linear in _linears(layers[0])}
        last = torch.randn(rows if head_rows is None else head_rows, head.in_features)

        def run() -> float:
            with torch.no_grad():
                start = time.perf_counter()
                for layer in layers:
                    for linear in _linears(layer):
                        linear(inputs[linear.in_features])
                head(last)
                return time.perf_counter() - start

        return run

    @contextmanager
    def clocked(self) -> Iterator[OpClock]:
        """Count every operator and linear of the steps inside the block."""
        clock, plain = OpClock(), self.decoder
        layers = tuple(
            dataclasses.replace(
                layer,
                **{
                    name: TimedLinear(getattr(layer, name), f"linear {name}", clock)
                    for name in ("qkv", "o", "gate_up", "down")
                },
            )
            for layer in plain.weights.layers
        )
        head: Any = TimedLinear(plain.weights.lm_head, "linear lm_head", clock)
        weights = dataclasses.replace(plain.weights, layers=layers, lm_head=head)
        self.loop._runner._decoder = Decoder(plain.shape, weights, TimedOps(plain.ops, clock))  # type: ignore[arg-type]
        try:
            yield clock
        finally:
            self.loop._runner._decoder = plain


def _linears(layer: Any) -> tuple[Any, ...]:
    return layer.qkv, layer.o, layer.gate_up, layer.down
