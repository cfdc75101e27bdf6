"""Hand-made `ForwardBatch`es over a paged KV cache with shuffled locations, and tiny random models to run them on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from loraserve.kernels.metadata import AttentionBatch, LoraSegments, LoraTables
from loraserve.kernels.ops import Ops
from loraserve.kernels.reference import ReferenceOps
from loraserve.models.config import load_shape
from loraserve.models.decoder import Decoder
from loraserve.models.forward_batch import ForwardBatch
from loraserve.models.loading import load_decoder

VOCAB = 101
TOLERANCE = 1e-4


def backends() -> dict[str, Ops]:
    """Every backend that runs in float32 on this CPU."""
    found: dict[str, Ops] = {"reference": ReferenceOps()}
    try:
        from loraserve.kernels.dispatch import select_ops
    except ImportError:
        return found
    found["cpu"] = select_ops("cpu", torch.device("cpu"), torch.float32)
    return found


def save_random_model(folder: Path, config: Any, seed: int = 0) -> Any:
    """Save a model whose every parameter is random, norms and biases too, and return it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # transformers starts norms at 1 and biases at 0, where mixing them up would go unseen.
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    return model


def load(folder: Path, ops: Ops) -> Decoder:
    return load_decoder(folder, load_shape(folder), torch.float32, "cpu", ops)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def hf_logits(model: Any, tokens: Sequence[int], num_prompt: int) -> Tensor:
    """[len(tokens), vocab] as transformers serves them: the prompt in one forward, then token by token."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # transformers' dynamic RoPE keeps state from the last sequence; a short one resets it.
        model(torch.tensor([tokens[:1]]))
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([list(tokens)])
        parts = [model(ids[:, :num_prompt], past_key_values=cache, use_cache=True).logits[0]]
        parts += [
            model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits[0]
            for i in range(num_prompt, len(tokens))
        ]
    return torch.cat(parts)


@dataclass
class Sample:
    """One request: its first `num_prompt` tokens are the prompt, the others are fed one by one."""

    tokens: list[int]
    num_prompt: int
    slots: tuple[tuple[int, float], ...] = ()  # (slot, weight) of its adapters
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @property
    def in_prompt(self) -> bool:
        return self.done < self.num_prompt


class PagedKV:
    """KV tensors full of NaN, and a level-1 table that scatters every sequence over them."""

    def __init__(self, decoder: Decoder, num_rows: int, max_len: int, seed: int = 0) -> None:
        shape = decoder.shape
        num_locations = num_rows * max_len + 3
        size = (num_locations, shape.num_kv_heads, shape.head_dim)
        self.k = [torch.full(size, float("nan")) for _ in range(shape.num_layers)]
        self.v = [torch.full(size, float("nan")) for _ in range(shape.num_layers)]
        shuffled = torch.randperm(num_locations, generator=torch.Generator().manual_seed(seed))
        self.locations = shuffled[: num_rows * max_len].view(num_rows, max_len).to(torch.int32)


def segments_of(per_token: list[tuple[tuple[int, float], ...]]) -> LoraSegments | None:
    """Segments from the (slot, weight) pairs of each token."""
    triples = sorted((slot, token, weight) for token, pairs in enumerate(per_token) for slot, weight in pairs)
    if not triples:
        return None
    slots = sorted({slot for slot, _, _ in triples})
    counts = [sum(1 for slot, _, _ in triples if slot == wanted) for wanted in slots]
    return LoraSegments(
        tokens=torch.tensor([token for _, token, _ in triples], dtype=torch.int32),
        weights=torch.tensor([weight for _, _, weight in triples]),
        slots=torch.tensor(slots, dtype=torch.int32),
        indptr=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        max_segment=max(counts),
    )


def make_batch(chunks: list[tuple[int, Sample, int]], kv: PagedKV) -> ForwardBatch:
    """A step of (row, sequence, number of new tokens); decode sequences must come first."""
    ids, positions, locations, context, per_token = [], [], [], [], []
    for row, sequence, count in chunks:
        span = range(sequence.done, sequence.done + count)
        ids += [sequence.tokens[p] for p in span]
        positions += span
        locations += [int(kv.locations[row, p]) for p in span]
        context += [max(sequence.num_prompt, p + 1) for p in span]
        per_token += [sequence.slots] * count
    q_lens = [count for _, _, count in chunks]
    seq_lens = [sequence.done + count for _, sequence, count in chunks]
    num_decode = sum(1 for _, sequence, _ in chunks if not sequence.in_prompt)
    assert all(not sequence.in_prompt for _, sequence, _ in chunks[:num_decode])
    segments = segments_of(per_token)
    return ForwardBatch(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        out_loc=torch.tensor(locations, dtype=torch.int32),
        context_lens=torch.tensor(context),
        attention=AttentionBatch(
            req_rows=torch.tensor([row for row, _, _ in chunks], dtype=torch.int32),
            q_indptr=torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            locations=kv.locations,
            num_decode=num_decode,
            max_seq_len=max(seq_lens),
            max_q_len=max(q_lens),
        ),
        logits_rows=torch.arange(len(ids)),
        lora=segments,
        lora_logits=segments,
    )


def serve(
    decoder: Decoder, sequences: list[Sample], chunk: int, lora: LoraTables | None = None
) -> tuple[list[Tensor], int]:
    """Feed all sequences: each step decodes those past their prompt and prefills `chunk` tokens of the next one.

    Returns the logits [len(tokens), vocab] of each sequence, and how many steps held decode and prefill together.
    """
    kv = PagedKV(decoder, len(sequences), max(len(s.tokens) for s in sequences))
    num_mixed = 0
    while any(s.done < len(s.tokens) for s in sequences):
        rows = list(enumerate(sequences))
        decode = [(row, s, 1) for row, s in rows if not s.in_prompt and s.done < len(s.tokens)]
        prefill = [(row, s, min(chunk, s.num_prompt - s.done)) for row, s in rows if s.in_prompt][:1]
        num_mixed += bool(decode and prefill)
        step = decode + prefill
        batch = make_batch(step, kv)
        hidden = decoder.forward(batch, kv, lora)
        logits = decoder.logits(hidden[batch.logits_rows], lora, batch.lora_logits)
        start = 0
        for _, sequence, count in step:
            sequence.logits.append(logits[start : start + count])
            sequence.done += count
            start += count
    return [torch.cat(s.logits) for s in sequences], num_mixed
