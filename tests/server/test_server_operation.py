"""Authorisation, health, metrics, tokens and models."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeLibrary
from server_parts import BASE, LiveServer, eventually, open_client
from test_server_admin import code, load

from loraserve import __version__
from loraserve.engine.messages import EngineStats
from loraserve.server.app import build_app
from loraserve.server.auth import is_loopback
from loraserve.server.state import ServerState

pytestmark = pytest.mark.anyio

# -- keys -------------------------------------------------------------------------------------------------------------

API = [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")]
API += [("POST", "/detokenize"), ("GET", "/v1/nothing"), ("GET", "/nothing")]
ADMIN = [("GET", "/adapters"), ("GET", "/adapters/x"), ("POST", "/adapters/load"), ("POST", "/adapters/unload")]
ADMIN += [("POST", "/adapters/rollback"), ("POST", "/adapters/pin"), ("GET", "/adapters/x/versions")]
DOORS = [("POST", f"{prefix}/{call}_lora_adapter") for prefix in ("", "/v1") for call in ("load", "unload")]
ADMIN += [("POST", "/admin/limits"), ("GET", "/admin/limits"), ("POST", "/admin/x")]
OPEN = [("GET", "/health"), ("GET", "/ready"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/openapi.json")]


@pytest.mark.parametrize(
    ("server", "key", "api", "admin"),
    [
        ({}, None, None, None),
        ({}, "anything", None, None),
        ({"host": "0.0.0.0"}, None, None, 403),
        ({"host": "0.0.0.0"}, "anything", None, 403),
        ({"api_key": ("k1", "k2")}, None, 401, None),
        ({"api_key": ("k1", "k2")}, "k2", None, None),
        ({"api_key": ("k1", "k2")}, "wrong", 401, None),
        ({"api_key": ("k1",), "host": "0.0.0.0"}, "k1", None, 403),
        ({"admin_key": "adm"}, None, None, 401),
        ({"admin_key": "adm"}, "adm", None, None),
        ({"admin_key": "adm"}, "wrong", None, 401),
        ({"admin_key": "adm", "host": "0.0.0.0"}, "adm", None, None),
        ({"admin_key": "adm", "api_key": ("k1",)}, None, 401, 401),
        ({"admin_key": "adm", "api_key": ("k1",)}, "k1", None, 403),
        ({"admin_key": "adm", "api_key": ("k1",)}, "adm", None, None),
        ({"admin_key": "adm", "api_key": ("k1",)}, "wrong", 401, 401),
        ({"admin_key": "adm", "api_key": ("ü€",)}, "ü€", None, 403),
        ({"open_lora_doors": True, "host": "0.0.0.0"}, None, None, 403),
        ({"open_lora_doors": True, "admin_key": "adm", "api_key": ("k1",)}, "k1", None, 403),
        ({"open_lora_doors": True, "admin_key": "adm", "api_key": ("k1",)}, "wrong", 401, 401),
    ],
    ids=str,
)
async def test_who_may_call_what(
    make_server: Callable[..., ServerState], server: dict[str, Any], key: str | None, api: int | None, admin: int | None
) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    async with open_client(build_app(make_server(**server))) as client:
        doors = api if server.get("open_lora_doors") else admin
        for routes, status in ((API, api), (ADMIN, admin), (DOORS, doors), (OPEN, None)):
            for method, path in routes:
                response = await client.request(method, path, headers=headers, content=b"{broken")
                if status is None:
                    assert response.status_code not in (401, 403), (path, response.text)
                    continue
                assert response.status_code == status, (path, response.text)
                expected = {401: "invalid_api_key", 403: "permission_denied"}[status]
                assert response.json()["error"]["code"] == expected
                if status == 401:
                    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["k1", "Basic k1", "Bearer", "Bearer ", "bearer  k1 "])
async def test_header_forms(make_server: Callable[..., ServerState], header: str) -> None:
    async with open_client(build_app(make_server(api_key=("k1",)))) as client:
        response = await client.get("/v1/models", headers={"authorization": header})
    assert response.status_code == (200 if header == "bearer  k1 " else 401)


async def test_tenants_are_told_apart(make_server: Callable[..., ServerState], engine: FakeEngine) -> None:
    async with open_client(build_app(make_server(api_key=("k1", "k2")))) as client:
        for key in ("k1", "k2", "k1"):
            headers = {"authorization": f"Bearer {key}"}
            await client.post("/v1/completions", json={"model": BASE, "prompt": "Hi"}, headers=headers)
    tenants = [request.tenant for request in engine.requests]
    assert tenants[0] == tenants[2] != tenants[1]
    assert "k1" not in tenants[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.0.1", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example.org"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


# -- operation --------------------------------------------------------------------------------------------------------


async def test_health_and_ready(client: httpx.AsyncClient, server: ServerState, engine: FakeEngine) -> None:
    async def statuses() -> tuple[int, int, int]:
        answers = [await client.get("/health"), await client.get("/ready")]
        answers.append(await client.post("/v1/completions", json={"model": BASE, "prompt": "Hi"}))
        return answers[0].status_code, answers[1].status_code, answers[2].status_code

    assert await statuses() == (200, 200, 200)
    engine.stuck = True
    assert await statuses() == (503, 503, 200)
    engine.stuck = False
    engine.alive = False
    assert await statuses() == (503, 503, 503)
    engine.alive = True
    server.draining = True
    assert await statuses() == (200, 503, 503)
    server.draining = False
    server.starting = True
    assert await statuses() == (200, 503, 503)
    server.starting = False
    server.text_or_none = None
    assert await statuses() == (200, 503, 503)


async def test_load_balancers_ask_with_head(live: LiveServer, engine: FakeEngine) -> None:
    async with httpx.AsyncClient(base_url=live.url) as client:
        for path in ("/health", "/ready"):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
        engine.stuck = True
        assert [(await client.head(path)).status_code for path in ("/health", "/ready")] == [503, 503]
        assert (await client.get("/health")).status_code == 503, "the connection is still good"
        assert (await client.head("/v1/models")).status_code == 405


async def test_engine_death_ends_requests(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    ask = {"model": BASE, "prompt": "Hi", "n": 2}
    request = asyncio.create_task(client.post("/v1/completions", json=ask))
    await eventually(lambda: len(engine.open) == 2)
    engine.die()
    assert code(await request) == (503, "engine_dead")
    assert code(await client.post("/v1/completions", json=ask)) == (503, "engine_dead")
    assert code(await client.post("/v1/completions", json=ask | {"stream": True})) == (503, "engine_dead")


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_metrics(client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine) -> None:
    await load(client, library, "a", "one")
    engine.cached = 1
    for lora in (None, "a"):
        await client.post("/v1/completions", json={"model": BASE, "prompt": "Hi", "lora": lora, "max_tokens": 4})
    await client.get("/adapters/nobody")
    await client.get("/no/such/route")
    engine.stats = EngineStats(
        steps_total=10,
        step_adapters={0: 4, 1: 3, 3: 2, 100: 1},
        rows_total={"base/prefill": 5, "adapter/decode": 7},
        waiting_reasons={"kv_pages": 2},
        requests_total={"stop": 3},
        kv_tokens_used=11,
        kv_tokens_total=44,
        running=3,
        waiting=2,
        running_adapters=[library.version_of("one")],
        adapter_stagings_total=5,
        adapter_hits_total=9,
        adapters_by_state={"resident": 1},
    )
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = set(response.text.splitlines())
    num_prompt = len(engine.tokenizer.encode("Hi"))
    for line in (
        'loraserve_step_adapters_bucket{le="0.0"} 4.0',
        'loraserve_step_adapters_bucket{le="1.0"} 7.0',
        'loraserve_step_adapters_bucket{le="3.0"} 9.0',
        'loraserve_step_adapters_bucket{le="+Inf"} 10.0',
        "loraserve_step_adapters_count 10.0",
        "loraserve_step_adapters_sum 109.0",
        'loraserve_step_rows_total{kind="base",phase="prefill"} 5.0',
        'loraserve_step_rows_total{kind="adapter",phase="decode"} 7.0',
        'loraserve_step_rows_total{kind="adapter",phase="prefill"} 0.0',
        'loraserve_waiting_reason{reason="kv_pages"} 2.0',
        'loraserve_engine_requests_total{finish="stop"} 3.0',
        'loraserve_kv_tokens{state="used"} 11.0',
        "loraserve_steps_total 10.0",
        'loraserve_adapter_requests_total{adapter="a"} 1.0',
        'loraserve_adapter_requests_total{adapter="other"} 0.0',
        f'loraserve_adapter_tokens_total{{adapter="a",direction="in"}} {num_prompt}.0',
        'loraserve_adapter_tokens_total{adapter="a",direction="out"} 4.0',
        'loraserve_adapter_tier_loads_total{tier="host"} 5.0',
        'loraserve_adapter_lookups_total{found="yes"} 9.0',
        'loraserve_adapter_versions{state="resident"} 1.0',
        'loraserve_adapter_time_to_first_token_seconds_count{residency="cold"} 1.0',
        'loraserve_queue_seconds_count{kind="base"} 1.0',
        f'vllm:num_requests_running{{engine="0",model_name="{BASE}"}} 3.0',
        f'vllm:num_requests_waiting{{engine="0",model_name="{BASE}"}} 2.0',
        f'vllm:kv_cache_usage_perc{{engine="0",model_name="{BASE}"}} 0.25',
        'loraserve_requests_total{finish="length",kind="adapter"} 1.0',
        'loraserve_output_tokens_total{kind="base"} 4.0',
        f'loraserve_prompt_tokens_total{{kind="base"}} {num_prompt}.0',
        "loraserve_cached_prompt_tokens_total 2.0",
        'loraserve_time_to_first_token_seconds_count{kind="base"} 1.0',
        'loraserve_inter_token_seconds_count{kind="adapter"} 3.0',
        "loraserve_requests_in_flight 0.0",
        'loraserve_http_requests_total{method="POST",route="/v1/completions",status="200"} 2.0',
        'loraserve_http_requests_total{method="GET",route="/adapters/{name}",status="404"} 1.0',
        'loraserve_http_requests_total{method="GET",route="unmatched",status="404"} 1.0',
    ):
        assert line in lines, (line, sorted(found for found in lines if found.startswith(line.split("{")[0])))


def vllm_labels(text: str, metric: str) -> tuple[dict[str, str], float]:
    """Labels and value of the only sample of a metric, read as gateways read it."""
    ((labels, value),) = re.findall(rf"^{metric}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    return dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)


async def test_lora_requests_info_names_what_requests_use(
    client: httpx.AsyncClient, library: FakeLibrary, engine: FakeEngine, server: ServerState
) -> None:
    for name in ("org/b", "a", "idle"):
        await load(client, library, name, "one")
    await load(client, library, "c", "two")
    await load(client, library, "mine", "three")
    hidden = server.directory.find("mine")
    assert hidden is not None
    hidden.visibility = "private"
    one, two, three = (library.version_of(content) for content in ("one", "two", "three"))

    async def info() -> tuple[str, str, str]:
        labels, value = vllm_labels((await client.get("/metrics")).text, "vllm:lora_requests_info")
        assert abs(value - time.time()) < 5, "seconds since the epoch"
        assert set(labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        return labels["max_lora"], labels["running_lora_adapters"], labels["waiting_lora_adapters"]

    assert await info() == ("256", "", "")
    engine.gate = asyncio.Event()
    ask = {"prompt": "Hi", "max_tokens": 1}
    asked = [
        asyncio.create_task(client.post("/v1/completions", json=ask | {"model": name}))
        for name in ("org/b", "a", "c", "mine")
    ]
    await eventually(lambda: len(engine.open) == 4)
    engine.stats = EngineStats(running_adapters=[one, three], waiting_adapters=[two])
    assert await info() == ("256", "a,org/b", "c"), "both names of one version, and no private one"
    engine.stats = EngineStats(running_adapters=[three, two], waiting_adapters=[one])
    assert await info() == ("256", "c", "a,org/b")
    engine.gate.set()
    await asyncio.gather(*asked)
    assert await info() == ("256", "", ""), "also before the engine says so"


async def test_cache_config_info(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    labels, value = vllm_labels((await client.get("/metrics")).text, "vllm:cache_config_info")
    assert labels == {"block_size": "16", "num_gpu_blocks": "256", "engine": "0"}
    assert value == 1
    engine.started = False
    assert "cache_config_info" not in (await client.get("/metrics")).text


async def test_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("Hello 😀")
    answer = (await client.post("/tokenize", json={"prompt": "Hello 😀"})).json()
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": engine.info.max_context}
    bare = (await client.post("/tokenize", json={"prompt": "Hello 😀", "add_special_tokens": False})).json()
    assert bare["tokens"] == ids[1:]
    messages = [{"role": "user", "content": "Hi"}]
    chat = (await client.post("/tokenize", json={"messages": messages, "model": BASE})).json()
    await client.post("/v1/chat/completions", json={"model": BASE, "messages": messages})
    assert chat["tokens"] == engine.requests[-1].prompt
    assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "<|begin|>Hello 😀"}
    body = {"tokens": ids, "skip_special_tokens": True}
    assert (await client.post("/detokenize", json=body)).json() == {"prompt": "Hello 😀"}
    for path, body, status in [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": messages}, 400),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404),
        ("/tokenize", {"prompt": "a", "x": 1}, 400),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, 400),
        ("/tokenize", {"messages": messages, "add_special_tokens": True}, 400),
        ("/detokenize", {"tokens": [10**6]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
        ("/detokenize", {}, 400),
    ]:
        assert (await client.post(path, json=body)).status_code == status, (path, body)


async def test_models(client: httpx.AsyncClient, library: FakeLibrary) -> None:
    await load(client, library, "b", "one")
    await load(client, library, "org/a", "two")
    data = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in data] == [BASE, "b", "org/a"]
    assert [card["parent"] for card in data] == [None, BASE, BASE]
    assert all(card["object"] == "model" and card["root"] for card in data)
    assert (await client.get(f"/v1/models/{BASE}")).json() == data[0]
    assert (await client.get("/v1/models/org/a")).json() == data[2]
    assert (await client.get(f"/v1/models/{BASE}:b")).json() == data[1]
    assert code(await client.get("/v1/models/nobody")) == (404, "model_not_found")
