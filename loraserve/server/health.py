"""Whether the server is well, what it is, and its metrics."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from loraserve import __version__
from loraserve.errors import EngineDead, EngineNotReady, LoraserveError, StorageFailed
from loraserve.server.failures import error_body
from loraserve.server.responses import ErrorResponse, HealthResponse, VersionResponse
from loraserve.server.state import ServerState

_RED: dict[int | str, dict[str, Any]] = {503: {"model": ErrorResponse}}


def health_router(state: ServerState) -> APIRouter:
    """Routes that need no key."""
    router = APIRouter(tags=["operation"])

    # Load balancers ask with HEAD.
    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=HealthResponse, responses=_RED, summary="Is the engine alive")
    async def health() -> JSONResponse:
        """Red (503) when the engine is gone, not back yet, or its step loop is stuck; the first start is no illness."""
        report = state.engine.health()
        if state.starting:
            return _ok("starting")
        if not (report.alive and report.ready) or report.stuck:
            return _red(EngineDead(report.detail))
        return _ok(report.detail)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=HealthResponse, responses=_RED, summary="Are requests taken")
    async def ready() -> JSONResponse:
        """503 while the model loads, after the engine died until it is back, and while the server drains."""
        report = state.engine.health()
        if state.starting:
            return _red(EngineNotReady("the server is starting"))
        if not report.alive or report.stuck:
            return _red(EngineDead(report.detail))
        try:
            state.require_ready()
        except LoraserveError as error:
            return _red(error)
        return _ok("ready") if report.ready else _red(EngineNotReady(report.detail))

    @router.get("/version", summary="Version of the server")
    async def version() -> VersionResponse:
        """The package's version."""
        return VersionResponse(version=__version__)

    @router.get("/metrics", response_class=Response, summary="Prometheus metrics")
    async def metrics() -> Response:
        """Text format."""
        with suppress(StorageFailed):
            state.metrics.disk_bytes = await asyncio.to_thread(state.disk_bytes)
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


def _ok(detail: str) -> JSONResponse:
    return JSONResponse(HealthResponse(status="ok", detail=detail).model_dump())


def _red(error: LoraserveError) -> JSONResponse:
    return JSONResponse(error_body(error).model_dump(), status_code=503)
