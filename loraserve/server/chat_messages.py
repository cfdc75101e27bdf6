"""Chat messages: checked, and flattened to what chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraserve.errors import InvalidRequest, UnsupportedField
from loraserve.server.fields import check_text

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MAX_MESSAGES = 4096
_NEUTRAL_FIELDS: dict[str, tuple[object, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}


def check_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Messages as role, content (and name). Raises `InvalidRequest` naming the field."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must have 1 to {MAX_MESSAGES} entries, got {len(messages)}", param="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: dict[str, Any], path: str) -> dict[str, str]:
    role = message.get("role")
    if role in ("tool", "function"):
        raise UnsupportedField(f"{path}.role: tools are not supported", param=f"{path}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(ROLES)}", param=f"{path}.role")
    for name, value in message.items():
        if name in ("role", "content", "name") or value is None:
            continue
        if value not in _NEUTRAL_FIELDS.get(name, ()):
            raise UnsupportedField(f"{path}.{name} is not supported", param=f"{path}.{name}")
    result = {"role": ROLES[role], "content": _content(message.get("content"), f"{path}.content")}
    if message.get("name") is not None:
        result["name"] = _text(message["name"], f"{path}.name")
    return result


def _content(value: object, path: str) -> str:
    if isinstance(value, list):
        return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(value))
    return _text(value, path)


def _part(part: object, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{path} must be an object with a type", param=path)
    if kind != "text":
        raise UnsupportedField(f"{path}: content of type {kind!r:.40} is not supported", param=path)
    for name, value in part.items():
        if name not in ("type", "text") and value is not None:
            raise UnsupportedField(f"unknown field {path}.{name}", param=f"{path}.{name}")
    return _text(part.get("text"), f"{path}.text")


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be a text", param=path)
    check_text(value, path)
    return value
