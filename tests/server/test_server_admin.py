"""The adapter endpoints."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeLibrary
from server_parts import BASE, eventually

from loraserve.errors import AdapterFault, AdapterRefused

pytestmark = pytest.mark.anyio

INFO_FIELDS = {
    "name",
    "version",
    "state",
    "residency",
    "pinned",
    "source",
    "rank",
    "targets",
    "scaling",
    "dtype",
    "bytes",
    "progress",
    "leases",
    "requests",
    "loaded_at",
    "last_used_at",
    "chat_template",
    "warnings",
    "report",
    "error",
    "visibility",
}


async def load(client: httpx.AsyncClient, library: FakeLibrary, name: str, content: str, **body: Any) -> httpx.Response:
    path = library.make(f"folder-{content}", content)
    return await client.post("/adapters/load", json={"name": name, "path": path} | body)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# -- adapters ---------------------------------------------------------------------------------------------------------


async def test_load_answers_with_the_info(client: httpx.AsyncClient, library: FakeLibrary) -> None:
    response = await load(client, library, "org/a", "one", pin=True)
    assert response.status_code == 200
    info = response.json()
    assert set(info) == INFO_FIELDS
    assert info["version"] == library.version_of("one")
    assert (info["name"], info["state"], info["residency"], info["pinned"]) == ("org/a", "ready", "device", True)
    assert (info["rank"], info["targets"], info["scaling"]) == (8, ["q_proj", "v_proj"], [2.0])
    assert (info["dtype"], info["bytes"], info["progress"], info["error"]) == ("float32", 3, None, None)
    assert (info["leases"], info["requests"], info["last_used_at"], info["warnings"]) == (0, 0, None, [])
    assert info["report"]["version"] == info["version"]
    assert (info["report"]["features"], info["report"]["new_tokens"]) == ([], 0)
    assert set(info["source"]) == {"kind", "path", "repo", "revision", "commit", "subfolder"}
    assert (await client.get("/adapters/org/a")).json() == info
    assert (await client.get("/adapters")).json() == {"data": [info]}
    again = await load(client, library, "org/a", "one")
    assert (again.status_code, again.json()) == (200, info)


async def test_requests_show_in_the_info(client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine) -> None:
    await load(client, library, "a", "one")
    engine.gate = asyncio.Event()
    body = {"model": BASE, "prompt": "Hi", "lora": "a", "n": 2}
    request = asyncio.create_task(client.post("/v1/completions", json=body))
    await eventually(lambda: len(engine.open) == 2)
    info = (await client.get("/adapters/a")).json()
    assert (info["leases"], info["requests"]) == (2, 2)
    assert info["last_used_at"] >= info["loaded_at"]
    engine.gate.set()
    assert (await request).status_code == 200
    assert (await client.get("/adapters/a")).json()["leases"] == 0


async def test_load_conflicts(client: httpx.AsyncClient, library: FakeLibrary) -> None:
    await load(client, library, "a", "one")
    assert code(await load(client, library, "a", "two")) == (409, "name_taken")
    assert code(await load(client, library, BASE, "two")) == (409, "name_reserved")
    assert code(await load(client, library, "-a", "two")) == (400, "invalid_name")
    replaced = await load(client, library, "a", "two", replace=True)
    assert replaced.json()["version"] == library.version_of("two")
    assert code(await client.get("/adapters/b")) == (404, "adapter_not_found")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "a"}, "path"),
        ({"name": "a", "path": "x", "repo": "y"}, "path"),
        ({"path": "x"}, "name"),
        ({"name": "a", "path": ""}, "path"),
        ({"name": "a", "path": "a\0b"}, "path"),
        ({"name": "a", "path": "x", "revision": "main"}, "revision"),
        ({"name": "a", "path": "x", "token": "t"}, "token"),
        ({"name": "a", "path": "x", "wait": "no"}, "wait"),
        ({"name": "a", "path": "x", "pinned": True}, "pinned"),
        ({"name": 5, "path": "x"}, "name"),
    ],
    ids=str,
)
async def test_load_bodies_that_are_wrong(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await client.post("/adapters/load", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_load_without_wait(client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine) -> None:
    library.gate = threading.Event()
    response = await load(client, library, "a", "one", wait=False, pin=True)
    assert response.status_code == 202
    info = response.json()
    assert set(info) == INFO_FIELDS
    assert (info["state"], info["version"], info["rank"], info["pinned"]) == ("fetching", None, None, True)
    assert info["source"]["path"] is not None
    await eventually(lambda: library.adds == 1)
    info = (await client.get("/adapters/a")).json()
    assert info["progress"] == {"bytes_done": 0, "bytes_total": 10}
    answer = await client.post("/v1/completions", json={"model": BASE, "prompt": "Hi", "lora": "a"})
    assert code(answer) == (409, "adapter_in_use")
    assert code(await client.post("/adapters/unload", json={"name": "a"})) == (409, "adapter_in_use")
    library.gate.set()
    for _ in range(200):
        info = (await client.get("/adapters/a")).json()
        if info["state"] != "fetching":
            break
        await asyncio.sleep(0.01)
    assert (info["state"], info["progress"]) == ("ready", None)


async def test_refused_loads(client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine) -> None:
    engine.refuse[library.version_of("bad")] = AdapterRefused(AdapterFault.NON_FINITE, "NaN in q_proj")
    assert code(await load(client, library, "a", "bad")) == (400, "non_finite")
    assert (await client.get("/adapters")).json() == {"data": []}
    assert (await load(client, library, "a", "bad", wait=False)).status_code == 202
    await eventually(lambda: len(engine.load_calls) == 2)
    await asyncio.sleep(0.05)
    info = (await client.get("/adapters/a")).json()
    assert (info["state"], info["error"]) == ("failed", {"code": "non_finite", "message": "NaN in q_proj"})
    answer = await client.post("/v1/completions", json={"model": BASE, "prompt": "Hi", "lora": "a"})
    assert code(answer) == (404, "adapter_not_found")


async def test_unload(client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine) -> None:
    await load(client, library, "a", "one")
    version = library.version_of("one")
    response = await client.post("/adapters/unload", json={"name": "a"})
    assert response.status_code == 200
    assert response.json() == {"name": "a", "version": version, "drained": 0, "aborted": 0, "freed": True}
    assert engine.loaded == {}
    assert code(await client.post("/adapters/unload", json={"name": "a"})) == (404, "adapter_not_found")
    assert code(await client.post("/adapters/unload", json={"name": "b"})) == (404, "adapter_not_found")
    for deadline in (-1, "1", 1e9):
        response = await client.post("/adapters/unload", json={"name": "a", "deadline_s": deadline})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "deadline_s")
    response = await client.post("/adapters/unload", json={"name": "a", "wipe": True})
    assert response.json()["error"]["param"] == "wipe"


@pytest.mark.parametrize("body", [{"force": True}, {"deadline_s": 0.05}], ids=["force", "deadline"])
async def test_unload_ends_streams_with_an_error(
    client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine, body: dict[str, Any]
) -> None:
    await load(client, library, "a", "one")
    engine.gate = asyncio.Event()
    ask = {"model": BASE, "prompt": "Hi", "lora": "a", "n": 2}
    whole = asyncio.create_task(client.post("/v1/completions", json=ask))
    stream = asyncio.create_task(client.post("/v1/completions", json=ask | {"stream": True}))
    base = asyncio.create_task(client.post("/v1/completions", json=ask | {"lora": None, "n": 1}))
    await eventually(lambda: len(engine.open) == 5)
    response = await client.post("/adapters/unload", json={"name": "a"} | body)
    assert response.json()["aborted"] == 4
    assert engine.loaded == {}
    assert code(await whole) == (503, "request_aborted")
    assert "unloaded" in (await whole).json()["error"]["message"]
    assert code(await stream) == (503, "request_aborted"), "nothing had been sent yet"
    engine.gate.set()
    assert (await base).status_code == 200


async def test_drain_and_replace_under_traffic(
    client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine
) -> None:
    await load(client, library, "a", "one")
    one = library.version_of("one")
    engine.delay = 0.0005
    stop = False
    seen: set[str] = set()

    async def traffic() -> None:
        while not stop:
            response = await client.post("/v1/completions", json={"model": "a", "prompt": "Hi", "max_tokens": 50})
            assert response.status_code == 200, response.text
            version = response.json()["lora"][0]["version"]
            assert response.json()["choices"][0]["text"] == f"Hello from {version[:4]} 😀, bye."
            seen.add(version)

    tasks = [asyncio.create_task(traffic()) for _ in range(4)]
    for index in range(6):
        answer = await load(client, library, "a", "two" if index % 2 == 0 else "one", replace=True)
        assert answer.status_code == 200
        seen.clear()
        await eventually(partial(seen.__contains__, answer.json()["version"]))
    stop = True
    await asyncio.gather(*tasks)
    assert engine.used_after_drop == []
    await eventually(lambda: set(engine.loaded) == {one})
    response = await client.post("/adapters/unload", json={"name": "a"})
    assert response.json()["drained"] == 0
    assert engine.loaded == {}
