"""The engine process behind its client: real sockets, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from engine_driver import engine_config
from tiny_models import ATTENTION, Oracle, make_adapter, make_model

from loraserve.engine.client import EngineClient
from loraserve.engine.messages import AddRequest, RequestOutput
from loraserve.errors import AdapterRefused, EngineDead, EngineStuck, ModelLoadError
from loraserve.lora.format import parse_adapter
from loraserve.lora.version import content_version
from loraserve.sampling import SamplingParams
from loraserve.scheduler.request import AdapterUse

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)
LONG = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)
PROMPT = [5, 9, 33, 120, 77]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "a"
    return make_adapter(model, folder, 1, r=4, lora_alpha=8, target_modules=ATTENTION)


def run_with_engine(model: Path, body: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def main() -> None:
        # The reference operators start faster; the CPU backend has its own end-to-end tests.
        client = EngineClient(engine_config(model, kernels="reference"))
        await client.start()
        try:
            await body(client)
        finally:
            await client.stop()
            assert client.pid is None

    asyncio.run(asyncio.wait_for(main(), 120))


async def tokens_of(stream: AsyncIterator[RequestOutput]) -> tuple[list[int], RequestOutput]:
    tokens: list[int] = []
    output = None
    async for output in stream:
        tokens += output.token_ids
    assert output is not None
    return tokens, output


async def load(client: EngineClient, folder: Path) -> str:
    spec = parse_adapter(folder, client.info.geometry, 256)
    version = content_version(spec, folder)
    await client.load_adapter(version, str(folder))
    return version


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "did not happen in time"
        await asyncio.sleep(0.02)


def test_generates_with_and_without_adapter_and_ends_cleanly(model: Path, adapter: Path) -> None:
    pids: list[int] = []

    async def body(client: EngineClient) -> None:
        assert client.pid is not None
        pids.append(client.pid)
        version = await load(client, adapter)
        base = client.generate(AddRequest(id="a", prompt=PROMPT, params=GREEDY))
        adapted = client.generate(AddRequest(id="b", prompt=PROMPT, params=GREEDY, adapters=[AdapterUse(version, 1.0)]))
        (base_tokens, _), (adapted_tokens, last) = await asyncio.gather(tokens_of(base), tokens_of(adapted))
        oracle = Oracle(model)
        assert base_tokens == oracle.greedy(None, PROMPT, 8)
        assert adapted_tokens == oracle.greedy(adapter, PROMPT, 8)
        assert last.finish_reason == "length"
        assert (await client.adapter_status(version)).residency == "device"  # type: ignore[union-attr]
        await client.drop_adapter(version)
        assert await client.adapter_status(version) is None
        _, output = await tokens_of(
            client.generate(AddRequest(id="c", prompt=PROMPT, params=GREEDY, adapters=[AdapterUse(version, 1.0)]))
        )
        assert output.error is not None
        assert output.error.code == "adapter_not_found"

    run_with_engine(model, body)
    assert not psutil.pid_exists(pids[0])


def test_leaving_a_stream_aborts_it(model: Path) -> None:
    async def body(client: EngineClient) -> None:
        stream = client.generate(AddRequest(id="a", prompt=PROMPT, params=LONG))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: client.stats.requests_total.get("abort") == 1)
        await until(lambda: (client.stats.running, client.stats.waiting, client.stats.kv_tokens_used) == (0, 0, 0))

    run_with_engine(model, body)


def test_kill_ends_open_requests_and_the_engine_returns_with_its_adapters(model: Path, adapter: Path) -> None:
    async def body(client: EngineClient) -> None:
        version = await load(client, adapter)
        first = client.pid
        assert first is not None
        stream = client.generate(AddRequest(id="a", prompt=PROMPT, params=LONG))
        await anext(stream)
        os.kill(first, signal.SIGKILL)
        _, last = await tokens_of(stream)
        assert last.error is not None
        assert last.error.code == "engine_dead"
        assert not client.health().ready
        with pytest.raises(EngineDead):
            await tokens_of(client.generate(AddRequest(id="b", prompt=PROMPT, params=GREEDY)))
        await until(lambda: client.health().ready and client.pid not in (None, first))
        await until(lambda: client.stats.adapters_registered == 1)
        request = AddRequest(id="c", prompt=PROMPT, params=GREEDY, adapters=[AdapterUse(version, 1.0)])
        tokens, _ = await tokens_of(client.generate(request))
        assert tokens == Oracle(model).greedy(adapter, PROMPT, 8)

    run_with_engine(model, body)


def test_a_stopped_process_is_stuck(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.engine.client.STUCK_AFTER_S", 1.5)

    async def body(client: EngineClient) -> None:
        assert client.pid is not None
        await until(lambda: client.stats.rss_bytes > 0)
        assert not client.health().stuck
        os.kill(client.pid, signal.SIGSTOP)
        try:
            await until(lambda: client.health().stuck)
        finally:
            os.kill(client.pid, signal.SIGCONT)
        await until(lambda: not client.health().stuck)

    run_with_engine(model, body)


def test_nobody_waits_for_ever_for_a_stopped_process(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.engine.client.STUCK_AFTER_S", 1.5)
    monkeypatch.setattr("loraserve.engine.client.LATE_S", 0.2)

    async def body(client: EngineClient) -> None:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        try:
            request = AddRequest(id="a", prompt=PROMPT, params=LONG, timeout_s=0.5)
            tokens, last = await asyncio.wait_for(tokens_of(client.generate(request)), 20)
            assert (tokens, last.finish_reason) == ([], "timeout")
            for work in (client.adapter_statuses(), load(client, adapter), client.drop_adapter("0" * 64)):
                with pytest.raises(EngineStuck):
                    await asyncio.wait_for(work, 20)
        finally:
            os.kill(client.pid, signal.SIGCONT)
        await until(lambda: not client.health().stuck)
        # What nobody waited for any more was taken back: no request runs, no adapter is left.
        assert await client.adapter_statuses() == {}
        tokens, _ = await tokens_of(client.generate(AddRequest(id="b", prompt=PROMPT, params=GREEDY)))
        assert tokens == Oracle(model).greedy(None, PROMPT, 8)
        await until(lambda: client.stats.running == 0)

    run_with_engine(model, body)


def test_a_refused_adapter_leaves_the_engine_alone(model: Path, adapter: Path, tmp_path: Path) -> None:
    async def body(client: EngineClient) -> None:
        version = content_version(parse_adapter(adapter, client.info.geometry, 256), adapter)
        with pytest.raises(AdapterRefused):
            await client.load_adapter(version, str(tmp_path))
        assert await client.adapter_statuses() == {}
        tokens, _ = await tokens_of(client.generate(AddRequest(id="a", prompt=PROMPT, params=GREEDY)))
        assert len(tokens) == 8

    run_with_engine(model, body)


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "config.json").write_text("{}")
        client = EngineClient(engine_config(tmp_path))
        with pytest.raises(ModelLoadError):
            await client.start()
        assert client.pid is None

    asyncio.run(asyncio.wait_for(main(), 60))
