"""What to verify with, and the prompts that are used."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from loraserve.config import Device, Dtype, Kernels, LoraConfig
from loraserve.errors import ConfigError
from loraserve.inspection import Base
from loraserve.lora.spec import AdapterSpec
from loraserve.lora.tables import Table
from loraserve.server.text import load_tokenizer

DEFAULT_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    'Question: what is 17 + 25?\nAnswer: 42\n\nQuestion: name three colours, as JSON.\nAnswer: {"colours": [',
    "A",
)
_RANDOM_LENGTHS = (7, 40)  # prompts of arbitrary tokens, to reach all of the vocabulary
_OWN_TOKENS = 24  # of those that an adapter has embeddings for, in one more prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What to serve, and how. `against`: a folder that PEFT reads instead of the one that is served."""

    model: str | None = None
    revision: str | None = None
    prompts: tuple[str, ...] | None = None  # None: built-in texts and random tokens
    max_tokens: int = 16
    dtype: Dtype = "float32"
    device: Device = "auto"
    kernels: Kernels = "auto"
    max_lora_rank: int = LoraConfig().max_lora_rank
    against: Path | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"--max-tokens must be at least 1, got {self.max_tokens}")
        if self.prompts is not None and not self.prompts:
            raise ConfigError("there are no prompts to compare")


def within_base(prompt: list[int], vocab_size: int) -> list[int]:
    """What the base is asked in place of a prompt with tokens that only the adapter has."""
    return [token % vocab_size for token in prompt]


def token_prompts(base: Base, options: VerifyOptions, spec: AdapterSpec) -> list[list[int]]:
    """The prompts as token ids; an activated LoRA's invocation comes into the built-in ones of arbitrary tokens.

    Raises `ConfigError` for one that has none, or without a tokenizer for given texts.
    """
    vocab = base.shape.vocab_size
    texts = DEFAULT_TEXTS if options.prompts is None else options.prompts
    try:
        tokenizer = load_tokenizer(base.path)
        prompts = [list(tokenizer(text)["input_ids"]) for text in texts]
    except Exception as error:  # whatever transformers finds missing
        if options.prompts is not None:
            raise ConfigError("the base model's folder has no tokenizer that can be read, so no prompts") from error
        prompts = []
    if options.prompts is None:
        draw = random.Random(0)
        for length in _RANDOM_LENGTHS:
            tokens = [draw.randrange(vocab) for _ in range(length)]
            prompts.append([*tokens[: length // 2], *spec.invocation, *tokens[length // 2 :]])
        own = sorted(
            {t for rows in spec.replaced if rows.table is Table.EMBED for part in rows.parts for t in part.ids}
        )
        # From the last on, so that tokens beyond the base's vocabulary are among them.
        prompts += [own[:: -max(1, len(own) // _OWN_TOKENS)][:_OWN_TOKENS]] if own else []
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {index + 1} has no tokens")
        if max(prompt) >= vocab + spec.num_new_tokens:
            raise ConfigError(f"prompt {index + 1} has token {max(prompt)}, the model's vocabulary has {vocab}")
    return prompts
