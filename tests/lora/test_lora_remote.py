"""Folders and archives by address: allowed prefixes only, the adapter's own files only, within a bound."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from raw_adapters import GEOMETRY, write

from loraserve.errors import AdapterError
from loraserve.lora import remote_bound
from loraserve.lora.format import parse_adapter
from loraserve.lora.remote import fetch_url
from loraserve.lora.sources import FetchedFolder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = write(tmp_path / "shelf" / "sql")
    (folder / "optimizer.pt").write_bytes(b"waste")
    return folder


@pytest.fixture
def memory(made: Path) -> Iterator[str]:
    store = fsspec.filesystem("memory")
    for path in made.iterdir():
        store.pipe(f"/bucket/sql/{path.name}", path.read_bytes())
    yield "memory://bucket/sql"
    store.rm("/bucket", recursive=True)


def tar(folder: Path, to: Path, mode: str = "w:gz", inner: str = "run/sql") -> Path:
    with tarfile.open(to, mode) as archive:
        archive.add(folder, inner)
    return to


def fetch(url: str, tmp_path: Path, *allow: str, limit: int = 1 << 20) -> FetchedFolder:
    return fetch_url(url, allow, tmp_path / "into", limit, lambda done, total: None)


def refusal(url: str, tmp_path: Path, *allow: str, limit: int = 1 << 20) -> tuple[str, int]:
    with pytest.raises(AdapterError) as caught:
        fetch(url, tmp_path, *allow, limit=limit)
    return caught.value.code, caught.value.http_status


def test_a_folder_of_a_store(memory: str, tmp_path: Path) -> None:
    found = fetch(memory, tmp_path, "memory://bucket/")
    assert (found.source.kind, found.source.path) == ("url", memory)
    assert {path.name for path in found.folder.path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert parse_adapter(found.folder, GEOMETRY, 64).kinds == ("q",)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar", "a.zip"])
def test_an_archive(name: str, made: Path, tmp_path: Path) -> None:
    file = made.parent / name
    if name.endswith("zip"):
        with zipfile.ZipFile(file, "w") as archive:
            for path in made.iterdir():
                archive.write(path, f"run/{path.name}")
    else:
        tar(made, file, "w" if name.endswith(".tar") else "w:gz")
    found = fetch(f"file://{file}", tmp_path, f"file://{made.parent}")
    assert {path.name for path in found.folder.path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert parse_adapter(found.folder, GEOMETRY, 64).kinds == ("q",)


def test_a_folder_of_this_machine(made: Path, tmp_path: Path) -> None:
    found = fetch(f"file://{made}", tmp_path, f"file://{made.parent}")
    assert found.folder.path == made.resolve()


def test_what_no_prefix_allows(memory: str, made: Path, tmp_path: Path) -> None:
    escape = ("path_escape", 403)
    assert refusal(memory, tmp_path) == escape
    assert refusal(memory, tmp_path, "memory://bucket/sq") == escape
    assert refusal("memory://bucket/other/../sql", tmp_path, "memory://bucket/other") == escape
    assert refusal("memory://bucket/other/%2e%2e/sql", tmp_path, "memory://bucket/other") == escape
    (made.parent / "allowed").mkdir()
    (made.parent / "allowed" / "link").symlink_to(made)
    (made.parent / "allowed" / "link.tar.gz").symlink_to(tar(made, made.parent / "a.tar.gz"))
    allowed = f"file://{made.parent}/allowed"
    assert refusal(f"{allowed}/link", tmp_path, allowed) == escape
    assert refusal(f"{allowed}/link.tar.gz", tmp_path, allowed) == escape
    assert not (tmp_path / "into").exists()


def test_broken_missing_and_foreign(memory: str, made: Path, tmp_path: Path) -> None:
    shelf = f"file://{made.parent}"
    (made.parent / "broken.tar.gz").write_bytes(b"\x1f\x8bnothing")
    (made.parent / "broken.zip").write_bytes(b"PK")
    good = tar(made, made.parent / "good.tar.gz").read_bytes()
    (made.parent / "cut.tar.gz").write_bytes(good[: len(good) // 2])
    (made.parent / "flipped.tar.gz").write_bytes(good[:1000] + bytes(50) + good[1050:])
    # Bytes that only the checksum at the very end tells of, as in weights that compression leaves as they are.
    (made.parent / "sum.tar.gz").write_bytes(good[:-8] + bytes([good[-8] ^ 1]) + good[-7:])
    for name in ("broken.tar.gz", "broken.zip", "cut.tar.gz", "flipped.tar.gz", "sum.tar.gz"):
        assert refusal(f"{shelf}/{name}", tmp_path, shelf) == ("corrupt_weights", 400), name
        shutil.rmtree(tmp_path / "into")
    assert refusal("memory://bucket/absent", tmp_path, "memory://bucket")[1] == 404
    shutil.rmtree(tmp_path / "into")
    assert refusal("nosuch://bucket/x", tmp_path, "nosuch://bucket") == ("source_failed", 502)


def test_only_the_checksum_tells_of_a_changed_weight(made: Path, tmp_path: Path) -> None:
    weights = (made / "adapter_model.safetensors").read_bytes()
    plain = tar(made, made.parent / "plain.tar", "w").read_bytes()
    file = made.parent / "changed.tar.gz"
    packed = gzip.compress(plain, compresslevel=0)  # the bytes as they are
    at = packed.index(weights[-64:])
    file.write_bytes(packed)
    assert fetch(f"file://{file}", tmp_path, f"file://{made.parent}").source.kind == "url"
    shutil.rmtree(tmp_path / "into")
    file.write_bytes(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])
    assert refusal(f"file://{file}", tmp_path, f"file://{made.parent}") == ("corrupt_weights", 400)
    # Zeros may follow the last member, but not for ever.
    file.write_bytes(gzip.compress(plain + bytes(80 << 20), compresslevel=1))
    shutil.rmtree(tmp_path / "into")
    assert refusal(f"file://{file}", tmp_path, f"file://{made.parent}") == ("corrupt_weights", 400)


def test_bounds(memory: str, made: Path, tmp_path: Path) -> None:
    assert refusal(memory, tmp_path, memory, limit=100) == ("adapter_too_large", 400)
    shutil.rmtree(tmp_path / "into")
    with tarfile.open(made.parent / "bomb.tar.gz", "w:gz") as archive:
        for name, size in (("adapter_config.json", 10), ("adapter_model.safetensors", 3_000_000)):
            info = tarfile.TarInfo(name)
            info.size = size
            archive.addfile(info, io.BytesIO(bytes(size)))
    shelf = f"file://{made.parent}"
    assert refusal(f"{shelf}/bomb.tar.gz", tmp_path, shelf, limit=1_000_000) == ("adapter_too_large", 400)


@pytest.mark.parametrize("name", ["a.tar", "folder"])
def test_a_source_that_goes_silent(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    class Silent(MemoryFileSystem):
        protocol = "silent"
        cachable = False

        def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
            goes_on.wait(10)
            return super().ls(path, detail, **kwargs)

        def _open(self, path: str, *args: Any, **kwargs: Any) -> Any:
            goes_on.wait(10)
            return super()._open(path, *args, **kwargs)

    fsspec.register_implementation("silent", Silent, clobber=True)
    monkeypatch.setattr(remote_bound, "SILENCE_S", 0.1)
    assert refusal(f"silent://bucket/{name}", tmp_path, "silent://bucket") == ("source_timeout", 504)
    (left,) = (thread for thread in threading.enumerate() if thread.name == "adapter-source")
    goes_on.set()
    left.join(5)
    assert not left.is_alive(), "what was left behind ends with the client's call"
