"""Retraction: when KV runs out the last in rank gives way, and loses nothing."""

from __future__ import annotations

from scheduler_fakes import answer_alone
from scheduler_simulation import World

from loraserve.config import SchedulerConfig
from loraserve.scheduler.admission import GrowthReserve
from loraserve.scheduler.request import RequestState
from loraserve.scheduler.stats import Refusal


def crowded(**fields: object) -> World:
    config = SchedulerConfig(**{"max_running": 4, "max_step_tokens": 16, "prefill_chunk": 8, **fields})  # type: ignore[arg-type]
    return World(num_locations=64, scheduler=config, growth=GrowthReserve(0, 0))


def reasons(world: World) -> dict[str, Refusal]:
    return {why.request_id: why.reason for why in world.scheduler.explain_waiting()}


def test_the_youngest_gives_way_and_loses_nothing() -> None:
    world = crowded(max_running=2)
    first = world.add("a", [1, 2, 3, 4], max_tokens=40)
    second = world.add("b", [5, 6, 7, 8], max_tokens=40)
    third = world.add("c", [9], max_tokens=2)
    world.until(lambda: second.num_retractions)
    assert second.state == RequestState.WAITING
    assert (second.row, second.num_computed) == (None, 0)
    emitted = list(second.output)
    assert emitted
    assert reasons(world) == {"b": Refusal.KV_PAGES, "c": Refusal.QUEUED}
    world.run()
    assert first.num_retractions == 0
    assert second.output[: len(emitted)] == emitted
    assert second.output == answer_alone(second, 96)
    assert third.output == answer_alone(third, 96)
    assert world.scheduler.stats().retractions_total == second.num_retractions
    order = [e.request.id for batch in world.batches for e in batch.entries if not e.is_decode]
    assert order.index("b", 2) < order.index("c"), "a retracted request is in front of the queue"


def test_a_retracted_request_finds_its_pages_again() -> None:
    world = crowded(max_running=2)
    world.add("a", [1, 2, 3, 4], max_tokens=22)
    second = world.add("b", [5] * 20, max_tokens=35)
    world.until(lambda: second.num_retractions)
    known = second.num_tokens
    world.until(lambda: second.state == RequestState.RUNNING)
    batch = world.batches[-1]
    start = next(entry.start for entry in batch.entries if entry.request is second)
    assert 0 < start < known
    assert second.num_cached == 0, "usage counts the first admission only"
    world.run()


def test_low_priority_gives_way_before_the_youngest() -> None:
    world = crowded()
    low = world.add("low", [1, 2, 3, 4], max_tokens=40, priority=1)
    high = world.add("high", [5, 6, 7, 8], max_tokens=40)
    world.run()
    assert low.num_retractions > 0
    assert high.num_retractions == 0


def test_the_worst_gives_way_itself() -> None:
    world = crowded(max_running=2, prefill_chunk=16)
    old = world.add("old", [1] * 32, max_tokens=5)
    young = world.add("young", [2] * 28, max_tokens=24)
    world.until(lambda: young.num_retractions)
    assert old.num_tokens <= 36, "old has its 9 pages and asks for none; it was young that found no eighth"
    assert old.state == RequestState.RUNNING
    world.run()


def test_two_that_do_not_fit_together_both_finish() -> None:
    for seed in range(5):
        world = crowded(max_running=3)
        for name in "abc":
            world.add(name, [seed, ord(name)], max_tokens=62)
        world.run(max_steps=600)


def test_the_reserve_learns_from_retractions() -> None:
    growth = GrowthReserve()
    calm = growth.tokens
    growth.retracted()
    growth.retracted()
    assert growth.tokens == 4 * calm
    for _ in range(20):
        growth.retracted()
    assert growth.tokens == 1024
    for _ in range(1000):
        growth.relax()
    assert growth.tokens == calm


def test_the_reserve_shrinks_in_steps_without_retraction() -> None:
    growth = GrowthReserve(4, 64)
    growth.retracted()
    world = World(growth=growth, num_locations=512)
    world.add("r", [1], max_tokens=90)
    world.run()
    assert growth.tokens == 4
