"""Adapters from S3, Google's storage and a web server, through their real clients and a real server of ours."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import fake_stores
import pytest
from live_server import LiveServer
from moto.server import ThreadedMotoServer
from tiny_models import ATTENTION, Oracle, make_adapter, make_model

COUNT = 6
PROMPT = [5, 80, 33, 120, 7, 64, 201]
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


def as_tar(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"run/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def as_zip(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"run/{name}", content)
    return data.getvalue()


class Setup:
    """A model, and an adapter as files and archives."""

    def __init__(self, root: Path) -> None:
        self.model = make_model(root / "model", seed=3)
        made = make_adapter(self.model, root / "made", 0, r=4, lora_alpha=8, target_modules=ATTENTION)
        self.expected = Oracle(self.model).greedy(made, PROMPT, COUNT)
        self.files = {path.name: path.read_bytes() for path in made.iterdir()}
        self.objects = {f"team/sql/{name}": data for name, data in self.files.items()}
        self.objects |= {"team/sql/optimizer.pt": b"waste", "team/sql.tar.gz": as_tar(self.files)}
        self.objects |= {"team/sql.zip": as_zip(self.files), "team/empty/README.md": b"x", "private/sql": b"x"}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def s3(setup: Setup) -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=KEYS["AWS_DEFAULT_REGION"],
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket="shelf")
    for name, data in setup.objects.items():
        client.put_object(Bucket="shelf", Key=name, Body=data)
    client.close()
    yield endpoint
    server.stop()


@pytest.fixture(scope="module")
def server(setup: Setup, s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    files = {f"/{name}": data for name, data in setup.objects.items()}
    with (
        fake_stores.google_storage("shelf", setup.objects) as google,
        fake_stores.https(files, tmp_path_factory.mktemp("tls")) as (web, authority),
    ):
        flags = ["--kv-memory", "8MiB", "--lora-memory", "8MiB", "--host-lora-memory", "32MiB", "--threads", "1"]
        for allowed in ("s3://shelf/team", "gs://shelf/team", f"{web}/team", f"{web}/broken", "https://127.0.0.1:9"):
            flags += ["--adapter-url", allowed]
        env = KEYS | {"AWS_ENDPOINT_URL": s3, "STORAGE_EMULATOR_HOST": google, "FSSPEC_GS_TOKEN": "anon"}
        # Otherwise it asks by gRPC what kind of bucket this is, and tries for minutes where nobody speaks that.
        env["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        env["SSL_CERT_FILE"] = str(authority)
        with LiveServer(setup.model, tmp_path_factory.mktemp("data"), flags, env) as live:
            live.web = web  # type: ignore[attr-defined]
            yield live


def load(server: LiveServer, name: str, path: str) -> tuple[int, str]:
    url = path.replace("https://web", server.web)  # type: ignore[attr-defined]
    answer = server.client.post("/adapters/load", json={"name": name, "path": url})
    body = answer.json()
    return answer.status_code, body["source"]["kind"] if answer.status_code == 200 else body["error"]["code"]


@pytest.mark.parametrize(
    "path",
    [
        "s3://shelf/team/sql",
        "s3://shelf/team/sql/",
        "s3://shelf/team/sql.tar.gz",
        "gs://shelf/team/sql",
        "gs://shelf/team/sql.zip",
        "https://web/team/sql.tar.gz",
        "https://web/team/sql.zip",
    ],
)
def test_an_adapter_comes_and_answers(path: str, server: LiveServer, setup: Setup) -> None:
    assert load(server, "sql", path) == (200, "url")
    answer = server.complete(PROMPT, lora="sql", max_tokens=COUNT)
    assert answer.json()["choices"][0]["token_ids"] == setup.expected
    unload = {"name": "sql", "purge": True}
    assert server.client.post("/adapters/unload", json=unload).status_code == 200
    assert list((server.log.parent / "versions").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://shelf/team/absent", (404, "source_not_found")),
        ("s3://shelf/team/absent.zip", (404, "source_not_found")),
        ("s3://shelf/team/empty", (400, "not_an_adapter")),
        ("s3://shelf/private/sql", (403, "path_escape")),
        ("s3://other/team/sql", (403, "path_escape")),
        ("gs://shelf/team/absent", (404, "source_not_found")),
        ("gs://shelf/team/absent.zip", (404, "source_not_found")),
        ("https://web/team/absent.zip", (404, "source_not_found")),
        ("https://web/broken/sql.zip", (502, "source_failed")),
        ("https://127.0.0.1:9/sql.zip", (502, "source_failed")),
        ("https://web/private/sql.zip", (403, "path_escape")),
    ],
)
def test_what_cannot_come_is_named(path: str, expected: tuple[int, str], server: LiveServer) -> None:
    assert load(server, "bad", path) == expected
    assert server.client.get("/adapters/bad").status_code == 404
