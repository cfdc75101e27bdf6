"""The command line: flags are the config's fields, errors are one line, `adapters` talks to a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import loraserve.cli
from loraserve import __version__
from loraserve.cli import main, make_app
from loraserve.cli.serve import PANELS, add_serve, flag_of
from loraserve.config import MIB, ServeConfig


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORASERVE_SERVER", "LORASERVE_ADMIN_KEY", "LORASERVE_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def serve(*arguments: str) -> tuple[int, ServeConfig | None, str]:
    """Run `loraserve serve` with a server that only remembers its config."""
    seen: list[ServeConfig] = []

    def remember(config: ServeConfig) -> int:
        seen.append(config)
        return 0

    app = typer.Typer()
    app.callback()(lambda: None)
    add_serve(app, remember)
    result = CliRunner().invoke(app, ["serve", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, seen[0] if seen else None, result.output


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["loraserve", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


# -- serve ------------------------------------------------------------------------------------------------------------


def test_no_flag_is_every_default() -> None:
    code, config, _ = serve()
    assert code == 0
    assert config == ServeConfig()


@pytest.mark.parametrize("cls", PANELS, ids=lambda cls: cls.__name__)
def test_every_field_has_a_flag_with_its_help(cls: type[Any]) -> None:
    code, _, output = serve("--help")
    assert code == 0
    assert PANELS[cls] in output
    shown = " ".join(output.replace("│", " ").split())
    for field in fields(cls):
        assert flag_of(field.name) in shown
        assert " ".join(field.metadata["help"].split()[:3]) in shown


def test_every_config_class_has_a_panel() -> None:
    engine = {field.name for field in fields(ServeConfig().engine)}
    assert len(PANELS) == len(engine) + 1
    assert type(ServeConfig().server) in PANELS


@pytest.mark.parametrize("cls", PANELS, ids=lambda cls: cls.__name__)
def test_every_flag_reaches_its_field(cls: type[Any]) -> None:
    values: dict[str, tuple[list[str], Any]] = {
        "adapter_dir": (["/x", "/y"], (Path("/x"), Path("/y"))),
        "adapter": (["a=/x", "b=/y"], ("a=/x", "b=/y")),
        "adapter_source": (["hub:a/*", "dir:/x"], ("hub:a/*", "dir:/x")),
        "adapter_url": (["s3://a/", "gs://b/"], ("s3://a/", "gs://b/")),
        "api_key": (["k1", "k2"], ("k1", "k2")),
        "data_dir": (["/data"], Path("/data")),
        "device": (["cpu"], "cpu"),
        "dtype": (["float16"], "float16"),
        "kernels": (["reference"], "reference"),
        "eviction": (["lfu"], "lfu"),
        "policy": (["fair-share"], "fair-share"),
        "log_level": (["debug"], "debug"),
    }
    for field in fields(cls):
        name = field.name
        if field.metadata["size"]:
            given: list[str] = ["3MiB"]
            expected: Any = 3 * MIB
        elif name in values:
            given, expected = values[name]
        elif "bool" in str(field.type):
            for prefix, wanted in (("--no-", False), ("--", True)):
                code, config, _ = serve(prefix + name.replace("_", "-"))
                assert config is not None
                assert getattr(_section(config, cls), name) is wanted
            continue
        elif "int" in str(field.type):
            given, expected = ["7"], 7
        elif "float" in str(field.type):
            given, expected = ["1.5"], 1.5
        else:
            given, expected = ["text"], "text"
        code, config, output = serve(*[part for value in given for part in (flag_of(name), value)])
        assert code == 0, output
        assert config is not None
        assert getattr(_section(config, cls), name) == expected


def _section(config: ServeConfig, cls: type[Any]) -> Any:
    parts = [config.server, config.engine.model, config.engine.cache, config.engine.lora, config.engine.scheduler]
    return next(part for part in parts if type(part) is cls)


def test_flags_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASERVE_PAGE_SIZE", "4")
    monkeypatch.setenv("LORASERVE_KV_MEMORY", "1GiB")
    _, config, _ = serve()
    assert config is not None
    assert config.engine.cache.page_size == 4
    assert config.engine.cache.kv_memory == 1024 * MIB
    _, config, _ = serve("--page-size", "8")
    assert config is not None
    assert config.engine.cache.page_size == 8


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--kv-memory", "lots"], "not a size"),
        (["--page-size", "many"], "page-size"),
        (["--page-size", "65"], "page-size"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--no-such-flag"], "no-such-flag"),
        (["--max-running", "0"], "--max-running"),
    ],
)
def test_wrong_flags_are_one_clear_line(
    arguments: list[str], part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "serve", *arguments) == 2
    assert part in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_server_failures_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_main(monkeypatch, "serve", "--adapter", "nonsense", "--data-dir", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "NAME=PATH" in error


# -- version, help ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments: list[str]) -> None:
    result = CliRunner().invoke(make_app(), arguments)
    assert (result.exit_code, result.output.strip()) == (0, __version__)


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(make_app(), ["--help"])
    for name in ("serve", "adapters", "version"):
        assert name in result.output
    result = CliRunner().invoke(make_app(), ["adapters", "--help"])
    for name in ("list", "load", "unload", "inspect"):
        assert name in result.output
    assert loraserve.cli.main.__doc__


# -- adapters ---------------------------------------------------------------------------------------------------------

INFO: dict[str, Any] = {
    "name": "org/a",
    "version": "ab" * 32,
    "state": "ready",
    "residency": "device",
    "pinned": False,
    "source": {"kind": "local", "path": "/x", "repo": None, "revision": None, "commit": None, "subfolder": None},
    "rank": 8,
    "targets": ["q_proj"],
    "scaling": [2.0],
    "dtype": "float32",
    "bytes": 2048,
    "progress": None,
    "leases": 1,
    "requests": 5,
    "loaded_at": 1.0,
    "last_used_at": None,
    "warnings": [],
    "error": None,
}


class Recorder:
    """A server that answers as told and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.status, self.answer = 200, json.dumps(INFO)
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                recorder.asked.append((self.command, self.path, body, self.headers.get("authorization")))
                content = recorder.answer.encode()
                self.send_response(recorder.status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setenv("LORASERVE_SERVER", recorder.url)
    yield recorder
    recorder.close()


def adapters(*arguments: str) -> str:
    result = CliRunner().invoke(make_app(), ["adapters", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_list(recorder: Recorder) -> None:
    recorder.answer = json.dumps({"data": [INFO]})
    output = adapters("list")
    for part in ("org/a", "abababababab", "ready", "device", "2.0KiB"):
        assert part in output
    assert json.loads(adapters("list", "--json"))["data"] == [INFO]
    recorder.answer = json.dumps({"data": []})
    assert "no adapters" in adapters("list")
    assert recorder.asked[0] == ("GET", "/adapters", None, None)


def test_load(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LORASERVE_ADMIN_KEY", "secret")
    assert "q_proj" in adapters("load", "org/a", "folder", "--pin", "--no-wait")
    method, path, body, key = recorder.asked[0]
    assert (method, path, key) == ("POST", "/adapters/load", "Bearer secret")
    assert body["path"] == str(tmp_path / "folder")
    assert (body["name"], body["pin"], body["replace"], body["wait"]) == ("org/a", True, False, False)
    adapters("load", "a", "--repo", "org/x", "--revision", "main", "--token", "t", "--replace", "--admin-key", "other")
    _, _, body, key = recorder.asked[1]
    assert (body["repo"], body["revision"], body["token"], body["replace"]) == ("org/x", "main", "t", True)
    assert "path" not in body
    assert key == "Bearer other"


def test_unload_and_inspect(recorder: Recorder) -> None:
    assert "2.0KiB" in adapters("inspect", "org/a")
    assert recorder.asked[0][1] == "/adapters/org/a"
    assert json.loads(adapters("inspect", "org/a", "--json")) == INFO
    recorder.answer = json.dumps({"name": "a", "version": "v", "drained": 2, "aborted": 1, "freed": False})
    said = adapters("unload", "a", "--force", "--deadline", "5")
    assert "2 requests drained, 1 aborted; the engine is stuck" in said
    assert recorder.asked[-1][2] == {"name": "a", "force": True, "deadline_s": 5.0}


def test_errors_of_the_server(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.status = 409
    recorder.answer = json.dumps({"error": {"message": "taken\nby other", "type": "x", "code": "name_taken"}})
    assert run_main(monkeypatch, "adapters", "load", "a", "x") == 1
    assert capsys.readouterr().err == "error: taken by other (name_taken)\n"
    for answer in ("<html>", "[]", "{}"):
        recorder.answer = answer
        assert run_main(monkeypatch, "adapters", "list") == 1
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("server", "code"), [("http://127.0.0.1:9", 1), ("nonsense", 2), ("ftp://x", 2), ("http://h:port", 2)]
)
def test_servers_that_are_none(
    server: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "adapters", "list", "--server", server) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_load_needs_one_place(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "adapters", "load", "a") == 2
    assert run_main(monkeypatch, "adapters", "load", "a", "x", "--repo", "y") == 2
    assert "PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--threads", "0"],
        ["--max-model-len", "0"],
        ["--max-waiting", "-1"],
        ["--max-lora-rank", "0"],
        ["--lora-memory", "0"],
        ["--kv-memory", "9" * 400 + "GiB"],
        ["--request-timeout-s", "nan"],
        ["--request-timeout-s", "0"],
        ["--drain-deadline-s", "-1"],
        ["--adapter-wait-limit-s", "inf"],
        ["--max-body", "0"],
        ["--port", "-1"],
        ["--host", "x..y"],
        ["--admin-key", ""],
        ["--api-key", " k"],
        ["--adapter", "bad name=/x"],
        ["--adapter", "base=/x", "--served-model-name", "base"],
        ["--adapter", "a=/x", "--adapter", "a=/y"],
    ],
    ids=" ".join,
)
def test_flags_that_could_only_fail_later(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_main(monkeypatch, "serve", "--data-dir", str(tmp_path), *arguments) == 2
    shown = capsys.readouterr().err
    # Typer frames what it finds itself; the rest is one line.
    assert "Traceback" not in shown
    assert "Error" in shown or shown.count("\n") == 1, shown


def test_values_that_http_cannot_carry(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "adapters", "unload", "a", "--deadline", "nan") == 2
    assert "--deadline" in capsys.readouterr().err
    assert not recorder.asked
    recorder.answer = json.dumps({"data": []})
    assert run_main(monkeypatch, "adapters", "list", "--admin-key", "schlüssel") == 0
    key = recorder.asked[0][3]
    assert key is not None
    assert key.encode("latin-1").decode() == "Bearer schlüssel"


def test_tables_keep_brackets_and_long_names(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    named = INFO | {"name": "o/" + "n" * 126, "warnings": ["[/red] in /x/[/y]"]}
    recorder.answer = json.dumps(named)
    assert "[/red] in /x/[/y]" in adapters("inspect", "a")
    recorder.answer = json.dumps({"data": [named]})
    assert named["name"] in adapters("list")
