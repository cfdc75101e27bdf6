"""Run as a program: work with a store in a child that is killed at its n-th line of code, for many n; check each time.

A program of its own, because it forks, which a process with threads should not.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from raw_adapters import GEOMETRY, plain_config, write

from loraserve.lora.files import AdapterFolder
from loraserve.lora.format import parse_adapter
from loraserve.lora.spec import AdapterSource
from loraserve.lora.store import AdapterStore
from loraserve.lora.version import content_version

WATCHED = ("store.py", "registry.py", "workspace.py", "history.py")
SOURCE = AdapterSource("local")


def work(data: Path, sources: list[Path]) -> None:
    """Everything that changes a store: a new version, a known one, a replaced name, a removed one, a deletion."""
    with AdapterStore(data) as store:
        for folder in sources:
            version = store.ingest(AdapterFolder.at(folder), SOURCE, GEOMETRY, 64).version
            store.set_alias("name", version, replace=True)
        store.set_alias("other", version)
        store.remove_alias("other")
        store.roll_back("name")
        store.roll_back("name", version[:8])
        store.note_use({"name": 1.0}, {version: "device"})
        for unused in store.unreferenced():
            store.delete_version(unused)
        store.remove_alias("name")
        store.delete_unneeded([record.version for record in store.versions()])


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
    (workspace,) = (path for path in (data / "tmp").iterdir() if path.is_dir())
    assert list(workspace.iterdir()) == []


def main(root: Path, first: int, step: int) -> int:
    """How many times the child was killed; the last one came to its end."""
    sources = [write(root / "sources" / str(alpha), plain_config(lora_alpha=alpha)) for alpha in (1, 2, 1)]
    for kills in count():
        data = root / f"data-{kills}"
        with AdapterStore(data) as store:
            version = store.ingest(AdapterFolder.at(write(root / "kept")), SOURCE, GEOMETRY, 64).version
            store.set_alias("kept", version)
        child = os.fork()
        if child == 0:
            die_at(first + kills * step)
            work(data, sources)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with AdapterStore(data) as store:
            check_whole(store, data)
            assert store.resolve("kept") == version
        work(data, sources)  # and the same work succeeds on what was left
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return kills
    raise AssertionError("unreachable")


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
