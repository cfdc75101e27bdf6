"""A real `loraserve serve` process on a free port, for end-to-end tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil


class LiveServer:
    """Starts on entry, is ready then; SIGTERM on exit, and nothing may be left behind."""

    def __init__(
        self, model: Path | None, data_dir: Path, flags: Sequence[str] = (), env: Mapping[str, str] = {}
    ) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "loraserve.cli", "serve", "--port", str(self.port)]
        command += ["--data-dir", str(data_dir), *flags]
        if model is not None:
            command += ["--model", str(model), "--served-model-name", "base", "--dtype", "float32"]
        self._command = command
        self._env = os.environ | dict(env)
        self.log = data_dir / "server.log"
        self.client = httpx.Client(base_url=self.url, timeout=120)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LiveServer:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        self.wait_ready()
        return self

    def wait_ready(self, seconds: float = 120.0) -> None:
        """Wait for `/ready` to be green."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("not ready in time: " + self.log.read_text()[-4000:])

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        children = self.children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.client.close()
        _, alive = psutil.wait_procs(children, 10)
        for child in alive:
            child.kill()
        assert not alive, f"processes left behind: {alive}"

    def kill(self) -> None:
        """SIGKILL; the engine must notice and end by itself."""
        assert self.process is not None
        children = self.children()
        self.process.kill()
        self.process.wait(10)
        _, alive = psutil.wait_procs(children, 20)
        assert not alive, f"processes left behind: {alive}"

    def children(self) -> list[psutil.Process]:
        """The server's child processes; the engine is one."""
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        for child in self.children():
            if any("loraserve.engine.process" in part for part in child.cmdline()):
                return child.pid
        raise AssertionError("no engine process")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of all samples of a metric whose labels contain `labels`."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if match is None:
                continue
            found = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
            if all(found.get(key) == value for key, value in labels.items()):
                total += float(match[2])
        return total

    def load(self, name: str, path: Path, **fields: object) -> httpx.Response:
        """POST /adapters/load."""
        return self.client.post("/adapters/load", json={"name": name, "path": str(path), **fields})

    def complete(self, prompt: object, **fields: object) -> httpx.Response:
        """POST /v1/completions, greedy, EOS ignored."""
        body = {"model": "base", "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.client.post("/v1/completions", json=body | fields)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
