"""Steps back through a name's versions, what is needed for them, and a store that an older version wrote."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_lora_store import SOURCE, adapter, entries, put

from loraserve.errors import AdapterNotFound, AmbiguousVersion, DiskFull, NameTaken, NoOlderVersion
from loraserve.lora.records import encode
from loraserve.lora.store import AdapterStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    with AdapterStore(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def versions(store: AdapterStore, tmp_path: Path) -> list[str]:
    return [put(store, adapter(tmp_path, alpha)).version for alpha in (8, 9, 10, 11)]


def test_each_rollback_goes_one_step_further_back(store: AdapterStore, versions: list[str]) -> None:
    first, second, third, fourth = versions
    for version in (first, second, third):
        store.set_alias("sql", version, replace=True, pinned=True)
    assert store.roll_back("sql").version == second
    assert store.roll_back("sql").version == first
    for _ in range(2):
        with pytest.raises(NoOlderVersion):
            store.roll_back("sql")
    assert store.alias("sql").version == first
    assert store.alias("sql").pinned
    store.set_alias("sql", fourth, replace=True)
    assert store.roll_back("sql").version == first, "what was served before the fourth"
    with pytest.raises(NoOlderVersion):
        store.roll_back("sql")
    found = store.versions_now("sql")
    assert [(entry.version, entry.current) for entry in found] == [
        (fourth, False),
        (third, False),
        (second, False),
        (first, True),
    ]
    assert [entry.created_at for entry in found] == sorted((entry.created_at for entry in found), reverse=True)


def test_back_and_forth_between_two(store: AdapterStore, versions: list[str]) -> None:
    first, second = versions[:2]
    for version in (first, second, first):
        store.set_alias("sql", version, replace=True)
    assert store.roll_back("sql").version == second
    assert store.roll_back("sql").version == first
    with pytest.raises(NoOlderVersion):
        store.roll_back("sql")


def test_to_a_chosen_version(store: AdapterStore, versions: list[str]) -> None:
    first, second, third, other = versions
    for version in (first, second, third):
        store.set_alias("sql", version, replace=True)
    assert store.roll_back("sql", first[:10]).version == first
    assert store.roll_back("sql", third).version == third, "forward again"
    assert store.roll_back("sql", third).version == third
    assert store.roll_back("sql").version == second
    with pytest.raises(AdapterNotFound):
        store.roll_back("sql", other[:10])
    with pytest.raises(AmbiguousVersion):
        store.roll_back("sql", "")
    with pytest.raises(AdapterNotFound):
        store.roll_back("absent")


def test_a_former_life_of_the_name_is_no_older_version(store: AdapterStore, versions: list[str]) -> None:
    store.set_alias("sql", versions[0])
    store.remove_alias("sql")
    store.set_alias("sql", versions[1])
    with pytest.raises(NoOlderVersion):
        store.roll_back("sql")
    assert [entry.version for entry in store.versions_now("sql")] == [versions[1]]


def test_only_what_nobody_needs_is_deleted(store: AdapterStore, versions: list[str], tmp_path: Path) -> None:
    first, second, third, fourth = versions
    for version in (first, second, third):
        store.set_alias("sql", version, replace=True)
    store.set_alias("other", first)
    store.set_alias("third", third)
    store.set_alias("third", fourth, replace=True)
    assert store.delete_unneeded(versions) == []
    store.remove_alias("sql")
    assert store.delete_unneeded([first, second, third]) == [second], "other has the first, third can go back"
    assert entries(tmp_path / "data") == {first, third, fourth}
    store.remove_alias("other")
    store.remove_alias("third")
    assert store.delete_unneeded(versions) == sorted([first, third, fourth])
    assert entries(tmp_path / "data") == set()
    with pytest.raises(AdapterNotFound):
        store.version(first)


def test_last_use_and_tiers(store: AdapterStore, versions: list[str]) -> None:
    store.set_alias("a", versions[0], owner="tenant", visibility="private")
    store.set_alias("b", versions[1])
    store.note_use({"a": 5.0, "absent": 6.0}, {versions[0]: "device"})
    store.note_use({})
    store.set_alias("a", versions[2], replace=True)
    (a, of_a), (b, of_b) = store.registered()
    assert (a.name, a.version, a.last_used_at) == ("a", versions[2], 5.0)
    assert (b.last_used_at, of_a.tier, of_b.tier) == (None, "disk", "disk")
    assert store.version(versions[0]).tier == "device"
    store.note_use({}, {versions[1]: "host"})
    assert [store.version(version).tier for version in versions[:2]] == ["disk", "host"]


def test_what_is_private_stays_so(store: AdapterStore, versions: list[str]) -> None:
    store.set_alias("a", versions[0], owner="tenant", visibility="private")
    for version in (versions[1], versions[2]):
        alias = store.set_alias("a", version, replace=True)
        assert (alias.version, alias.owner, alias.visibility) == (version, "tenant", "private")
    assert store.roll_back("a").owner == "tenant"
    for replacing in (False, True):
        with pytest.raises(NameTaken):
            store.set_alias("a", versions[1], replace=replacing, tenant="other")
    assert store.set_alias("a", versions[0], replace=True, tenant="tenant").visibility == "private"
    alias = store.set_alias("a", versions[0], visibility="public")
    assert (alias.owner, alias.visibility) == ("", "public")
    assert store.set_alias("a", versions[1], replace=True, tenant="other").version == versions[1]


def test_use_by_another_process_is_no_change_of_names(store: AdapterStore, versions: list[str], tmp_path: Path) -> None:
    store.set_alias("mine", versions[0])
    with AdapterStore(tmp_path / "data") as other:
        other.note_use({"mine": 6.0})
        store.changed_by_others()  # its own change may count once
        other.note_use({"mine": 7.0}, {versions[0]: "device"})
        assert not store.changed_by_others()
        for change in (
            lambda: other.set_pinned("mine", True),
            lambda: other.set_alias("mine", versions[0], owner="tenant", visibility="private"),
            lambda: other.set_alias("mine", versions[1], replace=True),
            lambda: other.roll_back("mine"),
            lambda: other.remove_alias("mine"),
        ):
            change()
            assert store.changed_by_others()
            other.note_use({"mine": 8.0})
            assert not store.changed_by_others()


def test_a_full_disk(store: AdapterStore, versions: list[str], tmp_path: Path) -> None:
    log = tmp_path / "data" / "registry.sqlite3-wal"
    assert log.stat().st_size > 0
    connection = store._registry._database._connection
    connection.execute(f"PRAGMA max_page_count={connection.execute('PRAGMA page_count').fetchone()[0]}")

    def fill() -> None:
        for number in range(1000):
            store.set_alias(f"name-{number}", versions[0])

    with pytest.raises(DiskFull):
        fill()
    kept = store.aliases()
    assert kept, "the earlier ones are there"
    assert log.stat().st_size == 0, "the log has made room"
    with pytest.raises(DiskFull):
        store.set_alias("another", versions[0])
    assert store.aliases() == kept
    with AdapterStore(tmp_path / "data") as again:
        assert again.aliases() == kept
    store.remove_alias(kept[0].name)
    connection.execute("PRAGMA max_page_count=1000000")
    store.set_alias("another", versions[0])
    assert len(store.aliases()) == len(kept)


def test_changes_by_another_process_are_noticed(store: AdapterStore, versions: list[str], tmp_path: Path) -> None:
    store.set_alias("mine", versions[0])
    assert not store.changed_by_others()
    with AdapterStore(tmp_path / "data") as other:
        other.set_alias("theirs", versions[0])
        assert store.changed_by_others()
        assert not store.changed_by_others()


def test_a_store_of_the_first_schema(tmp_path: Path) -> None:
    with AdapterStore(tmp_path / "data") as store:
        record = put(store, adapter(tmp_path))
    file = tmp_path / "data" / "registry.sqlite3"
    db = sqlite3.connect(file, isolation_level=None)
    for table in ("aliases", "history", "versions"):
        db.execute(f"DROP TABLE {table}")
    db.execute(
        "CREATE TABLE versions (version TEXT PRIMARY KEY, source TEXT, report TEXT, files TEXT, created_at REAL)"
    )
    db.execute(
        "CREATE TABLE aliases (name TEXT PRIMARY KEY, version TEXT, source TEXT, pinned INTEGER, loaded_at REAL)"
    )
    db.execute("CREATE TABLE history (id INTEGER PRIMARY KEY, name TEXT, version TEXT, source TEXT, at REAL)")
    row = (record.version, encode(SOURCE), encode(record.report), encode(record.files), 1.0)
    db.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", row)
    db.execute("INSERT INTO aliases VALUES ('sql', ?, ?, 1, 2.0)", row[:2])
    db.execute("INSERT INTO history VALUES (1, 'sql', ?, ?, 2.0)", row[:2])
    db.execute("PRAGMA user_version=1")
    db.close()
    for _ in range(2):
        with AdapterStore(tmp_path / "data") as store:
            ((alias, found),) = store.registered()
            assert (alias.name, alias.pinned, alias.visibility, found.tier) == ("sql", True, "public", "disk")
            assert [entry.current for entry in store.versions_now("sql")] == [True]
