"""Calls to a running server, and how its answers are shown."""

from __future__ import annotations

import json
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loraserve.config import format_bytes
from loraserve.errors import ConfigError, LoraserveError

DEFAULT_SERVER = "http://127.0.0.1:8000"
# Loading and draining take as long as they take; only reaching the server must be quick.
TIMEOUT = httpx.Timeout(None, connect=10.0)
PIPE_WIDTH = 1000

Server = Annotated[str, typer.Option("--server", envvar="LORASERVE_SERVER", help="Address of the server.")]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", envvar="LORASERVE_ADMIN_KEY", help="The server's admin key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class ServerRefused(LoraserveError):
    """The server answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ServerUnreachable(LoraserveError):
    """Nothing answers at the server's address."""

    code = "server_unreachable"


def call(server: str, admin_key: str | None, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """One request to the server. Raises `ServerUnreachable`, `ServerRefused`."""
    # Bytes, because httpx would refuse a key beyond ASCII, which a server accepts.
    headers = {b"authorization": f"Bearer {admin_key}".encode()} if admin_key else {}
    url = server.rstrip("/") + path
    try:
        answer = httpx.request(method, url, json=body, headers=headers, timeout=TIMEOUT)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"{server!r} is not a server's address: {error}") from error
    except httpx.HTTPError as error:
        raise ServerUnreachable(f"the server at {server} cannot be reached: {error}") from error
    try:
        content = answer.json()
    except ValueError as error:
        raise ServerRefused("not_loraserve", f"{server} answered {answer.status_code} without JSON") from error
    if answer.is_success:
        return content
    problem = content.get("error") if isinstance(content, dict) else None
    if not isinstance(problem, dict):
        raise ServerRefused("not_loraserve", f"{server} answered {answer.status_code}")
    raise ServerRefused(str(problem.get("code")), str(problem.get("message")))


def print_info(info: dict[str, Any], as_json: bool) -> None:
    """An adapter's info as a table of two columns, or as JSON."""
    if as_json:
        print_json(info)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in info.items():
        if value is None or value == []:
            continue
        shown = value
        if key == "bytes":
            shown = f"{value} ({format_bytes(value)})"
        elif isinstance(value, dict):
            shown = ", ".join(f"{inner} {text}" for inner, text in value.items() if text is not None)
        elif isinstance(value, list):
            shown = ", ".join(str(item) for item in value)
        # Not a plain str: square brackets in a path would be read as markup.
        table.add_row(key, Text(str(shown)))
    print_table(table)


def print_table(table: Table | str) -> None:
    """A table as wide as the terminal, or as it needs in a pipe."""
    # Whoever reads it through a pipe wants whole names, not what fits a terminal of 80 columns.
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(table)


def print_json(answer: Any) -> None:
    """An answer as it came."""
    typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
