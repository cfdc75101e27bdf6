"""Hubs, mirrors and proxies that answer otherwise than the Hub does: refused by name, and never wrong bytes."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_hub import COMMIT, Answer, FakeHub
from hub_pulls import FILES, SQL, pull, refusal
from huggingface_hub import constants, scan_cache_dir, snapshot_download

from loraserve.lora import hub_get
from loraserve.lora.hub import HubRepo

CONFIG, WEIGHTS = FILES


def read(hub: FakeHub, tmp_path: Path, **options: Any) -> None:
    """Pull, and compare every byte."""
    folder = pull(hub, tmp_path, **options).folder.path
    for name in FILES:
        assert (folder / name).read_bytes() == hub.repos["org/sql"][name], name


# -- what describes a repository --------------------------------------------------------------------------------------


def every_sibling(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(info: dict[str, Any]) -> None:
        info["siblings"] = [sibling | changes for sibling in info["siblings"]]

    return change


def field(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda info: info.update(changes)


@pytest.mark.parametrize(
    "change",
    [
        field(sha=5),
        field(sha=None),
        field(sha="../../../../x"),
        field(siblings=None),
        field(siblings="abc"),
        field(siblings=[1]),
        field(siblings=[{}]),
        field(siblings=[{"rfilename": 5}]),
        every_sibling(size="10"),
        every_sibling(size=-1),
        every_sibling(size=1.5),
        every_sibling(size=True),
        every_sibling(size=10**30),
        every_sibling(lfs="x"),
        every_sibling(lfs={"sha256": 5}),
        every_sibling(lfs={"sha256": "../../../x"}),
        every_sibling(blobId=5),
    ],
)
def test_answers_of_wrong_types(change: Callable[[dict[str, Any]], None], hub: FakeHub, tmp_path: Path) -> None:
    info = hub._info("org/sql")
    change(info)
    answer = Answer(200, body=json.dumps(info).encode())
    hub.spoil = lambda method, path, count: answer if path.startswith("api/") else None
    assert refusal(hub, tmp_path) == ("hub_error", 502)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000], ids=lambda body: repr(body[:9]))
def test_answers_that_describe_nothing(body: bytes, hub: FakeHub, tmp_path: Path) -> None:
    hub.spoil = lambda method, path, count: Answer(200, body=body)
    assert refusal(hub, tmp_path) == ("hub_error", 502)


@pytest.mark.parametrize(
    "change",
    [
        field(lastModified="yesterday", createdAt=5, cardData=[1], safetensors=5, config=5),
        every_sibling(blobId="../../x"),
        every_sibling(blobId=None, size=None, lfs=None),
    ],
)
def test_what_is_not_needed_may_be_anything(
    change: Callable[[dict[str, Any]], None], hub: FakeHub, tmp_path: Path
) -> None:
    info = hub._info("org/sql")
    change(info)
    hub.spoil = lambda m, path, c: Answer(200, body=json.dumps(info).encode()) if path.startswith("api/") else None
    for _ in range(2):
        read(hub, tmp_path)
    blobs = tmp_path / "cache" / "models--org--sql" / "blobs"
    assert {path.parent for path in (tmp_path / "cache").rglob("*") if path.is_file() and not path.is_symlink()} == {
        blobs,
        blobs.parent / "refs",
    }


def test_names_that_lead_elsewhere(hub: FakeHub, tmp_path: Path) -> None:
    info = hub._info("org/sql")
    for prefix, expected in (("../", ("not_an_adapter", 400)), ("/", ("not_an_adapter", 400))):
        moved = info | {"siblings": [each | {"rfilename": prefix + each["rfilename"]} for each in info["siblings"]]}
        body = json.dumps(moved).encode()
        hub.spoil = lambda method, path, count, body=body: Answer(200, body=body) if path[:4] == "api/" else None
        assert refusal(hub, tmp_path) == expected
    assert not (tmp_path / "cache").exists()


def test_files_without_a_size_are_bounded_together(hub: FakeHub, tmp_path: Path) -> None:
    info = hub._info("org/sql")
    every_sibling(size=None, lfs=None)(info)
    hub.spoil = lambda m, path, c: Answer(200, body=json.dumps(info).encode()) if path.startswith("api/") else None
    sizes = [len(hub.repos["org/sql"][name]) for name in FILES]
    assert refusal(hub, tmp_path, max_bytes=max(sizes) + min(sizes) - 1) == ("adapter_too_large", 400)


# -- answers with bytes -----------------------------------------------------------------------------------------------


def after_a_cut(
    hub: FakeHub, name: str, answer: Callable[[bytes], Answer], times: int = 1
) -> Callable[[str, str, int], Answer | None]:
    """The first transfer of a file is cut at byte 50; the next ones are answered so."""
    hub.cuts[name] = [50]
    data = hub.repos["org/sql"][name]
    return lambda m, path, count: answer(data) if path.endswith(f"/{name}") and 1 <= count <= times else None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "answer",
    [
        lambda data: Answer(206, {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"}, data),
        lambda data: Answer(206, {"Content-Range": f"bytes 47-{len(data) - 4}/{len(data)}"}, data[47:-3]),
        lambda data: Answer(206, {}, data[47:-3]),
        lambda data: Answer(
            206, {"Content-Range": f"bytes 50-{len(data) - 1}/{len(data)}", "Content-Encoding": "gzip"}
        ),
        lambda data: Answer(416),
        lambda data: Answer(200, {}, data),
        lambda data: Answer(200, {"Content-Encoding": "gzip"}, gzip.compress(data)),
    ],
    ids=["from the start", "shifted", "no range", "range of an encoding", "416", "no ranges", "encoded"],
)
def test_what_goes_on_elsewhere_is_begun_again(
    name: str, answer: Callable[[bytes], Answer], hub: FakeHub, tmp_path: Path
) -> None:
    hub.spoil = after_a_cut(hub, name, answer)
    read(hub, tmp_path)


@pytest.mark.parametrize("status", [206, 204, 304])
def test_an_answer_that_is_not_the_file(status: int, hub: FakeHub, tmp_path: Path) -> None:
    answer = Answer(status, body=b"" if status != 206 else b"{}")
    hub.spoil = lambda method, path, count: answer if path.endswith(CONFIG) else None
    assert refusal(hub, tmp_path) == ("hub_error", 502)


@pytest.mark.parametrize("where", ["/org/sql/resolve/x", "file:///etc/passwd", "http://[::bad"])
def test_redirects_to_nowhere(where: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.spoil = lambda method, path, count: Answer(302, {"Location": where}, b"") if "/resolve/" in path else None
    assert refusal(hub, tmp_path) == ("hub_error", 502)


@pytest.mark.parametrize("asked", ["\u00b2", "-1", "soon", "1e3"])
def test_pauses_that_are_no_number(asked: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.spoil = lambda method, path, count: Answer(429, {"Retry-After": asked})
    assert refusal(hub, tmp_path) == ("hub_rate_limited", 503)


@pytest.mark.parametrize("where", ["api/", "org/"])
def test_a_failure_is_not_read_to_its_end(where: str, hub: FakeHub, tmp_path: Path) -> None:
    slow = Answer(400, body=b"x" * 5000, pace=20.0)
    hub.spoil = lambda method, path, count: slow if path.startswith(where) else None
    began = time.monotonic()
    assert refusal(hub, tmp_path) == ("hub_error", 502)
    assert time.monotonic() - began < 10.0


def test_no_cookie_is_kept_for_the_next_tenant(hub: FakeHub, tmp_path: Path) -> None:
    hub.tokens["org/sql"] = "hf_right"
    read(hub, tmp_path, token="hf_right")
    assert refusal(hub, tmp_path, token=False) == ("repo_not_found", 404)
    assert hub.cookies == []


# -- the cache --------------------------------------------------------------------------------------------------------


def transfers(hub: FakeHub) -> int:
    return sum("/resolve/" in path for _, path in hub.requests)


def test_what_is_cached_whole_is_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    read(hub, tmp_path)
    before = transfers(hub)
    read(hub, tmp_path)
    assert transfers(hub) == before


def test_a_small_file_that_was_damaged_in_the_cache_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    file = (pull(hub, tmp_path).folder.path / CONFIG).resolve()
    file.write_bytes(b"x" * file.stat().st_size)
    read(hub, tmp_path)


def test_a_cache_that_may_only_be_read(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(hub, tmp_path)

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(30, "Read-only file system")

    for writing in ("mkdir", "symlink", "replace", "unlink"):
        monkeypatch.setattr(os, writing, refuse)
    read(hub, tmp_path)


@pytest.mark.parametrize("part", ["", "blobs", "snapshots"])
def test_parts_of_the_cache_that_lie_elsewhere(part: str, hub: FakeHub, tmp_path: Path) -> None:
    link = tmp_path / "cache" / "models--org--sql" / part
    link.parent.mkdir(parents=True)
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    link.symlink_to(tmp_path / "disk" / "deep")
    read(hub, tmp_path)
    found = pull(hub, tmp_path).folder
    for name in FILES:
        with found.open(name, None) as file:  # type: ignore[arg-type]
            assert file.read() == hub.repos["org/sql"][name]


def test_the_client_takes_the_cache_as_its_own(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull(hub, tmp_path, HubRepo("org/sql", "main")).folder.path
    assert snapshot_download("org/sql", cache_dir=tmp_path / "cache", local_files_only=True) == str(folder)
    found = scan_cache_dir(tmp_path / "cache")
    assert found.warnings == []
    (repo,) = found.repos
    assert (repo.repo_id, repo.nb_files, [each.commit_hash for each in repo.revisions]) == ("org/sql", 3, [COMMIT])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull(hub, tmp_path, SQL).folder.path == folder


def test_a_client_that_shares_its_session_has_no_cookies_of_ours(hub: FakeHub, tmp_path: Path) -> None:
    read(hub, tmp_path)
    assert list(hub_get.get_session().cookies.jar) == []
