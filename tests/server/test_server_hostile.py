"""Bodies that no honest client sends: each is refused by name, costs little, and leaves nothing held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from asking import load, ok, post, refused
from fake_engine import FakeEngine, FakeLibrary, byte_fallback_tokenizer, byte_level_tokenizer
from server_parts import BASE

from loraserve.config import ServerConfig
from loraserve.server.auth import Auth
from loraserve.server.metrics import Metrics
from loraserve.server.middleware import Envelope
from loraserve.server.responses import HealthResponse
from loraserve.server.state import ServerState
from loraserve.server.streaming import EventStream
from loraserve.server.text import Text

pytestmark = pytest.mark.anyio
HALF = "\ud800"


async def send(client: httpx.AsyncClient, content: bytes, path: str = "/v1/completions") -> tuple[int, Any]:
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    return response.status_code, response.json()["error"]


async def test_seeds_go_round_and_hold_nothing(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary, engine: FakeEngine
) -> None:
    await load(server, library, "sql")
    await ok(client, lora="sql", n=3, seed=2**63 - 2)
    seeds = [request.params.seed for request in sorted(engine.requests, key=lambda request: request.id)]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63) + 1]
    assert not len(server.inflight)


async def test_late_refusals_hold_nothing(client: httpx.AsyncClient, server: ServerState, library: FakeLibrary) -> None:
    await load(server, library, "sql")
    for fields in ({"seed": 2**63}, {"stop_token_ids": [10**6]}, {"stop": [""]}, {"logprobs": 21}):
        response = await post(client, lora="sql", n=3, **fields)
        assert response.status_code == 400, fields
    assert not len(server.inflight)
    assert (await client.get("/adapters/sql")).json()["leases"] == 0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"stop": HALF}, "stop"),
        ("/v1/completions", {"stop": ["a", HALF]}, "stop"),
        ("/v1/completions", {"cache_salt": HALF}, "cache_salt"),
        ("/v1/completions", {"prompt": ["a", HALF]}, "prompt"),
        ("/tokenize", {"prompt": HALF}, "prompt"),
        ("/adapters/load", {"path": f"/x/{HALF}"}, "path"),
        ("/adapters/load", {"path": "/x", "subfolder": HALF}, "subfolder"),
        ("/adapters/load", {"repo": "org/name", "token": HALF}, "token"),
    ],
)
async def test_half_a_surrogate_pair(client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str) -> None:
    body: dict[str, Any] = {"/v1/completions": {"model": BASE, "prompt": "Hi"}, "/adapters/load": {"name": "a"}}.get(
        path, {}
    )
    status, error = await send(client, json.dumps(body | fields).encode(), path)
    assert (status, error["param"]) == (400, param), error


@pytest.mark.parametrize(
    ("rest", "part"),
    [
        (b',"max_tokens":3,"max_tokens":4}', "'max_tokens' twice"),
        (b',"lora":{"name":"a","name":"b"}}', "'name' twice"),
        (b',"user":"\xff"}', "UTF-8"),
        (b',"seed":' + b"9" * 5000 + b"}", "digits"),
        (b',"user":' + b"[" * 50_000, "nested"),
        (b"}}", "not JSON"),
    ],
    ids=["twice", "inner", "utf8", "digits", "deep", "extra"],
)
async def test_bodies_that_are_no_json(client: httpx.AsyncClient, rest: bytes, part: str) -> None:
    status, error = await send(client, b'{"model":"base-model","prompt":"Hi"' + rest)
    assert (status, error["code"]) == (400, "invalid_request")
    assert part in error["message"]


async def test_prompts_that_cannot_fit_are_not_tokenized(
    client: httpx.AsyncClient, server: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenized")

    monkeypatch.setattr(ServerState, "encode", never)
    message = await refused(client, 400, "context_length_exceeded", "prompt", prompt="x" * 100_000)
    assert "100000 characters" in message
    await refused(client, 400, "context_length_exceeded", "prompt", prompt=[10**6] * 10_000)
    chat = {"model": BASE, "messages": [{"role": "user", "content": "x" * 100_000}]}
    response = await client.post("/v1/chat/completions", json=chat)
    assert response.json()["error"]["param"] == "messages"


def test_least_tokens_is_never_too_many() -> None:
    text = Text(byte_level_tokenizer())
    for sample in ("x" * 5000, "Hello world, I am an adapter! " * 200, "漢字かな" * 500, " " * 4000, "<|begin|>" * 100):
        assert 0 < text.least_tokens(sample) <= len(text.encode(sample, special=False).ids), sample[:20]
    # Its normalizer may drop what it likes.
    assert Text(byte_fallback_tokenizer()).least_tokens("x" * 5000) == 0


async def test_long_texts_leave_the_interpreter_to_others() -> None:
    text = Text(byte_level_tokenizer())
    sample = "The quick brown fox jumps over the lazy dog. " * 20_000
    turns = 0
    work = asyncio.create_task(asyncio.to_thread(text.encode, sample))
    while not work.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20
    short, long = text.encode("Hello world"), text.encode("Hello world" + " Hello world" * 400)
    assert long.ids[: len(short.ids)] == short.ids


async def test_one_adapter_pinned_in_only_one_field(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary
) -> None:
    version = await load(server, library, "sql")
    pinned = f"sql@{version[:8]}"
    for model, lora in ((pinned, "sql"), ("sql", pinned), (f"{BASE}:{pinned}", {"name": "sql", "scale": 0.5})):
        assert (await ok(client, model=model, lora=lora))["lora"][0]["version"] == version
    await refused(client, 404, "model_not_found", "model", model="sql@ffffffff", lora="sql")
    answer = await client.post("/tokenize", json={"prompt": "Hi", "model": pinned})
    assert answer.status_code == 200


async def test_a_body_that_never_ends() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("reached")

    sent: list[Any] = []

    async def receive() -> Any:
        if not sent:
            await asyncio.sleep(3600)

    async def answer(message: Any) -> None:
        sent.append(message)

    envelope = Envelope(app, Auth(ServerConfig()), Metrics(lambda: None), 1000, body_timeout_s=0.05)  # type: ignore[arg-type,return-value]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await asyncio.wait_for(envelope(scope, receive, answer), 5)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"


async def test_a_client_that_takes_nothing_is_let_go() -> None:
    closed = False

    async def events() -> AsyncGenerator[HealthResponse, None]:
        nonlocal closed
        try:
            while True:
                yield HealthResponse(status="ok", detail="x")
        finally:
            closed = True

    num_sent = 0

    async def send(_: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 5:
            await asyncio.sleep(3600)

    async def receive() -> Any:
        await asyncio.sleep(3600)

    await asyncio.wait_for(EventStream(events(), stalled_s=0.1)({"type": "http"}, receive, send), 5)
    assert (num_sent, closed) == (5, True)


async def test_a_request_that_is_cut_off_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def app(*_: Any) -> None:
        await asyncio.sleep(3600)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Any) -> None:
        raise AssertionError("sent")

    envelope = Envelope(app, Auth(ServerConfig()), Metrics(lambda: None), 1000)  # type: ignore[arg-type,return-value]
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "query_string": b""}
    task = asyncio.ensure_future(envelope(scope, receive, send))
    await asyncio.sleep(0.02)
    task.cancel()  # as uvicorn does when its time to end is over; what comes out it logs with a traceback
    await task
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
