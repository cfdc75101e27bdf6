"""The demo model with the adapters that ship: 24 requests together, each answered as PEFT answers it alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, engine_config
from tiny_models import Oracle, quiet
from transformers import AutoTokenizer

from loraserve.models.demo import prepare_demo_model

SHIPPED = Path(__file__).resolve().parents[2] / "adapters"
NAMES = sorted(folder.name for folder in SHIPPED.iterdir() if (folder / "adapter_config.json").is_file())
COUNT = 10
MESSAGES = [
    "Ada Lopez, 41, is a nurse in Oslo.",
    "How many orders did Anna place?",
    "The soup was cold and the waiter rude.",
    "Hello, where is the ship?",
]


@pytest.fixture(scope="module")
def model() -> Path:
    with quiet():
        return prepare_demo_model()


def test_at_least_four_different_adapters_ship() -> None:
    configs = [json.loads((SHIPPED / name / "adapter_config.json").read_text()) for name in NAMES]
    assert len(NAMES) >= 4
    assert len({(config["r"], tuple(sorted(config["target_modules"]))) for config in configs}) >= 4


def test_24_requests_together_equal_peft_alone(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in MESSAGES
    ]
    names = [None, *NAMES]
    jobs = [(names[i % len(names)], prompts[i % len(prompts)]) for i in range(24)]
    config = engine_config(model, cache={"kv_memory": 128 * 2**20}, lora={"lora_memory": 128 * 2**20})
    with Driver(config) as driver:
        for name in NAMES:
            driver.load(name, SHIPPED / name)
        ids = [driver.add(prompt, name, max_tokens=COUNT) for name, prompt in jobs]
        answers = driver.finish(*ids)
        stats = driver.stats
        driver.assert_idle()
    assert max(stats.step_adapters) >= 3
    assert stats.rows_total["base/decode"] > 0
    # One PEFT model at a time: each takes half a gigabyte.
    for name in names:
        oracle = Oracle(model)
        folder = None if name is None else SHIPPED / name
        expected = {}
        for (job, prompt), tokens in zip(jobs, answers, strict=True):
            if job != name:
                continue
            key = tuple(prompt)
            if key not in expected:
                expected[key] = oracle.greedy(folder, prompt, COUNT)
            _assert_same(oracle, folder, prompt, tokens, expected[key])


def _assert_same(oracle: Oracle, folder: Path | None, prompt: list[int], got: list[int], wanted: list[int]) -> None:
    """Equal tokens; or at the first difference a tie within fp32 rounding, after which the texts may part."""
    for at, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if ours != theirs:
            logits = oracle.logits(folder, [*prompt, *wanted[:at]])[-1]
            gap = float(logits[theirs] - logits[ours])
            assert gap < 1e-3, f"{folder and folder.name}: token {at} is {ours}, PEFT's {theirs} leads by {gap}"
            return
    assert torch.tensor(got).equal(torch.tensor(wanted))
