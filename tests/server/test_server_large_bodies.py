"""Bodies near the limit: whoever sends one is answered or refused, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from asking import ok, post, refused
from fake_engine import FakeEngine
from pydantic import ValidationError
from server_parts import BASE

from loraserve.sampling import MAX_STOP_CHARS
from loraserve.server.protocol import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from loraserve.server.strict_body import MAX_VALUES, num_values
from loraserve.server.tokens import MAX_CHARS, MAX_IDS

pytestmark = pytest.mark.anyio
START = {"model": BASE, "prompt": "Hi", "max_tokens": 2}


class Counting(ThreadPoolExecutor):
    """What `asyncio.to_thread` runs in."""

    num_calls = 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_calls += 1
        return super().submit(*args, **kwargs)


@pytest.fixture
async def threads() -> AsyncIterator[Counting]:
    with Counting(2) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        yield threads


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("value", ["1", "{}", '"a"'])
async def test_a_body_of_too_many_values(client: httpx.AsyncClient, threads: Counting, path: str, value: str) -> None:
    content = json.dumps(START)[:-1] + ', "x": [' + ",".join([value] * MAX_VALUES) + "]}"
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert str(MAX_VALUES) in answer.json()["error"]["message"]
    assert threads.num_calls == 1


async def test_signs_in_a_text_are_no_values(client: httpx.AsyncClient) -> None:
    text = '{,[\\",\\\\' * (MAX_VALUES // 4)
    answer = await client.post("/v1/completions", json=START | {"user": text})
    assert answer.status_code == 200, answer.text


def test_num_values() -> None:
    rng = random.Random(5)

    def make(depth: int) -> Any:
        kind = rng.randrange(6 if depth else 3)
        if kind < 3:
            return (rng.randrange(99), None, "".join(rng.choices('a,[{"\\', k=rng.randrange(6))))[kind]
        items = [make(depth - 1) for _ in range(rng.randrange(4))]
        return items if kind < 5 else {f"{index}{rng.choice(',[{')}": item for index, item in enumerate(items)}

    def count(value: object) -> int:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return 1 + sum(map(count, items)) + (isinstance(value, dict | list) and not items)

    for _ in range(300):
        value = make(4)
        body = json.dumps(value).encode()
        # An empty container is counted as if it had one value.
        assert num_values(body, 0) == count(value), body
        assert num_values(body, 10**6) >= count(value)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionRequest, START | {"stop": [1] * 1000}),
        (CompletionRequest, START | {"stop_token_ids": ["a"] * 1000}),
        (ChatRequest, {"model": BASE, "messages": [1] * 1000}),
        (TokenizeRequest, {"messages": [1] * 1000}),
        (DetokenizeRequest, {"tokens": ["a"] * 1000}),
    ],
)
def test_wrong_items_are_not_described_one_by_one(kind: type[Body], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() <= 2


async def test_stops_are_counted_before_they_are_read(client: httpx.AsyncClient) -> None:
    assert "16" in await refused(client, 400, "invalid_request", "stop", stop=["a"] * 100_000)
    await refused(client, 400, "invalid_request", "stop_token_ids", stop_token_ids=[1] * 100_000)
    await refused(client, 400, "invalid_request", "stop", stop=["a", "b" * (MAX_STOP_CHARS + 1)])
    await ok(client, stop="b" * MAX_STOP_CHARS)


async def test_many_short_prompts_let_others_in_between(client: httpx.AsyncClient) -> None:
    async def turns_during(num_prompts: int) -> int:
        task = asyncio.create_task(post(client, prompt=["Hello world"] * num_prompts, max_tokens=0, echo=False))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    # Refused only when all have been tokenized, so that nothing else takes turns.
    assert await turns_during(200) >= await turns_during(1) + 199


async def test_what_is_tokenized_at_once(client: httpx.AsyncClient, engine: FakeEngine, threads: Counting) -> None:
    for fields in ({"prompt": "a" * (MAX_CHARS + 1)}, {"messages": [{"role": "user", "content": "a" * MAX_CHARS}]}):
        answer = await client.post("/tokenize", json=fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
        assert answer.json()["error"]["param"] in fields
    # Far beyond the context, but not too long to be counted.
    text, before = "Hello world " * 5000, threads.num_calls
    answer = await client.post("/tokenize", json={"prompt": text})
    assert answer.json()["tokens"] == engine.tokenizer.encode(text)
    assert threads.num_calls == before + 1  # the text
    tokens = engine.tokenizer.encode("Hello world", add_special_tokens=False)
    many = tokens * (MAX_IDS // len(tokens))
    answer = await client.post("/detokenize", json={"tokens": many})
    assert answer.json()["prompt"] == "Hello world" * (MAX_IDS // len(tokens))
    assert threads.num_calls == before + 3  # the body and the ids
    answer = await client.post("/detokenize", json={"tokens": [5] * (MAX_IDS + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "tokens")
