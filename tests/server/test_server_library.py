"""The library over the real store: sources, the allow-list, content versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loraserve.errors import AdapterFault, AdapterRefused, EngineNotReady, NameTaken, StorageFailed
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


def test_a_chat_template_is_kept_for_its_name_beside_a_version_that_is_shared(
    library: StoreLibrary, store: AdapterStore, tmp_path: Path
) -> None:
    folders = [make_adapter(tmp_path / "allowed" / name) for name in "abc"]
    for folder, template in zip(folders, ("one", "two"), strict=False):
        (folder / "chat_template.jinja").write_text(template)
    stored = [library.add(AdapterPlace(path=str(folder)), ignore) for folder in folders]
    assert len({each.version for each in stored}) == 1
    digests = [each.source.chat_template for each in stored]
    assert store.version(stored[0].version).source == stored[0].source
    assert digests[2] is None
    assert [library.chat_template(digest) for digest in digests if digest is not None] == ["one", "two"]
    for name, each in zip("abc", stored, strict=True):
        store.set_alias(name, each.version, source=each.source)
    assert [alias.source.chat_template for alias in store.aliases()] == digests
    # Another template under a name is another thing than was there.
    with pytest.raises(NameTaken):
        store.set_alias("a", stored[1].version, source=stored[1].source)
    store.set_alias("a", stored[1].version, source=stored[1].source, replace=True)
    assert store.alias("a").source.chat_template == digests[1]
    assert [use.source.chat_template for use in store.versions_of("a")] == [digests[1], digests[0]]
    (kept,) = (file for file in (tmp_path / "data" / "templates").iterdir() if file.stem == digests[0])
    kept.write_text("changed")
    with pytest.raises(StorageFailed):
        library.chat_template(str(digests[0]))


def test_templates_are_not_looked_at_if_they_are_to_be_ignored(store: AdapterStore, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "allowed" / "a")
    (folder / "chat_template.jinja").write_text("x" * 2**20)
    library = StoreLibrary(store, lambda: GEOMETRY, 64, (tmp_path / "allowed",))
    with pytest.raises(AdapterRefused) as refused:
        library.add(AdapterPlace(path=str(folder)), ignore)
    assert refused.value.code == "config_too_large"
    assert store.versions() == []
    library = StoreLibrary(store, lambda: GEOMETRY, 64, (tmp_path / "allowed",), chat_templates=False)
    assert library.add(AdapterPlace(path=str(folder)), ignore).source.chat_template is None
