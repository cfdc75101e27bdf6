"""A real socket and OpenAI's own client; what only happens on a wire: disconnects, slow streams."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import openai
import pytest
from fake_engine import FakeEngine, FakeLibrary
from openai.types.chat import ChatCompletionMessageParam
from server_parts import BASE, LiveServer

from loraserve.errors import AdapterFailed, EngineDead, LoraserveError, Overloaded, RequestTimedOut
from loraserve.server.app import build_app
from loraserve.server.state import ServerState

REPLY = "Hello from the base 😀, bye."
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def ai(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


def test_completion(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(model=BASE, prompt="Hi", max_tokens=100, logprobs=2, echo=True)
    assert answer.choices[0].text == "Hi" + REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.model_extra == {"lora": None}


def test_completion_stream(ai: openai.OpenAI) -> None:
    stream = ai.completions.create(
        model=BASE, prompt="Hi", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == REPLY
    assert chunks[-1].usage is not None


def test_chat(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(model=BASE, messages=HI, n=2, logprobs=True, top_logprobs=2, user="me")
    assert [choice.message.content for choice in answer.choices] == [REPLY, REPLY]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2


def test_chat_stream(ai: openai.OpenAI) -> None:
    chunks = list(ai.chat.completions.create(model=BASE, messages=HI, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    with ai.chat.completions.stream(model=BASE, messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == REPLY


def test_adapter(ai: openai.OpenAI, live: LiveServer, library: FakeLibrary) -> None:
    body = {"name": "a", "path": library.make("a", "weights")}
    assert ai._client.post(f"{live.url}/adapters/load", json=body).status_code == 200
    version = library.version_of("weights")
    assert [model.id for model in ai.models.list()] == [BASE, "a"]
    assert ai.models.retrieve("a").model_extra is not None
    answer = ai.chat.completions.create(model=f"{BASE}:a", messages=HI)
    assert answer.choices[0].message.content == f"Hello from {version[:4]} 😀, bye."
    answer = ai.chat.completions.create(model=BASE, messages=HI, extra_body={"lora": {"name": "a", "scale": 0.5}})
    assert answer.model_extra == {"lora": [{"name": "a", "version": version, "scale": 0.5}]}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Overloaded("full"), openai.RateLimitError),
        (EngineDead("gone"), openai.InternalServerError),
        (AdapterFailed("gone"), openai.InternalServerError),
        (RequestTimedOut("late"), openai.APIStatusError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LoraserveError) else "",
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_errors_of_the_engine(
    ai: openai.OpenAI, engine: FakeEngine, error: LoraserveError, expected: type[openai.APIStatusError], stream: bool
) -> None:
    engine.fail_with = error
    with pytest.raises(expected) as caught:
        ai.chat.completions.create(model=BASE, messages=HI, stream=stream)
    assert caught.value.status_code == error.status
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == error.code
    assert caught.value.body["type"] == error.type


def test_errors_of_the_request(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        ai.completions.create(model="nobody", prompt="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        ai.completions.create(model=BASE, prompt="Hi", frequency_penalty=1.0)
    assert bad.value.param == "frequency_penalty"


def test_keys(make_server: Callable[..., ServerState]) -> None:
    server = LiveServer(build_app(make_server(api_key=("right",))))
    try:
        for key, fails in (("right", False), ("wrong", True)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                if fails:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()
                else:
                    client.models.list()
    finally:
        server.close()


def test_error_inside_a_stream(ai: openai.OpenAI, engine: FakeEngine) -> None:
    engine.fail_after = (3, AdapterFailed("gone"))
    stream = ai.completions.create(model=BASE, prompt="Hi", stream=True, max_tokens=50)
    assert next(stream).choices[0].text
    with pytest.raises(openai.APIError, match="gone"):
        list(stream)


def test_stream_is_not_buffered(ai: openai.OpenAI, engine: FakeEngine) -> None:
    engine.delay = 0.02
    started = time.monotonic()
    stream = iter(ai.completions.create(model=BASE, prompt="Hi", stream=True, max_tokens=50))
    next(stream)
    first = time.monotonic() - started
    list(stream)
    assert time.monotonic() - started > first + 0.1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_disconnect_ends_the_request(
    live: LiveServer, engine: FakeEngine, stream: bool, make_server: Callable[..., ServerState]
) -> None:
    engine.delay = 0.05
    engine.script = lambda request: engine.ids("a") * 200
    host, port = live.url.removeprefix("http://").split(":")
    body = json.dumps({"model": BASE, "prompt": "Hi", "max_tokens": 200, "stream": stream, "n": 3}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: len(engine.open) == 3)
        if stream:
            assert b"200 OK" in connection.recv(4096)
    wait_until(lambda: not engine.open)
    assert len(engine.left) == 3


def test_disconnect_before_the_first_token(live: LiveServer, engine: FakeEngine) -> None:
    engine.delay = 30
    with socket.create_connection(
        (live.url.removeprefix("http://").split(":")[0], int(live.url.split(":")[2]))
    ) as wire:
        body = json.dumps({"model": BASE, "messages": HI, "stream": True}).encode()
        wire.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: len(engine.open) == 1)
    wait_until(lambda: not engine.open)
