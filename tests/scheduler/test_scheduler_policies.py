"""In which order each policy looks at waiting requests."""

import random

import pytest
from scheduler_simulation import World

from loraserve.config import SchedulerConfig
from loraserve.errors import ConfigError
from loraserve.sampling import SamplingParams
from loraserve.scheduler.policies import LOOKUP_WINDOW, OVERDUE_S, FairShare, make_policy
from loraserve.scheduler.queue import WaitingQueue
from loraserve.scheduler.request import Request


def make(name: str, order: int, **more: object) -> Request:
    return Request(name, [1] * 10, SamplingParams(), order=order, **more)  # type: ignore[arg-type]


def queue_of(*requests: Request, returned: tuple[Request, ...] = ()) -> WaitingQueue:
    queue = WaitingQueue()
    for request in requests:
        queue.add(request)
    for request in returned:
        queue.put_back(request)
    return queue


def names(policy: object, queue: WaitingQueue, now: float = 0.0) -> str:
    return "".join(request.id for request in policy.order(queue, now))  # type: ignore[attr-defined]


def test_fcfs_and_priority() -> None:
    a, b, c, d = make("a", 0), make("b", 1, priority=5), make("c", 2, priority=-1), make("d", 3)
    assert names(make_policy("fcfs", lambda r: 0), queue_of(b, c, d, returned=(a,))) == "abcd"
    assert names(make_policy("fcfs", lambda r: 0), queue_of(a, b, c, returned=(d,))) == "dabc"
    assert names(make_policy("priority", lambda r: 0), queue_of(a, b, c, returned=(d,))) == "cdab"


def test_longest_prefix_is_bounded_in_work_and_in_wait() -> None:
    looked = []

    def lookup(request: Request) -> int:
        looked.append(request.id)
        return {"b": 8, "c": 16}.get(request.id, 0)

    policy = make_policy("longest-prefix", lookup)
    a, b, c, d = (make(name, i, arrival=50.0) for i, name in enumerate("abcd"))
    assert names(policy, queue_of(a, b, c, returned=(d,)), 50.0) == "dcba"
    a.arrival -= OVERDUE_S
    assert names(policy, queue_of(a, b, c, returned=(d,)), 50.0) == "dacb"
    looked.clear()
    many = [make(f"{i},", i, arrival=50.0) for i in range(3 * LOOKUP_WINDOW)]
    assert names(policy, queue_of(*many), 50.0) == "".join(r.id for r in many)
    assert len(looked) == LOOKUP_WINDOW


def test_fair_share_takes_turns_and_charges() -> None:
    policy = FairShare()
    requests = [make(name, i, tenant=name[0]) for i, name in enumerate(["a0", "a1", "a2", "b0", "b1"])]
    for request in requests:
        policy.added(request)
    queue, seen = queue_of(*requests), []
    for request in policy.order(queue, 0.0):
        seen.append(request.id)
        policy.admitted(request)  # 10 tokens each
    assert seen == ["a0", "b0", "a1", "b1", "a2"]
    assert (policy.served("a"), policy.served("b")) == (30, 20)
    policy.sampled(requests[3])
    assert policy.served("b") == 22, "output counts twice"
    cached = make("b2", 9, tenant="b", num_cached=7)
    policy.added(cached)
    policy.admitted(cached)
    assert policy.served("b") == 25, "cached tokens cost nothing"


def test_fair_share_lifts_who_comes_back_and_forgets_no_debt() -> None:
    policy = FairShare()
    busy = [make(f"a{i}", i, tenant="a") for i in range(3)]
    for request in busy:
        policy.added(request)
        policy.admitted(request)
    newcomer = make("b", 9, tenant="b")
    policy.added(newcomer)
    assert policy.served("b") == 30, "lifted to the least served active tenant"
    policy.admitted(newcomer)
    policy.ended(newcomer)
    again = make("b", 10, tenant="b")
    policy.added(again)
    assert policy.served("b") == 40, "who is ahead stays ahead"
    policy.ended(again)
    for request in busy:
        policy.ended(request)
    first = make("c", 11, tenant="c")
    policy.added(first)
    assert policy.served("c") == 30, "the level outlives the last active tenant"


def test_fair_share_forgets_idle_tenants() -> None:
    policy = FairShare()
    for i in range(5000):
        request = make(f"r{i}", i, tenant=f"t{i}")
        policy.added(request)
        policy.admitted(request)
        policy.ended(request)
    assert len(policy._served) < 1100


def test_a_flood_of_one_tenant_does_not_starve_another() -> None:
    def wait_of_b(policy: str) -> int:
        config = SchedulerConfig(max_running=4, max_step_tokens=64, prefill_chunk=16, policy=policy)  # type: ignore[arg-type]
        world = World(scheduler=config, num_locations=1024)
        rng = random.Random(0)
        for i in range(40):
            world.add(f"a{i}", [rng.randrange(50) for _ in range(10)], tenant="a", max_tokens=10)
        for _ in range(5):
            world.step()
        last = world.add("b", [1, 2, 3], tenant="b", max_tokens=2)
        before = len(world.batches)
        world.until(lambda: last.is_finished)
        steps = len(world.batches) - before
        world.run()
        return steps

    assert wait_of_b("fair-share") * 4 < wait_of_b("fcfs")


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="fair-share"):
        make_policy("random", lambda r: 0)
