"""Run as a program: work with a store in a child that is killed somewhere, again and again; check each time.

`lines FIRST STEP` kills before every STEP-th line of the store's code, `effects` before each single thing that it does
to the disk or the database: every statement, every call that writes, renames, deletes, locks or makes durable.

A program of its own, because it forks, which a process with threads should not.
"""

from __future__ import annotations

import builtins
import fcntl
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from raw_adapters import GEOMETRY, plain_config, write

from loraserve.lora.files import AdapterFolder
from loraserve.lora.format import parse_adapter
from loraserve.lora.sources import FetchedFolder
from loraserve.lora.spec import AdapterSource
from loraserve.lora.store import AdapterStore
from loraserve.lora.version import content_version

WATCHED = ("store.py", "registry.py", "workspace.py", "history.py", "holds.py", "chat_template.py")
EFFECTS = ("open", "write", "fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "close")
SOURCE = AdapterSource("local")


def work(data: Path, sources: list[Path]) -> None:
    """Everything that changes a store: a new version, a known one, a replaced name, a removed one, a deletion."""
    with AdapterStore(data) as store:
        for folder in sources:
            fetched = FetchedFolder(AdapterFolder.at(folder), SOURCE)
            record, source = store.keep(fetched, GEOMETRY, 64)
            version = record.version
            store.set_alias("name", version, source=source, replace=True)
            store.let_go(version, source.chat_template)
        store.set_alias("other", version)
        store.set_pinned("other", True)
        store.remove_alias("other")
        store.roll_back("name")
        store.roll_back("name", version[:8])
        store.note_use({"name": 1.0}, {version: "device"})
        for unused in store.unreferenced():
            store.delete_version(unused)
        store.hold(version)
        store.remove_alias("name")
        store.delete_unneeded([record.version for record in store.versions()])
        store.let_go(version)  # which deletes it


def die_at(line: int) -> None:
    """Kill this process just before the `line`-th line of the watched modules."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def die_at_effect(number: int) -> None:
    """Kill this process just before its `number`-th effect on the disk."""
    seen = 0

    def effect(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*arguments: Any, **options: Any) -> Any:
            effect()
            return call(*arguments, **options)

        return calling

    for name in EFFECTS:
        setattr(os, name, watched(getattr(os, name)))
    builtins.open = watched(builtins.open)  # type: ignore[assignment]
    fcntl.flock, fcntl.fcntl = watched(fcntl.flock), watched(fcntl.fcntl)
    connect = sqlite3.connect

    def connecting(*arguments: Any, **options: Any) -> sqlite3.Connection:
        effect()
        connection = connect(*arguments, **options)
        connection.set_trace_callback(effect)
        return connection

    sqlite3.connect = connecting  # type: ignore[assignment]


def check_whole(store: AdapterStore, data: Path) -> None:
    """Names point at versions, versions have their files, files have their hashes, and nothing else is there."""
    recorded = {record.version for record in store.versions()}
    assert {path.name for path in (data / "versions").iterdir()} == recorded
    for version in recorded:
        assert store.verify(version)
        folder = store.folder(version)
        assert content_version(parse_adapter(folder, GEOMETRY, 64), folder) == version
    for alias in store.aliases():
        assert alias.version in recorded
        assert store.versions_of(alias.name)[0].version == alias.version
    known = store._registry.templates()
    assert {path.stem for path in (data / "templates").iterdir()} == known
    assert all(store.templates.read(digest) for digest in known)
    (workspace,) = (path for path in (data / "tmp").iterdir() if path.is_dir())
    assert list(workspace.iterdir()) == []


def main(root: Path, kill: Callable[[int], None], first: int, step: int) -> int:
    """How many times the child was killed; the last one came to its end."""
    sources = [write(root / "sources" / str(alpha), plain_config(lora_alpha=alpha)) for alpha in (1, 2, 1)]
    for number, folder in enumerate(sources[:2]):
        (folder / "chat_template.jinja").write_text(f"template {number}")
    with AdapterStore(root / "first") as store:
        kept = FetchedFolder(AdapterFolder.at(write(root / "kept")), SOURCE)
        version = store.keep(kept, GEOMETRY, 64)[0].version
        store.set_alias("kept", version)
    data = root / "data"
    for kills in count():
        shutil.copytree(root / "first", data)
        child = os.fork()
        if child == 0:
            kill(first + kills * step)
            work(data, sources)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with AdapterStore(data) as store:
            check_whole(store, data)
            assert store.resolve("kept") == version
        if kills % 8 == 0:
            work(data, sources)  # and the same work succeeds on what was left
        shutil.rmtree(data)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return kills
    raise AssertionError("unreachable")


if __name__ == "__main__":
    if sys.argv[2] == "effects":
        print(main(Path(sys.argv[1]), die_at_effect, 1, 1))
    else:
        print(main(Path(sys.argv[1]), die_at, int(sys.argv[3]), int(sys.argv[4])))
