"""Adapters that nobody registered: fetched when a request names them, and only for those who may have them."""

from __future__ import annotations

import concurrent.futures
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_hub import COMMIT, FakeHub, serve
from live_server import LiveServer
from tiny_models import ATTENTION, Oracle, make_adapter, make_model

COUNT = 6
PROMPT = [5, 80, 33, 120, 7, 64, 201]
SECOND = "f" * 40


class Setup:
    """A model, a Hub, a folder and a server that two tenants use."""

    def __init__(self, root: Path) -> None:
        self.model = make_model(root / "model", seed=3)
        made = [
            make_adapter(self.model, root / "made" / str(seed), seed, r=4, lora_alpha=8, target_modules=ATTENTION)
            for seed in range(2)
        ]
        oracle = Oracle(self.model)
        self.expected = [oracle.greedy(folder, PROMPT, COUNT) for folder in made]
        files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in made]
        self.hub = FakeHub({"org/open": files[0], "org/secret": files[1], "elsewhere/open": files[0]})
        self.hub.tokens["org/secret"] = "hf_right"
        self.folder = root / "shelf"
        shutil.copytree(made[1], self.folder / "team" / "sql")
        self.big = root / "shelf" / "big"
        shutil.copytree(made[0], self.big)
        (self.big / "tokenizer.json").write_bytes(b" " * 3_000_000)
        (self.folder / "link").symlink_to(made[0])
        self.env = {
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_CACHE": str(root / "hub-cache"),
            "HF_TOKEN_PATH": str(root / "no-token"),
            "HF_TOKEN": "hf_right",  # the server's own token must never be lent to a request
        }


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = Setup(tmp_path_factory.mktemp("on-demand"))
    with serve(setup.hub):
        yield setup


@pytest.fixture(scope="module")
def server(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ["--kv-memory", "8MiB", "--lora-memory", "8MiB", "--host-lora-memory", "32MiB", "--threads", "1"]
    flags += ["--adapter-source", "hub:org/*", "--adapter-source", f"dir:{setup.folder}"]
    flags += ["--adapter-source-size", "2MiB", "--api-key", "k1", "--api-key", "k2", "--admin-key", "adm"]
    env = setup.env | {"HF_ENDPOINT": setup.hub.endpoint}
    with LiveServer(setup.model, tmp_path_factory.mktemp("data"), flags, env) as live:
        yield live


def ask(server: LiveServer, lora: object, key: str = "k1", token: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} | ({} if token is None else {"X-Hub-Token": token})
    body = {"model": "base", "prompt": PROMPT, "lora": lora, "max_tokens": COUNT, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return server.client.post("/v1/completions", json=body, headers=headers)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def admin(server: LiveServer, method: str, path: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": "Bearer adm"}
    return server.client.request(method, path, json=body or None, headers=headers)


def test_an_open_repository_is_fetched_once_for_all_that_ask(server: LiveServer, setup: Setup) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda index: ask(server, "org/open", f"k{1 + index % 2}"), range(8)))
    assert all(tokens(answer) == setup.expected[0] for answer in answers)
    assert sum(path == "api/models/org/open" for _, path in setup.hub.requests) == 1
    assert answers[0].json()["lora"][0]["name"] == "org/open"
    info = admin(server, "GET", "/adapters/org/open").json()
    assert (info["state"], info["visibility"], info["source"]["commit"]) == ("ready", "public", COMMIT)
    setup.hub.revisions.add("v2")
    assert tokens(ask(server, {"name": "org/open", "revision": "v2"})) == setup.expected[0]
    assert code(ask(server, {"name": "org/open", "revision": "v9"})) == (404, "revision_not_found")
    assert admin(server, "POST", "/adapters/unload", name="org/open", purge=True).status_code == 200
    assert admin(server, "POST", "/adapters/unload", name="org/open").status_code == 404
    assert tokens(ask(server, "org/open")) == setup.expected[0], "it comes again when it is named again"


def test_a_private_repository_is_only_for_those_whose_token_opens_it(server: LiveServer, setup: Setup) -> None:
    assert code(ask(server, "org/secret")) == (404, "repo_not_found")
    assert code(ask(server, "org/secret", token="hf_wrong")) == (404, "repo_not_found")
    assert tokens(ask(server, "org/secret", token="hf_right")) == setup.expected[1]
    for key in ("k1", "k2"):
        assert code(ask(server, "org/secret", key)) == (404, "repo_not_found"), "also now that it is here"
        assert code(ask(server, "org/secret", key, token="hf_wrong")) == (404, "repo_not_found")
    assert tokens(ask(server, "org/secret", "k2", token="hf_right")) == setup.expected[1]
    body = {"model": "org/secret", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    headers = {"Authorization": "Bearer k1"}
    chat = server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert chat.status_code == 404
    good = server.client.post("/v1/chat/completions", json=body, headers=headers | {"X-Hub-Token": "hf_right"})
    assert good.status_code == 200
    listed = server.client.get("/v1/models", headers=headers).json()["data"]
    assert "org/secret" not in [card["id"] for card in listed]
    assert "hf_right" not in server.log.read_text()


def test_what_no_source_allows(server: LiveServer, setup: Setup) -> None:
    before = len(setup.hub.requests)
    for name in ("elsewhere/open", "nobody", "org/a/b", "../shelf/big", "team", "team/../big"):
        assert ask(server, name).status_code in (400, 404), name
    assert len(setup.hub.requests) == before
    for _ in range(5):
        assert code(ask(server, "org/absent")) == (404, "repo_not_found")
    assert sum(path == "api/models/org/absent" for _, path in setup.hub.requests) == 1, "failures are remembered"
    for token in ("", "a b", "é"):
        answer = server.client.get("/v1/models", headers={"Authorization": "Bearer k1"})
        assert answer.status_code == 200
        assert code(ask(server, "org/open", token=token.encode())) == (400, "invalid_request")  # type: ignore[arg-type]


def test_a_folder(server: LiveServer, setup: Setup) -> None:
    assert tokens(ask(server, "team/sql")) == setup.expected[1]
    assert code(ask(server, "big")) == (400, "adapter_too_large")
    assert code(ask(server, "link")) == (403, "path_escape")
    assert code(ask(server, {"name": "team/sql", "revision": "v1"})) == (404, "adapter_not_found")


def test_a_load_with_a_token_is_its_tenants(server: LiveServer, setup: Setup) -> None:
    load = {"name": "mine", "repo": "org/secret", "token": "hf_right"}
    assert admin(server, "POST", "/adapters/load", **load).json()["visibility"] == "private"
    assert code(ask(server, "mine")) == (404, "adapter_not_found")
    assert tokens(ask(server, "mine", "adm")) == setup.expected[1]
    for key, there in (("k1", False), ("adm", True)):
        listed = server.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).json()["data"]
        assert ("mine" in [card["id"] for card in listed]) == there
    assert admin(server, "POST", "/adapters/load", **load, visibility="public").status_code == 200
    assert tokens(ask(server, "mine")) == setup.expected[1]


def test_their_number_is_bounded_also_after_a_burst(setup: Setup, tmp_path: Path) -> None:
    for number in range(4):
        setup.hub.repos[f"org/burst-{number}"] = setup.hub.repos["org/open"]
    setup.hub.repos["org/burst-4"] = setup.hub.repos["org/secret"]
    flags = ["--kv-memory", "8MiB", "--lora-memory", "8MiB", "--host-lora-memory", "32MiB", "--threads", "1"]
    flags += ["--adapter-source", "hub:org/*", "--adapter-source-count", "1"]
    env = setup.env | {"HF_ENDPOINT": setup.hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache")}
    with LiveServer(setup.model, tmp_path / "data", flags, env) as live:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            names = [f"org/burst-{number % 5}" for number in range(20)]
            answers = list(pool.map(lambda name: ask(live, name), names))
        for name, answer in zip(names, answers, strict=True):
            assert tokens(answer) == setup.expected[name == "org/burst-4"]
        end = time.monotonic() + 30
        while (
            len(live.client.get("/adapters").json()["data"]) > 1
            or len(list((tmp_path / "data/versions").iterdir())) > 1
        ):
            assert time.monotonic() < end, "more than one is left"
            time.sleep(0.1)
    assert not (tmp_path / "cache" / "models--org--burst-4").exists(), "no copy in the Hub cache, which nothing bounds"
