"""JSON bodies as routes read them: bounded work, away from the event loop, and no key twice.

A key that appears twice is refused, because one of its values would be ignored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from loraserve.lora.strict_json import show

MAX_VALUES = 1 << 19
"""Most values in one body: each costs time and tens of bytes of memory, however few bytes of the body it has."""

_SMALL = 1 << 16  # bytes that are parsed in less time than a step takes, whatever they are
_BACKSLASH, _QUOTE = b"\\", b'"'


class StrictRoute(APIRoute):
    """A route whose body is parsed strictly; what is wrong with it becomes a 400 that says so, or a 413."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, over a request that parses its own body."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body. Raises `json.JSONDecodeError`, or `HTTPException` (400, 413) with the reason."""
        body = await self.body()
        return parse_body(body) if len(body) <= _SMALL else await asyncio.to_thread(parse_body, body)


def parse_body(body: bytes) -> Any:
    """JSON → Python. Raises `json.JSONDecodeError`, or `HTTPException` (400, 413) with the reason."""
    # FastAPI answers "error parsing the body" to every exception here that is not its own.
    if num_values(body, MAX_VALUES) > MAX_VALUES:
        raise HTTPException(413, f"the body has more than {MAX_VALUES} values")
    try:
        return json.loads(body, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise HTTPException(400, "the body is not UTF-8 text") from error
    except RecursionError as error:
        raise HTTPException(400, "the body is nested too deeply") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python's limit on the digits of a whole number
        raise HTTPException(400, "the body has a number with too many digits") from error


def num_values(body: bytes, enough: int) -> int:
    """An upper bound on the values of a JSON text; the number itself is only worked out where it is over `enough`."""
    most = 1 + sum(map(body.count, (b",", b"[", b"{")))
    if most <= enough:
        return most
    # Signs inside strings do not count. A string begins and ends with a quote that no backslash is before.
    plain = np.frombuffer(body.replace(_BACKSLASH * 2, b"").replace(_BACKSLASH + _QUOTE, b""), np.uint8)
    inside = np.bitwise_xor.accumulate(plain == _QUOTE[0])
    return 1 + sum(int(np.count_nonzero((plain == sign) & ~inside)) for sign in b",[{")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise HTTPException(400, f"the body has the key {show(key)} twice")
            seen.add(key)
    return found
