"""`loraserve serve`: the one place where a real server is wired together, run, and drained."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import uvicorn

from loraserve.config import ServeConfig, ServerConfig
from loraserve.engine.client import EngineClient
from loraserve.errors import (
    AdapterRefused,
    ConfigError,
    DemoModelUnavailable,
    EngineDead,
    RequestAborted,
)
from loraserve.lora.names import check_name
from loraserve.lora.store import AdapterStore
from loraserve.server.app import build_app, make_state
from loraserve.server.entries import LoadOrder
from loraserve.server.library import StoreLibrary
from loraserve.server.naming import served_name
from loraserve.server.ports import AdapterPlace, EngineProcess, Registered
from loraserve.server.restore import UseJournal, bring_back
from loraserve.server.state import ServerState
from loraserve.server.text import load_tokenizer

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
# After requests were told to end: how long their last events may take to reach the clients.
ABORT_GRACE_S = 2.0
GRACEFUL_EXIT_S = 5
_PREPARE_DEMO = (
    "from loraserve.models.demo import prepare_demo_model as prepare;"
    "prepare(progress=lambda stage, done, total: print(f'{stage}\\t{done}\\t{total}', flush=True))"
)


def run_server(config: ServeConfig, say: Say = print) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises named errors when the server cannot start."""
    return asyncio.run(Service(config, say).run())


class Service:
    """One server process: HTTP front, engine client and store, from start to drain."""

    def __init__(self, config: ServeConfig, say: Say, engine: EngineProcess | None = None) -> None:
        self._config = config
        self._say = say
        self._orders = parse_adapter_flags(config.engine.lora.adapter, served_name(config.engine.model))
        self._engine: EngineProcess = EngineClient(config.engine) if engine is None else engine
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Listen, start the engine, serve, drain."""
        with ExitStack() as stack:
            listener = stack.enter_context(bind(self._config.server))
            store = stack.enter_context(AdapterStore(data_dir(self._config.server)))
            library = self._make_library(store)
            state = make_state(self._config, self._engine, None, library)
            state.starting = True
            journal = UseJournal(state.directory, self._engine, library)
            self._watch_signals(stack)
            http = _HttpServer(
                uvicorn.Config(
                    build_app(state),
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    ws="none",
                    server_header=False,
                    timeout_graceful_shutdown=GRACEFUL_EXIT_S,
                )
            )
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            try:
                await self._live(state, serving, listener, journal)
            finally:
                await self._drain(state)
                if not state.starting:
                    await journal.write()
                http.should_exit = True
                await asyncio.gather(serving, return_exceptions=True)
                await state.directory.close()
                state.chats.close()
                await self._engine.stop(0.0)
        return 0

    def _make_library(self, store: AdapterStore) -> StoreLibrary:
        lora = self._config.engine.lora
        own_templates = not self._config.server.ignore_adapter_chat_templates
        geometry = lambda: self._engine.info.geometry  # noqa: E731 - it is there once the engine is up
        return StoreLibrary(store, geometry, lora.max_lora_rank, lora.adapter_dir, lora.adapter_url, own_templates)

    async def _live(
        self, state: ServerState, serving: asyncio.Task[None], listener: socket.socket, journal: UseJournal
    ) -> None:
        """Start up, then wait for the end, whichever side it comes from."""
        stop = asyncio.create_task(self._stop.wait())
        start = asyncio.create_task(self._start(state))
        background: list[asyncio.Task[None]] = []
        try:
            await asyncio.wait({start, stop, serving}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                registered = await start
                self._announce(state, listener)
                background.append(asyncio.create_task(self._remember(state, registered, journal)))
                await asyncio.wait({stop, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not self._stop.is_set():
                raise EngineDead("the HTTP server ended by itself")
        finally:
            for task in (start, stop, *background):
                task.cancel()
            await asyncio.gather(start, stop, *background, return_exceptions=True)

    async def _remember(self, state: ServerState, registered: list[Registered], journal: UseJournal) -> None:
        # One after the other: what is not back yet must not be written down as being on disk alone.
        await bring_back(registered, state.directory)
        await journal.run()

    async def _start(self, state: ServerState) -> list[Registered]:
        # Beside the engine's start, because it takes seconds.
        importing = asyncio.create_task(asyncio.to_thread(_import_tokenizers))
        if self._config.engine.model.model is None:
            await prepare_demo(self._say)
        await self._engine.start()
        await importing
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(self._engine.info.model_path))
        registered = await state.directory.registry.sync()
        for order in self._orders:
            entry = await state.directory.load(order)
            assert entry.served is not None
            report = entry.served.stored.report
            self._say(f"adapter {order.name}: version {report.version[:12]}, rank {report.rank}")
        state.set_tokenizer(tokenizer)
        state.starting = False
        return registered

    def _announce(self, state: ServerState, listener: socket.socket) -> None:
        for line in self._engine.info.plan:
            self._say(f"  {line}")
        url = url_of(listener)
        names = [served.name for served in state.directory.served()]
        with_names = f" and {len(names)} adapters ({', '.join(names[:8])}{', …' if len(names) > 8 else ''})"
        self._say(f"ready: {url} serves {state.base_name}{with_names if names else ''}")
        for line in curl_lines(url, state.base_name, names, bool(self._config.server.api_key)):
            self._say(f"  {line}")

    def _watch_signals(self, stack: ExitStack) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
            stack.callback(loop.remove_signal_handler, number)

    def stop(self) -> None:
        """Begin to drain; the second call ends what still runs."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _drain(self, state: ServerState) -> None:
        """Turn new requests away, let running ones finish until the deadline or a second signal, end the rest."""
        state.draining = True
        if not len(state.inflight):
            return
        deadline_s = self._config.server.drain_deadline_s
        self._say(f"draining {len(state.inflight)} requests for up to {deadline_s:g} s")
        idle = asyncio.create_task(state.inflight.wait_idle(deadline_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({idle, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurry):
            task.cancel()
        await asyncio.gather(idle, hurry, return_exceptions=True)
        if not await state.inflight.abort_all(RequestAborted("the server is shutting down")):
            return
        if not await state.inflight.wait_idle(ABORT_GRACE_S):
            # The engine does not answer. Its client ends what is open when it stops, and the clients hear of it.
            await self._engine.stop(0.0)
            await state.inflight.wait_idle(ABORT_GRACE_S)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: when to stop is the service's decision."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def parse_adapter_flag(text: str) -> LoadOrder:
    """`NAME=PATH` → load order. The operator's own paths need no --adapter-dir. Raises `ConfigError`."""
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise ConfigError(f"--adapter {text!r} must be NAME=PATH")
    try:
        check_name(name)
    except AdapterRefused as error:
        raise ConfigError(f"--adapter {text!r}: {error.message}") from error
    place = AdapterPlace(path=str(Path(path).expanduser().absolute()), trusted=True)
    # What the operator says at the start holds, whatever the name was before; that stays in its history.
    return LoadOrder(name=name, place=place, replace=True)


def parse_adapter_flags(texts: Sequence[str], base_name: str) -> list[LoadOrder]:
    """All of them, each name once. Raises `ConfigError` for what could only fail later."""
    orders: dict[str, LoadOrder] = {}
    for text in texts:
        order = parse_adapter_flag(text)
        if order.name == base_name:
            raise ConfigError(f"--adapter {text!r}: {base_name!r} is the name of the base model")
        if orders.setdefault(order.name, order) != order:
            raise ConfigError(f"--adapter {order.name}=… is given twice, with different paths")
    return list(orders.values())


def bind(config: ServerConfig) -> socket.socket:
    """Take the address early, so that clients wait for the start instead of being refused. Raises `ConfigError`."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
        # Connections inherit it. asyncio sets it only on sockets that were made with TCP's number; without it an
        # answer's body, its second packet, waits for the client's delayed acknowledgement: 40 ms on Linux.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    # A host name that is no name fails as text, not as an address.
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error


def data_dir(config: ServerConfig) -> Path:
    """`--data-dir`, or the user's data folder."""
    if config.data_dir is not None:
        return config.data_dir.expanduser().absolute()
    if xdg := os.environ.get("XDG_DATA_HOME"):
        return Path(xdg).expanduser() / "loraserve"
    return Path.home() / ".local" / "share" / "loraserve"


def _import_tokenizers() -> None:
    # transformers imports on first access; what a model-specific tokenizer needs on top comes when it is loaded.
    _ = importlib.import_module("transformers").PreTrainedTokenizerFast


async def prepare_demo(say: Say) -> None:
    """Make the demo model in a process of its own, because that needs torch. Raises `DemoModelUnavailable`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PREPARE_DEMO, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        shown = ""
        async for line in process.stdout:
            stage = line.decode(errors="replace").split("\t")[0]
            if stage != shown:
                shown = stage
                say(f"demo model: {stage}")
        if await process.wait() != 0:
            reason = (await errors).decode(errors="replace").strip().splitlines()
            raise DemoModelUnavailable(reason[-1].partition(": ")[2] if reason else "preparing the demo model failed")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        errors.cancel()
        await asyncio.gather(errors, return_exceptions=True)


def url_of(listener: socket.socket) -> str:
    """An address that reaches the listener from this machine."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def curl_lines(url: str, base: str, adapters: list[str], needs_key: bool) -> list[str]:
    """Three commands to try."""
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    post = f"curl {url}/v1{{}}{key} -H 'Content-Type: application/json' -d '{{}}'"
    chat = {"model": adapters[0] if adapters else base, "messages": [{"role": "user", "content": "Hello!"}]}
    plain = {"model": base, "prompt": "The sky is", "max_tokens": 16, "temperature": 0}
    return [
        f"curl {url}/v1/models{key}",
        post.format("/completions", json.dumps(plain)),
        post.format("/chat/completions", json.dumps(chat)),
    ]
