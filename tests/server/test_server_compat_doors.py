"""vLLM's and SGLang's calls, as their controllers send and read them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeLibrary
from server_parts import BASE

from loraserve.errors import AdapterFault, AdapterRefused, EngineDead

pytestmark = pytest.mark.anyio


async def vllm(client: httpx.AsyncClient, what: str, **body: Any) -> tuple[int, str]:
    answer = await client.post(f"/v1/{what}_lora_adapter", json=body)
    if answer.status_code == 200:
        return 200, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.json() == {"error": error, "object": "error", **error}
    assert error["code"] == answer.status_code
    return answer.status_code, error["message"]


async def sglang(client: httpx.AsyncClient, what: str, **body: Any) -> tuple[int, Any]:
    answer = await client.post(f"/{what}_lora_adapter", json=body)
    return answer.status_code, answer.json()


async def test_vllm(client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine) -> None:
    one, two = library.make("one", "1"), library.make("two", "2")
    loaded = (200, "Success: LoRA adapter 'a' added successfully.")
    assert await vllm(client, "load", lora_name="a", lora_path=one) == loaded
    assert engine.loaded == {library.version_of("1"): False}
    in_place = "If you want to load the adapter in place, set 'load_inplace' to True."
    already = (400, f"The lora adapter 'a' has already been loaded. {in_place}")
    assert await vllm(client, "load", lora_name="a", lora_path=one) == already
    assert await vllm(client, "load", lora_name="a", lora_path=two) == already
    assert await vllm(client, "load", lora_name="a", lora_path=two, load_inplace=True) == loaded
    assert (await client.get("/adapters/a")).json()["version"] == library.version_of("2")
    gone = (200, "Success: LoRA adapter 'a' removed successfully.")
    assert await vllm(client, "unload", lora_name="a", lora_int_id=3) == gone
    assert await vllm(client, "unload", lora_name="a") == (404, "The lora adapter 'a' cannot be found.")
    assert (await vllm(client, "load", lora_name="a"))[0] == 400
    unnamed = (400, "'lora_name' needs to be provided to unload a LoRA adapter.")
    assert await vllm(client, "unload") == unnamed
    assert (await vllm(client, "load", lora_name=BASE, lora_path=one))[0] == 400
    nowhere = (404, "Loading lora b failed: No adapter found for /nowhere")
    assert await vllm(client, "load", lora_name="b", lora_path="/nowhere") == nowhere
    engine.refuse[library.version_of("3")] = AdapterRefused(AdapterFault.RANK_TOO_LARGE, "its rank is 999")
    three = library.make("three", "3")
    assert await vllm(client, "load", lora_name="b", lora_path=three) == (400, "its rank is 999 (rank_too_large)")
    strange = await client.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": one, "x": 1})
    assert (strange.status_code, strange.json()["error"]["param"]) == (400, "x")


async def test_sglang(client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine) -> None:
    one = library.make("one", "1")
    good = {"success": True, "error_message": None, "loaded_adapters": {"a": one}}
    assert await sglang(client, "load", lora_name="a", lora_path=one, pinned=True) == (200, good)
    assert engine.loaded == {library.version_of("1"): True}
    status, again = await sglang(client, "load", lora_name="a", lora_path=one)
    assert (status, again["success"], again["loaded_adapters"]) == (400, False, {"a": one})
    status, bad = await sglang(client, "load", lora_name="b", lora_path="/nowhere")
    assert (status, bad["success"], bool(bad["error_message"])) == (400, False, True)
    good = {"success": True, "error_message": None, "loaded_adapters": {}}
    assert await sglang(client, "unload", lora_name="a") == (200, good)
    assert (await sglang(client, "unload", lora_name="a"))[0] == 400
    engine.refuse[library.version_of("1")] = EngineDead("the engine died")
    status, dead = await sglang(client, "load", lora_name="a", lora_path=one)
    assert (status, dead) == (400, {"success": False, "error_message": "the engine died", "loaded_adapters": {}})
    assert engine.loaded == {}
