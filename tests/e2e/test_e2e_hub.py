"""Adapters from a Hub through a real server and through `loraserve pull`: right answers, progress, every error code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import COMMIT, Answer, FakeHub, serve
from live_server import LiveServer
from tiny_models import ATTENTION, Oracle, make_adapter, make_model

COUNT = 6
PROMPT = [5, 80, 33, 120, 7, 64, 201]
WEIGHTS = "adapter_model.safetensors"


class Setup:
    """A model, two adapters of it on a Hub, and a server that asks this Hub."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = make_model(root / "model", seed=3)
        folders = [
            make_adapter(self.model, root / "made" / str(seed), seed, r=4, lora_alpha=8, target_modules=ATTENTION)
            for seed in range(2)
        ]
        oracle = Oracle(self.model)
        self.expected = [oracle.greedy(folder, PROMPT, COUNT) for folder in folders]
        self.files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
        self.hub = FakeHub()
        self.reset()

    def reset(self) -> None:
        """The Hub as it is at first."""
        fresh = FakeHub({"org/one": dict(self.files[0]), "org/two": dict(self.files[1])}, endpoint=self.hub.endpoint)
        fresh.repos["org/deep"] = {f"runs/5/{name}": data for name, data in self.files[1].items()}
        fresh.repos["org/bad"] = self.files[0] | {WEIGHTS: b"\x08\0\0\0\0\0\0\0{broken}"}
        fresh.repos["org/model"] = {"config.json": b"{}", "model.safetensors": b"x"}
        for name, value in vars(fresh).items():
            setattr(self.hub, name, value)

    @property
    def env(self) -> dict[str, str]:
        """For processes that are to ask this Hub and no other."""
        return {
            "HF_ENDPOINT": self.hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_CACHE": str(self.root / "hub-cache"),
            "HF_TOKEN_PATH": str(self.root / "no-token"),
            "HF_TOKEN": "",
        }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(tmp_path_factory.mktemp("hub"))
    with serve(setup.hub):
        yield setup


@pytest.fixture
def setup(made: Setup) -> Setup:
    made.reset()
    return made


@pytest.fixture(scope="module")
def server(made: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = ["--kv-memory", "8MiB", "--lora-memory", "8MiB", "--host-lora-memory", "32MiB", "--threads", "1"]
    with LiveServer(made.model, tmp_path_factory.mktemp("data"), limits, made.env) as live:
        yield live


def load(server: LiveServer, name: str, repo: str, **fields: Any) -> tuple[int, Any]:
    answer = server.client.post("/adapters/load", json={"name": name, "repo": repo, **fields})
    return answer.status_code, answer.json()


def answer_of(server: LiveServer, lora: object, status: int = 200, **headers: str) -> Any:
    body = {"model": "base", "prompt": PROMPT, "lora": lora, "max_tokens": COUNT, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = server.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()["choices"][0]["token_ids"] if status == 200 else answer.json()["error"]["code"]


def test_a_load_with_wait(server: LiveServer, setup: Setup) -> None:
    status, info = load(server, "mine", "org/one", revision="main")
    assert status == 200, info
    source = {"kind": "hub", "path": None, "repo": "org/one", "revision": "main", "commit": COMMIT, "subfolder": None}
    assert info["source"] == source
    assert info["state"] == "ready"
    assert answer_of(server, "mine") == setup.expected[0]
    assert load(server, "mine", "org/one", revision="main")[0] == 200
    status, problem = load(server, "mine", "org/two")
    assert (status, problem["error"]["code"]) == (409, "name_taken")
    status, info = load(server, "deep", "org/deep", subfolder="runs/5")
    assert (status, info["source"]["subfolder"]) == (200, "runs/5")
    assert answer_of(server, "deep") == setup.expected[1]


def test_a_load_without_wait_is_polled(server: LiveServer, setup: Setup) -> None:
    shutil.rmtree(setup.root / "hub-cache", ignore_errors=True)
    setup.hub.pace[WEIGHTS] = 1.5
    status, info = load(server, "polled", "org/two", wait=False)
    assert (status, info["state"], info["version"]) == (202, "fetching", None)
    assert answer_of(server, "polled", 409) == "adapter_in_use"
    seen = []
    while info["state"] == "fetching":
        seen.append(info["progress"])
        time.sleep(0.05)
        info = server.client.get("/adapters/polled").json()
    assert (info["state"], info["error"], info["progress"]) == ("ready", None, None)
    total = sum(len(data) for name, data in setup.files[1].items() if name != "README.md")
    assert {progress["bytes_total"] for progress in seen} >= {total}
    done = [progress["bytes_done"] for progress in seen if progress["bytes_total"]]
    assert done == sorted(done)
    assert answer_of(server, "polled") == setup.expected[1]


FAULTS: list[tuple[str, dict[str, Any], Answer | None, int]] = [
    ("repo_not_found", {"repo": "org/absent"}, None, 404),
    ("repo_not_found", {"repo": "org/private"}, None, 404),
    ("repo_not_found", {"repo": "org/private", "token": "hf_wrong"}, None, 404),
    ("revision_not_found", {"repo": "org/one", "revision": "v9"}, None, 404),
    ("subfolder_not_found", {"repo": "org/one", "subfolder": "absent"}, None, 404),
    ("hub_access_denied", {"repo": "org/gated"}, None, 403),
    ("hub_rate_limited", {"repo": "org/one"}, Answer(429, {"Retry-After": "99"}), 503),
    ("hub_error", {"repo": "org/one"}, Answer(500, {"Retry-After": "0"}), 502),
    ("hub_error", {"repo": "org/one"}, Answer(200, body=b"<html>"), 502),
    ("hub_checksum_mismatch", {"repo": "org/damaged"}, None, 502),
    ("not_an_adapter", {"repo": "org/model"}, None, 400),
    ("corrupt_weights", {"repo": "org/bad"}, None, 400),
    ("invalid_name", {"repo": "../etc"}, None, 400),
]


@pytest.mark.parametrize(("code", "fields", "answer", "status"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_load_that_fails_leaves_nothing(
    server: LiveServer, setup: Setup, code: str, fields: dict[str, Any], answer: Answer | None, status: int
) -> None:
    hub = setup.hub
    hub.repos |= {"org/private": setup.files[0], "org/gated": setup.files[0], "org/damaged": setup.files[0]}
    hub.tokens["org/private"] = "hf_right"
    hub.gated.add("org/gated")
    hub.spoil = lambda method, path, count: answer
    if "damaged" in fields["repo"]:
        hub.damaged.add(WEIGHTS)
    versions = server.log.parent / "versions"
    before = {path.name for path in versions.iterdir()} if versions.exists() else set()
    found, problem = load(server, "failing", **fields)
    assert (found, problem["error"]["code"]) == (status, code), problem
    assert hub.endpoint not in problem["error"]["message"]
    assert server.client.get("/adapters/failing").status_code == 404
    assert ({path.name for path in versions.iterdir()} if versions.exists() else set()) == before
    # In the background the name tells what went wrong, until it is loaded well or unloaded.
    assert load(server, "failing", **fields, wait=False)[0] == 202
    info = server.client.get("/adapters/failing").json()
    while info["state"] == "fetching":
        time.sleep(0.02)
        info = server.client.get("/adapters/failing").json()
    assert (info["state"], info["error"]["code"]) == ("failed", code)
    assert answer_of(server, "failing", 404) == "adapter_not_found"
    assert server.client.post("/adapters/unload", json={"name": "failing"}).status_code == 200


def run_pull(setup: Setup, data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loraserve.cli", "pull", *arguments, "--data-dir", str(data)]
    if "--server" in arguments:
        command = command[:-2]
    return subprocess.run(command, env=os.environ | setup.env, capture_output=True, text=True, check=False)


def test_pull_into_the_folder_of_a_running_server(server: LiveServer, setup: Setup) -> None:
    data = server.log.parent
    result = run_pull(setup, data, "org/one", "--json")
    assert result.returncode == 0, result.stderr
    pulled = json.loads(result.stdout)
    assert (pulled["name"], pulled["source"]["commit"]) == ("org/one", COMMIT)
    assert answer_of(server, "org/one") == setup.expected[0]
    assert server.client.get("/adapters/org/one").json()["version"] == pulled["version"]
    # A newer commit under the same name: only when that is asked for, and then at the next request.
    setup.hub.commits["org/one"] = "f" * 40
    setup.hub.repos["org/one"] = dict(setup.files[1])
    refused = run_pull(setup, data, "org/one")
    assert refused.returncode == 1
    assert "name_taken" in refused.stderr
    assert answer_of(server, "org/one") == setup.expected[0]
    assert run_pull(setup, data, "org/one", "--replace").returncode == 0
    assert answer_of(server, "org/one") == setup.expected[1]
    assert server.client.post("/adapters/rollback", json={"name": "org/one"}).status_code == 200
    assert answer_of(server, "org/one") == setup.expected[0]


def test_pull_through_a_server(server: LiveServer, setup: Setup) -> None:
    result = run_pull(setup, Path(), "org/two", "--name", "through", "--server", server.url)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("through: version ")
    assert answer_of(server, "through") == setup.expected[1]
    failed = run_pull(setup, Path(), "org/absent", "--server", server.url)
    assert (failed.returncode, "repo_not_found" in failed.stderr) == (1, True)


def test_a_killed_pull_leaves_no_half_version_and_goes_on(setup: Setup, tmp_path: Path) -> None:
    shutil.rmtree(setup.root / "hub-cache", ignore_errors=True)
    setup.hub.pace[WEIGHTS] = 30.0
    command = [sys.executable, "-m", "loraserve.cli", "pull", "org/one", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, env=os.environ | setup.env) as process:
        end = time.monotonic() + 60
        while not any(method == "GET" and path.endswith(WEIGHTS) for method, path in setup.hub.requests):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    setup.hub.pace.clear()
    setup.hub.requests.clear()
    assert run_pull(setup, tmp_path, "org/one").returncode == 0
    assert len(list((tmp_path / "versions").iterdir())) == 1
    again = [path for method, path in setup.hub.requests if method == "GET" and "/resolve/" in path]
    assert again == [path for path in again if path.endswith(WEIGHTS)], "what was whole is not fetched again"
    offline = run_pull_offline(setup, tmp_path / "offline")
    assert offline.returncode == 0, offline.stderr


def run_pull_offline(setup: Setup, data: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loraserve.cli", "pull", "org/one", "--data-dir", str(data)]
    env = os.environ | setup.env | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
