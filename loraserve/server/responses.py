"""What clients receive: OpenAI's shapes and our own. Dumped with `exclude_unset`, so optional fields may be absent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    code: str
    param: str | None = None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """How much of the prompt was found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens read and generated. A prompt counts once, however many choices it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LoraUse(BaseModel):
    """An adapter that made an answer."""

    name: str
    version: str
    scale: float


class CompletionLogprobs(BaseModel):
    """Parallel lists over tokens. The first token of an echoed prompt has no probability: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer, or in a stream a part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    lora: list[LoraUse] | None = None  # with lora_per_prompt only


class CompletionResponse(BaseModel):
    """Answer of `POST /v1/completions`; also each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    lora: list[LoraUse] | None = None


class TopLogprob(BaseModel):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The token that was taken."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the content's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    lora: list[LoraUse] | None


class ChatDelta(BaseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    lora: list[LoraUse] | None = None


class ModelCard(BaseModel):
    """An entry of `GET /v1/models`: the base model, or an adapter with the base as its `parent`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "loraserve"
    root: str
    parent: str | None
    max_model_len: int | None = None


class ModelList(BaseModel):
    """Answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class SourceInfo(BaseModel):
    """Where an adapter came from; `path` or `repo` is there, by `kind`."""

    kind: str
    path: str | None = None
    repo: str | None = None
    revision: str | None
    commit: str | None
    subfolder: str | None


class ProgressInfo(BaseModel):
    """How far a load is."""

    bytes_done: int
    bytes_total: int


class CodeAndMessage(BaseModel):
    """Why an adapter failed."""

    code: str
    message: str


class AdapterInfo(BaseModel):
    """All that is known of one name. Fields about the weights are null until they have been read."""

    name: str
    version: str | None
    state: Literal["fetching", "ready", "failed"]
    residency: Literal["disk", "host", "device"]
    pinned: bool
    source: SourceInfo
    rank: int | None
    targets: list[str] | None
    scaling: list[float] | None
    dtype: str | None
    bytes: int | None
    progress: ProgressInfo | None
    leases: int
    requests: int
    loaded_at: float | None
    last_used_at: float | None
    chat_template: Literal["own", "base"] | None
    warnings: list[str]
    report: dict[str, Any] | None  # the load report, as `loraserve adapters inspect --json` prints it
    error: CodeAndMessage | None
    visibility: Literal["public", "private"]


class AdapterList(BaseModel):
    """Answer of `GET /adapters`."""

    data: list[AdapterInfo]


class VersionInfo(BaseModel):
    """A version that a name has or had."""

    version: str
    source: SourceInfo
    created_at: float
    current: bool


class VersionList(BaseModel):
    """Answer of `GET /adapters/{name}/versions`."""

    data: list[VersionInfo]


class UnloadResponse(BaseModel):
    """Answer of `POST /adapters/unload`. `freed` is false while the engine is stuck: its memory follows then."""

    name: str
    version: str | None
    drained: int
    aborted: int
    freed: bool


class MemoryLimit(BaseModel):
    """Bytes: what may be used, what is, and what the limit can be raised to (null: no bound is known)."""

    limit: int
    used: int
    capacity: int | None


class LimitsResponse(BaseModel):
    """Answer of `/admin/limits`."""

    lora_memory: MemoryLimit
    host_lora_memory: MemoryLimit


class TokenizeResponse(BaseModel):
    """Answer of `POST /tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(BaseModel):
    """Answer of `POST /detokenize`."""

    prompt: str


class HealthResponse(BaseModel):
    """Answer of `GET /health` and `/ready`."""

    status: Literal["ok"]
    detail: str


class VersionResponse(BaseModel):
    """Answer of `GET /version`."""

    version: str
