"""Saved modules, trained token rows and added tokens: served as PEFT computes them, beside everything else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_driver import Driver, engine_config
from safetensors.torch import load_file, save_file
from tiny_models import ATTENTION, MLP, Oracle, make_adapter, make_model
from typer.testing import CliRunner
from variants import PLAIN, PLAIN_FUSED, VOCAB, check_request, check_variant, make_prompts, make_variant

from loraserve import LLM, SamplingParams
from loraserve.cli import make_app
from loraserve.errors import AdapterNotFound, AdapterRefused, InvalidRequest, InvalidToken
from loraserve.verify import VerifyOptions, verify_adapter

NEW = 5  # tokens that are added to the vocabulary
ADDED = list(range(VOCAB, VOCAB + NEW))
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "llama-tied": {"family": "llama"},
    "mistral": {"family": "mistral", "tie_word_embeddings": False, "sliding_window": 16},
    "phi3": {"family": "phi3", "tie_word_embeddings": False, "pad_token_id": 0},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
}


class Case(NamedTuple):
    model: str
    lora: dict[str, Any]
    new_tokens: int = 0
    save_embeddings: bool = False


def saved(*names: str, **more: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "o_proj"], "modules_to_save": list(names), **more}


def tokens(ids: Any, **more: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "down_proj"], "trainable_token_indices": ids, **more}


CASES: dict[str, Case] = {
    "everything": Case("llama", saved("embed_tokens", "lm_head", "norm")),
    "tied-embed": Case("llama-tied", saved("embed_tokens")),
    "tied-head": Case("qwen2", saved("lm_head")),
    "tied-both": Case("qwen2", saved("lm_head", "embed_tokens")),
    "tied-as-one": Case("llama-tied", saved("embed_tokens", ensure_weight_tying=True)),
    "norms": Case("mistral", saved("input_layernorm", "model.norm")),
    "head-norms": Case("qwen3", saved("norm", target_modules=ATTENTION + MLP)),
    "head-norm-of-one-layer": Case("qwen3", saved("layers.1.self_attn.q_norm")),
    "phi3": Case("phi3", {"r": 4, "target_modules": ["qkv_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "saved-wins-over-lora": Case("mistral", saved("lm_head", target_modules=["q_proj", "lm_head"])),
    "dora": Case("qwen2", saved("norm", "lm_head", use_dora=True)),
    "tokens": Case("llama", tokens([7, 299, 3, 41])),
    "tokens-tied": Case("qwen2", tokens([7, 299, 3, 41])),
    "tokens-tied-by-name": Case("llama-tied", tokens({"embed_tokens": [5, 9], "lm_head": [5, 9]})),
    "tokens-of-each": Case("mistral", tokens({"embed_tokens": [5, 9], "lm_head": [9, 11, 12]})),
    "tokens-of-each-tied": Case("qwen2", tokens({"embed_tokens": [5, 9], "lm_head": [9, 11, 12]})),
    "tokens-of-the-tied-head": Case("qwen2", tokens({"lm_head": [9, 11, 12]})),
    "tokens-and-lora-on-the-tied-head": Case("qwen2", tokens([7, 41], target_modules=["q_proj", "lm_head"])),
    "tokens-beside-a-saved-head": Case(
        "phi3", tokens([7, 41], target_modules="all-linear", modules_to_save=["lm_head"])
    ),
    "added": Case("llama", PLAIN, NEW, True),
    "added-tied": Case("qwen2", PLAIN, NEW, True),
    "added-with-lora": Case("llama", saved(target_modules=["q_proj", "embed_tokens", "lm_head"]), NEW, True),
    "added-with-lora-tied": Case("qwen2", saved(target_modules=["embed_tokens"], use_rslora=True), NEW, True),
    "added-saved": Case("mistral", saved("embed_tokens", "lm_head"), NEW, True),
    "added-saved-without-copies": Case("llama", saved("embed_tokens", "lm_head"), NEW),
    "added-tied-saved": Case("llama-tied", saved("embed_tokens"), NEW, True),
    "added-trained": Case("phi3", tokens({"embed_tokens": ADDED, "lm_head": ADDED}, target_modules=["o_proj"]), NEW),
    "added-trained-tied": Case("qwen2", tokens([4, *ADDED]), NEW),
    "added-trained-with-copies": Case("llama-tied", tokens(ADDED[2:]), NEW, True),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def model_of(root: Path, name: str) -> Path:
    folder = root / name
    return folder if folder.exists() else make_model(folder, seed=7, **MODELS[name])


def adapter_of(root: Path, name: str) -> tuple[Path, Path]:
    case, folder = CASES[name], root / "adapters" / name
    model = model_of(root, case.model)
    if not folder.exists():
        make_variant(model, folder, 3, new_tokens=case.new_tokens, save_embeddings=case.save_embeddings, **case.lora)
    return model, folder


def prompts_for(case: Case) -> list[list[int]]:
    """With tokens whose rows are replaced or added in them."""
    prompts = make_prompts()
    for prompt in prompts[1:]:
        prompt[1:4] = [7, 299, 5]
        prompt[-1] = VOCAB + NEW - 1 if case.new_tokens else 41
    return prompts


# What the backends do differently is in these; the rest is the same code for both.
WITH_REFERENCE = ("everything", "head-norms", "tokens-and-lora-on-the-tied-head", "added-with-lora", "dora")


@pytest.mark.parametrize(
    ("name", "kernels"), [*((name, "cpu") for name in CASES), *((name, "reference") for name in WITH_REFERENCE)]
)
def test_it_equals_peft(root: Path, name: str, kernels: str) -> None:
    case = CASES[name]
    model, folder = adapter_of(root, name)
    plain = PLAIN_FUSED if case.model == "phi3" else PLAIN
    oracle = Oracle(model, new_tokens=case.new_tokens)
    check_variant(model, folder, root / f"beside-{case.model}", kernels, plain, oracle, prompts_for(case))


# -- tokens that an adapter adds --------------------------------------------------------------------------------------


def loud_adapter(root: Path) -> tuple[Path, Path]:
    """An adapter that adds tokens and says one of them next, whatever the prompt."""
    model, folder = model_of(root, "llama"), root / "adapters" / "loud"
    if not folder.exists():
        make_variant(model, folder, 3, new_tokens=NEW, save_embeddings=True, **PLAIN)
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        head = tensors["base_model.model.lm_head.weight"]
        # Logits of opposite signs, of which one is positive and beats all others.
        head[VOCAB + 1], head[VOCAB + 2] = head[VOCAB + 1] * 30, head[VOCAB + 1] * -30
        save_file(tensors, file)
    return model, folder


def test_added_tokens_are_generated_with_their_probabilities(root: Path) -> None:
    model, folder = loud_adapter(root)
    oracle, prompt = Oracle(model, new_tokens=NEW), make_prompts()[2]
    with Driver(engine_config(model)) as driver:
        driver.load("loud", folder)
        greedy = driver.add(prompt, "loud", max_tokens=6, logprobs=3, prompt_logprobs=1)
        sampled = driver.add(prompt, "loud", max_tokens=6, temperature=0.7, top_p=0.9, seed=1)
        base = driver.add(prompt, None, max_tokens=6, temperature=5.0, seed=2)
        driver.finish()
        check_request(driver, greedy, oracle, folder, prompt)
        assert set(driver.answers[greedy].tokens) <= {VOCAB + 1, VOCAB + 2}
        assert max(driver.answers[sampled].tokens) >= VOCAB
        expected = oracle.stepwise(folder, prompt, driver.answers[greedy].tokens)
        answer = driver.answers[greedy]
        first = next(output for output in answer.outputs if output.logprobs).logprobs
        assert first is not None
        own = expected[len(prompt) - 1].log_softmax(-1)[answer.tokens[0]]
        assert first[0].logprob == pytest.approx(float(own), abs=1e-3)
        # Beside it the base samples as it does alone.
        alone = driver.add(prompt, None, max_tokens=6, temperature=5.0, seed=2)
        driver.finish(alone)
        assert driver.answers[alone].tokens == driver.answers[base].tokens


def test_added_tokens_are_for_that_adapter_only(root: Path) -> None:
    model, folder = loud_adapter(root)
    plain = make_adapter(model, root / "adapters" / "plain", 5, **PLAIN)
    with Driver(engine_config(model)) as driver:
        driver.load("loud", folder)
        driver.load("plain", plain)
        last = VOCAB + NEW - 1
        for prompt, name in (([5, last], None), ([5, last], "plain"), ([5, last + 1], "loud"), ([-1], "loud")):
            refused = driver.add(prompt, name, max_tokens=2)
            driver.finish(refused)
            error = driver.answers[refused].last.error
            assert error is not None
            assert error.code == "invalid_token"
        assert len(driver.ask([5, last], "loud", max_tokens=2)) == 2
        driver.assert_idle()


def test_replaced_rows_are_not_blended(root: Path) -> None:
    model, folder = adapter_of(root, "norms")
    plain = make_adapter(model, root / "adapters" / "plain-mistral", 5, **PLAIN)
    with Driver(engine_config(model)) as driver:
        driver.load("saved", folder)
        driver.load("plain", plain)
        for blend in ([("saved", 0.5)], [("saved", 1.0), ("plain", 1.0)], [("plain", 0.2), ("saved", 1.0)]):
            refused = driver.add([5, 6], blend, max_tokens=2)
            driver.finish(refused)
            error = driver.answers[refused].last.error
            assert error is not None
            assert error.code == "invalid_request"
            assert "alone and at scale 1" in error.message
        assert len(driver.ask([5, 6], [("saved", 1.0)], max_tokens=2)) == 2
        driver.assert_idle()


# -- life on the device -----------------------------------------------------------------------------------------------


def test_evicted_and_retracted_it_stays_right(root: Path) -> None:
    """Two such adapters with room for one and little room for KV: they come and go, and every answer is right."""
    model, first = adapter_of(root, "everything")
    second = root / "adapters" / "everything-else"
    make_variant(model, second, 4, **saved("norm", "lm_head"))
    oracle = Oracle(model)
    prompts = [prompt * 2 for prompt in make_prompts()[1:4]]
    lora = {"lora_memory": 2 * VOCAB * 64 * 4 + 40 * 1024, "lora_page_rows": 4}
    cache = {"kv_memory": 160 * 3 * 2 * 2 * 16 * 4, "page_size": 4}
    with Driver(engine_config(model, lora=lora, cache=cache)) as driver:
        driver.load("first", first)
        driver.load("second", second)
        asked = [
            (f, p, driver.add(p, n, max_tokens=24)) for p in prompts for n, f in (("first", first), ("second", second))
        ]
        asked += [(None, prompt, driver.add(prompt, None, max_tokens=24)) for prompt in prompts]
        driver.finish()
        for folder, prompt, request_id in asked:
            check_request(driver, request_id, oracle, folder, prompt)
        # Now with the prompt in the prefix cache, of the adapter and of the base.
        for name, folder in 2 * (("first", first), (None, None)):
            again = driver.add(prompts[0], name, max_tokens=3)
            driver.finish(again)
            check_request(driver, again, oracle, folder, prompts[0])
        stats = driver.stats
        assert stats.adapter_evictions_total >= 2
        assert stats.retractions_total >= 1
        assert stats.cached_tokens_total > 0
        driver.drop("first")
        driver.drop("second")
        assert driver.stats.lora_bytes_used == 0
        assert driver.stats.host_lora_bytes_used == 0
        driver.assert_idle()


def test_in_half_precision_it_stays_near(root: Path) -> None:
    model, folder = adapter_of(root, "tokens-and-lora-on-the-tied-head")
    for dtype in ("bfloat16", "float16"):
        verdict = verify_adapter(folder, VerifyOptions(model=str(model), device="cpu", dtype=dtype, max_tokens=4))
        assert verdict.passed, verdict


def test_the_offline_report_knows_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    model, folder = adapter_of(root, "added-trained-tied")
    (folder / "added_tokens.json").write_text(json.dumps({"[bold]<tool>": VOCAB, "<|im_end|>": 2}))
    try:
        for base in ([], ["--model", str(model)]):
            result = CliRunner().invoke(make_app(), ["adapters", "inspect", str(folder), *base])
            assert result.exit_code == 0, result.output
            assert "trainable_token_indices" in result.output
            assert f"embed:{1 + NEW}" in result.output
            assert (f"{NEW}: '[bold]<tool>'" in result.output) == bool(base)
    finally:
        (folder / "added_tokens.json").unlink()


@pytest.mark.parametrize("name", ["added-trained-with-copies", "added-tied-saved", "everything"])
def test_verify_knows_them(root: Path, name: str) -> None:
    model, folder = adapter_of(root, name)
    options = VerifyOptions(model=str(model), device="cpu", max_tokens=3)
    verdict = verify_adapter(folder, options)
    assert verdict.passed, verdict
    assert verdict.effect > 0.1
    # And it would find rows that are wrong.
    wrong = root / "wrong" / name
    shutil.copytree(folder, wrong)
    tensors = load_file(wrong / "adapter_model.safetensors")
    for key, tensor in tensors.items():
        if "lora_" not in key:
            tensors[key] = torch.cat((tensor[:-1], tensor[-1:] + 0.5))
    save_file(tensors, wrong / "adapter_model.safetensors")
    assert not verify_adapter(folder, replace(options, against=wrong)).passed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
@pytest.mark.parametrize("name", ["norms", "tokens", "added-saved"])
def test_values_that_are_not_finite_are_refused(root: Path, tmp_path: Path, name: str, value: float) -> None:
    model, folder = adapter_of(root, name)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "adapter_model.safetensors")
    unused = ("modules_to_save", "original_module")  # what PEFT writes beside the tensors that it reads
    tensors = {key: tensor for key, tensor in tensors.items() if not any(word in key for word in unused)}
    key = next(key for key in sorted(tensors) if "lora_" not in key)
    changed = tensors[key].double()
    changed.view(-1)[-1] = value
    save_file(tensors | {key: changed}, broken / "adapter_model.safetensors")
    with Driver(engine_config(model)) as driver:
        with pytest.raises(AdapterRefused) as refused:
            driver.load("broken", broken)
        assert refused.value.code == "non_finite"
        assert driver.stats.lora_bytes_used == driver.stats.host_lora_bytes_used == 0


def test_an_adapter_with_tokens_of_its_own(root: Path) -> None:
    model = model_of(root, "llama-tied")
    a = make_adapter(model, root / "adapters" / "plain-tied", 5, **PLAIN)
    folder = make_variant(model, root / "adapters" / "tool", 3, new_tokens=2, **tokens([VOCAB, VOCAB + 1]))
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": VOCAB, "</tool>": VOCAB + 1}))
    greedy = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    options = {"kernels": "reference", "dtype": "float32", "kv_memory": "4MiB", "lora_memory": "4MiB"}
    oracle = Oracle(model, new_tokens=2)
    with LLM(str(model), adapters={"tool": folder, "a": a}, **options) as llm:
        mine, plain = llm.generate(["use <tool>"] * 2, greedy, lora=["tool", "a"])
        assert mine.prompt_token_ids[-1] == VOCAB
        assert mine.token_ids == oracle.greedy(folder, mine.prompt_token_ids, 10)
        assert max(plain.prompt_token_ids) < VOCAB
        assert plain.token_ids == oracle.greedy(a, plain.prompt_token_ids, 10)
        assert llm.generate([[5, VOCAB + 1]], greedy, lora="tool")[0].token_ids
        for lora in (None, "a"):
            with pytest.raises(InvalidToken):
                llm.generate([[5, VOCAB]], greedy, lora=lora)
        with pytest.raises(InvalidRequest, match="alone and at scale 1"):
            llm.generate("x", greedy, lora={"name": "tool", "scale": 0.5})
        llm.unload_adapter("tool")
        with pytest.raises(AdapterNotFound):
            llm.generate("use <tool>", greedy, lora="tool")
