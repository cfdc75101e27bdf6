"""Names of adapters: which are legal, and how a name with a pinned version is written."""

from __future__ import annotations

import re
from typing import NamedTuple

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.strict_json import show

MIN_PREFIX = 4  # hex digits of a version that may stand for it

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(rf"{_PART}(?:/{_PART})?", re.ASCII)
_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_PREFIX},64}}", re.ASCII)


class AdapterName(NamedTuple):
    """A name, and the prefix of the version that it is pinned to ("" for the current one)."""

    name: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.name}@{self.prefix}" if self.prefix else self.name


def check_name(name: str) -> str:
    """`name` or `org/name`, unchanged. Raises `AdapterRefused(invalid_name)`."""
    if _NAME.fullmatch(name) is None:
        raise AdapterRefused(
            AdapterFault.INVALID_NAME,
            f"{show(name)} is not an adapter name: up to 128 letters, digits, '.', '_' or '-', the first a letter or "
            "digit; or org/name of such parts",
            param="name",
        )
    return name


def parse_name(text: str) -> AdapterName:
    """`name`, `org/name` or either with `@` and the first hex digits of a version. Raises as `check_name`."""
    name, at, prefix = text.partition("@")
    check_name(name)
    if at and _PREFIX.fullmatch(prefix) is None:
        raise AdapterRefused(
            AdapterFault.INVALID_NAME,
            f"{show(text)}: after @ come {MIN_PREFIX} to 64 lower-case hex digits of a version",
            param="name",
        )
    return AdapterName(name, prefix)


def bare_model_name(name: str) -> str:
    """The last part of a model's name without what marks a quantised copy, for comparison."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
    for suffix in ("-bnb-4bit", "-unsloth"):
        last = last.removesuffix(suffix)
    return last
