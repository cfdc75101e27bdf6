"""The HTTP application, put together from its routers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from loraserve import __version__
from loraserve.config import ServeConfig
from loraserve.engine.messages import EngineInfo
from loraserve.errors import EngineNotReady
from loraserve.server.adapter_metrics import AdapterCollector
from loraserve.server.admin import admin_router
from loraserve.server.admin_limits import limits_router
from loraserve.server.auth import Auth
from loraserve.server.chats import ChatRenderer
from loraserve.server.compat_doors import sglang_router, vllm_router
from loraserve.server.directory import AdapterDirectory
from loraserve.server.failures import install_handlers
from loraserve.server.health import health_router
from loraserve.server.inflight import InFlight
from loraserve.server.metrics import Metrics, RequestMeter
from loraserve.server.middleware import Envelope
from loraserve.server.naming import served_name
from loraserve.server.openai_chat import chat_router
from loraserve.server.openai_completions import completions_router
from loraserve.server.openai_models import models_router
from loraserve.server.ports import AdapterLibrary, EnginePort
from loraserve.server.responses import ErrorResponse
from loraserve.server.sources import parse_sources
from loraserve.server.state import ServerState
from loraserve.server.text import Text
from loraserve.server.tokens import tokens_router

_FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 408, 409, 413, 429, 500, 503)
}


def make_state(
    config: ServeConfig,
    engine: EnginePort,
    tokenizer: Any | None,
    library: AdapterLibrary,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> ServerState:
    """Everything the routes share. `tokenizer` may come later, by setting `text_or_none`."""
    base_name = served_name(config.engine.model)
    inflight, lora = InFlight(engine), config.engine.lora
    metrics = Metrics(lambda: engine.stats)
    directory = AdapterDirectory(
        engine,
        library,
        inflight,
        base_name,
        sources=parse_sources(lora.adapter_source),
        max_on_demand=lora.adapter_source_count,
        max_on_demand_bytes=lora.adapter_source_size,
        clock=clock,
    )
    collector = AdapterCollector(
        metrics.traffic,
        lambda: engine.stats,
        lambda: _info_of(engine),
        inflight.adapters,
        base_name,
        lora.max_lora_slots,
        lambda: metrics.disk_bytes,
    )
    metrics.registry.register(collector)
    return ServerState(
        config=config,
        engine=engine,
        base_name=base_name,
        directory=directory,
        inflight=inflight,
        metrics=metrics,
        disk_bytes=library.disk_bytes,
        meter=RequestMeter(metrics),
        auth=Auth(config.server),
        chats=ChatRenderer(library, use_own=not config.server.ignore_adapter_chat_templates),
        text_or_none=None if tokenizer is None else Text(tokenizer),
    )


def _info_of(engine: EnginePort) -> EngineInfo | None:
    try:
        return engine.info
    except EngineNotReady:
        return None


def create_app(config: ServeConfig, engine: EnginePort, tokenizer: Any | None, library: AdapterLibrary) -> FastAPI:
    """The whole application over an engine, a Hugging Face tokenizer and an adapter library."""
    return build_app(make_state(config, engine, tokenizer, library))


def build_app(state: ServerState) -> FastAPI:
    """The application over a state; `app.state.server` is that state."""
    app = _Documented(
        title="loraserve",
        version=__version__,
        summary="One base model and many LoRA adapters, answered together in the same forward passes.",
        responses=_FAILURES,
        redirect_slashes=False,
    )
    app.state.server = state
    app.include_router(completions_router(state), prefix="/v1")
    app.include_router(chat_router(state), prefix="/v1")
    app.include_router(models_router(state), prefix="/v1")
    app.include_router(vllm_router(state), prefix="/v1")
    app.include_router(sglang_router(state))
    app.include_router(tokens_router(state))
    app.include_router(admin_router(state), prefix="/adapters")
    app.include_router(limits_router(state), prefix="/admin")
    app.include_router(health_router(state))
    install_handlers(app)
    app.add_middleware(Envelope, auth=state.auth, metrics=state.metrics, max_body=state.config.server.max_body)
    return app


class _Documented(FastAPI):
    """Leaves FastAPI's own 422 out of the OpenAPI document: no route answers with it."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            schema = super().openapi()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
        return super().openapi()
