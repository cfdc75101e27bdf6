"""Two servers on one data folder: what one purges while the other one uses it breaks neither."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_hub import FakeHub, serve
from live_server import LiveServer
from tiny_models import ATTENTION, Oracle, make_adapter, make_model

COUNT = 6
PROMPT = [5, 80, 33, 120, 7, 64, 201]


class Setup:
    """A model, three adapters of one size, and a Hub that has the first."""

    def __init__(self, root: Path) -> None:
        self.model = make_model(root / "model", seed=3, max_position_embeddings=4096)
        self.folder = root / "made"
        made = [
            make_adapter(self.model, self.folder / str(seed), seed, r=4, lora_alpha=8, target_modules=ATTENTION)
            for seed in range(3)
        ]
        oracle = Oracle(self.model)
        self.expected = [oracle.greedy(folder, PROMPT, COUNT) for folder in made]
        self.made = made
        self.hub = FakeHub({"org/open": {path.name: path.read_bytes() for path in made[0].iterdir()}})
        self.env = {
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_CACHE": str(root / "hub-cache"),
            "HF_TOKEN_PATH": str(root / "no-token"),
            "HF_TOKEN": "",
        }

    def server(self, data: Path, log: Path) -> LiveServer:
        flags = ["--kv-memory", "8MiB", "--lora-memory", "8MiB", "--host-lora-memory", "32MiB", "--threads", "1"]
        flags += ["--adapter-dir", str(self.folder), "--adapter-source", "hub:org/*"]
        # The later of two flags counts; the log must not be shared.
        return LiveServer(self.model, log, [*flags, "--data-dir", str(data)], self.env)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(tmp_path_factory.mktemp("shared"))
    with serve(setup.hub):
        setup.env["HF_ENDPOINT"] = setup.hub.endpoint
        yield setup


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def both(setup: Setup, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LiveServer]]:
    logs = tmp_path_factory.mktemp("logs")
    with setup.server(data, logs / "1") as one, setup.server(data, logs / "2") as two:
        yield [one, two]


def tokens(server: LiveServer, lora: str) -> list[int]:
    answer = server.complete(PROMPT, lora=lora, max_tokens=COUNT)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def post(server: LiveServer, where: str, **body: Any) -> httpx.Response:
    return server.client.post(where, json=body)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def stored(data: Path) -> set[str]:
    return {path.name for path in (data / "versions").iterdir()}


def test_what_one_purges_the_other_still_has(both: list[LiveServer], setup: Setup, data: Path) -> None:
    one, two = both
    for server in both:
        assert tokens(server, "org/open") == setup.expected[0]
    (version,) = stored(data)
    assert post(one, "/adapters/unload", name="org/open", purge=True).status_code == 200
    assert stored(data) == {version}, "the other one uses it"
    # There it leaves device and host, so that it has to be read again.
    assert post(two, "/adapters/load", name="big", path=str(setup.made[1])).status_code == 200
    until(lambda: two.client.get("/admin/limits").json()["lora_memory"]["used"] > 0)
    used = two.client.get("/admin/limits").json()
    limits = {"lora_memory": used["lora_memory"]["used"], "host_lora_memory": used["host_lora_memory"]["used"] // 2}
    assert post(two, "/admin/limits", **limits).status_code == 200
    loads = two.metric("loraserve_adapter_tier_loads_total", tier="host")
    for _ in range(2):
        assert tokens(two, "big") == setup.expected[1]
        assert tokens(two, "org/open") == setup.expected[0]
    until(lambda: two.metric("loraserve_adapter_tier_loads_total", tier="host") > loads)
    assert tokens(one, "org/open") == setup.expected[0], "it comes again when it is named again"
    for server in both:
        assert post(server, "/adapters/unload", name="org/open", purge=True).status_code == 200
    until(lambda: version not in stored(data))
    assert post(two, "/adapters/unload", name="big", purge=True).status_code == 200
    assert stored(data) == set()


def test_a_name_that_one_purges_while_the_other_one_answers(both: list[LiveServer], setup: Setup, data: Path) -> None:
    one, two = both
    version = post(one, "/adapters/load", name="a", path=str(setup.made[2])).json()["version"]
    assert tokens(two, "a") == setup.expected[2]
    started, answers = threading.Event(), []

    def stream() -> None:
        body = {"model": "base", "prompt": PROMPT, "lora": "a", "max_tokens": 1500, "temperature": 0, "stream": True}
        with two.client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
            for line in answer.iter_lines():
                started.set()
                answers.append(line)

    thread = threading.Thread(target=stream)
    thread.start()
    assert started.wait(30)
    assert post(one, "/adapters/unload", name="a", purge=True).status_code == 200
    running = thread.is_alive()
    assert two.complete(PROMPT, lora="a", max_tokens=1).status_code == 404
    assert not running or version in stored(data)
    thread.join(60)
    assert "data: [DONE]" in answers
    assert not any('"error"' in line for line in answers)
    until(lambda: stored(data) == set())


def test_a_killed_server_holds_nothing(both: list[LiveServer], setup: Setup, data: Path) -> None:
    one, two = both
    for server in both:
        assert tokens(server, "org/open") == setup.expected[0]
    two.kill()
    assert post(one, "/adapters/unload", name="org/open", purge=True).status_code == 200
    assert stored(data) == set()
    assert tokens(one, "org/open") == setup.expected[0]
