"""The adapter endpoints: load, unload, list, describe."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from math import isfinite
from typing import Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from loraserve.engine.messages import AdapterStatus
from loraserve.errors import EngineDead, EngineNotReady, InvalidRequest, LoraserveError
from loraserve.lora.spec import MODULE_PATHS, AdapterSource
from loraserve.server.entries import Entry, LoadOrder
from loraserve.server.fields import check_fields
from loraserve.server.inflight import ServedAdapter
from loraserve.server.ports import AdapterPlace
from loraserve.server.protocol import LoadRequest, PinRequest, PrefetchRequest, RollbackRequest, UnloadRequest
from loraserve.server.responses import (
    AdapterInfo,
    AdapterList,
    CodeAndMessage,
    ProgressInfo,
    SourceInfo,
    UnloadResponse,
    VersionInfo,
    VersionList,
)
from loraserve.server.state import ServerState
from loraserve.server.strict_body import StrictRoute

DEFAULT_DEADLINE_S = 60.0
MAX_DEADLINE_S = 86_400.0
AT_ONCE = 50
"""Adapters that are described without a pause."""


def admin_router(state: ServerState) -> APIRouter:
    """Routes under `/adapters`; authorisation is the app's."""

    async def see_changes() -> None:
        """What other processes of the data folder did belongs to what operators see and change."""
        await state.directory.registry.see_changes(thorough=True)

    router = APIRouter(tags=["adapters"], route_class=StrictRoute, dependencies=[Depends(see_changes)])

    @router.post(
        "/load", response_model=AdapterInfo, responses={202: {"model": AdapterInfo}}, summary="Load an adapter"
    )
    async def load(body: LoadRequest, request: Request) -> JSONResponse:
        """Fetch, check and register an adapter. With `wait: false` the answer is 202; poll `GET /adapters/{name}`."""
        state.require_ready()
        check_fields(body, {})
        order = _order(body, request.scope["tenant"])
        wait = body.wait is None or body.wait
        entry = await state.directory.load(order, wait=wait)
        info = await _describe(state, entry)
        return JSONResponse(info.model_dump(), status_code=200 if wait else 202)

    @router.post("/unload", summary="Unload an adapter")
    async def unload(body: UnloadRequest) -> UnloadResponse:
        """Take the name away at once; answers when its requests have ended and its memory is free."""
        check_fields(body, {})
        deadline_s = DEFAULT_DEADLINE_S if body.deadline_s is None else body.deadline_s
        if not (isfinite(deadline_s) and 0 <= deadline_s <= MAX_DEADLINE_S):
            raise InvalidRequest(f"deadline_s must be from 0 to {MAX_DEADLINE_S:g}", param="deadline_s")
        result = await state.directory.unload(
            body.name, force=bool(body.force), deadline_s=deadline_s, purge=bool(body.purge)
        )
        return UnloadResponse(**result._asdict())

    @router.post("/rollback", summary="Go back to an older version")
    async def rollback(body: RollbackRequest) -> AdapterInfo:
        """One step further back in the name's history each time, or to the version that begins with `to`."""
        state.require_ready()
        check_fields(body, {})
        if body.to is not None and re.fullmatch(r"[0-9a-f]{4,64}", body.to, re.ASCII) is None:
            raise InvalidRequest("to must be 4 to 64 lower-case hex digits of a version", param="to")
        entry = await state.directory.roll_back(body.name, body.to)
        return await _describe(state, entry)

    @router.post("/pin", summary="Pin or unpin an adapter")
    async def pin(body: PinRequest) -> AdapterInfo:
        """A pinned adapter goes to the device by itself and is evicted only as the last resort."""
        state.require_ready()
        check_fields(body, {})
        entry = await state.directory.pin(body.name, body.pinned is None or body.pinned)
        return await _describe(state, entry)

    @router.post("/prefetch", summary="Bring an adapter nearer")
    async def prefetch(body: PrefetchRequest) -> AdapterInfo:
        """Answers when it is on the host; the device follows when there is room that nobody needs."""
        state.require_ready()
        check_fields(body, {})
        entry = await state.directory.prefetch(body.name, body.to or "device")
        return await _describe(state, entry)

    @router.get("", summary="List adapters", response_model=AdapterList)
    async def list_adapters() -> Response:
        """Every registered name, and names whose load is under way or failed within the last ten minutes."""
        statuses = await _statuses(state)
        parts = []
        entries = state.directory.entries()
        for start in range(0, len(entries), AT_ONCE):
            infos = [describe(each, statuses, state.directory.failure_of(each)) for each in entries[start:][:AT_ONCE]]
            parts.append(AdapterList(data=infos).model_dump_json().removeprefix('{"data":[').removesuffix("]}"))
            await asyncio.sleep(0)  # thousands of them must not hold up everybody's tokens
        return Response(f'{{"data":[{",".join(parts)}]}}', media_type="application/json")

    # Hub names have a slash.
    @router.get("/{name:path}/versions", summary="List an adapter's versions")
    async def versions(name: str) -> VersionList:
        """The versions that the name had since it was last unloaded, newest first."""
        found = await state.directory.versions(name)
        return VersionList(
            data=[
                VersionInfo(
                    version=each.version,
                    source=_source_info(each.source),
                    created_at=each.created_at,
                    current=each.current,
                )
                for each in found
            ]
        )

    @router.get("/{name:path}", summary="Describe an adapter")
    async def get_adapter(name: str) -> AdapterInfo:
        """All that is known of one name."""
        return await _describe(state, state.directory.entry(name))

    return router


async def _describe(state: ServerState, entry: Entry) -> AdapterInfo:
    statuses = await _statuses(state)
    return describe(entry, statuses, state.directory.failure_of(entry))


def describe(entry: Entry, statuses: Mapping[str, AdapterStatus], failure: LoraserveError | None) -> AdapterInfo:
    """What clients see of a name. While a replacement is fetched, the rest still tells what is being served."""
    served = entry.served
    status = None if served is None else statuses.get(served.version)
    error = None if failure is None else CodeAndMessage(code=failure.code, message=failure.message)
    if error is None and status is not None and status.error is not None:
        error = CodeAndMessage(code=status.error.code, message=status.error.message)
    progress = None
    if entry.flight is not None:
        progress = ProgressInfo(bytes_done=entry.flight.bytes_done, bytes_total=entry.flight.bytes_total)
    report = None if served is None else served.stored.report
    return AdapterInfo(
        name=entry.name,
        version=None if served is None else served.version,
        state="fetching" if progress is not None else "ready" if error is None else "failed",
        residency=_residency(status),
        pinned=_is_pinned(entry, served),
        source=_source_info(_source(entry)),
        rank=None if report is None else report.rank,
        report=None if report is None else report.plain(),
        targets=None if report is None else [MODULE_PATHS[kind].rpartition(".")[2] for kind in report.targets],
        scaling=None if report is None else list(report.scaling),
        dtype=None if report is None else report.dtype,
        bytes=None if report is None else report.bytes,
        progress=progress,
        leases=0 if served is None else len(served.holds),
        requests=0 if served is None else served.num_requests,
        loaded_at=None if served is None else served.loaded_at,
        last_used_at=None if served is None else served.last_used_at,
        chat_template=None if served is None else "base" if served.source.chat_template is None else "own",
        warnings=[] if report is None else list(report.warnings),
        error=error,
        visibility="public" if served is None else served.visibility,
    )


def _residency(status: AdapterStatus | None) -> Literal["disk", "host", "device"]:
    match None if status is None else status.residency:
        case "device":
            return "device"
        case "host":
            return "host"
        case _:
            return "disk"


def _is_pinned(entry: Entry, served: ServedAdapter | None) -> bool:
    if served is not None:
        return served.pinned
    order = entry.flight.order if entry.flight is not None else None
    return order is not None and order.pin


def _source(entry: Entry) -> AdapterSource:
    if entry.served is not None:
        return entry.served.source
    order = entry.flight.order if entry.flight is not None else entry.failure.order if entry.failure else None
    place = AdapterPlace() if order is None else order.place
    kind = "local" if place.repo is None else "hub"
    return AdapterSource(kind, place.path, place.repo, place.revision, None, place.subfolder)


def _source_info(source: AdapterSource) -> SourceInfo:
    info = SourceInfo(kind=source.kind, revision=source.revision, commit=source.commit, subfolder=source.subfolder)
    info.path, info.repo = source.path, source.repo
    return info


async def _statuses(state: ServerState) -> Mapping[str, AdapterStatus]:
    try:
        return await state.engine.adapter_statuses()
    except (EngineDead, EngineNotReady):
        return {}


def _order(body: LoadRequest, tenant: str) -> LoadOrder:
    if (body.path is None) == (body.repo is None):
        raise InvalidRequest("give exactly one of path and repo", param="path")
    if body.path is not None:
        for name, value in (("revision", body.revision), ("token", body.token)):
            if value is not None:
                raise InvalidRequest(f"{name} belongs to repo, not to path", param=name)
    for name in ("path", "repo", "revision", "subfolder", "token"):
        value = getattr(body, name)
        if value is not None and (not value or "\0" in value):
            raise InvalidRequest(f"{name} must not be empty or have a zero byte", param=name)
    place = AdapterPlace(
        path=body.path, repo=body.repo, revision=body.revision, subfolder=body.subfolder, token=body.token
    )
    visibility = body.visibility
    if visibility is None and body.token is not None:
        visibility = "private"  # what a token opens is not for everybody
    owner = tenant if visibility == "private" else ""
    return LoadOrder(
        name=body.name,
        place=place,
        pin=bool(body.pin),
        replace=bool(body.replace),
        owner=owner,
        visibility=visibility,
    )
