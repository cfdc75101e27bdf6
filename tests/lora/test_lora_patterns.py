"""The linear-time engine against `re`, PEFT's rule, and patterns made to hang."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.linear_regex import LinearRegex, UnsupportedPattern
from loraserve.lora.patterns import MatchBudget, PatternTable

PATHS = ["model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj", "lm_head", "model.embed_tokens"]

pieces = st.recursive(
    st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", "[a-b_]", r"\d", r"\w", "^", "$", "", "1", "_"]),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "*?", "{0,}"])),
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(pattern=pieces, text=st.text("ab.1_", max_size=8))
def test_engine_answers_as_re(pattern: str, text: str) -> None:
    assert LinearRegex(pattern).matches(text) == (re.match(pattern, text) is not None)


@settings(max_examples=300, deadline=None)
@given(pattern=st.text(r"ab.|()[]*+?{}^$\-,:1dwsx", max_size=12))
@example(pattern="{1}")
@example(pattern="a|{1,2}b")
@example(pattern="({0})")
def test_engine_never_accepts_what_re_refuses(pattern: str) -> None:
    try:
        engine = LinearRegex(pattern)
    except UnsupportedPattern:
        return
    compiled = re.compile(pattern)
    for text in ("", "a", "ab", "a.b", "1", "b" * 6, "a{1}", "]"):
        assert engine.matches(text) == (compiled.match(text) is not None)


@pytest.mark.parametrize(
    "patterns",
    [
        ["q_proj"],
        ["proj"],
        ["layers.0.self_attn.q_proj", "q_proj"],
        ["^model.layers.0.self_attn.q_proj"],
        ["^q_proj"],
        [r"layers\.(0|11)\..*", "q_proj"],
        [r".*_proj", "down_proj"],
        [r"model\.layers\.1[0-9]\.mlp\.(gate|up|down)_proj"],
        ["a)|(lm_head"],
        ["", "lm_head"],
        ["layersX0.self_attn.q_proj", "model.layers.0"],
        ["self_attn.[qkv]_proj"],
        ["model-embed_tokens"],
    ],
)
def test_first_match_is_the_one_of_peft(patterns: list[str]) -> None:
    table = PatternTable(
        "rank_pattern", tuple((pattern, float(i)) for i, pattern in enumerate(patterns)), MatchBudget()
    )
    for path in PATHS:
        key = get_pattern_key(patterns, path)
        expected = float(patterns.index(key)) if key in patterns else -1.0
        assert table.lookup(path, -1.0) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(?:[a-z._0-9]|[a-z._0-9])+[A-Z]",
        "(?:(?:(?:[a-z._0-9]?){999}){999}){999}[A-Z]",
        "(?:(?:.|(?:.|(?:.|.)*)*)*)*[A-Z]",
        "(.*.*.*.*.*.*.*.*.*.*=)+",
        "(?:.?){200}[A-Z]",
        "(" * 300 + "a" + ")*" * 300,
        "x" * 100_000,
        "(?=a)a",
        r"(a)\1",
        "(?i)q_proj",
        "a**",
        "a*+",
        "[[:alpha:]]",
        "(",
        "a{99999999}",
    ],
)
def test_hostile_patterns_end_quickly(pattern: str) -> None:
    begin = time.monotonic()
    faults = []
    try:
        table = PatternTable("rank_pattern", ((pattern, 4.0),) * 3, MatchBudget())
        for layer in range(64):
            assert table.lookup(f"model.layers.{layer}.self_attn.q_proj", 8.0) == 8.0
    except AdapterRefused as error:
        faults.append(error.fault)
    assert set(faults) <= {AdapterFault.INVALID_CONFIG}
    assert time.monotonic() - begin < 4


def test_spent_budget_is_an_invalid_config() -> None:
    with pytest.raises(AdapterRefused, match="take too long") as caught:
        PatternTable("alpha_pattern", (("(a|b)+", 1.0),), MatchBudget(seconds=-1)).lookup("model", 8.0)
    assert caught.value.code == "invalid_config"


def test_many_expressions_end_within_the_budget_of_matching() -> None:
    patterns = tuple((f"(?:x{i}[a-z]{{0,20}}|y.*)+z", 1.0) for i in range(20_000))
    begin = time.monotonic()
    with pytest.raises(AdapterRefused, match="take too long") as caught:
        PatternTable("alpha_pattern", patterns, MatchBudget(seconds=0.5)).lookup("model.layers.0.mlp.up_proj", 8.0)
    assert caught.value.code == "invalid_config"
    assert time.monotonic() - begin < 2


def test_many_plain_patterns_are_cheap() -> None:
    paths = [f"model.layers.{layer}.self_attn.{kind}_proj" for layer in range(64) for kind in "qkvo"]
    table = PatternTable("rank_pattern", tuple((path, float(i)) for i, path in enumerate(paths)), MatchBudget())
    begin = time.monotonic()
    assert [table.lookup(path, -1.0) for path in paths] == [float(i) for i in range(len(paths))]
    assert time.monotonic() - begin < 2
