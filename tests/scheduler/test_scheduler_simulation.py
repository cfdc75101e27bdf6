"""Random clients against everything at once; `World` checks KV, order, turns, ends and balances on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scheduler_simulation import World, make_adapters, simulate

from loraserve.config import CacheConfig, SchedulerConfig
from loraserve.scheduler.admission import GrowthReserve

LONG = """
import sys
sys.modules["torch"] = None  # importing it is an error from here on
sys.path.insert(0, sys.argv[1])
from scheduler_simulation import *

world = World(
    cache=CacheConfig(page_size=4),
    scheduler=SchedulerConfig(max_running=8, max_step_tokens=32, prefill_chunk=16, max_waiting=40),
    num_locations=160, room=5, adapters=make_adapters(8), growth=GrowthReserve(2, 8),
)
simulate(world, 0, 10_000, load=0.25, check_every=200)
stats = world.scheduler.stats()
print(stats.finished_total, stats.retractions_total, stats.cached_tokens_total, len(world.batches))
print(world.num_riders, world.most_sets, world.longest_turn_s, world.longest_wait_s)
"""


def test_ten_thousand_steps_without_torch() -> None:
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", LONG, str(here)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    counts, waits = done.stdout.splitlines()
    finished, retractions, cached, batches = map(int, counts.split())
    riders, sets, longest_turn, longest_wait = map(float, waits.split())
    assert finished > 3000
    assert retractions > 50, "the run was meant to be short of KV"
    assert cached > 1000
    assert batches > 8000
    assert riders > 50
    # Nobody runs longer than 70 tokens and 4 chunks of a prompt, in steps of 10 ms; one more is to change adapters.
    # Rows and KV are short: what rides may have to wait until what runs has ended.
    longest_run = 0.01 * (70 + 4 + 1)
    assert longest_turn <= 2 * longest_run
    # 0.5 s until it is overdue, 0.3 s for the slowest fetch, then one turn for each set of adapters.
    assert longest_wait <= 0.5 + 0.3 + sets * (longest_turn + 0.01)


@pytest.mark.parametrize("policy", ["fcfs", "longest-prefix", "priority", "fair-share"])
@pytest.mark.parametrize(("page_size", "prefix_cache"), [(1, True), (4, False), (16, True)])
def test_every_policy_and_page_size(policy: str, page_size: int, prefix_cache: bool) -> None:
    world = World(
        cache=CacheConfig(page_size=page_size, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(
            max_running=8,
            max_step_tokens=32,
            prefill_chunk=7,
            policy=policy,  # type: ignore[arg-type]
            max_waiting=60,
        ),
        num_locations=160,
        room=5,
        adapters=make_adapters(8),
        growth=GrowthReserve(1, 1),
    )
    simulate(world, page_size, 200)
    assert world.scheduler.stats().retractions_total > 0


@pytest.mark.parametrize("eviction", ["lfu", "fifo"])
def test_other_evictions_and_no_adapters(eviction: str) -> None:
    world = World(
        cache=CacheConfig(page_size=4, eviction=eviction),  # type: ignore[arg-type]
        num_locations=160,
        growth=GrowthReserve(1, 1),
    )
    simulate(world, 3, 300)
    assert world.scheduler.stats().cached_tokens_total > 0


@pytest.mark.parametrize("policy", ["fcfs", "longest-prefix", "priority", "fair-share"])
@pytest.mark.parametrize(("page_size", "prefix_cache"), [(1, True), (4, True), (4, False), (16, True)])
def test_steps_planned_ahead_of_their_tokens(policy: str, page_size: int, prefix_cache: bool) -> None:
    world = World(
        cache=CacheConfig(page_size=page_size, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(max_running=8, max_step_tokens=32, prefill_chunk=7, policy=policy),  # type: ignore[arg-type]
        num_locations=160,
        room=5,
        adapters=make_adapters(8),
        growth=GrowthReserve(1, 1),
        overlap=True,
    )
    simulate(world, 7 + page_size, 400, check_every=5)
    assert world.scheduler.stats().retractions_total > 0
    assert sum(batch.is_ahead for batch in world.batches) > len(world.batches) / 2
    assert world.model.num_wasted > 10, "the run was meant to have ends that nobody could foresee"
