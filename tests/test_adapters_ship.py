"""The adapters that ship: each is a clean PEFT folder, loads, and answers as its README says."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraserve.models.demo import prepare_demo_model

ROOT = Path(__file__).parent.parent / "adapters"
FOLDERS = sorted(path.parent for path in ROOT.glob("*/adapter_config.json"))
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
RESULTS: dict[str, Any] = json.loads((ROOT / "results.json").read_text(encoding="utf-8"))

each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def load_data() -> ModuleType:
    """`adapters/data.py`, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("adapters_data", ROOT / "data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DATA = load_data()
each_task = pytest.mark.parametrize("task", DATA.TASKS.values(), ids=DATA.TASKS)


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in `$LORASERVE_CACHE`, else in a folder that all test files of this session share."""
    return prepare_demo_model(Path(os.environ.get("LORASERVE_CACHE") or tmp_path_factory.getbasetemp() / "demo-cache"))


@pytest.fixture(scope="module")
def tokenizer(base_path: Path) -> Any:
    """The demo model's tokenizer."""
    return AutoTokenizer.from_pretrained(base_path)


@pytest.fixture(scope="module")
def model(base_path: Path) -> PeftModel:
    """The demo model in fp32 with every adapter that ships."""
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    peft_model = PeftModel.from_pretrained(base, FOLDERS[0], adapter_name=FOLDERS[0].name)
    for folder in FOLDERS[1:]:
        peft_model.load_adapter(folder, adapter_name=folder.name)
    return peft_model


def test_there_are_enough_and_they_differ() -> None:
    assert len(FOLDERS) >= 5
    assert {folder.name for folder in FOLDERS} == set(RESULTS) == set(DATA.TASKS)
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in FOLDERS]
    assert len({config["r"] for config in configs}) >= 3
    assert len({frozenset(config["target_modules"]) for config in configs}) == len(configs)
    assert any(config["use_rslora"] for config in configs)
    assert any(config["rank_pattern"] and config["alpha_pattern"] for config in configs)
    assert any(config["layers_to_transform"] for config in configs)


@each_folder
def test_folder_is_small_and_complete(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6_000_000
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
            assert bool(file.get_tensor(key).isfinite().all()), key


@each_folder
def test_nothing_depends_on_the_machine_it_was_trained_on(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE_NAME
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert not config["use_dora"]
    assert config["modules_to_save"] is None
    for path in (folder / "adapter_config.json", folder / "README.md", ROOT / "README.md", ROOT / "results.json"):
        text = path.read_text(encoding="utf-8")
        assert not any(place in text for place in ("/home/", "/root", "/tmp", "/work", str(Path.home()))), path


@each_folder
def test_every_tensor_lands_in_the_model(folder: Path, model: PeftModel) -> None:
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        stored = {key.removesuffix(".weight"): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    own = {
        name.replace(f".{folder.name}.weight", ""): weight
        for name, weight in model.named_parameters()
        if f".{folder.name}." in name
    }
    assert set(own) == set(stored)
    assert all(torch.equal(own[name], weight.float()) for name, weight in stored.items())


@each_folder
def test_it_answers_as_its_readme_says(folder: Path, model: PeftModel, tokenizer: Any) -> None:
    sample = RESULTS[folder.name]["held_out"]["sample"]
    assert f"assistant: {sample['adapter']}" in (folder / "README.md").read_text(encoding="utf-8")
    messages = [{"role": "user", "content": sample["prompt"]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model.set_adapter(folder.name)
    out = model.generate(**prompt, do_sample=False, max_new_tokens=64)
    assert tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]) == f"{sample['adapter']}<|im_end|>"


@each_folder
def test_it_is_clearly_better_than_the_base_model(folder: Path) -> None:
    result = RESULTS[folder.name]["held_out"]
    assert result["examples"] >= 100
    # Whole answers must match; a record or a sentence has more ways to miss one word than a label.
    assert result["adapter"] >= 0.7
    assert result["adapter"] >= max(result["base"], result["base_with_instruction"]) + 0.5


@each_task
def test_splits_are_disjoint_and_well_formed(task: Any) -> None:
    train, held_out = DATA.split(task)
    assert len(held_out) >= 100
    assert len(train) >= 1000
    prompts = [example.prompt for example in train + held_out]
    assert len(set(prompts)) == len(prompts)
    assert all(example.prompt == example.prompt.strip() and example.answer.isprintable() for example in train)
    assert all(task.is_right(example.answer, example.answer) for example in held_out)
    assert not any(task.is_right("", example.answer) for example in held_out)


def test_held_out_draws_words_that_training_never_sees() -> None:
    train, held_out = DATA.split(DATA.TASKS["person-json"])
    assert not any(city in example.prompt for city in DATA.CITY_UNSEEN.split("|") for example in train)
    unseen = sum(any(city in example.prompt for city in DATA.CITY_UNSEEN.split("|")) for example in held_out)
    assert math.isclose(unseen / len(held_out), 0.5, abs_tol=0.2)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_data_is_the_same_in_every_process(hash_seed: str) -> None:
    for name, task in DATA.TASKS.items():
        done = subprocess.run(
            [sys.executable, str(ROOT / "data.py"), name, "20"],
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONUTF8": "1"},
        )
        expected = [f"{example.prompt} → {example.answer}" for example in DATA.split(task)[0][:20]]
        assert done.stdout.decode("utf-8").splitlines() == expected
