"""Bytes of one file of the Hub into an open file: gone on with where it stopped, and ended if it stalls or trickles.

The Hub client's own download has neither bound: it tries a silent server for minutes, takes whatever pause a 429 asks
for, and hands on what came only after 10 MB. Its session, headers and errors are used here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.cookiejar import DefaultCookiePolicy
from typing import Any, BinaryIO

from huggingface_hub import hf_hub_url
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status

from loraserve.errors import AdapterFault, AdapterRefused, HubError, HubTimeout
from loraserve.lora.hub_errors import retrying
from loraserve.lora.hub_info import RemoteFile
from loraserve.lora.strict_json import show

Token = str | bool | None
"""None: the token of this machine's login or environment; False: none at all."""

CONNECT_S, STALL_S = 5.0, 25.0
"""Longest waits for a connection and for the next byte. Both are tried twice: a silent Hub costs at most a minute."""

WINDOW_S, LEAST_BYTES = 60.0, 64 << 10
"""A file must bring so many bytes in every such time."""

MAX_ANSWER = 64 << 20

_NO_COOKIES = DefaultCookiePolicy(allowed_domains=())
_TELLING = (b"x-error-", b"retry-after", b"x-request-id", b"x-amz")

RENEW_BYTES = 1 << 20
"""A transfer that brought so much before it broke has all its tries again."""


class Pace:
    """Ends a transfer that goes on for ever without coming to anything."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._bytes = 0

    def took(self, count: int) -> None:
        """`count` bytes came. Raises `HubTimeout` at the end of a window with too few."""
        self._bytes += count
        now = self._clock()
        if now - self._since < WINDOW_S:
            return
        if self._bytes < LEAST_BYTES:
            raise HubTimeout(f"the Hub sent only {self._bytes} bytes in {now - self._since:.0f} s")
        self._since, self._bytes = now, 0


def get_answer(url: str, token: Token) -> bytes:
    """What the Hub answers to a question. Raises what its client raises, and `HubError` and its kind."""
    pieces: list[bytes] = []
    with _open(url, build_hf_headers(token=token)) as response:
        _raise_for_status(response)
        pace, size = Pace(), 0
        for piece in response.iter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_ANSWER:
                raise HubError("the Hub's answer is too large")
            pace.took(len(piece))
    return b"".join(pieces)


def get_file(
    repo: str,
    commit: str,
    remote: RemoteFile,
    file: BinaryIO,
    *,
    token: Token,
    endpoint: str | None,
    max_bytes: int,
    progress: Callable[[int], None],
) -> None:
    """Append to `file` what it lacks, as long as tries bring anything. `progress` hears how many bytes are there.

    Raises `HubError` and its kind; what came is left in the file.
    """
    url = hf_hub_url(repo, remote.path, revision=commit, endpoint=endpoint)
    headers = build_hf_headers(token=token) | {"Accept-Encoding": "identity"}
    limit = max_bytes if remote.size is None else remote.size

    def go_on() -> None:
        there = file.seek(0, os.SEEK_END)
        if remote.size is not None and there >= remote.size:
            if there == remote.size:
                return
            there = _empty(file)
        ranged = {"Range": f"bytes={there}-"} if there else {}
        with _open(url, headers | ranged) as response:
            if there and not _goes_on(response, there):
                there = _empty(file)
                if response.status_code in (206, 416):  # not what was asked for: without a range it cannot be told
                    response.close()
                    go_on()
                    return
            _raise_for_status(response)
            if not there and response.status_code != 200:
                raise HubError(f"the Hub answered {response.status_code} for {show(remote.path)} of {repo}")
            _append(response, remote, repo, file, there, limit, progress)
        file.flush()
        if remote.size is not None and file.tell() != remote.size:
            raise HubError(f"{show(remote.path)} of {repo} is smaller than the Hub says")

    while True:
        before = file.seek(0, os.SEEK_END)
        try:
            return retrying(go_on, repo, commit)
        except HubError:
            if file.seek(0, os.SEEK_END) - before < RENEW_BYTES:
                raise


def _open(url: str, headers: dict[str, str]) -> AbstractContextManager[Any]:
    session = get_session()
    # It is one for all tenants, and a cookie that one of their tokens brought would let the next ones in.
    session.cookies.jar.set_policy(_NO_COOKIES)
    # Numbers and not the client's own class, which has another name in each of its versions.
    return session.stream("GET", url, headers=headers, timeout=(CONNECT_S, STALL_S, STALL_S, STALL_S))


def _append(
    response: Any,
    remote: RemoteFile,
    repo: str,
    file: BinaryIO,
    there: int,
    limit: int,
    progress: Callable[[int], None],
) -> None:
    pace = Pace()
    for piece in response.iter_bytes():
        there += len(piece)
        if there > limit and remote.size is None:
            raise AdapterRefused(AdapterFault.ADAPTER_TOO_LARGE, f"the files of {repo} have more than is fetched")
        if there > limit:
            raise HubError(f"{show(remote.path)} of {repo} is larger than the Hub says")
        file.write(piece)
        progress(there)
        pace.took(len(piece))


def _raise_for_status(response: Any) -> None:
    """Raise the client's errors by what the headers say: it would read the body to its end, however long that takes."""
    if response.status_code >= 400:
        headers = [(name, value) for name, value in response.headers.raw if name.lower().startswith(_TELLING)]
        hf_raise_for_status(type(response)(response.status_code, headers=headers, request=response.request))


def _goes_on(response: Any, there: int) -> bool:
    """Whether an answer is the file's own bytes from `there` on, or a failure that says nothing about them."""
    if response.status_code not in (200, 206, 416):
        return True
    span = str(response.headers.get("Content-Range", ""))
    is_plain = response.headers.get("Content-Encoding", "identity") == "identity"
    return response.status_code == 206 and is_plain and span.startswith(f"bytes {there}-")


def _empty(file: BinaryIO) -> int:
    file.seek(0)
    file.truncate()
    return 0
