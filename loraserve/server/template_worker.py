"""The process that renders adapters' chat templates: strangers' programs, run by transformers' sandboxed Jinja.

The sandbox keeps them from Python; this process keeps them from the server. It has little memory to take and nothing to
write to, and whoever asked ends it when it takes too long. One JSON object a line comes in, one goes out.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

MAX_TEXT = 4 << 20
"""Characters of a rendered prompt."""

LAST_RESORT_S = 30.0
_MEMORY = 512 << 20  # bytes beyond what the process has when it begins


def answer(request: dict[str, Any], render: Any) -> dict[str, str]:
    """One chat → `text`; or `refused`, in the template's own words; or `failed`, why it is broken."""
    from jinja2.exceptions import TemplateError

    try:
        texts, _ = render(
            conversations=[request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=request["add_generation_prompt"],
            continue_final_message=request["continue_final_message"],
            **request["special_tokens"],
        )
    except MemoryError:
        return {"failed": "it takes too much memory"}
    except TemplateError as error:
        # What a template raises itself is of this very class; its own mistakes are of others.
        return {"refused" if type(error) is TemplateError else "failed": _first_line(error)}
    except ValueError as error:
        return {"refused": _first_line(error)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {_first_line(error)}"}
    if len(texts[0]) > MAX_TEXT:
        return {"failed": f"it makes a prompt of more than {MAX_TEXT} characters"}
    return {"text": texts[0]}


def serve(connection: socket.socket) -> None:
    """Answer until the other side is gone."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit()
    with connection, connection.makefile("rb") as requests:
        connection.sendall(b"{}\n")
        for line in requests:
            _set_alarm(LAST_RESORT_S)
            try:
                found = answer(json.loads(line), render_jinja_template)
            except MemoryError:
                found = {"failed": "it takes too much memory"}
            _set_alarm(0)
            connection.sendall(json.dumps(found).encode() + b"\n")


def _set_alarm(seconds: float) -> None:
    """End this process by then, should the server have died, which would have ended it earlier."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit() -> None:
    with suppress(ImportError, OSError, ValueError):  # where the system has no such limits, the deadline is left
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
