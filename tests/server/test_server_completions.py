"""`/v1/completions` over the fake engine: shapes, fields, errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from asking import events, load, ok, refused
from fake_engine import FakeEngine, FakeLibrary
from server_parts import BASE

from loraserve.errors import AdapterFailed, Overloaded
from loraserve.server.state import ServerState

pytestmark = pytest.mark.anyio
REPLY = "Hello from the base 😀, bye."


async def test_plain_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.cached = 2
    answer = await ok(client)
    assert answer["object"] == "text_completion"
    assert answer["model"] == BASE
    assert answer["lora"] is None
    num_reply = len(engine.ids(REPLY)) + 1
    num_prompt = len(engine.tokenizer.encode("Hi"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_reply,
        "total_tokens": num_prompt + num_reply,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer["choices"] == [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop"}]
    assert engine.requests[0].prompt == engine.tokenizer.encode("Hi")


async def test_length_and_default_of_max_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await ok(client, max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    await ok(client, max_tokens=None)
    assert engine.requests[-1].params.max_tokens == 16
    num = engine.info.max_context - 5
    await ok(client, prompt=[10] * num, max_tokens=None)
    assert engine.requests[-1].params.max_tokens == 5, "the default shrinks to the room there is"


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ok(
        client,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=3,
        stop_token_ids=[9],
        ignore_eos=True,
        logprobs=2,
        priority=-4,
        timeout_s=9,
        cache_salt="salt",
        max_tokens=5,
    )
    request = engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0, 0.5, 7, 0.1, 3)
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs, params.max_tokens) == ((9,), True, 2, 5)
    assert params.prompt_logprobs is None
    assert (request.priority, request.timeout_s, request.cache_salt) == (-4, 9.0, "salt")


@pytest.mark.parametrize(
    "prompt",
    ["Hi", ["Hi", "Ho"], [5, 6, 7], [[5, 6], [7, 8, 9]], ["one"]],
    ids=["text", "texts", "ids", "lists", "one"],
)
async def test_prompt_forms(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any) -> None:
    answer = await ok(client, prompt=prompt, return_token_ids=True)
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    values = prompt if many else [prompt]
    expected = [engine.tokenizer.encode(value) if isinstance(value, str) else value for value in values]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    reply = [*engine.ids(REPLY), engine.tokenizer.eos_token_id]
    assert all(choice["token_ids"] == reply for choice in answer["choices"])


@pytest.mark.parametrize(
    "prompt",
    [None, 5, "", [], [[]], [""], ["a", 5], [5, "a"], [[5], "a"], [True], [1.5], {}, [[5], []], "\ud800", ["\udc00"]],
)
async def test_prompts_that_are_none(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any) -> None:
    core = engine.tokenizer.backend_tokenizer
    post_processor, core.post_processor = core.post_processor, None  # without <|begin|> an empty text is empty
    try:
        content = json.dumps({"model": BASE, "prompt": prompt})
        response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    finally:
        core.post_processor = post_processor
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "prompt"
    assert not engine.requests


async def test_token_ids_outside_the_vocabulary(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    size = engine.info.vocab_size
    await ok(client, prompt=[size - 1])
    for prompt in ([size], [-1], [[5], [size]]):
        message = await refused(client, 400, "invalid_token", "prompt", prompt=prompt)
        assert str(size) in message


async def test_too_long(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    limit = engine.info.max_context
    await ok(client, prompt=[5] * (limit - 1), max_tokens=1)
    message = await refused(client, 400, "context_length_exceeded", "prompt", prompt=[5] * limit, max_tokens=1)
    assert str(limit) in message
    assert str(limit + 1) in message
    await refused(client, 400, "context_length_exceeded", "max_tokens", prompt=[5] * 10, max_tokens=limit - 9)
    await refused(client, 400, "context_length_exceeded", "prompt", prompt="word " * 2000)


async def test_several_choices(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await ok(client, prompt=["Hi", "Ho"], n=3, seed=10)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert sorted(request.params.seed or 0 for request in engine.requests) == [10, 10, 11, 11, 12, 12]
    assert answer["usage"]["prompt_tokens"] == len(engine.tokenizer.encode("Hi")) + len(engine.tokenizer.encode("Ho"))
    assert answer["usage"]["completion_tokens"] == 6 * (len(engine.ids(REPLY)) + 1)
    assert len({request.id for request in engine.requests}) == 6


async def test_stream_equals_the_whole(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    whole = await ok(client, n=2, prompt=["Hi", "Ho"], return_token_ids=True, logprobs=1)
    chunks = await events(
        client, n=2, prompt=["Hi", "Ho"], return_token_ids=True, logprobs=1, stream_options={"include_usage": True}
    )
    assert all(chunk["object"] == "text_completion" and chunk["model"] == BASE for chunk in chunks)
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in part for part in parts[1:])
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for part in parts for value in part["logprobs"][key]] == choice["logprobs"][key]


async def test_stream_without_usage(client: httpx.AsyncClient) -> None:
    chunks = await events(client)
    assert all("usage" not in chunk for chunk in chunks)
    assert "lora" in chunks[-1]
    assert chunks[-1]["lora"] is None
    assert all("lora" not in chunk for chunk in chunks[:-1])


async def test_stop_string(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await ok(client, stop=["never", " 😀"], return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello from the base"
    assert choice["finish_reason"] == "stop"
    assert engine.tokenizer.decode(choice["token_ids"]) == choice["text"]
    assert engine.left == [engine.requests[0].id], "the engine stops generating"
    assert answer["usage"]["completion_tokens"] > len(choice["token_ids"])
    chunks = await events(client, stop=" 😀")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_stop_token_has_no_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    stop = engine.ids("!")[0]
    engine.script = lambda request: [*engine.ids("ab"), stop, *engine.ids("cd")]
    answer = await ok(client, stop_token_ids=[stop], return_token_ids=True)
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["token_ids"] == [*engine.ids("ab"), stop]
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_logprobs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda request: engine.ids("ab 😀")
    (choice,) = (await ok(client, logprobs=2))["choices"]
    logprobs = choice["logprobs"]
    ids = engine.ids("ab 😀")
    assert len(logprobs["tokens"]) == len(ids)
    assert logprobs["token_logprobs"] == [-0.25] * len(ids)
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    assert logprobs["text_offset"][0] == 0
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])
    (choice,) = (await ok(client, logprobs=0))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [None] * len(ids)
    await refused(client, 400, "invalid_request", "logprobs", logprobs=21)
    await refused(client, 400, "invalid_request", "logprobs", logprobs=True)


async def test_echo(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    (choice,) = (await ok(client, prompt="Größe 😀", echo=True, logprobs=1, return_token_ids=True))["choices"]
    assert choice["text"] == "Größe 😀" + REPLY
    prompt_ids = engine.tokenizer.encode("Größe 😀")
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(prompt_ids) + len(choice["token_ids"])
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][len(prompt_ids)] == len("Größe 😀")
    assert choice["token_ids"] == [*engine.ids(REPLY), engine.tokenizer.eos_token_id]
    chunks = await events(client, prompt="Größe 😀", echo=True, logprobs=1, return_token_ids=True)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]


async def test_echo_of_ids_and_of_nothing_more(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("Hello 漢字")
    (choice,) = (await ok(client, prompt=ids, echo=True, max_tokens=0, logprobs=0))["choices"]
    assert choice["text"] == "Hello 漢字"
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    answer = await ok(client, prompt=ids, echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "Hello 漢字"
    assert answer["usage"]["completion_tokens"] == 0
    await refused(client, 400, "invalid_request", "max_tokens", max_tokens=0)


async def test_stop_strings_do_not_look_into_an_echoed_prompt(client: httpx.AsyncClient) -> None:
    (choice,) = (await ok(client, prompt="Hello", echo=True, stop=["Hello", "from"]))["choices"]
    assert choice["text"] == "Hello"
    assert choice["finish_reason"] == "stop"


async def test_error_of_the_engine_is_an_ordinary_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_with = Overloaded("the queue is full")
    for stream in (False, True):
        message = await refused(client, 429, "overloaded", None, stream=stream)
        assert message == "the queue is full"
    engine.fail_with = AdapterFailed("staging failed")
    await refused(client, 503, "adapter_failed", None, n=3)


async def test_error_after_the_stream_began(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = (3, AdapterFailed("gone"))
    *chunks, last = await events(client)
    assert len(chunks) == 3
    assert last == {"error": {"message": "gone", "type": "server_error", "code": "adapter_failed", "param": None}}
    await refused(client, 503, "adapter_failed", None)


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [("timeout", 408, "request_timeout"), ("abort", 503, "request_aborted"), ("error", 500, "internal_error")],
)
async def test_bad_ends(client: httpx.AsyncClient, engine: FakeEngine, reason: str, status: int, code: str) -> None:
    engine.script = lambda request: engine.ids("a")
    engine.end_with = reason
    await refused(client, status, code, None)
    assert (await events(client))[-1]["error"]["code"] == code


async def test_holds_are_given_back(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary, engine: FakeEngine
) -> None:
    await load(server, library, "a")
    await ok(client, lora="a", n=3)
    await events(client, lora="a", prompt=["x", "y"])
    engine.fail_after = (1, AdapterFailed("gone"))
    await refused(client, 503, "adapter_failed", None, lora="a", n=2)
    await events(client, lora="a", n=2)
    await refused(client, 400, "invalid_request", "temperature", lora="a", temperature=-1)
    assert len(server.inflight) == 0
    assert not server.directory.entry("a").served.holds
    assert not engine.open
