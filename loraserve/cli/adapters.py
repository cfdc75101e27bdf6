"""`loraserve adapters`: a running server's adapters, over its HTTP API, and adapters' files on this machine."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from loraserve.cli.adapters_offline import convert, inspect_path, is_path
from loraserve.cli.adapters_versions import history, pin, prefetch, rollback
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
from loraserve.config import LoraConfig, format_bytes
from loraserve.errors import ConfigError


def adapters_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        no_args_is_help=True,
        help="The adapters of a running server, their versions and places. Adapters on disk: inspect PATH, convert.",
    )
    app.command("list")(list_adapters)
    app.command("load")(load_adapter)
    app.command("unload")(unload_adapter)
    app.command("inspect")(inspect_adapter)
    app.command("history")(history)
    app.command("rollback")(rollback)
    app.command("pin")(pin)
    app.command("prefetch")(prefetch)
    app.command("convert")(convert)
    return app


def list_adapters(server: Server = DEFAULT_SERVER, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """List the adapters of a server."""
    answer = call(server, admin_key, "GET", "/adapters")
    if as_json:
        print_json(answer)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "version", "state", "on", "rank", "size", "requests", "running"):
        table.add_column(column, no_wrap=True)
    for info in answer["data"]:
        size = "" if info["bytes"] is None else format_bytes(info["bytes"])
        table.add_row(
            info["name"],
            (info["version"] or "")[:12],
            info["state"],
            info["residency"],
            str(info["rank"] or ""),
            size,
            str(info["requests"]),
            str(info["leases"]),
        )
    print_table(table if answer["data"] else "no adapters")


def load_adapter(
    name: Annotated[str, typer.Argument(help="Name that requests will use.")],
    path: Annotated[str | None, typer.Argument(help="Folder on the server's machine, under its --adapter-dir.")] = None,
    repo: Annotated[str | None, typer.Option(help="Hub repository instead of a folder.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Folder inside the repository or path.")] = None,
    token: Annotated[str | None, typer.Option(envvar="HF_TOKEN", help="Hub token for a private repository.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it from the device.")] = False,
    public: Annotated[
        bool, typer.Option("--public", help="With --token: let every tenant use it, not only the admin key's.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Take the name over from other content.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return at once; look with inspect.")] = False,
    server: Server = DEFAULT_SERVER,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Load an adapter into a server."""
    if (path is None) == (repo is None):
        raise ConfigError("give either a PATH or --repo")
    body: dict[str, Any] = {"name": name, "subfolder": subfolder, "pin": pin, "replace": replace, "wait": not no_wait}
    if public:
        body["visibility"] = "public"
    if path is not None:
        # The server has its own working folder.
        body["path"] = str(Path(path).expanduser().absolute())
    else:
        body |= {"repo": repo, "revision": revision, "token": token}
    print_info(call(server, admin_key, "POST", "/adapters/load", body), as_json)


def unload_adapter(
    name: Annotated[str, typer.Argument(help="Name to take away.")],
    force: Annotated[bool, typer.Option("--force", help="End its running requests now.")] = False,
    deadline: Annotated[float, typer.Option(help="Seconds after which running requests are ended.")] = 60.0,
    purge: Annotated[bool, typer.Option("--purge", help="Also delete the files that no other name needs.")] = False,
    server: Server = DEFAULT_SERVER,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Unload an adapter; returns when its memory is free."""
    if not isfinite(deadline):
        raise ConfigError(f"--deadline must be a number of seconds, got {deadline}")
    body = {"name": name, "force": force, "deadline_s": deadline}
    if purge:
        body["purge"] = True
    answer = call(server, admin_key, "POST", "/adapters/unload", body)
    if as_json:
        print_json(answer)
    else:
        later = "" if answer["freed"] else "; the engine is stuck, its memory is freed when it goes on"
        typer.echo(f"{name} unloaded: {answer['drained']} requests drained, {answer['aborted']} aborted{later}")


def inspect_adapter(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="Name on the server, or a folder on this machine.")],
    model: Annotated[
        str | None,
        typer.Option(help="With a PATH: base model (folder or Hub id) to check it against; its config is enough."),
    ] = None,
    max_lora_rank: Annotated[
        int, typer.Option(help="With a PATH: largest rank that is accepted.", min=1)
    ] = LoraConfig().max_lora_rank,
    server: Server = DEFAULT_SERVER,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Show everything a server knows of an adapter, or what a folder on this machine holds.

    The argument is taken as a PATH if it is an existing folder, begins with '/', './', '../' or '~/', or has more
    than one '/'; then no server is asked, and everything that a load checks is checked here. Otherwise it is a NAME (or
    ORG/NAME) on the server. Exit code 2: the folder's adapter is refused.
    """
    if is_path(name):
        inspect_path(name, model, max_lora_rank, as_json)
        return
    if model is not None:
        raise ConfigError(f"--model is for a PATH, and {name!r} is not a folder here")
    print_info(call(server, admin_key, "GET", f"/adapters/{quote(name)}"), as_json)
