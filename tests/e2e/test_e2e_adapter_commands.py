"""`loraserve adapters …` and `loraserve pull` as commands, against a real server and a Hub."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, serve
from live_server import LiveServer
from tiny_models import ATTENTION, Oracle, make_adapter, make_model

COUNT = 6
PROMPT = [5, 80, 33, 120, 7, 64, 201]
WEIGHTS = "adapter_model.safetensors"


class Setup:
    """A server that wants an admin key, two adapters, and a Hub that has them."""

    def __init__(self, root: Path) -> None:
        self.model = make_model(root / "model", seed=3)
        self.folder = root / "adapters"
        self.made = [
            make_adapter(self.model, self.folder / name, seed, r=4, lora_alpha=8, target_modules=ATTENTION)
            for seed, name in enumerate(("one", "two"))
        ]
        oracle = Oracle(self.model)
        self.expected = [oracle.greedy(path, PROMPT, COUNT) for path in self.made]
        files = {path.name: path.read_bytes() for path in self.made[0].iterdir()}
        own = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
        self.hub = FakeHub({"org/own": files | {"chat_template.jinja": own.encode()}})
        self.env = os.environ | {
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_CACHE": str(root / "hub-cache"),
            "HF_TOKEN_PATH": str(root / "no-token"),
            "HF_TOKEN": "",
            "COLUMNS": "160",
        }


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(tmp_path_factory.mktemp("commands"))
    with serve(setup.hub):
        setup.env["HF_ENDPOINT"] = setup.hub.endpoint
        yield setup


@pytest.fixture(scope="module")
def server(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ["--kv-memory", "8MiB", "--lora-memory", "8MiB", "--host-lora-memory", "32MiB", "--threads", "1"]
    flags += ["--adapter-dir", str(setup.folder), "--admin-key", "adm"]
    with LiveServer(setup.model, tmp_path_factory.mktemp("data"), flags, setup.env) as live:
        live.client.headers["Authorization"] = "Bearer adm"
        yield live


def answer_of(server: LiveServer, lora: str) -> list[int]:
    answer = server.complete(PROMPT, lora=lora, max_tokens=COUNT)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_versions_pins_and_purge(server: LiveServer, setup: Setup) -> None:
    def run(command: str, *arguments: str, status: int = 0, key: str = "adm") -> Any:
        line = [sys.executable, "-m", "loraserve.cli", "adapters", command, *arguments]
        env = setup.env | {"LORASERVE_SERVER": server.url, "LORASERVE_ADMIN_KEY": key}
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        if status:
            assert "Traceback" not in done.stderr
            return done.stderr
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    one, two = (str(path) for path in setup.made)
    first = run("load", "a", one, "--json")["version"]
    second = run("load", "a", two, "--replace", "--json")["version"]
    history = run("history", "a", "--json")["data"]
    assert [(entry["version"], entry["current"]) for entry in history] == [(second, True), (first, False)]
    text = run("history", "a")
    assert first[:12] in text
    assert "* " + second[:12] in text.replace("*  ", "* ")
    assert run("rollback", "a", "--json")["version"] == first
    assert answer_of(server, "a") == setup.expected[0]
    assert "no_older_version" in run("rollback", "a", status=1)
    assert run("rollback", "a", "--to", second[:8], "--json")["version"] == second
    assert answer_of(server, "a") == setup.expected[1]
    assert run("pin", "a", "--json")["pinned"]
    assert not run("pin", "a", "--off", "--json")["pinned"]
    assert run("prefetch", "a", "--to", "host", "--json")["residency"] in ("host", "device")
    assert "invalid_request" in run("prefetch", "a", "--to", "moon", status=1)
    assert "invalid_api_key" in run("pin", "a", status=1, key="wrong")
    versions = server.log.parent / "versions"
    assert {first, second} <= {path.name for path in versions.iterdir()}
    assert "unloaded" in run("unload", "a", "--purge")
    assert not {first, second} & {path.name for path in versions.iterdir()}
    for command in ("unload", "history", "rollback", "pin", "prefetch"):
        assert "adapter_not_found" in run(command, "a", status=1), command


def test_a_pull_in_a_terminal_shows_how_far_it_is_and_keeps_the_chat_template(
    server: LiveServer, setup: Setup, tmp_path: Path
) -> None:
    setup.hub.pace[WEIGHTS] = 1.5
    screen, terminal = pty.openpty()
    line = [sys.executable, "-m", "loraserve.cli", "pull", "org/own", "--data-dir", str(server.log.parent)]
    with subprocess.Popen(line, env=setup.env | {"TERM": "xterm"}, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        try:
            while piece := os.read(screen, 4096):
                shown += piece
        except OSError:  # the other end is closed
            pass
        os.close(screen)
        assert process.wait() == 0, shown.decode()
    text = shown.decode()
    assert re.search(rf"file \d/3 {WEIGHTS}", text), "while it is under way, not afterwards"
    assert "/s" in text, "speed"
    assert "0:00:0" in text, "time left"
    assert "org/own: version " in text
    assert answer_of(server, "org/own") == setup.expected[0]
    info = server.client.get("/adapters/org/own").json()
    assert (info["state"], info["chat_template"]) == ("ready", "own")
