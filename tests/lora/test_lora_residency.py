"""Residency: real files, a real loader thread, a small pool, a clock that the tests turn."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_lora_weights import rewrite
from tiny_adapters import FILE, LINEAR_KINDS, TinyAdapter, make_adapter, make_pool, read_back, uniform_ranks

from loraserve.errors import AdapterFault, AdapterNotFound, AdapterRefused, BlendTooLarge, LoraserveError
from loraserve.kernels.metadata import Kind
from loraserve.lora.pool import LoraPool
from loraserve.lora.residency import (
    AdapterDropped,
    AdapterFailedEvent,
    AdapterReady,
    AdapterResidency,
    AdapterState,
    ResidencyEvent,
    Tier,
)
from loraserve.lora.states import TRANSITIONS, AdapterEntry

ABSENT, FETCHING, STAGED, RESIDENT, FAILED = AdapterState
PATIENCE_S = 20.0


class FakeClock:
    """Time that passes only when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """A residency with its pool and clock, and what an engine does with them."""

    residency: AdapterResidency
    pool: LoraPool
    clock: FakeClock
    events: list[ResidencyEvent] = field(default_factory=list)

    def add(self, version: str, adapter: TinyAdapter, pinned: bool = False) -> None:
        self.residency.register(version, adapter.folder, adapter.spec, pinned)

    def step(self, max_bytes: int = 1 << 20) -> None:
        self.residency.advance(max_bytes)
        self.residency.check()
        self.events += self.residency.take_events()

    def until(self, condition: Callable[[], bool], max_bytes: int = 1 << 20) -> None:
        """Step until a condition holds; the loader thread needs real time."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            self.step(max_bytes)
            time.sleep(0.0005)

    def settle(self) -> None:
        self.step()
        self.until(lambda: not self.residency.busy)

    def ready(self, version: str, adapter: TinyAdapter, pinned: bool = False) -> None:
        self.add(version, adapter, pinned)
        self.until(lambda: AdapterReady(version) in self.events)

    def want(self, version: str, since: float | None = None) -> None:
        self.residency.want(version, self.clock() if since is None else since)

    def resident(self, version: str) -> bool:
        return self.residency.state(version) == "resident"

    def bring(self, version: str) -> None:
        self.want(version)
        self.until(lambda: self.resident(version))
        self.residency.unwant(version)

    def lease(self, version: str) -> None:
        self.bring(version)
        assert self.residency.acquire(version)

    def dropped(self, version: str) -> bool:
        return AdapterDropped(version) in self.events


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make(pool: LoraPool, host_bytes: int = 1 << 30, **options: float) -> Bench:
        clock = FakeClock()
        residency = AdapterResidency(pool, host_bytes, clock=clock, **options)  # type: ignore[arg-type]
        benches.append(Bench(residency, pool, clock))
        return benches[-1]

    before = threading.active_count()
    yield make
    for bench in benches:
        bench.residency.close()
    assert threading.active_count() == before, "a loader thread outlived its residency"


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyAdapter]:
    """Ten adapters of equal size."""
    root = tmp_path_factory.mktemp("ten")
    return {f"v{i}": make_adapter(root / str(i), uniform_ranks(4), seed=i) for i in range(10)}


def pool_for(adapters: Sequence[TinyAdapter], **options: int) -> LoraPool:
    """The smallest pool that holds these adapters together."""
    for size in range(4096, 1 << 20, 256):
        pool = make_pool(size, **options)
        if pool.fits_empty(*(adapter.spec for adapter in adapters)):
            return pool
    raise AssertionError("no such pool")


@pytest.fixture
def three(ten: dict[str, TinyAdapter]) -> LoraPool:
    """A pool with room for three of the ten and not for four."""
    pool = pool_for(list(ten.values())[:3], max_slots=10)
    assert not pool.fits_empty(*(adapter.spec for adapter in list(ten.values())[:4]))
    return pool


def content_is(bench: Bench, version: str, adapter: TinyAdapter) -> bool:
    slot = bench.residency.slot(version)
    for (kind, layer), expected in adapter.factors.items():
        found = read_back(bench.pool, slot, kind, layer)
        if found is None or not all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)):
            return False
    return True


# -- states -------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(list(AdapterState)), max_size=30))
def test_only_the_moves_of_the_table_are_possible(wishes: list[AdapterState]) -> None:
    entry = AdapterEntry("v", Path(), None, False, 0, {}, 0, 0)  # type: ignore[arg-type]
    for wish in wishes:
        before = entry.state
        if wish in TRANSITIONS[before]:
            entry.move(wish)
            assert entry.state is wish
        else:
            with pytest.raises(RuntimeError, match="cannot go"):
                entry.move(wish)
            assert entry.state is before


def test_the_table_names_every_state_and_leaves_none_for_good() -> None:
    assert set(TRANSITIONS) == set(AdapterState)
    for state in AdapterState:
        reached, frontier = {state}, [state]
        while frontier:
            for after in TRANSITIONS[frontier.pop()] - reached:
                reached.add(after)
                frontier.append(after)
        assert reached == set(AdapterState), f"from {state} not every state can be reached"


def test_a_life(make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool) -> None:
    bench = make_bench(three)
    r = bench.residency
    assert r.state("v0") == "failed"
    assert isinstance(r.failure("v0"), AdapterNotFound)
    bench.ready("v0", ten["v0"])
    assert r.state("v0") == "staged"
    assert r.info("v0").tier is Tier.HOST
    assert not r.acquire("v0")
    bench.want("v0")
    bench.until(lambda: bench.resident("v0"))
    assert r.acquire("v0")
    r.unwant("v0")
    assert content_is(bench, "v0", ten["v0"])
    info = r.info("v0")
    assert (info.tier, info.leases, info.loads) == (Tier.DEVICE, 1, 1)
    assert info.device_bytes == r.stats().device_bytes == three.bytes_needed(ten["v0"].spec)
    assert info.host_bytes == ten["v0"].spec.num_bytes
    r.release("v0")
    r.unregister("v0")
    bench.step()
    assert bench.events == [AdapterReady("v0"), AdapterDropped("v0")]
    stats = r.stats()
    assert (stats.registered, stats.device_bytes, stats.host_bytes, stats.leases) == (0, 0, 0, 0)
    assert not r.knows("v0")
    with pytest.raises(AdapterNotFound):
        r.unregister("v0")


def test_misuse_is_an_error(make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool) -> None:
    bench = make_bench(three)
    r = bench.residency
    bench.ready("v0", ten["v0"])
    for call in (lambda: r.release("v0"), lambda: r.release("nobody"), lambda: r.unhold("v0")):
        with pytest.raises(ValueError, match="not"):
            call()
    with pytest.raises(AdapterNotFound):
        r.hold("nobody")
    bench.bring("v0")
    with pytest.raises(RuntimeError, match="no device lease"):
        r.slot("v0")
    assert r.acquire("v0")
    with pytest.raises(RuntimeError, match="leases"):
        r._device.evict(r._entries["v0"])
    bench.step()
    assert bench.resident("v0")


def test_twenty_wants_one_staging(make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool) -> None:
    bench = make_bench(three, host_bytes=1)  # nothing stays on the host: the want must read the file
    bench.ready("v0", ten["v0"])
    bench.settle()
    assert bench.residency.state("v0") == "absent"
    assert bench.residency.stats().stagings == 1
    for i in range(20):
        bench.want("v0", 50.0 + i)
        bench.step()
    bench.until(lambda: bench.resident("v0"))
    stats = bench.residency.stats()
    assert (stats.stagings, stats.uploads, stats.misses) == (2, 1, 1)


# -- the device tier ----------------------------------------------------------------------------------------------


def test_leased_adapters_stay_and_the_least_recently_used_goes(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    for version in ("v0", "v1", "v2", "v3"):
        bench.ready(version, ten[version])
    for version in ("v0", "v1", "v2"):
        bench.clock.now += 1
        bench.lease(version)
    bench.want("v3")
    for _ in range(20):
        bench.step()
    assert bench.residency.state("v3") == "staged", "everything is leased"
    bench.residency.release("v1")
    bench.clock.now += 1
    bench.residency.release("v0")
    bench.until(lambda: bench.resident("v3"))
    assert [bench.resident(f"v{i}") for i in range(3)] == [True, False, True], "v1 was released first"
    assert content_is(bench, "v2", ten["v2"])
    assert bench.residency.stats().evictions == 1


def test_no_step_copies_more_than_it_may(make_bench: MakeBench, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", uniform_ranks(16, LINEAR_KINDS) | {(Kind.LM_HEAD, 0): 16})
    bench = make_bench(pool_for([adapter]))
    bench.ready("a", adapter)
    bench.want("a")
    steps, written = 0, 0
    while not bench.resident("a"):
        bench.step(max_bytes=4096)
        now = int((~bench.pool.storage.isnan()).sum()) * 4
        assert now - written <= 4096
        steps, written = steps + 1, now
    assert written == adapter.spec.num_bytes
    assert steps >= written // 4096


def test_room_for_one_piece_is_shared_by_uploads(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    for version in ("v0", "v1"):
        bench.ready(version, ten[version])
    bench.want("v0", 10.0)
    bench.want("v1", 9.0)
    size = ten["v0"].spec.num_bytes
    assert bench.residency.advance(size - 4)
    assert not bench.resident("v1"), "four bytes are missing"
    assert bench.residency.advance(8)
    assert bench.resident("v1"), "the longer wait comes first"
    assert not bench.resident("v0")
    assert not bench.residency.advance(size)
    assert bench.resident("v0")


def test_wanted_earlier_is_never_evicted_for_wanted_later(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    for i in range(5):
        bench.ready(f"v{i}", ten[f"v{i}"])
    for i in range(3):
        bench.want(f"v{i}", 10.0 + i)
    bench.until(lambda: all(bench.resident(f"v{i}") for i in range(3)))
    bench.want("v3", 20.0)
    for _ in range(10):
        bench.step()
    assert not bench.resident("v3")
    bench.want("v4", 11.5)
    bench.until(lambda: bench.resident("v4"))
    assert [bench.resident(f"v{i}") for i in range(4)] == [True, True, False, False], "v2 is wanted latest"


def test_the_first_in_line_is_overtaken_a_bounded_number_of_times(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], tmp_path: Path
) -> None:
    large = make_adapter(tmp_path / "large", uniform_ranks(12), seed=99)
    pool = pool_for([large], max_slots=10)
    assert pool.fits_empty(*(ten[f"v{i}"].spec for i in range(3)))
    bench = make_bench(pool, max_overtakes=2)
    for version, adapter in [("large", large), *ten.items()]:
        bench.ready(version, adapter)
    bench.lease("v0")
    bench.want("large", 1.0)
    running = ["v0"]
    for i in range(1, 10):
        bench.want(f"v{i}", 1.0 + i)
        for _ in range(5):
            bench.step()
        if bench.resident(f"v{i}"):
            assert bench.residency.acquire(f"v{i}")
            bench.residency.unwant(f"v{i}")
            running.append(f"v{i}")
        if len(running) > 1:
            bench.residency.release(running.pop(0))
    assert not bench.resident("large")
    assert bench.residency.stats().uploads == 1 + 2, "two went ahead, then all waited"
    bench.residency.release(running.pop())
    bench.until(lambda: bench.resident("large"))


def test_a_deadlock_of_earlier_wants_and_pins_is_broken(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three, last_resort_s=1.0)
    for i in range(4):
        bench.ready(f"v{i}", ten[f"v{i}"], pinned=i == 0)
    bench.settle()
    assert bench.resident("v0"), "a pinned adapter comes by itself"
    bench.want("v1", 1.0)
    bench.want("v2", 1.0)
    bench.until(lambda: bench.resident("v1") and bench.resident("v2"))
    bench.want("v3", 5.0)
    for _ in range(5):
        bench.step()
    assert not bench.resident("v3")
    bench.clock.now += 0.9
    bench.step()
    assert not bench.resident("v3")
    assert bench.residency.acquire("v1")
    bench.clock.now += 0.2
    bench.step()
    assert not bench.resident("v3"), "a lease will end by itself"
    bench.residency.release("v1")
    bench.step()
    assert not bench.resident("v3"), "whoever wants v1 and v2 may come any moment"
    bench.clock.now += 1.0
    bench.until(lambda: bench.resident("v3"))
    assert not bench.resident("v0"), "the pin gives way first"
    assert bench.resident("v1")
    assert bench.resident("v2")


def test_scattered_pages_are_put_side_by_side(make_bench: MakeBench, tmp_path: Path) -> None:
    small = {f"s{i}": make_adapter(tmp_path / str(i), {(Kind.K, 0): 4}, seed=i) for i in range(6)}
    large = make_adapter(tmp_path / "large", uniform_ranks(12, [Kind.Q]), seed=9)
    pool = pool_for([large, small["s0"], small["s3"]], max_slots=10)
    bench = make_bench(pool)
    for version, adapter in [*small.items(), ("large", large)]:
        bench.ready(version, adapter)
    for version in small:
        bench.bring(version)
    bench.want("s0", 1.0)
    bench.want("s3", 2.0)
    idle = [bench.residency._entries[version].held for version in ("s1", "s2", "s4", "s5")]
    slots = [held.slot for held in idle if held is not None]
    assert not pool.fits(pool.layout.demand(large.spec), slots), (
        "the pages that stay lie in two slabs where one would do"
    )
    bench.want("large", 3.0)
    bench.until(lambda: all(bench.resident(version) for version in ("s0", "s3", "large")))
    for version, adapter in (("s0", small["s0"]), ("s3", small["s3"]), ("large", large)):
        assert bench.residency.acquire(version)
        assert content_is(bench, version, adapter)


def test_a_pin_outlives_what_is_used_later(make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool) -> None:
    bench = make_bench(three)
    bench.ready("v0", ten["v0"], pinned=True)
    bench.until(lambda: bench.resident("v0"))
    for i in range(1, 7):
        bench.clock.now += 1
        bench.ready(f"v{i}", ten[f"v{i}"])
        bench.bring(f"v{i}")
    assert bench.resident("v0")
    bench.residency.set_pinned("v0", False)
    for i in range(1, 5):
        bench.clock.now += 1
        bench.bring(f"v{i}")
    assert not bench.resident("v0")


def test_blends_that_cannot_be_together_are_refused(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    for i in range(4):
        bench.ready(f"v{i}", ten[f"v{i}"])
    bench.residency.require_room(["v0", "v1", "v2", "v0"])
    with pytest.raises(BlendTooLarge, match="4 adapters"):
        bench.residency.require_room(["v0", "v1", "v2", "v3"])
    with pytest.raises(AdapterNotFound):
        bench.residency.require_room(["nobody"])


# -- the host tier ------------------------------------------------------------------------------------------------


def test_the_host_budget_holds_and_evicted_copies_are_read_again(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    budget = 2 * ten["v0"].spec.num_bytes
    bench = make_bench(three, host_bytes=budget)
    for version, adapter in ten.items():
        bench.add(version, adapter)

    def all_ready() -> bool:
        assert bench.residency.stats().host_bytes <= budget
        return {event.version for event in bench.events if isinstance(event, AdapterReady)} == set(ten)

    bench.until(all_ready)
    stats = bench.residency.stats()
    assert (stats.staged, stats.absent) == (2, 8)
    assert stats.host_evictions == 8
    for version in [*ten, *ten]:
        bench.clock.now += 1
        bench.lease(version)
        assert content_is(bench, version, ten[version])
        bench.residency.release(version)
        assert bench.residency.stats().host_bytes <= budget


def test_a_copy_wanted_later_gives_way_to_one_wanted_earlier(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    """Else a blend whose half is resident and a later want with the only host room would wait for each other."""
    bench = make_bench(three, host_bytes=ten["v0"].spec.num_bytes)
    for i in range(5):
        bench.ready(f"v{i}", ten[f"v{i}"])
    for i in range(3):
        bench.lease(f"v{i}")
    bench.want("v3", 20.0)
    bench.until(lambda: bench.residency.state("v3") == "staged")
    bench.want("v4", 30.0)
    for _ in range(20):
        bench.step()
    assert bench.residency.state("v4") == "fetching", "v3 is first"
    bench.want("v4", 10.0)
    bench.until(lambda: bench.residency.state("v4") == "staged")
    assert bench.residency.state("v3") == "fetching"
    for i in range(3):
        bench.residency.release(f"v{i}")
    bench.until(lambda: bench.resident("v3") and bench.resident("v4"))


def test_an_adapter_larger_than_the_host_budget_passes_through(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], tmp_path: Path
) -> None:
    large = make_adapter(tmp_path / "large", uniform_ranks(8), seed=99)
    bench = make_bench(pool_for([large]), host_bytes=ten["v0"].spec.num_bytes)
    bench.ready("v0", ten["v0"])
    bench.ready("large", large)
    bench.settle()
    assert bench.residency.stats().host_bytes <= ten["v0"].spec.num_bytes
    assert bench.residency.state("large") == "absent"
    bench.lease("large")
    bench.settle()
    assert bench.residency.stats().host_bytes == 0
    assert content_is(bench, "large", large)
    bench.residency.release("large")
    bench.bring("v0")


def test_wanted_adapters_are_staged_before_registered_ones(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    for version, adapter in ten.items():
        bench.add(version, adapter)
    bench.want("v9")
    bench.until(lambda: bench.resident("v9"))
    bench.settle()
    order = [event.version for event in bench.events if isinstance(event, AdapterReady)]
    assert order.index("v9") <= 4, f"only what the loader already had comes first: {order}"


# -- leaving ------------------------------------------------------------------------------------------------------


def test_unregister_waits_for_leases_holds_and_wants(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    r = bench.residency
    bench.ready("v0", ten["v0"])
    r.hold("v0")
    bench.lease("v0")
    r.unregister("v0")
    assert not r.knows("v0")
    with pytest.raises(AdapterNotFound):
        r.hold("v0")
    for _ in range(3):
        bench.step()
    assert content_is(bench, "v0", ten["v0"])
    r.release("v0")  # retracted: the request waits again, and must still get its adapter
    bench.step()
    assert not bench.dropped("v0")
    bench.want("v0")
    assert r.acquire("v0")
    r.unwant("v0")
    r.unhold("v0")
    bench.step()
    assert not bench.dropped("v0")
    r.release("v0")
    bench.step()
    assert bench.dropped("v0")
    assert bench.pool.stats().used_bytes == 0
    bench.ready("v0", ten["v0"])


def test_unregister_while_it_is_fetched_or_copied(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    for version, adapter in ten.items():
        bench.add(version, adapter)
        bench.residency.unregister(version)
    bench.until(lambda: all(bench.dropped(version) for version in ten))
    assert bench.residency.stats().registered == 0
    assert bench.residency.stats().host_bytes == 0
    bench.events.clear()
    bench.ready("v0", ten["v0"])
    bench.want("v0")
    bench.step(max_bytes=100)
    assert bench.residency.stats().uploading == 1
    bench.residency.unregister("v0")
    bench.step(max_bytes=100)
    assert not bench.dropped("v0"), "it is still wanted"
    bench.residency.unwant("v0")
    bench.step()
    assert bench.dropped("v0")
    assert bench.pool.stats().used_slots == 0


def test_registering_again_keeps_what_was_leaving(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    bench.ready("v0", ten["v0"])
    bench.lease("v0")
    bench.residency.unregister("v0")
    bench.events.clear()
    bench.add("v0", ten["v0"])
    bench.step()
    assert bench.events == [AdapterDropped("v0"), AdapterReady("v0")]
    bench.residency.release("v0")
    bench.step()
    assert bench.residency.knows("v0")
    assert bench.residency.stats().stagings == 1
    # Even while a cancelled staging is still with the loader.
    bench.add("v1", ten["v1"])
    bench.residency.unregister("v1")
    bench.add("v1", ten["v1"])
    bench.until(lambda: AdapterReady("v1") in bench.events)


def test_two_hundred_cycles_leave_nothing(make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool) -> None:
    bench = make_bench(three)
    process = psutil.Process(os.getpid())
    rss = 0
    for cycle in range(200):
        version = f"v{cycle % 10}"
        bench.add(version, ten[version])
        if cycle % 3:
            bench.lease(version)
            bench.residency.release(version)
        bench.residency.unregister(version)
        bench.until(lambda version=version: bench.dropped(version))  # type: ignore[misc]
        bench.events.clear()
        stats = bench.residency.stats()
        assert (stats.host_bytes, stats.device_bytes, stats.registered) == (0, 0, 0)
        if cycle == 50:
            rss = process.memory_info().rss
    assert process.memory_info().rss - rss < 8 << 20
    bench.residency.check()
    assert bench.pool.stats().lent_bytes == 0


# -- failures -----------------------------------------------------------------------------------------------------


def failed(bench: Bench, version: str) -> LoraserveError | None:
    return next((e.error for e in bench.events if isinstance(e, AdapterFailedEvent) and e.version == version), None)


def test_an_adapter_that_never_fits_is_refused_at_once(make_bench: MakeBench, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", uniform_ranks(16, LINEAR_KINDS))
    bench = make_bench(make_pool(20 * 1024))
    with pytest.raises(AdapterRefused, match="LoRA pool") as caught:
        bench.add("a", adapter)
    assert caught.value.fault is AdapterFault.ADAPTER_TOO_LARGE
    assert not bench.residency.knows("a")
    bench.step()
    assert bench.events == []


def test_a_refused_staging_is_an_event_and_harms_nobody(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool, tmp_path: Path
) -> None:
    bad = make_adapter(tmp_path / "bad", uniform_ranks(4))
    rewrite(bad.folder, "q.0.a", (0, 0), float("nan"))
    bench = make_bench(three)
    bench.add("bad", bad)
    bench.want("bad")
    bench.add("v0", ten["v0"])
    bench.until(lambda: failed(bench, "bad") is not None)
    error = failed(bench, "bad")
    assert isinstance(error, AdapterRefused)
    assert error.fault is AdapterFault.NON_FINITE
    assert bench.residency.failure("bad") is error
    bench.lease("v0")
    assert content_is(bench, "v0", ten["v0"])
    assert bench.residency.stats().host_bytes == ten["v0"].spec.num_bytes
    bench.residency.unregister("bad")
    bench.residency.unwant("bad")
    bench.step()
    assert bench.dropped("bad")


def test_files_that_vanish_or_change_are_noticed_and_tried_again(
    make_bench: MakeBench, three: LoraPool, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "a", uniform_ranks(4))
    original = (adapter.folder / FILE).read_bytes()
    bench = make_bench(three, host_bytes=1)
    bench.ready("a", adapter)
    bench.settle()
    (adapter.folder / FILE).unlink()
    bench.want("a")
    bench.until(lambda: bench.residency.state("a") == "failed")
    bench.residency.unwant("a")
    error = failed(bench, "a")
    assert isinstance(error, AdapterRefused)
    assert error.fault is AdapterFault.MISSING_WEIGHTS
    (adapter.folder / FILE).write_bytes(original[:-4] + b"\0\0\0\1")
    bench.clock.now += 0.9
    assert bench.residency.state("a") == "failed", "too early"
    bench.clock.now += 0.2
    assert bench.residency.state("a") == "absent"
    assert bench.residency.failure("a") is None
    bench.events.clear()
    bench.want("a")
    bench.until(lambda: bench.residency.state("a") == "failed")
    error = failed(bench, "a")
    assert isinstance(error, AdapterRefused)
    assert error.fault is AdapterFault.CORRUPT_WEIGHTS
    bench.clock.now += 1.5
    assert bench.residency.state("a") == "failed", "the back-off grows"
    (adapter.folder / FILE).write_bytes(original)
    bench.events.clear()
    bench.add("a", adapter)  # anew: no back-off
    bench.until(lambda: AdapterReady("a") in bench.events)
    bench.until(lambda: bench.resident("a"))
    assert bench.residency.acquire("a")
    assert content_is(bench, "a", adapter)
    assert bench.residency.stats().failures == 2


def test_nothing_that_happens_in_the_loader_is_lost(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(three)
    bench.residency.register("odd", 7, ten["v0"].spec)  # type: ignore[arg-type]  # not a path: a bug of the caller
    bench.until(lambda: failed(bench, "odd") is not None)
    error = failed(bench, "odd")
    assert isinstance(error, AdapterRefused)
    assert "odd" in caplog.text
    bench.ready("v0", ten["v0"])


# -- everything at once -------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A waiting or running request of the walk."""

    versions: tuple[str, ...]
    since: float
    steps: int
    running: bool = False


@dataclass
class Walk:
    """A scheduler's habits with random requests, on ten adapters and room for three."""

    bench: Bench
    adapters: dict[str, TinyAdapter]
    rng: random.Random
    requests: list[Request] = field(default_factory=list)
    served: int = 0
    longest: float = 0.0

    def arrive(self) -> None:
        known = [version for version in self.adapters if self.bench.residency.knows(version)]
        if known:
            chosen = tuple(self.rng.sample(known, min(len(known), self.rng.choice((1, 1, 1, 2)))))
            for version in chosen:
                self.bench.residency.hold(version)
            self.requests.append(Request(chosen, self.bench.clock(), self.rng.randint(1, 6)))

    def churn(self) -> None:
        version = self.rng.choice(list(self.adapters))
        if self.bench.residency.knows(version):
            self.bench.residency.unregister(version)
        else:
            self.bench.add(version, self.adapters[version])

    def step(self) -> None:
        residency = self.bench.residency
        waiting = [request for request in self.requests if not request.running]
        for version in self.adapters:
            since = [request.since for request in waiting if version in request.versions]
            if since:
                residency.want(version, min(since))
            else:
                residency.unwant(version)
        # Bounded overtaking, as the scheduler does it: after a while only the oldest may start.
        oldest = waiting[:1] if waiting and self.bench.clock() - waiting[0].since > 3 else waiting
        for request in oldest:
            if all(residency.state(version) == "resident" for version in request.versions):
                assert all(residency.acquire(version) for version in request.versions)
                request.running = True
                self.longest = max(self.longest, self.bench.clock() - request.since)
        for request in list(self.requests):
            if request.running:
                assert all(content_is(self.bench, version, self.adapters[version]) for version in request.versions)
                request.steps -= 1
                if request.steps == 0:
                    self.end(request)
        self.bench.step(self.rng.choice((500, 5000, 50_000)))
        self.bench.clock.now += 0.1
        # The loader thread must get its turn: the clock of the walk is much faster than the disk.
        while residency.stats().fetching and self.rng.random() < 0.5:
            time.sleep(0.0005)
            self.bench.step(0)

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        for version in request.versions:
            if request.running:
                self.bench.residency.release(version)
            self.bench.residency.unhold(version)
        self.served += 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("host_copies", [1, 4, 20])
def test_random_requests_all_end_and_everything_balances(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool, seed: int, host_copies: int
) -> None:
    bench = make_bench(three, host_bytes=host_copies * ten["v0"].spec.num_bytes)
    walk = Walk(bench, ten, random.Random(seed))
    for version in ten:
        bench.add(version, ten[version])
    for _ in range(150):
        if walk.rng.random() < 0.5:
            walk.arrive()
        if walk.rng.random() < 0.05:
            walk.churn()
        if walk.requests and walk.rng.random() < 0.03:
            walk.end(walk.rng.choice(walk.requests))  # aborted
        walk.step()
        assert bench.residency.stats().host_bytes <= host_copies * ten["v0"].spec.num_bytes
    deadline = time.monotonic() + PATIENCE_S
    while walk.requests:
        assert time.monotonic() < deadline, f"never served: {walk.requests}"
        walk.step()
    walk.step()
    assert walk.served > 40
    stats = bench.residency.stats()
    assert stats.evictions > 0
    assert stats.failures == 0
    for version in ten:
        if bench.residency.knows(version):
            bench.residency.unregister(version)
    bench.settle()
    stats = bench.residency.stats()
    assert (stats.registered, stats.host_bytes, stats.device_bytes, stats.leases) == (0, 0, 0, 0)
    assert bench.pool.stats().lent_bytes == 0
