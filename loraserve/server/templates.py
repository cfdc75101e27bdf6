"""Chat templates of adapters, rendered apart from the server: bounded in time, memory and size."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import queue
import socket
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from loraserve.errors import ChatTemplateFailed, InvalidRequest

RENDER_S = 2.0
"""Longest time for one chat; a real template takes about a millisecond."""

QUARANTINE_S = 60.0
"""How long a template that ran out of time is not tried again."""

_START_S = 60.0
_NUM_WORKERS = 2
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HOME", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
_MAX_REMEMBERED = 1024


class Chat(NamedTuple):
    """What a template gets."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool
    continue_final_message: bool
    special_tokens: Mapping[str, str]  # the base tokenizer's, as templates name them: `bos_token`, …


class TemplateRenderer:
    """Renders untrusted templates in processes of their own, which start with the first chat that needs one.

    A template renders one chat at a time, so a slow one holds one process, not all; and once it ran out of time it is
    turned away at once for a while. `render` belongs to the event loop.
    """

    def __init__(self, *, render_s: float = RENDER_S, quarantine_s: float = QUARANTINE_S) -> None:
        self._render_s = render_s
        self._quarantine_s = quarantine_s
        self._threads = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="chat-template")
        self._workers: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(_NUM_WORKERS):
            self._workers.put(_Worker())
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._slow: OrderedDict[str, float] = OrderedDict()  # template → until when it is turned away

    async def render(self, template: str, chat: Chat) -> str:
        """Prompt text of a chat. Raises `ChatTemplateFailed`, or `InvalidRequest` if the template refuses the chat."""
        key = hashlib.sha256(template.encode(errors="surrogatepass")).hexdigest()
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if time.monotonic() < self._slow.get(key, 0.0):
                raise self._too_slow()
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._threads, self._ask, template, chat)
            if found is None:
                self._slow[key] = time.monotonic() + self._quarantine_s
                self._slow.move_to_end(key)
                if len(self._slow) > _MAX_REMEMBERED:
                    self._slow.popitem(last=False)
                raise self._too_slow()
        if "refused" in found:
            raise InvalidRequest(f"the chat template refuses these messages: {found['refused']}", param="messages")
        if "text" not in found:
            raise ChatTemplateFailed(
                f"the adapter's own chat template fails: {found.get('failed', 'its process ended')}", param="messages"
            )
        return found["text"]

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._workers.empty():
            self._workers.get().stop()

    def _ask(self, template: str, chat: Chat) -> dict[str, str] | None:
        """The process's answer; empty if it died, None if it took too long."""
        worker = self._workers.get()  # there are as many as threads
        try:
            return worker.ask({"template": template} | chat._asdict(), self._render_s)
        except TimeoutError:
            worker.stop()
            return None
        except OSError:
            worker.stop()
            return {}
        finally:
            self._workers.put(worker)

    def _too_slow(self) -> ChatTemplateFailed:
        return ChatTemplateFailed(
            f"the adapter's own chat template takes more than {self._render_s:g} s", param="messages"
        )


class _Worker:
    """A process that is started when it is needed. Belongs to one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, str]:
        """Raises `TimeoutError`, or `OSError` if the process is gone."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None
        deadline = time.monotonic() + seconds
        self._connection.settimeout(seconds)
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        return self._read(deadline)

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.stop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loraserve.server.template_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # No more of the environment than a Python needs to start: there are keys in it.
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        self._connection = ours
        try:
            self._read(time.monotonic() + _START_S)
        except TimeoutError as error:
            raise OSError("the process for chat templates does not start") from error

    def _read(self, deadline: float) -> dict[str, str]:
        assert self._connection is not None
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            part = self._connection.recv(1 << 16)
            if not part:
                raise OSError("the process for chat templates ended")
            parts.append(part)
        found: dict[str, str] = json.loads(b"".join(parts))
        return found
