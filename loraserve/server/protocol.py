"""What clients send: the request bodies of the HTTP API. Values are checked where they are used, never coerced."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema

_LORA_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "scale": {"type": "number", "default": 1.0},
        "revision": {"type": "string"},
    },
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
    visibility: Literal["public", "private"] | None = Field(
        None, description="`private`: only the tenant of the loading key may name it. Default with a token: private."
    )


class UnloadRequest(Body):
    """Body of `POST /adapters/unload`."""

    name: str
    force: bool | None = None
    deadline_s: float | None = None
    purge: bool | None = Field(None, description="Also delete the files that no other name has or had.")


class RollbackRequest(Body):
    """Body of `POST /adapters/rollback`."""

    name: str
    to: str | None = Field(None, description="Beginning of a version's hash. Default: one step further back.")


class PinRequest(Body):
    """Body of `POST /adapters/pin`."""

    name: str
    pinned: bool | None = Field(None, description="false takes the pin away.")


class PrefetchRequest(Body):
    """Body of `POST /adapters/prefetch`."""

    name: str
    to: Literal["host", "device"] | None = Field(None, description="How near it is brought. Default: device.")


class LimitsRequest(Body):
    """Body of `POST /admin/limits`: bytes, or sizes like `512MiB`; what is left out stays."""

    lora_memory: int | str | None = None
    host_lora_memory: int | str | None = None


class VllmLoadRequest(Body):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str | None = None
    lora_path: str | None = Field(None, description="Folder under an --adapter-dir, or a Hub repository.")
    load_inplace: bool | None = None


class VllmUnloadRequest(Body):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str | None = None
    lora_int_id: int | None = Field(None, description="Not looked at.")


class SglangLoadRequest(Body):
    """Body of `POST /load_lora_adapter`."""

    lora_name: str
    lora_path: str = Field(description="Folder under an --adapter-dir, or a Hub repository.")
    pinned: bool | None = None


class SglangUnloadRequest(Body):
    """Body of `POST /unload_lora_adapter`."""

    lora_name: str


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
