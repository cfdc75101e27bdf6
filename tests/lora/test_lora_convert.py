"""`convert_adapter`: a pickle becomes safetensors in a process of its own, or is refused; nothing in it ever runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_adapters import plain_config, write
from safetensors.torch import load_file

from loraserve.config import MIB
from loraserve.errors import AdapterRefused, ConfigError, StorageFailed
from loraserve.lora import unpickle
from loraserve.lora.convert import convert_adapter
from loraserve.lora.format import parse_adapter
from loraserve.lora.version import content_version

HIDDEN, LAYERS = 32, 3
WEIGHTS = "adapter_model.bin"


def tensors(**changes: Any) -> dict[str, Any]:
    """A and B of q_proj in every layer."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for layer in range(LAYERS):
        path = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        found[f"{path}.lora_A.weight"] = torch.randn(4, HIDDEN, generator=generator)
        found[f"{path}.lora_B.weight"] = torch.randn(HIDDEN, 4, generator=generator)
    return found | changes


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def adapter(folder: Path, data: bytes) -> Path:
    return write(folder, plain_config(), data, WEIGHTS)


def rewritten(data: bytes, change: Any) -> bytes:
    """The zip anew, each member given to `change(info, content)`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            change(new, info, old.read(info))
    return buffer.getvalue()


def deflated(data: bytes) -> bytes:
    return rewritten(data, lambda new, info, content: new.writestr(info.filename, content, zipfile.ZIP_DEFLATED))


class Bomb:
    """Leaves a mark at `path` if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, (str(self.path),))


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "in")


def test_the_refusal_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=re.escape("`loraserve adapters convert PATH OUT`")) as caught:
        parse_adapter(adapter(tmp_path / "in", saved(tensors())), None, 64)
    assert caught.value.code == "unsafe_pickle"


def test_tensors_come_out_bit_by_bit(tmp_path: Path) -> None:
    content = OrderedDict(tensors())
    first = next(iter(content))
    content[first] = content[first].T.contiguous().T  # not contiguous in the file
    content = OrderedDict({name: tensor.bfloat16() if "lora_B" in name else tensor for name, tensor in content.items()})
    folder = adapter(tmp_path / "in", saved(content))
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "optimizer.pt").write_bytes(b"not needed")
    done = convert_adapter(folder, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
    ]
    loaded = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert loaded.keys() == content.keys()
    for name, tensor in content.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    spec = parse_adapter(tmp_path / "out", None, 64)
    assert (done.num_tensors, done.num_bytes) == (2 * LAYERS, spec.num_bytes)
    assert done.version == content_version(spec, tmp_path / "out")
    assert left_behind(tmp_path) == ["out"]


def test_a_payload_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "ran"
    data = saved(tensors(bomb=Bomb(mark)))
    folder = adapter(tmp_path / "in", data)
    # The pickle is a live one: plain unpickling does run it, in a place of its own.
    pickle.loads(pickle.dumps(Bomb(tmp_path / "in" / "proof")))
    assert (tmp_path / "in" / "proof").is_dir()
    # Nor may files beside the adapter stand in for the modules that the reader imports.
    (folder / "torch.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(AdapterRefused) as caught:
        convert_adapter(Path(), tmp_path / "out")
    assert caught.value.code == "unsafe_pickle"
    assert "posix.mkdir" in caught.value.message
    assert left_behind(tmp_path) == []


HOSTILE: dict[str, tuple[str, Any]] = {
    "nested": ("unsafe_pickle", lambda: saved({"state_dict": tensors()})),
    "list": ("unsafe_pickle", lambda: saved(list(tensors().values()))),
    "number inside": ("unsafe_pickle", lambda: saved(tensors(step=3))),
    "name is no text": ("unsafe_pickle", lambda: saved({1: torch.zeros(2)})),
    "sparse": ("unsupported_dtype", lambda: saved(tensors(x=torch.eye(3).to_sparse()))),
    "ints": ("unsupported_dtype", lambda: saved({name: tensor.to(torch.int8) for name, tensor in tensors().items()})),
    "old format": ("unsupported_format", lambda: saved(tensors(), _use_new_zipfile_serialization=False)),
    "bare pickle": ("unsupported_format", lambda: pickle.dumps(3, protocol=4)),
    "html": ("corrupt_weights", lambda: b"<html>"),
    "empty": ("corrupt_weights", lambda: b""),
    "cut short": ("corrupt_weights", lambda: saved(tensors())[:-200]),
    "deflated bomb": ("corrupt_weights", lambda: deflated(saved(tensors(x=torch.zeros(8 * MIB))))),
    "repeated view": ("corrupt_weights", lambda: saved(tensors(x=torch.zeros(1).expand(2**40)))),
    "many views": (
        "corrupt_weights",
        lambda: saved({f"x{i}": shared for i, shared in enumerate([torch.zeros(MIB)] * 9)}),
    ),
    "no lora": ("no_lora_tensors", lambda: saved({"x": torch.zeros(2)})),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_table_of_tensors_is_refused(tmp_path: Path, case: str) -> None:
    # The reader's own steps, without the process around them: starting it takes seconds.
    code, make = HOSTILE[case]
    folder = adapter(tmp_path / "in", make())
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "adapter_model.safetensors"

    def read(fd: int) -> None:
        unpickle.check_zip(fd)
        unpickle.save_tensors(torch, unpickle.load_tensors(torch, fd), target, os.fstat(fd).st_size)
        (tmp_path / "out" / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
        parse_adapter(tmp_path / "out", None, 64)

    with (folder / WEIGHTS).open("rb") as file, pytest.raises(AdapterRefused) as caught:
        read(file.fileno())
    assert caught.value.code == code, caught.value.message


def test_a_refusal_leaves_nothing(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "in", deflated(saved(tensors())))
    with pytest.raises(AdapterRefused, match="is compressed"):
        convert_adapter(folder, tmp_path / "out")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("limit", "code"), [({"memory": 4 * MIB}, "adapter_too_large"), ({"output": MIB}, "staging_failed")]
)
def test_the_reader_keeps_its_limits(tmp_path: Path, limit: dict[str, int], code: str) -> None:
    data = saved(tensors(x=torch.zeros(8 * MIB)))
    limits = {"memory": 1024 * MIB, "output": 256 * MIB, "seconds": 100} | limit
    with (adapter(tmp_path / "in", data) / WEIGHTS).open("rb") as file:
        job = {"fd": file.fileno(), "target": str(tmp_path / "out.safetensors"), "limits": limits}
        command = [sys.executable, "-m", "loraserve.lora.unpickle", json.dumps(job)]
        done = subprocess.run(command, pass_fds=(file.fileno(),), capture_output=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["code"] == code


def test_limits(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "in", saved(tensors()))
    with pytest.raises(AdapterRefused) as caught:
        convert_adapter(folder, tmp_path / "out", max_bytes=100)
    assert caught.value.code == "adapter_too_large"
    with pytest.raises(AdapterRefused, match=r"within 0\.01 seconds"):
        convert_adapter(folder, tmp_path / "out", timeout_s=0.01)
    with pytest.raises(ConfigError):
        convert_adapter(folder, tmp_path / "out", timeout_s=0)
    assert left_behind(tmp_path) == []


def test_places(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "in", saved(tensors()))
    with pytest.raises(ConfigError, match="exists already"):
        convert_adapter(folder, tmp_path)
    with pytest.raises(StorageFailed):
        convert_adapter(folder, tmp_path / "no" / "out")
    good = write(tmp_path / "good")
    with pytest.raises(ConfigError, match="nothing to convert"):
        convert_adapter(good, tmp_path / "out")
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(AdapterRefused, match="FIFO"):
        convert_adapter(folder, tmp_path / "out")
