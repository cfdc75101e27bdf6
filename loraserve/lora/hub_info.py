"""What the Hub's API says of a repository: only the fields that are needed, each of the type that it must have."""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple

import msgspec

from loraserve.errors import HubError

_DIGEST = re.compile(r"[0-9a-f]{40,64}", re.ASCII)
MAX_SIZE = 1 << 50
"""Bytes of a file; more is no size."""


class RemoteFile(NamedTuple):
    """One file of a repository at one commit, as the Hub describes it."""

    path: str  # in the repository
    size: int | None
    sha256: str | None  # of files in large-file storage
    blob: str  # its name among the cache's blobs


class RepoInfo(NamedTuple):
    """A repository at one commit."""

    commit: str
    restricted: bool  # private or gated
    gated: bool
    files: tuple[RemoteFile, ...]

    def inside(self, folder: PurePosixPath) -> dict[str, RemoteFile]:
        """The files of one folder, by their names in it."""
        return {path.name: file for file in self.files if (path := PurePosixPath(file.path)).parent == folder}


class _LargeFile(msgspec.Struct):
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Sibling(msgspec.Struct):
    rfilename: str
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)] | None = None
    blobId: str | None = None
    lfs: _LargeFile | None = None


class _Answer(msgspec.Struct):
    sha: str
    private: Any = False
    gated: Any = False
    siblings: list[_Sibling] = []


def read_info(answer: bytes, repo: str) -> RepoInfo:
    """Parse an answer. Raises `HubError`."""
    try:
        found = msgspec.json.decode(answer, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HubError(f"the Hub did not describe {repo} as a Hub does") from error
    if _DIGEST.fullmatch(found.sha) is None:
        raise HubError(f"the Hub named no commit of {repo}")
    files = tuple(_file(found.sha, sibling) for sibling in found.siblings)
    return RepoInfo(found.sha, bool(found.private or found.gated), bool(found.gated), files)


def _file(commit: str, sibling: _Sibling) -> RemoteFile:
    sha256 = None if sibling.lfs is None else sibling.lfs.sha256
    # As the client names them: by the entity tags, which are these hashes.
    blob = sha256 or sibling.blobId or ""
    if _DIGEST.fullmatch(blob) is None:
        blob = hashlib.sha256(f"{commit}/{sibling.rfilename}".encode(errors="surrogatepass")).hexdigest()
    return RemoteFile(sibling.rfilename, sibling.size, sha256, blob)
