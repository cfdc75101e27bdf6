"""Every malformed adapter, loaded into a live server one after another while another adapter keeps streaming."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_server import LiveServer
from raw_adapters import HIDDEN, INTER, KV, LAYERS, VOCAB, write
from test_lora_format_refused import CASES
from tiny_models import make_model

HEADS = 4
PROMPT = list(range(5, 25))
NORMAL_S = 2.0  # of streaming before, and again after the loads


@dataclass
class Stream:
    """One client that streams from an adapter again and again, and how long it waited between two events."""

    client: httpx.AsyncClient
    loading: bool = False
    stopped: bool = False
    gaps: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    answers: list[list[int]] = field(default_factory=list)

    async def run(self) -> None:
        body = {"model": "steady", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 300}
        while not self.stopped:
            tokens: list[int] = []
            async with self.client.stream(
                "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}
            ) as response:
                assert response.status_code == 200
                before, was_loading = None, self.loading
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    if before is not None:
                        self.gaps[self.loading or was_loading].append(now - before)
                    before, was_loading = now, self.loading
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
            self.answers.append(tokens)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


@pytest.mark.timeout(280)
def test_each_is_refused_in_time_while_another_adapter_streams(tmp_path: Path) -> None:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV * HEADS // HIDDEN}
    model = make_model(tmp_path / "model", seed=2, tie_word_embeddings=False, **sizes, **heads)
    folders = {case: tmp_path / "adapters" / case for case in CASES}
    for case, folder in folders.items():
        folder.mkdir(parents=True)
        CASES[case][1](folder)
    steady = write(tmp_path / "adapters" / "steady")
    assert len(CASES) >= 60
    data = tmp_path / "data"
    flags = ["--adapter-dir", str(tmp_path / "adapters"), "--max-lora-rank", "64", "--adapter", f"steady={steady}"]
    flags += ["--kv-memory", "16MiB", "--lora-memory", "16MiB", "--host-lora-memory", "64MiB"]
    with LiveServer(model, data, flags) as server:
        before = _state(server, data)
        stream, wrong = asyncio.run(_load_all(server, folders))
        assert not wrong
        # The same greedy answer every time, whatever was being loaded.
        assert len(stream.answers) > 2
        assert len(set(map(tuple, stream.answers))) == 1
        # On a machine that others use too, single gaps mean little: the bulk, and the tail with a wide margin.
        normal, loading = stream.gaps[False], stream.gaps[True]
        assert len(loading) > 100
        for share, margin in ((0.5, 3.0), (0.99, 5.0)):
            ratio = percentile(loading, share) / percentile(normal, share)
            assert ratio < margin, f"at {share}: {ratio:.1f} times the normal gap"
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/ready").status_code == 200
        assert _state(server, data) == before
        assert server.load("late", steady).status_code == 200
    assert not Path("pickle-ran").exists()


async def _load_all(server: LiveServer, folders: dict[str, Path]) -> tuple[Stream, dict[str, Any]]:
    """Load them all; which were answered with another code, or not within 5 s."""
    wrong: dict[str, Any] = {}
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60) as streaming,
        httpx.AsyncClient(base_url=server.url, timeout=60) as loading,
    ):
        stream = Stream(streaming)
        running = asyncio.create_task(stream.run())
        await asyncio.sleep(NORMAL_S)
        stream.gaps[False].clear()  # the first answers warm everything up
        await asyncio.sleep(NORMAL_S)
        for i, (case, folder) in enumerate(folders.items()):
            stream.loading, began = True, time.monotonic()
            response = await loading.post("/adapters/load", json={"name": f"bad-{i}", "path": str(folder)})
            seconds, stream.loading = time.monotonic() - began, False
            found = response.json().get("error", {}).get("code")
            if found != CASES[case][0] or not 400 <= response.status_code < 500 or seconds >= 5:
                wrong[case] = (found, response.status_code, seconds)
            assert not running.done()
        await asyncio.sleep(NORMAL_S)
        stream.stopped = True
        await running
    return stream, wrong


def _state(server: LiveServer, data: Path) -> Any:
    """All that a refused load could leave behind."""
    assert server.process is not None
    names = [(info["name"], info["state"]) for info in server.client.get("/adapters").json()["data"]]
    files = sorted(str(path.relative_to(data)) for path in (data / "versions").rglob("*"))
    unfinished = [path for path in (data / "tmp").rglob("*") if path.parent != data / "tmp"]
    processes = [psutil.Process(server.process.pid), *server.children()]
    regular = Counter(file.path for process in processes for file in process.open_files() if "adapters" in file.path)
    return names, files, unfinished, len(processes), regular
