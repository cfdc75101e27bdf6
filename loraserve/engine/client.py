"""The server's side of the process boundary: starts the engine process, talks to it, restarts it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from loraserve.config import EngineConfig
from loraserve.engine.health import EngineHealth as EngineHealth  # the server knows it by this door
from loraserve.engine.health import detail_of
from loraserve.engine.messages import (
    AbortRequest,
    AdapterStatus,
    AdapterStatuses,
    AddRequest,
    Codec,
    DescribeAdapters,
    DropAdapter,
    EngineInfo,
    EngineStats,
    ErrorInfo,
    LoadAdapter,
    Outputs,
    PrefetchAdapter,
    Reply,
    RequestOutput,
    SetLimits,
    Shutdown,
    StartFailed,
    ToEngine,
    ToServer,
    encode_config,
)
from loraserve.errors import EngineDead, EngineNotReady, EngineStuck, LoraserveError, ModelLoadError

logger = logging.getLogger(__name__)

STUCK_AFTER_S = 10.0
CHECK_S = 1.0  # how often a call looks whether the engine that it waits for is stuck
LATE_S = 1.0  # how long after a request's time limit the engine may still end it itself
RESTART_PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0)


@dataclass(slots=True)
class _Registered:
    folder: str
    pinned: bool


class EngineClient:
    """One engine process and everything that is open in it. All methods belong to one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._codec = Codec(ToServer)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._open: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._adapters: dict[str, _Registered] = {}
        self._limits: tuple[int | None, int | None] = (None, None)
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._context: zmq.asyncio.Context | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._folder = ""
        self._stopping = False
        self._restoring = False  # after a restart, until the adapters are back
        self._last_news = time.monotonic()
        self.restarts = 0
        self._info: EngineInfo | None = None
        self.stats = EngineStats()

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What the engine serves. Raises `EngineNotReady` before the first start."""
        if self._info is None:
            raise EngineNotReady("the engine is still starting")
        return self._info

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises the reason when it cannot (`ModelLoadError` …)."""
        self._context = zmq.asyncio.Context()
        try:
            await self._launch()
        except BaseException:
            await self.stop(0.0)
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def stop(self, drain_s: float = 0.0) -> None:
        """Let open requests finish for up to `drain_s` seconds, then end the process; leaves nothing behind."""
        end = time.monotonic() + drain_s
        while self._open and time.monotonic() < end and self.health().ready:
            await asyncio.sleep(0.02)
        self._stopping = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(LoraserveError):
                await self._send(Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), 5.0)
            except asyncio.TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._close_connection(EngineDead("the server is shutting down"))
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _launch(self) -> None:
        assert self._context is not None
        self._folder = tempfile.mkdtemp(prefix="loraserve-")
        endpoint = f"ipc://{self._folder}/engine"
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)
        self._ready = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "loraserve.engine.process",
            endpoint,
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | {"LORASERVE_PARENT": str(os.getpid())},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(encode_config(self._config))
        self._process.stdin.close()
        reader = asyncio.create_task(self._read(self._socket), name="engine-reader")
        self._tasks = [reader]
        exited: asyncio.Future[int] = asyncio.ensure_future(self._process.wait())
        started: set[asyncio.Future[Any]] = {self._ready, exited}
        await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise ModelLoadError(f"the engine process ended with code {exited.result()} while starting")
        exited.cancel()
        self._info = self._ready.result()
        self._last_news = time.monotonic()

    async def _close_connection(self, reason: LoraserveError) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""
        self._ready = None
        self.stats = EngineStats()
        info = ErrorInfo.of(reason)
        for request_id, queue in self._open.items():
            queue.put_nowait(RequestOutput(id=request_id, finish_reason="error", error=info))
        self._open = {}
        for call in self._calls.values():
            if not call.done():
                call.set_exception(reason)
        self._calls = {}

    async def _supervise(self) -> None:
        """Wait for the process to end; end what was open; start it again with the adapters it had."""
        while not self._stopping:
            assert self._process is not None
            code = await self._process.wait()
            self.restarts += 1
            self._restoring = True
            logger.error("the engine process ended with code %s; open requests: %d", code, len(self._open))
            await self._close_connection(EngineDead("the engine died; the request was lost, the engine restarts"))
            for attempt in itertools.count():
                await asyncio.sleep(RESTART_PAUSES_S[min(attempt, len(RESTART_PAUSES_S) - 1)])
                try:
                    await self._launch()
                    break
                except Exception as error:
                    logger.error("the engine did not start again: %s", error)
                    await self._end_process()
                    await self._close_connection(EngineDead("the engine does not start"))
            await self._register_again()
            self._restoring = False
            logger.info("the engine runs again")

    async def _end_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _register_again(self) -> None:
        if self._limits != (None, None):
            with contextlib.suppress(LoraserveError):
                await self._send_limits()
        for version, known in list(self._adapters.items()):
            message = LoadAdapter(call=next(self._call_ids), version=version, folder=known.folder, pinned=known.pinned)
            try:
                await self._call(message)
            except LoraserveError as error:
                logger.error("adapter version %s did not come back: %s", version[:12], error)

    # -- traffic --------------------------------------------------------------------------------------------------

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs to the terminal one. Leaving early aborts the request in the engine."""
        queue: asyncio.Queue[RequestOutput] = asyncio.Queue()
        if request.id in self._open:
            raise LoraserveError("duplicate request id")
        self._require_ready()
        self._open[request.id] = queue
        finished = False
        timeout_s = self._config.scheduler.request_timeout_s if request.timeout_s is None else request.timeout_s
        # The engine keeps the time itself, but only between two steps: a stuck one would keep the client for ever.
        late = asyncio.get_running_loop().call_later(timeout_s + LATE_S, self._give_up, request.id)
        try:
            await self._send(request)
            while not finished:
                output = await queue.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            late.cancel()
            mine = self._open.get(request.id) is queue
            if mine:
                del self._open[request.id]
            if not finished and mine:
                self._send_soon(AbortRequest(id=request.id))

    def _give_up(self, request_id: str) -> None:
        if request_id in self._open:
            self._deliver(RequestOutput(id=request_id, finish_reason="timeout"))
            self._send_soon(AbortRequest(id=request_id))

    async def abort(self, request_id: str, error: LoraserveError | None = None) -> None:
        """End a request; its generator still yields the terminal output."""
        with contextlib.suppress(EngineNotReady, EngineDead):
            await self._send(AbortRequest(id=request_id, error=None if error is None else ErrorInfo.of(error)))

    async def load_adapter(self, version: str, folder: str, pinned: bool = False) -> None:
        """Stage a version; returns when it is on the host. Raises `AdapterRefused`, `EngineDead` …"""
        self._require_ready()
        try:
            await self._call(LoadAdapter(call=next(self._call_ids), version=version, folder=folder, pinned=pinned))
        except EngineStuck:
            if version not in self._adapters:  # nobody knows of it, should the engine come back and load it
                self._send_soon(DropAdapter(call=next(self._call_ids), version=version, force=True))
            raise
        self._adapters[version] = _Registered(folder, pinned)

    async def drop_adapter(self, version: str, force: bool = False) -> None:
        """Free a version on host and device; with `force` its running requests are ended first."""
        self._adapters.pop(version, None)
        if self.health().ready:
            await self._call(DropAdapter(call=next(self._call_ids), version=version, force=force))

    async def prefetch_adapter(self, version: str, to_device: bool = True, idle_s: float = 0.0) -> None:
        """Start to bring a loaded version nearer; returns at once. Raises `AdapterNotFound`, `EngineDead` …"""
        self._require_ready()
        call = next(self._call_ids)
        await self._call(PrefetchAdapter(call=call, version=version, to_device=to_device, idle_s=idle_s))

    async def set_limits(self, lora_memory: int | None, host_lora_memory: int | None) -> None:
        """Change the memory (bytes) that adapters may take; None leaves a limit. A restarted engine gets them again."""
        self._require_ready()
        old = self._limits
        self._limits = (
            old[0] if lora_memory is None else lora_memory,
            old[1] if host_lora_memory is None else host_lora_memory,
        )
        await self._send_limits()

    async def _send_limits(self) -> None:
        device, host = self._limits
        await self._call(SetLimits(call=next(self._call_ids), lora_memory=device, host_lora_memory=host))

    async def adapter_statuses(self) -> dict[str, AdapterStatus]:
        """State of every version the engine knows."""
        self._require_ready()
        answer: AdapterStatuses = await self._call(DescribeAdapters(call=next(self._call_ids)))
        return {status.version: status for status in answer.adapters}

    async def adapter_status(self, version: str) -> AdapterStatus | None:
        """State of one version."""
        return (await self.adapter_statuses()).get(version)

    def health(self) -> EngineHealth:
        """Judge the engine by its process and by the age of its last sign of life."""
        alive = self._process is not None and self._process.returncode is None
        ready = alive and self._ready is not None and self._ready.done() and not self._ready.cancelled()
        silence = time.monotonic() - self._last_news
        stuck = ready and silence > max(STUCK_AFTER_S, 4 * self.stats.slowest_step_s)
        detail = detail_of(alive=alive, ready=ready, restoring=self._restoring, silence_s=silence if stuck else None)
        return EngineHealth(
            alive=alive, stuck=stuck, ready=ready and not (self._stopping or self._restoring), detail=detail
        )

    def _require_ready(self) -> None:
        health = self.health()
        if not health.ready:
            raise (EngineNotReady if health.alive else EngineDead)(health.detail)

    async def _send(self, message: ToEngine) -> None:
        if self._socket is None:
            raise EngineDead("the engine process is not running")
        try:
            # The queue is unbounded: a send would wait only for a peer that is gone.
            await self._socket.send(self._codec.encode(message), flags=zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineDead("the engine process is not running") from error

    def _send_soon(self, message: ToEngine) -> None:
        # Called while a generator is closed, where awaiting is not safe. If the engine is gone, so is the request.
        if self._socket is not None:
            sent = self._socket.send(self._codec.encode(message), flags=zmq.NOBLOCK)
            asyncio.ensure_future(sent).add_done_callback(lambda future: future.exception())

    async def _call(self, message: LoadAdapter | DropAdapter | PrefetchAdapter | SetLimits | DescribeAdapters) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[message.call] = future
        try:
            await self._send(message)
            while not (await asyncio.wait({future}, timeout=CHECK_S))[0]:
                if (health := self.health()).stuck:
                    raise EngineStuck(health.detail)
            return future.result()
        finally:
            self._calls.pop(message.call, None)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = self._codec.decode(await socket.recv())
            self._last_news = time.monotonic()
            match message:
                case Outputs(outputs=outputs):
                    for output in outputs:
                        self._deliver(output)
                case Reply(call=call, error=error):
                    self._answer(call, None if error is None else error.to_error(), message)
                case AdapterStatuses(call=call):
                    self._answer(call, None, message)
                case EngineStats():
                    self.stats = message
                case EngineInfo():
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_result(message)
                case StartFailed(error=error):
                    if self._ready is not None and not self._ready.done():
                        self._ready.set_exception(error.to_error())

    def _deliver(self, output: RequestOutput) -> None:
        queue = self._open.get(output.id)
        if queue is not None:
            queue.put_nowait(output)
            if output.finish_reason is not None:
                del self._open[output.id]

    def _answer(self, call: int, error: LoraserveError | None, message: Any) -> None:
        future = self._calls.get(call)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(message)
        else:
            future.set_exception(error)
