"""Names, versions and their lifecycle under traffic."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_engine import FakeEngine, FakeLibrary
from server_parts import BASE, eventually

from loraserve.errors import (
    AdapterError,
    AdapterFault,
    AdapterInUse,
    AdapterNotFound,
    AdapterRefused,
    EngineDead,
    EngineStuck,
    NameReserved,
    NameTaken,
)
from loraserve.server import failed_loads
from loraserve.server.directory import AdapterDirectory
from loraserve.server.entries import LoadOrder
from loraserve.server.failed_loads import KEEP_FAILURE_S
from loraserve.server.inflight import Hold, InFlight
from loraserve.server.lora_field import AdapterRef
from loraserve.server.ports import AdapterPlace

pytestmark = pytest.mark.anyio


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inflight(engine: FakeEngine) -> InFlight:
    return InFlight(engine)


@pytest.fixture
async def directory(
    engine: FakeEngine, library: FakeLibrary, inflight: InFlight, clock: Clock
) -> AsyncIterator[AdapterDirectory]:
    directory = AdapterDirectory(engine, library, inflight, BASE, clock=clock)
    yield directory
    await directory.close()


def order(library: FakeLibrary, name: str, content: str, *, pin: bool = False, replace: bool = False) -> LoadOrder:
    path = library.make(f"folder-{content}", content)
    return LoadOrder(name=name, place=AdapterPlace(path=path), pin=pin, replace=replace)


def hold(directory: AdapterDirectory, inflight: InFlight, name: str, request_id: str = "r") -> Hold:
    return inflight.acquire(request_id, [directory.resolve(AdapterRef(name))])


async def test_load_and_resolve(directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine) -> None:
    entry = await directory.load(order(library, "a", "one"))
    version = library.version_of("one")
    assert entry.served is not None
    assert entry.served.version == version
    assert engine.loaded == {version: False}
    assert directory.resolve(AdapterRef("a")).version == version
    assert directory.resolve(AdapterRef("a", version[:6])).version == version
    for ref in (AdapterRef("b"), AdapterRef("a", "0" * 10)):
        with pytest.raises(AdapterNotFound):
            directory.resolve(ref)


async def test_same_content_again_is_no_work(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    first = await directory.load(order(library, "a", "one"))
    served = first.served
    again = await directory.load(order(library, "a", "one", replace=True))
    assert again.served is served
    assert len(engine.load_calls) == 1


async def test_taken_and_reserved_and_invalid_names(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    await directory.load(order(library, "a", "one"))
    with pytest.raises(NameTaken):
        await directory.load(order(library, "a", "two"))
    assert directory.resolve(AdapterRef("a")).version == library.version_of("one")
    with pytest.raises(NameReserved):
        await directory.load(order(library, BASE, "two"))
    for name in ("", "-a", "a/b/c", "a b", "ä", "a:b", "a@b", "x" * 129, "../a"):
        with pytest.raises(AdapterRefused) as error:
            await directory.load(order(library, name, "two"))
        assert error.value.fault == AdapterFault.INVALID_NAME
    assert [entry.name for entry in directory.entries()] == ["a"]
    assert library.version_of("two") not in engine.loaded


async def test_refused_load_leaves_nothing(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    bad = AdapterRefused(AdapterFault.NON_FINITE, "NaN in q_proj")
    engine.refuse[library.version_of("bad")] = bad
    with pytest.raises(AdapterRefused) as caught:
        await directory.load(order(library, "a", "bad"))
    assert caught.value.code == "non_finite"
    assert directory.entries() == []
    with pytest.raises(AdapterNotFound):
        directory.entry("a")
    with pytest.raises(AdapterRefused, match="no adapter"):
        await directory.load(LoadOrder(name="a", place=AdapterPlace(path="/nowhere")))
    assert directory.entries() == []


async def test_failed_replace_keeps_what_was_there(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    await directory.load(order(library, "a", "one"))
    engine.refuse[library.version_of("bad")] = AdapterRefused(AdapterFault.NON_FINITE, "NaN")
    with pytest.raises(AdapterRefused):
        await directory.load(order(library, "a", "bad", replace=True))
    entry = directory.entry("a")
    assert entry.served is not None
    assert entry.served.version == library.version_of("one")
    assert entry.failure is None
    await directory.load(order(library, "a", "bad", replace=True), wait=False)
    await eventually(lambda: entry.flight is None)
    assert entry.failure is not None
    assert directory.resolve(AdapterRef("a")).version == library.version_of("one")


async def test_failed_state_is_kept_ten_minutes_without_wait(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine, clock: Clock
) -> None:
    engine.refuse[library.version_of("bad")] = AdapterRefused(AdapterFault.NON_FINITE, "NaN")
    library.gate = threading.Event()
    entry = await directory.load(order(library, "a", "bad"), wait=False)
    assert entry.flight is not None
    with pytest.raises(AdapterInUse, match="still being loaded"):
        directory.resolve(AdapterRef("a"))
    library.gate.set()
    await eventually(lambda: entry.flight is None)
    assert directory.entry("a").failure is not None
    with pytest.raises(AdapterNotFound, match="NaN"):
        directory.resolve(AdapterRef("a"))
    clock.now += KEEP_FAILURE_S - 1
    assert [entry.name for entry in directory.entries()] == ["a"]
    clock.now += 1
    assert directory.entries() == []
    with pytest.raises(AdapterNotFound):
        directory.entry("a")


async def test_failures_that_nobody_looks_up_are_bounded(
    directory: AdapterDirectory,
    library: FakeLibrary,
    engine: FakeEngine,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failed_loads, "MAX_FAILURES", 3)
    engine.refuse[library.version_of("bad")] = AdapterRefused(AdapterFault.NON_FINITE, "NaN")
    await directory.load(order(library, "served", "good"))

    async def fail(name: str) -> None:
        entry = await directory.load(order(library, name, "bad", replace=True), wait=False)
        await eventually(lambda: entry.flight is None)

    await fail("served")
    for number in range(5):
        clock.now += 1
        await fail(f"n{number}")
    assert set(directory._entries) == {"served", "n2", "n3", "n4"}
    assert directory.entry("served").failure is None, "the oldest is no longer told"
    assert directory.resolve(AdapterRef("served")).version == library.version_of("good")
    await fail("n2")  # told anew, so it is the youngest now
    await fail("n5")
    assert set(directory._entries) == {"served", "n2", "n4", "n5"}
    clock.now += KEEP_FAILURE_S
    await directory.load(order(library, "later", "good"))
    assert set(directory._entries) == {"served", "later"}


async def test_new_load_clears_a_failure(directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine) -> None:
    engine.refuse[library.version_of("bad")] = AdapterRefused(AdapterFault.NON_FINITE, "NaN")
    entry = await directory.load(order(library, "a", "bad"), wait=False)
    await eventually(lambda: entry.flight is None)
    entry = await directory.load(order(library, "a", "good"))
    assert entry.failure is None
    assert entry.served is not None


async def test_concurrent_loads_share_one_flight(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    library.gate = threading.Event()
    loads = [asyncio.create_task(directory.load(order(library, "a", "one"))) for _ in range(5)]
    await eventually(lambda: library.adds == 1)
    with pytest.raises(AdapterInUse):
        await directory.load(order(library, "a", "two"))
    with pytest.raises(AdapterInUse):
        await directory.unload("a")
    library.gate.set()
    entries = await asyncio.gather(*loads)
    assert all(entry is entries[0] for entry in entries)
    assert library.adds == 1
    assert engine.load_calls == [library.version_of("one")]


async def test_a_caller_that_leaves_does_not_end_the_load(directory: AdapterDirectory, library: FakeLibrary) -> None:
    library.gate = threading.Event()
    load = asyncio.create_task(directory.load(order(library, "a", "one")))
    await eventually(lambda: library.adds == 1)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    library.gate.set()
    await eventually(lambda: directory.entry("a").served is not None)


async def test_two_names_of_one_version_are_loaded_once(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    await asyncio.gather(directory.load(order(library, "a", "one")), directory.load(order(library, "b", "one")))
    assert len(engine.load_calls) == 1
    await directory.unload("a")
    assert engine.dropped == []
    assert directory.resolve(AdapterRef("b")).version == library.version_of("one")
    await directory.unload("b")
    assert engine.dropped == [library.version_of("one")]


async def test_pins_of_several_names(directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine) -> None:
    version = library.version_of("one")
    await directory.load(order(library, "a", "one"))
    assert engine.loaded == {version: False}
    await directory.load(order(library, "b", "one", pin=True))
    assert engine.loaded == {version: True}
    await directory.unload("b")
    assert engine.loaded == {version: False}
    await directory.load(order(library, "a", "one", pin=True))
    assert engine.loaded == {version: True}
    entry = directory.entry("a")
    assert entry.served is not None
    assert entry.served.pinned


async def test_unload_waits_for_running_requests(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine, inflight: InFlight
) -> None:
    await directory.load(order(library, "a", "one"))
    running = [hold(directory, inflight, "a", f"r{index}") for index in range(3)]
    unload = asyncio.create_task(directory.unload("a"))
    await asyncio.sleep(0.01)
    with pytest.raises(AdapterNotFound):
        directory.resolve(AdapterRef("a"))
    with pytest.raises(AdapterNotFound):
        await directory.unload("a")
    assert not unload.done()
    assert engine.dropped == []
    for each in running:
        inflight.release(each)
    assert await unload == ("a", library.version_of("one"), 3, 0, True)
    assert engine.dropped == [library.version_of("one")]
    assert engine.loaded == {}
    with pytest.raises(AdapterNotFound):
        await directory.unload("a")


@pytest.mark.parametrize(("force", "deadline_s"), [(True, 60.0), (False, 0.05), (False, 0.0)])
async def test_unload_ends_requests(
    directory: AdapterDirectory,
    library: FakeLibrary,
    engine: FakeEngine,
    inflight: InFlight,
    force: bool,
    deadline_s: float,
) -> None:
    await directory.load(order(library, "a", "one"))
    quick, slow = hold(directory, inflight, "a", "quick"), hold(directory, inflight, "a", "slow")
    other = inflight.acquire("other", [])
    unload = asyncio.create_task(directory.unload("a", force=force, deadline_s=deadline_s))
    await asyncio.sleep(0)
    if deadline_s == 0.05:
        inflight.release(quick)
    await eventually(lambda: slow.error is not None)
    assert "slow" in engine.aborted
    assert "other" not in engine.aborted
    assert other.error is None
    inflight.release(quick)
    inflight.release(slow)
    result = await unload
    assert (result.drained, result.aborted) == ((1, 1) if deadline_s == 0.05 else (0, 2))
    assert engine.loaded == {}


async def test_replace_lets_running_requests_finish_on_their_version(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine, inflight: InFlight
) -> None:
    old, new = library.version_of("one"), library.version_of("two")
    await directory.load(order(library, "a", "one"))
    running = hold(directory, inflight, "a")
    await directory.load(order(library, "a", "two", replace=True))
    assert directory.resolve(AdapterRef("a")).version == new
    assert set(engine.loaded) == {old, new}
    await asyncio.sleep(0.02)
    assert engine.dropped == []
    assert running.error is None
    inflight.release(running)
    await eventually(lambda: engine.dropped == [old])
    assert set(engine.loaded) == {new}


async def test_replace_back_and_forth_while_old_requests_run(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine, inflight: InFlight
) -> None:
    one, two = library.version_of("one"), library.version_of("two")
    await directory.load(order(library, "a", "one"))
    running = hold(directory, inflight, "a")
    await directory.load(order(library, "a", "two", replace=True))
    await directory.load(order(library, "a", "one", replace=True))
    await eventually(lambda: engine.dropped == [two])
    inflight.release(running)
    await asyncio.sleep(0.02)
    assert engine.dropped == [two], "the name needs the old version again"
    assert set(engine.loaded) == {one}


async def test_load_while_the_same_version_is_being_dropped(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    version = library.version_of("one")
    await directory.load(order(library, "a", "one"))
    engine.drop_gate = asyncio.Event()
    unload = asyncio.create_task(directory.unload("a"))
    await asyncio.sleep(0.01)
    load = asyncio.create_task(directory.load(order(library, "a", "one")))
    await eventually(lambda: library.adds == 2)
    await asyncio.sleep(0.02)
    engine.drop_gate.set()
    await asyncio.gather(unload, load)
    assert engine.loaded == {version: False}
    assert engine.load_calls == [version, version]
    assert directory.resolve(AdapterRef("a")).version == version


async def test_unload_of_a_failed_name_clears_it(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    engine.refuse[library.version_of("bad")] = AdapterRefused(AdapterFault.NON_FINITE, "NaN")
    entry = await directory.load(order(library, "a", "bad"), wait=False)
    await eventually(lambda: entry.flight is None)
    assert await directory.unload("a") == ("a", None, 0, 0, True)
    with pytest.raises(AdapterNotFound):
        await directory.unload("a")


async def test_unload_when_the_engine_is_dead(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await directory.load(order(library, "a", "one"))

    async def dead(version: str, force: bool = False) -> None:
        raise EngineDead("gone")

    monkeypatch.setattr(engine, "drop_adapter", dead)
    assert await directory.unload("a") == ("a", library.version_of("one"), 0, 0, True), "what is dead holds nothing"


async def test_unload_when_the_engine_is_stuck(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await directory.load(order(library, "a", "one"))

    async def stuck(version: str, force: bool = False) -> None:
        raise EngineStuck("no answer for 30 s")

    monkeypatch.setattr(engine, "drop_adapter", stuck)
    assert await directory.unload("a") == ("a", library.version_of("one"), 0, 0, False)
    with pytest.raises(AdapterNotFound):
        directory.resolve(AdapterRef("a"))
    monkeypatch.undo()
    await directory.load(order(library, "a", "one"))
    assert await directory.unload("a", wait=False) == ("a", library.version_of("one"), 0, 0, False)
    await eventually(lambda: engine.loaded == {})


async def test_unknown_exception_in_the_library_is_an_internal_error(
    directory: AdapterDirectory, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(place: AdapterPlace, progress: object) -> None:
        raise RuntimeError("secret path /etc")

    monkeypatch.setattr(library, "add", broken)
    with pytest.raises(Exception, match="internal error") as caught:
        await directory.load(order(library, "a", "one"))
    assert not isinstance(caught.value, AdapterError)
    assert directory.entries() == []


async def test_many_cycles_leave_nothing(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine, inflight: InFlight
) -> None:
    async def cycle(index: int) -> None:
        name, content = f"n{index % 3}", f"c{index % 4}"
        try:
            await directory.load(order(library, name, content, replace=index % 2 == 0))
            held = hold(directory, inflight, name, f"r{index}")
            await asyncio.sleep(0)
            inflight.release(held)
            await directory.unload(name, force=index % 5 == 0)
        except AdapterError:
            pass

    for start in range(0, 200, 10):
        await asyncio.gather(*(cycle(index) for index in range(start, start + 10)))
    for entry in directory.entries():
        await directory.unload(entry.name)
    await eventually(lambda: not directory._background.tasks)
    assert engine.loaded == {}
    assert len(inflight) == 0
    assert not directory._versions._uses
    assert not directory._versions._installed
    assert not directory._versions._locks
    assert not directory._versions._served_by
    assert not directory._entries


async def test_what_the_engine_refuses_is_failed_and_waits_for_its_back_off(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine, clock: Clock
) -> None:
    version = library.version_of("one")
    await directory.load(order(library, "a", "one"))
    library.set_pinned("a", False)
    engine.refuse[version] = AdapterRefused(AdapterFault.SHAPE_MISMATCH, "made for another base")
    restarted = AdapterDirectory(engine, library, InFlight(engine), BASE, clock=clock)
    engine.load_calls.clear()
    await restarted.registry.sync()
    entry = restarted.entry("a")
    assert restarted.failure_of(entry) is None
    for _ in range(5):
        with pytest.raises(AdapterRefused, match="another base") as refused:
            await restarted.prepare([AdapterRef("a")])
    assert len(refused.traceback) < 12, "the frames of one call, not of all"
    assert engine.load_calls == [version]
    failure = restarted.failure_of(entry)
    assert failure is not None
    assert failure.code == "shape_mismatch"
    with pytest.raises(AdapterRefused):
        await restarted.pin("a", True)
    assert engine.load_calls == [version] * 2, "an operator's call is tried at once"
    assert not library.registered()[0].pinned
    clock.now += 1.5
    with pytest.raises(AdapterRefused):
        await restarted.prepare([AdapterRef("a")])
    assert len(engine.load_calls) == 2, "the second wait is longer"
    engine.refuse.clear()
    clock.now += 1.0
    assert await restarted.prepare([AdapterRef("a")])
    assert restarted.failure_of(entry) is None
    await restarted.close()


async def test_a_purge_between_fetch_and_use(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    version = library.version_of("one")
    engine.load_gate = asyncio.Event()
    loading = asyncio.create_task(directory.load(order(library, "a", "one")))
    await eventually(lambda: engine.load_calls == [version])
    library.purge([version])  # as an unload of the same content by another process does
    engine.load_gate.set()
    entry = await loading
    assert entry.served is not None
    assert library.adds == 2
    assert [each.stored.version for each in library.registered()] == [version]


async def test_what_could_not_be_used_is_not_kept(
    directory: AdapterDirectory, library: FakeLibrary, engine: FakeEngine
) -> None:
    await directory.load(order(library, "a", "one"))
    with pytest.raises(NameTaken):
        await directory.load(order(library, "a", "two"))
    engine.refuse[library.version_of("three")] = AdapterRefused(AdapterFault.NON_FINITE, "not a number")
    with pytest.raises(AdapterRefused):
        await directory.load(order(library, "b", "three"))
    assert [record.version for record in library.registry.versions()] == [library.version_of("one")]
    await directory.load(order(library, "a", "two", replace=True))
    with pytest.raises(NameTaken):
        await directory.load(order(library, "a", "one"))
    assert len(library.registry.versions()) == 2, "what the name could go back to stays"


async def test_slow_sources_hold_up_nothing_else(directory: AdapterDirectory, library: FakeLibrary) -> None:
    await directory.load(order(library, "a", "one"))
    library.gate = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    for number in range(40):
        await directory.load(order(library, f"n{number}", f"content {number}"), wait=False)
    await eventually(lambda: library.adds > 1)
    try:
        assert (await asyncio.wait_for(directory.pin("a", True), 5)).served is not None
        assert len(await asyncio.wait_for(directory.versions("a"), 5)) == 1
        assert library.adds <= 1 + 4, "a few at a time"
    finally:
        library.gate.set()
    await eventually(lambda: all(entry.flight is None for entry in directory.entries()))
    assert len(directory.entries()) == 41
