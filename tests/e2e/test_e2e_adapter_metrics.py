"""What the metrics say of adapters, checked against traffic whose every hit, load and eviction is known beforehand."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from live_server import LiveServer
from tiny_models import ATTENTION, make_adapter, make_model

PROMPT = [5, 80, 33, 120, 7, 64, 201]
NAMES = ("a", "b", "c")
TTFT = "loraserve_adapter_time_to_first_token_seconds"


class Setup:
    """A model, three adapters of one size, and a copy of the first."""

    def __init__(self, root: Path) -> None:
        self.model = make_model(root / "model", seed=3, max_position_embeddings=8192)
        self.folder = root / "adapters"
        for seed, name in enumerate(NAMES):
            make_adapter(self.model, self.folder / name, seed, r=4, lora_alpha=8, target_modules=ATTENTION)

    def server(self, data: Path, *flags: str) -> LiveServer:
        limits = ["--kv-memory", "8MiB", "--lora-memory", "8MiB", "--host-lora-memory", "32MiB", "--threads", "1"]
        return LiveServer(self.model, data, ["--adapter-dir", str(self.folder), *limits, *flags])


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("adapter-metrics"))


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def info(server: LiveServer) -> tuple[str, str]:
    """Adapters that run and that wait, as gateways read them."""
    found = re.findall(r"^vllm:lora_requests_info\{(.*)\} (\S+)$", server.client.get("/metrics").text, re.MULTILINE)
    assert len(found) == 1, "one sample: whatever came before must not look current"
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[0][0]))
    assert labels["max_lora"] == "256"
    assert abs(float(found[0][1]) - time.time()) < 30
    return labels["running_lora_adapters"], labels["waiting_lora_adapters"]


COUNTERS = {
    "host_loads": ("loraserve_adapter_tier_loads_total", {"tier": "host"}),
    "device_loads": ("loraserve_adapter_tier_loads_total", {"tier": "device"}),
    "host_evictions": ("loraserve_adapter_tier_evictions_total", {"tier": "host"}),
    "device_evictions": ("loraserve_adapter_tier_evictions_total", {"tier": "device"}),
    "hits": ("loraserve_adapter_lookups_total", {"found": "yes"}),
    "misses": ("loraserve_adapter_lookups_total", {"found": "no"}),
    "warm": (f"{TTFT}_count", {"residency": "warm"}),
    "cold": (f"{TTFT}_count", {"residency": "cold"}),
}


class Counting:
    """Expects counters to grow by so much, and nothing else to grow. The engine reports twice a second."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._expected = dict.fromkeys(COUNTERS, 0)

    def now(self) -> dict[str, int]:
        return {key: int(self._server.metric(name, **labels)) for key, (name, labels) in COUNTERS.items()}

    def expect(self, **more: int) -> None:
        for key, count in more.items():
            self._expected[key] += count
        end = time.monotonic() + 10
        while self.now() != self._expected and time.monotonic() < end:
            time.sleep(0.05)
        assert self.now() == self._expected

    def expect_but_for_the_host(self, **more: int) -> None:
        device_loads = self._expected["device_loads"] + more["device_loads"]
        until(lambda: self.now()["device_loads"] == device_loads)
        now = self.now()
        assert (
            now["host_loads"] - self._expected["host_loads"] == now["host_evictions"] - self._expected["host_evictions"]
        )
        for key in ("host_loads", "host_evictions"):
            more[key] = now[key] - self._expected[key]
        self.expect(**more)


def test_hits_loads_and_evictions_are_counted_right(setup: Setup, tmp_path: Path) -> None:
    with setup.server(tmp_path / "data") as server:
        counting = Counting(server)
        asked_s = 0.0

        def ask(name: str) -> None:
            nonlocal asked_s
            began = time.monotonic()
            assert server.complete(PROMPT, lora=name, max_tokens=2).status_code == 200
            asked_s += time.monotonic() - began

        for name in NAMES:
            assert server.load(name, setup.folder / name).status_code == 200
        counting.expect(host_loads=3)
        ask("a")
        counting.expect(device_loads=1, misses=1, cold=1)
        ask("a")
        counting.expect(hits=1, warm=1)
        # From here on one adapter fits on the device.
        one = server.client.get("/admin/limits").json()["lora_memory"]["used"]
        assert one == server.metric("loraserve_adapter_bytes", tier="device") > 0
        three = server.metric("loraserve_adapter_bytes", tier="host")
        assert server.client.post("/admin/limits", json={"lora_memory": one}).status_code == 200
        for name in "bab":
            ask(name)
            counting.expect(device_loads=1, device_evictions=1, misses=1, cold=1)
        ask("b")
        counting.expect(hits=1, warm=1)
        assert server.metric("loraserve_adapter_bytes", tier="device") == one
        # And one on the host: two of the three leave it, and each that comes back pushes another one out.
        assert server.client.post("/admin/limits", json={"host_lora_memory": int(three) // 3}).status_code == 200
        counting.expect(host_evictions=2)
        assert server.metric("loraserve_adapter_bytes", tier="host") == three / 3
        # Which one stayed is the eviction's choice, so how often "a" and "c" had to be staged is not known.
        for name in "ac":
            ask(name)
            counting.expect_but_for_the_host(device_loads=1, device_evictions=1, misses=1, cold=1)
        for name in "bac":
            ask(name)
            counting.expect(host_loads=1, host_evictions=1, device_loads=1, device_evictions=1, misses=1, cold=1)
        ask("c")
        counting.expect(hits=1, warm=1)
        assert server.metric("loraserve_adapter_versions", state="resident") == 1
        assert 0 < server.metric(f"{TTFT}_sum") < asked_s
        assert server.metric("loraserve_adapter_requests_total", adapter="a") == 5


class Stream:
    """A request that generates until its client leaves."""

    def __init__(self, server: LiveServer, lora: str) -> None:
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server, lora))
        self._thread.start()

    def _run(self, server: LiveServer, lora: str) -> None:
        body = {"model": "base", "prompt": PROMPT, "lora": lora, "temperature": 0, "ignore_eos": True}
        body |= {"max_tokens": 8000, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for _ in answer.iter_bytes():
                if self._left.is_set():
                    return

    def leave(self) -> None:
        self._left.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_lora_requests_info_follows_the_traffic(setup: Setup, tmp_path: Path) -> None:
    with setup.server(tmp_path / "data", "--max-running", "1") as server:
        for name in NAMES:
            assert server.load(name, setup.folder / name).status_code == 200
        assert info(server) == ("", "")
        a = Stream(server, "a")
        until(lambda: info(server) == ("a", ""))
        c = Stream(server, "c")
        until(lambda: info(server) == ("a", "c"))
        b = Stream(server, "b")
        until(lambda: info(server) == ("a", "b,c"))
        assert server.metric("vllm:num_requests_running") == 1
        assert server.metric("vllm:num_requests_waiting") == 2
        # A client that waits is served nothing, so it hears of leaving only when its turn has come.
        a.leave()
        until(lambda: info(server) == ("c", "b"))
        c.leave()
        until(lambda: info(server) == ("b", ""))
        b.leave()
        until(lambda: info(server) == ("", ""))
        until(lambda: server.metric("vllm:num_requests_running") == 0)
