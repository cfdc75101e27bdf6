"""Fields of the config that PEFT reads as patterns of paths, and by which it may leave modules without their LoRA."""

from __future__ import annotations

import re

from loraserve.lora.linear_regex import LinearRegex
from loraserve.lora.patterns import compiled
from loraserve.lora.peft_config import PeftConfig

_WORD = re.compile(r"\w*", re.ASCII)


class PathRules:
    """`layers_pattern` and the other meaning of `modules_to_save`, which PEFT puts into expressions unescaped."""

    def __init__(self, config: PeftConfig) -> None:
        """Compile. Raises `AdapterRefused(invalid_config)`."""
        self._budget = config.budget
        value = config.fields.get("layers_pattern")
        texts = ([value] if isinstance(value, str) else config.texts("layers_pattern") or ()) if value else ()
        self._layers: list[LinearRegex] = []
        if config.layers is not None:
            self._layers = [compiled("layers_pattern", text, r"(^|.*\.){}\.\d+\.", self._budget) for text in texts]
        # A plain word among them means a module by its whole name, which is refused where that is not served.
        self._saved = [
            (name, compiled("modules_to_save", name, r"(^|.*\.){}($|\..*)", self._budget))
            for name in config.saved_modules
            if _WORD.fullmatch(name) is None
        ]

    def in_layers_pattern(self, module: str) -> bool:
        """Whether PEFT finds the module's layer, which it must to apply `layers_to_transform`."""
        return not self._layers or any(self._matches("layers_pattern", regex, module) for regex in self._layers)

    def saved_name(self, module: str) -> str | None:
        """The entry of `modules_to_save` for which PEFT passes the module over."""
        return next((name for name, regex in self._saved if self._matches("modules_to_save", regex, module)), None)

    def _matches(self, field: str, regex: LinearRegex, module: str) -> bool:
        self._budget.check(field)
        return regex.matches(module)
