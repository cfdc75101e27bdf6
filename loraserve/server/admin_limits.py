"""`/admin/limits`: how much memory adapters may take, changed while the server runs."""

from __future__ import annotations

from fastapi import APIRouter

from loraserve.config import format_bytes, parse_bytes
from loraserve.errors import ConfigError, InvalidRequest
from loraserve.server.fields import check_fields
from loraserve.server.protocol import LimitsRequest
from loraserve.server.responses import LimitsResponse, MemoryLimit
from loraserve.server.state import ServerState
from loraserve.server.strict_body import StrictRoute


def limits_router(state: ServerState) -> APIRouter:
    """Routes under `/admin`; authorisation is the app's."""
    router = APIRouter(tags=["adapters"], route_class=StrictRoute)

    @router.get("/limits", summary="Memory limits of adapters")
    async def get_limits() -> LimitsResponse:
        """Limits and what is used of them; the engine reports twice a second."""
        state.require_ready()
        return _limits(state, None, None)

    @router.post("/limits", summary="Change the memory limits of adapters")
    async def set_limits(body: LimitsRequest) -> LimitsResponse:
        """Takes effect at once; what is over a smaller limit leaves as soon as no request needs it."""
        state.require_ready()
        check_fields(body, {})
        device, host = _size(body.lora_memory, "lora_memory"), _size(body.host_lora_memory, "host_lora_memory")
        pool = state.engine.info.lora_bytes
        if device is not None and device > pool:
            raise InvalidRequest(
                f"lora_memory can be at most {pool} bytes ({format_bytes(pool)}), the size that the pool was made with",
                param="lora_memory",
            )
        if device is not None or host is not None:
            await state.engine.set_limits(device, host)
        return _limits(state, device, host)

    return router


def _limits(state: ServerState, device: int | None, host: int | None) -> LimitsResponse:
    stats, info = state.engine.stats, state.engine.info
    return LimitsResponse(
        lora_memory=MemoryLimit(
            limit=device or stats.lora_bytes_total or info.lora_bytes,
            used=stats.lora_bytes_used,
            capacity=info.lora_bytes,
        ),
        host_lora_memory=MemoryLimit(
            limit=host or stats.host_lora_bytes_total or info.host_lora_bytes,
            used=stats.host_lora_bytes_used,
            capacity=None,
        ),
    )


def _size(value: int | str | None, name: str) -> int | None:
    if value is None:
        return None
    try:
        size = parse_bytes(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise InvalidRequest(f"{name}: {error.message}", param=name) from error
    if isinstance(size, bool) or not 1 <= size <= 2**60:
        raise InvalidRequest(f"{name} must be a number of bytes or a size like 512MiB", param=name)
    return size
