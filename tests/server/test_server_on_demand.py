"""Who may make the server ask the Hub, and how often: many names, many tokens, right ones among wrong ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeLibrary

from loraserve.errors import Overloaded, RepoNotFound
from loraserve.server.caller import Caller
from loraserve.server.directory import AdapterDirectory
from loraserve.server.inflight import InFlight
from loraserve.server.lora_field import AdapterRef
from loraserve.server.misses import BURST, EACH_S, MAX_TENANTS, Misses
from loraserve.server.on_demand import ALLOWED_S, REFUSED_S
from loraserve.server.ports import AdapterPlace, Progress, StoredAdapter
from loraserve.server.sources import HubSource

pytestmark = pytest.mark.anyio
SECRET = AdapterRef("org/secret")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class HubLibrary(FakeLibrary):
    """`org/secret` is there for the token `right`; nothing else is."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[tuple[str | None, object]] = []

    def _ask(self, place: AdapterPlace) -> None:
        self.asked.append((place.repo, place.token))
        if self.gate is not None:
            assert self.gate.wait(10)
        if (place.repo, place.token) != ("org/secret", "right"):
            raise RepoNotFound("no such repository")

    def add(self, place: AdapterPlace, progress: Progress) -> StoredAdapter:
        self._ask(place)
        folder = self.make("secret", "weights")
        return super().add(AdapterPlace(path=folder), progress)._replace(restricted=True)

    def check_access(self, place: AdapterPlace) -> None:
        self._ask(place)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub(tmp_path: Path) -> HubLibrary:
    return HubLibrary(tmp_path)


@pytest.fixture
async def directory(engine: FakeEngine, hub: HubLibrary, clock: Clock) -> AsyncIterator[AdapterDirectory]:
    directory = AdapterDirectory(
        engine, hub, InFlight(engine), "base", sources=[HubSource("org/*")], clock=clock, wall=clock
    )
    yield directory
    await directory.close()
    hub.registry.close()


async def ask(directory: AdapterDirectory, tenant: str, token: str | None, ref: AdapterRef = SECRET) -> str:
    caller = Caller(tenant, token)
    try:
        await directory.prepare([ref], caller)
    except (RepoNotFound, Overloaded) as error:
        return error.code
    return directory.resolve(ref, caller=caller).name


@pytest.mark.parametrize("what", ["tokens", "names"])
async def test_trying_many_does_not_hammer_the_hub(
    what: str, directory: AdapterDirectory, hub: HubLibrary, clock: Clock
) -> None:
    async def attack(number: int) -> str:
        ref = SECRET if what == "tokens" else AdapterRef(f"org/{number}")
        return await ask(directory, "evil", f"t{number}" if what == "tokens" else None, ref)

    answers = [await attack(number) for number in range(100)]
    assert answers == ["repo_not_found"] * BURST + ["overloaded"] * (100 - BURST)
    assert len(hub.asked) == BURST
    assert len(directory._on_demand._known) <= BURST
    clock.now += 2 * EACH_S + 0.1
    assert [await attack(number) for number in range(200, 210)].count("repo_not_found") == 2
    # All at once is no way around it.
    clock.now += 1e4
    before = len(hub.asked)
    answers = list(await asyncio.gather(*(attack(number) for number in range(300, 400))))
    assert answers.count("repo_not_found") == len(hub.asked) - before == BURST


async def test_others_are_not_concerned(directory: AdapterDirectory, hub: HubLibrary, clock: Clock) -> None:
    assert await ask(directory, "good", "right") == "org/secret"
    for number in range(30):
        await ask(directory, "evil", f"t{number}")
    assert await ask(directory, "good", "right") == "org/secret"
    clock.now += ALLOWED_S + 1
    for number in range(30):  # while the right token is to be asked for again
        await ask(directory, "good", f"t{number}")
    assert await ask(directory, "good", "right") == "org/secret", "it opened it before, so it costs nothing"
    assert await ask(directory, "other", "right") == "org/secret"


async def test_a_wrong_token_under_way_does_not_answer_for_the_right_one(
    directory: AdapterDirectory, hub: HubLibrary
) -> None:
    hub.gate = threading.Event()
    wrong = [asyncio.create_task(ask(directory, "evil", f"t{number}")) for number in range(5)]
    await asyncio.sleep(0.01)
    right = [asyncio.create_task(ask(directory, tenant, "right")) for tenant in ("good", "evil")]
    await asyncio.sleep(0.01)
    hub.gate.set()
    assert await asyncio.gather(*wrong) == ["repo_not_found"] * 5
    assert await asyncio.gather(*right) == ["org/secret"] * 2
    assert await ask(directory, "evil", "t0") == "repo_not_found"
    assert hub.asked.count(("org/secret", "t0")) == 1, "failures are remembered"


async def test_refusals_are_forgotten(directory: AdapterDirectory, hub: HubLibrary, clock: Clock) -> None:
    for number in range(10):
        await ask(directory, "", f"t{number}")
        clock.now += REFUSED_S / 2
    (entry,) = directory._on_demand._known.values()
    assert len(entry.refused) == 2
    assert await ask(directory, "", "right") == "org/secret"
    assert hub.holds == {(hub.version_of("weights"), None): 1}, "held while it is served"
    await directory.unload("org/secret", force=True)
    assert not hub.holds


async def test_questions_with_an_answer_cost_nothing() -> None:
    clock = Clock()
    misses = Misses(clock)
    for _ in range(10 * BURST):
        misses.spend("a")
        misses.give_back("a")
    for _ in range(BURST):
        misses.spend("a")
    with pytest.raises(Overloaded, match="again in 4 s"):
        misses.spend("a")
    for number in range(2 * MAX_TENANTS):
        misses.spend(f"t{number}")
    assert len(misses._spent) == MAX_TENANTS
