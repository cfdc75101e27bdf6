"""The safetensors container, read without trust: the header first, tensor bytes only when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

import numpy as np

from loraserve.errors import AdapterFault, AdapterRefused
from loraserve.lora.files import CHUNK, AdapterFolder
from loraserve.lora.spec import DTYPE_BYTES, TensorRef
from loraserve.lora.strict_json import Json, parse_json, show

MAX_HEADER = 16 << 20
MAX_TENSORS = 1 << 16  # 128 experts in 48 layers are 37,000; checking this many takes two seconds
MAX_DIMENSIONS = 8

_ELEMENT_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_NUMPY_DTYPES: dict[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

_SIGNATURES: tuple[tuple[bytes, AdapterFault, str], ...] = (
    (
        b"version https://git-lfs",
        AdapterFault.CORRUPT_WEIGHTS,
        "is a git-lfs pointer, not the weights; run `git lfs pull` in the clone",
    ),
    (b"<!doctype", AdapterFault.CORRUPT_WEIGHTS, "is an HTML page; the download did not fetch the file itself"),
    (b"<html", AdapterFault.CORRUPT_WEIGHTS, "is an HTML page; the download did not fetch the file itself"),
    (b"<?xml", AdapterFault.CORRUPT_WEIGHTS, "is an XML answer; the download did not fetch the file itself"),
    (b"pk\x03\x04", AdapterFault.UNSAFE_PICKLE, "is a zip as torch.save writes it; save it as safetensors"),
    (b"\x80\x02", AdapterFault.UNSAFE_PICKLE, "is a pickle; save it as safetensors"),
    (b"\x80\x03", AdapterFault.UNSAFE_PICKLE, "is a pickle; save it as safetensors"),
    (b"\x80\x04", AdapterFault.UNSAFE_PICKLE, "is a pickle; save it as safetensors"),
    (b"\x80\x05", AdapterFault.UNSAFE_PICKLE, "is a pickle; save it as safetensors"),
    (b"gguf", AdapterFault.UNSUPPORTED_FORMAT, "is a GGUF file; save the adapter with PEFT"),
)


def read_header(folder: AdapterFolder, file: str) -> tuple[TensorRef, ...]:
    """Every tensor that a safetensors file holds, in file order, checked against the file's own size.

    Shapes and dtypes are the file's. Raises `AdapterRefused`: `corrupt_weights` for anything that is not a complete,
    gapless container, `unsupported_dtype` for an element type of unknown size, `unsafe_pickle` for a pickle.
    """
    with folder.open(file, AdapterFault.MISSING_WEIGHTS) as handle:
        size = os.fstat(handle.fileno()).st_size
        header_size, header = _read_header_bytes(handle, file, size)
    parsed = parse_json(header, what=f"the header of {show(file)}", fault=AdapterFault.CORRUPT_WEIGHTS, max_depth=8)
    if not isinstance(parsed, dict):
        _corrupt(file, "its header is not an object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _corrupt(file, "__metadata__ is not an object of strings")
    if len(parsed) > MAX_TENSORS:
        _corrupt(file, f"it has {len(parsed)} tensors, at most {MAX_TENSORS} are read")
    start = 8 + header_size
    refs = sorted((_tensor(file, name, entry, start) for name, entry in parsed.items()), key=lambda ref: ref.begin)
    _require_full_cover(file, refs, start, size)
    return tuple(refs)


def _read_header_bytes(handle: BinaryIO, file: str, size: int) -> tuple[int, bytes]:
    head = handle.read(64)
    if head[8:9] != b"{":  # some header sizes are themselves the first bytes of a pickle
        _refuse_other_formats(head, file)
    if len(head) < 8:
        _corrupt(file, f"it has {size} bytes, too few for a header")
    header_size = int.from_bytes(head[:8], "little")
    if header_size > size - 8:
        _corrupt(file, f"its header claims {header_size} bytes, the file has {size}; is it cut short?")
    if header_size > MAX_HEADER:
        _corrupt(file, f"its header has {header_size} bytes, at most {MAX_HEADER} are read")
    header = b"".join(_read_exactly(handle, 8, header_size, file))
    if not header.startswith(b"{"):
        _corrupt(file, "its header does not begin with an object")
    return header_size, header


def _refuse_other_formats(head: bytes, file: str) -> None:
    text = head.lstrip().lower()
    for signature, fault, problem in _SIGNATURES:
        if text.startswith(signature):
            raise AdapterRefused(fault, f"{show(file)} {problem}")


def _tensor(file: str, name: str, entry: Json, start: int) -> TensorRef:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _corrupt(file, f"the entry of {show(name)} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        _corrupt(file, f"the dtype of {show(name)} is not a string")
    dims = _naturals(shape)
    if dims is None or len(dims) > MAX_DIMENSIONS:
        _corrupt(file, f"the shape of {show(name)} is not a list of up to {MAX_DIMENSIONS} sizes")
    bounds = _naturals(offsets)
    if bounds is None or len(bounds) != 2 or bounds[0] > bounds[1]:
        _corrupt(file, f"the data_offsets of {show(name)} are not two rising offsets")
    ref = TensorRef(file, name, dtype, dims, start + bounds[0], start + bounds[1])
    bits = _ELEMENT_BITS.get(dtype)
    if bits is None:
        raise AdapterRefused(AdapterFault.UNSUPPORTED_DTYPE, f"tensor {show(name)} has the unknown dtype {show(dtype)}")
    if ref.num_elements * bits != ref.num_bytes * 8:
        _corrupt(
            file,
            f"tensor {show(name)} of shape {list(dims)} and dtype {dtype} needs {ref.num_elements * bits / 8:g} bytes, "
            f"its offsets span {ref.num_bytes}",
        )
    return ref


def _naturals(value: Json) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    numbers = [number for number in value if type(number) is int and 0 <= number < 2**63]
    return tuple(numbers) if len(numbers) == len(value) else None


def _require_full_cover(file: str, refs: list[TensorRef], start: int, size: int) -> None:
    position = start
    for ref in sorted(refs, key=lambda ref: (ref.begin, ref.end)):
        if ref.begin < position:
            _corrupt(file, f"tensor {show(ref.name)} overlaps another")
        if ref.begin > position:
            _corrupt(file, f"there is a gap before tensor {show(ref.name)}")
        position = ref.end
    if position != size:
        kind = "is cut short" if size < position else "has bytes after its last tensor"
        _corrupt(file, f"it {kind}: tensors end at byte {position}, the file at {size}")


def _corrupt(file: str, problem: str) -> NoReturn:
    raise AdapterRefused(AdapterFault.CORRUPT_WEIGHTS, f"{show(file)} is not a valid safetensors file: {problem}")


def _read_exactly(handle: BinaryIO, begin: int, count: int, file: str) -> Iterator[bytes]:
    while count > 0:
        piece = os.pread(handle.fileno(), min(CHUNK, count), begin)
        if not piece:
            _corrupt(file, "it became shorter while it was read")
        begin += len(piece)
        count -= len(piece)
        yield piece


class TensorReader:
    """Reads the tensors of one adapter's folder; a context manager that keeps its files open.

    Not thread-safe: one reader per thread.
    """

    def __init__(self, folder: Path | AdapterFolder) -> None:
        self._folder = folder if isinstance(folder, AdapterFolder) else AdapterFolder.at(folder)
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        while self._files:
            self._files.popitem()[1].close()

    def read(self, ref: TensorRef) -> np.ndarray[Any, Any]:
        """The tensor in PEFT's orientation, a fresh writable array; BF16 comes as uint16 bit patterns.

        A transposed ref gives a non-contiguous view. Raises `AdapterRefused(corrupt_weights)` if the file is shorter
        than its header said.
        """
        parts = [self._range(ref, begin, size) for begin, size in ref.spans]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return values.reshape(ref.shape[::-1]).T if ref.transposed else values.reshape(ref.shape)

    def pieces(self, ref: TensorRef, count: int) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor's elements in file order, `count` at a time."""
        step = count * DTYPE_BYTES[ref.dtype]
        for first, size in ref.spans:
            for begin in range(first, first + size, step):
                yield self._range(ref, begin, min(step, first + size - begin))

    def chunks(self, ref: TensorRef) -> Iterator[bytes]:
        """The tensor's bytes as they lie in the file, in pieces of at most 1 MiB."""
        for begin, size in ref.spans:
            yield from _read_exactly(self._open(ref.file), begin, size, ref.file)

    def _range(self, ref: TensorRef, begin: int, size: int) -> np.ndarray[Any, Any]:
        buffer = np.empty(size, dtype=np.uint8)
        position = 0
        for piece in _read_exactly(self._open(ref.file), begin, size, ref.file):
            buffer[position : position + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            position += len(piece)
        return buffer.view(_NUMPY_DTYPES[ref.dtype])

    def _open(self, file: str) -> BinaryIO:
        if file not in self._files:
            self._files[file] = self._folder.open(file, AdapterFault.MISSING_WEIGHTS)
        return self._files[file]
