"""The library over the real store: sources, the allow-list, content versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loraserve.errors import AdapterFault, AdapterRefused, EngineNotReady
from loraserve.lora.spec import BaseGeometry, TargetGeometry
from loraserve.lora.store import AdapterStore
from loraserve.server.library import StoreLibrary
from loraserve.server.ports import AdapterPlace

GEOMETRY = BaseGeometry(targets=(TargetGeometry("q", 16, 16, 2),))


def make_adapter(folder: Path, seed: int = 0, rank: int = 4) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    tensors = {}
    for layer in range(2):
        path = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{path}.lora_A.weight"] = rng.standard_normal((rank, 16)).astype(np.float32)
        tensors[f"{path}.lora_B.weight"] = rng.standard_normal((16, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": 8, "target_modules": ["q_proj"]}}'
    (folder / "adapter_config.json").write_text(config)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    with AdapterStore(tmp_path / "data") as store:
        yield store


@pytest.fixture
def library(store: AdapterStore, tmp_path: Path) -> StoreLibrary:
    return StoreLibrary(store, lambda: GEOMETRY, 64, (tmp_path / "allowed",))


def ignore(done: int, total: int) -> None:
    pass


def test_add_copies_into_the_store(library: StoreLibrary, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "allowed" / "a")
    seen: list[tuple[int, int]] = []
    stored = library.add(AdapterPlace(path=str(folder)), lambda done, total: seen.append((done, total)))
    assert stored.folder != folder
    assert (stored.report.rank, stored.report.targets) == (4, ("q",))
    assert (stored.source.kind, stored.source.path) == ("local", str(folder))
    assert seen[-1][0] == seen[-1][1] > 0
    for file in folder.iterdir():
        file.unlink()
    assert (stored.folder / "adapter_model.safetensors").is_file()


def test_same_content_has_one_version(library: StoreLibrary, tmp_path: Path) -> None:
    first = library.add(AdapterPlace(path=str(make_adapter(tmp_path / "allowed" / "a"))), ignore)
    second = library.add(AdapterPlace(path=str(make_adapter(tmp_path / "allowed" / "b"))), ignore)
    other = library.add(AdapterPlace(path=str(make_adapter(tmp_path / "allowed" / "c", seed=1))), ignore)
    assert first.version == second.version != other.version


def test_paths_outside_the_allow_list(library: StoreLibrary, tmp_path: Path) -> None:
    outside = make_adapter(tmp_path / "outside" / "a")
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(outside)
    for path in (outside, tmp_path / "allowed" / "link", tmp_path / "allowed" / ".." / "outside" / "a", "/etc", "~"):
        with pytest.raises(AdapterRefused) as caught:
            library.add(AdapterPlace(path=str(path)), ignore)
        assert caught.value.fault == AdapterFault.PATH_ESCAPE
        assert caught.value.http_status == 403
    assert library.add(AdapterPlace(path=str(outside), trusted=True), ignore).report.rank == 4


def test_subfolder(library: StoreLibrary, tmp_path: Path) -> None:
    make_adapter(tmp_path / "allowed" / "run" / "checkpoint-1")
    place = AdapterPlace(path=str(tmp_path / "allowed" / "run"), subfolder="checkpoint-1")
    assert library.add(place, ignore).source.subfolder == "checkpoint-1"


def test_the_engine_must_be_up(store: AdapterStore, tmp_path: Path) -> None:
    def starting() -> BaseGeometry:
        raise EngineNotReady("the engine is still starting")

    library = StoreLibrary(store, starting, 64, ())
    with pytest.raises(EngineNotReady):
        library.add(AdapterPlace(path="x"), ignore)
