"""Answers over time: server-sent events, and noticing that the client went away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraserve.errors import LoraserveError
from loraserve.server.failures import error_body, error_response

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
STALLED_S = 60.0
"""How long a client may take nothing of a stream, before its requests and their adapters are let go."""


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


def event(model: BaseModel) -> bytes:
    """One server-sent event."""
    return b"data: " + model.model_dump_json(exclude_unset=True).encode() + b"\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, ended when the client goes away. Raises `ClientGone`."""
    return await _race(work, _until_gone(request.receive))


class EventStream(Response):
    """Sends models as events. An error before the first one is an ordinary answer; after it, the last event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[BaseModel, None], stalled_s: float = STALLED_S) -> None:
        self._events = events
        self._stalled_s = stalled_s
        self._sending_since: float | None = None
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        # init_headers counts an empty body.
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(self._serve(scope, receive, send), _until_gone(receive), self._until_stalled())
        except (ClientGone, OSError):
            logger.info("request %s: the client went away", scope.get("request_id", ""))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                first = await anext(self._events)
            except LoraserveError as error:
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, event(first))
            try:
                async for model in self._events:
                    await self._send(send, event(model))
            except LoraserveError as error:
                await self._send(send, event(error_body(error)))
            except OSError:
                raise
            except Exception:
                logger.exception("request %s: a stream failed", scope.get("request_id", ""))
                await self._send(send, event(error_body(LoraserveError("internal error"))))
            await self._send(send, DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._sending_since = None

    async def _until_stalled(self) -> None:
        while self._sending_since is None or time.monotonic() - self._sending_since < self._stalled_s:
            await asyncio.sleep(self._stalled_s / 4)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(work: Coroutine[Any, Any, T], *ends: Coroutine[Any, Any, None]) -> T:
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, *others):
            each.cancel()
        await asyncio.gather(task, *others, return_exceptions=True)
