"""Parts 4 and 5 of `benchmarks/gpu.py`: the whole engine, with more adapters than slots, and with a cold load."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu_shapes import Machine, make_shape
from benchmarks.gpu_steps import EagerGraphs
from benchmarks.make_adapters import make_adapter
from loraserve.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from loraserve.engine.build import EngineParts, build_engine
from loraserve.engine.messages import AddRequest
from loraserve.lora.format import parse_adapter
from loraserve.lora.version import content_version
from loraserve.sampling import SamplingParams
from loraserve.scheduler.request import AdapterUse

Row = dict[str, Any]


def save_model(name: str, folder: Path, machine: Machine) -> Path:
    """A checkpoint with random weights in the shape of a known model."""
    shape = make_shape(name, folder)
    hidden, inter, q = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    sizes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    sizes |= {"self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden)}
    sizes |= {"mlp.down_proj": (hidden, inter)}

    def draw(*size: int) -> torch.Tensor:
        return torch.empty(size, device=machine.device).normal_(std=0.02).to(machine.dtype).cpu()

    tensors = {"model.embed_tokens.weight": draw(shape.vocab_size, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=machine.dtype)
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = draw(shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        path = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{path}.{norm}.weight"] = torch.ones(hidden, dtype=machine.dtype)
        for module, size in sizes.items():
            tensors[f"{path}.{module}.weight"] = draw(*size)
            if shape.qkv_bias and module.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{path}.{module}.bias"] = draw(size[0])
    save_file(tensors, folder / "model.safetensors")
    return folder


class Serving:
    """One engine in this process, driven step by step."""

    def __init__(self, machine: Machine, model: Path, kernels: str, slots: int, running: int, adapters: Path) -> None:
        dtype = str(machine.dtype).removeprefix("torch.")
        smoke = machine.device.type == "cpu"
        config = EngineConfig(
            model=ModelConfig(
                model=str(model),
                dtype=dtype,
                kernels=kernels,
                device="auto",
                max_model_len=64 if smoke else 2048,  # type: ignore[arg-type]
            ),
            cache=CacheConfig(kv_memory=(1 << 22) if smoke else None),
            lora=LoraConfig(max_lora_slots=slots, max_lora_rank=64, host_lora_memory=(64 << 20) if smoke else 8 << 30),
            scheduler=SchedulerConfig(max_running=running),
        )
        self._max_rank = config.lora.max_lora_rank
        self.parts: EngineParts = build_engine(config, graph_device=EagerGraphs() if smoke else None)
        self.loop, self.folder = self.parts.loop, adapters
        self.versions: dict[str, str] = {}
        self._ids = 0

    def start_load(self, name: str) -> list[Any]:
        """Begin to load; the list gets its answer."""
        folder, answers = self.folder / name, []
        spec = parse_adapter(folder, self.parts.info.geometry, self._max_rank)
        self.versions[name] = content_version(spec, folder)
        self.loop.load_adapter(self.versions[name], str(folder), False, answers.append)
        return answers

    def load(self, *names: str) -> None:
        """Load and wait."""
        pending = [self.start_load(name) for name in names]
        while not all(pending):
            if not self.loop.step():
                time.sleep(0.0005)
        failed = [answer[0] for answer in pending if answer[0] is not None]
        if failed:
            raise failed[0]

    def add(self, name: str | None, prompt: list[int], tokens: int) -> str:
        """Send a request."""
        self._ids += 1
        uses = [] if name is None else [AdapterUse(self.versions[name], 1.0)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
        self.loop.add(AddRequest(id=f"r{self._ids}", prompt=prompt, params=params, adapters=uses))
        return f"r{self._ids}"


def oversubscribed(serving: Serving, count: int, requests: int, running: int, tokens: int) -> Row:
    """Part 4. Requests for `count` adapters at random, `running` at a time: time to first token and throughput."""
    rng = random.Random(3)
    serving.load(*(f"r{i}" for i in range(count)))
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    finished, produced, waiting = 0, 0, requests
    started = time.perf_counter()
    while finished < requests:
        while waiting and len(sent) - finished < running:
            prompt = [rng.randrange(3, 300) for _ in range(tokens)]
            sent[serving.add(f"r{rng.randrange(count)}", prompt, tokens)] = time.perf_counter()
            waiting -= 1
        if not serving.loop.step():
            time.sleep(0.0002)
        for output in serving.loop.take_outputs():
            if output.error is not None:
                raise RuntimeError(output.error.message)
            produced += len(output.token_ids)
            if output.token_ids:
                first.setdefault(output.id, time.perf_counter() - sent[output.id])
            finished += output.finish_reason is not None
    waits = sorted(first.values())
    row: Row = {
        "adapters": count,
        "ttft_p50_ms": waits[len(waits) // 2] * 1e3,
        "ttft_p95_ms": waits[int(len(waits) * 0.95)] * 1e3,
    }
    return row | {"tok_s": produced / (time.perf_counter() - started)}


def gap_of_a_cold_load(serving: Serving, streams: int, cold: str, tokens: int) -> Row:
    """Part 5. Streams decode while a cold adapter is fetched, uploaded and used: their longest gap between tokens."""
    rng = random.Random(4)
    for _ in range(streams):
        serving.add(None, [rng.randrange(3, 300) for _ in range(8)], tokens)
    gaps: list[float] = []
    answers: list[Any] | None = None
    last, asked, done = time.perf_counter(), False, 0
    before: float | None = None
    while done < streams + 1:
        serving.loop.step()
        outputs = serving.loop.take_outputs()
        if any(output.token_ids for output in outputs):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        done += sum(output.finish_reason is not None for output in outputs)
        if answers is None and len(gaps) > tokens // 4:
            before = sorted(gaps)[len(gaps) // 2]
            gaps.clear()
            answers = serving.start_load(cold)
            last = time.perf_counter()
        if answers and not asked:
            serving.add(cold, [5, 6, 7], 4)
            asked = True
    assert before is not None
    return {
        "streams": streams,
        "median_step_ms": before * 1e3,
        "longest_gap_ms": max(gaps) * 1e3,
        "steps": max(gaps) / before,
    }


def make_adapters(model: Path, folder: Path, count: int) -> None:
    """Adapters r0, r1, … of ranks 8, 16 and 32 in turn."""
    for index in range(count):
        make_adapter(model, folder / f"r{index}", (8, 16, 32)[index % 3], seed=index)
