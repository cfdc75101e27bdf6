"""More adapters than fit: how long anybody waits, and how many requests an adapter serves when it comes in."""

from __future__ import annotations

import random

import pytest
from scheduler_fakes import FakeAdapter
from scheduler_simulation import World

from loraserve.config import SchedulerConfig
from loraserve.scheduler.request import Request

STEP_S, LIMIT_S = 0.05, 2.0
RUN_STEPS = 20  # of every request: a prompt of one chunk, 20 tokens
LOAD = 0.25  # requests in a step, five in a second


def crowd(num_adapters: int, room: int, limit_s: float = LIMIT_S) -> World:
    """A world with rows and KV for everybody, but room for few adapters."""
    config = SchedulerConfig(max_running=40, max_step_tokens=256, prefill_chunk=16)
    adapters = {f"v{i}": FakeAdapter(1, 0.0) for i in range(num_adapters)}
    return World(
        scheduler=config, num_locations=2048, room=room, adapters=adapters, wait_limit_s=limit_s, step_s=STEP_S
    )


@pytest.mark.parametrize(("num_adapters", "room"), [(12, 4), (8, 2), (4, 1)])
def test_every_wait_is_within_the_bound(num_adapters: int, room: int) -> None:
    """All adapters are equally popular, so nearly every request meets one that is not on the device."""
    world = crowd(num_adapters, room)
    rng = random.Random(0)
    waiting: dict[Request, int] = {}
    longest = num_steps = 0
    while num_steps < 500 or world.scheduler.has_work():
        if num_steps < 500 and rng.random() < LOAD:
            version = f"v{rng.randrange(num_adapters)}"
            waiting[world.add(f"r{num_steps}", [1, 2, num_steps % 50], version, max_tokens=RUN_STEPS)] = num_steps
        world.step()
        num_steps += 1
        for request in [request for request in waiting if request.admitted]:
            longest = max(longest, num_steps - waiting.pop(request))
    world.check_done()
    limit = round(LIMIT_S / STEP_S) + 1  # the limit must have passed, not only be reached
    turn = RUN_STEPS + 1  # what runs at its beginning ends, and a step to change adapters
    assert longest <= limit + num_adapters * turn
    # Throughput is kept: the backlog never grows beyond what the bound allows.
    assert num_steps <= 500 + limit + num_adapters * turn + RUN_STEPS
    # Who comes in stays for a run at least; each of the `room` places changes hands once in a turn.
    assert world.gate.uploads <= room * (num_steps // turn + 1)


def test_all_that_wait_for_an_adapter_ride_with_the_first() -> None:
    """One swap serves them all, although the holder of the next turn asked before most of them."""
    world = crowd(3, 1, limit_s=0.2)
    world.add("warm", [1], "v0", max_tokens=60)
    world.step()
    world.step()
    for i in range(30):
        world.add(f"r{i}", [1, i], ("v1", "v2")[i % 2], max_tokens=RUN_STEPS)
        world.step()
    world.run()
    assert world.gate.uploads == 3, "one for each adapter"


def test_no_more_than_a_full_house_rides() -> None:
    """However many wait for the adapter that is here, the holder comes after `max_running` of them."""
    config = SchedulerConfig(max_running=3, max_step_tokens=32, prefill_chunk=16)
    adapters = {"hot": FakeAdapter(1, 0.0), "cold": FakeAdapter(1, 0.0)}
    world = World(scheduler=config, num_locations=512, room=1, adapters=adapters, wait_limit_s=0.5)
    hot = [world.add(f"w{i}", [i], "hot", max_tokens=7 + i) for i in range(3)]
    for _ in range(3):
        world.step()
    cold = world.add("cold", [9], "cold", max_tokens=2)
    rode: list[Request] = []
    while not cold.admitted:
        assert len(hot) < 200, "the turn never ends"
        while sum(not request.admitted for request in hot) < 12:
            hot.append(world.add(f"h{len(hot)}", [len(hot) % 50], "hot", max_tokens=8))
        admitted = [request for request in hot if request.admitted]
        world.step()
        if world.turn.holders == [cold]:
            rode += [request for request in hot if request.admitted and request not in admitted]
    assert len(rode) == 3
    world.run()


def test_who_comes_during_a_turn_does_not_ride() -> None:
    """Else a stream of requests for an adapter that is here would keep the turn from ending."""
    world = crowd(2, 1)
    for i in range(2):
        world.add(f"w{i}", [i], "v0", max_tokens=RUN_STEPS)
    world.step()
    world.step()
    cold = world.add("cold", [9], "v1", max_tokens=RUN_STEPS)
    late: list[Request] = []
    while not cold.admitted:
        assert len(late) < 100, "the turn never ends"
        name = f"late{len(late)}"
        late.append(world.add(name, [3], "v0", max_tokens=RUN_STEPS))
        was_turn = world.turn.holders == [cold]
        world.step()
        assert not (was_turn and late[-1].admitted), f"{name} came during the turn"
    assert any(request.admitted for request in late), "before the turn they were let in"
    world.run()
