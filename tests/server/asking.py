"""Asking `/v1/completions` and checking what comes."""

from __future__ import annotations

import json
from typing import Any

import httpx
from fake_engine import FakeLibrary
from server_parts import BASE

from loraserve.server.entries import LoadOrder
from loraserve.server.ports import AdapterPlace
from loraserve.server.state import ServerState


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": BASE, "prompt": "Hi", "max_tokens": 100} | body)


async def ok(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await post(client, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await post(client, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def refused(client: httpx.AsyncClient, status: int, code: str, param: str | None, **body: Any) -> str:
    response = await post(client, **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert (error["code"], error["param"]) == (code, param), error
    return str(error["message"])


async def load(server: ServerState, library: FakeLibrary, name: str, content: str | None = None) -> str:
    path = library.make(f"dir-{name.replace('/', '-')}", content or f"weights of {name}")
    entry = await server.directory.load(LoadOrder(name=name, place=AdapterPlace(path=path)))
    assert entry.served is not None
    return entry.served.version
