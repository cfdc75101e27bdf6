"""Adapters that are not on the device: passed over, in turn, failing, leaving."""

from __future__ import annotations

import pytest
from scheduler_fakes import FakeAdapter, FakeGate
from scheduler_simulation import World

from loraserve.config import SchedulerConfig
from loraserve.errors import AdapterFailed, RequestAborted
from loraserve.scheduler.admission import GrowthReserve
from loraserve.scheduler.interfaces import AdapterState
from loraserve.scheduler.request import FinishReason, RequestState
from loraserve.scheduler.stats import Refusal


def world_of(room: int = 2, *, max_running: int = 4, **adapters: FakeAdapter) -> World:
    config = SchedulerConfig(max_running=max_running, max_step_tokens=32, prefill_chunk=16)
    return World(scheduler=config, room=room, adapters=adapters, num_locations=512)


def reasons(world: World) -> dict[str, Refusal]:
    return {why.request_id: why.reason for why in world.scheduler.explain_waiting()}


def test_a_missing_adapter_blocks_nobody_behind() -> None:
    world = world_of(slow=FakeAdapter(1, 0.2), quick=FakeAdapter(1, 0.0))
    slow = world.add("slow", [1], "slow", max_tokens=2)
    world.add("quick", [2], "quick", max_tokens=2)
    base = world.add("base", [3], max_tokens=2)
    world.step()
    assert base.state == RequestState.RUNNING
    assert reasons(world) == {"slow": Refusal.ADAPTER_LOADING, "quick": Refusal.ADAPTER_LOADING}
    assert world.gate.state("slow") == AdapterState.FETCHING, "it was asked for"
    world.until(lambda: slow.is_finished)
    ends = [name for name, seen in world.seen.items() if seen.ends]
    assert set(ends) == {"slow", "quick", "base"}
    assert world.seen["quick"].ends
    world.check_done()


def test_leases_are_held_exactly_while_running() -> None:
    world = world_of(a=FakeAdapter(1, 0.0), b=FakeAdapter(1, 0.0))
    request = world.add("r", [1], "a", "b", max_tokens=3)
    world.step()
    assert world.gate.leases == 0
    world.until(lambda: request.state == RequestState.RUNNING)
    assert [world.gate.adapters[v].leases for v in "ab"] == [1, 1]
    assert world.gate.wants == {}, "who runs wants nothing more"
    world.run()
    assert world.gate.leases == 0


def test_a_blend_takes_all_or_nothing() -> None:
    world = world_of(a=FakeAdapter(1, 0.0), b=FakeAdapter(1, 0.3))
    request = world.add("r", [1], "a", "b", max_tokens=3)
    for _ in range(10):
        world.step()
        assert request.state == RequestState.WAITING
        assert world.gate.leases == 0
    assert world.gate.state("a") == AdapterState.RESIDENT
    world.run()


def test_a_blend_that_loses_a_version_at_the_last_moment_holds_nothing() -> None:
    """What the gate said a moment ago is not a lease."""

    class FickleGate(FakeGate):
        """Takes b off the device when it is first asked for a lease on it."""

        def acquire(self, version: str) -> bool:
            if version == "b" and self.adapters["b"].used == 0:
                self.adapters["b"].used = 1
                self.adapters["b"].state = AdapterState.STAGED
            return super().acquire(version)

    adapters = {"a": FakeAdapter(1, 0.0), "b": FakeAdapter(1, 0.0)}
    world = World(room=2, adapters=adapters, gate_type=FickleGate)
    request = world.add("r", [1, 2, 3], "a", "b", max_tokens=3)
    world.until(lambda: adapters["b"].used)
    assert request.state == RequestState.WAITING
    assert world.gate.leases == 0
    assert world.cache.free_rows == 8
    assert reasons(world) == {"r": Refusal.ADAPTER_LOADING}
    world.run()


def test_adapters_are_asked_for_ahead_while_rows_are_full() -> None:
    world = world_of(max_running=1, a=FakeAdapter(1, 0.02))
    world.add("base", [1], max_tokens=20)
    world.step()
    later = world.add("later", [1], "a", max_tokens=2)
    for _ in range(6):
        world.step()
    assert world.gate.state("a") == AdapterState.RESIDENT
    assert later.passed_over_at is None, "nobody passed it"
    world.run()


def flood(world: World, limit_steps: int) -> tuple[int, bool]:
    """A stream of requests for `busy`, one for `cold` in between; steps until it runs, and whether base went on."""
    for i in range(3):
        world.add(f"w{i}", [i], "busy", max_tokens=30)
    for _ in range(5):
        world.step()
    cold = world.add("cold", [9], "cold", max_tokens=2)
    bases, base_ran = [], False
    for step in range(limit_steps):
        world.add(f"busy{step}", [step % 40], "busy", max_tokens=30)
        bases.append(world.add(f"base{step}", [step % 40], max_tokens=1))
        before = sum(base.admitted for base in bases)
        world.step()
        held = Refusal.ADAPTER_TURN in reasons(world).values()
        base_ran = base_ran or (held and sum(base.admitted for base in bases) > before)
        if cold.admitted:
            return step, base_ran
    return limit_steps, base_ran


def test_overtaking_is_bounded() -> None:
    world = world_of(room=1, max_running=8, busy=FakeAdapter(1, 0.0), cold=FakeAdapter(1, 0.0))
    steps, base_ran = flood(world, 400)
    # 0.5 s of overtaking are 50 steps; then the running ones end within their 30 tokens. As all rows are taken, those
    # that may ride get theirs only now, for 30 tokens more.
    assert 50 <= steps <= 50 + 2 * 30 + 10
    assert base_ran, "requests of the base hold no adapter pages and go on"
    world.run()


def test_without_the_limit_it_would_starve() -> None:
    world = World(
        scheduler=SchedulerConfig(max_running=8, max_step_tokens=32, prefill_chunk=16),
        room=1,
        adapters={"busy": FakeAdapter(1, 0.0), "cold": FakeAdapter(1, 0.0)},
        num_locations=512,
        wait_limit_s=1e9,
    )
    assert flood(world, 200)[0] == 200


def test_a_download_holds_no_turn() -> None:
    world = world_of(room=1, busy=FakeAdapter(1, 0.0), far=FakeAdapter(1, 5.0))
    world.add("far", [1], "far", max_tokens=1)
    for step in range(200):
        world.add(f"b{step}", [step % 40], "busy", max_tokens=1)
        world.step()
        assert Refusal.ADAPTER_TURN not in reasons(world).values()
    world.run()


def test_who_asked_before_the_holder_may_go_on() -> None:
    """Otherwise both wait for ever: the gate keeps what was asked for first, the turn keeps its user out."""
    world = world_of(room=2, max_running=1, a=FakeAdapter(2, 0.0), b=FakeAdapter(2, 0.0))
    world.add("base", [1], max_tokens=80)
    world.step()
    first, second = world.add("first", [1], "a", max_tokens=2), world.add("second", [1], "b", max_tokens=2)
    world.run(max_steps=400)
    assert first.order < second.order


def test_more_than_ride_may_go_on_if_they_asked_before_the_holder() -> None:
    """They do not count as riders: the gate keeps their adapter from the holder until the last of them is served."""
    config = SchedulerConfig(max_running=1, max_step_tokens=32, prefill_chunk=16, policy="priority")
    adapters = {"a": FakeAdapter(1, 0.0), "b": FakeAdapter(1, 0.0)}
    world = World(scheduler=config, num_locations=512, room=1, adapters=adapters)
    world.add("base", [1], max_tokens=10)
    early = [world.add(f"a{i}", [i], "a", max_tokens=60, priority=1) for i in range(4)]
    world.step()
    holder = world.add("b", [1], "b", max_tokens=2)
    world.until(lambda: world.turn.holders == [holder])
    assert sum(not request.admitted for request in early) > config.max_running
    world.until(lambda: holder.admitted)
    assert all(request.is_finished for request in early)
    world.run()


def test_a_failed_adapter_ends_its_requests_only() -> None:
    world = world_of(room=2, bad=FakeAdapter(1, 0.03, broken=True), good=FakeAdapter(1, 0.0))
    doomed = [world.add("x", [1], "bad"), world.add("y", [1], "good", "bad")]
    fine = world.add("z", [1], "good", max_tokens=2)
    world.run()
    for request in doomed:
        assert request.finish_reason == FinishReason.ERROR
        assert isinstance(request.error, AdapterFailed)
    assert fine.finish_reason == FinishReason.LENGTH
    again = world.add("again", [1], "bad")
    world.step()
    assert again.finish_reason == FinishReason.ERROR, "a known failure ends it at once"


def test_a_failure_is_told_at_once_even_when_rows_are_full() -> None:
    world = world_of(max_running=1, bad=FakeAdapter(1, 0.03, broken=True))
    running = world.add("base", [1], max_tokens=50)
    world.step()
    doomed = world.add("x", [1], "bad")
    for _ in range(6):
        world.step()
    assert doomed.finish_reason == FinishReason.ERROR
    assert not running.is_finished
    world.run()


def test_wants_end_with_the_last_request() -> None:
    world = world_of(a=FakeAdapter(1, 9.0))
    world.add("x", [1], "a")
    world.step()
    world.add("y", [1], "a")
    world.step()
    since = world.gate.wants["a"]
    world.scheduler.abort("x", FinishReason.ABORT)
    world.step()
    assert world.gate.wants["a"] > since, "now it is wanted since y asked"
    world.scheduler.abort("y", FinishReason.ABORT)
    assert world.gate.wants == {}
    world.run()


def test_abort_version_ends_all_its_users() -> None:
    world = world_of(max_running=2, a=FakeAdapter(1, 0.0), b=FakeAdapter(1, 0.0))
    world.add("warm", [1], "a", "b", max_tokens=1)
    world.run()
    users = [world.add("r1", [1], "a", max_tokens=50), world.add("r2", [1], "b", "a"), world.add("r3", [1], "a")]
    other = world.add("r4", [1], "b", max_tokens=2)
    batch = world.begin()
    assert batch is not None
    assert world.scheduler.abort_version("a", RequestAborted("unloaded")) == 3
    assert world.scheduler.abort_version("a", RequestAborted("unloaded")) == 0, "those in flight end already"
    world.finish(batch)
    world.listen()
    assert all(r.finish_reason == FinishReason.ABORT and isinstance(r.error, RequestAborted) for r in users)
    world.run()
    assert other.finish_reason == FinishReason.LENGTH


def test_forgetting_a_version_frees_its_kv_only() -> None:
    world = world_of(a=FakeAdapter(1, 0.0), b=FakeAdapter(1, 0.0))
    prompt = list(range(16))
    for name, versions in (("base", ()), ("a", ("a",)), ("b", ("b",)), ("ab", ("a", "b"))):
        world.add(name, prompt, *versions, max_tokens=1)
    world.run()
    assert world.cache.evictable_pages == 16
    assert world.scheduler.forget_version("a") == 8
    world.check_done()
    for name, versions, cached in (("base2", (), 12), ("a2", ("a",), 0), ("b2", ("b",), 12)):
        request = world.add(name, prompt, *versions, max_tokens=1)
        world.run()
        assert request.num_cached == cached


@pytest.mark.parametrize("versions", [(), ("a",)])
def test_retraction_gives_the_device_lease_back(versions: tuple[str, ...]) -> None:
    world = World(
        scheduler=SchedulerConfig(max_running=2, max_step_tokens=32, prefill_chunk=16),
        num_locations=64,
        room=1,
        adapters={"a": FakeAdapter(1, 0.0)},
        growth=GrowthReserve(0, 0),
    )
    world.add("old", [1] * 4, max_tokens=50)
    young = world.add("young", [2] * 4, *versions, max_tokens=50)
    world.until(lambda: young.num_retractions)
    assert world.gate.leases == 0
    world.run()
