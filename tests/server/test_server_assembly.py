"""Stop strings and shown tokens, in parts and whole."""

from __future__ import annotations

import pytest
from fake_engine import byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.engine.messages import TokenLogprobs
from loraserve.server.assembly import Assembler, Piece, StopStrings
from loraserve.server.text import Text

TEXT = Text(byte_level_tokenizer())


def assemble(ids: list[int], stops: list[str], offset: int = 0) -> tuple[Piece, list[Piece], bool]:
    assembler = Assembler(TEXT, stops, offset=offset)
    parts = []
    for token in ids:
        parts.append(assembler.push(token, TokenLogprobs(token, -1.0, [])))
        if assembler.stopped:
            break
    else:
        parts.append(assembler.end())
    whole = Piece()
    for part in parts:
        whole.extend(part)
    return whole, parts, assembler.stopped


def spell(text: str) -> list[int]:
    """Ids of single characters, so that stop strings always span tokens."""
    return [token for char in text for token in TEXT.encode(char, special=False).ids]


@given(text=st.text("ab😀 ", max_size=20), stops=st.lists(st.text("ab😀 ", min_size=1, max_size=4), max_size=3))
@settings(max_examples=120, deadline=None)
def test_text_ends_before_the_first_completed_stop(text: str, stops: list[str]) -> None:
    whole, parts, stopped = assemble(spell(text), stops)
    # The stop that is complete first wins; of several complete at once, the one that begins first.
    expected, found = text, False
    for length in range(len(text) + 1):
        places = [place for stop in stops if (place := text[:length].find(stop)) >= 0]
        if places:
            expected, found = text[: min(places)], True
            break
    assert whole.text == expected
    assert stopped == found
    assert [shown.token for shown in whole.tokens] == spell(expected)
    for stop in stops:
        assert stop not in "".join(part.text for part in parts)


def test_nothing_is_held_back_without_need() -> None:
    _, parts, _ = assemble(spell("abcabd"), ["abd"])
    assert [part.text for part in parts] == ["", "", "abc", "", "", ""]
    _, parts, _ = assemble(spell("abab"), ["x"])
    assert [part.text for part in parts] == ["a", "b", "a", "b", ""]


def test_held_text_comes_at_the_end() -> None:
    whole, parts, stopped = assemble(spell("xab"), ["abc"])
    assert not stopped
    assert parts[-1].text == "ab"
    assert len(parts[-1].tokens) == 2
    assert whole.text == "xab"


def test_a_token_that_begins_before_the_stop_is_shown() -> None:
    ids = TEXT.encode("Hello world", special=False).ids
    assert len(ids) < len("Hello world"), "the tokenizer must join characters here"
    whole, _, stopped = assemble(ids, ["rld"])
    assert stopped
    assert whole.text == "Hello wo"
    shown = [token.token for token in whole.tokens]
    assert TEXT.decode(shown).startswith("Hello wo")
    assert shown == ids[: len(shown)]


@pytest.mark.parametrize("offset", [0, 7])
def test_starts_are_places_in_the_text(offset: int) -> None:
    whole, _, _ = assemble(spell("a😀b"), [], offset)
    assert whole.tokens[0].start == offset
    assert whole.tokens[-1].start == offset + 2
    inner = {token.start for token in whole.tokens[1:-1]}
    assert inner == {offset + 1}, "all tokens of one character begin with it"


def test_silent_token_has_no_text_but_is_shown() -> None:
    assembler = Assembler(TEXT, [])
    first = assembler.push(spell("a")[0], None)
    assert first.text == "a"
    last = assembler.push(spell("b")[0], None, silent=True)
    last.extend(assembler.end())
    assert last.text == ""
    assert len(last.tokens) == 1


def test_stop_strings_alone() -> None:
    stops = StopStrings(["END", "NDX"])
    assert stops.find("the END") == 4
    assert stops.find("the") is None
    assert stops.num_open("xxEN") == 2
    assert stops.num_open("N") == 1
    assert stops.num_open("x") == 0
    assert StopStrings([]).num_open("x") == 0
