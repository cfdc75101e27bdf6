"""Labels of metrics stay few, whoever is asked for, and counters never go down."""

from __future__ import annotations

import random

from loraserve.server.adapter_metrics import MAX_TRACKED, AdapterTraffic


def test_the_busiest_have_labels_and_the_rest_share_one() -> None:
    traffic = AdapterTraffic(max_labels=3)
    rng = random.Random(0)
    before: dict[str, int] = {}
    for step in range(20_000):
        busy = "abc" if step < 10_000 else "xyz"
        name = rng.choice(busy) if rng.random() < 0.7 else f"rare-{rng.randrange(5 * MAX_TRACKED)}"
        traffic.counts(name).prompt_tokens += 1
        now = {label: counts.requests for label, counts in traffic.labels()}
        assert len(now) <= 4
        assert all(now[label] >= count for label, count in before.items() if label in now and label == "other")
        before = now
        if step == 9_999:
            assert {"a", "b", "c", "other"} == set(now)
    assert {"x", "y", "z", "other"} == set(before)
    assert all(counts.requests == counts.prompt_tokens for _, counts in traffic.labels())
