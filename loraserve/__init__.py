"""loraserve: one base model, many LoRA adapters, one forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loraserve.sampling import SamplingParams

if TYPE_CHECKING:
    from loraserve.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # On demand: the engine brings torch, which the server process and the CLI never import.
    if name in ("LLM", "Completion"):
        from loraserve import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
