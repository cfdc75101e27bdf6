"""`loraserve verify`: equal adapters pass, and every way of being wrong is found and named."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import ATTENTION, MLP, make_adapter, make_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from loraserve.cli import make_app
from loraserve.errors import AdapterRefused, ConfigError
from loraserve.verify import ReferenceUnavailable, Scenario, Served, Verdict, VerifyOptions, verify_adapter
from loraserve.verify.compare import Expectation, Trace, compare
from loraserve.verify.patterns import endless_patterns

SETTINGS: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION + MLP}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("verify") / "base", seed=3, num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return make_adapter(model, model.parent / "adapter", 1, **SETTINGS)


def verify(folder: Path, model: Path, **options: Any) -> Verdict:
    return verify_adapter(folder, VerifyOptions(**{"model": str(model), "max_tokens": 5, "device": "cpu"} | options))


def changed(adapter: Path, folder: Path, **config: Any) -> Path:
    """The same tensors under another config."""
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    old = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(old | config))
    return folder


def run_cli(*arguments: str) -> tuple[int, str, str]:
    # `verify` sets the thread counts of its process; here they must not outlive the test.
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    before, threads = {name: os.environ.get(name) for name in names}, torch.get_num_threads()
    try:
        result = CliRunner().invoke(make_app(), ["verify", *arguments], env={"COLUMNS": "160", "NO_COLOR": "1"})
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_an_equal_adapter_passes_in_every_scenario(model: Path, adapter: Path) -> None:
    verdict = verify(adapter, model)
    assert verdict.passed
    assert verdict.max_delta < 1e-3
    assert verdict.effect > 0.1
    assert {(check.scenario, check.served) for check in verdict.checks} == {
        (Scenario.ALONE, Served.BASE),
        (Scenario.ALONE, Served.ADAPTER),
        *((Scenario.MIXED, served) for served in Served),
        (Scenario.EVICTED, Served.ADAPTER),
        (Scenario.RELOADED, Served.ADAPTER),
    }
    assert all(check.num_rows > 5 * verdict.num_prompts for check in verdict.checks)


def test_a_wrong_scale_fails(model: Path, adapter: Path, tmp_path: Path) -> None:
    wrong = changed(adapter, tmp_path / "wrong", lora_alpha=6.1)
    verdict = verify(adapter, model, against=wrong)
    assert not verdict.passed
    for check in verdict.checks:
        assert check.passed == (check.served is Served.BASE)
    assert 1e-3 < verdict.max_delta < 10


def test_rounding_that_an_adapter_amplifies_is_told_from_a_fault(model: Path, tmp_path: Path) -> None:
    settings = {"r": 8, "lora_alpha": 64, "target_modules": ["lm_head", "q_proj"]}
    # Not seed 3: it amplifies chaotically, and one sample of PEFT's rounding says little of what another order gives.
    loud = make_adapter(model, tmp_path / "loud", 4, std=3.0, **settings)
    verdict = verify(loud, model)
    assert verdict.passed
    assert verdict.max_delta > 1e-3
    for check in verdict.checks:
        # PEFT itself is off by half the limit; the base, which amplifies nothing, keeps the plain one.
        assert (check.limit == 1e-3) == (check.served is Served.BASE)
    assert verdict.effect > 100 * max(check.limit for check in verdict.checks)
    wrong = verify(changed(loud, tmp_path / "wrong", lora_alpha=64.5), model, against=loud)
    assert not wrong.passed


def test_half_precision_has_its_own_limits(model: Path, adapter: Path, tmp_path: Path) -> None:
    assert verify(adapter, model, dtype="bfloat16", prompts=("a quick fox", "b")).passed
    wrong = changed(adapter, tmp_path / "wrong", lora_alpha=30)
    assert not verify(adapter, model, dtype="bfloat16", prompts=("a quick fox", "b"), against=wrong).passed


@pytest.mark.parametrize("spelling", ["default", "bare", "compiled", "sharded"])
def test_files_that_peft_would_pass_over_are_compared_all_the_same(
    model: Path, adapter: Path, tmp_path: Path, spelling: str
) -> None:
    folder = changed(adapter, tmp_path / "spelled")
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    if spelling == "sharded":
        names = [f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        index = {name: names[i % 2] for i, name in enumerate(tensors)}
        for shard in names:
            save_file({name: tensors[name] for name in tensors if index[name] == shard}, folder / shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    else:
        rename = {
            "default": lambda name: name.replace(".weight", ".default.weight"),
            "bare": lambda name: name.removeprefix("base_model.model."),
            "compiled": lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
        }[spelling]
        save_file({rename(name): value for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    verdict = verify(folder, model, prompts=("fox",))
    assert verdict.passed
    assert verdict.effect > 0.1


def test_what_cannot_be_compared_is_said(model: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused) as refused:
        verify(changed(adapter, tmp_path / "pissa", init_lora_weights="pissa"), model)
    assert refused.value.code == "unsupported_init"
    # PEFT would leave these tensors out.
    fewer = changed(adapter, tmp_path / "fewer", target_modules=["q_proj"])
    with pytest.raises(ReferenceUnavailable, match="leaves out"):
        verify(adapter, model, prompts=("fox",), against=fewer)
    with pytest.raises(ConfigError, match="tokens, the model takes"):
        verify(adapter, model, prompts=("fox " * 600,))
    with pytest.raises(ConfigError, match="no prompts"):
        VerifyOptions(prompts=())
    with pytest.raises(ConfigError):
        VerifyOptions(max_tokens=0)


def test_comparison_of_tokens_and_rows() -> None:
    vocab = torch.eye(4) * 5  # row t: token t is best, the others lie 5 below
    fed = [1, 2, 3]
    prompts = [[0, 0]]
    logits = torch.cat([vocab[[0]], vocab[fed]])

    def check(tokens: list[int], rows: torch.Tensor, near_ties: bool = False, limit: float = 1.0) -> Any:
        expected = {Served.ADAPTER: Expectation([fed], [logits], limit, near_ties)}
        return compare(Scenario.ALONE, [Trace(0, Served.ADAPTER, rows, tokens)], expected, prompts)[0]

    assert check(fed, logits).passed
    assert check(fed, logits + 0.5).passed
    assert not check(fed, logits + 1.5).passed
    broken = logits.clone()
    broken[0, 0] = torch.nan
    assert check(fed, broken).max_delta == torch.inf
    assert not check(fed, broken, limit=torch.inf).passed
    # After another token, rows have another history: they are not compared, and the first such token counts.
    other = logits.clone()
    other[3] += 100
    found = check([1, 0, 0], other)
    assert found.num_rows == 3
    assert found.max_delta == 0
    assert found.divergences == ((0, 1, 0, 2, 5.0),)
    assert not found.passed
    assert not check([1, 0, 0], other, near_ties=True).passed
    assert check([1, 0, 0], other, near_ties=True, limit=5.0).passed


def test_command_passes_and_fails_by_exit_code(model: Path, adapter: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("quick brown\n\nfox\n")
    common = ("--model", str(model), "--device", "cpu", "--max-tokens", "3", "--prompts", str(prompts))
    code, out, err = run_cli(str(adapter), *common)
    assert code == 0, out + err
    for part in ("PASSED", "max |Δlogit|", "2 prompts", "in a mixed batch", "after eviction", "after unload and load"):
        assert part in out
    wrong = changed(adapter, tmp_path / "wrong", lora_alpha=30)
    code, out, _ = run_cli(str(adapter), *common, "--against", str(wrong), "--json")
    assert code == 1
    answer = json.loads(out)
    assert answer["passed"] is False
    assert answer["max_delta"] > 1e-3
    assert [check["passed"] for check in answer["checks"] if check["served"] == "base"] == [True, True]
    assert any(check["divergences"] for check in answer["checks"])


def test_command_refuses_with_code_2(model: Path, adapter: Path, tmp_path: Path) -> None:
    bad = changed(adapter, tmp_path / "bad", lora_alpha="x")
    for arguments, part in (
        ((str(bad), "--model", str(model)), "(invalid_config)"),
        ((str(tmp_path / "none"), "--model", str(model)), "(not_an_adapter)"),
        ((str(adapter), "--model", str(tmp_path)), "(model_load_failed)"),
        ((str(adapter), "--model", str(model), "--prompts", str(tmp_path / "none")), "(invalid_configuration)"),
        ((str(adapter), "--model", str(model), "--dtype", "int8"), "(invalid_configuration)"),
    ):
        code, _, err = run_cli(*arguments)
        assert code == 2, err
        assert part in err
        assert len([line for line in err.splitlines() if line.startswith("error:")]) == 1


HANGING = r"(?:[a-z0-9_.]+)+!"  # Python's `re` tries every way to divide a module's path


@pytest.mark.parametrize("field", ["exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"])
def test_patterns_that_do_not_end_are_found_in_time(field: str) -> None:
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    hanging: object = {HANGING: 4} if field.endswith("_pattern") and field != "layers_pattern" else HANGING
    assert endless_patterns({"target_modules": ".*_proj", field: hanging}, modules, 0.7) == [field, "target_modules"]
    assert endless_patterns({"target_modules": ["(a+)+!"], field: None}, modules, 0.0) == []
    fine: dict[str, object] = {"target_modules": "(", "rank_pattern": {r".*q_proj": 3}, "modules_to_save": ["norm"]}
    assert endless_patterns(fine, modules, 20.0) == []


def test_a_target_pattern_that_does_not_end_is_not_run(model: Path, adapter: Path, tmp_path: Path) -> None:
    folder = changed(adapter, tmp_path / "hanging", target_modules=rf"{HANGING}|.*\.[a-z]+_proj")
    started = time.monotonic()
    verdict = verify(folder, model, prompts=("fox",))
    assert verdict.passed
    assert verdict.effect > 0.1
    assert time.monotonic() - started < 60


def test_logits_that_are_not_finite_are_a_failed_verdict(model: Path, adapter: Path, tmp_path: Path) -> None:
    """Finite weights, finite in PEFT; but in float16 the sums of what is served overflow."""
    huge = changed(adapter, tmp_path / "huge", lora_alpha=200_000)
    verdict = verify(huge, model, dtype="float16", kernels="reference", prompts=("fox", "a quick fox"))
    assert not verdict.passed
    assert verdict.max_delta == torch.inf
    for check in verdict.checks:
        assert bool(check.broken) == (check.served is not Served.BASE)
        assert check.served is not Served.BASE or check.passed
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("fox\n")
    arguments = (str(huge), "--model", str(model), "--device", "cpu", "--dtype", "float16", "--kernels", "reference")
    code, out, err = run_cli(*arguments, "--prompts", str(prompts))
    assert code == 1, err
    assert "FAILED" in out
    assert "the engine's logits are not finite" in out.replace("\n", " ")
    code, out, _ = run_cli(*arguments, "--prompts", str(prompts), "--json")
    assert code == 1
    assert json.loads(out)["max_delta"] == "inf"


def test_an_activated_adapter_is_compared_where_it_applies(model: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"alora_invocation_tokens": [41, 42, 43]}
    activated = make_adapter(model, tmp_path / "activated", 4, **settings)
    verdict = verify(activated, model)
    assert verdict.passed
    assert verdict.effect > 0.1
    wrong = changed(activated, tmp_path / "wrong", alora_invocation_tokens=[42, 43])  # begins a token later
    assert not verify(activated, model, against=changed(activated, tmp_path / "alpha", lora_alpha=7)).passed
    assert not verify(
        wrong, model, against=changed(activated, tmp_path / "everywhere", alora_invocation_tokens=None)
    ).passed
    silent = verify(activated, model, prompts=("fox",))
    assert silent.passed
    assert "no prompt invokes the adapter" in silent.warnings


def test_a_folder_of_one_gguf_file_is_a_base(model: Path, adapter: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    verdict = verify(adapter, tmp_path)
    assert verdict.passed
    assert verdict.effect > 0.1
    assert verdict.num_prompts == 2, "it has no tokenizer, so there are no texts"
