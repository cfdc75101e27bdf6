"""JSON bodies as routes read them: a key that appears twice is refused, because one of its values would be ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from loraserve.lora.strict_json import show


class StrictRoute(APIRoute):
    """A route whose body is parsed strictly; what is wrong with it becomes a 400 that says so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, over a request that parses its own body."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body. Raises `json.JSONDecodeError`, or `HTTPException` (400) with the reason."""
        try:
            return json.loads(await self.body(), object_pairs_hook=_unique)
        except UnicodeDecodeError as error:
            raise HTTPException(400, "the body is not UTF-8 text") from error
        except RecursionError as error:
            raise HTTPException(400, "the body is nested too deeply") from error
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # Python's limit on the digits of a whole number
            raise HTTPException(400, "the body has a number with too many digits") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise HTTPException(400, f"the body has the key {show(key)} twice")
            seen.add(key)
    return found
