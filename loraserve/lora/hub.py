"""Adapters from the Hugging Face Hub: only the files that are needed, at one commit, checked against its hashes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import quote

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from loraserve.errors import (
    AdapterFault,
    AdapterRefused,
    RepoNotFound,
    RevisionNotFound,
    SubfolderNotFound,
)
from loraserve.lora.adapter_files import needed_files
from loraserve.lora.files import AdapterFolder
from loraserve.lora.hub_cache import HubCache
from loraserve.lora.hub_errors import retrying
from loraserve.lora.hub_get import Token, get_answer
from loraserve.lora.hub_info import RemoteFile, RepoInfo, read_info
from loraserve.lora.names import check_name
from loraserve.lora.sources import FetchedFolder, check_subfolder
from loraserve.lora.spec import AdapterSource
from loraserve.lora.strict_json import show
from loraserve.lora.workspace import Progress, storage_errors

_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}", re.ASCII)


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
    info = _ask(place, token, endpoint)
    files = _needed(place, inner, info)
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
                info.commit,
                file,
                token=token,
                endpoint=endpoint,
                max_bytes=max_bytes - done,
                progress=_on_top(progress, done, total),
            )
            folder = local.parent
            done += local.stat().st_size
            progress(done, max(done, total))
        kept.remember(place.revision or constants.DEFAULT_REVISION, info.commit)
    return FetchedFolder(AdapterFolder.at(folder, roots=kept.roots), place.source(info.commit), info.restricted)


def is_offline() -> bool:
    """Whether the Hub may not be asked (`HF_HUB_OFFLINE`)."""
    return bool(constants.HF_HUB_OFFLINE)


def check_access(place: HubRepo, token: Token, endpoint: str | None = None) -> None:
    """Ask the Hub whether a token opens a repository. Raises as `fetch_hub`."""
    _ask(place, token, endpoint)


def _ask(place: HubRepo, token: Token, endpoint: str | None) -> RepoInfo:
    """What the Hub says of a repository, with its files, to those whom it lets in."""
    url = f"{endpoint or constants.ENDPOINT}/api/models/{place.repo}"
    at = "" if place.revision is None else f"/revision/{quote(place.revision, safe='')}"
    answer = retrying(lambda: get_answer(f"{url}{at}?blobs=true", token), place.repo, place.revision)
    info = read_info(answer, place.repo)
    if info.gated:
        # Everybody may see what a gated repository is. Files that are cached would not be asked for.
        retrying(lambda: get_answer(f"{url}/auth-check", token), place.repo, place.revision)
    return info


def _needed(place: HubRepo, inner: PurePosixPath, info: RepoInfo) -> list[RemoteFile]:
    inside = info.inside(inner)
    if not inside and inner.parts:
        raise SubfolderNotFound(f"{place.repo} has no subfolder {show(str(inner))}", param="subfolder")
    found = [inside[name] for name in needed_files(inside)]
    if not found:
        where = f"subfolder {show(str(inner))} of {place.repo}" if inner.parts else place.repo
        raise AdapterRefused(AdapterFault.NOT_AN_ADAPTER, f"{where} holds no adapter files", param="repo")
    return found


def _on_top(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    """Reports one file's bytes on top of those before it."""
    return lambda there: progress(before + there, max(before + there, total))


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
    roots = HubCache(place.repo, cache).roots
    return FetchedFolder(AdapterFolder.at(folder, roots=roots), place.source(snapshot.name))
