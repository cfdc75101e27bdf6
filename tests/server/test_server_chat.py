"""`/v1/chat/completions` over the fake engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeLibrary, byte_level_tokenizer
from server_parts import BASE, open_client

from loraserve.server.app import build_app, make_state
from loraserve.server.entries import LoadOrder
from loraserve.server.ports import AdapterPlace
from loraserve.server.state import ServerState

pytestmark = pytest.mark.anyio
REPLY = "Hello from the base 😀, bye."
HI = [{"role": "user", "content": "Hi"}]


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"model": BASE, "messages": HI} | body)


async def ok(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await post(client, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client: httpx.AsyncClient, code: str, param: str, **body: Any) -> str:
    response = await post(client, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    return str(error["message"])


async def events(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await post(client, stream=True, **body)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def prompt_of(engine: FakeEngine) -> str:
    return str(engine.tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False))


async def test_plain_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await ok(client)
    assert answer["object"] == "chat.completion"
    assert answer["lora"] is None
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": REPLY, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert prompt_of(engine) == "<|user|>Hi<|end|><|assistant|>"
    assert answer["usage"]["prompt_tokens"] == len(engine.requests[0].prompt)


async def test_max_tokens_fills_the_context(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ok(client)
    request = engine.requests[-1]
    assert request.params.max_tokens == engine.info.max_context - len(request.prompt)
    await ok(client, max_completion_tokens=3)
    assert engine.requests[-1].params.max_tokens == 3
    await ok(client, max_tokens=4, max_completion_tokens=4)
    await refused(client, "invalid_request", "max_completion_tokens", max_tokens=4, max_completion_tokens=5)
    await refused(client, "invalid_request", "max_completion_tokens", max_completion_tokens=0)
    limit = engine.info.max_context
    message = await refused(client, "context_length_exceeded", "max_tokens", max_tokens=limit)
    assert str(limit) in message
    long = [{"role": "user", "content": "word " * 1000}]
    await refused(client, "context_length_exceeded", "messages", messages=long)


async def test_message_forms(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [
        {"role": "developer", "content": "Be brief.", "name": "dev"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "ok", "tool_calls": [], "refusal": None},
        {"role": "user", "content": ""},
    ]
    await ok(client, messages=messages)
    assert prompt_of(engine) == (
        "<|system|>Be brief.<|end|><|user|>one\ntwo<|end|><|assistant|>ok<|end|><|user|><|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"content": "x"}, "invalid_request", "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "invalid_request", "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "invalid_request", "messages[0].role"),
        ({"role": "tool", "content": "x"}, "unsupported_field", "messages[0].role"),
        ({"role": "user"}, "invalid_request", "messages[0].content"),
        ({"role": "user", "content": None}, "invalid_request", "messages[0].content"),
        ({"role": "user", "content": 5}, "invalid_request", "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "invalid_request", "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "unsupported_field", "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "invalid_request", "messages[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]},
            "unsupported_field",
            "messages[0].content[0].b",
        ),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "unsupported_field", "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "mood": "good"}, "unsupported_field", "messages[0].mood"),
        ({"role": "user", "content": "x", "name": 5}, "invalid_request", "messages[0].name"),
    ],
)
async def test_messages_that_are_wrong(
    client: httpx.AsyncClient, message: dict[str, Any], code: str, param: str
) -> None:
    await refused(client, code, param, messages=[message])


async def test_other_wrong_messages(client: httpx.AsyncClient) -> None:
    await refused(client, "invalid_request", "messages", messages=[])
    await refused(client, "invalid_request", "messages", messages="hi")
    await refused(client, "invalid_request", "messages[0]", messages=["hi"])
    late = [*HI, {"role": "system", "content": "x"}]
    assert "system must come first" in await refused(client, "invalid_request", "messages", messages=late)
    content = json.dumps({"model": BASE, "messages": [{"role": "user", "content": "\ud800"}]})
    response = await client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400


async def test_continue_final_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    await ok(client, messages=messages, continue_final_message=True)
    assert prompt_of(engine) == "<|user|>Hi<|end|><|assistant|>Well,"
    await ok(client, messages=messages, continue_final_message=True, add_generation_prompt=False)
    await ok(client, add_generation_prompt=False)
    assert prompt_of(engine) == "<|user|>Hi<|end|>"
    await refused(
        client,
        "invalid_request",
        "continue_final_message",
        messages=messages,
        continue_final_message=True,
        add_generation_prompt=True,
    )


async def test_no_chat_template(engine: FakeEngine, library: FakeLibrary, server: ServerState) -> None:
    state = make_state(server.config, engine, byte_level_tokenizer(template=None), library)
    async with open_client(build_app(state)) as client:
        assert "no chat template" in await refused(client, "invalid_request", "messages")


async def test_logprobs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [*engine.ids("a 😀"), engine.tokenizer.eos_token_id]
    (choice,) = (await ok(client, logprobs=True, top_logprobs=2))["choices"]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    assert raw.decode() == "a 😀<|end|>"
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.25 for entry in content)
    assert content[0]["token"] == "a"
    (choice,) = (await ok(client, logprobs=True))["choices"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    await ok(client, logprobs=False, top_logprobs=0)
    await refused(client, "invalid_request", "top_logprobs", top_logprobs=2)
    await refused(client, "invalid_request", "top_logprobs", logprobs=True, top_logprobs=21)
    await refused(client, "invalid_request", "logprobs", logprobs=2)


async def test_stream_equals_the_whole(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = await ok(client, **fields)
    chunks = await events(client, **fields, stream_options={"include_usage": True})
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        content = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
        assert content == choice["logprobs"]["content"]
        assert parts[-1]["delta"] == {}
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    final = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert all("lora" in chunk for chunk in final)


async def test_adapter(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary, engine: FakeEngine
) -> None:
    place = AdapterPlace(path=library.make("a", "weights"))
    await server.directory.load(LoadOrder(name="a", place=place))
    version = library.version_of("weights")
    for body in ({"lora": "a"}, {"model": "a"}, {"model": f"{BASE}:a"}):
        answer = await ok(client, **body)
        assert answer["lora"] == [{"name": "a", "version": version, "scale": 1.0}]
        assert answer["choices"][0]["message"]["content"] == f"Hello from {version[:4]} 😀, bye."
        chunks = await events(client, **body)
        assert chunks[-1]["lora"] == answer["lora"]
