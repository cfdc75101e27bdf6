"""The process that opens a pickle for `loraserve adapters convert`: `python -m loraserve.lora.unpickle JOB`.

It limits itself before it looks at the file, checks the zip's own table of contents before torch sees it, and takes
nothing but a flat table of plain tensors. Its last line on stdout is the answer: `{"code": …, "message": …}`.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.container import MAX_TENSORS
from loraserve.lora.strict_json import show

if TYPE_CHECKING:
    from torch import Tensor

_MAX_TABLE = 16 << 20  # bytes of data.pkl, which describes the tensors
_ZIP_MAGIC = b"PK\x03\x04"


def main(job: dict[str, Any]) -> None:
    """Read the pickle at the open file `fd`, write `target`. Raises `AdapterRefused`."""
    limits, fd = job["limits"], int(job["fd"])
    _limit_cpu_and_output(float(limits["seconds"]), int(limits["output"]))
    try:
        _limit_memory(int(limits["memory"]), for_good=False)
        check_zip(fd)
        _lift_memory_limit()
        import torch  # without a limit: what torch itself maps is none of the adapter's business

        _limit_memory(int(limits["memory"]), for_good=True)
        save_tensors(torch, load_tensors(torch, fd), Path(job["target"]), os.fstat(fd).st_size)
    except MemoryError as error:
        raise AdapterRefused(
            AdapterFault.ADAPTER_TOO_LARGE, "the pickle needs more memory than its size warrants"
        ) from error


def _limit_cpu_and_output(seconds: float, output: int) -> None:
    import resource

    cpu = math.ceil(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output, output))


def _limit_memory(extra: int, *, for_good: bool) -> None:
    """Bound this process's address space: what it has now and `extra` bytes more."""
    import resource

    import psutil

    limit = psutil.Process().memory_info().vms + extra
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit if for_good else hard))
    except (OSError, ValueError) as error:
        refuse(AdapterFault.STAGING_FAILED, f"this system does not let a process limit its memory: {error}")


def _lift_memory_limit() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def check_zip(fd: int) -> None:
    """Refuse what torch.save does not write.

    It stores tensors uncompressed, each once: such a file cannot hold more than its own size. Raises `AdapterRefused`.
    """
    magic = os.pread(fd, len(_ZIP_MAGIC), 0)
    if magic != _ZIP_MAGIC:
        if magic[:1] == b"\x80":
            refuse(
                AdapterFault.UNSUPPORTED_FORMAT,
                "the file is in torch's old format, whose sizes cannot be checked before it is opened; save it anew "
                "with a torch of 1.6 or later where you trust it",
            )
        refuse(AdapterFault.CORRUPT_WEIGHTS, "the file is no zip as torch.save writes it")
    size = os.fstat(fd).st_size
    try:
        with os.fdopen(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError) as error:
        refuse(AdapterFault.CORRUPT_WEIGHTS, f"the zip's table of contents is broken: {error}")
    if len(members) > 2 * MAX_TENSORS:
        refuse(AdapterFault.CORRUPT_WEIGHTS, f"the zip has {len(members)} members")
    if len({member.header_offset for member in members}) != len(members):
        refuse(AdapterFault.CORRUPT_WEIGHTS, "members of the zip lie over each other")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            refuse(
                AdapterFault.CORRUPT_WEIGHTS,
                f"{show(member.filename)} is compressed in the zip ({member.file_size} bytes in "
                f"{member.compress_size}); torch.save stores tensors as they are",
            )
        if member.filename.endswith("/data.pkl") and member.file_size > _MAX_TABLE:
            refuse(
                AdapterFault.CORRUPT_WEIGHTS, f"data.pkl has {member.file_size} bytes, at most {_MAX_TABLE} are read"
            )
    if sum(member.file_size for member in members) > size:
        refuse(AdapterFault.CORRUPT_WEIGHTS, "the zip claims more bytes than the file has")


def load_tensors(torch: Any, fd: int) -> dict[str, Tensor]:
    """The table of tensors in the pickle. Raises `AdapterRefused`, `MemoryError`."""
    import pickle

    # A user's environment must not switch the protection off.
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    path = f"/proc/self/fd/{fd}" if os.path.isdir("/proc/self/fd") else f"/dev/fd/{fd}"
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's message advises to open the file without protection; only the name that it found is of use.
        asked = re.search(r"GLOBAL ([\w.]+)", str(error), re.ASCII)
        found = "" if asked is None else f": it asks for {show(asked[1].rstrip('.'))}"
        refuse(AdapterFault.UNSAFE_PICKLE, f"the pickle holds more than tensors{found}")
    except MemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OSError) as error:
        if "allocate" in str(error) or "Cannot allocate" in str(error):
            raise MemoryError from error
        refuse(AdapterFault.CORRUPT_WEIGHTS, f"torch cannot read the pickle: {show(str(error).partition(chr(10))[0])}")
    if not isinstance(loaded, dict):
        refuse(AdapterFault.UNSAFE_PICKLE, f"the pickle holds {_kind(loaded)}, not a table of tensors")
    for name, value in loaded.items():
        if not isinstance(name, str):
            refuse(AdapterFault.UNSAFE_PICKLE, f"the pickle's table has {_kind(name)} as a name")
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            refuse(AdapterFault.UNSAFE_PICKLE, f"the pickle holds {_kind(value)} under {show(name)}, not a tensor")
    if len(loaded) > MAX_TENSORS:
        refuse(AdapterFault.CORRUPT_WEIGHTS, f"the pickle has {len(loaded)} tensors, at most {MAX_TENSORS} are read")
    return dict(loaded)


def save_tensors(torch: Any, tensors: dict[str, Tensor], target: Path, size: int) -> None:
    """Write a safetensors file from a pickle of `size` bytes. Raises `AdapterRefused`, `MemoryError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    total = 0
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            refuse(AdapterFault.UNSUPPORTED_DTYPE, f"{show(name)} is not a dense tensor in memory")
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > tensor.untyped_storage().nbytes():
            refuse(AdapterFault.CORRUPT_WEIGHTS, f"{show(name)} claims {num_bytes} bytes, the file has fewer for it")
        total += num_bytes
    # Two names of one tensor, as of a tied head, are written twice.
    if total > 2 * size:
        refuse(AdapterFault.CORRUPT_WEIGHTS, f"the tensors claim {total} bytes, the file has {size}")
    try:
        save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, str(target))
    except (SafetensorError, OSError) as error:
        refuse(AdapterFault.STAGING_FAILED, f"the safetensors file cannot be written: {show(str(error))}")
    except (RuntimeError, ValueError, KeyError) as error:
        if "allocate" in str(error):
            raise MemoryError from error
        refuse(AdapterFault.UNSUPPORTED_DTYPE, f"the tensors do not fit a safetensors file: {show(str(error))}")


def _kind(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def refuse(fault: AdapterFault, message: str) -> NoReturn:
    """Raise the refusal."""
    raise AdapterRefused(fault, message)


def _answer(code: str | None, message: str) -> None:
    print(json.dumps({"code": code, "message": message}), flush=True)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except AdapterRefused as error:
        _answer(error.code, error.message)
    else:
        _answer(None, "")
