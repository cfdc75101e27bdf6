"""The limit on prompt tokens of a step follows what steps cost."""

from __future__ import annotations

from loraserve.scheduler.pace import StepPace


def steps(pace: StepPace, count: int, token_s: float, decode_s: float = 0.0, wanted: int = 10_000) -> int:
    """Run `count` steps that have as many prompt tokens as they may; the last one's number."""
    tokens = 0
    for _ in range(count):
        pace.note(0, decode_s)
        tokens = min(wanted, pace.limit)
        pace.note(tokens, decode_s + tokens * token_s)
    return tokens


def test_a_fast_machine_is_not_held_back() -> None:
    pace = StepPace(0.5, 2048)
    assert pace.limit == 256
    assert steps(pace, 6, token_s=2e-5) == 2048


def test_steps_stay_within_the_time() -> None:
    pace = StepPace(0.5, 2048)
    assert steps(pace, 10, token_s=1 / 600) == 256  # 0.43 s; 512 would take 0.85 s
    assert steps(pace, 10, token_s=1 / 100) == 32
    assert steps(pace, 10, token_s=1.0) == 16


def test_decode_rows_beside_the_prompt_do_not_count_against_it() -> None:
    pace = StepPace(0.5, 2048)
    steps(pace, 20, token_s=1.0, decode_s=0.3)
    assert steps(pace, 20, token_s=1 / 600, decode_s=0.3) == 256


def test_a_pause_of_the_machine_is_forgotten() -> None:
    pace = StepPace(0.5, 2048)
    steps(pace, 8, token_s=1 / 600)
    pace.note(256, 60.0)
    assert pace.limit == 16
    assert steps(pace, 20, token_s=1 / 600) == 256


def test_short_prompts_say_nothing_about_long_ones() -> None:
    pace = StepPace(0.5, 2048)
    for _ in range(50):
        pace.note(3, 0.2)
    assert pace.limit == 256


def test_without_a_limit() -> None:
    pace = StepPace(0.0, 2048)
    assert steps(pace, 5, token_s=10.0) == 2048
