"""How the engine is, as the process that talks to it sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether the engine process lives, steps, and takes requests."""

    alive: bool
    stuck: bool
    ready: bool
    detail: str


def detail_of(*, alive: bool, ready: bool, restoring: bool, silence_s: float | None) -> str:
    """The state in words; `silence_s` is how long a stuck step loop has said nothing, None if it is not stuck."""
    if not alive:
        return "the engine process is not running"
    if not ready:
        return "the engine is starting"
    if restoring:
        return "the engine has restarted and loads its adapters again"
    return "ok" if silence_s is None else f"the step loop has been silent for {silence_s:.0f} s"
