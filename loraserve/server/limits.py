"""How many tokens a prompt and its answer may have together."""

from __future__ import annotations

from typing import NamedTuple

from loraserve.errors import ContextLengthExceeded, InvalidRequest
from loraserve.server.text import Text

# Tokenizing takes time by the character and cannot be interrupted; this is far beyond what one token stands for.
UNSURE_CHARS = 256


class Limits(NamedTuple):
    """How many tokens a choice may get: as asked, or what there is room for."""

    asked: int | None
    default: int | None  # None: up to the end of the context
    param: str = "max_tokens"
    prompt_param: str = "prompt"


def room_for(limits: Limits, num_prompt: int, max_total: int, *, echo: bool = False) -> int:
    """Tokens to generate. Raises `ContextLengthExceeded` with the numbers."""
    asked = limits.asked
    if asked is not None and (asked < 0 or (asked == 0 and not echo)):
        raise InvalidRequest(f"{limits.param} must be at least {0 if echo else 1}, got {asked}", param=limits.param)
    wanted = 1 if asked is None else asked
    if num_prompt + wanted > max_total:
        answer = "at least 1 for the answer" if asked is None else f"{asked} of {limits.param}"
        raise ContextLengthExceeded(
            f"this server takes at most {max_total} tokens, but the prompt has {num_prompt} and {answer} "
            f"make {num_prompt + wanted}",
            param=limits.prompt_param if num_prompt >= max_total else limits.param,
        )
    if asked is not None:
        return asked
    room = max_total - num_prompt
    return room if limits.default is None else min(limits.default, room)


def check_length(text: str, tokenizer: Text, limits: Limits, max_total: int) -> None:
    """Refuse a text that cannot fit, before it is tokenized. Raises `ContextLengthExceeded` with the numbers."""
    least = tokenizer.least_tokens(text)
    if least >= max_total:
        why = f"which are at least {least} tokens"
    elif not least and len(text) > max_total * UNSURE_CHARS:
        why = f"more than the {UNSURE_CHARS} for each of them that are read at all"
    else:
        return
    raise ContextLengthExceeded(
        f"this server takes at most {max_total} tokens, but the prompt has {len(text)} characters, {why}",
        param=limits.prompt_param,
    )
