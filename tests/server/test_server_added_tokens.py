"""Adapters that bring tokens: their ids, their texts, and nobody else's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from asking import load, ok, post, refused
from fake_engine import FakeEngine, FakeLibrary, byte_fallback_tokenizer, byte_level_tokenizer
from server_parts import BASE

from loraserve.lora.spec import AddedToken
from loraserve.server.adapter_texts import MAX_KEPT
from loraserve.server.caller import Caller
from loraserve.server.state import ServerState
from loraserve.server.text import Text

pytestmark = pytest.mark.anyio
NEW = 3


@pytest.fixture
async def first(server: ServerState, library: FakeLibrary, engine: FakeEngine) -> int:
    """The first id that only `tool` has; the tokenizer ends before it, as it does where matrices are padded."""
    known, vocab = len(engine.tokenizer), engine.info.vocab_size
    padding = tuple(AddedToken(i, f"<padding {i}>", special=True) for i in range(known, vocab))
    names = (
        AddedToken(vocab, "<tool>"),
        AddedToken(vocab + 1, "</tool>"),
        AddedToken(vocab + 2, "<pad>", special=True),
    )
    library.reported = {"new_tokens": NEW, "added_tokens": padding + names}
    await load(server, library, "tool")
    library.reported = {}
    await load(server, library, "other")
    return vocab


async def test_its_texts_have_its_tokens(client: httpx.AsyncClient, engine: FakeEngine, first: int) -> None:
    engine.script = lambda _: [*engine.ids("call "), first, *engine.ids("f(x)"), first + 1, first + 2]
    answer = await ok(client, prompt="a <tool>", lora="tool", logprobs=1, echo=True)
    prompt = engine.requests[-1].prompt
    assert prompt[-1] == first
    choice = answer["choices"][0]
    assert choice["text"] == "a <tool>call <tool>f(x)</tool>"  # special tokens are not shown, as always
    assert choice["logprobs"]["tokens"][-3:] == [")", "</tool>", "<pad>"]
    assert choice["logprobs"]["text_offset"][len(prompt) - 1] == 2
    # Everybody else's have the letters.
    for lora in (None, "other"):
        answer = await ok(client, prompt="a <tool>", lora=lora)
        assert engine.requests[-1].prompt != prompt
        assert engine.tokenizer.decode(engine.requests[-1].prompt).endswith("a <tool>")
        assert answer["choices"][0]["text"] == "call f(x)"


async def test_its_ids_are_its_own(client: httpx.AsyncClient, first: int) -> None:
    last = first + NEW - 1
    await ok(client, prompt=[5, last], lora="tool", stop_token_ids=[last])
    both = [[5, last], [5]]
    await ok(client, prompt=both, lora=["tool", "other"], lora_per_prompt=True)
    for body in (
        {"prompt": [5, last + 1], "lora": "tool"},
        {"prompt": [5, last], "lora": "other"},
        {"prompt": [5, last]},
        {"prompt": both, "lora": ["other", "tool"], "lora_per_prompt": True},
    ):
        assert "token id" in await refused(client, 400, "invalid_token", "prompt", **body)
    for lora, token in (("tool", last + 1), ("other", last)):
        await refused(client, 400, "invalid_token", "stop_token_ids", lora=lora, stop_token_ids=[token])


async def test_chat_and_streams_read_them(client: httpx.AsyncClient, engine: FakeEngine, first: int) -> None:
    engine.script = lambda _: [first, *engine.ids("f"), first + 1]
    messages = [{"role": "user", "content": "use a <tool>"}]
    body = {"model": "tool", "messages": messages, "max_tokens": 9, "logprobs": True, "top_logprobs": 0}
    answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert first in engine.requests[-1].prompt
    assert answer["message"]["content"] == "<tool>f</tool>"
    assert [shown["token"] for shown in answer["logprobs"]["content"]] == ["<tool>", "f", "</tool>"]
    streamed = await client.post("/v1/chat/completions", json=body | {"stream": True})
    assert "<tool>" in streamed.text


async def test_tokenize_and_detokenize_by_model(client: httpx.AsyncClient, first: int) -> None:
    async def ask(path: str, **body: Any) -> httpx.Response:
        return await client.post(path, json=body)

    assert (await ask("/tokenize", model="tool", prompt="<tool>")).json()["tokens"][-1] == first
    assert first not in (await ask("/tokenize", model=BASE, prompt="<tool>")).json()["tokens"]
    answer = await ask("/detokenize", model="tool", tokens=[first, first + 1])
    assert answer.json()["prompt"] == "<tool></tool>"
    refusal = await ask("/detokenize", model="other", tokens=[first])
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, "invalid_token")


async def test_rows_are_neither_scaled_nor_blended(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary, engine: FakeEngine
) -> None:
    library.reported = {"replaced": ("norm:3",)}
    for name in ("norms", "norms-too"):
        await load(server, library, name, "one content")
    library.reported = {}
    await load(server, library, "other")
    half, whole, other = {"name": "norms", "scale": 0.5}, {"name": "norms"}, {"name": "other"}
    for lora in (half, [whole, other], [other, half], [whole, {"name": "norms-too"}]):
        message = await refused(client, 400, "invalid_request", "lora", lora=lora)
        assert "alone and at scale 1" in message
    assert not engine.requests
    # Two names of one version are one adapter.
    for lora in ("norms", [half, {"name": "norms-too", "scale": 0.5}]):
        await ok(client, lora=lora)


async def test_a_replaced_adapter_is_read_anew(
    client: httpx.AsyncClient, engine: FakeEngine, server: ServerState, library: FakeLibrary, first: int
) -> None:
    await ok(client, prompt="<tool>", lora="tool")
    old = engine.requests[-1].prompt
    await server.directory.unload("tool")
    await load(server, library, "tool", "other weights")
    assert (await post(client, prompt=old, lora="tool")).status_code == 400
    await ok(client, prompt="<tool>", lora="tool")
    assert engine.requests[-1].prompt != old


def test_only_ids_that_follow_can_be_added() -> None:
    for tokenizer in (byte_level_tokenizer(), byte_fallback_tokenizer()):
        text, size = Text(tokenizer), len(tokenizer)
        names = [AddedToken(size, "<a>"), AddedToken(size + 1, "<b> c", special=True)]
        longer = text.with_tokens(names[::-1])
        assert longer is not None
        assert longer.encode("x<a><b> c", special=False).ids[-2:] == [size, size + 1]
        assert longer.decode([size, size + 1]) == "<a>"
        assert longer.token_bytes(size + 1) == b"<b> c"
        assert (text.size, text.token_bytes(size)) == (size, b"")  # the base's is as it was
        assert text.with_tokens([AddedToken(0, "known")]) is text
        assert text.with_tokens([AddedToken(size + 1, "<gap>")]) is None
        assert text.with_tokens([AddedToken(size, "<a>"), AddedToken(size + 1, "<a>")]) is None


async def test_few_are_kept(server: ServerState, library: FakeLibrary, engine: FakeEngine) -> None:
    size = len(engine.tokenizer)
    for i in range(MAX_KEPT + 2):
        library.reported = {"added_tokens": (AddedToken(size, f"<tool {i}>"),)}
        await load(server, library, f"tool-{i}")
        uses = server.uses_of(f"tool-{i}", Caller())
        assert (await server.text_for(uses)).encode(f"<tool {i}>", special=False).ids == [size]
        assert await server.text_for(uses) is await server.text_for(uses)
    assert len(server.adapter_texts._kept) == MAX_KEPT
