"""What several tests of adapters share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve
from huggingface_hub import constants
from raw_adapters import write

from loraserve.lora import hub_errors


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(hub_errors, "sleep", lambda seconds: None)
    folder = write(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    deep = {f"checkpoints/5/{name}": data for name, data in files.items()}
    waste = {"optimizer.pt": b"x", "training_args.bin": b"x", "README.md": b"x", "chat_template.jinja": b"{{ x }}"}
    with serve(FakeHub({"org/sql": files | deep | waste})) as running:
        yield running
