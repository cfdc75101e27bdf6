"""A real server process: many clients at once, disconnects, unloads under load, a killed engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from tiny_models import ATTENTION, MLP, Oracle, make_adapter, make_model

KINDS: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "b": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP},
    "c": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ATTENTION},
    "d": {"r": 3, "lora_alpha": 5, "target_modules": MLP},
    "e": {"r": 6, "lora_alpha": 12, "target_modules": ["lm_head", "o_proj"]},
    "f": {"r": 5, "lora_alpha": 3, "target_modules": ["embed_tokens", "up_proj"]},
}
COUNT = 10


class Setup:
    """The model, the adapters and the oracle of this module."""

    def __init__(self, root: Path) -> None:
        self.model = make_model(root / "model", seed=3)
        self.folder = root / "adapters"
        self.adapters = {
            name: make_adapter(self.model, self.folder / name, seed, **kind)
            for seed, (name, kind) in enumerate(KINDS.items())
        }
        self.oracle = Oracle(self.model)
        rng = random.Random(1)
        self.prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (40, 33, 7, 64)]
        self._known: dict[Any, list[int]] = {}

    def expected(self, name: str | None, prompt: list[int], count: int = COUNT) -> list[int]:
        key = (name, tuple(prompt), count)
        if key not in self._known:
            folder = None if name is None else self.adapters[name]
            self._known[key] = self.oracle.greedy(folder, prompt, count)
        return self._known[key]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("setup"))


@pytest.fixture(scope="module")
def server(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ["--adapter-dir", str(setup.folder), "--kv-memory", "16MiB", "--lora-memory", "16MiB"]
    flags += ["--host-lora-memory", "64MiB", "--adapter", f"a={setup.adapters['a']}"]
    with LiveServer(setup.model, tmp_path_factory.mktemp("data"), flags) as live:
        for name in ("b", "c", "d", "e", "f"):
            assert live.load(name, setup.adapters[name]).status_code == 200
        yield live


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def assert_idle(server: LiveServer) -> None:
    """Nothing runs, no pages but the prefix cache's are held, no adapter is leased."""

    def idle() -> bool:
        infos = server.client.get("/adapters").json()["data"]
        running = server.metric("loraserve_requests_running") + server.metric("loraserve_requests_waiting")
        used = server.metric("loraserve_kv_tokens", state="used")
        return running == 0 and used == 0 and all(info["leases"] == 0 for info in infos)

    until(idle)


async def stream_tokens(client: httpx.AsyncClient, **body: Any) -> tuple[list[int], list[Any]]:
    """Token ids of one streamed choice and all events."""
    tokens: list[int] = []
    events: list[Any] = []
    body = {"model": "base", "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True} | body
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            # An error that comes before the first token is an ordinary answer with its status.
            return [], [json.loads(await response.aread())]
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
                for choice in events[-1].get("choices", []):
                    tokens += choice.get("token_ids") or []
    return tokens, events


def test_24_clients_with_base_and_six_adapters_each_get_pefts_answer(server: LiveServer, setup: Setup) -> None:
    names: list[str | None] = [None, *KINDS]

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def one(index: int) -> None:
                name, prompt = names[index % len(names)], setup.prompts[index % len(setup.prompts)]
                if index % 2:
                    tokens, _ = await stream_tokens(client, prompt=prompt, lora=name, max_tokens=COUNT)
                else:
                    body = {"model": name or "base", "prompt": prompt, "max_tokens": COUNT, "temperature": 0}
                    body |= {"ignore_eos": True, "return_token_ids": True}
                    answer = (await client.post("/v1/completions", json=body)).json()
                    tokens = answer["choices"][0]["token_ids"]
                    assert answer["usage"]["completion_tokens"] == COUNT
                    used = answer["lora"]
                    assert (used is None) if name is None else used[0]["name"] == name
                assert tokens == setup.expected(name, prompt), f"request {index} with {name}"

            await asyncio.gather(*(one(index) for index in range(24)))

    asyncio.run(main())
    until(lambda: server.metric("loraserve_step_rows_total", kind="adapter", phase="decode") > 0)
    assert_idle(server)
    for kind in ("base", "adapter"):
        for phase in ("prefill", "decode"):
            assert server.metric("loraserve_step_rows_total", kind=kind, phase=phase) > 0
    forwards = server.metric("loraserve_step_adapters_count")
    assert forwards - server.metric("loraserve_step_adapters_bucket", le="2.0") > 0, "no forward had three adapters"


def test_a_blend_equals_the_sum_of_its_deltas(server: LiveServer, setup: Setup) -> None:
    prompt = setup.prompts[0]
    half = [{"name": "b", "scale": 0.5}, {"name": "b", "scale": 0.5}]
    for lora in (half, [{"name": "b"}, {"name": "c", "scale": 0}]):
        answer = server.complete(prompt, lora=lora, max_tokens=COUNT).json()
        assert answer["choices"][0]["token_ids"] == setup.expected("b", prompt)


def test_disconnects_free_everything(server: LiveServer, setup: Setup) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def leave(index: int) -> None:
                lora = [None, "b", "c"][index % 3]
                body = {"model": "base", "prompt": setup.prompts[index % 4], "lora": lora, "max_tokens": 400}
                body |= {"stream": index % 2 == 0, "ignore_eos": True}

                async def read() -> None:
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        async for _ in response.aiter_lines():
                            pass

                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(read(), 0.05 * index)

            await asyncio.gather(*(leave(index) for index in range(12)))

    asyncio.run(main())
    assert_idle(server)


def test_a_timeout_ends_with_408(server: LiveServer, setup: Setup) -> None:
    answer = server.complete(setup.prompts[0], max_tokens=440, timeout_s=0.05, lora="b")
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "request_timeout"
    assert_idle(server)


@pytest.mark.parametrize("how", ["drain", "force", "deadline"])
def test_unload_under_load(server: LiveServer, setup: Setup, how: str) -> None:
    name = f"gone-{how}"
    assert server.load(name, setup.adapters["b"]).status_code == 200
    prompt, count = setup.prompts[0], 60 if how == "drain" else 400

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            running = [
                asyncio.create_task(stream_tokens(client, prompt=prompt, lora=name, max_tokens=count)) for _ in range(4)
            ]
            while (await client.get(f"/adapters/{name}")).json()["leases"] < 4:
                await asyncio.sleep(0.01)
            body = {"name": name} | {"drain": {}, "force": {"force": True}, "deadline": {"deadline_s": 0.1}}[how]
            unload = asyncio.create_task(client.post("/adapters/unload", json=body))
            await asyncio.sleep(0.02)
            late = await client.post("/v1/completions", json={"model": name, "prompt": prompt, "max_tokens": 1})
            assert late.status_code == 404
            answer = await unload
            assert answer.status_code == 200, answer.text
            result = answer.json()
            assert result["name"] == name
            for task in running:
                tokens, events = await task
                if how == "drain":
                    assert tokens == setup.expected("b", prompt, 60)
                else:
                    assert "error" in events[-1]
            assert (result["drained"], result["aborted"]) == ((4, 0) if how == "drain" else (0, 4))
            assert (await client.post("/adapters/unload", json={"name": name})).status_code == 404

    asyncio.run(main())
    assert_idle(server)


def test_200_load_and_unload_cycles_leave_memory_flat(server: LiveServer, setup: Setup) -> None:
    import psutil

    engine = psutil.Process(server.engine_pid)

    def cycle(index: int) -> None:
        name = f"cycle-{index % 3}"
        assert server.load(name, setup.adapters["bcdef"[index % 5]]).status_code == 200
        if index % 20 == 0:
            assert server.complete(setup.prompts[2], lora=name, max_tokens=2).status_code == 200
        assert server.client.post("/adapters/unload", json={"name": name}).status_code == 200

    for index in range(20):
        cycle(index)
    before = engine.memory_info().rss
    for index in range(200):
        cycle(index)
    assert engine.memory_info().rss - before < 12 * 2**20
    assert_idle(server)


def test_the_engine_comes_back_after_kill_with_its_adapters(server: LiveServer, setup: Setup) -> None:
    prompt = setup.prompts[0]

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            running = asyncio.create_task(stream_tokens(client, prompt=prompt, lora="b", max_tokens=400))
            waiting = asyncio.create_task(
                client.post(
                    "/v1/completions", json={"model": "c", "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
                )
            )
            while (await client.get("/adapters/b")).json()["leases"] < 1:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            os.kill(server.engine_pid, signal.SIGKILL)
            _, events = await running
            assert events[-1]["error"]["code"] == "engine_dead"
            answer = await waiting
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
            assert (await client.get("/health")).status_code == 503

    asyncio.run(main())
    server.wait_ready()
    assert server.client.get("/health").status_code == 200
    answer = server.complete(prompt, lora="b", max_tokens=COUNT).json()
    assert answer["choices"][0]["token_ids"] == setup.expected("b", prompt)
