"""Doors that controllers of other servers know: vLLM's and SGLang's calls to load and unload adapters.

They go through the same directory as `/adapters/load`, so allow-lists, checks and the admin key hold here too; only the
shapes of questions and answers are theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from loraserve.errors import AdapterInUse, AdapterNotFound, LoraserveError, NameReserved, NameTaken
from loraserve.server.entries import LoadOrder
from loraserve.server.fields import check_fields
from loraserve.server.ports import AdapterPlace
from loraserve.server.protocol import (
    SglangLoadRequest,
    SglangUnloadRequest,
    VllmLoadRequest,
    VllmUnloadRequest,
)
from loraserve.server.state import ServerState
from loraserve.server.strict_body import StrictRoute

DOORS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"})
"""Paths that change adapters, so they are the admin key's."""

_NOT_THERE = frozenset({"not_an_adapter", "repo_not_found", "subfolder_not_found"})


def vllm_router(state: ServerState) -> APIRouter:
    """vLLM's doors; `/v1` and authorisation are the app's."""
    router = APIRouter(tags=["compatibility"], route_class=StrictRoute)

    @router.post("/load_lora_adapter", response_class=PlainTextResponse, summary="Load an adapter (as vLLM)")
    async def load(body: VllmLoadRequest, request: Request) -> Response:
        """A name that is there is refused, unless `load_inplace` asks to replace it."""
        state.require_ready()
        # The Gateway API's side-car sends the last of these always; empty stands for the base.
        bases = (state.base_name, state.config.engine.model.model, "")
        check_fields(body, {"is_3d_lora_weight": (False,), "base_model_name": bases})
        name = body.lora_name
        if not name or not body.lora_path:
            return _vllm_error("Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput", 400)
        inplace = bool(body.load_inplace)
        await state.directory.registry.see_changes(thorough=True)
        if state.directory.find(name) is not None and not inplace:
            hint = "If you want to load the adapter in place, set 'load_inplace' to True."
            return _vllm_error(f"The lora adapter '{name}' has already been loaded. {hint}", "InvalidUserInput", 400)
        try:
            place = _place(state, body.lora_path)
            order = LoadOrder(name=name, place=place, replace=inplace, tenant=_limited_to(request))
            await state.directory.load(order)
        except LoraserveError as error:
            if error.code in _NOT_THERE:
                missing = f"Loading lora {name} failed: No adapter found for {body.lora_path}"
                return _vllm_error(missing, "NotFoundError", 404)
            return _vllm_failure(error)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/unload_lora_adapter", response_class=PlainTextResponse, summary="Unload an adapter (as vLLM)")
    async def unload(body: VllmUnloadRequest, request: Request) -> Response:
        """The name is gone at once; running requests go on."""
        check_fields(body, {})
        name = body.lora_name
        if not name:
            problem = "'lora_name' needs to be provided to unload a LoRA adapter."
            return _vllm_error(problem, "InvalidUserInput", 400)
        try:
            await _check_may_unload(state, name, request)
            await state.directory.unload(name, wait=False)
        except AdapterNotFound:
            return _vllm_error(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
        except LoraserveError as error:
            return _vllm_failure(error)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router


def sglang_router(state: ServerState) -> APIRouter:
    """SGLang's doors; authorisation is the app's."""
    router = APIRouter(tags=["compatibility"], route_class=StrictRoute)

    @router.post("/load_lora_adapter", summary="Load an adapter (as SGLang)")
    async def load(body: SglangLoadRequest, request: Request) -> JSONResponse:
        """A name that is there is refused."""
        state.require_ready()
        check_fields(body, {"lora_id": (), "added_tokens_config": ({},)})
        await state.directory.registry.see_changes(thorough=True)
        if state.directory.find(body.lora_name) is not None:
            return _sglang(state, request, f"LoRA adapter {body.lora_name} is already loaded.")
        try:
            place = _place(state, body.lora_path)
            tenant = _limited_to(request)
            await state.directory.load(
                LoadOrder(name=body.lora_name, place=place, pin=bool(body.pinned), tenant=tenant)
            )
        except LoraserveError as error:
            return _sglang(state, request, error.message)
        return _sglang(state, request, None)

    @router.post("/unload_lora_adapter", summary="Unload an adapter (as SGLang)")
    async def unload(body: SglangUnloadRequest, request: Request) -> JSONResponse:
        """Answers when its requests have ended."""
        check_fields(body, {"lora_id": ()})
        try:
            await _check_may_unload(state, body.lora_name, request)
            await state.directory.unload(body.lora_name)
        except LoraserveError as error:
            return _sglang(state, request, error.message)
        return _sglang(state, request, None)

    return router


def _limited_to(request: Request) -> str | None:
    """The tenant that a caller through open doors is; None for an operator, who may see and change all."""
    return None if request.scope["operator"] else request.scope["tenant"]


async def _check_may_unload(state: ServerState, name: str, request: Request) -> None:
    """Raises `AdapterNotFound` for what is not there to this caller."""
    await state.directory.registry.see_changes(thorough=True)
    tenant = _limited_to(request)
    if tenant is not None and not state.directory.entry(name).is_visible_to(tenant):
        raise AdapterNotFound(f"no adapter is registered as {name!r}", param="name")


def _place(state: ServerState, where: str) -> AdapterPlace:
    """A folder or an address, or else a repository of the Hub: what looks like a path is one."""
    for scheme in ("hf://", "huggingface://"):
        if where.startswith(scheme):
            return AdapterPlace(repo=where.removeprefix(scheme))
    looks_like_path = where.startswith(("/", ".", "~")) or where.count("/") != 1
    allowed = state.config.engine.lora.adapter_dir
    if looks_like_path or any((Path(root).parent / where).is_dir() for root in allowed):
        return AdapterPlace(path=where)
    return AdapterPlace(repo=where)


def _vllm_failure(error: LoraserveError) -> JSONResponse:
    status = error.http_status
    if isinstance(error, NameReserved | NameTaken | AdapterInUse):
        status = 400
    kind = "NotFoundError" if status == 404 else "BadRequestError" if status < 500 else "InternalServerError"
    return _vllm_error(f"{error.message} ({error.code})", kind, status)


def _vllm_error(message: str, kind: str, status: int) -> JSONResponse:
    detail = {"message": message, "type": kind, "param": None, "code": status}
    # Once nested, as vLLM answers now, and once flat, as it did formerly and as KubeAI reads it.
    return JSONResponse({"error": detail, "object": "error", **detail}, status_code=status)


def _sglang(state: ServerState, request: Request, error: str | None) -> JSONResponse:
    served = state.directory.served(_limited_to(request))
    loaded = {each.name: each.source.path or each.source.repo for each in served}
    body: dict[str, Any] = {"success": error is None, "error_message": error, "loaded_adapters": loaded}
    return JSONResponse(body, status_code=200 if error is None else 400)
