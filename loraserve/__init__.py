"""loraserve: one base model, many LoRA adapters, one forward."""

from __future__ import annotations

__version__ = "0.1.0"
