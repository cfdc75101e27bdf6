"""What other processes of one data folder change is seen, by requests and by operators, also while it is being read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from asking import load
from fake_engine import FakeLibrary
from server_parts import eventually, open_client

from loraserve.errors import NameTaken, StorageFailed
from loraserve.lora.registry import Registry
from loraserve.server.app import build_app
from loraserve.server.entries import LoadOrder
from loraserve.server.lora_field import AdapterRef
from loraserve.server.ports import AdapterPlace, Registered
from loraserve.server.state import ServerState

pytestmark = pytest.mark.anyio


class Other:
    """Another process: its own connection to the registry."""

    def __init__(self, library: FakeLibrary) -> None:
        self._library = library
        self.registry = Registry(library.root / "registry.sqlite3")

    def point(self, name: str, version: str, **options: Any) -> None:
        self.registry.set_alias(name, version, replace=True, **options)
        self._library.changed = True

    def remove(self, name: str) -> None:
        self.registry.remove_alias(name)
        self._library.changed = True


@pytest.fixture
def other(library: FakeLibrary) -> Iterator[Other]:
    other = Other(library)
    yield other
    other.registry.close()


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, Any]:
    answer = await client.post(path, json=body)
    return answer.status_code, answer.json() if "json" in answer.headers["content-type"] else answer.text


async def test_operators_see_it_at_once(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary, other: Other
) -> None:
    version = await load(server, library, "mine")
    for number in range(9):
        other.point(f"n{number}", version)
    assert (await client.get("/adapters/n0")).json()["version"] == version
    names = ["mine", *(f"n{number}" for number in range(9))]
    assert [each["name"] for each in (await client.get("/adapters")).json()["data"]] == names
    other.point("m", version)
    assert "m" in [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
    other.point("k", version)
    assert (await client.get("/v1/models/k")).status_code == 200
    for name, path in (("a", "pin"), ("b", "prefetch"), ("c", "unload")):
        other.point(name, version)
        assert (await post(client, f"/adapters/{path}", name=name))[0] == 200, path
    other.point("d", version)
    status, body = await post(client, "/adapters/rollback", name="d")
    assert (status, body["error"]["code"]) == (409, "no_older_version")
    other.point("e", version)
    assert (await post(client, "/unload_lora_adapter", lora_name="e"))[0] == 200
    other.point("f", version)
    status, body = await post(client, "/v1/load_lora_adapter", lora_name="f", lora_path="x")
    assert (status, "has already been loaded" in body["message"]) == (400, True)
    other.remove("f")
    assert (await client.get("/adapters/f")).status_code == 404


async def test_the_list_is_whole_however_long(
    client: httpx.AsyncClient, server: ServerState, library: FakeLibrary, other: Other
) -> None:
    assert (await client.get("/adapters")).json() == {"data": []}
    version = await load(server, library, "a")
    for number in range(120):
        other.point(f"n{number:03}", version)
    found = (await client.get("/adapters")).json()["data"]
    assert [each["name"] for each in found] == ["a", *(f"n{number:03}" for number in range(120))]
    assert found[7] == (await client.get("/adapters/n006")).json()


class SlowReads:
    """Holds up each reading of the registry, after it has read."""

    def __init__(self, library: FakeLibrary) -> None:
        self.gate = threading.Event()
        self.begun = 0
        self._read = library.registered
        library.registered = self  # type: ignore[method-assign]

    def __call__(self) -> list[Registered]:
        found = self._read()
        self.begun += 1
        assert self.gate.wait(10)
        return found


async def test_who_asks_while_a_change_is_read_waits_for_it(
    server: ServerState, library: FakeLibrary, other: Other
) -> None:
    version = await load(server, library, "mine")
    other.point("new", version)
    reads = SlowReads(library)

    async def ask(name: str) -> str:
        ref = AdapterRef(name)
        await server.directory.prepare([ref])
        return server.directory.resolve(ref).version

    asking = [asyncio.create_task(ask("new")) for _ in range(20)]
    await eventually(lambda: reads.begun == 1)
    asking[0].cancel()  # a client that goes away takes nobody's news along
    other.point("newer", version)
    asking += [asyncio.create_task(ask("newer")) for _ in range(20)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in asking[1:])
    reads.gate.set()
    assert await asyncio.gather(*asking[1:]) == [version] * 39
    assert reads.begun == 2, "once for each change, not for each request"


async def test_a_reading_that_failed_is_made_up_for(
    server: ServerState, library: FakeLibrary, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await load(server, library, "mine")
    other.point("new", version)

    def fail() -> list[Registered]:
        raise StorageFailed("the disk is away")

    with monkeypatch.context() as patched:
        patched.setattr(library, "registered", fail)
        await server.directory.prepare([AdapterRef("mine")])
        assert server.directory.find("new") is None
    await server.directory.prepare([AdapterRef("mine")])
    assert server.directory.find("new") is not None


@pytest.mark.parametrize("gone", [False, True])
async def test_what_changed_during_a_load_that_failed(
    gone: bool, server: ServerState, library: FakeLibrary, other: Other
) -> None:
    await load(server, library, "a", "one")
    await load(server, library, "spare", "two")
    library.gate = threading.Event()
    path = library.make("three", "three")
    loading = asyncio.create_task(server.directory.load(LoadOrder(name="a", place=AdapterPlace(path=path))))
    await eventually(lambda: library.adds == 3)
    if gone:
        other.remove("a")
    else:
        other.point("a", library.version_of("two"))
    await server.directory.prepare([AdapterRef("spare")])
    library.gate.set()
    with pytest.raises(NameTaken):
        await loading
    await server.directory.prepare([AdapterRef("spare")])
    served = server.directory.find("a")
    if gone:
        assert served is None
    else:
        assert served is not None
        assert served.version == library.version_of("two")


# -- open doors and tenants -------------------------------------------------------------------------------------------


@pytest.fixture
async def pod(make_server: Callable[..., ServerState], library: FakeLibrary) -> AsyncIterator[httpx.AsyncClient]:
    state = make_server(host="0.0.0.0", open_lora_doors=True, api_key=("ka", "kb"), admin_key="admin")
    async with open_client(build_app(state)) as client:
        yield client
    await state.directory.close()


async def asked(client: httpx.AsyncClient, key: str, door: str, **body: Any) -> tuple[int, Any]:
    answer = await client.post(door, json=body, headers={"Authorization": f"Bearer {key}"})
    return answer.status_code, answer.json() if "json" in answer.headers["content-type"] else answer.text


async def test_open_doors_leave_other_tenants_adapters_alone(
    pod: httpx.AsyncClient, library: FakeLibrary, other: Other
) -> None:
    path, mine = library.make("x", "x"), library.make("mine", "mine")
    assert (await asked(pod, "admin", "/adapters/load", name="p", path=path, visibility="private"))[0] == 200
    before = other.registry.alias("p")
    for key in ("ka", "kb"):
        for inplace in (False, True):
            body = {"lora_name": "p", "lora_path": mine, "load_inplace": inplace}
            assert (await asked(pod, key, "/v1/load_lora_adapter", **body))[0] == 400
        assert (await asked(pod, key, "/v1/unload_lora_adapter", lora_name="p"))[0] == 404
        status, body = await asked(pod, key, "/load_lora_adapter", lora_name=f"own-{key}", lora_path=mine)
        assert status == 200, body
        assert "p" not in body["loaded_adapters"]
        status, body = await asked(pod, key, "/unload_lora_adapter", lora_name="p")
        assert (status, "p" in body["loaded_adapters"]) == (400, False)
    assert other.registry.alias("p") == before
    # What is for all may be changed by all; that is what the flag is for.
    assert (await asked(pod, "kb", "/v1/unload_lora_adapter", lora_name="own-ka"))[0] == 200
    status, body = await asked(pod, "admin", "/load_lora_adapter", lora_name="q", lora_path=mine)
    assert (status, set(body["loaded_adapters"])) == (200, {"p", "q", "own-kb"})
    body = {"lora_name": "p", "lora_path": mine, "load_inplace": True}
    assert (await asked(pod, "admin", "/v1/load_lora_adapter", **body))[0] == 200
    alias = other.registry.alias("p")
    assert (alias.version, alias.owner, alias.visibility) == (library.version_of("mine"), before.owner, "private")
    assert (await asked(pod, "admin", "/v1/unload_lora_adapter", lora_name="p"))[0] == 200
