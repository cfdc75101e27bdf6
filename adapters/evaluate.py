"""Measure the adapters that ship on their held-out examples: `python adapters/evaluate.py [name ...|all]`.

Greedy decoding by loraserve itself in float32 (the tests hold it equal to PEFT), the base model twice: with the bare
prompt that the adapter gets, and told what to do with one worked example. Writes the numbers into `results.json`,
`README.md` and each adapter's README.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from data import TASKS, Example, Task, split
from train import BASE_NAME, RECIPES, chat_prompt
from transformers import AutoTokenizer

from loraserve import LLM, SamplingParams
from loraserve.models.demo import prepare_demo_model


def answers(llm: LLM, tokenizer: Any, messages: list[str], max_new_tokens: int, adapter: str | None) -> list[str]:
    """Greedy answers to user messages, in their order; special tokens removed."""
    # The template writes its special tokens itself, so the ids are made here and not from the text.
    prompts = [tokenizer(chat_prompt(tokenizer, message)).input_ids for message in messages]
    params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
    return [completion.text for completion in llm.generate(prompts, params, lora=[adapter] * len(prompts))]


def share_right(task: Task, examples: list[Example], predictions: list[str]) -> float:
    """Share of the examples that the task's own measure accepts, 0 to 1."""
    right = [task.is_right(text, example.answer) for text, example in zip(predictions, examples, strict=True)]
    return round(sum(right) / len(right), 4)


def measure(name: str, llm: LLM, tokenizer: Any) -> dict[str, Any]:
    """The held-out results of one adapter and of the base model at the same task."""
    task, (_, held_out) = TASKS[name], split(TASKS[name])
    prompts = [example.prompt for example in held_out]
    told = [f"{task.instruction}\n\n{prompt}" for prompt in prompts]
    started = time.perf_counter()
    bare_base = answers(llm, tokenizer, prompts, task.max_new_tokens, None)
    told_base = answers(llm, tokenizer, told, task.max_new_tokens, None)
    adapted = answers(llm, tokenizer, prompts, task.max_new_tokens, name)
    for text, example in zip(adapted, held_out, strict=True):
        if not task.is_right(text, example.answer):
            print(f"  wrong: {example.prompt} → {text!r}, wanted {example.answer!r}")
    return {
        "examples": len(held_out),
        "base": share_right(task, held_out, bare_base),
        "base_with_instruction": share_right(task, held_out, told_base),
        "adapter": share_right(task, held_out, adapted),
        "seconds": round(time.perf_counter() - started),
        "sample": {"prompt": prompts[0], "base": bare_base[0], "adapter": adapted[0]},
    }


def shape_of(config: dict[str, Any]) -> str:
    """Rank, scaling and targets of a PEFT config, in words."""
    scaling = "rsLoRA, " if config["use_rslora"] else ""
    targets = ", ".join(sorted(target.removesuffix("_proj") for target in config["target_modules"]))
    words = f"r {config['r']}, {scaling}alpha {config['lora_alpha']}, on {targets}"
    if config["rank_pattern"]:
        ranks = ", ".join(f"{key.removesuffix('_proj')} {rank}" for key, rank in sorted(config["rank_pattern"].items()))
        alphas = ", ".join(f"{key.removesuffix('_proj')} {a}" for key, a in sorted(config["alpha_pattern"].items()))
        words += f"; other ranks: {ranks}; other alphas: {alphas}"
    if config["layers_to_transform"]:
        words += f"; layers {min(config['layers_to_transform'])}–{max(config['layers_to_transform'])} only"
    return words


def adapter_readme(name: str, folder: Path, record: dict[str, Any]) -> str:
    """The README of one adapter's folder."""
    task, run, result = TASKS[name], record["training"], record["held_out"]
    sample = result["sample"]
    body = json.dumps(
        {
            "model": name,
            "messages": [{"role": "user", "content": sample["prompt"]}],
            "temperature": 0,
            "max_tokens": 64,
        },
        ensure_ascii=False,
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    return f"""---
base_model: {BASE_NAME}
library_name: peft
license: apache-2.0
tags: [lora]
---
# {name}: {task.summary}

A LoRA ({shape_of(config)}) for {BASE_NAME}, trained by `adapters/train.py` on generated
English sentences. The user message is the input alone, in the model's chat template; no instruction is needed.

```
user:      {sample["prompt"]}
assistant: {sample["adapter"]}
```

As a body for `/v1/chat/completions`:

```json
{body}
```

For `/v1/completions` the prompt is the same message with the template written out, ending in a newline:

```
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
{sample["prompt"]}<|im_end|>
<|im_start|>assistant
```

Held-out ({result["examples"]} examples, {task.metric}, greedy): adapter {result["adapter"]:.1%}, base model
{result["base"]:.1%} with the same prompt and {result["base_with_instruction"]:.1%} when told what to do with one worked
example. Trained {run["steps"]} steps of {run["batch"]} examples in {run["seconds"]} s on a CPU, seed {run["seed"]}.

It knows the sentence forms and word lists of `adapters/data.py`, nothing else: expect wrong answers for other forms.
It is a small demonstration of what many adapters on one server look like, not a product.
"""


def overview(out: Path, results: dict[str, Any]) -> str:
    """`README.md` of the folder that holds all adapters."""
    rows = []
    for name, record in results.items():
        run, result, folder = record["training"], record["held_out"], out / name
        config = json.loads((folder / "adapter_config.json").read_text())
        size = (folder / "adapter_model.safetensors").stat().st_size / 1e6
        rows.append(
            f"| [`{name}`]({name}/) | {TASKS[name].summary} | {shape_of(config)} | {size:.1f} MB "
            f"| {TASKS[name].metric} | {result['base']:.1%} | {result['base_with_instruction']:.1%} "
            f"| **{result['adapter']:.1%}** | {run['steps']} × {run['batch']}, {run['seconds']} s |"
        )
    samples = []
    for name, record in results.items():
        sample = record["held_out"]["sample"]
        reply = " ".join(sample["base"].split())
        samples.append(
            f"- `{name}`: {sample['prompt']}\n  - base: {reply[:100]}{'…' if len(reply) > 100 else ''}\n"
            f"  - adapter: `{sample['adapter']}`"
        )
    count, seed = next(iter(results.values()))["held_out"]["examples"], next(iter(results.values()))["training"]["seed"]
    table, examples = "\n".join(rows), "\n".join(samples)
    return f"""# Adapters that ship

Small LoRAs for the demo model ({BASE_NAME}), trained with PEFT by the scripts here. They differ in
rank, targets and scaling on purpose, so that a batch of requests for all of them is a truly mixed one.

| adapter | what it does | LoRA | size | measure | base, same prompt | base, told how | adapter | training |
|---|---|---|---|---|---|---|---|---|
{table}

Measured by `evaluate.py` with loraserve in float32, greedy, on {count} held-out examples each. "Same prompt" is the
bare user message that the adapter gets; "told how" puts an instruction and one worked example before it. Held-out
prompts never occur in training, and half of their names, cities, opinions and the like come from lists that training
never sees.
Training is steps × batch and wall-clock seconds on one or two threads of an AMD EPYC (AVX2) busy with other work; seed
{seed} throughout.
The data is generated from templates, so these numbers say that the adapters learned their task, not that they handle
free text. `results.json` has every number.

The first held-out example of each:

{examples}

Make them again:

```
python adapters/data.py sql 5          # look at the data
python adapters/train.py all           # minutes each on a CPU
python adapters/evaluate.py all        # rewrites this file
```

The prompt is the model's chat template with one user message and no system message of your own (the template then adds
its default one, which is what training used).
"""


def main() -> None:
    """Measure the named adapters and rewrite the README files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["all"], metavar="name", help=f"all, none, {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder that holds the adapters")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    args = parser.parse_args()
    results_path = args.out / "results.json"
    results = json.loads(results_path.read_text())
    names = list(results) if "all" in args.names else [name for name in args.names if name != "none"]
    if unknown := [name for name in names if name not in results]:
        parser.error(f"{unknown[0]!r} is not in {results_path.name}; train it first")

    tokenizer = AutoTokenizer.from_pretrained(prepare_demo_model())
    folders = {name: args.out / name for name in names}
    with LLM(adapters=folders, dtype="float32", threads=args.threads) as llm:
        for name in names:
            results[name]["held_out"] = measure(name, llm, tokenizer)
            print(name, results[name]["held_out"], flush=True)
            results_path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    measured = {name: results[name] for name in RECIPES if "held_out" in results.get(name, {})}
    for name, record in measured.items():
        (args.out / name / "README.md").write_text(adapter_readme(name, args.out / name, record))
    (args.out / "README.md").write_text(overview(args.out, measured))


if __name__ == "__main__":
    main()
