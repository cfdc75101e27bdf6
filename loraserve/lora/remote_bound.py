"""A time limit for stores whose clients have none that could be relied on: no byte for so long, and it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from loraserve.errors import SourceTimeout
from loraserve.lora.workspace import Progress

SILENCE_S = 60.0
"""Longest time without a byte of a source."""

_T = TypeVar("_T")


def bounded(work: Callable[[Progress], _T], progress: Progress, what: str) -> _T:
    """What `work` returns or raises; it tells each byte that comes. Raises `SourceTimeout` when none does for long.

    Nothing can end a client's call from outside, so then `work` is left behind in its thread until the client gives up,
    and has to bear that its files are gone.
    """
    last = time.monotonic()
    given_up = False
    done = threading.Event()
    found: list[_T] = []
    failed: list[BaseException] = []

    def told(done_bytes: int, total: int) -> None:
        nonlocal last
        if given_up:
            raise SourceTimeout("given up")
        last = time.monotonic()
        progress(done_bytes, total)

    def run() -> None:
        try:
            found.append(work(told))
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="adapter-source", daemon=True).start()
    while not done.wait(max(0.01, last + SILENCE_S - time.monotonic())):
        if time.monotonic() - last >= SILENCE_S:
            given_up = True
            raise SourceTimeout(f"nothing came of {what} for {SILENCE_S:g} s", param="path")
    if failed:
        raise failed[0]
    return found[0]
