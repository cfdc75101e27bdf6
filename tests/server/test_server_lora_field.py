"""The fields `model`, `lora` and `lora_per_prompt`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from asking import events, load, ok, refused
from fake_engine import FakeEngine, FakeLibrary
from server_parts import BASE, make_config, open_client

from loraserve.server.app import build_app, make_state
from loraserve.server.state import ServerState

pytestmark = pytest.mark.anyio
REPLY = "Hello from the base 😀, bye."


async def test_adapters(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary, engine: FakeEngine
) -> None:
    first, second = await load(server, library, "a"), await load(server, library, "org/b")
    cases: list[tuple[dict[str, Any], list[tuple[str, str, float]]]] = [
        ({"lora": "a"}, [("a", first, 1.0)]),
        ({"lora": f"a@{first[:8]}"}, [("a", first, 1.0)]),
        ({"lora": {"name": "org/b", "scale": 0.5}}, [("org/b", second, 0.5)]),
        ({"lora": [{"name": "a"}, {"name": "org/b", "scale": -2}]}, [("a", first, 1.0), ("org/b", second, -2.0)]),
        ({"model": "a"}, [("a", first, 1.0)]),
        ({"model": f"{BASE}:org/b"}, [("org/b", second, 1.0)]),
        ({"model": "a", "lora": {"name": "a", "scale": 2}}, [("a", first, 2.0)]),
        ({"model": f"a@{first[:6]}"}, [("a", first, 1.0)]),
        ({"model": "a", "lora": None}, [("a", first, 1.0)]),
        ({"lora": []}, []),
        ({"lora": None}, []),
    ]
    for body, uses in cases:
        answer = await ok(client, **body)
        lora = [{"name": name, "version": version, "scale": scale} for name, version, scale in uses]
        assert answer["lora"] == (lora or None), body
        assert answer["model"] == body.get("model", BASE)
        assert [(use.version, use.scale) for use in engine.requests[-1].adapters] == [use[1:] for use in uses]
        chunks = await events(client, **body)
        assert chunks[-1]["lora"] == (lora or None)


async def test_two_names_of_one_version_add_up(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary, engine: FakeEngine
) -> None:
    version = await load(server, library, "a", "same")
    assert await load(server, library, "b", "same") == version
    answer = await ok(client, lora=[{"name": "a", "scale": 0.5}, {"name": "b", "scale": 0.25}])
    assert [use["scale"] for use in answer["lora"]] == [0.5, 0.25]
    assert [(use.version, use.scale) for use in engine.requests[-1].adapters] == [(version, 0.75)]


async def test_lora_per_prompt(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary, engine: FakeEngine
) -> None:
    version = await load(server, library, "a")
    body = {"prompt": ["x", "y", "z"], "lora": ["a", None, {"name": "a", "scale": 2}], "lora_per_prompt": True}
    answer = await ok(client, **body)
    used = [[(use.version, use.scale) for use in request.adapters] for request in engine.requests]
    assert used == [[(version, 1.0)], [], [(version, 2.0)]]
    loras = [choice["lora"] for choice in answer["choices"]]
    assert [lora and lora[0]["scale"] for lora in loras] == [1.0, None, 2.0]
    assert [use["scale"] for use in answer["lora"]] == [1.0, 2.0]
    assert answer["choices"][1]["text"] == REPLY
    await refused(client, 400, "invalid_request", "lora", prompt=["x", "y"], lora=["a"], lora_per_prompt=True)
    await refused(client, 400, "invalid_request", "lora", lora="a", lora_per_prompt=True)


async def test_lora_that_is_wrong(client: httpx.AsyncClient, server: ServerState, library: FakeLibrary) -> None:
    version = await load(server, library, "a")
    await load(server, library, "b")
    other = "0" * 8 if not version.startswith("0") else "1" * 8
    wrong: list[tuple[int, str, str, dict[str, Any]]] = [
        (404, "adapter_not_found", "lora", {"lora": "nobody"}),
        (404, "adapter_not_found", "lora", {"lora": f"a@{other}"}),
        (404, "model_not_found", "model", {"model": "nobody"}),
        (404, "model_not_found", "model", {"model": f"{BASE}:nobody"}),
        (404, "model_not_found", "model", {"model": "other:a"}),
        (404, "model_not_found", "model", {"model": ""}),
        (404, "model_not_found", "model", {"model": "no such thing!"}),
        (400, "invalid_name", "lora", {"lora": "-a"}),
        (400, "invalid_name", "lora", {"lora": "a@XYZ"}),
        (400, "invalid_request", "lora", {"model": "a", "lora": "b"}),
        (400, "invalid_request", "lora", {"model": "a", "lora": []}),
        (400, "invalid_request", "lora", {"model": "a", "lora": [{"name": "a"}, {"name": "b"}]}),
        (400, "invalid_request", "lora", {"lora": ["a"]}),
        (400, "invalid_request", "lora", {"lora": 5}),
        (400, "invalid_request", "lora", {"lora": True}),
        (400, "invalid_request", "lora.name", {"lora": {"scale": 1}}),
        (400, "invalid_request", "lora.scale", {"lora": {"name": "a", "scale": "1"}}),
        (400, "invalid_request", "lora.scale", {"lora": {"name": "a", "scale": True}}),
        (400, "invalid_request", "lora.scale", {"lora": {"name": "a", "scale": 10**400}}),
        (400, "unsupported_field", "lora.weight", {"lora": {"name": "a", "weight": 1}}),
        (400, "unsupported_field", "lora[1].x", {"lora": [{"name": "a"}, {"name": "b", "x": 0}]}),
    ]
    for status, code, param, body in wrong:
        await refused(client, status, code, param, **body)


async def test_base_name_with_colons_splits_at_the_last(make_server: Any, library: FakeLibrary) -> None:
    state = make_server()
    config = make_config()
    config = replace(config, engine=replace(config.engine, model=replace(config.engine.model, served_model_name="x:y")))
    state = make_state(config, state.engine, state.text._tokenizer, library)
    version = await load(state, library, "z")
    async with open_client(build_app(state)) as client:
        assert (await ok(client, model="x:y"))["lora"] is None
        assert (await ok(client, model="x:y:z"))["lora"][0]["version"] == version
        await refused(client, 404, "model_not_found", "model", model="y:z")
    await state.directory.close()
