"""A real server is stopped, killed and started again; its names, versions, pins and residents come back."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from tiny_models import ATTENTION, Oracle, make_adapter, make_model

from loraserve.lora.store import AdapterStore

COUNT = 6
PROMPT = [5, 80, 33, 120, 7, 64, 201]


class Setup:
    """A model, adapters of different content, and what PEFT answers with each."""

    def __init__(self, root: Path) -> None:
        self.model = make_model(root / "model", seed=3)
        self.folder = root / "adapters"
        self.adapters = {
            name: make_adapter(self.model, self.folder / name, seed, r=4, lora_alpha=8, target_modules=ATTENTION)
            for seed, name in enumerate(("one", "two", "three", "other"))
        }
        shutil.copytree(self.adapters["other"], self.folder / "copy-of-other")
        oracle = Oracle(self.model)
        self.expected = {name: oracle.greedy(path, PROMPT, COUNT) for name, path in self.adapters.items()}
        assert len({tuple(tokens) for tokens in self.expected.values()}) == 4

    def server(self, data: Path, *flags: str) -> LiveServer:
        limits = ["--kv-memory", "8MiB", "--lora-memory", "8MiB", "--host-lora-memory", "32MiB", "--threads", "1"]
        return LiveServer(self.model, data, ["--adapter-dir", str(self.folder), *limits, *flags])


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("lifecycle"))


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return server.client.post(path, json=body)


def info(server: LiveServer, name: str) -> dict[str, Any]:
    answer = server.client.get(f"/adapters/{name}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def answer_of(server: LiveServer, lora: str) -> list[int]:
    answer = server.complete(PROMPT, lora=lora, max_tokens=COUNT)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def test_versions_and_residents_over_restarts(setup: Setup, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with setup.server(data) as server:
        for name in ("one", "two", "three"):
            assert server.load("a", setup.adapters[name], replace=True).status_code == 200
            assert answer_of(server, "a") == setup.expected[name]
        assert server.load("b", setup.adapters["other"]).status_code == 200
        assert server.load("c", setup.folder / "copy-of-other").status_code == 200
        assert info(server, "b")["version"] == info(server, "c")["version"]
        assert len(list((data / "versions").iterdir())) == 4
        assert post(server, "/adapters/pin", name="b").json()["pinned"]
        assert post(server, "/adapters/rollback", name="a").status_code == 200
        assert answer_of(server, "a") == setup.expected["two"]
        first = server.client.get("/adapters/a/versions").json()["data"][-1]["version"]
        assert answer_of(server, f"a@{first[:10]}") == setup.expected["one"], "an older version, pinned"
        assert server.complete(PROMPT, lora=f"a@{'0' * 12}", max_tokens=1).status_code == 404
        before = {name: info(server, name) for name in "abc"}
        history = server.client.get("/adapters/a/versions").json()["data"]
        assert [entry["current"] for entry in history] == [False, True, False]
        assert history[0]["source"]["path"] == str(setup.adapters["three"])
        time.sleep(2.5)  # until the use of adapters is noted
        server.kill()

    with setup.server(data) as server:
        assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == ["base", "a", "b", "c"]
        until(lambda: info(server, "a")["residency"] == "device" and info(server, "b")["residency"] == "device")
        for name in "abc":
            now = info(server, name)
            assert {key: now[key] for key in ("version", "pinned", "source", "state", "loaded_at")} == {
                key: before[name][key] for key in ("version", "pinned", "source", "state", "loaded_at")
            }
        assert info(server, "a")["last_used_at"] == before["a"]["last_used_at"]
        assert server.client.get("/adapters/a/versions").json()["data"] == history
        assert answer_of(server, "a") == setup.expected["two"]
        assert post(server, "/adapters/rollback", name="a").status_code == 200
        assert answer_of(server, "a") == setup.expected["one"]
        last = post(server, "/adapters/rollback", name="a")
        assert (last.status_code, last.json()["error"]["code"]) == (409, "no_older_version")
        assert post(server, "/adapters/rollback", name="nobody").status_code == 404
        to = post(server, "/adapters/rollback", name="a", to=history[0]["version"][:10])
        assert to.json()["version"] == history[0]["version"]
        assert answer_of(server, "a") == setup.expected["three"]
        # What the operator's flag says holds, and the version before it stays in the history.

    with setup.server(data, "--adapter", f"a={setup.adapters['other']}") as server:
        assert answer_of(server, "a") == setup.expected["other"] == answer_of(server, "b")
        assert "instead of" in server.log.read_text()
        assert post(server, "/adapters/rollback", name="a").status_code == 200
        assert answer_of(server, "a") == setup.expected["three"]
        # Files go only when nobody needs them any more.
        for name, left in (("b", 4), ("c", 4), ("a", 0)):
            assert post(server, "/adapters/unload", name=name, purge=True).status_code == 200
            assert post(server, "/adapters/unload", name=name, purge=True).status_code == 404
            assert len(list((data / "versions").iterdir())) == left, name


def test_what_another_process_registers_is_seen_at_the_next_request(setup: Setup, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with setup.server(data) as server:
        one = server.load("a", setup.adapters["one"]).json()["version"]
        two = server.load("b", setup.adapters["two"]).json()["version"]
        missing = server.complete(PROMPT, lora="new", max_tokens=1)
        assert missing.status_code == 404
        with AdapterStore(data) as store:
            store.set_alias("new", one)
            assert answer_of(server, "new") == setup.expected["one"]
            store.set_alias("new", two, replace=True)
            assert answer_of(server, "new") == setup.expected["two"]
            store.remove_alias("new")
            assert server.complete(PROMPT, lora="new", max_tokens=1).status_code == 404
        limits = post(server, "/admin/limits", lora_memory="1MiB", host_lora_memory=2**20)
        assert limits.json()["lora_memory"]["limit"] == limits.json()["host_lora_memory"]["limit"] == 2**20
        assert answer_of(server, "a") == setup.expected["one"]
        assert post(server, "/admin/limits", lora_memory="1TiB").status_code == 400
        assert post(server, "/adapters/prefetch", name="b").status_code == 200
        until(lambda: info(server, "b")["residency"] == "device")
        assert server.metric("loraserve_adapter_requests_total", adapter="a") == 1
        assert server.metric("loraserve_adapter_tokens_total", adapter="a", direction="out") == COUNT
        assert server.metric("loraserve_adapter_bytes", tier="disk") > 10_000
        cold, warm = (
            server.metric("loraserve_adapter_time_to_first_token_seconds_count", residency=kind)
            for kind in ("cold", "warm")
        )
        assert cold >= 1
        assert cold + warm == 3
        until(lambda: server.metric("loraserve_adapter_tier_load_seconds_total", tier="host") > 0)
        assert server.metric("vllm:lora_requests_info", max_lora="256") > 1e9


def test_killed_while_names_change(setup: Setup, tmp_path: Path) -> None:
    data = tmp_path / "data"
    rng = random.Random()
    acknowledged: dict[str, str] = {}

    def change(server: LiveServer, stop: threading.Event) -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not stop.is_set():
                name, content = rng.choice("xyz"), rng.choice(("one", "two", "three"))
                try:
                    if rng.random() < 0.2:
                        client.post("/adapters/unload", json={"name": name, "purge": rng.random() < 0.7})
                        continue
                    if rng.random() < 0.3:
                        client.post("/adapters/rollback", json={"name": name})
                        continue
                    body = {"name": name, "path": str(setup.adapters[content]), "replace": True}
                    client.post("/adapters/load", json=body)
                except httpx.TransportError:
                    return

    with setup.server(data) as server:
        kept = server.load("kept", setup.adapters["other"]).json()["version"]
        for _ in range(2):
            stop = threading.Event()
            changing = threading.Thread(target=change, args=(server, stop))
            changing.start()
            time.sleep(rng.uniform(0.2, 0.8))
            server.kill()
            stop.set()
            changing.join()
            with AdapterStore(data) as store:
                recorded = {record.version for record in store.versions()}
                assert {path.name for path in (data / "versions").iterdir()} == recorded
                assert all(store.verify(version) for version in recorded)
                acknowledged = {alias.name: alias.version for alias in store.aliases()}
                assert acknowledged["kept"] == kept
            server.__enter__()
            for name, version in acknowledged.items():
                assert info(server, name)["version"] == version
            assert answer_of(server, "kept") == setup.expected["other"]


def test_a_data_folder_with_another_base_model(setup: Setup, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with setup.server(data) as server:
        assert server.load("a", setup.adapters["one"], pin=True).status_code == 200
        assert answer_of(server, "a") == setup.expected["one"]
    other = make_model(tmp_path / "other", seed=4, hidden_size=96)
    limits = ["--kv-memory", "8MiB", "--lora-memory", "8MiB", "--host-lora-memory", "32MiB", "--threads", "1"]
    with LiveServer(other, data, limits) as server:
        until(lambda: info(server, "a")["state"] == "failed")
        assert info(server, "a")["error"]["code"] == "shape_mismatch"
        for _ in range(3):
            refused = server.complete(PROMPT, lora="a", max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "shape_mismatch")
        assert server.complete(PROMPT, max_tokens=1).status_code == 200
    with setup.server(data) as server:
        until(lambda: info(server, "a")["residency"] == "device")
        assert info(server, "a")["state"] == "ready"
        assert answer_of(server, "a") == setup.expected["one"]
