"""Adapters from the Hugging Face Hub: only the files that are needed, at one commit, checked against its hashes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import quote

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.hf_api import ModelInfo

from loraserve.errors import (
    AdapterFault,
    AdapterRefused,
    HubError,
    RepoNotFound,
    RevisionNotFound,
    SubfolderNotFound,
)
from loraserve.lora.adapter_files import needed_files
from loraserve.lora.files import AdapterFolder
from loraserve.lora.hub_cache import HubCache
from loraserve.lora.hub_errors import retrying
from loraserve.lora.hub_get import RemoteFile, Token, get_answer
from loraserve.lora.names import check_name
from loraserve.lora.sources import FetchedFolder, check_subfolder
from loraserve.lora.spec import AdapterSource
from loraserve.lora.strict_json import show
from loraserve.lora.workspace import Progress, storage_errors

_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40,64}", re.ASCII)


class HubRepo(NamedTuple):
    """A repository, or a folder of it, at a revision."""

    repo: str
    revision: str | None = None
    subfolder: str | None = None

    def source(self, commit: str) -> AdapterSource:
        """This place at one commit."""
        return AdapterSource("hub", repo=self.repo, revision=self.revision, commit=commit, subfolder=self.subfolder)


def fetch_hub(
    place: HubRepo,
    *,
    token: Token = None,
    cache_dir: Path | None = None,
    progress: Progress = lambda done, total: None,
    on_file: Callable[[str, int, int], None] = lambda path, number, count: None,
    endpoint: str | None = None,
    max_bytes: int = 32 << 30,
) -> FetchedFolder:
    """Bring an adapter's files into the Hub cache and return their folder; blocks.

    Access is asked of the Hub before the cache is looked at: with `token`, or with this machine's own if it is None, or
    with none at all if it is False. Offline (`HF_HUB_OFFLINE`) what is cached is used. Raises
    `RepoNotFound`, `RevisionNotFound`, `SubfolderNotFound`, `HubAccessDenied`, `HubRateLimited`, `HubTimeout`,
    `HubError`, `HubChecksumMismatch`, `DiskFull`, `AdapterRefused` (`invalid_name`, `path_escape`,
    `adapter_too_large`).
    """
    check_name(place.repo)
    if place.revision is not None and (_REVISION.fullmatch(place.revision) is None or ".." in place.revision):
        raise RevisionNotFound(f"{show(place.revision)} is not a revision", param="revision")
    inner = check_subfolder(place.subfolder) or PurePosixPath()
    cache = Path(cache_dir or constants.HF_HUB_CACHE)
    if constants.HF_HUB_OFFLINE:
        return _from_cache(place, inner, cache)
    commit, files, restricted = _list_files(place, inner, token, endpoint)
    total = sum(file.size or 0 for file in files)
    if total > max_bytes:
        raise AdapterRefused(
            AdapterFault.ADAPTER_TOO_LARGE, f"the adapter's files have {total} bytes, at most {max_bytes} are fetched"
        )
    done, folder, kept = 0, cache, HubCache(place.repo, cache)
    progress(0, total)
    with storage_errors("filling the Hub cache"):
        for number, file in enumerate(files, 1):
            on_file(file.path, number, len(files))
            local = kept.fetch(
                commit,
                file,
                token=token,
                endpoint=endpoint,
                max_bytes=max_bytes,
                progress=_on_top(progress, done, total),
            )
            folder = local.parent
            done += file.size or 0
            progress(done, total)
        kept.remember(place.revision or constants.DEFAULT_REVISION, commit)
    return FetchedFolder(AdapterFolder.at(folder, roots=(cache,)), place.source(commit), restricted)


def is_offline() -> bool:
    """Whether the Hub may not be asked (`HF_HUB_OFFLINE`)."""
    return bool(constants.HF_HUB_OFFLINE)


def check_access(place: HubRepo, token: Token, endpoint: str | None = None) -> None:
    """Ask the Hub whether a token opens a repository. Raises as `fetch_hub`."""
    _ask(place, token, endpoint)


def _ask(place: HubRepo, token: Token, endpoint: str | None) -> ModelInfo:
    """What the Hub says of a repository, with its files, to those whom it lets in."""
    url = f"{endpoint or constants.ENDPOINT}/api/models/{place.repo}"
    at = "" if place.revision is None else f"/revision/{quote(place.revision, safe='')}"
    answer = retrying(lambda: get_answer(f"{url}{at}?blobs=true", token), place.repo, place.revision)
    try:
        info = ModelInfo(**json.loads(answer))  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise HubError(f"the Hub did not describe {place.repo} as a Hub does") from error
    if info.gated:
        # Everybody may see what a gated repository is. Files that are cached would not be asked for.
        retrying(lambda: get_answer(f"{url}/auth-check", token), place.repo, place.revision)
    return info


def _list_files(
    place: HubRepo, inner: PurePosixPath, token: Token, endpoint: str | None
) -> tuple[str, list[RemoteFile], bool]:
    info = _ask(place, token, endpoint)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    inside = {path.name: str(path) for path in map(PurePosixPath, siblings) if path.parent == inner}
    if not inside and inner.parts:
        raise SubfolderNotFound(f"{place.repo} has no subfolder {show(str(inner))}", param="subfolder")
    found = []
    for name in needed_files(inside):
        sibling = siblings[inside[name]]
        sha256 = sibling.lfs.sha256 if sibling.lfs is not None else None
        # As the client names them: by the entity tags, which are these hashes.
        blob = sha256 or sibling.blob_id or ""
        if _COMMIT.fullmatch(blob) is None:
            blob = hashlib.sha256(f"{info.sha}/{inside[name]}".encode()).hexdigest()
        found.append(RemoteFile(inside[name], sibling.size, sha256, blob))
    if not found or info.sha is None:
        where = f"subfolder {show(str(inner))} of {place.repo}" if inner.parts else place.repo
        raise AdapterRefused(AdapterFault.NOT_AN_ADAPTER, f"{where} holds no adapter files", param="repo")
    if _COMMIT.fullmatch(info.sha) is None:
        raise HubError(f"the Hub named no commit of {place.repo}")
    return info.sha, found, bool(info.private or info.gated)


def _on_top(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    """Reports one file's bytes on top of those before it."""
    return lambda there: progress(min(before + there, total), total)


def _from_cache(place: HubRepo, inner: PurePosixPath, cache: Path) -> FetchedFolder:
    names = needed_files(("adapter_config.json", "adapter_model.safetensors"))
    patterns = [str(inner / name) for name in names]
    try:
        snapshot = Path(
            snapshot_download(
                place.repo, revision=place.revision, cache_dir=cache, allow_patterns=patterns, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, FileNotFoundError, ValueError) as error:
        raise RepoNotFound(f"{place.repo} is not in the cache, and the Hub is not asked (HF_HUB_OFFLINE)") from error
    folder = snapshot / inner
    if not folder.is_dir():
        raise SubfolderNotFound(f"the cached {place.repo} has no subfolder {show(str(inner))}", param="subfolder")
    return FetchedFolder(AdapterFolder.at(folder, roots=(cache,)), place.source(snapshot.name))
