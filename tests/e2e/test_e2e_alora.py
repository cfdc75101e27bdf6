"""KV before an activated adapter's invocation is the base's: shared with it and with others, answers still PEFT's."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_driver import Driver, engine_config
from tiny_models import ATTENTION, MLP, make_adapter, make_model
from variants import INVOCATION, PLAIN, ActivatedOracle, check_request, make_variant

PREFIX = [(7 * i) % 290 + 3 for i in range(37)]
PROMPT = [*PREFIX, *INVOCATION, 17, 19, 23]
COUNT = 6


class Warm:
    """One model with two activated adapters and a plain one, and the oracle that knows them."""

    def __init__(self, root: Path) -> None:
        self.model = make_model(root / "model", family="qwen2", seed=11, tie_word_embeddings=False)
        settings = {
            "r": 4,
            "lora_alpha": 12,
            "target_modules": [*ATTENTION, *MLP],
            "alora_invocation_tokens": INVOCATION,
        }
        self.folders: dict[str | None, Path | None] = {
            "one": make_variant(self.model, root / "alora-one", 1, **settings),
            "two": make_variant(self.model, root / "alora-two", 2, **settings),
            "plain": make_adapter(self.model, root / "plain", 3, **PLAIN),
            None: None,
        }
        self.oracle = ActivatedOracle(self.model)

    def driver(self, page_size: int, **cache: object) -> Driver:
        config = engine_config(
            self.model,
            kernels="reference",
            cache={"page_size": page_size} | cache,
            scheduler={"prefill_chunk": 16, "max_running": 8},
        )
        driver = Driver(config)
        for name, folder in self.folders.items():
            if name is not None and folder is not None:
                driver.load(name, folder)
        return driver

    def check(self, driver: Driver, request: str, name: str | None, prompt: list[int]) -> int:
        """The request's answer is PEFT's; how many of its tokens came from the cache."""
        check_request(driver, request, self.oracle, self.folders[name], prompt)
        return driver.answers[request].last.cached_tokens

    def ask(self, driver: Driver, name: str | None, prompt: list[int], **settings: object) -> int:
        request = driver.add(prompt, name, **({"max_tokens": COUNT} | settings))  # type: ignore[arg-type]
        driver.finish(request)
        return self.check(driver, request, name, prompt)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    return Warm(tmp_path_factory.mktemp("alora"))


@pytest.mark.parametrize("page_size", [1, 16])
def test_kv_before_the_invocation_is_shared(warm: Warm, page_size: int) -> None:
    before = len(PREFIX) // page_size * page_size  # whole pages before the invocation
    whole = (len(PROMPT) - 1) // page_size * page_size
    with warm.driver(page_size) as driver:
        assert warm.ask(driver, None, PROMPT) == 0
        # Warm from the base; then from itself; from another adapter too; and a plain adapter shares nothing.
        assert warm.ask(driver, "one", PROMPT) == before
        assert warm.ask(driver, "one", PROMPT) == whole
        assert warm.ask(driver, "two", PROMPT) == before
        assert warm.ask(driver, "plain", PROMPT) == 0
        assert warm.ask(driver, None, PROMPT) == whole
        # The invocation elsewhere in the same first tokens: neither what follows it here nor there is mixed up.
        earlier = [*PREFIX[:20], *INVOCATION, *PREFIX[23:]]
        assert warm.ask(driver, "one", earlier) == 20 // page_size * page_size
        assert warm.ask(driver, None, earlier) == 20 // page_size * page_size
        # Another salt is another tenant.
        assert warm.ask(driver, "one", PROMPT, salt="tenant") == 0
        assert warm.ask(driver, None, PROMPT[:-1], salt="tenant") == before
        # The last invocation counts: the first one's tokens are the base's now, not what the adapter made of them.
        twice = [*PROMPT, *INVOCATION, 5]
        assert warm.ask(driver, "one", PROMPT, salt="other") == 0
        assert warm.ask(driver, "one", twice, salt="other") == before
        assert warm.ask(driver, "two", twice, salt="other") == len(PROMPT) // page_size * page_size
        driver.assert_idle()


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_activated_adapter_warms_the_base_and_others(warm: Warm, page_size: int) -> None:
    before = len(PREFIX) // page_size * page_size
    with warm.driver(page_size) as driver:
        assert warm.ask(driver, "two", PROMPT) == 0
        assert warm.ask(driver, "one", PROMPT) == before
        assert warm.ask(driver, None, PROMPT) == before
        # All at once, each beside the others.
        requests = [(name, driver.add(PROMPT, name, max_tokens=COUNT)) for name in warm.folders]
        driver.finish()
        for name, request in requests:
            warm.check(driver, request, name, PROMPT)
        # A dropped version takes its own pages and no others; coming back, it finds those before the invocation.
        driver.drop("two")
        driver.load("two", warm.folders["two"])  # type: ignore[arg-type]
        assert warm.ask(driver, "two", PROMPT) == before
        driver.assert_idle()


@pytest.mark.parametrize("page_size", [1, 16])
def test_retracted_requests_come_back_exact(warm: Warm, page_size: int) -> None:
    shape = warm.oracle._model(None).config
    per_token = 2 * 4 * shape.num_hidden_layers * shape.num_key_value_heads * (shape.hidden_size // 4)
    tokens = 16 * (len(PROMPT) // 16 + 6)  # too few for four requests that grow by 40 tokens
    with warm.driver(page_size, kv_memory=tokens * per_token) as driver:
        requests = [
            (name, prompt, driver.add(prompt, name, max_tokens=40))
            for name in ("one", "two", None)
            for prompt in (PROMPT, [*PREFIX[:9], *INVOCATION, 8])
        ]
        driver.finish()
        assert driver.stats.retractions_total > 0, "the test needs a retraction"
        for name, prompt, request in requests:
            warm.check(driver, request, name, prompt)
        driver.assert_idle()
