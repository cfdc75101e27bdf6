"""Fields that are not served: refused by name unless their value asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.errors import InvalidRequest, UnsupportedField
from loraserve.server.protocol import Body

NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Fields of OpenAI that do not touch the answer."""

_GENERATION: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "logits_processors": ([],),
}

COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = _GENERATION | {
    "suffix": (),
    "add_special_tokens": (True,),
}
"""Values of unsupported completion fields that ask for nothing; null always does."""

CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = _GENERATION | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_special_tokens": (False,),
    "echo": (False,),
    "lora_per_prompt": (False,),
}
"""The same for chat. A tool choice without tools chooses nothing."""

STREAM_NEUTRAL: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}


def check_fields(body: Body, neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise `UnsupportedField` for what would change the result if it were served, `InvalidRequest` for broken text."""
    for name in type(body).model_fields:
        check_text(getattr(body, name), f"{prefix}{name}")
    for name, value in (body.model_extra or {}).items():
        check_field(name, value, neutral, prefix)


def check_text(value: object, path: str) -> None:
    """Raise `InvalidRequest` if a text, or one of a list, has half a surrogate pair, which JSON can spell."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        for item in value:
            check_text(item, path)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{path} has half a surrogate pair, which is no text", param=path) from None


def check_field(name: str, value: object, neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """The same for one field of a plain object."""
    path = f"{prefix}{name}"
    if name in neutral:
        # bool and int compare equal in Python, but `false` is not a penalty of 0: types count too.
        if value is None or any(_same(value, allowed) for allowed in neutral[name]):
            return
        raise UnsupportedField(f"{path} is not supported with this value; leave it out", param=path)
    if name in NO_EFFECT or value is None:
        return
    raise UnsupportedField(f"unknown field {path}", param=path)


def check_best_of(body: Body, n: int) -> None:
    """`best_of` asks for nothing when it is 1 or `n`. Removes it from the extra fields."""
    value = (body.model_extra or {}).pop("best_of", None)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest("best_of must be a whole number", param="best_of")
    if value not in (1, n):
        raise UnsupportedField("best_of other than n is not supported", param="best_of")


def _same(value: object, allowed: object) -> bool:
    if isinstance(value, bool) != isinstance(allowed, bool):
        return False
    return value == allowed
