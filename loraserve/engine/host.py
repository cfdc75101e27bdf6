"""The engine behind its socket: messages in, steps, messages out, one thread."""

from __future__ import annotations

import logging
import os
import time

import zmq

from loraserve.engine.build import EngineParts
from loraserve.engine.loop import EngineLoop
from loraserve.engine.messages import (
    AbortRequest,
    AdapterStatuses,
    AddRequest,
    Codec,
    DescribeAdapters,
    DropAdapter,
    ErrorInfo,
    LoadAdapter,
    Outputs,
    PrefetchAdapter,
    Reply,
    SetLimits,
    Shutdown,
)
from loraserve.errors import LoraserveError, RequestAborted

logger = logging.getLogger(__name__)

_STATS_EVERY_S = 0.5
_IDLE_POLL_MS = 50
# While adapters are being staged or uploaded and nothing runs, the loop must come back soon to move them on.
_BUSY_POLL_MS = 1


class EngineHost:
    """Serves one `EngineLoop` over one socket. `run` returns on `Shutdown` or when the parent process is gone."""

    def __init__(self, parts: EngineParts, socket: zmq.Socket[bytes], codec: Codec, parent: int) -> None:
        self._loop: EngineLoop = parts.loop
        self._info = parts.info
        self._socket = socket
        self._codec = codec
        self._parent = parent
        self._stopping = False
        self._next_stats = 0.0
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        """Alternate between reading messages and stepping."""
        self._send(self._info)
        while not self._stopping:
            self._receive()
            worked = self._loop.step()
            self._emit()
            if not worked:
                self._wait()
        self._loop.abort_all(RequestAborted("the engine is shutting down"))
        self._emit()

    def _receive(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(data)

    def _wait(self) -> None:
        self._poller.poll(_BUSY_POLL_MS if self._loop.busy else _IDLE_POLL_MS)

    def _handle(self, data: bytes) -> None:
        message = self._codec.decode(data)
        match message:
            case AddRequest():
                self._loop.add(message)
            case AbortRequest(id=request_id, error=error):
                self._loop.abort(request_id, None if error is None else error.to_error())
            case LoadAdapter(call=call, version=version, folder=folder, pinned=pinned):
                self._loop.load_adapter(version, folder, pinned, lambda error: self._reply(call, error))
            case DropAdapter(call=call, version=version, force=force):
                self._loop.drop_adapter(version, force, lambda error: self._reply(call, error))
            case PrefetchAdapter(call=call, version=version, to_device=to_device, idle_s=idle_s):
                try:
                    self._loop.prefetch_adapter(version, to_device, idle_s)
                    self._reply(call, None)
                except LoraserveError as error:
                    self._reply(call, error)
            case SetLimits(call=call, lora_memory=device, host_lora_memory=memory):
                self._loop.set_limits(device, memory)
                self._reply(call, None)
            case DescribeAdapters(call=call):
                self._send(AdapterStatuses(call=call, adapters=self._loop.adapter_statuses()))
            case Shutdown():
                self._stopping = True

    def _reply(self, call: int, error: LoraserveError | None) -> None:
        self._send(Reply(call=call, error=None if error is None else ErrorInfo.of(error)))

    def _emit(self) -> None:
        outputs = self._loop.take_outputs()
        if outputs:
            self._send(Outputs(outputs=outputs))
        now = time.monotonic()
        if now >= self._next_stats:
            self._next_stats = now + _STATS_EVERY_S
            self._send(self._loop.stats())
            if self._parent and os.getppid() != self._parent:
                logger.warning("the server process is gone; the engine ends")
                self._stopping = True

    def _send(self, message: object) -> None:
        self._socket.send(self._codec.encode(message))  # type: ignore[arg-type]
