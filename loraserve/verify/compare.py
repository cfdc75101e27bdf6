"""The engine's logits and tokens against PEFT's, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from loraserve.compat import StrEnum
from loraserve.inspection import Base
from loraserve.verify.options import within_base
from loraserve.verify.reference import Reference

TOLERANCES: dict[str, float] = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.5}
"""|Δlogit| against PEFT in float32 that is always allowed, by the dtype served."""

_SLACK = 2.0
"""The base's rounding dominates in half precision and grows with the model; in float32 some adapters amplify it. What
is allowed at least is this many times what PEFT in the served dtype itself differs from PEFT in the next wider one."""

_DOUBTFUL = 0.25
"""The part of the limit from which on PEFT is asked for its rounding in float32 too."""


class Scenario(StrEnum):
    """How the engine was asked."""

    ALONE = "alone"
    MIXED = "in a mixed batch"
    EVICTED = "after eviction"
    RELOADED = "after unload and load"


class Served(StrEnum):
    """What a request asked for."""

    BASE = "base"
    ADAPTER = "adapter"
    COPY = "its copy"


class Divergence(NamedTuple):
    """The first token of an answer that is not PEFT's."""

    prompt: int
    position: int  # in the answer
    token: int
    expected: int
    gap: float  # how much more PEFT's logit of its own token is; small: a near-tie


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison over all prompts."""

    scenario: Scenario
    served: Served
    max_delta: float  # inf if anything is not finite
    limit: float  # max_delta must be below
    num_rows: int
    divergences: tuple[Divergence, ...]  # at most one per prompt
    near_ties: (
        bool  # a divergence where PEFT's own two logits are within the limit is rounding; not with the plain limit
    )
    broken: tuple[int, ...] = ()  # prompts whose answers the engine gave up on, because its logits were not finite

    @property
    def passed(self) -> bool:
        """Whether logits and tokens are PEFT's."""
        if self.broken:
            return False
        tokens = all(self.near_ties and found.gap <= self.limit for found in self.divergences)
        return self.max_delta < self.limit and tokens


@dataclass(slots=True)
class Trace:
    """One request: its tokens, and the logits that led to them, one row for each position."""

    prompt: int
    served: Served
    logits: Tensor  # [prompt + max_tokens − 1, vocab] float32; NaN where nothing was computed
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    broken: bool = False  # the engine ended it, because a row of its logits is not finite


@dataclass(frozen=True, slots=True)
class Expectation:
    """PEFT's side, one entry for each prompt: what it was fed after the prompt, and its logits along that."""

    fed: list[list[int]]  # the engine's lone answers
    logits: list[Tensor]  # [prompt + max_tokens − 1, vocab]; fewer rows if the answer broke off
    limit: float
    near_ties: bool


def expectations(
    base: Base,
    folder: Path,
    prompts: list[list[int]],
    traces: list[Trace],
    dtype: str,
    starts: list[int | None],
    num_new_tokens: int = 0,
) -> dict[Served, Expectation]:
    """Let PEFT compute along the lone answers `traces`, which come in the order of the prompts, in float32.

    `starts` says for each prompt from where on the adapter applies; `num_new_tokens` are those that the adapter adds to
    the vocabulary. If `dtype`, the one served, is another, PEFT computes in it too, for the limit. Raises
    `ReferenceUnavailable`.
    """

    def computed(in_dtype: torch.dtype) -> dict[Served, list[Tensor]]:
        return _peft_logits(base, folder, prompts, traces, in_dtype, starts, num_new_tokens)

    exact = computed(torch.float32)
    limits = dict.fromkeys(exact, TOLERANCES[dtype])
    if dtype != "float32":
        rounded = computed(getattr(torch, dtype))
        for served, rows in exact.items():
            noise = max(distance(one, other) for one, other in zip(rows, rounded[served], strict=True))
            if math.isfinite(noise):  # float16 may overflow in PEFT; that allows nothing
                limits[served] = max(limits[served], _SLACK * noise)
    return {
        served: Expectation(
            [trace.tokens for trace in traces if trace.served is served], rows, limits[served], dtype != "float32"
        )
        for served, rows in exact.items()
    }


def is_doubtful(checks: Sequence[Check]) -> bool:
    """Whether a float32 comparison is so far from equal that rounding alone may be why, or a fault."""
    if not all(math.isfinite(check.max_delta) for check in checks):
        return False  # no rounding
    return any(not check.passed or check.max_delta > _DOUBTFUL * check.limit for check in checks)


def refined(
    expected: dict[Served, Expectation],
    base: Base,
    folder: Path,
    prompts: list[list[int]],
    traces: list[Trace],
    starts: list[int | None],
    num_new_tokens: int = 0,
) -> dict[Served, Expectation]:
    """`expected`, of PEFT in float32, again in float64; what the two differ by is rounding, and is allowed.

    Logits are float32 all the same. Raises `ReferenceUnavailable`.
    """
    exact = _peft_logits(base, folder, prompts, traces, torch.float64, starts, num_new_tokens)
    found = {}
    for served, rows in exact.items():
        noise = max(distance(one, other) for one, other in zip(rows, expected[served].logits, strict=True))
        limit = max(TOLERANCES["float32"], _SLACK * noise if math.isfinite(noise) else 0.0)
        found[served] = Expectation(expected[served].fed, rows, limit, limit > TOLERANCES["float32"])
    return found


def _peft_logits(
    base: Base,
    folder: Path,
    prompts: list[list[int]],
    traces: list[Trace],
    dtype: torch.dtype,
    starts: list[int | None],
    num_new_tokens: int,
) -> dict[Served, list[Tensor]]:
    reference, vocab = Reference.base(base.path, dtype), base.shape.vocab_size
    found: dict[Served, list[Tensor]] = {}
    for served in (Served.BASE, Served.ADAPTER):
        if served is Served.ADAPTER:
            reference = reference.adapted(folder, vocab + num_new_tokens if num_new_tokens else None)
        asked = [within_base(prompt, vocab) for prompt in prompts] if served is Served.BASE else prompts
        found[served] = [
            # Some checkpoints pad the head beyond the vocabulary.
            reference.logits(asked[trace.prompt] + trace.tokens[:-1], starts[trace.prompt])[:, : trace.logits.shape[1]]
            for trace in traces
            if trace.served is served
        ]
    return found


def compare(
    scenario: Scenario,
    traces: Sequence[Trace],
    expected: dict[Served, Expectation],
    prompts: list[list[int]],
) -> list[Check]:
    """One check for everything that was served in a scenario."""
    checks = []
    for served in Served:
        ours = [trace for trace in traces if trace.served is served]
        if not ours:
            continue
        theirs = expected[Served.BASE if served is Served.BASE else Served.ADAPTER]
        deltas, rows, divergences = [0.0], 0, []
        for trace in ours:
            fed, logits, start = theirs.fed[trace.prompt], theirs.logits[trace.prompt], len(prompts[trace.prompt])
            # Rows after a token that PEFT was not fed have another history.
            shared = start + _common(trace.tokens[:-1], fed[:-1])
            deltas.append(math.inf if trace.broken else distance(trace.logits[:shared], logits[:shared]))
            rows += shared
            divergence = _first_divergence(trace, fed, logits[start - 1 :])
            divergences += [] if divergence is None else [divergence]
        broken = tuple(trace.prompt for trace in ours if trace.broken)
        checks.append(
            Check(scenario, served, max(deltas), theirs.limit, rows, tuple(divergences), theirs.near_ties, broken)
        )
    return checks


def _first_divergence(trace: Trace, fed: list[int], logits: Tensor) -> Divergence | None:
    """logits: [max_tokens, vocab], PEFT's for the answer's tokens; fewer if PEFT was fed an answer that broke off."""
    for position, (token, row) in enumerate(zip(trace.tokens, logits, strict=False)):
        best = int(row.argmax())
        if token != best:
            return Divergence(trace.prompt, position, token, best, float(row[best] - row[token]))
        if position >= len(fed) or token != fed[position]:
            return None  # as PEFT would have it, but PEFT was led another way from here on
    return None


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def distance(left: Tensor, right: Tensor) -> float:
    """Largest |left − right|; inf if it is not a number."""
    found = float((left - right).abs().max())
    return found if math.isfinite(found) else math.inf
