"""Adapters of PEFT's variants for tiny models, and the one way in which they are compared with PEFT."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_driver import Driver, engine_config
from peft import LoraConfig, get_peft_model
from tiny_models import NEW_TOKENS_MARK, Oracle, make_adapter, quiet
from transformers import AutoModelForCausalLM

COUNT = 8  # tokens that are generated
VOCAB = 300  # of the tiny models
PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}

PLAIN_FUSED = PLAIN | {"target_modules": ["qkv_proj", "down_proj"]}


INVOCATION = [41, 42, 43]


def make_variant(
    model_folder: Path, folder: Path, seed: int, *, new_tokens: int = 0, save_embeddings: bool = False, **lora: Any
) -> Path:
    """Save a PEFT adapter whose every trained tensor is far from where it starts.

    `new_tokens` are added to the vocabulary before; their rows are random whether they are trained or not.
    """
    torch.manual_seed(seed)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        if new_tokens:
            vocab = model.config.vocab_size
            model.resize_token_embeddings(vocab + new_tokens)
            with torch.no_grad():
                for matrix in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
                    matrix[vocab:] = torch.randn_like(matrix[vocab:]) * 0.5
        peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if not parameter.requires_grad:
                    continue
                if "magnitude" in name:
                    parameter.mul_(0.5 + torch.rand_like(parameter))
                elif "lora_" in name and "bias" not in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        peft_model.save_pretrained(folder, save_embedding_layers=save_embeddings)
    if new_tokens:
        (folder / NEW_TOKENS_MARK).touch()
    config_file = folder / "adapter_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"base_model_name_or_path": "tiny"}))
    return folder


def make_prompts(seed: int = 5) -> list[list[int]]:
    """Prompts of several lengths, two of which share a prefix longer than a page."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 300) for _ in range(20)]
    lengths = (1, 5, 23)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]
    return [*prompts, shared + prompts[1], shared + prompts[0]]


def within_vocabulary(prompt: list[int]) -> list[int]:
    """The prompt without the tokens that only some adapter has."""
    return [token if token < VOCAB else 41 for token in prompt]


def check_request(driver: Driver, request_id: str, oracle: Oracle, folder: Path | None, prompt: Sequence[int]) -> None:
    """A finished greedy request equals PEFT: every token, and every row of logits that was computed."""
    tokens = driver.answers[request_id].tokens
    assert tokens == oracle.greedy(folder, prompt, len(tokens)), request_id
    # The prompt's rows, then token by token, as `greedy` feeds them.
    expected = oracle.stepwise(folder, prompt, tokens)
    for position, row in driver.logits[request_id].items():
        difference = (row - expected[position]).abs().max().item()
        assert difference < 1e-3, f"position {position} of {len(prompt)} + {len(tokens)}: {difference}"


def check_variant(
    model: Path,
    variant: Path,
    root: Path,
    kernels: str,
    plain: dict[str, Any] = PLAIN,
    oracle: Oracle | None = None,
    prompts: list[list[int]] | None = None,
    served: Path | None = None,
) -> None:
    """Alone, in a mixed batch beside the base and a plain adapter, and after eviction and reload: all equal PEFT."""
    oracle = oracle or Oracle(model)
    served = served or model  # the same weights in another container
    plain_folder = root / "plain"
    if not plain_folder.exists():
        make_adapter(model, plain_folder, 77, **plain)
    prompts = prompts or make_prompts()
    # Changed enough for a comparison to mean something.
    known = [within_vocabulary(prompt) for prompt in prompts]
    assert any(oracle.greedy(variant, p, COUNT) != oracle.greedy(None, p, COUNT) for p in known)
    folders = {"variant": variant, "plain": plain_folder, None: None}
    with Driver(engine_config(served, kernels=kernels, scheduler={"prefill_chunk": 16})) as driver:
        driver.load("variant", variant)
        driver.load("plain", plain_folder)

        def ask(name: str | None, prompt: list[int]) -> str:
            return driver.add(prompt, name, max_tokens=COUNT)

        for prompt in prompts:
            alone = ask("variant", prompt)
            driver.finish(alone)
            check_request(driver, alone, oracle, variant, prompt)
        # Tokens that the variant adds are its own.
        asked = [(name, p if name == "variant" else within_vocabulary(p)) for p in prompts for name in folders]
        mixed = [(name, prompt, ask(name, prompt)) for name, prompt in asked]
        driver.finish()
        for name, prompt, request_id in mixed:
            check_request(driver, request_id, oracle, folders[name], prompt)
        driver.drop("variant")
        driver.drop("plain")
        assert driver.stats.lora_bytes_used == 0
        # Another adapter takes the slot and the pages before the variant comes back elsewhere.
        driver.load("plain", plain_folder)
        driver.load("variant", variant)
        again = [(name, prompt, ask(name, prompt)) for name, prompt in asked[len(folders) * 2 : len(folders) * 3]]
        driver.finish()
        for name, prompt, request_id in again:
            check_request(driver, request_id, oracle, folders[name], prompt)
        driver.assert_idle()


class ActivatedOracle(Oracle):
    """PEFT with an aLoRA adapter: it must be told where the adapter begins, or it forgets after the prompt."""

    def stepwise(self, adapter: Path | None, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        starts = [i for i in range(len(prompt)) if list(prompt[i : i + 3]) == INVOCATION]
        tokens = [*prompt, *output[:-1]]
        if adapter is None or "alora" not in adapter.name:
            return super().stepwise(adapter, prompt, output)
        offset = len(tokens) - starts[-1] if starts else None
        with torch.no_grad():
            return self._model(adapter)(torch.tensor([tokens]), alora_offsets=[offset]).logits[0]

    def greedy(self, adapter: Path | None, prompt: Sequence[int], count: int) -> list[int]:
        if adapter is None or "alora" not in adapter.name:
            return super().greedy(adapter, prompt, count)
        output: list[int] = []
        for _ in range(count):
            output.append(int(self.stepwise(adapter, prompt, [*output, 0])[-1].argmax()))
        return output


def invoking_prompts() -> list[list[int]]:
    """Invoked at the start, in the middle, at the end, twice, cut off, never; some begin alike for more than a page."""
    long = make_prompts()[2]
    return [
        [*INVOCATION, 9, 8],
        [*long, *INVOCATION, 17],
        [*long, *INVOCATION, 17, *long, *INVOCATION],
        [*long, *INVOCATION, 17, *long, 5],
        [*long, *INVOCATION[:2]],
        [*long, *INVOCATION[:2], 44],
    ]
