"""A server that speaks enough of the Hub's HTTP API for the real client, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Answer:
    """What to answer instead of the truth."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"


@dataclass
class FakeHub:
    """Repositories by name, and rules that may spoil a request."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: set[str] = field(default_factory=lambda: {"main", COMMIT})
    tokens: dict[str, str] = field(default_factory=dict)  # private repositories and what opens them
    gated: set[str] = field(default_factory=set)
    spoil: Callable[[str, str, int], Answer | None] = lambda method, path, count: None
    damaged: set[str] = field(default_factory=set)  # files whose bytes are flipped on the way, by path
    requests: list[tuple[str, str]] = field(default_factory=list)
    endpoint: str = ""

    def answer(self, method: str, target: str, token: str | None) -> Answer:
        """The answer to one request."""
        path = unquote(urlsplit(target).path).lstrip("/")
        count = sum(1 for seen in self.requests if seen == (method, path))
        self.requests.append((method, path))
        spoiled = self.spoil(method, path, count)
        if spoiled is not None:
            return spoiled
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.repos or self.tokens.get(repo, token) != token:
            return Answer(404, {"X-Error-Code": "RepoNotFound"})
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in self.revisions:
            return Answer(404, {"X-Error-Code": "RevisionNotFound"})
        if api:
            return Answer(200, body=json.dumps(self._info(repo)).encode())
        if repo in self.gated:
            return Answer(403, {"X-Error-Code": "GatedRepo"})
        return self._file(repo, "/".join(rest[2:]))

    def _info(self, repo: str) -> dict[str, Any]:
        siblings = []
        for name, data in self.repos[repo].items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _sha(data)[:40]}
            if name.endswith(".safetensors"):
                sibling["lfs"] = {"sha256": _sha(data), "size": len(data), "pointerSize": 130}
            siblings.append(sibling)
        return {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings}

    def _file(self, repo: str, name: str) -> Answer:
        if name not in self.repos[repo]:
            return Answer(404, {"X-Error-Code": "EntryNotFound"})
        data = self.repos[repo][name]
        headers = {"ETag": f'"{_sha(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if name in self.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        return Answer(200, headers, data)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the hub on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
            answer = hub.answer(self.command, self.path, token)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_HEAD = reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
