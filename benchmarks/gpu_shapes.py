"""What `benchmarks/gpu.py` measures on: shapes of known models with random weights, random pools, batches, clocks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTarget
from loraserve.kernels.ops import Ops
from loraserve.models.config import ModelShape, load_shape
from loraserve.models.decoder import Decoder, DecoderWeights, WeightBytes
from loraserve.models.layers import LayerWeights

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
_QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6}

CONFIGS: dict[str, dict[str, Any]] = {
    "8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0}
    | {"tie_word_embeddings": False},
    "1b": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0}
    | {"tie_word_embeddings": True},
    "0.5b": _QWEN
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000.0}
    | {"tie_word_embeddings": True},
    "tiny": _LLAMA
    | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128, "rope_theta": 10000.0}
    | {"tie_word_embeddings": True},
}


class Machine(NamedTuple):
    """Where it runs, and what it can do at most, measured on it."""

    device: torch.device
    dtype: torch.dtype
    name: str
    copy_gbs: float  # bytes read and written per second by a large copy, in 1e9
    matmul_tflops: float


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """The copy and matmul rates that everything else is compared with."""
    big = 1 << (30 if device.type == "cuda" else 22)
    side = 8192 if device.type == "cuda" else 256
    source = torch.zeros(big, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    copy_s = clock(device, lambda: into.copy_(source), rounds=10)
    a = torch.randn(side, side, device=device).to(dtype)
    matmul_s = clock(device, lambda: a @ a, rounds=10)
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (interpreted; no figure means anything)"
    )
    return Machine(device, dtype, name, 2 * big / copy_s / 1e9, 2 * side**3 / matmul_s / 1e12)


def clock(device: torch.device, run: Callable[[], object], rounds: int) -> float:
    """Seconds of one `run`, the best of three groups of `rounds`; on a GPU as a graph, without launch costs."""
    if device.type != "cuda":
        run()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return clock_eager(device, graph.replay, rounds)


def clock_eager(device: torch.device, run: Callable[[], object], rounds: int) -> float:
    """Seconds of one `run`, the best of three groups of `rounds`, launches included."""
    if device.type != "cuda":
        return clock(device, run, rounds)
    run()
    best = float("inf")
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(rounds):
            run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000 / rounds)
    return best


def make_shape(name: str, folder: Path) -> ModelShape:
    """The shape of one of `CONFIGS`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {"torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1} | CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(text))
    # A folder without weights is no model; these are never read.
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    return load_shape(folder)


def make_decoder(shape: ModelShape, machine: Machine, ops: Ops) -> Decoder:
    """A decoder with random weights, made on the device."""

    def random(*size: int) -> Tensor:
        return torch.empty(size, dtype=machine.dtype, device=machine.device).normal_(std=0.02)

    def bias(width: int, wanted: bool) -> Tensor | None:
        return random(width) if wanted else None

    hidden, inter = shape.hidden_size, shape.intermediate_size
    q = shape.num_heads * shape.head_dim
    qkv = q + 2 * shape.num_kv_heads * shape.head_dim
    ones = torch.ones(hidden, dtype=machine.dtype, device=machine.device)
    layers = tuple(
        LayerWeights(
            input_norm=ones,
            qkv=ops.pack_linear(random(qkv, hidden), bias(qkv, shape.qkv_bias)),
            q_norm=None,
            k_norm=None,
            o=ops.pack_linear(random(hidden, q), None),
            post_norm=ones,
            gate_up=ops.pack_linear(random(2 * inter, hidden), None),
            down=ops.pack_linear(random(hidden, inter), None),
        )
        for _ in range(shape.num_layers)
    )
    embed = random(shape.vocab_size, hidden)
    head = embed if shape.tie_word_embeddings else random(shape.vocab_size, hidden)
    weights = DecoderWeights(embed, layers, ones, ops.pack_linear(head, None), WeightBytes(0, 0, 0))
    return Decoder(shape, weights, ops)


def make_targets(
    machine: Machine, widths: Sequence[tuple[int, int]], ranks: Sequence[int], layers: int
) -> tuple[LoraTarget, ...]:
    """Targets side by side over one storage, pages of 8 rows in a shuffled order; slot i has rank `ranks[i]`."""
    page_rows, slots = 8, len(ranks)
    pages = [-(-rank // page_rows) for rank in ranks]
    size = page_rows * max(max(pair) for pair in widths)
    count = 2 * len(widths) * layers * sum(pages)
    storage = torch.empty(count * size, dtype=machine.dtype, device=machine.device).normal_(std=0.05)
    order = iter(torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist())
    tables = torch.zeros(len(widths), 2, layers, slots, max(pages), dtype=torch.int64)
    for index in np.ndindex(len(widths), 2, layers, slots):
        for page in range(pages[index[3]]):
            tables[(*index, page)] = next(order) * size
    tables = tables.to(machine.device)
    rank_table = torch.tensor(list(ranks), dtype=torch.int32).repeat(layers, 1).to(machine.device)
    column, targets = 0, []
    for i, (width_in, width_out) in enumerate(widths):
        a, b = tables[i, 0].contiguous(), tables[i, 1].contiguous()
        targets.append(LoraTarget(storage, a, b, rank_table, page_rows, width_in, width_out, column, alignment=16))
        column += width_out
    return tuple(targets)


def make_segments(machine: Machine, owners: Tensor, slots: int) -> LoraSegments:
    """Segments of tokens that each have one adapter. owners: [n], on the host."""
    counts = torch.bincount(owners, minlength=slots)
    return LoraSegments(
        tokens=owners.argsort(stable=True).to(torch.int32).to(machine.device),
        weights=torch.ones(len(owners), device=machine.device),
        slots=torch.arange(slots, dtype=torch.int32, device=machine.device),
        indptr=torch.cat((torch.zeros(1), counts.cumsum(0))).to(torch.int32).to(machine.device),
        max_segment=int(counts.max()),
        max_per_token=1,
    )


def make_attention(machine: Machine, rows: int, length: int, new: int, page: int = 16) -> tuple[AttentionBatch, int]:
    """`rows` sequences of `length` tokens, the last `new` of them in this step, over shuffled pages; locations used."""
    pages = -(-length // page)
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(1)).view(rows, pages)
    locations = (order[:, :, None] * page + torch.arange(page)).flatten(1).to(torch.int32).to(machine.device)
    batch = AttentionBatch(
        req_rows=torch.arange(rows, dtype=torch.int32, device=machine.device),
        q_indptr=torch.arange(rows + 1, dtype=torch.int32, device=machine.device) * new,
        seq_lens=torch.full((rows,), length, dtype=torch.int32, device=machine.device),
        locations=locations,
        num_decode=rows if new == 1 else 0,
        max_seq_len=length,
        max_q_len=new,
    )
    return batch, rows * pages * page
