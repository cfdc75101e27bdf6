"""`loraserve pull`: an adapter from the Hub into a data folder, or into a running server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from loraserve.cli.server_calls import AdminKey, AsJson, ServerRefused, call, print_json
from loraserve.config import ServerConfig, format_bytes
from loraserve.errors import AdapterError, ConfigError
from loraserve.lora.names import check_name

POLL_S = 0.2
# Ranks are checked by the server that serves it; this only keeps out what no server would take.
MAX_RANK = 65_536

Show = Callable[[int, int, str], None]
"""Receives (bytes done, bytes in all, what is under way)."""


def pull(
    repo: Annotated[str, typer.Argument(help="Repository on the Hub, as ORG/NAME.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Folder inside the repository.")] = None,
    name: Annotated[str | None, typer.Option(help="Name that requests will use (default: REPO).")] = None,
    token: Annotated[str | None, typer.Option(help="Hub token (default: HF_TOKEN, or the machine's login).")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take the name over from other content.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Data folder, as for serve (default: the user's).")] = None,
    server: Annotated[str | None, typer.Option(help="Let this running server pull and register it instead.")] = None,
    admin_key: AdminKey = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --server and --token: let every tenant use it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pull an adapter from the Hub: only the files it needs, checked, kept by content, registered under a name.

    A server on the same data folder serves it from the next request that names it. A pull that was interrupted goes on
    where it stopped. HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE are honoured.
    """
    name = repo if name is None else name
    check_name(name)
    if server is not None:
        if data_dir is not None:
            raise ConfigError("--data-dir is for a pull without --server; a server has its own data folder")
        body: dict[str, Any] = {"name": name, "repo": repo, "revision": revision, "subfolder": subfolder}
        body |= {"token": token, "replace": replace, "wait": False}
        if public:
            body["visibility"] = "public"
        with _progress(repo) as show:
            result = _through_server(server, admin_key, body, show)
    else:
        with _progress(repo) as show:
            result = _into_folder(name, repo, revision, subfolder, token, replace, data_dir, show)
    if as_json:
        print_json(result)
        return
    commit = (result["source"]["commit"] or "")[:12]
    size = "" if result["bytes"] is None else f", {format_bytes(result['bytes'])}"
    typer.echo(f"{name}: version {result['version'][:12]} from {repo}@{commit}{size}")


def _into_folder(
    name: str,
    repo: str,
    revision: str | None,
    subfolder: str | None,
    token: str | None,
    replace: bool,
    folder: Path | None,
    show: Show,
) -> dict[str, Any]:
    # Imported late: `--help` must not wait for the Hub's client.
    from dataclasses import asdict

    from loraserve.lora.hub import HubRepo, fetch_hub
    from loraserve.lora.store import AdapterStore
    from loraserve.server.service import data_dir

    with AdapterStore(data_dir(ServerConfig(data_dir=folder))) as store:
        under_way, now = "", (0, 0)

        def fetching(done: int, total: int) -> None:
            nonlocal now
            now = (done, total)
            show(done, total, under_way)

        def next_file(path: str, number: int, count: int) -> None:
            nonlocal under_way
            under_way = f"file {number}/{count} {path}"
            show(*now, under_way)  # its first bytes may take a while

        place = HubRepo(repo, revision, subfolder)
        fetched = fetch_hub(place, token=token, progress=fetching, on_file=next_file)
        record, source = store.keep(fetched, None, MAX_RANK, lambda done, total: show(done, total, "checking"))
        pinned = any(alias.name == name and alias.pinned for alias in store.aliases())
        try:
            store.set_alias(name, record.version, source=source, pinned=pinned, replace=replace)
        except AdapterError:
            store.delete_unneeded([record.version])
            raise
    return {"name": name, "version": record.version, "source": asdict(source), "bytes": record.report.bytes}


def _through_server(server: str, admin_key: str | None, body: dict[str, Any], show: Show) -> dict[str, Any]:
    info: dict[str, Any] = call(server, admin_key, "POST", "/adapters/load", body)
    while info["state"] == "fetching":
        progress = info["progress"] or {"bytes_done": 0, "bytes_total": 0}
        show(progress["bytes_done"], progress["bytes_total"], "the server pulls")
        time.sleep(POLL_S)
        info = call(server, admin_key, "GET", f"/adapters/{quote(body['name'])}")
    if info["error"] is not None:
        raise ServerRefused(info["error"]["code"], info["error"]["message"])
    return info


@contextmanager
def _progress(repo: str) -> Iterator[Show]:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # Into a pipe, bars are noise.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(repo, total=None)

        def show(done: int, total: int, what: str) -> None:
            bars.update(bar, completed=done, total=total or None, description=f"{repo} {what}".strip())

        yield show
