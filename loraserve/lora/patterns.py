"""`rank_pattern` and `alpha_pattern`: PEFT's rule for which entry applies to a module, in bounded time."""

from __future__ import annotations

import re
import time

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.linear_regex import LinearRegex, UnsupportedPattern
from loraserve.lora.strict_json import show

MAX_PATTERNS = 20_000
MAX_PATTERN_LENGTH = 1024
MATCH_SECONDS = 2.0

_LITERAL = re.compile(r"[A-Za-z0-9_.-]*", re.ASCII)


class MatchBudget:
    """The time that all patterns of one adapter may take together, from the first one that is compiled on."""

    def __init__(self, seconds: float = MATCH_SECONDS) -> None:
        self._seconds = seconds
        self._deadline: float | None = None

    def check(self, field: str) -> None:
        """Raise `AdapterRefused(invalid_config)` once the time is spent."""
        now = time.monotonic()
        self._deadline = now + self._seconds if self._deadline is None else self._deadline
        if now > self._deadline:
            raise AdapterRefused(AdapterFault.INVALID_CONFIG, f"{field}: its patterns take too long")


class PatternTable:
    """Entries of one pattern field in file order; the first whose pattern matches a module's path applies.

    The rule is PEFT's: `re.match(r"(.*\\.)?(PATTERN)$", path)`. Plain names go through `re` itself, which cannot
    backtrack on them for long; real expressions through an engine with linear time.
    """

    def __init__(self, field: str, entries: tuple[tuple[str, float], ...], budget: MatchBudget) -> None:
        """Compile the entries. Raises `AdapterRefused(invalid_config)`: a pattern cannot be used, or time is up."""
        self._field = field
        self._budget = budget
        self._patterns = tuple(pattern for pattern, _ in entries)
        self._entries = [(_matcher(field, pattern, budget), value) for pattern, value in entries]
        self._used: set[int] = set()

    def lookup(self, path: str, default: float) -> float:
        """The value for the module at `path`, or `default` if no pattern matches."""
        for position, (matcher, value) in enumerate(self._entries):
            if position % 256 == 0 or matcher.is_slow:
                self._budget.check(self._field)
            if matcher.matches(path):
                self._used.add(position)
                return value
        return default

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns that no lookup so far has found, because nothing matches them or an earlier one always does."""
        return tuple(pattern for position, pattern in enumerate(self._patterns) if position not in self._used)


class _Plain:
    is_slow = False

    def __init__(self, pattern: str) -> None:
        self._tail = pattern.rpartition(".")[2]
        self._regex: re.Pattern[str] | None = None
        self._source = rf"(.*\.)?({pattern})$"

    def matches(self, path: str) -> bool:
        if not path.endswith(self._tail):  # only a full stop is a wildcard, so the last part is literal
            return False
        self._regex = self._regex or re.compile(self._source)
        return self._regex.match(path) is not None


class _Expression:
    is_slow = True

    def __init__(self, regex: LinearRegex) -> None:
        self._regex = regex

    def matches(self, path: str) -> bool:
        return self._regex.matches(path)


def _matcher(field: str, pattern: str, budget: MatchBudget) -> _Plain | _Expression:
    if len(pattern) <= MAX_PATTERN_LENGTH and _LITERAL.fullmatch(pattern):
        return _Plain(pattern)
    return _Expression(compiled(field, pattern, r"(.*\.)?({})$", budget))


def compiled(field: str, pattern: str, around: str, budget: MatchBudget) -> LinearRegex:
    """A stranger's pattern put into `around` at {}, as PEFT does. Raises `AdapterRefused(invalid_config)`."""
    problem = f"longer than {MAX_PATTERN_LENGTH} characters"
    budget.check(field)
    if len(pattern) <= MAX_PATTERN_LENGTH:
        try:
            return LinearRegex(around.replace("{}", pattern))
        except UnsupportedPattern as error:
            problem = str(error)
    raise AdapterRefused(AdapterFault.INVALID_CONFIG, f"{field}: pattern {show(pattern)} cannot be used: {problem}")
