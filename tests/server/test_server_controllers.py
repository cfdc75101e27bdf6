"""Controllers of other servers, as their own programs call and read vLLM: AIBrix, KubeAI, the Gateway API's side-car
and picker (which llm-d builds on).

Each class below sends what the controller's client sends, and decides by nothing but what that client looks at.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeLibrary
from server_parts import BASE, open_client

from loraserve.engine.messages import EngineStats
from loraserve.server.app import build_app
from loraserve.server.state import ServerState

pytestmark = pytest.mark.anyio


@pytest.fixture
async def pod(make_server: Callable[..., ServerState]) -> AsyncIterator[httpx.AsyncClient]:
    """A server as it runs in a pod: reached from outside, and its controllers have no admin key."""
    state = make_server(host="0.0.0.0", open_lora_doors=True)
    async with open_client(build_app(state)) as client:
        yield client
    await state.directory.close()


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    return await client.post(path, content=json.dumps(body), headers=headers)


class AIBrix:
    """`pkg/controller/modeladapter/lora_client.go` without the runtime side-car; the key is the adapter's `api-key`."""

    def __init__(self, client: httpx.AsyncClient, key: str | None = None) -> None:
        self._client = client
        self._key = key

    async def load(self, name: str, artifact_url: str) -> tuple[bool, bool]:
        """(loaded now, there before)."""
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        models = await self._client.get("/v1/models", headers=headers)
        assert models.status_code == 200
        if name in {model["id"] for model in models.json()["data"]}:
            return False, True
        path = artifact_url.removeprefix("huggingface://")
        answer = await post(self._client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, self._key)
        if answer.status_code not in (200, 201):
            raise RuntimeError(answer.text)
        return True, False

    async def unload(self, name: str) -> int:
        return (await post(self._client, "/v1/unload_lora_adapter", {"lora_name": name}, self._key)).status_code


class KubeAI:
    """`internal/vllmclient/client.go`: errors are read flat."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def load(self, name: str, path: str, *, ignore_already_loaded: bool) -> None:
        answer = await post(self._client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        if answer.status_code > 299:
            problem = answer.json()
            already = "already" in problem["message"] and "loaded" in problem["message"]
            if (
                ignore_already_loaded
                and answer.status_code == 400
                and problem["type"] == "InvalidUserInput"
                and already
            ):
                return
            raise RuntimeError(problem["message"])

    async def unload(self, name: str) -> None:
        answer = await post(self._client, "/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status_code > 299:
            raise RuntimeError(answer.json()["message"])


class SideCar:
    """`tools/dynamic-lora-sidecar/sidecar/sidecar.py` of the Gateway API Inference Extension."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def _registered(self) -> set[str]:
        assert (await self._client.get("/health")).status_code == 200
        return {model.get("id", "") for model in (await self._client.get("/v1/models")).json()["data"]}

    async def load(self, name: str, source: str, base_model: str = "") -> None:
        if name not in await self._registered():
            body = {"lora_name": name, "lora_path": source, "base_model_name": base_model}
            (await post(self._client, "/v1/load_lora_adapter", body)).raise_for_status()

    async def unload(self, name: str) -> None:
        if name in await self._registered():
            (await post(self._client, "/v1/unload_lora_adapter", {"lora_name": name})).raise_for_status()


async def test_aibrix(pod: httpx.AsyncClient, library: FakeLibrary, make_server: Callable[..., ServerState]) -> None:
    controller = AIBrix(pod)
    path = library.make("one", "1")
    assert await controller.load("text2sql", path) == (True, False)
    assert await controller.load("text2sql", path) == (False, True)
    card = next(card for card in (await pod.get("/v1/models")).json()["data"] if card["id"] == "text2sql")
    assert (card["object"], card["parent"]) == ("model", BASE)
    with pytest.raises(RuntimeError, match="No adapter found for /nowhere"):
        await controller.load("other", "/nowhere")
    assert await controller.unload("text2sql") == 200
    assert await controller.unload("text2sql") == 404
    assert await controller.load("text2sql", path) == (True, False)
    keyed = make_server(host="0.0.0.0", admin_key="adm", api_key=("k1",))
    async with open_client(build_app(keyed)) as client:
        assert await AIBrix(client, "adm").load("mine", path) == (True, False)
        with pytest.raises(RuntimeError, match="not the admin endpoints"):
            await AIBrix(client, "k1").load("again", path)
    await keyed.directory.close()


async def test_kubeai(pod: httpx.AsyncClient, library: FakeLibrary) -> None:
    controller = KubeAI(pod)
    path = library.make("one", "1")
    await controller.load("colorist", path, ignore_already_loaded=False)
    await controller.load("colorist", path, ignore_already_loaded=True)
    with pytest.raises(RuntimeError, match="already been loaded"):
        await controller.load("colorist", path, ignore_already_loaded=False)
    with pytest.raises(RuntimeError, match="No adapter found"):
        await controller.load("other", "/nowhere", ignore_already_loaded=True)
    await controller.unload("colorist")
    with pytest.raises(RuntimeError, match="cannot be found"):
        await controller.unload("colorist")


async def test_the_side_car(pod: httpx.AsyncClient, library: FakeLibrary) -> None:
    controller = SideCar(pod)
    path = library.make("one", "1")
    await controller.load("a", path)
    await controller.load("a", path)
    await controller.load("b", path, BASE)
    with pytest.raises(httpx.HTTPStatusError):
        await controller.load("c", path, "another-base")
    assert await controller._registered() == {BASE, "a", "b"}
    for _ in range(2):
        await controller.unload("a")
    assert await controller._registered() == {BASE, "b"}


async def test_the_picker_finds_all_that_it_routes_on(
    pod: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine
) -> None:
    """The endpoint picker's extractor: of each metric the newest sample, of two of them labels that are numbers or
    lists; a metric that is missing is an error at every scrape."""
    await SideCar(pod).load("a", library.make("one", "1"))
    engine.stats = EngineStats(running=3, waiting=7, kv_tokens_used=11, kv_tokens_total=44)
    text = (await pod.get("/metrics")).text
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in re.findall(r"^(vllm:\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        samples.setdefault(name, []).append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
        assert f"# TYPE {name} gauge" in text
    assert {
        name: found[0][1]
        for name, found in samples.items()
        if name not in ("vllm:lora_requests_info", "vllm:cache_config_info")
    } == {
        "vllm:num_requests_waiting": 7,
        "vllm:num_requests_running": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25,
    }
    ((labels, value),) = samples["vllm:lora_requests_info"]
    assert int(labels["max_lora"]) == 256
    assert abs(value - time.time()) < 5
    ((cache, _),) = samples["vllm:cache_config_info"]
    assert (int(cache["block_size"]), int(cache["num_gpu_blocks"])) == (16, 256)


async def test_without_the_flag_the_doors_are_the_operators(
    make_server: Callable[..., ServerState], library: FakeLibrary
) -> None:
    state = make_server(host="0.0.0.0")
    async with open_client(build_app(state)) as client:
        answer = await post(client, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": library.make("one", "1")})
    assert answer.status_code == 403
    await state.directory.close()
