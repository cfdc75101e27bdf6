"""`adapters inspect PATH` and `adapters convert`: an adapter's files, without a server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model
from typer.testing import CliRunner

from loraserve.cli import make_app
from loraserve.cli.adapters_offline import is_path
from loraserve.cli.server_calls import ServerUnreachable
from loraserve.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("offline") / "base", seed=3, tie_word_embeddings=False)
    (folder / "model.safetensors").write_bytes(b"")  # only the config may be needed
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("offline-adapter")
    base = make_model(root / "base", seed=3, tie_word_embeddings=False)
    folder = make_adapter(
        base,
        root / "adapter",
        1,
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj", "lm_head"],
        rank_pattern={"down_proj": 9},
        use_rslora=True,
    )
    # PEFT saves the head's own matrix too; to compare that, the base's weights would be needed.
    weights = folder / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(weights).items() if "base_layer" not in name}, weights)
    return folder


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASERVE_SERVER", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(make_app(), ["adapters", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def changed(adapter: Path, folder: Path, weights: dict[str, Any] | None = None, **config: Any) -> Path:
    folder.mkdir()
    old = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(old | config))
    save_file(weights or load_file(adapter / "adapter_model.safetensors"), folder / "adapter_model.safetensors")
    return folder


def test_report_without_a_base(adapter: Path) -> None:
    code, out, err = run("inspect", str(adapter))
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert ["q", "3", "0-2", "4", "3"] in rows
    assert ["down", "3", "0-2", "9", "2"] in rows
    assert ["lm_head", "1", "4", "3"] in rows
    for part in ("float32", "rslora", "rank_pattern", "unknown without --model"):
        assert part in out


def test_report_against_a_base(adapter: Path, model: Path) -> None:
    code, out, err = run("inspect", str(adapter), "--model", str(model), "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["kinds"][0] == {
        "kind": "q",
        "num_modules": 3,
        "layers": "0-2",
        "ranks": [4],
        "scalings": [3.0],
    }
    # Pages of 8 rows: q takes one page on both sides, down (rank 9) two, in each layer; rows of lm_head's B lie alone.
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    least = 4 * (3 * 8 * (64 + 64) + 3 * 16 * (112 + 64) + 8 * 64 + 4 * vocab)
    assert least <= report["device"]["bytes"] <= 1.2 * least
    assert report["device"]["dtype"] == "float32"
    assert len(report["version"]) == 64
    assert report["files"] == ["adapter_model.safetensors"]
    assert any("'tiny'" in warning for warning in report["warnings"])
    _, out, _ = run("inspect", str(adapter), "--model", str(model))
    assert "KiB in float32 on base" in out


def test_refusals_are_one_line_and_code_2(adapter: Path, model: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = next(iter(tensors))
    broken = tensors | {first: tensors[first] * torch.nan}
    narrow = {name: tensor[:, :-1].contiguous() if "lora_A" in name else tensor for name, tensor in tensors.items()}
    huge = {name: tensor * 1e30 for name, tensor in tensors.items()}
    cases = [
        ((str(changed(adapter, tmp_path / "type", lora_alpha="x")),), "invalid_config"),
        ((str(changed(adapter, tmp_path / "nan", broken)),), "non_finite"),
        ((str(changed(adapter, tmp_path / "huge", huge, lora_alpha=1e20)),), "non_finite"),
        ((str(changed(adapter, tmp_path / "narrow", narrow)), "--model", str(model)), "shape_mismatch"),
        ((str(adapter), "--max-lora-rank", "8"), "rank_too_large"),
        ((str(tmp_path / "none" / "here"),), "not_an_adapter"),
        ((str(adapter), "--model", str(tmp_path)), "model_load_failed"),
    ]
    for arguments, code in cases:
        exit_code, out, err = run("inspect", *arguments)
        assert exit_code == 2, arguments
        assert out == ""
        assert err.startswith("error: ")
        assert err.endswith(f"({code})\n")
        assert err.count("\n") == 1


def test_a_name_is_for_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "org" / "there").mkdir(parents=True)
    assert [is_path(text) for text in ("here", "org/there", "./x", "../x", "~/x", "/x", "a/b/c")] == [True] * 7
    assert [is_path(text) for text in ("name", "org/name", "name@abcd", "..name")] == [False, False, False, False]
    with pytest.raises(ServerUnreachable):
        run("inspect", "org/name")
    with pytest.raises(ConfigError, match="--model is for a PATH"):
        run("inspect", "org/name", "--model", "x")


def test_convert(adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    torch.save(load_file(adapter / "adapter_model.safetensors"), folder / "adapter_model.bin")
    code, _, err = run("inspect", str(folder))
    assert code == 2
    assert "`loraserve adapters convert PATH OUT`" in err
    code, out, err = run("convert", str(folder), str(tmp_path / "out"))
    assert code == 0, err
    assert "14 tensors" in out
    assert (
        json.loads(run("inspect", str(tmp_path / "out"), "--json")[1])["version"]
        == (json.loads(run("inspect", str(adapter), "--json")[1])["version"])
    )
    code, _, err = run("convert", str(folder), str(tmp_path / "out"))
    assert (code, "exists already" in err) == (2, True)
    code, _, err = run("convert", str(folder), str(tmp_path / "other"), "--max-size", "1KiB")
    assert (code, err.endswith("(adapter_too_large)\n")) == (2, True)
    assert sorted(os.listdir(tmp_path)) == ["out", "pickled"]
