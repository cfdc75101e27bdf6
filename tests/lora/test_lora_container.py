"""The container reader against safetensors itself, and what it does when files change under it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from raw_adapters import Tensor, container, raw_container
from safetensors.torch import save_file

from loraserve.errors import AdapterRefused
from loraserve.lora.container import MAX_HEADER, MAX_TENSORS, TensorReader, read_header
from loraserve.lora.files import AdapterFolder
from loraserve.lora.spec import TensorRef


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_reads_what_safetensors_wrote(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5).to(dtype), "a": torch.randn(7).to(dtype), "c": torch.zeros(0, 4, dtype=dtype)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    refs = {ref.name: ref for ref in read_header(AdapterFolder.at(tmp_path), "x.safetensors")}
    assert refs.keys() == tensors.keys()
    with TensorReader(tmp_path) as reader:
        for name, ref in refs.items():
            array = reader.read(ref)
            assert array.flags.writeable
            values = torch.from_numpy(array)
            assert torch.equal(values.view(dtype) if dtype == torch.bfloat16 else values, tensors[name])
            assert b"".join(reader.chunks(ref)) == array.tobytes()


@pytest.mark.parametrize("padding", range(0, 2000, 61))
def test_header_sizes_that_look_like_a_pickle(padding: int, tmp_path: Path) -> None:
    file = container({"a": Tensor((4,))}, {"note": "x" * padding})
    (tmp_path / "x").write_bytes(file)
    assert len(read_header(AdapterFolder.at(tmp_path), "x")) == 1


def test_header_size_0x280_is_no_pickle(tmp_path: Path) -> None:
    plain = raw_container({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    header = plain[8:].ljust(0x280)
    (tmp_path / "x").write_bytes(struct.pack("<Q", 0x280) + header + bytes(4))
    assert (tmp_path / "x").read_bytes().startswith(b"\x80\x02")
    assert read_header(AdapterFolder.at(tmp_path), "x")[0].shape == (1,)


def test_a_header_above_the_limit_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 1) + b"{")
        file.truncate(MAX_HEADER * 2)  # sparse
    with pytest.raises(AdapterRefused, match="at most") as caught:
        read_header(AdapterFolder.at(tmp_path), "x")
    assert caught.value.code == "corrupt_weights"


def test_too_many_tensors(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    (tmp_path / "x").write_bytes(raw_container({str(number): entry for number in range(MAX_TENSORS + 1)}))
    with pytest.raises(AdapterRefused, match="at most") as caught:
        read_header(AdapterFolder.at(tmp_path), "x")
    assert caught.value.code == "corrupt_weights"


def test_a_transposed_ref_gives_the_logical_orientation(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(container({"a": Tensor((2, 6), seed=3)}))
    (ref,) = read_header(AdapterFolder.at(tmp_path), "x")
    turned = TensorRef(ref.file, ref.name, ref.dtype, (6, 2), ref.begin, ref.end, transposed=True)
    with TensorReader(tmp_path) as reader:
        assert np.array_equal(reader.read(turned), reader.read(ref).T)


def test_pieces_are_the_tensor(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(container({"a": Tensor((5, 7), "F16"), "b": Tensor((3,), "F16")}))
    with TensorReader(tmp_path) as reader:
        for ref in read_header(AdapterFolder.at(tmp_path), "x"):
            pieces = list(reader.pieces(ref, 4))
            assert max(map(len, pieces)) <= 4
            assert np.array_equal(np.concatenate(pieces), reader.read(ref).ravel())


def test_two_tensors_may_be_read_in_turns(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(container({"a": Tensor((600_000,), seed=1), "b": Tensor((600_000,), seed=2)}))
    a, b = read_header(AdapterFolder.at(tmp_path), "x")
    with TensorReader(tmp_path) as reader:
        pairs = list(zip(reader.chunks(a), reader.chunks(b), strict=True))
        assert len(pairs) > 1
        assert b"".join(first for first, _ in pairs) == reader.read(a).tobytes()
        assert b"".join(second for _, second in pairs) == reader.read(b).tobytes()


def test_a_file_cut_after_its_header_was_read(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(container({"a": Tensor((100,))}))
    (ref,) = read_header(AdapterFolder.at(tmp_path), "x")
    file.write_bytes(file.read_bytes()[:-10])
    with TensorReader(tmp_path) as reader, pytest.raises(AdapterRefused) as caught:
        reader.read(ref)
    assert caught.value.code == "corrupt_weights"


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(container({"a": Tensor((4,))}))
    (ref,) = read_header(AdapterFolder.at(tmp_path), "x")
    (tmp_path / "x").unlink()
    with TensorReader(tmp_path) as reader, pytest.raises(AdapterRefused) as caught:
        reader.read(ref)
    assert caught.value.code == "missing_weights"


class TestAdapterFolder:
    def test_links_inside_the_roots_are_followed(self, tmp_path: Path) -> None:
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / "1").write_bytes(b"data")
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        (snapshot / "file").symlink_to("../blobs/1")
        from loraserve.errors import AdapterFault

        missing, large = AdapterFault.MISSING_CONFIG, AdapterFault.CONFIG_TOO_LARGE
        wide = AdapterFolder.at(snapshot, roots=(tmp_path,))
        assert wide.read("file", 10, missing=missing, too_large=large) == b"data"
        with pytest.raises(AdapterRefused) as caught:
            wide.read("file", 3, missing=missing, too_large=large)
        assert caught.value.code == "config_too_large"
        with pytest.raises(AdapterRefused) as caught:
            AdapterFolder.at(snapshot).read("file", 10, missing=missing, too_large=large)
        assert caught.value.code == "path_escape"

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b"])
    def test_only_plain_names(self, name: str, tmp_path: Path) -> None:
        from loraserve.errors import AdapterFault

        with pytest.raises(AdapterRefused) as caught:
            AdapterFolder.at(tmp_path).open(name, AdapterFault.MISSING_WEIGHTS)
        assert caught.value.code == "path_escape"
