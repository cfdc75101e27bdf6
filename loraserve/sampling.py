"""What a request asks of the sampler, validated once, where the request enters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraserve.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_CHARS = 4096  # of one stop string
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Raises `InvalidRequest` naming the field.

    temperature 0 is greedy. `top_k` 0 or -1 and `top_p` 1 and `min_p` 0 switch those filters off. `logprobs` is the
    number of alternatives beside the chosen token, None for none at all. `prompt_logprobs` likewise, for prompt tokens.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0 and at most 1", param="top_p")
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -MAX_SEED, MAX_SEED)
        # A text is a sequence of texts too: taken as one, each of its letters would be a stop string.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        check_stops(self.stop, self.stop_token_ids)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be true or false, got {self.ignore_eos!r:.60}", param="ignore_eos")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def check_stops(stop: Sequence[str], stop_token_ids: Sequence[int]) -> None:
    """Raise `InvalidRequest` for stop strings or ids that are too many, too long, or none."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}", param="stop")
    if any(not isinstance(text, str) or not text for text in stop):
        raise InvalidRequest("stop strings must be non-empty text", param="stop")
    if any(len(text) > MAX_STOP_CHARS for text in stop):
        raise InvalidRequest(f"a stop string has at most {MAX_STOP_CHARS} characters", param="stop")
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
    for token in stop_token_ids:
        _check_int("stop_token_ids", token, 0, 2**31 - 1)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}, got {value!r:.60}", param=name)


def _check_real(name: str, value: object, low: float, high: float) -> None:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not low <= value <= high:  # type: ignore[operator]
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, got {value!r:.60}", param=name)


def _tuple(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, tuple | list):
        raise InvalidRequest(f"{name} must be a list, got {value!r:.60}", param=name)
    return tuple(value)
