"""`Request`: one prompt on its way to one answer, and everything the scheduler remembers about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraserve.compat import StrEnum
from loraserve.errors import InvalidRequest, LoraserveError
from loraserve.sampling import SamplingParams

Tokens = NDArray[np.int64]

Overlays = tuple[tuple[int, str], ...]  # (first position, what decides the KV from there on)

_SCALE, _JOIN, _SALT = "*", "+", "|"  # a namespace reads `version*scale+version*scale|salt`, an overlay `version*scale`


class RequestState(StrEnum):
    """Where a request is in its life. A retracted request is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


class AdapterUse(NamedTuple):
    """One adapter version and the factor its delta is multiplied with, on top of its own scaling."""

    version: str
    scale: float
    start: int = 0  # first position that it applies to: an activated LoRA's last invocation in the prompt


def namespace_of(adapters: tuple[AdapterUse, ...], cache_salt: str = "") -> str:
    """Prefix-cache key of what decides the KV from the first token on: versions, scales and the tenant's salt.

    Adapters that start later are not in it but in `overlays_of`: what lies before them belongs to those without them.

    The order of a blend does not matter. Never empty. Raises `InvalidRequest` for a version or scale that no key can
    be made of.
    """
    for use in adapters:
        if not use.version or any(mark in use.version for mark in (_SCALE, _JOIN, _SALT)):
            raise InvalidRequest(f"{use.version!r} is not an adapter version", param="lora")
        if not isfinite(use.scale):
            raise InvalidRequest(f"the scale of an adapter must be a finite number, got {use.scale!r}", param="lora")
    blend = _JOIN.join(_key_of(use) for use in sorted(adapters) if use.start == 0)
    return f"{blend}{_SALT}{cache_salt}"


def overlays_of(adapters: tuple[AdapterUse, ...]) -> Overlays:
    """What decides the KV besides the namespace, from some later position on."""
    return tuple(sorted((use.start, _key_of(use)) for use in adapters if use.start > 0))


def _key_of(use: AdapterUse) -> str:
    return f"{use.version}{_SCALE}{float(use.scale)!r}"


def namespace_uses(namespace: str, version: str) -> bool:
    """Whether `namespace`, or a set of overlays, was made with this adapter version (its salt is not searched)."""
    blend = namespace.partition(_SALT)[0]
    return any(part.partition(_SCALE)[0] == version for part in blend.split(_JOIN))


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to one answer.

    The creator fills the first block; the scheduler owns the second. Tokens are known in `prompt` and `output`; the
    KV of the first `num_computed` of them is in the cache while the request runs. Steps in flight are on the way to
    `num_scheduled`: between two steps both are the same.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    adapters: tuple[AdapterUse, ...] = ()
    namespace: str = ""  # from `namespace_of`; left empty it is made from `adapters` without a salt
    tenant: str = ""
    priority: int = 0  # smaller is earlier
    arrival: float = 0.0  # monotonic seconds; 0: when it is added
    deadline: float | None = None  # monotonic seconds; None: the scheduler's default limit
    eos_ids: frozenset[int] = frozenset()

    output: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    error: LoraserveError | None = None
    stop_token: int | None = None  # the EOS or stop token that ended it; it is the last of `output`
    row: int | None = None  # level-1 row while running
    num_computed: int = 0  # tokens whose KV is in the cache
    num_scheduled: int = 0  # tokens whose KV is there once the steps in flight are over
    num_in_flight: int = 0  # steps in flight that compute some of its tokens
    num_cached: int = 0  # prompt tokens reused at the first admission, for usage
    num_retractions: int = 0
    prompt_logprobs_done: int = 0  # leading prompt positions whose logits were already seen in a committed step
    max_total: int = 0  # most tokens of prompt and output together; set when added
    order: int = -1  # position in the order of arrival; set when added
    admitted: bool = False  # whether it ever ran
    admitted_at: float | None = None  # monotonic seconds of the first admission
    was_passed_over: bool = False  # before it: its adapter was not on the device
    passed_over_at: float | None = None  # when it was first passed over because its adapter was not on the device
    wanted_at: float | None = None  # when the scheduler first asked for its adapters

    prompt_ids: Tokens = field(init=False, repr=False)
    prefill_ids: Tokens = field(init=False, repr=False)  # all tokens known at the last admission
    versions: tuple[str, ...] = field(init=False)  # distinct adapter versions
    overlays: Overlays = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_ids = np.array(self.prompt, dtype=np.int64)
        self.prefill_ids = self.prompt_ids
        self.versions = tuple(dict.fromkeys(use.version for use in self.adapters))
        self.overlays = overlays_of(self.adapters)
        if not self.namespace:
            self.namespace = namespace_of(self.adapters)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens known at admission still lack their KV, so that nothing can be sampled from it yet."""
        return self.num_computed < len(self.prefill_ids)

    @property
    def has_prefill_left(self) -> bool:
        """Whether tokens known at admission are in no step yet."""
        return self.num_scheduled < len(self.prefill_ids)

    @property
    def is_all_scheduled(self) -> bool:
        """Whether its last token is sampled in a step in flight, whatever the tokens until then are."""
        total = self.num_scheduled + 1  # with the one sampled after the last of these
        return total - len(self.prompt) >= self.params.max_tokens or total >= self.max_total

    @property
    def is_finished(self) -> bool:
        """Whether its terminal event was made."""
        return self.state == RequestState.FINISHED

    def token_ids(self) -> Tokens:
        """Prompt and output as one array."""
        if not self.output:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.array(self.output, dtype=np.int64)))

    def rank(self) -> tuple[int, int]:
        """Who keeps its pages when KV runs out: the largest goes first."""
        return self.priority, self.order
