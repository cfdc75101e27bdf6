"""An adapter saved as a pickle → safetensors, without ever unpickling in this process.

The pickle is opened by `loraserve.lora.unpickle` in a process of its own, which has limits on memory, time and output,
and takes nothing but tensors. Here only its answer and the file that it wrote are looked at.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loraserve.config import GIB, MIB, format_bytes
from loraserve.errors import AdapterFault, AdapterRefused, ConfigError, DiskFull, StorageFailed
from loraserve.lora.adapter_files import CONFIG_NAME, MAX_CONFIG, PICKLE_NAME, SIDE_FILES, WEIGHTS_NAME
from loraserve.lora.files import AdapterFolder
from loraserve.lora.format import parse_adapter
from loraserve.lora.version import content_version

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 4 * GIB
DEFAULT_TIMEOUT_S = 300.0
# What opening takes beyond the tensors: the reader's own work, and the file's pages that are mapped.
_EXTRA_MEMORY = 512 * MIB
_MAX_SIDE_FILE = 64 * MIB
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_ANY_RANK = 2**31 - 1
_ZIP_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written."""

    num_tensors: int
    num_bytes: int
    version: str
    warnings: tuple[str, ...]


def convert_adapter(
    folder: Path, out: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Converted:
    """Write the adapter in `folder`, whose weights are a pickle, to the new folder `out` as safetensors.

    `out` appears whole and checked, or not at all. Raises `ConfigError` if there is nothing to convert or `out` is
    taken; `AdapterRefused`: `unsafe_pickle` for a pickle of anything but tensors, `adapter_too_large` beyond
    `max_bytes` or the memory that they allow, `unsupported_format` for torch's old format, `corrupt_weights`, and all
    that `parse_adapter` refuses; `StorageFailed`, `DiskFull` if `out` cannot be written.
    """
    if max_bytes < 1 or timeout_s <= 0:
        raise ConfigError("the limits on size and time must be above zero")
    source = AdapterFolder.at(folder)
    names = source.names()
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists already; name a folder that does not")
    with _open_pickle(source, names) as pickle:
        size = os.fstat(pickle.fileno()).st_size
        if size > max_bytes:
            raise AdapterRefused(
                AdapterFault.ADAPTER_TOO_LARGE,
                f"the pickle has {format_bytes(size)}, at most {format_bytes(max_bytes)} are opened",
            )
        try:
            work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        except OSError as error:
            raise StorageFailed(f"{out} cannot be made: {error.strerror}") from error
        try:
            return _convert_in(work, out, source, names, pickle, size, timeout_s)
        except OSError as error:
            kind = DiskFull if error.errno == 28 else StorageFailed
            raise kind(f"{out} cannot be written: {error.strerror}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _open_pickle(source: AdapterFolder, names: frozenset[str]) -> BinaryIO:
    if WEIGHTS_NAME in names:
        handle = source.open(WEIGHTS_NAME, AdapterFault.MISSING_WEIGHTS)
        if os.pread(handle.fileno(), len(_ZIP_MAGIC), 0) == _ZIP_MAGIC:  # a pickle under the wrong name
            return handle
        handle.close()
        raise ConfigError(f"the folder has {WEIGHTS_NAME} already; there is nothing to convert")
    return source.open(PICKLE_NAME, AdapterFault.MISSING_WEIGHTS)


def _convert_in(
    work: Path,
    out: Path,
    source: AdapterFolder,
    names: frozenset[str],
    pickle: BinaryIO,
    size: int,
    timeout_s: float,
) -> Converted:
    made = work / "adapter"
    made.mkdir()
    for name in (CONFIG_NAME, *(name for name in SIDE_FILES if name in names)):
        limit = MAX_CONFIG if name == CONFIG_NAME else _MAX_SIDE_FILE
        data = source.read(name, limit, missing=AdapterFault.MISSING_CONFIG, too_large=AdapterFault.CONFIG_TOO_LARGE)
        (made / name).write_bytes(data)
    _run_reader(work, made / WEIGHTS_NAME, pickle, size, timeout_s)
    spec = parse_adapter(made, None, _ANY_RANK)
    version = content_version(spec, made)
    for path in made.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    # Fails if `out` has come into being meanwhile, unless as an empty folder.
    os.rename(made, out)
    return Converted(2 * len(spec.targets), spec.num_bytes, version, spec.warnings)


def _run_reader(work: Path, target: Path, pickle: BinaryIO, size: int, timeout_s: float) -> None:
    """Let the other process write `target`. Raises `AdapterRefused` with its reason."""
    # The file is mapped, its tensors are copied, and a tied pair may be written twice.
    limits = {"memory": 5 * size + _EXTRA_MEMORY, "output": 2 * size + MIB, "seconds": timeout_s}
    job = {"fd": pickle.fileno(), "target": str(target), "limits": limits}
    # Python puts the working folder first on its path with -m: it must be one that holds nothing of the adapter's.
    private = work / "empty"
    private.mkdir()
    roots = [str(_PACKAGE_ROOT), *filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "loraserve.lora.unpickle", json.dumps(job)],
            cwd=private,
            env=environment,
            pass_fds=(pickle.fileno(),),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AdapterRefused(
            AdapterFault.CORRUPT_WEIGHTS, f"the pickle was not read within {timeout_s:g} seconds"
        ) from error
    _raise_answer(done)


def _raise_answer(done: subprocess.CompletedProcess[bytes]) -> None:
    lines = done.stdout.decode(errors="replace").splitlines()
    try:
        answer = json.loads(lines[-1])
        code, message = answer["code"], answer["message"]
    except (IndexError, ValueError, KeyError, TypeError):
        logger.debug("the reader said: %s", done.stderr[-2000:].decode(errors="replace"))
        reason = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise AdapterRefused(
            AdapterFault.CORRUPT_WEIGHTS, f"the process that reads the pickle ended early ({reason})"
        ) from None
    if code is not None:
        raise AdapterRefused(AdapterFault(code), str(message) if str(message).isprintable() else ascii(message))
