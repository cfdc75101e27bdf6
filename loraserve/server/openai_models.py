"""`GET /v1/models`: the base and every adapter that requests can name."""

from __future__ import annotations

from fastapi import APIRouter, Request

from loraserve.errors import ModelNotFound
from loraserve.server.inflight import ServedAdapter
from loraserve.server.responses import ModelCard, ModelList
from loraserve.server.state import ServerState


def models_router(state: ServerState) -> APIRouter:
    """The routes; `/v1` and authorisation are the app's."""
    router = APIRouter(tags=["models"])

    @router.get("/models", response_model_exclude_unset=True, summary="List models")
    async def models(request: Request) -> ModelList:
        """The base model first, then the adapters by name."""
        await state.directory.registry.see_changes(thorough=True)
        served = state.directory.served(request.scope["tenant"])
        return ModelList(object="list", data=[_base(state), *(_card(state, each) for each in served)])

    # Hub names have a slash.
    @router.get("/models/{model:path}", response_model_exclude_unset=True, summary="Describe a model")
    async def model_card(model: str, request: Request) -> ModelCard:
        """One entry of the list; adapters also as `base:adapter`."""
        if model == state.base_name:
            return _base(state)
        await state.directory.registry.see_changes(thorough=True)
        name = model.removeprefix(f"{state.base_name}:")
        for served in state.directory.served(request.scope["tenant"]):
            if served.name == name:
                return _card(state, served)
        raise ModelNotFound(f"there is no model {model[:200]!r}", param="model")

    return router


def _base(state: ServerState) -> ModelCard:
    return ModelCard(
        id=state.base_name,
        object="model",
        created=int(state.started),
        owned_by="loraserve",
        root=state.base_name,
        parent=None,
        max_model_len=state.max_tokens,
    )


def _card(state: ServerState, served: ServedAdapter) -> ModelCard:
    source = served.source
    return ModelCard(
        id=served.name,
        object="model",
        created=int(served.loaded_at),
        owned_by="loraserve",
        root=source.repo or served.name,
        parent=state.base_name,
    )
