"""What a server brings back after a restart, and in which order."""

from __future__ import annotations

import random

import pytest
from asking import load
from fake_engine import FakeEngine, FakeLibrary

from loraserve.engine.messages import AdapterStatus, EngineStats
from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.server.directory import AdapterDirectory
from loraserve.server.inflight import InFlight
from loraserve.server.restore import UseJournal, bring_back
from loraserve.server.state import ServerState

pytestmark = pytest.mark.anyio


async def restarted(server: ServerState, engine: FakeEngine, library: FakeLibrary) -> list[str]:
    """Versions in the order in which a new server over the same registry loads them."""
    engine.load_calls.clear()
    engine.prefetched.clear()
    engine.loaded.clear()
    again = AdapterDirectory(engine, library, InFlight(engine), "base")
    try:
        await bring_back(await again.registry.sync(), again)
        return list(engine.load_calls)
    finally:
        await again.close()


async def test_pinned_ones_first_then_the_most_recently_used(
    server: ServerState, engine: FakeEngine, library: FakeLibrary
) -> None:
    names = [f"n{number}" for number in range(8)]
    versions = {name: await load(server, library, name) for name in names}
    await load(server, library, "on-disk")
    await load(server, library, "pinned")
    await server.directory.pin("pinned", True)
    random.Random(4).shuffle(names)
    used = {name: 1000.0 + age for age, name in enumerate(names)} | {"pinned": 1.0, "on-disk": 5000.0}
    tiers = {versions[name]: "host" if name == "n3" else "device" for name in names}
    library.note_use(used, tiers)
    expected = [library.version_of("weights of pinned"), *(versions[name] for name in reversed(names))]
    assert await restarted(server, engine, library) == expected
    assert engine.loaded[expected[0]], "pinned again"
    assert engine.prefetched == [(version, tiers[version] == "device") for version in expected[1:]]


async def test_one_that_cannot_come_back_holds_up_nobody(
    server: ServerState, engine: FakeEngine, library: FakeLibrary
) -> None:
    versions = [await load(server, library, name) for name in ("a", "b", "c")]
    library.note_use({"a": 1.0, "b": 2.0, "c": 3.0}, dict.fromkeys(versions, "device"))
    engine.refuse[versions[1]] = AdapterRefused(AdapterFault.SHAPE_MISMATCH, "another base")
    assert await restarted(server, engine, library) == versions[::-1]
    assert [version for version, _ in engine.prefetched] == [versions[2], versions[0]]


async def test_the_journal_writes_what_the_next_start_needs(
    server: ServerState, engine: FakeEngine, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {name: await load(server, library, name) for name in ("a", "b", "c")}

    async def statuses() -> dict[str, AdapterStatus]:
        where = {"a": "device", "b": "disk", "c": "host"}
        return {
            versions[name]: AdapterStatus(version=versions[name], state="resident", residency=residency)
            for name, residency in where.items()
        }

    monkeypatch.setattr(engine, "adapter_statuses", statuses)
    for at, name in ((10.0, "a"), (20.0, "c")):
        served = server.directory.find(name)
        assert served is not None
        served.last_used_at = at
    engine.stats = EngineStats(adapter_loads_total=1)
    await UseJournal(server.directory, engine, library).write()
    assert await restarted(server, engine, library) == [versions["c"], versions["a"]]
