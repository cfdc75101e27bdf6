"""A server that speaks enough of the Hub's HTTP API for the real client, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
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
    cut: int | None = None  # the connection ends after so many bytes of the body
    pace: float = 0.0  # seconds that the body takes
    stall_s: float = 0.0  # before anything is answered
    stop_at: int | None = None  # after so many bytes of the body nothing comes, until `stall_s` are over


@dataclass
class FakeHub:
    """Repositories by name, and rules that may spoil a request."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: set[str] = field(default_factory=lambda: {"main", COMMIT})
    tokens: dict[str, str] = field(default_factory=dict)  # private repositories and what opens them
    gated: set[str] = field(default_factory=set)
    spoil: Callable[[str, str, int], Answer | None] = lambda method, path, count: None
    damaged: set[str] = field(default_factory=set)  # files whose bytes are flipped on the way, by path
    cuts: dict[str, list[int]] = field(default_factory=dict)  # file → where its next answers are cut
    pace: dict[str, float] = field(default_factory=dict)  # file → seconds that it takes
    blob_host: str = ""  # files are redirected there, as the Hub does with large ones
    blob_tokens: list[str | None] = field(default_factory=list)  # what came along to the blob storage
    ranges: list[str] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)  # repository → commit, if it is not COMMIT
    requests: list[tuple[str, str]] = field(default_factory=list)
    cookies: list[str] = field(default_factory=list)  # that came back; every answer sets one
    endpoint: str = ""

    def answer(self, method: str, target: str, token: str | None, span: str | None = None) -> Answer:
        """The answer to one request."""
        path = unquote(urlsplit(target).path).lstrip("/")
        count = sum(1 for seen in self.requests if seen == (method, path))
        self.requests.append((method, path))
        spoiled = self.spoil(method, path, count)
        if spoiled is not None:
            return spoiled
        if path.startswith("blobs/"):
            self.blob_tokens.append(token)
            _, owner, name, *rest = path.split("/")
            return self._file(f"{owner}/{name}", "/".join(rest), method, span)
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.repos or self.tokens.get(repo, token) != token:
            return Answer(404, {"X-Error-Code": "RepoNotFound"})
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in self.revisions | {self.commits.get(repo, COMMIT)}:
            return Answer(404, {"X-Error-Code": "RevisionNotFound"})
        if api and rest == ["auth-check"] and repo in self.gated:
            return Answer(403, {"X-Error-Code": "GatedRepo"})
        if api:
            return Answer(200, body=json.dumps(self._info(repo)).encode())
        if repo in self.gated:
            return Answer(403, {"X-Error-Code": "GatedRepo"})
        name = "/".join(rest[2:])
        found = self._file(repo, name, method, span)
        if self.blob_host and name.endswith(".safetensors") and found.status in (200, 206):
            etag = found.headers.pop("ETag")
            size = str(len(self.repos[repo][name]))
            found.headers |= {"X-Linked-Etag": etag, "X-Linked-Size": size}
            found.headers["Location"] = f"{self.blob_host}/blobs/{repo}/{name}"
            return Answer(302, found.headers, b"")
        return found

    def _info(self, repo: str) -> dict[str, Any]:
        siblings = []
        for name, data in self.repos[repo].items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _git_name(data)}
            if name.endswith(".safetensors"):
                sibling["lfs"] = {"sha256": _sha(data), "size": len(data), "pointerSize": 130}
            siblings.append(sibling)
        return {"_id": "1", "id": repo, "modelId": repo, "sha": self.commits.get(repo, COMMIT)} | {
            "private": repo in self.tokens,
            "gated": "manual" if repo in self.gated else False,
            "siblings": siblings,
        }

    def _file(self, repo: str, name: str, method: str, span: str | None) -> Answer:
        if name not in self.repos[repo]:
            return Answer(404, {"X-Error-Code": "EntryNotFound"})
        data = self.repos[repo][name]
        commit = self.commits.get(repo, COMMIT)
        etag = _sha(data) if name.endswith(".safetensors") else _git_name(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if name in self.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        status = 200
        if span is not None and method == "GET":
            self.ranges.append(span)
            first = int(span.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            data, status = data[first:], 206
        answer = Answer(status, headers, data, pace=self.pace.get(name, 0.0))
        if method == "GET" and self.cuts.get(name):
            answer.cut = self.cuts[name].pop(0)
        return answer


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_name(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the hub on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
            hub.cookies += self.headers.get_all("Cookie", [])
            answer = hub.answer(self.command, self.path, token, self.headers.get("Range"))
            if answer.stop_at is None:
                time.sleep(answer.stall_s)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.send_header("Set-Cookie", "session=1; Path=/")
            self.end_headers()
            if self.command != "HEAD":
                self.send_body(answer)

        def send_body(self, answer: Answer) -> None:
            body = answer.body[: answer.cut]
            pieces = 20 if answer.pace else 1
            size = max(1, -(-len(body) // pieces))
            if answer.stop_at is not None:
                self.wfile.write(body[: answer.stop_at])
                self.wfile.flush()
                time.sleep(answer.stall_s)
                body = body[answer.stop_at :]
            for start in range(0, len(body), size):
                time.sleep(answer.pace / pieces)
                try:
                    self.wfile.write(body[start : start + size])
                except OSError:
                    return
            if answer.cut is not None:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        do_GET = do_HEAD = reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # clients may hang up
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
