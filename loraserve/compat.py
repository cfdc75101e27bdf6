"""What Python 3.10 lacks."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """An enum whose members are their own text."""

        def __str__(self) -> str:
            return str(self.value)


__all__ = ["StrEnum"]
