"""`loraserve adapters history|rollback|pin|prefetch`: the versions and the places of a running server's adapters."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from loraserve.cli.server_calls import (
    DEFAULT_SERVER,
    AdminKey,
    AsJson,
    Server,
    call,
    print_info,
    print_json,
    print_table,
)

Name = Annotated[str, typer.Argument(help="Name on the server.")]


def history(name: Name, server: Server = DEFAULT_SERVER, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """List the versions of an adapter, newest first; * marks the one that is served."""
    answer = call(server, admin_key, "GET", f"/adapters/{quote(name)}/versions")
    if as_json:
        print_json(answer)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("", "version", "since", "source"):
        table.add_column(column, no_wrap=True)
    for entry in answer["data"]:
        since = datetime.fromtimestamp(entry["created_at"]).strftime("%Y-%m-%d %H:%M:%S")
        mark = "*" if entry["current"] else ""
        # Not a plain str: square brackets in a path would be read as markup.
        table.add_row(mark, entry["version"][:12], since, Text(_where(entry["source"])))
    print_table(table)


def rollback(
    name: Name,
    to: Annotated[str | None, typer.Option(help="Beginning of the version's hash. Default: one step back.")] = None,
    server: Server = DEFAULT_SERVER,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Serve an older version of an adapter; running requests finish on theirs. Each call goes one step further back."""
    info = call(server, admin_key, "POST", "/adapters/rollback", {"name": name, "to": to})
    print_info(info, as_json)


def pin(
    name: Name,
    off: Annotated[bool, typer.Option("--off", help="Take the pin away.")] = False,
    server: Server = DEFAULT_SERVER,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Keep an adapter on the device."""
    print_info(call(server, admin_key, "POST", "/adapters/pin", {"name": name, "pinned": not off}), as_json)


def prefetch(
    name: Name,
    to: Annotated[str, typer.Option(help="host or device.")] = "device",
    server: Server = DEFAULT_SERVER,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Bring an adapter nearer before it is asked for."""
    print_info(call(server, admin_key, "POST", "/adapters/prefetch", {"name": name, "to": to}), as_json)


def _where(source: dict[str, Any]) -> str:
    where = str(source.get("repo") or source.get("path") or source["kind"])
    revision = source.get("commit") or source.get("revision")
    inner = source.get("subfolder")
    return where + (f"/{inner}" if inner else "") + (f"@{revision[:12]}" if revision else "")
