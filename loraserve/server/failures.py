"""Every failure leaves the server in OpenAI's error shape; this file is the one boundary."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from loraserve.errors import AuthenticationFailed, InvalidRequest, LoraserveError, Overloaded
from loraserve.server.responses import ErrorDetail, ErrorResponse

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 2000


def error_body(error: LoraserveError) -> ErrorResponse:
    """The body of an error. Text that came from a client is made fit for UTF-8."""
    message = _clean(error.message)[:_MAX_MESSAGE]
    param = None if error.param is None else _clean(error.param)[:200]
    detail = ErrorDetail(message=message, type=error.type, code=error.code, param=param)
    return ErrorResponse(error=detail)


def error_response(error: LoraserveError, more_headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The whole answer for an error."""
    headers = dict(more_headers or {})
    if isinstance(error, AuthenticationFailed):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Overloaded):
        headers["retry-after"] = "1"
    return JSONResponse(error_body(error).model_dump(), status_code=error.http_status, headers=headers)


def install_handlers(app: FastAPI) -> None:
    """Answer every exception of the app in OpenAI's shape."""

    @app.exception_handler(LoraserveError)
    async def known(_request: Request, error: LoraserveError) -> JSONResponse:
        if error.http_status >= 500:
            logger.warning("%s: %s", error.code, error.message)
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(_validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return _http_error(request, error)


def _validation_error(problems: Sequence[Any]) -> InvalidRequest:
    problem = problems[0]
    location = [part for part in problem["loc"] if part != "body"]
    if problem["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {problem['ctx']['error']}")
    if not location:
        return InvalidRequest("the body must be a JSON object, sent with Content-Type: application/json")
    # A union's member types are part of pydantic's path, not of the client's.
    path = str(location[0])
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif problem["type"] in ("missing", "extra_forbidden") or not _is_type_name(str(part)):
            path += f".{part}"
    message = "is missing" if problem["type"] == "missing" else str(problem["msg"]).removeprefix("Input ")
    return InvalidRequest(f"{path}: {message}", param=path)


def _is_type_name(part: str) -> bool:
    return part in ("str", "int", "float", "bool", "dict", "list") or "[" in part


def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    codes = {
        400: "invalid_request",
        404: "not_found",
        405: "method_not_allowed",
        413: "payload_too_large",
        415: "unsupported_media_type",
    }
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    if error.status_code >= 500:
        kind = "server_error"
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
    code = codes.get(error.status_code, "http_error")
    detail = ErrorDetail(message=_clean(message)[:_MAX_MESSAGE], type=kind, code=code)
    body = ErrorResponse(error=detail).model_dump()
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def internal_error_bytes() -> bytes:
    """Body of an answer to a failure that nobody foresaw."""
    return json.dumps(error_body(LoraserveError("internal error")).model_dump()).encode()
