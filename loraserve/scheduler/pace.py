"""How many prompt tokens a step may have so that nobody's next token waits long for it: learned from former steps."""

from __future__ import annotations

_FIRST, _LEAST = 256, 16  # tokens: before anything is known, and however slow the machine is
_NEWS = 0.4  # weight of the latest step


class StepPace:
    """Keeps steps with prompt tokens near `max_step_s` seconds. The limit is a power of two: it rarely moves."""

    __slots__ = ("_decode_s", "_limit", "_max_step_s", "_max_tokens", "_token_s")

    def __init__(self, max_step_s: float, max_tokens: int) -> None:
        """Without `max_step_s` the limit is always `max_tokens`."""
        self._max_step_s = max_step_s
        self._max_tokens = max_tokens
        self._limit = min(_FIRST, max_tokens) if max_step_s else max_tokens
        self._decode_s = 0.0
        self._token_s: float | None = None

    @property
    def limit(self) -> int:
        """Prompt tokens that a step may have."""
        return self._limit

    def note(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long."""
        if not self._max_step_s:
            return
        if num_prompt_tokens == 0:
            self._decode_s += _NEWS * (seconds - self._decode_s)
            return
        # Few tokens say more about the step's fixed costs than about theirs; unless no more are allowed.
        if num_prompt_tokens < min(4 * _LEAST, self._limit):
            return
        cost = max(seconds - self._decode_s, 0.1 * seconds) / num_prompt_tokens
        self._token_s = cost if self._token_s is None else self._token_s + _NEWS * (cost - self._token_s)
        affordable = max(_LEAST, int(self._max_step_s / max(self._token_s, 1e-9)))
        # At most twice of what was tried: cost is not linear, and one lucky step proves nothing.
        fitting = min(1 << (affordable.bit_length() - 1), 2 * self._limit)
        self._limit = min(fitting, self._max_tokens)
