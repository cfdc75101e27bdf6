"""The JSON types that fields of an adapter's config may have, checked strictly: `true` is no number, `"8"` no int."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

from loraserve.lora.strict_json import Json

MAX_INT = 2**31 - 1


class FieldType(NamedTuple):
    """A test, and how the type is called in a message."""

    accepts: Callable[[Json], bool]
    name: str


def is_bool(value: Json) -> TypeGuard[bool]:
    """true or false."""
    return isinstance(value, bool)


def is_int(value: Json) -> TypeGuard[int]:
    """A JSON number without fraction that fits 32 bits."""
    return type(value) is int and -MAX_INT <= value <= MAX_INT


def is_number(value: Json) -> TypeGuard[int | float]:
    """A JSON number that a double holds; not a boolean."""
    return type(value) is float or (type(value) is int and abs(value) < 10**300)


def is_text(value: Json) -> TypeGuard[str]:
    """A JSON string."""
    return isinstance(value, str)


def is_texts(value: Json) -> TypeGuard[list[str]]:
    """A list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_ints(value: Json) -> TypeGuard[list[int]]:
    """A list of ints."""
    return isinstance(value, list) and all(is_int(item) for item in value)


def is_object(value: Json) -> TypeGuard[dict[str, Json]]:
    """A JSON object."""
    return isinstance(value, dict)


def is_empty(value: Json) -> bool:
    """null, false, or an empty string, list or object: what a field says when it asks for nothing."""
    return value is None or value is False or value in ("", [], {})


def is_rank(value: Json) -> TypeGuard[int]:
    """An int of at least 1."""
    return is_int(value) and value >= 1


ANY = FieldType(lambda _: True, "anything")
BOOL = FieldType(is_bool, "true or false")
INT = FieldType(is_int, "an int")
RANK = FieldType(is_rank, "an int of at least 1")
NUMBER = FieldType(is_number, "a finite number")
TEXT = FieldType(is_text, "a string")
OBJECT = FieldType(is_object, "an object")
LIST = FieldType(lambda value: isinstance(value, list), "a list")
TEXTS = FieldType(is_texts, "a list of strings")
INTS = FieldType(is_ints, "a list of ints")
TEXT_OR_TEXTS = FieldType(lambda value: is_text(value) or is_texts(value), "a string or a list of strings")
INT_OR_INTS = FieldType(lambda value: is_int(value) or is_ints(value), "an int or a list of ints")
BOOL_OR_TEXT = FieldType(lambda value: is_bool(value) or is_text(value), "true, false or a string")
BOOL_OR_OBJECT = FieldType(lambda value: is_bool(value) or is_object(value), "an object")
TOKEN_ROWS = FieldType(
    lambda value: is_ints(value) or (is_object(value) and all(is_ints(rows) for rows in value.values())),
    "a list of ints, or an object of such lists",
)
RANKS = FieldType(
    lambda value: is_object(value) and all(is_rank(rank) for rank in value.values()),
    "an object of ints of at least 1",
)
NUMBERS = FieldType(
    lambda value: is_object(value) and all(is_number(number) for number in value.values()),
    "an object of finite numbers",
)


def type_name(value: Json) -> str:
    """How the type of a value is called in JSON."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]
