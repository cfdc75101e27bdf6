"""Adapters inside the decoder against PEFT: every target, mixed with each other and with the base in one forward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import (
    TOLERANCE,
    VOCAB,
    PagedKV,
    Sample,
    backends,
    hf_logits,
    load,
    make_batch,
    random_tokens,
    save_random_model,
    serve,
)
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from test_models_families import CASES, SMALL
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from loraserve.kernels.metadata import Kind, LoraSegments, LoraTables, LoraTarget
from loraserve.kernels.reference import ReferenceOps
from loraserve.models.config import ModelShape, load_shape

BACKENDS = backends()
NUM_SLOTS = 4
PAGE_ROWS = 3
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Adapter → slot, rank and targets; "some" leaves parts of the fused linears alone.
SLOTS = {"all": 2, "some": 0, "ends": 3}
RANKS = {"all": 4, "some": 7, "ends": 2}
TARGETS = {
    "all": [*LINEARS, "embed_tokens", "lm_head"],
    "some": ["k_proj", "up_proj"],
    "ends": ["embed_tokens", "lm_head"],
}
MODELS: dict[str, Any] = {
    "llama-tied": LlamaConfig(**SMALL | {"tie_word_embeddings": True}),
    "llama-untied": CASES["llama-biases"],
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL | {"tie_word_embeddings": True}, head_dim=16),
}


def adapt(model: Any) -> Any:
    """`model` with all adapters of `TARGETS`, random A and B, one of them scaled by rank-stabilised LoRA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT remarks that tied weights are targeted
        adapted: Any = None
        for name, targets in TARGETS.items():
            config = LoraConfig(r=RANKS[name], lora_alpha=6, target_modules=targets, use_rslora=name == "some")
            if adapted is None:
                adapted = get_peft_model(model, config, adapter_name=name)
            else:
                adapted.add_adapter(name, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.15)
    return adapted.eval()


@dataclass
class Pool:
    """Hand-made tables: each A and B row page somewhere in one storage, pages in no order, NaN between them."""

    num_elements: int = 3
    pieces: list[tuple[int, Tensor]] = field(default_factory=list)

    def add(self, rows: Tensor) -> list[int]:
        """Offsets of the pages of `rows` [rank, width]."""
        offsets = []
        for page in reversed(rows.split(PAGE_ROWS)):
            offsets.append(self.num_elements)
            self.pieces.append((self.num_elements, page.flatten()))
            self.num_elements += PAGE_ROWS * rows.shape[1] + 5
        return offsets[::-1]

    def storage(self) -> Tensor:
        storage = torch.full((self.num_elements,), float("nan"))
        for offset, values in self.pieces:
            storage[offset : offset + len(values)] = values
        return storage


def tables_of(adapted: Any, shape: ModelShape) -> LoraTables:
    modules = dict(adapted.base_model.model.named_modules())
    pool = Pool()
    tables = LoraTables()
    for target in shape.lora_targets():
        max_pages = -(-max(RANKS.values()) // PAGE_ROWS)
        pages = {side: torch.zeros(target.num_layers, NUM_SLOTS, max_pages, dtype=torch.int64) for side in "ab"}
        ranks = torch.zeros(target.num_layers, NUM_SLOTS, dtype=torch.int32)
        for layer in range(target.num_layers):
            module = modules[shape.module_path(target.kind, layer)]
            for name, slot in SLOTS.items():
                if name not in getattr(module, "scaling", {}):
                    continue
                if target.kind is Kind.EMBED:
                    a, b = module.lora_embedding_A[name], module.lora_embedding_B[name]
                else:
                    a, b = module.lora_A[name].weight, module.lora_B[name].weight
                sides = {"a": a.detach(), "b": (b.detach() * module.scaling[name]).T}
                for side, rows in sides.items():
                    offsets = pool.add(rows.contiguous())
                    pages[side][layer, slot, : len(offsets)] = torch.tensor(offsets)
                ranks[layer, slot] = RANKS[name]
        tables.targets[target.kind] = LoraTarget(
            torch.empty(0),
            pages["a"],
            pages["b"],
            ranks,
            PAGE_ROWS,
            target.in_features,
            target.out_features,
            target.out_offset,
        )
    storage = pool.storage()
    for entry in tables.targets.values():
        entry.storage = storage
    return tables


@dataclass
class Adapted:
    folder: Path
    model: Any
    tables: LoraTables
    known: dict[Any, Tensor] = field(default_factory=dict)

    def logits(self, tokens: list[int], num_prompt: int, *names: str, scale: float = 1.0) -> Tensor:
        """What PEFT computes with these adapters, all scaled."""
        key = (tuple(tokens), num_prompt, names, scale)
        if key not in self.known:
            self.known[key] = self._compute(tokens, num_prompt, names, scale)
        return self.known[key]

    def _compute(self, tokens: list[int], num_prompt: int, names: tuple[str, ...], scale: float) -> Tensor:
        if not names:
            with self.model.disable_adapter():
                return hf_logits(self.model, tokens, num_prompt)
        self.model.base_model.set_adapter(list(names))
        # PEFT's own `scale_layer` leaves embedding adapters unscaled.
        scalings = [m.scaling for m in self.model.modules() if isinstance(m, LoraLayer)]
        kept = [dict(scaling) for scaling in scalings]
        try:
            for scaling in scalings:
                scaling.update({name: value * scale for name, value in scaling.items()})
            return hf_logits(self.model, tokens, num_prompt)
        finally:
            for scaling, before in zip(scalings, kept, strict=True):
                scaling.update(before)


@pytest.fixture(scope="module", params=MODELS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp(request.param)
    model = adapt(save_random_model(folder, MODELS[request.param]))
    return Adapted(folder, model, tables_of(model, load_shape(folder)))


LENGTHS = {"all": (17, 9), "some": (12, 5), "ends": (15, 11), "base": (14, 8)}


@pytest.mark.parametrize("chunk", [5, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_adapters_equal_peft(adapted: Adapted, backend: str, chunk: int) -> None:
    decoder = load(adapted.folder, BACKENDS[backend])
    samples, expected = [], []
    base = adapted.logits(random_tokens(17, 0), 9)
    for i, (name, (total, prompt)) in enumerate(LENGTHS.items()):
        tokens = random_tokens(total, i)
        names = [name] if name in SLOTS else []
        samples.append(Sample(tokens, prompt, tuple((SLOTS[n], 1.0) for n in names)))
        expected.append(adapted.logits(tokens, prompt, *names))
    assert float((base - expected[0]).abs().max()) > 1, "the adapter must matter"
    got, num_mixed = serve(decoder, samples, chunk, adapted.tables)
    assert num_mixed > 0
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blend_adds_scaled_deltas(adapted: Adapted, backend: str) -> None:
    decoder = load(adapted.folder, BACKENDS[backend])
    tokens = random_tokens(13, 9)
    sample = Sample(tokens, 8, ((SLOTS["all"], 0.5), (SLOTS["some"], 0.5)))
    got, _ = serve(decoder, [sample], 6, adapted.tables)
    expected = adapted.logits(tokens, 8, "all", "some", scale=0.5)
    torch.testing.assert_close(got[0], expected, atol=TOLERANCE, rtol=0)


# -- no adapters, no cost ---------------------------------------------------------------------------------------------


class BaseOnlyOps(ReferenceOps):
    """A backend that cannot apply adapters."""

    def lora_apply(self, *args: Any) -> None:
        raise AssertionError("lora_apply without an adapter")

    def lora_embed(self, *args: Any) -> None:
        raise AssertionError("lora_embed without an adapter")


def test_steps_without_adapters_run_no_lora_operator(adapted: Adapted) -> None:
    decoder = load(adapted.folder, BaseOnlyOps())
    tokens = random_tokens(9, 1)
    got, _ = serve(decoder, [Sample(tokens, 9)], 256, adapted.tables)
    torch.testing.assert_close(got[0], adapted.logits(tokens, 9), atol=TOLERANCE, rtol=0)


def test_empty_segments_run_no_lora_operator(adapted: Adapted) -> None:
    decoder = load(adapted.folder, BaseOnlyOps())
    nothing = torch.zeros(0, dtype=torch.int32)
    empty = LoraSegments(nothing, torch.zeros(0), nothing, torch.zeros(1, dtype=torch.int32), 0)
    hidden = torch.randn(2, decoder.shape.hidden_size)
    assert decoder.logits(hidden, adapted.tables, empty).shape == (2, VOCAB)


def test_adapters_without_tables_are_an_error(adapted: Adapted) -> None:
    decoder = load(adapted.folder, ReferenceOps())
    kv = PagedKV(decoder, 1, 4)
    batch = make_batch([(0, Sample([1, 2], 2, ((0, 1.0),)), 2)], kv)
    with pytest.raises(ValueError, match="no adapter tables"):
        decoder.forward(batch, kv, None)
    with pytest.raises(ValueError, match="no adapter tables"):
        decoder.logits(torch.zeros(2, decoder.shape.hidden_size), None, batch.lora_logits)
