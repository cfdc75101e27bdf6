"""Base and many adapters in one engine, requests mixed freely: every answer equals Hugging Face + PEFT alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver, engine_config
from tiny_models import ATTENTION, MLP, Oracle, make_adapter, make_model

ADAPTERS: dict[str, dict[str, Any]] = {
    "qv4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all8": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP},
    "rs16": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ATTENTION},
    "mlp3": {"r": 3, "lora_alpha": 5, "target_modules": MLP},
    "patterns": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ATTENTION + MLP,
        "rank_pattern": {"q_proj": 5, r"layers.1.mlp.down_proj": 33},
        "alpha_pattern": {"k_proj": 2.5, "up_proj": 24},
    },
    "layers": {"r": 12, "lora_alpha": 20, "target_modules": ["k_proj", "down_proj"], "layers_to_transform": [0, 2]},
    "head": {"r": 6, "lora_alpha": 12, "target_modules": ["lm_head", "o_proj"]},
    "embed": {"r": 5, "lora_alpha": 3, "target_modules": ["embed_tokens", "up_proj"]},
}


@dataclass
class World:
    """A tiny model, its adapters, and what PEFT answers."""

    model: Path
    adapters: dict[str, Path]
    prompts: list[list[int]]
    oracle: Oracle
    count: int = 12

    def expected(self, name: str | None, prompt: list[int]) -> list[int]:
        key = (name, tuple(prompt))
        if key not in self._cache:
            folder = None if name is None else self.adapters[name]
            self._cache[key] = self.oracle.greedy(folder, prompt, self.count)
        return self._cache[key]

    def __post_init__(self) -> None:
        self._cache: dict[Any, list[int]] = {}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp(request.param)
    tied = request.param == "llama"
    model = make_model(root / "model", request.param, seed=3, tie_word_embeddings=tied)
    adapters = {
        name: make_adapter(model, root / name, seed, **settings)
        for seed, (name, settings) in enumerate(ADAPTERS.items())
    }
    rng = random.Random(5)
    shared = [rng.randrange(3, 300) for _ in range(40)]
    prompts = [shared + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 20))] for _ in range(4)]
    prompts += [[rng.randrange(3, 300) for _ in range(rng.choice([1, 2, 15, 16, 17, 50]))] for _ in range(4)]
    return World(model, adapters, prompts, Oracle(model))


def mixed_requests(world: World) -> list[tuple[str | None, list[int]]]:
    """24 requests: base and every adapter, prompts shared and distinct."""
    names: list[str | None] = [None, *world.adapters]
    rng = random.Random(11)
    requests = [(names[i % len(names)], world.prompts[i % len(world.prompts)]) for i in range(16)]
    requests += [(names[i % len(names)], world.prompts[0]) for i in range(8)]
    rng.shuffle(requests)
    return requests


SETTINGS = {
    "default": {},
    "page1": {"cache": {"page_size": 1}},
    "page64": {"cache": {"page_size": 64}},
    "chunk7": {"scheduler": {"prefill_chunk": 7, "max_step_tokens": 40}},
    "chunk256": {"scheduler": {"prefill_chunk": 256}},
    "no-prefix-cache": {"cache": {"prefix_cache": False}},
    # Room for about two of the larger adapters: the rest is served by swapping.
    "swapping": {"lora": {"lora_memory": 256 * 1024}},
    "reference": {"kernels": "reference"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_answer_equals_peft_alone(world: World, setting: str) -> None:
    with Driver(engine_config(world.model, **SETTINGS[setting])) as driver:
        for name, folder in world.adapters.items():
            driver.load(name, folder)
        # Twice: the second round runs on a warm prefix cache, and after evictions where memory is short.
        for _ in range(2):
            requests = mixed_requests(world)
            ids = []
            for index, (name, prompt) in enumerate(requests):
                ids.append(driver.add(prompt, name, max_tokens=world.count))
                if index % 3 == 2:
                    driver.step()
            answers = driver.finish(*ids)
            for (name, prompt), tokens in zip(requests, answers, strict=True):
                assert tokens == world.expected(name, prompt), f"{name} on {len(prompt)} tokens"
            driver.assert_idle()
        stats = driver.stats
        if setting == "swapping":
            assert stats.adapter_evictions_total > 0
        if setting == "default":
            assert stats.cached_tokens_total > 0
            assert max(stats.step_adapters) >= 3
            assert stats.mixed_steps_total > 0
            assert all(stats.rows_total[kind] > 0 for kind in stats.rows_total), stats.rows_total
        if setting == "no-prefix-cache":
            assert stats.cached_tokens_total == 0


def test_retraction_loses_nothing(world: World) -> None:
    # Each token's KV takes 768 bytes here: there is room for 300 tokens, and twelve requests want about 100 each.
    small = {"kv_memory": 300 * 768, "page_size": 4}
    names = [None, "all8", "patterns"]
    prompts = [prompt[:20] for prompt in world.prompts]
    with Driver(engine_config(world.model, cache=small, scheduler={"prefill_chunk": 16})) as driver:
        for name in names[1:]:
            driver.load(name, world.adapters[name])  # type: ignore[arg-type, index]
        ids = [driver.add(prompts[i % 4], names[i % 3], max_tokens=90) for i in range(12)]
        for i, tokens in enumerate(driver.finish(*ids)):
            folder = None if names[i % 3] is None else world.adapters[names[i % 3]]  # type: ignore[index]
            assert tokens == world.oracle.greedy(folder, prompts[i % 4], 90), names[i % 3]
        assert driver.stats.retractions_total > 0
        driver.assert_idle()


def test_answers_hold_after_unload_and_reload(world: World) -> None:
    with Driver(engine_config(world.model)) as driver:
        for _ in range(3):
            for name in ("all8", "head", "embed"):
                driver.load(name, world.adapters[name])
                assert driver.ask(world.prompts[0], name) == world.expected(name, world.prompts[0])
            for name in ("all8", "head", "embed"):
                driver.drop(name)
        assert driver.stats.lora_bytes_used == 0
        assert driver.stats.host_lora_bytes_used == 0
        driver.assert_idle()


def test_no_cross_talk_through_a_warm_prefix_cache(world: World) -> None:
    prompt = world.prompts[0]
    with Driver(engine_config(world.model)) as driver:
        for name in ("all8", "rs16"):
            driver.load(name, world.adapters[name])
        blend = [("all8", 1.0), ("rs16", 1.0)]
        cold = {}
        with Driver(engine_config(world.model, cache={"prefix_cache": False})) as other:
            for name in ("all8", "rs16"):
                other.load(name, world.adapters[name])
            cold["blend"] = other.ask(prompt, blend)
        for lora in ("all8", "rs16", None, "all8", blend, "rs16", blend, None):
            expected = cold["blend"] if lora is blend else world.expected(lora, prompt)  # type: ignore[arg-type]
            assert driver.ask(prompt, lora) == expected, lora
        together = [driver.add(prompt, lora) for lora in ("all8", "all8")]
        assert driver.finish(*together) == [world.expected("all8", prompt)] * 2
        together = [driver.add(prompt) for _ in range(2)]
        assert driver.finish(*together) == [world.expected(None, prompt)] * 2
        together = [driver.add(prompt, "all8"), driver.add(prompt)]
        assert driver.finish(*together) == [world.expected("all8", prompt), world.expected(None, prompt)]


def test_scale_multiplies_the_adapters_own(world: World, tmp_path: Path) -> None:
    settings = ADAPTERS["all8"]
    doubled = make_adapter(world.model, tmp_path / "doubled", 1, **(settings | {"lora_alpha": 32}))
    prompt = world.prompts[1]
    with Driver(engine_config(world.model)) as driver:
        driver.load("all8", world.adapters["all8"])
        assert driver.ask(prompt, [("all8", 2.0)]) == world.oracle.greedy(doubled, prompt, world.count)
        assert driver.ask(prompt, [("all8", 0.0)]) == world.expected(None, prompt)
        assert driver.ask(prompt, [("all8", 0.5), ("all8", 0.5)]) == world.expected("all8", prompt)


def test_a_third_adapter_does_not_disturb_two_that_run(world: World) -> None:
    names = ("all8", "rs16", "patterns")
    with Driver(engine_config(world.model, lora={"lora_memory": 256 * 1024})) as driver:
        for name in names:
            driver.load(name, world.adapters[name])
        prompt = world.prompts[2]
        ids = [driver.add(prompt, name, max_tokens=world.count) for name in names[:2]]
        for _ in range(4):
            driver.step()
        ids.append(driver.add(prompt, names[2], max_tokens=world.count))
        for name, tokens in zip(names, driver.finish(*ids), strict=True):
            assert tokens == world.expected(name, prompt)
