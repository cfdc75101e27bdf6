"""The store: one folder per version, names with history, and nothing lost or half done."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from raw_adapters import GEOMETRY, Tensor, container, plain_config, plain_tensors, write

from loraserve.errors import (
    AdapterInUse,
    AdapterNotFound,
    AdapterRefused,
    AmbiguousVersion,
    NameTaken,
    StorageFailed,
)
from loraserve.lora.files import AdapterFolder
from loraserve.lora.format import parse_adapter
from loraserve.lora.names import AdapterName
from loraserve.lora.registry import Registry, VersionRecord
from loraserve.lora.spec import AdapterSource, LoadReport
from loraserve.lora.store import AdapterStore
from loraserve.lora.version import content_version

SOURCE = AdapterSource("local", path="some/where")


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    with AdapterStore(tmp_path / "data") as opened:
        yield opened


def put(store: AdapterStore, folder: Path, source: AdapterSource = SOURCE) -> VersionRecord:
    return store.ingest(AdapterFolder.at(folder), source, GEOMETRY, 64)


def adapter(tmp_path: Path, alpha: float = 8) -> Path:
    return write(tmp_path / f"alpha-{alpha}", plain_config(lora_alpha=alpha))


def entries(data: Path) -> set[str]:
    return {path.name for path in (data / "versions").iterdir()}


def working(data: Path) -> list[Path]:
    return [path for path in (data / "tmp").rglob("*") if path.suffix != ".lock" and path.parent.parent == data / "tmp"]


class TestIngest:
    def test_a_version_is_its_content(self, store: AdapterStore, tmp_path: Path) -> None:
        folder = adapter(tmp_path)
        (folder / "optimizer.pt").write_bytes(b"never copied")
        (folder / "README.md").write_text("never copied")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        calls: list[tuple[int, int]] = []
        record = store.ingest(
            AdapterFolder.at(folder), SOURCE, GEOMETRY, 64, lambda done, total: calls.append((done, total))
        )
        kept = store.folder(record.version)
        assert record.version == content_version(parse_adapter(folder, GEOMETRY, 64), folder)
        assert kept.name == record.version
        names = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}
        assert {path.name for path in kept.iterdir()} == {file.name for file in record.files} == names
        assert all((kept / name).read_bytes() == (folder / name).read_bytes() for name in names)
        assert calls[-1] == (record.size, record.size)
        assert calls == sorted(calls)
        assert record.report == LoadReport.of(parse_adapter(folder, GEOMETRY, 64), record.version)
        assert store.version(record.version) == record
        assert store.verify(record.version)
        assert working(tmp_path / "data") == []

    def test_damaged_files_are_replaced_when_the_content_comes_again(self, store: AdapterStore, tmp_path: Path) -> None:
        folder = adapter(tmp_path)
        version = put(store, folder).version
        weights = store.folder(version) / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert not store.verify(version)
        assert put(store, folder).version == version
        assert weights.read_bytes() == whole
        assert store.verify(version)
        assert working(tmp_path / "data") == []

    def test_what_came_on_demand_goes_with_the_last_process(self, tmp_path: Path) -> None:
        data = tmp_path / "data"
        asked = AdapterSource("hub", repo="org/asked", on_demand=True)
        with AdapterStore(data) as first:
            kept = put(first, adapter(tmp_path, 1), asked).version
            first.set_alias("kept", kept)
            unloaded = put(first, adapter(tmp_path, 2)).version
            gone = put(first, adapter(tmp_path, 3), asked).version
            with AdapterStore(data):
                assert entries(data) == {kept, unloaded, gone}, "another process may serve it"
        with AdapterStore(data) as again:
            assert entries(data) == {kept, unloaded}
            assert {record.version for record in again.versions()} == {kept, unloaded}

    def test_the_source_may_change_afterwards(self, store: AdapterStore, tmp_path: Path) -> None:
        folder = adapter(tmp_path)
        record = put(store, folder)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").unlink()
        assert parse_adapter(store.folder(record.version), GEOMETRY, 64).max_rank == 4

    def test_known_content_is_kept_once(self, store: AdapterStore, tmp_path: Path) -> None:
        first = put(store, adapter(tmp_path))
        other = AdapterSource("hub", repo="a/b", commit="c0ffee")
        tensors = dict(reversed(plain_tensors().items()))
        again = put(store, write(tmp_path / "respelled", None, container(tensors, {"x": "y"})), other)
        assert again == first
        assert entries(tmp_path / "data") == {first.version}
        assert store.verify(first.version)
        assert working(tmp_path / "data") == []

    def test_the_report_is_of_the_config_that_was_read_last(self, store: AdapterStore, tmp_path: Path) -> None:
        odd = plain_config(base_model_name_or_path="other/model", rank_pattern={"no_such": 3})
        first = put(store, write(tmp_path / "odd", odd))
        assert len(first.report.warnings) == 2
        again = put(store, write(tmp_path / "plain"))
        assert again.version == first.version
        assert again.report.warnings == ()
        assert store.version(first.version).report == again.report

    def test_a_refusal_leaves_nothing(self, store: AdapterStore, tmp_path: Path) -> None:
        folder = write(tmp_path / "bad", None, plain_tensors() | {"x.lora_A.weight": Tensor((4, 4))})
        with pytest.raises(AdapterRefused) as caught:
            put(store, folder)
        assert caught.value.code == "unknown_module"
        assert entries(tmp_path / "data") == set()
        assert store.versions() == []
        assert working(tmp_path / "data") == []

    def test_formats_are_refused_by_what_is_in_the_source(self, store: AdapterStore, tmp_path: Path) -> None:
        folder = adapter(tmp_path)
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
        with pytest.raises(AdapterRefused) as caught:
            put(store, folder)
        assert caught.value.code == "unsafe_pickle"

    def test_size_limit(self, tmp_path: Path) -> None:
        with AdapterStore(tmp_path / "data", max_adapter_bytes=1000) as store:
            with pytest.raises(AdapterRefused) as caught:
                put(store, adapter(tmp_path))
            assert caught.value.code == "adapter_too_large"
            assert working(tmp_path / "data") == []

    def test_a_side_file_that_leaves_the_folder(self, store: AdapterStore, tmp_path: Path) -> None:
        folder = adapter(tmp_path)
        (folder / "tokenizer.json").symlink_to("/etc/hostname")
        with pytest.raises(AdapterRefused) as caught:
            put(store, folder)
        assert caught.value.code == "path_escape"

    def test_damaged_files_are_noticed_and_replaced(self, store: AdapterStore, tmp_path: Path) -> None:
        record = put(store, adapter(tmp_path))
        kept = store.folder(record.version) / "adapter_model.safetensors"
        data = kept.read_bytes()
        kept.write_bytes(data[:-1] + b"\0")
        assert not store.verify(record.version)
        kept.write_bytes(data[:-1])
        put(store, adapter(tmp_path))
        assert kept.read_bytes() == data
        assert store.verify(record.version)

    def test_files_that_someone_took_away(self, store: AdapterStore, tmp_path: Path) -> None:
        record = put(store, adapter(tmp_path))
        os.rename(store.folder(record.version), tmp_path / "away")
        with pytest.raises(AdapterRefused, match="gone"):
            store.folder(record.version)
        assert not store.verify(record.version)
        put(store, adapter(tmp_path))
        assert store.verify(record.version)


class TestNames:
    def test_alias_life(self, store: AdapterStore, tmp_path: Path) -> None:
        first, second = (put(store, adapter(tmp_path, alpha)).version for alpha in (8, 9))
        alias = store.set_alias("sql", first, pinned=True)
        assert (alias.name, alias.version, alias.pinned, alias.source) == ("sql", first, True, SOURCE)
        assert store.set_alias("sql", first, pinned=True) == alias
        assert not store.set_alias("sql", first).pinned
        with pytest.raises(NameTaken):
            store.set_alias("sql", second)
        assert store.resolve("sql") == first
        hub = AdapterSource("hub", repo="a/b")
        assert store.set_alias("sql", second, replace=True, source=hub).source == hub
        assert store.resolve("sql") == second
        assert [(use.version, use.current) for use in store.versions_of("sql")] == [(second, True), (first, False)]
        assert store.remove_alias("sql").version == second
        for call in (store.resolve, store.alias, store.remove_alias):
            with pytest.raises(AdapterNotFound):
                call("sql")
        assert [use.current for use in store.versions_of("sql")] == [False, False]
        assert store.aliases() == []

    def test_pinned_versions(self, store: AdapterStore, tmp_path: Path) -> None:
        first, second, other = (put(store, adapter(tmp_path, alpha)).version for alpha in (8, 9, 10))
        store.set_alias("sql", first)
        store.set_alias("sql", second, replace=True)
        store.set_alias("other", other)
        assert store.resolve(f"sql@{first[:8]}") == first
        assert store.resolve(f"sql@{second}") == second
        with pytest.raises(AdapterNotFound):
            store.resolve(f"sql@{other[:12]}")
        with pytest.raises(AdapterNotFound):
            store.resolve(f"absent@{first[:8]}")
        with pytest.raises(AdapterRefused):
            store.resolve("sql@")
        store.delete_version(first)
        with pytest.raises(AdapterNotFound):
            store.resolve(f"sql@{first[:8]}")
        store.remove_alias("sql")
        store.set_alias("sql", other)
        with pytest.raises(AdapterNotFound):
            store.resolve(f"sql@{second[:8]}")

    def test_a_prefix_of_two_versions(self, tmp_path: Path) -> None:
        registry = Registry(tmp_path / "registry.sqlite3")
        report = LoadReport.of(parse_adapter(adapter(tmp_path), GEOMETRY, 64), "0")
        for version in ("abcd1", "abcd2"):
            registry.add_version(VersionRecord(version, SOURCE, report, (), 1.0))
            registry.set_alias("sql", version, replace=True)
        with pytest.raises(AmbiguousVersion):
            registry.resolve(AdapterName("sql", "abcd"))
        assert registry.resolve(AdapterName("sql", "abcd1")) == "abcd1"
        registry.close()

    def test_refusals(self, store: AdapterStore, tmp_path: Path) -> None:
        with pytest.raises(AdapterNotFound):
            store.set_alias("sql", "0" * 64)
        with pytest.raises(AdapterRefused) as caught:
            store.set_alias("../sql", put(store, adapter(tmp_path)).version)
        assert caught.value.code == "invalid_name"
        with pytest.raises(AdapterNotFound):
            store.versions_of("never")

    def test_deleting_versions(self, store: AdapterStore, tmp_path: Path) -> None:
        first, second = (put(store, adapter(tmp_path, alpha)).version for alpha in (8, 9))
        store.set_alias("sql", first)
        assert store.unreferenced() == [second]
        with pytest.raises(AdapterInUse):
            store.delete_version(first)
        store.delete_version(second)
        with pytest.raises(AdapterNotFound):
            store.delete_version(second)
        with pytest.raises(AdapterNotFound):
            store.folder(second)
        assert entries(tmp_path / "data") == {first}


class TestReopening:
    def test_everything_is_there(self, tmp_path: Path) -> None:
        with AdapterStore(tmp_path / "data") as store:
            record = put(store, adapter(tmp_path))
            alias = store.set_alias("org/sql", record.version, pinned=True)
        with AdapterStore(tmp_path / "data") as store:
            assert store.aliases() == [alias]
            assert store.versions() == [record]
            assert store.verify(record.version)

    def test_leftovers_are_removed_but_not_those_of_the_living(self, tmp_path: Path) -> None:
        data = tmp_path / "data"
        with AdapterStore(data) as living:
            record = put(living, adapter(tmp_path))
            (busy,) = (path for path in (data / "tmp").iterdir() if path.is_dir())
            (busy / "copying").mkdir()
            (data / "tmp" / "dead").mkdir()
            (data / "tmp" / "dead.lock").touch()
            (data / "tmp" / "forgotten").mkdir()
            (data / "versions" / ("0" * 64)).mkdir()
            with AdapterStore(data) as second:
                assert (busy / "copying").is_dir()
                assert not (data / "tmp" / "dead").exists()
                assert not (data / "tmp" / "forgotten").exists()
                assert entries(data) == {record.version}
                assert second.resolve(second.set_alias("sql", record.version).name) == record.version
            assert living.resolve("sql") == record.version
        assert list((data / "tmp").iterdir()) == []

    def test_a_database_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "registry.sqlite3").write_bytes(b"not a database at all" * 100)
        with pytest.raises(StorageFailed):
            AdapterStore(tmp_path)

    def test_a_newer_schema(self, tmp_path: Path) -> None:
        AdapterStore(tmp_path).close()
        with sqlite3.connect(tmp_path / "registry.sqlite3") as db:
            db.execute("PRAGMA user_version=99")
        db.close()
        with pytest.raises(StorageFailed, match="newer"):
            AdapterStore(tmp_path)

    def test_a_data_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StorageFailed) as caught:
            AdapterStore(tmp_path / "file" / "data")
        assert str(tmp_path) not in caught.value.message


def test_threads(store: AdapterStore, tmp_path: Path) -> None:
    folders = [adapter(tmp_path, alpha) for alpha in range(4)]
    failures: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            barrier.wait()
            for turn in range(3):
                record = put(store, folders[(number + turn) % 4])
                store.set_alias(f"name-{number % 2}", record.version, replace=True)
                assert store.resolve(f"name-{number % 2}") in {found.version for found in store.versions()}
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    versions = {record.version for record in store.versions()}
    assert len(versions) == 4
    assert entries(tmp_path / "data") == versions
    assert all(store.verify(version) for version in versions)
    assert working(tmp_path / "data") == []


def test_two_thousand_names_open_quickly(tmp_path: Path) -> None:
    import time

    with AdapterStore(tmp_path / "data") as store:
        version = put(store, adapter(tmp_path)).version
    with sqlite3.connect(tmp_path / "data" / "registry.sqlite3") as db:
        source = json.dumps({"kind": "local"})
        db.executemany(
            "INSERT INTO aliases(name, version, source, pinned, loaded_at) VALUES (?, ?, ?, 0, 1.0)",
            [(f"name-{n}", version, source) for n in range(2000)],
        )
    db.close()
    begin = time.monotonic()
    with AdapterStore(tmp_path / "data") as store:
        assert len(store.aliases()) == 2000
    assert time.monotonic() - begin < 3
