"""Versions and templates that a process uses are deleted by no other one, but when it lets go, however it ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from raw_adapters import GEOMETRY, plain_config, write

from loraserve.errors import AdapterInUse, AdapterNotFound
from loraserve.lora.chat_template import digest_of
from loraserve.lora.files import AdapterFolder
from loraserve.lora.holds import Holds
from loraserve.lora.sources import FetchedFolder
from loraserve.lora.spec import AdapterSource
from loraserve.lora.store import AdapterStore

SOURCE = AdapterSource("local")
HOLDER = """
import sys
from pathlib import Path
from loraserve.lora.store import AdapterStore
with AdapterStore(Path(sys.argv[1])) as store:
    store.hold(sys.argv[2])
    print("holding", flush=True)
    sys.stdin.readline()
    store.let_go(sys.argv[2])
    print("let go", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    with AdapterStore(tmp_path / "data") as opened:
        yield opened


def put(store: AdapterStore, tmp_path: Path, alpha: float = 8) -> str:
    folder = write(tmp_path / f"alpha-{alpha}", plain_config(lora_alpha=alpha))
    return store.ingest(AdapterFolder.at(folder), SOURCE, GEOMETRY, 64).version


@contextmanager
def another_process(data: Path, version: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(data), version]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield process
        process.kill()


def test_what_another_process_holds_goes_when_it_lets_go(store: AdapterStore, tmp_path: Path) -> None:
    held, free = put(store, tmp_path, 1), put(store, tmp_path, 2)
    with another_process(tmp_path / "data", held) as other:
        assert store.delete_unneeded([held, free]) == [free]
        assert store.verify(held)
        with pytest.raises(AdapterInUse):
            store.delete_version(held)
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "let go\n"
        assert store.versions() == []
        assert list((tmp_path / "data/versions").iterdir()) == []


def test_a_killed_holder_holds_nothing(store: AdapterStore, tmp_path: Path) -> None:
    version = put(store, tmp_path)
    with another_process(tmp_path / "data", version) as other:
        assert store.delete_unneeded([version]) == []
        other.kill()
        other.wait()
    assert store.delete_unneeded([]) == [version], "what was to go is remembered"


def test_what_a_killed_holder_left_goes_at_the_next_start(tmp_path: Path) -> None:
    with AdapterStore(tmp_path / "data") as store:
        version = put(store, tmp_path)
        with another_process(tmp_path / "data", version):
            assert store.delete_unneeded([version]) == []
    with AdapterStore(tmp_path / "data") as again:
        assert again.versions() == []


def test_what_is_wanted_again_stays(store: AdapterStore, tmp_path: Path) -> None:
    version = put(store, tmp_path)
    store.hold(version)
    assert store.delete_unneeded([version]) == [], "this process is no exception"
    assert put(store, tmp_path) == version
    store.let_go(version)
    assert store.verify(version)
    store.hold(version)
    assert store.delete_unneeded([version]) == []
    store.set_alias("name", version)
    store.remove_alias("name")
    store.let_go(version)
    assert store.verify(version)


def test_holds_are_counted(store: AdapterStore, tmp_path: Path) -> None:
    version = put(store, tmp_path)
    store.hold(version)
    store.hold(version)
    store.let_go(version)
    assert store.delete_unneeded([version]) == []
    store.let_go(version)
    assert store.versions() == []
    with pytest.raises(AdapterNotFound):
        store.hold(version)
    assert store.delete_unneeded([version]) == []
    assert put(store, tmp_path) == version
    assert store.delete_unneeded([version]) == [version], "a refused hold holds nothing"


def test_nobody_can_hold_what_is_being_deleted(tmp_path: Path) -> None:
    digest = "ab" * 32
    one, two = Holds(tmp_path / "holds"), Holds(tmp_path / "holds")
    with one.free([digest]) as free:
        assert free == {digest}
        waiting = threading.Thread(target=two.hold, args=(digest,))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        with Holds(tmp_path / "holds").free([digest]) as none:
            assert none == set()
    waiting.join(5)
    assert not waiting.is_alive()
    with one.free([digest, "cd" * 32]) as free:
        assert free == {"cd" * 32}
    one.close()
    two.close()


# -- chat templates ---------------------------------------------------------------------------------------------------


def keep(store: AdapterStore, tmp_path: Path, template: str, name: str | None, alpha: float = 8) -> str:
    folder = write(tmp_path / f"{name}-{digest_of(template)[:8]}", plain_config(lora_alpha=alpha))
    (folder / "chat_template.jinja").write_text(template)
    record, source = store.keep(FetchedFolder(AdapterFolder.at(folder), SOURCE), GEOMETRY, 64)
    if name is not None:
        store.set_alias(name, record.version, source=source, replace=True)
    store.let_go(record.version, source.chat_template)
    return record.version


def kept(tmp_path: Path) -> set[str]:
    return {path.read_text() for path in (tmp_path / "data/templates").iterdir()}


def test_templates_go_with_the_last_that_has_them(store: AdapterStore, tmp_path: Path) -> None:
    one = keep(store, tmp_path, "first", "a")
    keep(store, tmp_path, "second", "a")  # another text for the same version: it can be rolled back to the first
    assert keep(store, tmp_path, "third", "b") == one
    two = keep(store, tmp_path, "first", "c", alpha=2)
    store.delete_unneeded([one, two])
    assert kept(tmp_path) == {"first", "second", "third"}
    store.remove_alias("a")
    store.delete_unneeded([one])
    assert kept(tmp_path) == {"first", "third"}, "c has the first, b the third and the version"
    store.remove_alias("c")
    store.delete_unneeded([two])
    assert kept(tmp_path) == {"first", "third"}, "the first came with the version that b has"
    store.remove_alias("b")
    store.delete_unneeded([one])
    assert kept(tmp_path) == set()


def test_a_template_is_safe_before_its_name_is_set_and_while_it_is_served(store: AdapterStore, tmp_path: Path) -> None:
    version = keep(store, tmp_path, "first", None)
    folder = write(tmp_path / "again")
    (folder / "chat_template.jinja").write_text("second")
    record, source = store.keep(FetchedFolder(AdapterFolder.at(folder), SOURCE), GEOMETRY, 64)
    store.hold(version, source.chat_template)  # as a server does with an adapter that came on demand
    store.delete_unneeded([])
    assert kept(tmp_path) == {"first", "second"}
    store.let_go(record.version, source.chat_template)
    store.delete_unneeded([version])
    assert kept(tmp_path) == {"first", "second"}
    store.let_go(version, source.chat_template)
    assert kept(tmp_path) == set()


def test_a_refused_adapter_leaves_no_hold_on_its_template(store: AdapterStore, tmp_path: Path) -> None:
    folder = write(tmp_path / "bad", plain_config(r=0))
    (folder / "chat_template.jinja").write_text("text")
    with pytest.raises(Exception, match="r"):
        store.keep(FetchedFolder(AdapterFolder.at(folder), SOURCE), GEOMETRY, 64)
    assert store._holds._counts == {}


def test_templates_that_nobody_has_go_at_the_start(tmp_path: Path) -> None:
    with AdapterStore(tmp_path / "data") as store:
        keep(store, tmp_path, "first", "a")
        store.templates.keep("nobody's")
    with AdapterStore(tmp_path / "data"):
        assert kept(tmp_path) == {"first"}
