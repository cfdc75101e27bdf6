"""JSON from strangers: no duplicate keys, no NaN, bounded depth and numbers, one kind of error."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from loraserve.errors import AdapterFault, AdapterRefused

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_MAX_DIGITS = 400  # int() of a longer text is quadratic; no number of an adapter needs it


def show(value: object, limit: int = 96) -> str:
    """A foreign name or value as one short printable line for a message."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return ascii(text) if not text.isprintable() else repr(text)


def parse_json(data: bytes, *, what: str, fault: AdapterFault, max_depth: int = 16, bom: bool = False) -> Json:
    """Parse strict UTF-8 JSON. `what` names the document in messages; every failure is `AdapterRefused(fault)`."""

    def fail(problem: str) -> NoReturn:
        raise AdapterRefused(fault, f"{what} is not valid: {problem}")

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    fail(f"key {show(key)} appears twice")
                seen.add(key)
        return found

    def constant(text: str) -> NoReturn:
        fail(f"{text} is not JSON")

    def number_int(text: str) -> int:
        return int(text) if len(text) <= _MAX_DIGITS else fail("a number has too many digits")

    def number_float(text: str) -> float:
        value = float(text) if len(text) <= _MAX_DIGITS else fail("a number has too many digits")
        return value if math.isfinite(value) else fail("a number is too large for a double")

    try:
        text = data.decode("utf-8-sig" if bom else "utf-8")
        parsed: Json = json.loads(
            text, object_pairs_hook=unique, parse_constant=constant, parse_int=number_int, parse_float=number_float
        )
    except UnicodeDecodeError:
        fail("not UTF-8 text")
    except json.JSONDecodeError as error:
        fail(f"{error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        fail("nested too deeply")
    if _deeper_than(parsed, max_depth):
        fail(f"nested deeper than {max_depth} levels")
    return parsed


def _deeper_than(parsed: Json, limit: int) -> bool:
    level: list[Json] = [parsed]
    for _ in range(limit + 1):
        inner: list[Json] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        if not inner:
            return False
        level = inner
    return True
