"""The Hub client's cache folder, filled with files that are checked, also by pulls that were cut or killed.

The client gives every download a file of its own name and loses it when it ends early; it does not check what came over
plain HTTP. Here the bytes lie under the hash that they are to have, so whoever asks for them next appends to them, and
what is damaged is fetched once more. Offline the client itself finds the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from huggingface_hub.file_download import repo_folder_name

from loraserve.errors import HubChecksumMismatch
from loraserve.lora.files import CHUNK
from loraserve.lora.hub_get import Token, get_file
from loraserve.lora.hub_info import RemoteFile
from loraserve.lora.strict_json import show
from loraserve.lora.workspace import exclusive


class HubCache:
    """The part of the cache that is one repository's."""

    def __init__(self, repo: str, cache: Path) -> None:
        self._repo = repo
        self._folder = cache / repo_folder_name(repo_id=repo, repo_type="model")
        self._blobs = self._folder / "blobs"

    @property
    def roots(self) -> tuple[Path, ...]:
        """Where its files lie. The owner of the cache may have put parts of it elsewhere, by links."""
        return (self._folder, self._blobs, self._folder / "snapshots")

    def fetch(
        self,
        commit: str,
        remote: RemoteFile,
        *,
        token: Token,
        endpoint: str | None,
        max_bytes: int,
        progress: Callable[[int], None],
    ) -> Path:
        """Bring a file in unless it is there whole; returns its place in the snapshot. Raises as `get_file`."""
        place = self._folder / "snapshots" / commit / remote.path
        if _is_intact(place, remote):
            return place  # also in a cache that may only be read
        blob, part = self._blobs / remote.blob, self._blobs / f"{remote.blob}.part"
        lock = self._blobs / f"{remote.blob}.lock"
        self._blobs.mkdir(parents=True, exist_ok=True)
        with exclusive(lock):
            if not _is_intact(blob, remote):
                with part.open("ab+") as file:
                    if remote.sha256 is None:
                        file.truncate(0)  # nothing would tell whether what is left belongs to it
                    for _ in range(2):  # what an earlier pull left may be the bad part
                        get_file(
                            self._repo,
                            commit,
                            remote,
                            file,
                            token=token,
                            endpoint=endpoint,
                            max_bytes=max_bytes,
                            progress=progress,
                        )
                        if _has_arrived(part, remote):
                            break
                        file.truncate(0)
                    else:
                        part.unlink()
                        raise HubChecksumMismatch(f"{show(remote.path)} of {self._repo} arrived damaged twice")
                os.replace(part, blob)
        lock.unlink(missing_ok=True)
        self._link(place, blob)
        return place

    def remember(self, revision: str, commit: str) -> None:
        """Note which commit a revision was, as the client does, so that it is found offline."""
        if revision == commit:
            return
        ref = self._folder / "refs" / revision
        with contextlib.suppress(OSError):
            if ref.read_text() == commit:
                return
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f".{ref.name}.{secrets.token_hex(4)}")
        new.write_text(commit)
        os.replace(new, ref)

    def _link(self, place: Path, blob: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(f".{secrets.token_hex(4)}")
        # Between the real places: the owner of the cache may have put either folder elsewhere, by a link.
        real = os.path.join(os.path.realpath(blob.parent), blob.name)
        new.symlink_to(os.path.relpath(real, os.path.realpath(place.parent)))
        os.replace(new, place)


def _is_intact(file: Path, remote: RemoteFile) -> bool:
    """Whether a file that is there has the bytes that it should have. One that nothing tells of has not."""
    if not _has_size(file, remote):
        return False
    if remote.sha256 is not None:
        return _hash(file, hashlib.sha256()) == remote.sha256
    # Git's name of the content. A Hub with other names costs one more transfer of a small file.
    return _hash(file, hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)) == remote.blob


def _has_arrived(file: Path, remote: RemoteFile) -> bool:
    return _has_size(file, remote) if remote.sha256 is None else _is_intact(file, remote)


def _has_size(file: Path, remote: RemoteFile) -> bool:
    return file.is_file() and remote.size in (None, file.stat().st_size)


def _hash(file: Path, digest: hashlib._Hash) -> str:
    with file.open("rb") as reading:
        while piece := reading.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()
