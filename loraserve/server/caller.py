"""Who sent a request, as far as adapters are concerned."""

from __future__ import annotations

from typing import NamedTuple

from starlette.types import Scope

from loraserve.errors import InvalidRequest

HUB_TOKEN_HEADER = b"x-hub-token"
MAX_HUB_TOKEN = 1024


class Caller(NamedTuple):
    """A tenant, and the Hub token that it sent along for private repositories."""

    tenant: str = ""
    hub_token: str | None = None

    def __repr__(self) -> str:
        return f"Caller({self.tenant!r})"  # a token must not reach a log


def caller_of(scope: Scope) -> Caller:
    """The caller of an authorised request. Raises `InvalidRequest` for a token that cannot be one."""
    sent = next((value for name, value in scope["headers"] if name == HUB_TOKEN_HEADER), None)
    if sent is None:
        return Caller(scope["tenant"])
    token = sent.decode("latin-1").strip()
    if not token or len(token) > MAX_HUB_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidRequest("X-Hub-Token is no token of the Hub", param="X-Hub-Token")
    return Caller(scope["tenant"], token)
