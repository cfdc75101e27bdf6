"""Every failure leaves in OpenAI's shape: error classes, unknown fields, routes, bodies."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from server_parts import BASE, open_client

import loraserve.errors
from loraserve.errors import AdapterFault, AdapterRefused, LoraserveError, from_wire
from loraserve.server.app import build_app
from loraserve.server.failures import error_response
from loraserve.server.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, NO_EFFECT
from loraserve.server.protocol import ChatRequest, CompletionRequest
from loraserve.server.state import ServerState

pytestmark = pytest.mark.anyio

ERRORS = [
    value
    for value in vars(loraserve.errors).values()
    if isinstance(value, type) and issubclass(value, LoraserveError) and value is not AdapterRefused
]
COMPLETION: dict[str, Any] = {"model": BASE, "prompt": "Hi"}
CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}]}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def shape(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code", "param"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
async def test_every_error_class_has_an_answer(
    cls: type[LoraserveError], client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.fail_with = cls("the reason")
    for path, body in ROUTES:
        response = await client.post(path, json=body)
        error = shape(response)
        assert response.status_code == cls.status
        assert (error["type"], error["code"], error["message"]) == (cls.type, cls.code, "the reason")


@pytest.mark.parametrize("fault", AdapterFault)
def test_every_adapter_fault_has_an_answer(fault: AdapterFault) -> None:
    response = error_response(AdapterRefused(fault, "the reason"))
    assert response.status_code == (403 if fault is AdapterFault.PATH_ESCAPE else 400)
    assert json.loads(response.body)["error"]["code"] == fault.value
    assert from_wire(fault.value, "x").code == fault.value


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in ERRORS] + [fault.value for fault in AdapterFault]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_unknown_fields_are_named(path: str, body: dict[str, Any], client: httpx.AsyncClient) -> None:
    for name in ("temprature", "best", "mirostat", "\ud800".encode("utf-8", "replace").decode()):
        error = shape(await client.post(path, json=body | {name: 1}))
        assert (error["code"], error["param"]) == ("unsupported_field", name)
        assert name in error["message"]
        assert (await client.post(path, json=body | {name: None})).status_code == 200


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
async def test_fields_without_effect_are_accepted(name: str, client: httpx.AsyncClient) -> None:
    for path, body in ROUTES:
        for value in ("x", {"a": "b"}, True, None):
            assert (await client.post(path, json=body | {name: value})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "neutral"),
    [("/v1/completions", COMPLETION, COMPLETION_NEUTRAL), ("/v1/chat/completions", CHAT, CHAT_NEUTRAL)],
    ids=["completions", "chat"],
)
async def test_unsupported_fields_only_with_neutral_values(
    path: str, body: dict[str, Any], neutral: dict[str, tuple[Any, ...]], client: httpx.AsyncClient
) -> None:
    for name, values in neutral.items():
        for value in (None, *values):
            response = await client.post(path, json=body | {name: value})
            assert response.status_code == 200, (name, value, response.text)
        error = shape(await client.post(path, json=body | {name: {"some": ["thing"]}}))
        assert (error["code"], error["param"]) == ("unsupported_field", name)
    # What is served must not be in the list of what is not.
    served = set(CompletionRequest.model_fields if path == "/v1/completions" else ChatRequest.model_fields)
    assert not served & set(neutral)
    assert not set(NO_EFFECT) & set(neutral)


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ({"best_of": 1}, 200),
        ({"best_of": 3, "n": 3}, 200),
        ({"best_of": 2}, 400),
        ({"best_of": "1"}, 400),
        ({"frequency_penalty": 0.0}, 200),
        ({"frequency_penalty": 0.1}, 400),
        ({"frequency_penalty": False}, 400),
        ({"response_format": {"type": "text"}}, 200),
        ({"response_format": {"type": "json_object"}}, 400),
    ],
)
async def test_best_of_and_friends(extra: dict[str, Any], status: int, client: httpx.AsyncClient) -> None:
    for path, body in ROUTES:
        response = await client.post(path, json=body | extra)
        assert response.status_code == status, response.text


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"priority": 2**40}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "1"}, "timeout_s"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
    ],
    ids=str,
)
async def test_wrong_values_name_their_field(extra: dict[str, Any], param: str, client: httpx.AsyncClient) -> None:
    for path, body in ROUTES:
        response = await client.post(path, json=body | extra)
        assert response.status_code == 400, response.text
        assert shape(response)["param"] == param


async def test_stop_takes_sixteen(client: httpx.AsyncClient) -> None:
    stops = [f"stop{index}" for index in range(16)]
    assert (await client.post("/v1/completions", json=COMPLETION | {"stop": stops})).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b"", "application/json"),
        (b"[1]", "application/json"),
        (b"null", "application/json"),
        (b'"x"', "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"model": ' + b"9" * 5000 + b"}", "application/json"),
        (b"[" * 100_000, "application/json"),
        (json.dumps(COMPLETION).encode(), "text/plain"),
        (json.dumps(COMPLETION).encode(), "application/x-www-form-urlencoded"),
        (json.dumps(COMPLETION).encode(), None),
        (b'{"prompt": "Hi", "model": "m", "temperature": NaN}', "application/json"),
        (b'{"prompt": "Hi", "\\ud800": 1, "model": "base-model"}', "application/json"),
    ],
)
async def test_bodies_that_are_none(content: bytes, kind: str | None, client: httpx.AsyncClient) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code in (400, 404), response.text
    shape(response)


async def test_missing_fields(client: httpx.AsyncClient) -> None:
    error = shape(await client.post("/v1/completions", json={"model": BASE}))
    assert error["param"] == "prompt"
    assert "missing" in error["message"]
    assert shape(await client.post("/v1/chat/completions", json={"model": BASE}))["param"] == "messages"


async def test_routes_that_are_none(client: httpx.AsyncClient) -> None:
    for method, path, status in [("GET", "/nothing", 404), ("POST", "/v1/nope", 404), ("GET", "/v1/completions", 405)]:
        response = await client.request(method, path)
        assert response.status_code == status
        assert path in shape(response)["message"]


async def test_body_limit(make_server: Any, engine: FakeEngine) -> None:
    async with open_client(build_app(make_server(max_body=200))) as client:
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
        response = await client.post("/v1/completions", json=COMPLETION | {"user": "x" * 300})
        assert response.status_code == 413
        assert shape(response)["code"] == "payload_too_large"

        async def parts() -> Any:
            for _ in range(100):
                yield b"x" * 50

        response = await client.post("/v1/completions", content=parts())
        assert response.status_code == 413, "without a content-length too"


async def test_what_nobody_foresaw(server: ServerState, engine: FakeEngine) -> None:
    def broken(request: object) -> list[int]:
        raise RuntimeError("secret /path")

    engine.script = broken
    async with open_client(build_app(server)) as client:
        response = await client.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 500
        assert shape(response)["code"] == "internal_error"
        assert "secret" not in response.text
        response = await client.post("/v1/completions", json=COMPLETION | {"stream": True})
        assert "secret" not in response.text
        assert "internal_error" in response.text
    assert len(server.inflight) == 0


async def test_openapi_document(app: FastAPI, client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/adapters/load",
        "/adapters/unload",
        "/adapters",
        "/adapters/{name}",
        "/health",
        "/ready",
        "/metrics",
        "/version",
        "/tokenize",
        "/detokenize",
    ):
        (operation,) = document["paths"][path].values()
        assert operation["summary"]
        assert "422" not in operation["responses"]
    schema = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "anyOf" in schema["prompt"]
    assert "anyOf" in schema["lora"]
