"""The Hub client's cache folder, filled with files that are checked, also by pulls that were cut or killed.

The client gives every download a file of its own name and loses it when it ends early; it does not check what came over
plain HTTP. Here the bytes lie under the hash that they are to have, so whoever asks for them next appends to them, and
what is damaged is fetched once more. Offline the client itself finds the files.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from huggingface_hub.file_download import repo_folder_name

from loraserve.errors import HubChecksumMismatch
from loraserve.lora.files import CHUNK
from loraserve.lora.hub_get import RemoteFile, Token, get_file
from loraserve.lora.strict_json import show
from loraserve.lora.workspace import exclusive


class HubCache:
    """The part of the cache that is one repository's."""

    def __init__(self, repo: str, cache: Path) -> None:
        self._repo = repo
        self._folder = cache / repo_folder_name(repo_id=repo, repo_type="model")
        self._blobs = self._folder / "blobs"

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
                        if _is_intact(part, remote):
                            break
                        file.truncate(0)
                    else:
                        part.unlink()
                        raise HubChecksumMismatch(f"{show(remote.path)} of {self._repo} arrived damaged twice")
                os.replace(part, blob)
        lock.unlink(missing_ok=True)
        return self._link(commit, remote.path, blob)

    def remember(self, revision: str, commit: str) -> None:
        """Note which commit a revision was, as the client does, so that it is found offline."""
        if revision == commit:
            return
        ref = self._folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f".{ref.name}.{secrets.token_hex(4)}")
        new.write_text(commit)
        os.replace(new, ref)

    def _link(self, commit: str, path: str, blob: Path) -> Path:
        place = self._folder / "snapshots" / commit / path
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(f".{secrets.token_hex(4)}")
        new.symlink_to(os.path.relpath(blob, place.parent))
        os.replace(new, place)
        return place


def _is_intact(blob: Path, remote: RemoteFile) -> bool:
    if not blob.is_file() or (remote.size is not None and blob.stat().st_size != remote.size):
        return False
    if remote.sha256 is None:
        return True
    digest = hashlib.sha256()
    with blob.open("rb") as reading:
        while piece := reading.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest() == remote.sha256
