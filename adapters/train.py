"""Train the adapters that ship: `python adapters/train.py [name ...|all] [--out adapters]`.

Minutes per adapter on one CPU core. Only the answers are learned; the prompt is the chat template's, as a client of
`/v1/chat/completions` sends it with one user message.
"""

import argparse
import json
import math
import random
import shutil
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from data import SEED, TASKS, Example, split
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraserve.models.demo import prepare_demo_model

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is trained; `lora` goes to `LoraConfig`."""

    lora: dict[str, Any]
    steps: int
    learning_rate: float
    batch_size: int = 4
    dtype: torch.dtype = torch.bfloat16
    seed: int = field(default=SEED)


RECIPES = {
    "person-json": Recipe(
        {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP}, steps=260, learning_rate=1.5e-3
    ),
    "sql": Recipe(
        {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ATTENTION}, steps=150, learning_rate=1.5e-3
    ),
    "sentiment": Recipe(
        {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        steps=48,
        learning_rate=3e-3,
        batch_size=8,
        dtype=torch.float32,
    ),
    "dates": Recipe({"r": 8, "lora_alpha": 16, "target_modules": MLP}, steps=40, learning_rate=2e-3),
    "pirate": Recipe(
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
            "layers_to_transform": list(range(8, 28)),
            "layers_pattern": "layers",
            "rank_pattern": {"down_proj": 12, "o_proj": 3},
            "alpha_pattern": {"down_proj": 12},
        },
        steps=260,
        learning_rate=2e-3,
    ),
}


class Batches:
    """Endless padded batches of one task; `prefix` is what the chat template puts before every user message."""

    def __init__(self, tokenizer: Any, examples: list[Example], recipe: Recipe) -> None:
        self.pad_id: int = tokenizer.pad_token_id
        self.batch_size = recipe.batch_size
        self.random = random.Random(recipe.seed)
        marker = chat_prompt(tokenizer, "\0")
        head = marker[: marker.index("\0")]
        self.prefix: list[int] = tokenizer(head).input_ids
        self.rows: list[tuple[list[int], int]] = []
        for prompt, answer in examples:
            asked: list[int] = tokenizer(chat_prompt(tokenizer, prompt)).input_ids
            if asked[: len(self.prefix)] != self.prefix:
                raise ValueError(f"the template's head is tokenized differently before {prompt!r}")
            asked = asked[len(self.prefix) :]
            self.rows.append((asked + tokenizer(f"{answer}<|im_end|>").input_ids, len(asked)))

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids, attention mask, positions whose next token is learned), each [batch, longest row]."""
        # Rows of like length, so that little of the work is padding: one of four slices of a sorted sample.
        sample = sorted(self.random.sample(self.rows, 4 * self.batch_size), key=lambda row: len(row[0]))
        start = self.batch_size * self.random.randrange(4)
        rows = sample[start : start + self.batch_size]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), width), self.pad_id)
        mask, learned = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for row, (tokens, prompt_len) in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
            learned[row, prompt_len - 1 : len(tokens) - 1] = True
        return ids, mask, learned


def chat_prompt(tokenizer: Any, message: str) -> str:
    """The text that a chat request with this one user message becomes."""
    messages = [{"role": "user", "content": message}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def loss_of(model: PeftModel, batches: Batches) -> torch.Tensor:
    """Mean cross-entropy of one batch's answer tokens."""
    ids, mask, learned = batches.draw()
    causal: Any = model.get_base_model()
    # The head is the same in each row: run it once and let every row attend to its keys and values. The gradient
    # flows back through them, so this is the plain loss at half its cost.
    head = causal.model(torch.tensor([batches.prefix]), use_cache=True)
    head.past_key_values.batch_repeat_interleave(len(ids))
    mask = torch.cat([mask.new_ones(len(ids), len(batches.prefix)), mask], dim=1)
    states = causal.model(ids, attention_mask=mask, past_key_values=head.past_key_values).last_hidden_state
    targets = ids.roll(-1, dims=1)[learned]
    return torch.nn.functional.cross_entropy(causal.lm_head(states[learned]), targets)


def train(name: str, out: Path, base_path: Path) -> dict[str, Any]:
    """Train one adapter into `out/name`; returns the record of the run."""
    recipe, (examples, _) = RECIPES[name], split(TASKS[name])
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(base_path)
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    base.name_or_path = base.config._name_or_path = BASE_NAME
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **recipe.lora))
    batches = Batches(tokenizer, examples, recipe)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: pace(step, recipe.steps))

    started, recent = time.perf_counter(), 0.0
    for step in range(1, recipe.steps + 1):
        loss = loss_of(model, batches)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        recent = loss.item() if step == 1 else 0.8 * recent + 0.2 * loss.item()
        if step % 10 == 0 or step == 1:
            print(f"{name} {step}/{recipe.steps} loss {recent:.4f} {time.perf_counter() - started:.0f}s", flush=True)
    save(model, out / name, recipe.dtype)
    return {
        "seconds": round(time.perf_counter() - started),
        "steps": recipe.steps,
        "batch": recipe.batch_size,
        "learning_rate": recipe.learning_rate,
        "seed": recipe.seed,
        "loss": round(recent, 4),
    }


def pace(step: int, steps: int) -> float:
    """Share of the learning rate: six steps of warm-up, then a cosine to zero."""
    return min(1.0, (step + 1) / 6) * 0.5 * (1 + math.cos(math.pi * step / steps))


def save(model: PeftModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the PEFT folder: config and weights, nothing that depends on this machine."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    config: Any = model.peft_config["default"]
    config.base_model_name_or_path = BASE_NAME
    config.inference_mode = True
    # PEFT keeps a set here, which it would write in another order each time.
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {key: tensor.detach().to(dtype).contiguous() for key, tensor in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)


def main() -> None:
    """Train the named adapters and keep the record of each run in `results.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["all"], metavar="name", help=f"all, {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder that gets one folder each")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    names = list(RECIPES) if "all" in args.names else args.names
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"unknown adapter {unknown[0]!r}; there are: {', '.join(RECIPES)}")

    # Argument names that transformers renames in later releases; the old ones work in every release we allow.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(args.threads)
    base_path = prepare_demo_model()
    results_path = args.out / "results.json"
    for name in names:
        record = train(name, args.out, base_path)
        results = json.loads(results_path.read_text()) if results_path.exists() else {}
        results[name] = {"training": record}
        results_path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
