"""The whole service over a fake engine process and the real store: start, serve, drain, fail."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from server_parts import BASE, eventually, make_config
from test_server_library import GEOMETRY, make_adapter
from transformers import PreTrainedTokenizerFast

from loraserve.config import ServeConfig
from loraserve.errors import AdapterRefused, ConfigError, LoraserveError, ModelLoadError
from loraserve.server.naming import DEMO_NAME, served_name
from loraserve.server.service import Service, bind, curl_lines, data_dir, parse_adapter_flag, url_of

pytestmark = pytest.mark.anyio


class FakeProcess(FakeEngine):
    """A fake engine that takes a while to start, or fails to."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        super().__init__(tokenizer)
        tokenizer.save_pretrained(folder)
        self._info.model_path = str(folder)
        self._info.geometry = GEOMETRY
        self.started = self.alive = False
        self.start_gate = asyncio.Event()
        self.start_error: Exception | None = None
        self.stops = 0
        self.deaf = False  # does not end what it is told to end

    async def start(self) -> None:
        self.alive = True
        await self.start_gate.wait()
        if self.start_error is not None:
            raise self.start_error
        self.started = True

    async def stop(self, drain_s: float = 0.0) -> None:
        self.stops += 1
        self.die()

    async def abort(self, request_id: str, error: LoraserveError | None = None) -> None:
        if not self.deaf:
            await super().abort(request_id, error)


@pytest.fixture
def process(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> FakeProcess:
    return FakeProcess(tokenizer, tmp_path / "model")


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    config = make_config(port=0, data_dir=tmp_path / "data", drain_deadline_s=5.0)
    model = replace(config.engine.model, model=str(tmp_path / "model"))
    lora = replace(config.engine.lora, adapter=(f"a={make_adapter(tmp_path / 'somewhere' / 'a')}",))
    return replace(config, engine=replace(config.engine, model=model, lora=lora))


class Running:
    """A service in a task, and what it printed."""

    def __init__(self, config: ServeConfig, process: FakeProcess) -> None:
        self.lines: list[str] = []
        self.service = Service(config, self.lines.append, process)
        self.task = asyncio.create_task(self.service.run())

    async def url(self) -> str:
        await eventually_slow(lambda: self.task.done() or any(line.startswith("ready: ") for line in self.lines))
        if self.task.done():
            await self.task
        line = next(line for line in self.lines if line.startswith("ready: "))
        return line.split()[1]


async def eventually_slow(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def test_start_serve_and_drain(config: ServeConfig, process: FakeProcess) -> None:
    config = replace(config, server=replace(config.server, port=free_port()))
    running = Running(config, process)
    url = f"http://127.0.0.1:{config.server.port}"
    ask: dict[str, Any] = {"model": BASE, "prompt": "Hi", "lora": "a", "max_tokens": 50}
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        await eventually(lambda: process.alive)
        assert (await client.get("/health")).status_code == 200, "it listens before the engine is up"
        assert (await client.get("/ready")).status_code == 503
        early = await client.post("/v1/completions", json=ask)
        assert (early.status_code, early.json()["error"]["code"]) == (503, "engine_not_ready")
        early = await client.post("/adapters/load", json={"name": "b", "path": "x"})
        assert early.status_code == 503
        process.start_gate.set()
        assert await running.url() == url
        assert (await client.get("/ready")).status_code == 200
        answer = await client.post("/v1/completions", json=ask)
        assert answer.status_code == 200
        assert answer.json()["lora"][0]["name"] == "a"
        assert sum(line.strip().startswith("curl ") for line in running.lines) == 3
        assert any("a plan" in line for line in running.lines)

        process.gate = asyncio.Event()
        slow = asyncio.create_task(client.post("/v1/completions", json=ask))
        await eventually(lambda: len(process.open) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: any("draining" in line for line in running.lines))
        late = await client.post("/v1/completions", json=ask)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_not_ready")
        assert not running.task.done()
        process.gate.set()
        assert (await slow).status_code == 200, "running requests finish"
    assert await running.task == 0
    assert process.stops >= 1


async def test_a_second_signal_ends_what_runs(config: ServeConfig, process: FakeProcess) -> None:
    process.start_gate.set()
    running = Running(config, process)
    async with httpx.AsyncClient(base_url=await running.url(), timeout=20) as client:
        process.gate = asyncio.Event()
        slow = asyncio.create_task(client.post("/v1/completions", json={"model": BASE, "prompt": "Hi"}))
        await eventually(lambda: len(process.open) == 1)
        running.service.stop()
        await asyncio.sleep(0.02)
        assert not slow.done()
        running.service.stop()
        answer = await slow
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_aborted")
    assert await running.task == 0


async def test_the_drain_has_a_deadline(config: ServeConfig, process: FakeProcess) -> None:
    process.start_gate.set()
    running = Running(replace(config, server=replace(config.server, drain_deadline_s=0.05)), process)
    async with httpx.AsyncClient(base_url=await running.url(), timeout=20) as client:
        process.gate = asyncio.Event()
        slow = asyncio.create_task(client.post("/v1/completions", json={"model": BASE, "prompt": "Hi", "stream": True}))
        await eventually(lambda: len(process.open) == 1)
        running.service.stop()
        assert (await slow).status_code == 503
    assert await running.task == 0


async def test_the_drain_ends_requests_of_an_engine_that_does_not_answer(
    config: ServeConfig, process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.server.service.ABORT_GRACE_S", 0.1)
    process.start_gate.set()
    running = Running(replace(config, server=replace(config.server, drain_deadline_s=0.05)), process)
    async with httpx.AsyncClient(base_url=await running.url(), timeout=20) as client:
        process.gate, process.deaf = asyncio.Event(), True
        slow = asyncio.create_task(client.post("/v1/completions", json={"model": BASE, "prompt": "Hi"}))
        await eventually(lambda: len(process.open) == 1)
        running.service.stop()
        answer = await slow
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_aborted")
    assert await running.task == 0


async def test_stop_while_starting(config: ServeConfig, process: FakeProcess) -> None:
    running = Running(config, process)
    await eventually(lambda: process.alive)
    running.service.stop()
    assert await running.task == 0
    assert process.stops >= 1
    assert not any(line.startswith("ready") for line in running.lines)


async def test_a_start_that_fails(config: ServeConfig, process: FakeProcess) -> None:
    process.start_error = ModelLoadError("no such model")
    process.start_gate.set()
    with pytest.raises(ModelLoadError, match="no such model"):
        await Running(config, process).task
    assert process.stops >= 1


async def test_an_adapter_flag_that_cannot_be_served(config: ServeConfig, process: FakeProcess, tmp_path: Path) -> None:
    process.start_gate.set()
    lora = replace(config.engine.lora, adapter=(f"a={tmp_path}",))
    with pytest.raises(AdapterRefused):
        await Running(replace(config, engine=replace(config.engine, lora=lora)), process).task


async def test_a_port_that_is_taken(config: ServeConfig, process: FakeProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = replace(config, server=replace(config.server, port=listener.getsockname()[1]))
        with pytest.raises(ConfigError, match="cannot listen"):
            await Running(taken, process).task


def test_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = parse_adapter_flag("name=/some=where")
    assert (order.name, order.place.path, order.place.trusted) == ("name", "/some=where", True)
    for text in ("name", "=path", "name="):
        with pytest.raises(ConfigError):
            parse_adapter_flag(text)
    model = make_config().engine.model
    assert served_name(model) == BASE
    assert served_name(replace(model, served_model_name=None)) == DEMO_NAME
    assert served_name(replace(model, served_model_name=None, model="org/name")) == "org/name"
    assert served_name(replace(model, served_model_name=None, model=str(tmp_path))) == tmp_path.name
    for name in ("", " ", "a\nb"):
        with pytest.raises(ConfigError):
            served_name(replace(model, served_model_name=name))
    server = make_config().server
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert data_dir(server) == tmp_path / "loraserve"
    assert data_dir(replace(server, data_dir=tmp_path / "x")) == tmp_path / "x"
    with bind(replace(server, host="0.0.0.0", port=0)) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")
        # Else the body of each answer would wait for the client's acknowledgement of its head.
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    lines = curl_lines("http://h", "base", ["a"], needs_key=True)
    assert len(lines) == 3
    assert all("Bearer" in line for line in lines)
