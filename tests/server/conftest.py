"""Fixtures of the server tests; `server_parts` makes them."""

from __future__ import annotations

from server_parts import anyio_backend, app, client, engine, library, live, make_server, server, tokenizer

__all__ = ["anyio_backend", "app", "client", "engine", "library", "live", "make_server", "server", "tokenizer"]
