"""Adapters from object stores and archives: `s3://`, `gs://`, `https://`, `file://`, through fsspec (an extra).

Only addresses under an allowed prefix are opened. One that ends in `.tar`, `.tar.gz`, `.tgz` or `.zip` is an archive of
one adapter; any other is a folder. Of both only the adapter's own files are taken, never more than a bound of bytes.
"""

from __future__ import annotations

import errno
import gzip
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from loraserve.config import format_bytes
from loraserve.errors import AdapterFault, AdapterRefused, DiskFull, LoraserveError, SourceFailed, SourceNotFound
from loraserve.lora.adapter_files import CONFIG_NAME, needed_files
from loraserve.lora.files import CHUNK, AdapterFolder
from loraserve.lora.remote_bound import bounded
from loraserve.lora.sources import FetchedFolder, resolve_local
from loraserve.lora.spec import AdapterSource
from loraserve.lora.strict_json import show
from loraserve.lora.workspace import Progress

_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    RuntimeError,  # an encrypted member
    NotImplementedError,  # a compression that is not known
)
_MAX_TAIL = 64 << 20  # bytes after the last member of a tar, whose own padding is some thousands
_TARS, _ZIP = (".tar", ".tar.gz", ".tgz"), ".zip"


def is_url(path: str) -> bool:
    """Whether a path is an address rather than a folder of this machine."""
    return "://" in path


def fetch_url(url: str, allow: Sequence[str], into: Path, max_bytes: int, progress: Progress) -> FetchedFolder:
    """Bring an adapter's files into the new folder `into`.

    Raises `AdapterRefused` (`path_escape` for what no prefix allows, `not_an_adapter`, `adapter_too_large`,
    `corrupt_weights` for a broken archive), `SourceNotFound`, `SourceFailed`, `SourceTimeout`, `DiskFull`.
    """
    _check_allowed(url, allow)
    source = AdapterSource("url", path=url)
    is_archive = url.endswith((*_TARS, _ZIP))
    if urlsplit(url).scheme == "file":
        # Links in a folder of this machine could lead anywhere.
        roots = tuple(_local(prefix) for prefix in allow if prefix.startswith("file://"))
        path = _local(url)
        resolve_local(str(path.parent if is_archive else path), roots)
        if not is_archive:
            return FetchedFolder(resolve_local(str(path), roots).folder, source)
        resolve_local(os.path.realpath(path.parent), roots)
        if Path(os.path.realpath(path)).parent != Path(os.path.realpath(path.parent)):
            raise AdapterRefused(AdapterFault.PATH_ESCAPE, f"{show(url, 200)} is a link", param="path")
    into.mkdir()
    with _source_errors(url):
        if is_archive:
            with tempfile.TemporaryFile(dir=into.parent) as file:
                bounded(lambda told: _copy_archive(url, file.fileno(), max_bytes, told), progress, show(url, 200))
                file.seek(0)
                _unpack(url, file, into, max_bytes)
        else:
            bounded(lambda told: _copy_folder(url, into, max_bytes, told), progress, show(url, 200))
    if not any(into.iterdir()):
        raise AdapterRefused(AdapterFault.NOT_AN_ADAPTER, f"{show(url, 200)} holds no adapter files", param="path")
    return FetchedFolder(AdapterFolder.at(into), source)


def _check_allowed(url: str, allow: Sequence[str]) -> None:
    parts = unquote(url).split("/")
    if ".." in parts or "\0" in url or not any(_is_under(url, prefix) for prefix in allow):
        raise AdapterRefused(
            AdapterFault.PATH_ESCAPE, f"{show(url, 200)} is not under an address given by --adapter-url", param="path"
        )


def _is_under(url: str, prefix: str) -> bool:
    return url == prefix or url.startswith(prefix if prefix.endswith("/") else f"{prefix}/")


def _local(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _open_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        scheme = urlsplit(url).scheme
        raise SourceFailed(f"{scheme}:// needs a package that is not installed: {error}", param="path") from error


class _Budget:
    """Bytes that may still come, told to whoever watches."""

    def __init__(self, max_bytes: int, progress: Progress, total: int) -> None:
        self._max_bytes, self._progress, self._total = max_bytes, progress, total
        self._done = 0
        if total > max_bytes:
            self._refuse()

    def take(self, count: int) -> None:
        """Raises `AdapterRefused` beyond the bound."""
        self._done += count
        if self._done > self._max_bytes:
            self._refuse()
        self._progress(self._done, max(self._total, self._done))

    def _refuse(self) -> None:
        limit = format_bytes(self._max_bytes)
        raise AdapterRefused(AdapterFault.ADAPTER_TOO_LARGE, f"the adapter's files have more than {limit}")


def _copy(reading: IO[bytes], writing: IO[bytes], budget: _Budget) -> None:
    while piece := reading.read(CHUNK):
        budget.take(len(piece))
        writing.write(piece)


def _copy_archive(url: str, file: int, max_bytes: int, progress: Progress) -> None:
    system, path = _open_system(url)
    # Of its own: whoever waits may give up and close the other one.
    with os.fdopen(os.dup(file), "wb") as writing, system.open(path, "rb") as remote:
        _copy(remote, writing, _Budget(max_bytes, progress, int(system.size(path) or 0)))


def _copy_folder(url: str, into: Path, max_bytes: int, progress: Progress) -> None:
    system, path = _open_system(url)
    found = {PurePosixPath(each["name"]).name: each for each in system.ls(path, detail=True) if each["type"] == "file"}
    names = needed_files(found)
    budget = _Budget(max_bytes, progress, sum(int(found[name].get("size") or 0) for name in names))
    for name in names:
        with system.open(found[name]["name"], "rb") as reading, (into / name).open("xb") as writing:
            _copy(reading, writing, budget)


def _unpack(url: str, file: IO[bytes], into: Path, max_bytes: int) -> None:
    try:
        members = dict(_zip_members(file) if url.endswith(_ZIP) else _tar_members(file))
        configs = sorted((path for path in members if path.name == CONFIG_NAME), key=lambda path: len(path.parts))
        if not configs:
            return
        inner = configs[0].parent
        here = {path.name: opener for path, opener in members.items() if path.parent == inner}
        # What is unpacked counts, so a small archive of much air is refused as well.
        budget = _Budget(max_bytes, lambda done, total: None, 0)
        for name in needed_files(here):
            with here[name]() as reading, (into / name).open("xb") as writing:
                _copy(reading, writing, budget)
    except _BROKEN as error:
        problem = f"{show(url, 200)} is no archive that can be read"
        raise AdapterRefused(AdapterFault.CORRUPT_WEIGHTS, problem, param="path") from error


def _tar_members(file: IO[bytes]) -> Iterator[tuple[PurePosixPath, Any]]:
    archive = tarfile.open(fileobj=file, mode="r:*")  # noqa: SIM115 (its members are read later)
    members = archive.getmembers()
    _read_to_the_end(archive)
    for member in members:
        if member.isfile():  # no links, no devices
            yield PurePosixPath(member.name), lambda member=member: archive.extractfile(member)


def _read_to_the_end(archive: tarfile.TarFile) -> None:
    """What follows the last member: only there does a compressed stream have its checksum, and it is checked."""
    assert archive.fileobj is not None
    for _ in range(_MAX_TAIL // CHUNK):
        if not archive.fileobj.read(CHUNK):
            return
    raise tarfile.ReadError("there is too much after the last member")


def _zip_members(file: IO[bytes]) -> Iterator[tuple[PurePosixPath, Any]]:
    archive = zipfile.ZipFile(file)
    for member in archive.infolist():
        if not member.is_dir():
            yield PurePosixPath(member.filename), lambda member=member: archive.open(member)


@contextmanager
def _source_errors(url: str) -> Iterator[None]:
    try:
        yield
    except LoraserveError:
        raise
    except FileNotFoundError as error:
        trouble = _web_trouble(error.__cause__)
        if trouble is not None:
            raise SourceFailed(f"{show(url, 200)} could not be read: {trouble}", param="path") from error
        raise SourceNotFound(f"{show(url, 200)} does not exist", param="path") from error
    except ImportError as error:
        raise SourceFailed(f"{show(url, 200)} needs a package that is not installed: {error}", param="path") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull("no room left for the adapter's files") from error
        raise SourceFailed(f"{show(url, 200)} could not be read: {type(error).__name__}", param="path") from error
    except Exception as error:  # every store's client has errors of its own
        raise SourceFailed(f"{show(url, 200)} could not be read: {type(error).__name__}", param="path") from error


def _web_trouble(error: BaseException | None) -> str | None:
    """What a web client ran into, unless it is a 404; fsspec says of everything that there is no such file."""
    if error is None or not type(error).__module__.startswith("aiohttp"):
        return None
    status = getattr(error, "status", None)
    if status in (404, 410):
        return None
    return type(error).__name__ if status is None else f"status {status}"
