"""`loraserve adapters inspect PATH` and `convert`: an adapter's files, looked at here, without a server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraserve.cli.refusals import refusals
from loraserve.config import LoraConfig, format_bytes, parse_bytes
from loraserve.inspection import Inspection, inspect_folder, open_base
from loraserve.lora.convert import DEFAULT_MAX_BYTES, DEFAULT_TIMEOUT_S, convert_adapter
from loraserve.lora.spec import KindReport
from loraserve.lora.strict_json import show

_SHOWN_TOKENS = 8


def is_path(text: str) -> bool:
    """Whether the argument of `inspect` means a folder: it is one, or has a separator that no lone name has.

    `org/name` is also a server's name, so a single slash without a folder behind it stays a name.
    """
    if Path(text).is_dir():
        return True
    separators = tuple(separator for separator in (os.sep, os.altsep) if separator)
    beginnings = (*separators, *(dots + separator for dots in (".", "..", "~") for separator in separators))
    return (
        text in (".", "..", "~")
        or text.startswith(beginnings)
        or sum(text.count(separator) for separator in separators) > 1
    )


def inspect_path(path: str, model: str | None, max_lora_rank: int, as_json: bool) -> None:
    """Print the load report of the folder at `path`, or its refusal."""
    with refusals():
        base = None if model is None else open_base(model)
        folder = Path(path).expanduser()
        found = inspect_folder(folder, base=base, max_rank=max_lora_rank, page_rows=LoraConfig().lora_page_rows)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        _print(found)


def convert(
    path: Annotated[Path, typer.Argument(help="Folder with adapter_model.bin and adapter_config.json.")],
    out: Annotated[Path, typer.Argument(help="Folder to make; must not exist yet.")],
    max_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest pickle that is opened.")] = format_bytes(
        DEFAULT_MAX_BYTES
    ),
    timeout: Annotated[float, typer.Option(help="Seconds after which it is given up.")] = DEFAULT_TIMEOUT_S,
) -> None:
    """Turn an adapter saved as a pickle (adapter_model.bin) into safetensors, without running what is in it.

    The pickle is opened in a process of its own with limits on memory and time, by a reader that takes nothing but
    tensors. What is not a plain table of tensors is refused. OUT is complete and checked, or not there at all.
    """
    with refusals():
        done = convert_adapter(path.expanduser(), out.expanduser(), max_bytes=parse_bytes(max_size), timeout_s=timeout)
    typer.echo(f"{out}: {done.num_tensors} tensors, {format_bytes(done.num_bytes)}, version {done.version[:12]}")
    for warning in done.warnings:
        typer.echo(f"warning: {warning}")


def _print(found: Inspection) -> None:
    report = found.report
    head = Table(box=None, show_header=False, pad_edge=False)
    head.add_row("version", report.version)
    head.add_row("files", ", ".join(found.files))
    head.add_row("base", report.base_model_name or "not named")
    head.add_row("dtype", report.dtype)
    head.add_row("parameters", f"{report.parameters:,}")
    head.add_row("size", format_bytes(report.bytes))
    if found.device is None:
        head.add_row("on device", "unknown without --model")
    else:
        device = found.device
        head.add_row("on device", f"{format_bytes(device.bytes)} in {device.dtype} on {device.model}")
    head.add_row("features", ", ".join(report.features) or "plain LoRA")
    if report.replaced:
        head.add_row("own rows", ", ".join(report.replaced))
    if report.new_tokens:
        names = escape(", ".join(show(token.content) for token in report.added_tokens[:_SHOWN_TOKENS]))
        head.add_row("new tokens", f"{report.new_tokens}: {names}" if names else str(report.new_tokens))
    for warning in report.warnings:
        head.add_row("warning", warning)
    modules = Table(box=None, pad_edge=False)
    for column in ("kind", "modules", "layers", "rank", "scaling"):
        modules.add_column(column)
    for kind in report.kinds:
        modules.add_row(*_kind_row(kind))
    console = Console()
    console.print(head)
    console.print()
    console.print(modules)


def _kind_row(kind: KindReport) -> tuple[str, ...]:
    ranks = ", ".join(str(rank) for rank in kind.ranks)
    scalings = ", ".join(f"{scaling:g}" for scaling in kind.scalings)
    return kind.kind, str(kind.num_modules), kind.layers, ranks, scalings
