"""One server over a fake engine, reached without a socket or through one."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fake_engine import FakeEngine, FakeLibrary, byte_level_tokenizer
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from loraserve.config import EngineConfig, ModelConfig, ServeConfig, ServerConfig
from loraserve.server.app import build_app, make_state
from loraserve.server.state import ServerState

BASE = "base-model"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[FakeLibrary]:
    library = FakeLibrary(tmp_path)
    yield library
    library.registry.close()


def make_config(**server: Any) -> ServeConfig:
    model = ModelConfig(served_model_name=BASE)
    return ServeConfig(engine=EngineConfig(model=model), server=replace(ServerConfig(), **server))


@pytest.fixture
def make_server(
    engine: FakeEngine, library: FakeLibrary, tokenizer: PreTrainedTokenizerFast
) -> Callable[..., ServerState]:
    def make(**server: Any) -> ServerState:
        return make_state(make_config(**server), engine, tokenizer, library)

    return make


@pytest.fixture
async def server(make_server: Callable[..., ServerState]) -> AsyncIterator[ServerState]:
    state = make_server()
    yield state
    await state.directory.close()


@pytest.fixture
def app(server: ServerState) -> FastAPI:
    return build_app(server)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(app) as client:
        yield client


def open_client(app: FastAPI, **kwargs: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=20, **kwargs)


class LiveServer:
    """The app behind a real socket, in a thread of its own with its own event loop."""

    def __init__(self, app: FastAPI) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with closing(self._loop):
            self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function in the server's loop."""
        self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()


@pytest.fixture
def live(make_server: Callable[..., ServerState]) -> Iterator[LiveServer]:
    server = LiveServer(build_app(make_server()))
    yield server
    server.close()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")
