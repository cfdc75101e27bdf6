"""Overlays: what decides the KV of a sequence besides its namespace, but only from some position on.

An activated LoRA leaves the tokens before its invocation to the base. Their KV lies in the base's namespace, and the
pages that the adapter had a part in carry a mark in their keys; so the tree parts at the first of these pages, and the
pages before it belong to everybody in the namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from loraserve.kvcache.prefix import Tokens

_SHIFT = 32  # token ids lie below it


class Overlay(NamedTuple):
    """Something that decides the KV of all tokens from position `start` on."""

    start: int
    name: str


Overlays = Sequence[tuple[int, str]]
"""`Overlay`s, or plain pairs of the same meaning."""


class OverlayMarks:
    """A number for every set of overlays that a page can have. Numbers are never given twice."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._marks: dict[str, int] = {}
        self._given = 0

    def keys(self, tokens: Tokens, overlays: Overlays) -> Tokens:
        """Tokens as the prefix cache is to know them: those of pages with overlays carry the page's mark."""
        if not overlays:
            return tokens
        size, num_pages = self._page_size, -(-tokens.size // self._page_size)
        # A page's set changes where an overlay begins inside it, and on the next page, of which it has the whole.
        changes = sorted({page for start, _ in overlays for page in (start // size, start // size + 1)})
        keyed = np.array(tokens, np.int64)
        for page, following in zip(changes, [*changes[1:], num_pages], strict=True):
            if page >= num_pages:
                break
            begin = page * size
            active = [(max(start - begin, 0), name) for start, name in overlays if start < begin + size]
            keyed[begin : following * size] |= self._mark(active) << _SHIFT
        return keyed

    def forget(self, matches: Callable[[str], bool]) -> frozenset[int]:
        """Forget the sets that `matches`; returns their numbers, which nobody asks for any more."""
        gone = {text: mark for text, mark in self._marks.items() if matches(text)}
        for text in gone:
            del self._marks[text]
        return frozenset(gone.values())

    def _mark(self, active: list[tuple[int, str]]) -> int:
        """Two pages have one mark if the same overlays begin at the same places in them, or before them."""
        text = "+".join(sorted(f"{name}@{start}" if start else name for start, name in active))
        if text not in self._marks:
            self._given += 1
            self._marks[text] = self._given
        return self._marks[text]


def marks_of(keys: Tokens) -> Tokens:
    """The mark of every key, 0 where there is none."""
    return keys >> _SHIFT
