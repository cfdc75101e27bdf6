"""Pulling adapters with the real Hub client from a local server."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
from fake_hub import COMMIT, Answer, FakeHub, serve
from hub_pulls import FILES, pull, refusal
from huggingface_hub import constants, hf_hub_download
from raw_adapters import GEOMETRY, container, plain_tensors

from loraserve.lora import hub_errors, hub_get
from loraserve.lora.format import parse_adapter
from loraserve.lora.hub import HubRepo
from loraserve.lora.store import AdapterStore


def test_only_the_needed_files(hub: FakeHub, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    found = pull(hub, tmp_path, HubRepo("org/sql", "main"), progress=lambda done, total: calls.append((done, total)))
    names = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}
    assert {path.name for path in found.folder.path.iterdir()} == names
    assert (found.source.kind, found.source.commit, found.source.revision) == ("hub", COMMIT, "main")
    assert parse_adapter(found.folder, GEOMETRY, 64).kinds == ("q",)
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls)
    assert not any("optimizer" in path or "training_args" in path for _, path in hub.requests)


def test_into_the_store(hub: FakeHub, tmp_path: Path) -> None:
    found = pull(hub, tmp_path)
    with AdapterStore(tmp_path / "data") as store:
        record = store.ingest(found.folder, found.source, GEOMETRY, 64)
        assert record.source.repo == "org/sql"
        assert not any(path.is_symlink() for path in store.folder(record.version).iterdir())


def test_a_subfolder(hub: FakeHub, tmp_path: Path) -> None:
    found = pull(hub, tmp_path, HubRepo("org/sql", None, "checkpoints/5"))
    assert parse_adapter(found.folder, GEOMETRY, 64).max_rank == 4
    assert found.folder.path.name == "5"


def test_offline_uses_what_is_there(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = pull(hub, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    for revision in (None, "main", COMMIT):
        found = pull(hub, tmp_path, HubRepo("org/sql", revision))
        assert (found.folder, found.source.commit) == (online.folder, COMMIT)
    assert refusal(hub, tmp_path, HubRepo("org/other")) == ("repo_not_found", 404)
    assert refusal(hub, tmp_path, HubRepo("org/sql", None, "absent")) == ("subfolder_not_found", 404)
    assert len(hub.requests) == before


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (HubRepo("org/absent"), ("repo_not_found", 404)),
        (HubRepo("org/sql", "v9"), ("revision_not_found", 404)),
        (HubRepo("org/sql", "../../x"), ("revision_not_found", 404)),
        (HubRepo("org/sql", None, "absent"), ("subfolder_not_found", 404)),
        (HubRepo("org/sql", None, "../x"), ("path_escape", 403)),
        (HubRepo("org/sql", None, "checkpoints"), ("subfolder_not_found", 404)),
        (HubRepo("a/b/c"), ("invalid_name", 400)),
        (HubRepo("https://x.y/z"), ("invalid_name", 400)),
    ],
    ids=str,
)
def test_what_is_not_there(place: HubRepo, expected: tuple[str, int], hub: FakeHub, tmp_path: Path) -> None:
    assert refusal(hub, tmp_path, place) == expected


def test_a_repository_without_an_adapter(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/model"] = {"config.json": b"{}", "model.safetensors": b"x"}
    assert refusal(hub, tmp_path, HubRepo("org/model")) == ("not_an_adapter", 400)


def test_private_even_when_it_is_cached(hub: FakeHub, tmp_path: Path) -> None:
    hub.tokens["org/sql"] = "hf_right"
    assert pull(hub, tmp_path, token="hf_right").source.commit == COMMIT
    assert refusal(hub, tmp_path, token="hf_wrong") == ("repo_not_found", 404)
    assert refusal(hub, tmp_path) == ("repo_not_found", 404)


def test_gated(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated.add("org/sql")
    assert refusal(hub, tmp_path) == ("hub_access_denied", 403)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(429), ("hub_rate_limited", 503)),
        (Answer(429, {"Retry-After": "3600"}), ("hub_rate_limited", 503)),
        (Answer(500), ("hub_error", 502)),
        (Answer(503), ("hub_error", 502)),
        (Answer(200, body=b"<html>login</html>"), ("hub_error", 502)),
        (Answer(401), ("repo_not_found", 404)),
        (Answer(403), ("hub_access_denied", 403)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_faults_that_stay(answer: Answer, expected: tuple[str, int], hub: FakeHub, tmp_path: Path) -> None:
    hub.spoil = lambda method, path, count: answer if path.startswith("api/") else None
    assert refusal(hub, tmp_path) == expected
    asked = sum(1 for _, path in hub.requests if path.startswith("api/"))
    again = answer.status in (429, 500, 503) and "Retry-After" not in answer.headers
    assert asked >= (hub_errors.ATTEMPTS if again else 1)


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_faults_that_pass(status: int, hub: FakeHub, tmp_path: Path) -> None:
    hub.spoil = lambda method, path, count: Answer(status, {"Retry-After": "0"}) if count == 0 else None
    assert pull(hub, tmp_path).source.commit == COMMIT


def test_nobody_listens(hub: FakeHub, tmp_path: Path) -> None:
    hub.endpoint = "http://127.0.0.1:9"
    assert refusal(hub, tmp_path) == ("hub_error", 502)


def test_damaged_bytes_are_not_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.damaged.add("adapter_model.safetensors")
    assert refusal(hub, tmp_path) == ("hub_checksum_mismatch", 502)
    hub.damaged.clear()
    found = pull(hub, tmp_path)
    assert (found.folder.path / "adapter_model.safetensors").read_bytes() == container(plain_tensors())


def test_damaged_bytes_of_an_earlier_pull_are_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    file = pull(hub, tmp_path).folder.path / "adapter_model.safetensors"
    good = file.read_bytes()
    file.resolve().write_bytes(good[:-1] + b"\0")
    assert (pull(hub, tmp_path).folder.path / "adapter_model.safetensors").read_bytes() == good


def test_too_large(hub: FakeHub, tmp_path: Path) -> None:
    assert refusal(hub, tmp_path, max_bytes=100) == ("adapter_too_large", 400)
    assert all(method == "GET" and path.startswith("api/") for method, path in hub.requests)


# -- slow, cut and redirected -----------------------------------------------------------------------------------------


@pytest.fixture
def large(hub: FakeHub) -> bytes:
    """The bytes of the file that is in large-file storage."""
    return hub.repos["org/sql"]["adapter_model.safetensors"]


def test_a_pull_that_was_cut_goes_on(hub: FakeHub, tmp_path: Path, large: bytes) -> None:
    hub.cuts["adapter_model.safetensors"] = [900]
    found = pull(hub, tmp_path)
    assert (found.folder.path / "adapter_model.safetensors").read_bytes() == large
    assert hub.ranges == ["bytes=900-"]
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_what_a_killed_pull_left_is_gone_on_with(hub: FakeHub, tmp_path: Path, large: bytes) -> None:
    blobs = tmp_path / "cache" / "models--org--sql" / "blobs"
    blobs.mkdir(parents=True)
    digest = hashlib.sha256(large).hexdigest()
    (blobs / f"{digest}.part").write_bytes(large[:700])
    (blobs / f"{digest}.lock").touch()
    seen: list[tuple[int, int]] = []
    found = pull(hub, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert (found.folder.path / "adapter_model.safetensors").read_bytes() == large
    assert hub.ranges == ["bytes=700-"]
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("left", [b"wrong" * 20, b"too long" * 10_000], ids=["wrong", "too long"])
def test_bad_bytes_of_a_killed_pull_cost_one_more_transfer(
    left: bytes, hub: FakeHub, tmp_path: Path, large: bytes
) -> None:
    blobs = tmp_path / "cache" / "models--org--sql" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(large).hexdigest()}.part").write_bytes(left)
    assert (pull(hub, tmp_path).folder.path / "adapter_model.safetensors").read_bytes() == large
    hub.damaged.add("adapter_model.safetensors")
    hub.repos["org/other"] = hub.repos["org/sql"]
    assert refusal(hub, tmp_path, HubRepo("org/other")) == ("hub_checksum_mismatch", 502)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_blob_storage_elsewhere_gets_no_token(hub: FakeHub, tmp_path: Path, large: bytes) -> None:
    hub.tokens["org/sql"] = "hf_right"
    with serve(FakeHub({"org/sql": hub.repos["org/sql"]})) as storage:
        # Another name of this machine: another origin, to which credentials must not go.
        hub.blob_host = storage.endpoint.replace("127.0.0.1", "localhost")
        found = pull(hub, tmp_path, token="hf_right")
        assert (found.folder.path / "adapter_model.safetensors").read_bytes() == large
        assert found.restricted
        assert storage.blob_tokens
        assert set(storage.blob_tokens) == {None}


def test_a_hub_that_does_not_answer(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_get, "STALL_S", 0.05)
    hub.spoil = lambda method, path, count: Answer(200, stall_s=0.3)
    assert refusal(hub, tmp_path) == ("hub_timeout", 504)
    assert len(hub.requests) == 2


@pytest.mark.parametrize("name", FILES)
def test_a_hub_that_stalls_in_a_file(name: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_get, "STALL_S", 0.1)
    body = hub.repos["org/sql"][name]

    def stall(method: str, path: str, count: int) -> Answer | None:
        return Answer(200, body=body, stop_at=50, stall_s=1.0) if path.endswith(f"/{name}") else None

    hub.spoil = stall
    began = time.monotonic()
    assert refusal(hub, tmp_path) == ("hub_timeout", 504)
    assert time.monotonic() - began < 1.0, "the server's own pauses are not waited for"
    assert sum(path.endswith(f"/{name}") for _, path in hub.requests) == 2, "once more, but not for ever"
    hub.spoil = lambda method, path, count: None
    assert pull(hub, tmp_path).source.commit == COMMIT


def test_what_a_silent_hub_costs_is_bounded() -> None:
    assert 2 * (hub_get.CONNECT_S + hub_get.STALL_S) <= 60


@pytest.mark.parametrize("name", [*FILES, None])
def test_a_hub_that_trickles_for_ever(
    name: str | None, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_get, "WINDOW_S", 0.2)
    where = f"/{name}" if name else "api/models/org/sql"
    slow = Answer(200, body=hub.repos["org/sql"][name] if name else b"x" * 5000, pace=20.0)
    hub.spoil = lambda method, path, count: slow if path.endswith(where) else None
    assert refusal(hub, tmp_path) == ("hub_timeout", 504)
    assert sum(path.endswith(where) for _, path in hub.requests) == 1


def test_a_pause_that_is_asked_for_in_a_file_is_bounded(hub: FakeHub, tmp_path: Path) -> None:
    wait = Answer(429, {"Retry-After": "3600"})
    hub.spoil = lambda method, path, count: wait if path.endswith(".safetensors") else None
    assert refusal(hub, tmp_path) == ("hub_rate_limited", 503)


def test_more_bytes_than_the_hub_announced(hub: FakeHub, tmp_path: Path) -> None:
    flood = Answer(200, body=b"x" * 1_000_000)
    hub.spoil = lambda method, path, count: flood if path.endswith(".safetensors") else None
    assert refusal(hub, tmp_path) == ("hub_error", 502)


def test_the_tries_begin_again_after_progress(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bytes
) -> None:
    monkeypatch.setattr(hub_get, "RENEW_BYTES", 100)
    hub.cuts["adapter_model.safetensors"] = [120] * 10
    found = pull(hub, tmp_path)
    assert (found.folder.path / "adapter_model.safetensors").read_bytes() == large
    assert len(hub.ranges) == 10


def test_the_client_finds_offline_what_was_pulled(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull(hub, tmp_path, HubRepo("org/sql", "main")).folder.path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in FILES:
        found = hf_hub_download("org/sql", name, revision="main", cache_dir=tmp_path / "cache")
        assert Path(found) == folder / name
        assert Path(found).read_bytes() == hub.repos["org/sql"][name]


def test_a_slow_hub_is_only_slow(hub: FakeHub, tmp_path: Path) -> None:
    hub.pace["adapter_model.safetensors"] = 0.4
    seen: list[int] = []
    pull(hub, tmp_path, progress=lambda done, total: seen.append(done))
    assert len(seen) > 2
