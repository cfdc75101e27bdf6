"""`LLM`, the engine in one's own process: same answers as the oracle, and every wrong argument is a named error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import Oracle, make_adapter, make_model

from loraserve import LLM, SamplingParams
from loraserve.errors import (
    AdapterNotFound,
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    InvalidToken,
    LoraserveError,
    NameTaken,
)

SMALL: dict[str, Any] = {
    "kernels": "reference",
    "dtype": "float32",
    "kv_memory": "4MiB",
    "lora_memory": "4MiB",
    "host_lora_memory": "8MiB",
}
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("llm")
    model = make_model(root / "model")
    return model, *(
        make_adapter(model, root / name, seed, r=4, target_modules=["q_proj", "v_proj"])
        for seed, name in enumerate("ab", 1)
    )


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path, Path]) -> Iterator[LLM]:
    model, a, b = folders
    with LLM(str(model), adapters={"a": a, "b": b}, **SMALL) as llm:
        yield llm
        llm._loop.check()
        assert not llm._loop.busy


def test_mixed_answers_are_the_oracles(llm: LLM, folders: tuple[Path, Path, Path]) -> None:
    model, a, b = folders
    oracle = Oracle(model)
    answers = llm.generate(["the quick fox"] * 3, GREEDY, lora=["a", None, "b"])
    for answer, adapter in zip(answers, (a, None, b), strict=True):
        assert answer.token_ids == oracle.greedy(adapter, answer.prompt_token_ids, 10)
    halves = {"name": "a", "scale": 0.5}
    assert llm.generate("the quick fox", GREEDY, lora=[[halves, halves]])[0].token_ids == answers[0].token_ids


def test_a_stop_string_is_one_whether_text_or_list(llm: LLM) -> None:
    whole = llm.generate("the quick fox", GREEDY)[0].text
    stop = whole[4:7]
    for value in (stop, [stop], (stop,)):
        params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, stop=value)  # type: ignore[arg-type]
        answer = llm.generate("the quick fox", params)[0]
        assert (answer.text, answer.finish_reason) == (whole[: whole.find(stop)], "stop")


@pytest.mark.parametrize(
    ("prompts", "lora", "error"),
    [
        ("", None, InvalidRequest),
        ([[]], None, InvalidRequest),
        ([10**6], None, InvalidToken),
        ([-1], None, InvalidToken),
        ([True], None, InvalidRequest),
        ([1.5], None, InvalidRequest),
        (5, None, InvalidRequest),
        ("\ud800", None, InvalidRequest),
        ([5] * 600, None, ContextLengthExceeded),
        (["x", "y"], ["a", "nobody"], AdapterNotFound),
        ("x", "a@ffffffff", AdapterNotFound),
        ("x", 5, InvalidRequest),
        ("x", ["a", "b"], InvalidRequest),
    ],
)
def test_wrong_arguments_start_nothing(llm: LLM, prompts: Any, lora: Any, error: type[LoraserveError]) -> None:
    with pytest.raises(error):
        llm.generate(prompts, GREEDY, lora=lora)
    assert not llm._loop.busy


def test_wrong_params(llm: LLM) -> None:
    for params in ({"max_tokens": 3}, [GREEDY, GREEDY], SamplingParams(max_tokens=0)):
        with pytest.raises(InvalidRequest):
            llm.generate("x", params)  # type: ignore[arg-type]
    for fields in ({"temperature": 10**400}, {"stop": 5}, {"stop_token_ids": 5}, {"ignore_eos": 1}):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**fields)  # type: ignore[arg-type]
        assert caught.value.param in fields


def test_an_answer_is_not_cut_shorter_than_asked(llm: LLM) -> None:
    room = llm._max_total - 3
    assert len(llm.generate([[5, 6, 7]], replace(GREEDY, max_tokens=room))[0].token_ids) == room
    with pytest.raises(ContextLengthExceeded) as caught:
        llm.generate([[5, 6, 7]], replace(GREEDY, max_tokens=room + 1))
    assert (caught.value.param, str(llm._max_total) in caught.value.message) == ("max_tokens", True)


def test_names(llm: LLM, folders: tuple[Path, Path, Path]) -> None:
    version = llm.load_adapter("c", folders[1])
    assert llm.generate("x", GREEDY, lora=f"c@{version[:8]}")[0].token_ids
    with pytest.raises(NameTaken):
        llm.load_adapter("c", folders[2])
    assert llm.load_adapter("c", folders[2], replace=True) != version
    llm.unload_adapter("c")
    with pytest.raises(AdapterNotFound):
        llm.generate("x", GREEDY, lora="c")


def test_wrong_options(folders: tuple[Path, Path, Path]) -> None:
    for options in ({"foo": 1}, {"page_size": "16"}, {"threads": 0}, {"kv_memory": "much"}, {"max_running": 0}):
        with pytest.raises(ConfigError):
            LLM(str(folders[0]), **options)


def test_closed(folders: tuple[Path, Path, Path]) -> None:
    llm = LLM(str(folders[0]), **SMALL)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("x"), lambda: llm.load_adapter("a", folders[1])):
        with pytest.raises(EngineDead):
            use()
