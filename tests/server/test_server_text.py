"""Tokenizer wrapper and incremental detokenizer against full decodes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fake_engine import SENTENCES, byte_fallback_tokenizer, byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from loraserve.errors import InvalidRequest, ModelLoadError
from loraserve.models.demo import find_demo_gguf
from loraserve.server.text import Detokenizer, PieceKind, Text, load_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
TEXTS = [*SENTENCES, "", " ", "a  b", "\n\n x", "👍🏽 done", "<|end|> inside <|user|>", "ÿ\u0000\u2028end"]


@pytest.fixture(params=[BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return request.param


def stream(text: Text, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.finish()]


def test_kinds_are_recognised() -> None:
    assert Text(BYTE_LEVEL).kind == PieceKind.BYTE_LEVEL
    assert Text(BYTE_FALLBACK).kind == PieceKind.METASPACE


@pytest.mark.parametrize("sample", TEXTS)
def test_encode_equals_transformers(tokenizer: PreTrainedTokenizerFast, sample: str) -> None:
    text = Text(tokenizer)
    assert text.encode(sample).ids == tokenizer.encode(sample)
    assert text.encode(sample, special=False).ids == tokenizer.encode(sample, add_special_tokens=False)


@pytest.mark.parametrize("sample", TEXTS)
def test_decode_equals_transformers(tokenizer: PreTrainedTokenizerFast, sample: str) -> None:
    ids = tokenizer.encode(sample)
    assert Text(tokenizer).decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@given(data=st.data())
@settings(max_examples=120, deadline=None)
@pytest.mark.parametrize("which", ["byte-level", "byte-fallback"])
def test_pieces_are_the_full_decode_of_random_ids(which: str, data: st.DataObject) -> None:
    tokenizer = BYTE_LEVEL if which == "byte-level" else BYTE_FALLBACK
    text = Text(tokenizer)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=40))
    assert "".join(stream(text, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(sample=st.text(max_size=30))
@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("which", ["byte-level", "byte-fallback"])
def test_pieces_of_text_never_split_a_character(which: str, sample: str) -> None:
    tokenizer = BYTE_LEVEL if which == "byte-level" else BYTE_FALLBACK
    text = Text(tokenizer)
    ids = text.encode(sample, special=False).ids
    pieces = stream(text, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    if "\N{REPLACEMENT CHARACTER}" not in sample:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("which", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_runs_of_special_tokens_and_spaces(which: PreTrainedTokenizerFast) -> None:
    text = Text(which)
    rng = random.Random(0)
    special = which.eos_token_id
    for _ in range(200):
        ids = []
        for _ in range(rng.randint(1, 6)):
            ids += [special] * rng.randint(0, 3)
            ids += text.encode(rng.choice([" ", "  a", " b ", "😀", "é "]), special=False).ids
        assert "".join(stream(text, ids)) == which.decode(ids, skip_special_tokens=True)


def test_text_comes_as_early_as_it_is_certain() -> None:
    text = Text(BYTE_LEVEL)
    ids = text.encode("ab 😀 cd", special=False).ids
    pieces = stream(text, ids)
    assert pieces[0] != ""
    assert pieces[-1] == "", "nothing is left when the text ends with a whole character"


def test_unfinished_character_is_replaced_at_the_end() -> None:
    text = Text(BYTE_LEVEL)
    whole = [text.encode(char, special=False).ids for char in "Ω漢字"]
    ids = next(ids for ids in whole if len(ids) > 1)[:-1]
    pieces = stream(text, ids)
    assert "".join(pieces[:-1]) == ""
    assert pieces[-1] == text.decode(ids)
    assert "\N{REPLACEMENT CHARACTER}" in pieces[-1]


def test_context_gives_the_space_that_a_lone_decode_loses() -> None:
    text = Text(BYTE_FALLBACK)
    prompt = text.encode("hello").ids
    answer = text.encode("world", special=False).ids
    alone = Detokenizer(text)
    assert "".join(alone.push(token) for token in answer) + alone.finish() == "world"
    after = Detokenizer(text, prompt)
    assert "".join(after.push(token) for token in answer) + after.finish() == " world"


def test_token_bytes_join_to_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = Text(tokenizer)
    for sample in SENTENCES:
        ids = text.encode(sample, special=False).ids
        joined = b"".join(text.token_bytes(token) for token in ids).decode()
        assert joined.removeprefix(" ") == sample.removeprefix(" ")
    assert text.token_bytes(tokenizer.eos_token_id) == b"<|end|>"
    assert text.token_bytes(len(tokenizer) + 100) == b""


def test_chat_template() -> None:
    text = Text(BYTE_LEVEL)
    messages = [{"role": "user", "content": "hi"}]
    render = text.render_chat(messages, add_generation_prompt=True, continue_final_message=False)
    assert render == "<|user|>hi<|end|><|assistant|>"
    messages.append({"role": "assistant", "content": "Well,"})
    go_on = text.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert go_on == "<|user|>hi<|end|><|assistant|>Well,"
    assert text.encode_chat(render)[0] != BYTE_LEVEL.bos_token_id


def test_chat_template_refusals() -> None:
    text = Text(BYTE_LEVEL)
    late = [{"role": "user", "content": "hi"}, {"role": "system", "content": "no"}]
    with pytest.raises(InvalidRequest, match="system must come first"):
        text.render_chat(late, add_generation_prompt=True, continue_final_message=False)
    bare = Text(byte_level_tokenizer(template=None))
    assert not bare.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        bare.render_chat(late, add_generation_prompt=True, continue_final_message=False)


def test_the_tokenizer_inside_a_gguf_is_found_by_file_and_by_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(find_demo_gguf())
    for path in (tmp_path, tmp_path / "model.gguf"):
        text = Text(load_tokenizer(path))
        assert text.decode(text.encode("The sky is blue.").ids) == "The sky is blue."
    (tmp_path / "other.gguf").symlink_to(find_demo_gguf())
    with pytest.raises(ModelLoadError):
        load_tokenizer(tmp_path)
