"""Tiny random base models with a real tokenizer, PEFT adapters for them, and PEFT itself as the oracle."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT and transformers warn of much that is wanted here, such as an adapter on a tied embedding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_tokenizer(folder: Path, vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text round-trips. Saved into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and then rests"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def make_model(folder: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Save a small random model (fp32) and its tokenizer. Weights are wide, so that logits are far from ties."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    config_class = _CONFIGS[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_class(**(shape | overrides)), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # Qwen2's q, k and v, and whatever the overrides turn on
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def make_adapter(model_folder: Path, folder: Path, seed: int, *, std: float = 0.2, **lora: Any) -> Path:
    """Save a PEFT adapter with random, non-zero A and B."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    with quiet():
        peft_model.save_pretrained(folder)
    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["base_model_name_or_path"] = "tiny"
    config_file.write_text(json.dumps(config))
    return folder


NEW_TOKENS_MARK = "new_tokens"


def has_new_tokens(adapter: Path) -> bool:
    """Whether an adapter was made on a model with a resized vocabulary."""
    return (adapter / NEW_TOKENS_MARK).exists()


@dataclass
class Oracle:
    """Greedy continuations of Hugging Face + PEFT in fp32, one sequence at a time."""

    model_folder: Path
    new_tokens: int = 0  # what the adapters' training added to the vocabulary
    _base: Any = None
    _adapted: dict[Path, Any] = field(default_factory=dict)

    def _model(self, adapter: Path | None) -> Any:
        if adapter is None:
            if self._base is None:
                self._base = AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=torch.float32).eval()
            return self._base
        if adapter not in self._adapted:
            with quiet():
                base = AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=torch.float32)
                if self.new_tokens and has_new_tokens(adapter):
                    base.resize_token_embeddings(base.config.vocab_size + self.new_tokens)
                self._adapted[adapter] = PeftModel.from_pretrained(base, adapter).eval()
        return self._adapted[adapter]

    def logits(self, adapter: Path | None, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), vocab]."""
        with torch.no_grad():
            return self._model(adapter)(torch.tensor([list(tokens)])).logits[0]

    def stepwise(self, adapter: Path | None, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """[len(prompt) + len(output) - 1, vocab]: the prompt's rows, then one row per token that is fed back."""
        model = self._model(adapter)
        with torch.no_grad():
            result = model(torch.tensor([list(prompt)]), use_cache=True)
            rows = [result.logits[0]]
            for token in output[:-1]:
                result = model(torch.tensor([[token]]), past_key_values=result.past_key_values, use_cache=True)
                rows.append(result.logits[0])
        return torch.cat(rows)

    def greedy(self, adapter: Path | None, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` most likely next tokens, EOS ignored."""
        tokens, past = list(prompt), None
        output: list[int] = []
        model = self._model(adapter)
        with torch.no_grad():
            step = torch.tensor([tokens])
            for _ in range(count):
                result = model(step, past_key_values=past, use_cache=True)
                past = result.past_key_values
                output.append(int(result.logits[0, -1].argmax()))
                step = torch.tensor([[output[-1]]])
        return output
