"""`loraserve serve`: its flags are the fields of the config classes."""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin

import typer

from loraserve.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    ServeConfig,
    ServerConfig,
    parse_bytes,
)
from loraserve.errors import ConfigError
from loraserve.logs import configure_logging

PANELS: dict[type[Any], str] = {
    ModelConfig: "Model",
    LoraConfig: "Adapters",
    CacheConfig: "KV cache",
    SchedulerConfig: "Scheduling",
    ServerConfig: "Server",
}
"""Config classes and the part of `--help` that their flags are in."""


_ITEM_NAMES = {
    "adapter_dir": "DIR",
    "adapter": "NAME=PATH",
    "adapter_source": "SOURCE",
    "adapter_url": "URL",
    "api_key": "KEY",
}


def add_serve(app: typer.Typer, run: Callable[[ServeConfig], int] | None = None) -> None:
    """Add the command. `run` serves a config; without it, a real server does."""

    def serve(**values: Any) -> None:
        config = make_config(values)
        configure_logging(config.server.log_level)
        # The engine process configures its own logging and asks here.
        os.environ["LORASERVE_LOG_LEVEL"] = config.server.log_level
        if run is not None:
            raise typer.Exit(run(config))
        # Imported late: `--help` must not wait for a web framework.
        from loraserve.server.service import run_server

        raise typer.Exit(run_server(config, _say))

    parameters = [_parameter(cls, field) for cls in PANELS for field in fields(cls)]
    # typer reads both.
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command("serve", help="Serve a model and its adapters over HTTP.")(serve)


def make_config(values: Mapping[str, Any]) -> ServeConfig:
    """Flag values → config; a missing one takes its field's default. Raises `ConfigError`."""

    def build(cls: type[Any]) -> Any:
        given = {}
        for field in fields(cls):
            value = values.get(field.name)
            if value is None:
                continue
            given[field.name] = tuple(value) if isinstance(value, list) else value
        return cls(**given)

    engine = EngineConfig(
        model=build(ModelConfig), cache=build(CacheConfig), lora=build(LoraConfig), scheduler=build(SchedulerConfig)
    )
    return ServeConfig(engine=engine, server=build(ServerConfig))


def flag_of(name: str) -> str:
    """Field name → flag."""
    return "--" + name.replace("_", "-")


def _parameter(cls: type[Any], field: Field[Any]) -> inspect.Parameter:
    hint = typing.get_type_hints(cls)[field.name]
    kind = next((arg for arg in get_args(hint) if arg is not type(None)), hint) if _is_optional(hint) else hint
    default = field.default
    flag = flag_of(field.name)
    names = [flag]
    extra: dict[str, Any] = {}
    annotation: Any = kind
    if field.metadata["size"]:
        annotation, extra = str, {"callback": _size, "metavar": "SIZE"}
        default = None if default is None else str(default)
    elif get_origin(kind) is Literal:
        annotation, extra = str, {"callback": _one_of(get_args(kind)), "metavar": "[" + "|".join(get_args(kind)) + "]"}
    elif get_origin(kind) is tuple:
        annotation, default = list[get_args(kind)[0]], None  # type: ignore[misc]
        extra = {"metavar": _ITEM_NAMES[field.name]}
    elif kind is bool:
        names = [f"{flag}/--no-{flag[2:]}"]
    option = typer.Option(
        default,
        *names,
        help=field.metadata["help"],
        rich_help_panel=PANELS[cls],
        envvar=f"LORASERVE_{field.name.upper()}",
        show_envvar=False,
        show_default=default is not None,
        **extra,
    )
    if default is None:
        annotation = annotation | None
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _is_optional(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _size(value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise typer.BadParameter(error.message) from error


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return check


def _say(line: str) -> None:
    print(line, flush=True)
