"""Local folders: inside the allow-list or refused, with nothing about the machine in the message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from raw_adapters import GEOMETRY, write

from loraserve.errors import AdapterRefused, SubfolderNotFound
from loraserve.lora.format import parse_adapter
from loraserve.lora.sources import resolve_local


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path / "allowed" / "sql")
    write(tmp_path / "allowed" / "runs" / "checkpoint-5")
    write(tmp_path / "other" / "secret")
    return tmp_path


def test_a_folder_inside(tree: Path) -> None:
    path = str(tree / "allowed" / "sql")
    found = resolve_local(path, (tree / "nowhere", tree / "allowed"))
    assert found.folder.path == (tree / "allowed" / "sql").resolve()
    assert (found.source.kind, found.source.path, found.source.subfolder) == ("local", path, None)
    assert parse_adapter(found.folder, GEOMETRY, 64).kinds == ("q",)


def test_the_allowed_folder_itself_and_a_subfolder(tree: Path) -> None:
    found = resolve_local(str(tree / "allowed"), (tree / "allowed",), "runs/checkpoint-5")
    assert parse_adapter(found.folder, GEOMETRY, 64).kinds == ("q",)
    assert found.source.subfolder == "runs/checkpoint-5"


def test_an_allowed_folder_that_is_a_link(tree: Path) -> None:
    (tree / "link").symlink_to("allowed")
    for path in ("link/sql", "allowed/sql"):
        assert resolve_local(str(tree / path), (tree / "link",)).folder.path.name == "sql"


@pytest.mark.parametrize(
    "path",
    ["other/secret", "allowed/../other/secret", "other/absent", "allowed-not", "", "allowed/escape", "/", "a\0b"],
)
def test_outside_is_forbidden(path: str, tree: Path) -> None:
    (tree / "allowed" / "escape").symlink_to("../other/secret")
    sent = str(tree / path) if path not in ("", "/") else path
    with pytest.raises(AdapterRefused) as caught:
        resolve_local(sent, (tree / "allowed",))
    assert (caught.value.code, caught.value.http_status) == ("path_escape", 403)


def test_nothing_is_allowed_without_an_allow_list(tree: Path) -> None:
    with pytest.raises(AdapterRefused) as caught:
        resolve_local(str(tree / "allowed" / "sql"), ())
    assert caught.value.code == "path_escape"


@pytest.mark.parametrize("subfolder", ["..", "../sql", "runs/../../other", "/etc", "runs\\x", "a\0b"])
def test_a_subfolder_may_not_climb(subfolder: str, tree: Path) -> None:
    with pytest.raises(AdapterRefused) as caught:
        resolve_local(str(tree / "allowed"), (tree / "allowed",), subfolder)
    assert caught.value.code == "path_escape"


def test_a_subfolder_that_is_a_link_out(tree: Path) -> None:
    (tree / "allowed" / "sql" / "out").symlink_to(tree / "other")
    with pytest.raises(AdapterRefused) as caught:
        resolve_local(str(tree / "allowed" / "sql"), (tree / "allowed",), "out/secret")
    assert caught.value.code == "path_escape"


def test_absent_folders(tree: Path) -> None:
    for path in ("allowed/absent", "allowed/sql/adapter_config.json"):
        with pytest.raises(AdapterRefused) as caught:
            resolve_local(str(tree / path), (tree / "allowed",))
        assert caught.value.code == "not_an_adapter"
    with pytest.raises(SubfolderNotFound) as missing:
        resolve_local(str(tree / "allowed"), (tree / "allowed",), "absent")
    assert missing.value.http_status == 404


def test_a_file_that_is_a_link_out(tree: Path) -> None:
    folder = tree / "allowed" / "sql"
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to(tree / "other" / "secret" / "adapter_config.json")
    found = resolve_local(str(folder), (tree / "allowed",))
    with pytest.raises(AdapterRefused) as caught:
        parse_adapter(found.folder, GEOMETRY, 64)
    assert (caught.value.code, caught.value.http_status) == ("path_escape", 403)
    assert "secret" not in caught.value.message


def test_a_file_that_is_a_link_within_the_allowed_folder(tree: Path) -> None:
    folder = tree / "allowed" / "linked"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).symlink_to(f"../sql/{name}")
    found = resolve_local(str(folder), (tree / "allowed",))
    assert parse_adapter(found.folder, GEOMETRY, 64).kinds == ("q",)


def test_a_folder_swapped_for_a_link_after_it_was_resolved(tree: Path) -> None:
    found = resolve_local(str(tree / "allowed" / "sql"), (tree / "allowed",))
    os.rename(tree / "allowed" / "sql", tree / "allowed" / "was-sql")
    (tree / "allowed" / "sql").symlink_to(tree / "other" / "secret")
    with pytest.raises(AdapterRefused) as caught:
        parse_adapter(found.folder, GEOMETRY, 64)
    assert caught.value.code == "path_escape"
