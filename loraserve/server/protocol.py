"""What clients send: the request bodies of the HTTP API. Values are checked where they are used, never coerced."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema

_LORA_OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "scale": {"type": "number", "default": 1.0}},
    "required": ["name"],
}
_LORA_SCHEMA = {
    "anyOf": [
        {"type": "null"},
        {"type": "string", "description": "`name` or `name@hashprefix`"},
        _LORA_OBJECT,
        {"type": "array", "items": _LORA_OBJECT, "description": "a blend: the deltas are added with their scales"},
    ]
}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


class _FirstError(FailFast):
    """Stops at the first wrong item: a million of them would be described one by one, in minutes and gigabytes."""

    __hash__ = object.__hash__  # unions hash their members


_Texts = Annotated[list[str], _FirstError()]
_Ids = Annotated[list[int], _FirstError()]
_Messages = Annotated[list[dict[str, Any]], _FirstError()]


class Body(BaseModel):
    """A JSON object. Unknown fields are kept, so that they can be refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Body):
    """OpenAI's options of a stream."""

    include_usage: bool | None = None


class GenerationBody(Body):
    """Fields that completions and chat share."""

    model: str = Field(description="The base model, an adapter, or `base:adapter`.")
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | _Texts | None = None
    stop_token_ids: _Ids | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    return_token_ids: bool | None = Field(None, description="Adds `token_ids` and `prompt_token_ids` to each choice.")
    lora: Annotated[Any, WithJsonSchema(_LORA_SCHEMA)] = None
    cache_salt: str | None = Field(None, description="Requests share cached prefixes only within one salt.")
    priority: int | None = Field(None, description="Smaller goes first.")
    timeout_s: float | None = Field(None, description="Whole life of the request in seconds.")


class CompletionRequest(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: int | None = None
    echo: bool | None = None
    lora_per_prompt: bool | None = Field(None, description="`lora` is a list with one value per prompt.")


class ChatRequest(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: _Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="Go on with the last message instead of a new one.")


class LoadRequest(Body):
    """Body of `POST /adapters/load`: exactly one of `path` and `repo`."""

    name: str
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    subfolder: str | None = None
    token: str | None = None
    pin: bool | None = None
    replace: bool | None = None
    wait: bool | None = None


class UnloadRequest(Body):
    """Body of `POST /adapters/unload`."""

    name: str
    force: bool | None = None
    deadline_s: float | None = None


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a `prompt`, or `messages` to put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: _Ids
    skip_special_tokens: bool | None = None
