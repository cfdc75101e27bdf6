"""Chat templates that adapters bring: rendered as transformers does, for that adapter alone, and contained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fake_engine import FakeEngine, FakeLibrary, byte_level_tokenizer
from server_parts import BASE, open_client

from loraserve.errors import AdapterRefused, ChatTemplateFailed, InvalidRequest, NameTaken
from loraserve.lora.chat_template import MAX_TEMPLATE, read_chat_template
from loraserve.lora.files import AdapterFolder
from loraserve.server.app import build_app
from loraserve.server.directory import LoadOrder
from loraserve.server.ports import AdapterPlace
from loraserve.server.state import ServerState
from loraserve.server.templates import Chat, TemplateRenderer

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "Hi"}]
ASK = (
    "{{ bos_token }}{% for m in messages %}Q: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
TELL = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} {% endfor %}"
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a + b %}{% endfor %}{% endfor %}"
SLOW = "{% for a in range(200) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
BROKEN = {
    "syntax": "{% for m in messages %}{{ m.content }",
    "undefined": "{{ messages.nothing.at.all }}",
    "python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "division": "{{ 1 // 0 }}",
    "memory": "{{ 'x' * 9000000000 }}",
    "endless-text": "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "filter": "{{ messages | no_such_filter }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(render_s=2.5, quarantine_s=0.5)
    yield renderer
    renderer.close()


def chat(messages: list[dict[str, str]] = HI, add: bool = True, go_on: bool = False) -> Chat:
    return Chat(messages, add, go_on, {"bos_token": "<s>"})


@pytest.mark.parametrize("template", [ASK, TELL])
async def test_rendering_is_that_of_transformers(renderer: TemplateRenderer, template: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.bos_token = "<s>"
    talk = [*HI, {"role": "assistant", "content": "Well, "}]
    for messages, add, go_on in ((HI, True, False), (HI, False, False), (talk, False, True), (talk, True, False)):
        expected = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            chat_template=template,
            add_generation_prompt=add,
            continue_final_message=go_on,
        )
        assert await renderer.render(template, chat(messages, add, go_on)) == expected


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_template_is_named_and_the_next_one_works(renderer: TemplateRenderer, name: str) -> None:
    with pytest.raises(ChatTemplateFailed) as failed:
        await renderer.render(BROKEN[name], chat())
    assert (failed.value.code, failed.value.status) == ("chat_template_failed", 400)
    assert await renderer.render(ASK, chat()) == "<s>Q: Hi\nA:"


async def test_a_template_may_refuse_a_chat(renderer: TemplateRenderer) -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: only system here") as refused:
        await renderer.render("{{ raise_exception('only system here') }}", chat())
    assert refused.value.code == "invalid_request"


async def test_a_template_without_end_holds_up_nobody_else(renderer: TemplateRenderer) -> None:
    await asyncio.gather(renderer.render(SLOW, chat()), renderer.render(ASK, chat()))  # both processes have started
    started = time.monotonic()
    hanging = [asyncio.create_task(renderer.render(FOREVER, chat())) for _ in range(20)]
    await asyncio.sleep(0.2)
    assert [await renderer.render(ASK, chat()) for _ in range(5)] == ["<s>Q: Hi\nA:"] * 5
    assert not any(task.done() for task in hanging), "it was to wait for nobody"
    for error in await asyncio.gather(*hanging, return_exceptions=True):
        assert isinstance(error, ChatTemplateFailed)
        assert "takes more than 2.5 s" in error.message
    assert time.monotonic() - started < 20, "one of them has to be waited for, not all"


async def test_processes_end_with_the_renderer() -> None:
    before = set(psutil.Process().children())
    renderer = TemplateRenderer()
    await renderer.render(TELL, chat())
    (child,) = set(psutil.Process().children()) - before
    renderer.close()
    assert not child.is_running()


# -- the folder's template --------------------------------------------------------------------------------------------


def found(folder: Path, settings: str | None = None, template: str | bytes | None = None) -> str | None:
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(settings)
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template if isinstance(template, bytes) else template.encode())
    return read_chat_template(AdapterFolder.at(folder))


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert found(tmp_path) is None
    assert found(tmp_path, '{"chat_template": null}') is None
    assert found(tmp_path, '{"chat_template": "é one"}') == "é one"
    several = '[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]'
    assert found(tmp_path, f'{{"chat_template": {several}}}') == "two"
    assert found(tmp_path, '{"chat_template": [{"name": "rag", "template": "r"}]}') is None
    assert found(tmp_path, None, "three") == "three", "the file goes before the field"


@pytest.mark.parametrize(
    ("settings", "template", "code"),
    [
        ("{", None, "invalid_config"),
        ('{"chat_template": 5}', None, "invalid_config"),
        ('{"chat_template": {"default": "x"}}', None, "invalid_config"),
        ('{"chat_template": [{"name": "default", "template": 5}]}', None, "invalid_config"),
        (f'{{"chat_template": "{"x" * (MAX_TEMPLATE + 1)}"}}', None, "config_too_large"),
        (None, "x" * (MAX_TEMPLATE + 1), "config_too_large"),
        (None, b"\xff\xfe", "invalid_config"),
        ("[" * 100_000, None, "invalid_config"),
        ('{"chat_template": "\\ud800"}', None, "invalid_config"),
    ],
    ids=range(9),
)
def test_what_is_no_text_refuses_the_adapter(
    tmp_path: Path, settings: str | None, template: str | bytes | None, code: str
) -> None:
    with pytest.raises(AdapterRefused) as refused:
        found(tmp_path, settings, template)
    assert refused.value.code == code


# -- through the server -----------------------------------------------------------------------------------------------


@pytest.fixture
async def server(make_server: Callable[..., ServerState]) -> AsyncIterator[ServerState]:
    state = make_server()
    yield state
    state.chats.close()
    await state.directory.close()


async def load(
    server: ServerState, library: FakeLibrary, name: str, content: str, template: str | None = None, **order: Any
) -> str:
    place = AdapterPlace(path=library.make(f"dir-{name}-{len(list(library.root.iterdir()))}", content, template))
    entry = await server.directory.load(LoadOrder(name=name, place=place, **order))
    assert entry.served is not None
    return entry.served.version


async def prompt(client: httpx.AsyncClient, engine: FakeEngine, **body: Any) -> str:
    response = await client.post("/v1/chat/completions", json={"model": BASE, "messages": HI} | body)
    assert response.status_code == 200, response.text
    return str(engine.tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False))


async def test_each_name_has_the_template_that_it_was_loaded_with(
    server: ServerState, library: FakeLibrary, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """One version under three names: the weights are shared, the prompts are each name's own."""
    versions = {
        await load(server, library, "tells", "weights", TELL),
        await load(server, library, "asks", "weights", "Q: {{ messages[0].content }} A:"),
        await load(server, library, "plain", "weights"),
    }
    assert len(versions) == 1
    base = "<|user|>Hi<|end|><|assistant|>"
    for _ in range(2):
        assert await prompt(client, engine, model="tells") == "[user] Hi "
        assert await prompt(client, engine, model="asks") == "Q: Hi A:"
        assert await prompt(client, engine, model="plain") == base
        assert await prompt(client, engine) == base
    assert await prompt(client, engine, lora="tells") == "[user] Hi "
    assert await prompt(client, engine, lora={"name": "tells", "scale": 0.5}) == "[user] Hi "
    infos = (await client.get("/adapters")).json()["data"]
    assert {info["name"]: info["chat_template"] for info in infos} == {"asks": "own", "plain": "base", "tells": "own"}
    blend = [{"name": "tells", "scale": 0.5}, {"name": "asks", "scale": 0.5}]
    assert await prompt(client, engine, lora=blend) == base
    assert await prompt(client, engine, lora=[]) == base
    response = await client.post("/tokenize", json={"model": "asks", "messages": HI})
    assert response.json()["tokens"] == engine.ids("Q: Hi A:")
    response = await client.post("/tokenize", json={"messages": HI})
    assert response.json()["tokens"] == server.text.encode(base, special=False).ids


async def test_another_template_is_another_thing_under_a_name(
    server: ServerState, library: FakeLibrary, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    version = await load(server, library, "a", "weights", TELL)
    await load(server, library, "a", "weights", TELL)  # the same again is no change
    with pytest.raises(NameTaken):
        await load(server, library, "a", "weights", ASK)
    assert await prompt(client, engine, model="a") == "[user] Hi "
    assert await load(server, library, "a", "weights", "new {{ messages[0].content }}", replace=True) == version
    assert await prompt(client, engine, model="a") == "new Hi"
    await load(server, library, "a", "weights", None, replace=True)
    assert await prompt(client, engine, model="a") == "<|user|>Hi<|end|><|assistant|>"
    assert (await server.directory.unload("a")).version == version


async def test_a_broken_template_fails_only_its_own_chats(
    server: ServerState, library: FakeLibrary, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await load(server, library, "broken", "weights", BROKEN["syntax"])
    await load(server, library, "fine", "weights", TELL)
    for path in ("/v1/chat/completions", "/tokenize"):
        response = await client.post(path, json={"model": "broken", "messages": HI})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["type"], error["param"]) == (
            "chat_template_failed",
            "invalid_request_error",
            "messages",
        )
    assert not engine.open
    assert (await client.post("/v1/completions", json={"model": "broken", "prompt": "Hi"})).status_code == 200
    assert await prompt(client, engine, model="fine") == "[user] Hi "
    assert await prompt(client, engine) == "<|user|>Hi<|end|><|assistant|>"


async def test_own_templates_can_be_ignored(
    make_server: Callable[..., ServerState], library: FakeLibrary, engine: FakeEngine
) -> None:
    state = make_server(ignore_adapter_chat_templates=True)
    await load(state, library, "tells", "weights", TELL)
    async with open_client(build_app(state)) as client:
        assert await prompt(client, engine, model="tells") == "<|user|>Hi<|end|><|assistant|>"
    await state.directory.close()
