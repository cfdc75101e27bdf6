"""From tokens to what a client may see: text without stop strings, and exactly the tokens that this text shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from loraserve.engine.messages import TokenLogprobs
from loraserve.server.text import Detokenizer, Text


class ShownToken(NamedTuple):
    """A token that is given out, and where its text begins in the choice's text."""

    token: int
    start: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Piece:
    """A part of a choice: its text and its tokens."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)

    def extend(self, other: Piece) -> None:
        """Append what follows."""
        self.text += other.text
        self.tokens += other.tokens

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


class StopStrings:
    """Finds the first stop string in text that arrives in parts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.longest = max((len(stop) for stop in stops), default=0)

    def find(self, text: str) -> int | None:
        """Where the earliest stop string begins, or None."""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return min(places, default=None)

    def num_open(self, text: str) -> int:
        """Length of the longest end of `text` that could still grow into a stop string."""
        for length in range(min(len(text), self.longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class Assembler:
    """Builds one choice. `offset` is the length of text shown before it (an echoed prompt)."""

    def __init__(self, text: Text, stops: Sequence[str], context: Sequence[int] = (), offset: int = 0) -> None:
        self._detokenizer = Detokenizer(text, context)
        self._stops = StopStrings(stops)
        self._offset = offset
        self._shown = 0  # characters given out
        self._held = ""  # characters that may yet be part of a stop string
        self._waiting: deque[ShownToken] = deque()
        self.stopped = False

    def push(self, token: int, logprobs: TokenLogprobs | None, *, silent: bool = False) -> Piece:
        """Take one generated token. A `silent` one (the end-of-sequence token) adds no text."""
        self._waiting.append(ShownToken(token, self._shown + len(self._held), logprobs))
        return self._release("" if silent else self._detokenizer.push(token))

    def end(self) -> Piece:
        """All that is still held back; nothing more comes."""
        piece = self._release(self._detokenizer.finish())
        if self.stopped:
            return piece
        piece.text += self._held
        self._shown += len(self._held)
        self._held = ""
        piece.tokens += [self._placed(token) for token in self._waiting]
        self._waiting.clear()
        return piece

    def _release(self, text: str) -> Piece:
        self._held += text
        cut = self._stops.find(self._held)
        if cut is None:
            cut = len(self._held) - self._stops.num_open(self._held)
        else:
            self.stopped = True
        piece = Piece(self._held[:cut])
        self._held = self._held[cut:]
        self._shown += cut
        # A token is shown with its first character; one whose text lies wholly in the stop string is not.
        while self._waiting and self._waiting[0].start < self._shown:
            piece.tokens.append(self._placed(self._waiting.popleft()))
        if self.stopped:
            self._waiting.clear()
        return piece

    def _placed(self, token: ShownToken) -> ShownToken:
        return token._replace(start=token.start + self._offset)
