"""The outermost layer: request ids, the limit on bodies, request counts, and the last net under failures."""

from __future__ import annotations

import asyncio
import logging
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraserve.errors import LoraserveError, PayloadTooLarge, RequestTimedOut
from loraserve.server.auth import Auth
from loraserve.server.compat_doors import DOORS
from loraserve.server.failures import error_response, internal_error_bytes
from loraserve.server.metrics import Metrics
from loraserve.server.streaming import CLIENT_GONE, ClientGone

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(
    {"/health", "/ready", "/version", "/metrics", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
)
_ADMIN = ("/adapters", "/admin")
# From the headers to the last byte of the body.
BODY_TIMEOUT_S = 60.0
_TEMPLATES = {"/adapters/": "/adapters/{name}", "/v1/models/": "/v1/models/{model}"}
_FIXED = frozenset({"/adapters/load", "/adapters/unload", "/adapters/rollback", "/adapters/pin", "/adapters/prefetch"})
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class Envelope:
    """Wraps the app. The body is read before the app runs, at most `max_body` bytes of it."""

    def __init__(
        self, app: ASGIApp, auth: Auth, metrics: Metrics, max_body: int, body_timeout_s: float = BODY_TIMEOUT_S
    ) -> None:
        self._app = app
        self._auth = auth
        self._metrics = metrics
        self._max_body = max_body
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = request_id = uuid.uuid4().hex
        status = CLIENT_GONE

        async def tracked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._answer(scope, receive, tracked)
        except ClientGone:
            logger.info("request %s: the client went away", request_id)
        except asyncio.CancelledError:
            # The server ends and this client was too slow. This is where the task ends, too: passed on, it would only
            # be logged as a failure.
            logger.info("request %s: cut off, the server ends", request_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status == CLIENT_GONE:
                await _send_internal_error(tracked)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.http.labels(method, _route_of(scope), str(status)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._authorize(scope)
            body = await asyncio.wait_for(self._read(scope, receive), self._body_timeout_s)
        except asyncio.TimeoutError:
            late = RequestTimedOut(f"the body did not arrive within {self._body_timeout_s:g} s")
            # What still comes of it is no next request.
            await error_response(late, {"connection": "close"})(scope, receive, send)
            return
        except LoraserveError as error:
            await error_response(error)(scope, receive, send)
            return
        waiting = True

        async def replay() -> Message:
            nonlocal waiting
            if waiting:
                waiting = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    def _authorize(self, scope: Scope) -> None:
        # Before anything of the request is read, and closed unless named open: a new route is safe by default.
        path = scope["path"]
        header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        key = None if header is None else header.decode("utf-8", "surrogateescape")
        scope["tenant"] = ""
        if path in DOORS:
            scope["tenant"], scope["operator"] = self._auth.check_door(key)
        elif any(path == admin or path.startswith(f"{admin}/") for admin in _ADMIN):
            scope["tenant"] = self._auth.check_admin(key)
        elif path not in OPEN_PATHS:
            scope["tenant"] = self._auth.check_api(key)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        too_large = PayloadTooLarge(f"the body is larger than {self._max_body} bytes")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body:
                raise too_large
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise too_large
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)


def _route_of(scope: Scope) -> str:
    """The route's template, so that labels stay few whatever paths are asked for."""
    # What `scope["route"].path` says of a router's prefix differs between versions of FastAPI.
    path: str = scope["path"]
    if scope.get("route") is None:
        return "unmatched"
    for prefix, template in _TEMPLATES.items():
        if path.startswith(prefix) and path not in _FIXED:
            versions = prefix == "/adapters/" and path.endswith("/versions")
            return f"{template}/versions" if versions else template
    return path


async def _send_internal_error(send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": internal_error_bytes()})
