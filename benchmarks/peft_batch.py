"""What `benchmarks.compare` runs for transformers + PEFT: one static batch, base and mixed adapters, in tokens/s."""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main() -> None:
    """Read the job from the command line, print the figures as JSON."""
    warnings.filterwarnings("ignore")
    job: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    ids = torch.randint(1000, base.config.vocab_size, (job["streams"], job["prompt"]))
    count = job["output"]

    def speed(model: Any, **extra: Any) -> float:
        settings: dict[str, Any] = {
            "do_sample": False,
            "min_new_tokens": count,
            "max_new_tokens": count,
            "pad_token_id": 0,
        }
        with torch.no_grad():
            started = time.perf_counter()
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings, **extra)
            return ids.shape[0] * count / (time.perf_counter() - started)

    speed(base)  # warms up
    found = {"base": speed(base)}
    names = [f"a{index}" for index in range(len(job["adapters"]))]
    model = PeftModel.from_pretrained(base, job["adapters"][0], adapter_name=names[0])
    for name, folder in zip(names[1:], job["adapters"][1:], strict=True):
        model.load_adapter(folder, adapter_name=name)
    model.eval()
    found["mixed"] = speed(model, adapter_names=[names[row % len(names)] for row in range(ids.shape[0])])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
