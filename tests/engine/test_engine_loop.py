"""The step loop on a tiny model: what goes wrong for one request stays with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Driver, engine_config
from safetensors.torch import load_file, save_file
from tiny_models import ATTENTION, MLP, Oracle, make_adapter, make_model

from loraserve.errors import AdapterRefused

PROMPT = [5, 9, 33, 120, 77, 201, 14]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loop")
    make_model(root / "model", seed=3)
    make_adapter(root / "model", root / "a", 1, r=4, lora_alpha=8, target_modules=ATTENTION + MLP)
    return root


@pytest.fixture
def driver(root: Path) -> Iterator[Driver]:
    with Driver(engine_config(root / "model", kernels="reference")) as driver:
        driver.load("a", root / "a")
        yield driver
        driver.assert_idle()


@pytest.mark.parametrize(
    ("prompt", "settings", "code"),
    [
        ([], {}, "invalid_request"),
        ([-1, 4], {}, "invalid_token"),
        ([4, 10**6], {}, "invalid_token"),
        ([4] * 512, {}, "context_length_exceeded"),
    ],
)
def test_a_bad_request_ends_at_once_and_alone(driver: Driver, prompt: list[int], settings: Any, code: str) -> None:
    good = driver.add(PROMPT, "a")
    bad = driver.add(prompt, **settings)
    driver.finish(good, bad)
    error = driver.answers[bad].last.error
    assert error is not None
    assert error.code == code
    assert len(driver.answers[good].tokens) == 12


def test_an_unknown_version_is_404(driver: Driver) -> None:
    driver.versions["ghost"] = "0" * 64
    request = driver.add(PROMPT, "ghost")
    driver.finish(request)
    assert driver.answers[request].last.error.code == "adapter_not_found"  # type: ignore[union-attr]


def test_logits_that_are_not_finite_end_their_request_only(root: Path, driver: Driver, tmp_path: Path) -> None:
    # Finite weights whose product overflows: the load is fine, the answer is not.
    folder = tmp_path / "huge"
    make_adapter(root / "model", folder, 1, r=4, lora_alpha=8, target_modules=["o_proj"])
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor * 1e25 for name, tensor in load_file(file).items()}, file)
    driver.load("huge", folder)
    good, bad = driver.add(PROMPT, "a"), driver.add(PROMPT, "huge")
    driver.finish(good, bad)
    assert driver.answers[bad].last.error.code == "non_finite_logits"  # type: ignore[union-attr]
    assert driver.answers[good].tokens == Oracle(root / "model").greedy(root / "a", PROMPT, 12)


def test_nan_weights_are_refused_and_leave_nothing(root: Path, driver: Driver, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    make_adapter(root / "model", folder, 1, r=4, lora_alpha=8, target_modules=["q_proj"])
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if "lora_B" in name)[3, 1] = torch.nan
    save_file(tensors, file)
    with pytest.raises(AdapterRefused) as refusal:
        driver.load("nan", folder)
    assert refusal.value.code == "non_finite"
    assert len(driver.loop.adapter_statuses()) == 1


def test_a_broken_forward_ends_its_requests_and_the_loop_goes_on(driver: Driver) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the device fell over")

    runner = driver.loop._runner
    whole = runner._decoder
    request = driver.add(PROMPT, "a")
    runner._decoder = Broken()  # type: ignore[assignment]
    driver.finish(request)
    runner._decoder = whole
    error = driver.answers[request].last.error
    assert error is not None
    assert error.code == "internal_error"
    assert "device" not in error.message
    assert len(driver.ask(PROMPT, "a")) == 12


def test_aborts_in_every_phase_free_everything(driver: Driver) -> None:
    waiting = driver.add(PROMPT)
    assert driver.loop.abort(waiting)
    prefilling = driver.add([7] * 400)
    driver.step()
    assert driver.loop.abort(prefilling)
    decoding = driver.add(PROMPT, "a", max_tokens=200)
    driver.run_until(lambda: bool(driver.answers[decoding].tokens))
    assert driver.loop.abort(decoding)
    driver.finish(waiting, prefilling, decoding)
    reasons = {driver.answers[request].last.finish_reason for request in (waiting, prefilling, decoding)}
    assert reasons == {"abort"}
    assert not driver.loop.abort(decoding)


def test_a_deadline_ends_a_request(driver: Driver) -> None:
    request = driver.add(PROMPT, "a", max_tokens=400, timeout_s=0.05)
    driver.finish(request)
    assert driver.answers[request].last.finish_reason == "timeout"
    assert driver.answers[request].last.error.code == "request_timeout"  # type: ignore[union-attr]


def test_dropping_waits_for_requests_and_force_does_not(root: Path, driver: Driver) -> None:
    answers: list[Any] = []
    running = driver.add(PROMPT, "a", max_tokens=30)
    driver.run_until(lambda: bool(driver.answers[running].tokens))
    version = driver.versions["a"]
    driver.loop.drop_adapter(version, False, answers.append)
    driver.step()
    assert not answers
    late = driver.add(PROMPT, "a")
    driver.finish(running, late)
    assert len(driver.answers[running].tokens) == 30
    assert driver.answers[late].last.error.code == "adapter_not_found"  # type: ignore[union-attr]
    driver.run_until(lambda: bool(answers))
    driver.load("a", root / "a")
    running = driver.add(PROMPT, "a", max_tokens=300)
    driver.run_until(lambda: bool(driver.answers[running].tokens))
    driver.drop("a", force=True)
    assert driver.answers[running].last.finish_reason in ("abort", "error")
    assert driver.answers[running].last.error.code == "request_aborted"  # type: ignore[union-attr]
    assert driver.stats.lora_bytes_used == 0


def test_logprobs_are_those_of_the_raw_logits(root: Path, driver: Driver) -> None:
    oracle = Oracle(root / "model")
    request = driver.add(PROMPT, "a", max_tokens=5, logprobs=3, prompt_logprobs=2)
    tokens = driver.finish(request)[0]
    whole = [*PROMPT, *tokens]
    expected = oracle.logits(root / "a", whole).log_softmax(-1)
    outputs = driver.answers[request].outputs
    prompt = next(output.prompt_logprobs for output in outputs if output.prompt_logprobs)
    assert prompt[0] is None
    for position, value in enumerate(prompt[1:], start=1):
        assert value is not None
        assert value.token == PROMPT[position]
        assert value.logprob == pytest.approx(float(expected[position - 1, PROMPT[position]]), abs=1e-4)
        assert [token for token, _ in value.top] == expected[position - 1].topk(2).indices.tolist()
    given = [value for output in outputs for value in output.logprobs or []]
    assert [value.token for value in given] == tokens
    for position, value in enumerate(given, start=len(PROMPT) - 1):
        assert value.logprob == pytest.approx(float(expected[position, value.token]), abs=1e-4)
        assert len(value.top) == 3


def test_prompt_logprobs_come_once_though_the_prompt_is_chunked_and_cached(root: Path) -> None:
    config = engine_config(root / "model", kernels="reference", scheduler={"prefill_chunk": 7})
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 300, 45)]
    with Driver(config) as driver:
        driver.ask(prompt)
        request = driver.add(prompt, max_tokens=0, prompt_logprobs=0)
        driver.finish(request)
        outputs = driver.answers[request].outputs
        found = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert len(found) == 1
        expected = Oracle(root / "model").logits(None, prompt).log_softmax(-1)
        for position, value in enumerate(found[0][1:], start=1):
            assert value is not None
            assert value.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)
        assert outputs[-1].finish_reason == "length"
        assert driver.answers[request].tokens == []


def test_seeds_reproduce_whatever_the_batch(driver: Driver) -> None:
    settings = {"temperature": 1.5, "top_p": 0.9, "max_tokens": 20}
    alone = driver.ask(PROMPT, "a", seed=7, **settings)
    together = [driver.add(PROMPT, "a", seed=seed, **settings) for seed in (1, 7, 3)]
    answers = driver.finish(*together)
    assert answers[1] == alone
    assert answers[0] != alone
    assert driver.ask(PROMPT, "a", **settings) != driver.ask(PROMPT, "a", **settings)
