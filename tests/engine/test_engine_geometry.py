"""What the LoRA side, and so its messages to clients, may know of the base model."""

from __future__ import annotations

from pathlib import Path

from tiny_models import make_model

from loraserve.engine.build import geometry_of
from loraserve.models.loading import load_shape


def test_names_do_not_tell_of_the_host(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "secret" / "tiny")
    names = (str(folder), "org/name", "./here/base", "C:\\models\\other", "served")
    assert geometry_of(load_shape(folder), folder, names).names == ("tiny", "org/name", "base", "other", "served")
