"""What is evicted first, what a prefetch brings, and limits that change while adapters are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_lora_residency import Bench, MakeBench, make_bench, ten, three
from tiny_adapters import TinyAdapter

from loraserve.errors import BlendTooLarge
from loraserve.lora.benefit import HALF_LIFE_S, device_benefit, host_benefit, warm
from loraserve.lora.pool import LoraPool
from loraserve.lora.spec import AdapterSpec
from loraserve.lora.states import AdapterEntry

__all__ = ["make_bench", "ten", "three"]  # fixtures


def entry(size: int = 1000, uses: tuple[float, ...] = ()) -> AdapterEntry:
    made = AdapterEntry("v", Path(), AdapterSpec(()), False, 1, {}, size, size)
    for at in uses:
        warm(made, at)
    return made


def test_recency_frequency_and_cost_all_count() -> None:
    old, new = entry(uses=(10.0,)), entry(uses=(20.0,))
    assert device_benefit(old) < device_benefit(new), "of equal ones the one used last stays"
    often = entry(uses=tuple(float(second) for second in range(10)))
    assert device_benefit(new) < device_benefit(often), "often is better than just now"
    faded = replace(often)
    assert device_benefit(faded) < device_benefit(entry(uses=(9 + 4 * HALF_LIFE_S,))), "but not for ever"
    small, large = entry(1000, (10.0,)), entry(10_000_000, (10.0,))
    assert device_benefit(large) < device_benefit(small), "a byte of a small one saves more"
    assert host_benefit(large) < host_benefit(small)
    never = entry()
    assert device_benefit(never) < device_benefit(old)


def test_a_use_in_the_past_does_not_make_it_younger() -> None:
    used = entry(uses=(100.0,))
    warm(used, 50.0)
    assert (used.last_used, used.heat_at) == (100.0, 100.0)


def use(bench: Bench, version: str, times: int = 1) -> None:
    for _ in range(times):
        bench.clock.now += 1
        bench.lease(version)
        bench.residency.release(version)


def test_what_is_used_often_survives_what_was_used_just_now(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    a, b, c, d = list(ten)[:4]
    for name in (a, b, c, d):
        bench.ready(name, ten[name])
    use(bench, a, 8)
    use(bench, b)
    use(bench, c)
    use(bench, d)
    assert [name for name in (a, b, c, d) if bench.resident(name)] == [a, c, d], "the one least worth keeping went"


def test_a_prefetch_brings_an_adapter_over_idle_ones_and_is_tried_once(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    names = list(ten)[:5]
    for name in names:
        bench.ready(name, ten[name])
    for name in names[:3]:
        bench.lease(name)
    bench.residency.prefetch(names[3])
    for _ in range(20):
        bench.step()
    assert not bench.resident(names[3]), "leases stay"
    bench.residency.release(names[0])
    bench.until(lambda: bench.resident(names[3]))
    assert not bench.resident(names[0])
    for name in names[1:3]:
        bench.residency.release(name)
    bench.lease(names[0])
    for _ in range(20):
        bench.step()
    assert bench.resident(names[0])


def test_limits_change_at_run_time(make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool) -> None:
    bench = make_bench(three)
    a, b, c = list(ten)[:3]
    for name in (a, b, c):
        bench.ready(name, ten[name])
        bench.bring(name)
    size = bench.residency.stats().device_bytes // 3
    bench.lease(a)
    bench.residency.set_limits(device_bytes=size, host_bytes=1)
    bench.settle()
    assert [bench.resident(name) for name in (a, b, c)] == [True, False, False], "what is leased stays"
    stats = bench.residency.stats()
    assert (stats.device_capacity, stats.host_bytes) == (size, 0)
    bench.residency.release(a)
    bench.bring(b)
    assert not bench.resident(a), "one at a time"
    with pytest.raises(BlendTooLarge):
        bench.residency.require_room([a, b])
    # Smaller than any adapter: they still run, one at a time.
    bench.residency.set_limits(device_bytes=1)
    bench.bring(c)
    assert bench.resident(c)
    bench.residency.set_limits(device_bytes=1 << 40, host_bytes=1 << 30)
    bench.bring(a)
    assert bench.residency.stats().device_capacity == three.capacity_bytes


def test_a_blend_admitted_before_the_limit_fell_still_runs(
    make_bench: MakeBench, ten: dict[str, TinyAdapter], three: LoraPool
) -> None:
    bench = make_bench(three)
    a, b = list(ten)[:2]
    for name in (a, b):
        bench.ready(name, ten[name])
    bench.residency.set_limits(device_bytes=1)
    bench.want(a)
    bench.want(b)
    for _ in range(50):
        bench.clock.now += 1
        bench.step()
    assert bench.resident(a)
    assert bench.resident(b)
