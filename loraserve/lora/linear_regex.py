"""A regular expression engine whose time is linear in the text, for patterns that strangers wrote.

It knows the part of `re` that names of modules need: literals, `.`, classes, groups, `|`, greedy and lazy repeats, `^`
and `$`. On that part it answers as `re.match(...) is not None` does. Everything else (look-around, back references,
flags, atomic groups) is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

MAX_STATES = 4096
MAX_GROUP_DEPTH = 40
_MAX_CACHE = 20_000

_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_Accepts = Callable[[str], bool]
_CLASSES: dict[str, _Accepts] = {
    "d": str.isdecimal,
    "D": lambda char: not char.isdecimal(),
    "w": lambda char: char.isalnum() or char == "_",
    "W": lambda char: not (char.isalnum() or char == "_"),
    "s": str.isspace,
    "S": lambda char: not char.isspace(),
}


class UnsupportedPattern(ValueError):
    """The pattern is malformed, too large, or outside the part of the language that is known here."""


class _State(NamedTuple):
    """One state: consumes a character if `accepts`, else passes to `next` freely (only at start/end for anchors)."""

    accepts: _Accepts | None
    anchor: str  # "", "^" or "$"
    next: tuple[int, ...]


class _Fragment(NamedTuple):
    start: int
    dangling: tuple[int, ...]  # states whose next is still open


class LinearRegex:
    """A compiled pattern. `matches(text)` is `re.match(pattern, text) is not None` for texts without newlines."""

    def __init__(self, pattern: str) -> None:
        """Compile; raises `UnsupportedPattern`."""
        builder = _Builder(pattern)
        self._states, self._start, self._accept = builder.build()
        self._cache: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(self, text: str) -> bool:
        """Whether the pattern matches at the beginning of `text`. Time O(len(text) × states)."""
        kernel = frozenset((self._start,))
        for position, char in enumerate(text):
            if self._accept in self._closure(kernel, start=position == 0, end=False):
                return True
            kernel = self._step(kernel, char, start=position == 0)
            if not kernel:
                return False
        return self._accept in self._closure(kernel, start=not text, end=True)

    def _step(self, kernel: frozenset[int], char: str, *, start: bool) -> frozenset[int]:
        if start:
            return self._advance(kernel, char, start=True)
        key = (kernel, char)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= _MAX_CACHE:
                self._cache.clear()
            found = self._cache[key] = self._advance(kernel, char, start=False)
        return found

    def _advance(self, kernel: frozenset[int], char: str, *, start: bool) -> frozenset[int]:
        states = self._states
        return frozenset(
            target
            for index in self._closure(kernel, start=start, end=False)
            if (accepts := states[index].accepts) is not None and accepts(char)
            for target in states[index].next
        )

    def _closure(self, kernel: Iterable[int], *, start: bool, end: bool) -> set[int]:
        pending, seen = list(kernel), set(kernel)
        while pending:
            state = self._states[pending.pop()]
            if state.accepts is not None or (state.anchor == "^" and not start) or (state.anchor == "$" and not end):
                continue
            for target in state.next:
                if target not in seen:
                    seen.add(target)
                    pending.append(target)
        return seen


class _Builder:
    """Recursive descent over the pattern that emits Thompson's automaton as it goes."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._accepts: list[_Accepts | None] = []
        self._anchors: list[str] = []
        self._next: list[list[int]] = []

    def build(self) -> tuple[list[_State], int, int]:
        """All states, the first and the accepting one."""
        whole = self._alternatives()
        if self._at < len(self._text):
            raise UnsupportedPattern("unbalanced parenthesis")
        accept = self._add(None)
        self._join(whole.dangling, accept)
        states = [
            _State(accepts, anchor, tuple(targets))
            for accepts, anchor, targets in zip(self._accepts, self._anchors, self._next, strict=True)
        ]
        return states, whole.start, accept

    def _add(self, accepts: _Accepts | None, anchor: str = "") -> int:
        if len(self._next) >= MAX_STATES:
            raise UnsupportedPattern(f"needs more than {MAX_STATES} states")
        self._accepts.append(accepts)
        self._anchors.append(anchor)
        self._next.append([])
        return len(self._next) - 1

    def _join(self, dangling: tuple[int, ...], target: int) -> None:
        for state in dangling:
            self._next[state].append(target)

    def _single(self, accepts: _Accepts | None, anchor: str = "") -> _Fragment:
        state = self._add(accepts, anchor)
        return _Fragment(state, (state,))

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise UnsupportedPattern("ends too early")
        self._at += 1
        return char

    def _alternatives(self) -> _Fragment:
        branches = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        split = self._add(None)
        self._next[split] += [branch.start for branch in branches]
        return _Fragment(split, tuple(state for branch in branches for state in branch.dangling))

    def _sequence(self) -> _Fragment:
        whole = self._single(None)
        while self._peek() not in ("", "|", ")"):
            item = self._repeated()
            self._join(whole.dangling, item.start)
            whole = _Fragment(whole.start, item.dangling)
        return whole

    def _repeated(self) -> _Fragment:
        begin = self._at
        if self._quantifier() is not None:
            raise UnsupportedPattern("nothing to repeat")
        repeatable = self._peek() not in "^$"
        item = self._atom()
        end = self._at
        counts = self._quantifier()
        if counts is None:
            return item
        if not repeatable:
            raise UnsupportedPattern("nothing to repeat")
        if self._peek() == "?":
            self._at += 1
        elif self._peek() == "+":
            raise UnsupportedPattern("possessive repeats are not supported")
        resume = self._at
        if self._quantifier() is not None:
            raise UnsupportedPattern("multiple repeat")
        fragment = self._repeat(item, begin, end, *counts)
        self._at = resume
        return fragment

    def _repeat(self, item: _Fragment, begin: int, end: int, least: int, most: int | None) -> _Fragment:
        whole, copies = self._single(None), 0
        skips: list[int] = []

        def copy() -> _Fragment:
            if copies == 0:
                return item
            self._at = begin
            again = self._atom()
            assert self._at == end
            return again

        while copies < least:
            following = copy()
            copies += 1
            self._join(whole.dangling, following.start)
            whole = _Fragment(whole.start, following.dangling)
        if most is None:
            loop = self._single(None)
            self._join(whole.dangling, loop.start)
            following = copy()
            self._join(loop.dangling, following.start)
            self._join(following.dangling, loop.start)
            return _Fragment(whole.start, loop.dangling)
        while copies < most:
            skips += whole.dangling
            following = copy()
            copies += 1
            self._join(whole.dangling, following.start)
            whole = _Fragment(whole.start, following.dangling)
        return _Fragment(whole.start, (*whole.dangling, *skips))

    def _quantifier(self) -> tuple[int, int | None] | None:
        char = self._peek()
        if char and char in "*+?":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if char != "{":
            return None
        low, comma, high = self._text[self._at + 1 : self._text.find("}", self._at)].partition(",")
        closed = "}" in self._text[self._at :]
        digits_ok = all(part.isascii() and (part.isdigit() or not part) for part in (low, high))
        if not closed or not digits_ok or not (low or comma):
            return None  # as in `re`, a brace that is no repeat stands for itself
        if len(low) > 6 or len(high) > 6:
            raise UnsupportedPattern("repeats too often")
        self._at = self._text.find("}", self._at) + 1
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            raise UnsupportedPattern("smallest repeat is larger than largest")
        return least, most

    def _atom(self) -> _Fragment:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._single(self._char_class())
        if char == ".":
            return self._single(lambda found: found != "\n")
        if char in "^$":
            return self._single(None, char)
        if char == "\\":
            return self._single(self._escape())
        return self._single(_is(char))

    def _group(self) -> _Fragment:
        if self._peek() == "?":
            self._at += 1
            if self._take() != ":":
                raise UnsupportedPattern("only plain and (?:...) groups are supported")
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise UnsupportedPattern("groups are nested too deeply")
        inner = self._alternatives()
        self._depth -= 1
        if self._peek() != ")":
            raise UnsupportedPattern("missing ), unterminated group")
        self._at += 1
        return inner

    def _escape(self) -> _Accepts:
        char = self._take()
        if char in _CLASSES:
            return _CLASSES[char]
        return _is(self._escaped_literal(char))

    def _escaped_literal(self, char: str) -> str:
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isascii() and char.isalnum():
            raise UnsupportedPattern(f"the escape \\{char} is not supported")
        return char

    def _char_class(self) -> _Accepts:
        negated = self._peek() == "^"
        self._at += negated
        members: list[_Accepts] = []
        while self._peek() != "]" or not members:
            low = self._class_member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_member()
                if not isinstance(low, str) or not isinstance(high, str) or high < low:
                    raise UnsupportedPattern("bad character range")
                members.append(_between(low, high))
            else:
                members.append(_is(low) if isinstance(low, str) else low)
        self._at += 1
        accepted = tuple(members)
        if negated:
            return lambda char: not any(accepts(char) for accepts in accepted)
        return lambda char: any(accepts(char) for accepts in accepted)

    def _class_member(self) -> str | _Accepts:
        char = self._take()
        if char == "[" or (char in "-&~|" and self._peek() == char):
            raise UnsupportedPattern("set operations in a class are not supported")
        if char != "\\":
            return char
        char = self._take()
        return _CLASSES[char] if char in _CLASSES else self._escaped_literal(char)


def _is(wanted: str) -> _Accepts:
    return lambda char: char == wanted


def _between(low: str, high: str) -> _Accepts:
    return lambda char: low <= char <= high
