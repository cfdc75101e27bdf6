"""Adapters from the Hugging Face Hub: only the files that are needed, at one commit, checked against its hashes."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import tqdm as HubBar

from loraserve.errors import (
    AdapterFault,
    AdapterRefused,
    HubChecksumMismatch,
    RepoNotFound,
    RevisionNotFound,
    SubfolderNotFound,
)
from loraserve.lora.adapter_files import needed_files
from loraserve.lora.files import CHUNK, AdapterFolder
from loraserve.lora.hub_errors import retrying
from loraserve.lora.hub_resume import Token, fetch_blob
from loraserve.lora.names import check_name
from loraserve.lora.sources import FetchedFolder, check_subfolder
from loraserve.lora.spec import AdapterSource
from loraserve.lora.strict_json import show
from loraserve.lora.workspace import Progress, storage_errors

TIMEOUT_S = 30.0
RESUMABLE = 16 << 20
"""Files from this size on are gone on with after a pull that ended early."""

_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}", re.ASCII)


class HubRepo(NamedTuple):
    """A repository, or a folder of it, at a revision."""

    repo: str
    revision: str | None = None
    subfolder: str | None = None

    def source(self, commit: str) -> AdapterSource:
        """This place at one commit."""
        return AdapterSource("hub", repo=self.repo, revision=self.revision, commit=commit, subfolder=self.subfolder)


class _RemoteFile(NamedTuple):
    path: str  # in the repository
    size: int
    sha256: str | None  # of files in large-file storage


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
    commit, files, restricted = _list_files(place, inner, HfApi(endpoint=endpoint, token=token))
    total = sum(file.size for file in files)
    if total > max_bytes:
        raise AdapterRefused(
            AdapterFault.ADAPTER_TOO_LARGE, f"the adapter's files have {total} bytes, at most {max_bytes} are fetched"
        )
    done, folder = 0, cache
    progress(0, total)
    with storage_errors("filling the Hub cache"):
        for number, file in enumerate(files, 1):
            on_file(file.path, number, len(files))
            local = _download(place, file, commit, cache, token, endpoint, _meter(progress, done, total))
            folder = local.parent
            done += file.size
            progress(done, total)
        _remember_revision(place, commit, cache)
    return FetchedFolder(AdapterFolder.at(folder, roots=(cache,)), place.source(commit), restricted)


def is_offline() -> bool:
    """Whether the Hub may not be asked (`HF_HUB_OFFLINE`)."""
    return bool(constants.HF_HUB_OFFLINE)


def check_access(place: HubRepo, token: Token, endpoint: str | None = None) -> None:
    """Ask the Hub whether a token opens a repository. Raises as `fetch_hub`."""
    api = HfApi(endpoint=endpoint, token=token)
    info = retrying(
        lambda: api.model_info(place.repo, revision=place.revision, timeout=TIMEOUT_S), place.repo, place.revision
    )
    if info.gated:
        # Everybody may see what a gated repository is; its files tell who may have them.
        retrying(lambda: api.auth_check(place.repo), place.repo, place.revision)


def _list_files(place: HubRepo, inner: PurePosixPath, api: HfApi) -> tuple[str, list[_RemoteFile], bool]:
    info = retrying(
        lambda: api.model_info(place.repo, revision=place.revision, files_metadata=True, timeout=TIMEOUT_S),
        place.repo,
        place.revision,
    )
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    inside = {path.name: str(path) for path in map(PurePosixPath, siblings) if path.parent == inner}
    if not inside and inner.parts:
        raise SubfolderNotFound(f"{place.repo} has no subfolder {show(str(inner))}", param="subfolder")
    found = []
    for name in needed_files(inside):
        sibling = siblings[inside[name]]
        found.append(
            _RemoteFile(inside[name], sibling.size or 0, sibling.lfs.sha256 if sibling.lfs is not None else None)
        )
    if not found or info.sha is None:
        where = f"subfolder {show(str(inner))} of {place.repo}" if inner.parts else place.repo
        raise AdapterRefused(AdapterFault.NOT_AN_ADAPTER, f"{where} holds no adapter files", param="repo")
    return info.sha, found, bool(info.private or info.gated)


def _meter(progress: Progress, before: int, total: int) -> type[HubBar]:
    """A progress bar for the client that draws nothing and reports one file's bytes on top of `before`."""

    class Meter(HubBar):
        done = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]
            self.done = int(options.get("initial", 0))

        def update(self, n: float | None = 1) -> bool | None:
            self.done += int(n or 0)
            progress(min(before + self.done, total), total)
            return None

    return Meter


def _download(
    place: HubRepo,
    file: _RemoteFile,
    commit: str,
    cache: Path,
    token: Token,
    endpoint: str | None,
    meter: type[HubBar],
) -> Path:
    def fetch(force: bool = False) -> Path:
        return Path(
            retrying(
                lambda: hf_hub_download(
                    place.repo,
                    file.path,
                    revision=commit,
                    cache_dir=cache,
                    token=token,
                    endpoint=endpoint,
                    force_download=force,
                    tqdm_class=meter,
                ),
                place.repo,
                place.revision,
            )
        )

    if file.sha256 is not None and file.size >= RESUMABLE:
        fetch_blob(
            place.repo,
            commit,
            file.path,
            size=file.size,
            sha256=file.sha256,
            cache=cache,
            token=token,
            endpoint=endpoint,
            meter=meter,
        )

    # The client does not check large files' hashes over plain HTTP and would keep bad bytes in its cache.
    local = fetch()
    if _is_intact(local, file):
        return local
    _purge(local)
    local = fetch(force=True)
    if _is_intact(local, file):
        return local
    _purge(local)
    raise HubChecksumMismatch(f"{show(file.path)} of {place.repo} arrived damaged twice")


def _is_intact(local: Path, file: _RemoteFile) -> bool:
    if local.stat().st_size != file.size and file.size:
        return False
    if file.sha256 is None:
        return True
    digest = hashlib.sha256()
    with local.open("rb") as reading:
        while piece := reading.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest() == file.sha256


def _purge(local: Path) -> None:
    blob = Path(os.path.realpath(local))
    local.unlink(missing_ok=True)
    blob.unlink(missing_ok=True)


def _remember_revision(place: HubRepo, commit: str, cache: Path) -> None:
    """Note which commit the revision was, as the client does, so that it is found offline."""
    revision = place.revision or constants.DEFAULT_REVISION
    if revision == commit:
        return
    ref = cache / repo_folder_name(repo_id=place.repo, repo_type="model") / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    new = ref.with_name(f".{ref.name}.{secrets.token_hex(4)}")
    new.write_text(commit)
    os.replace(new, ref)


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
