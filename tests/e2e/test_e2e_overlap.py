"""Steps launched before the tokens of the step before them are known: every answer is what it is one step at a time."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver, engine_config
from pretend_cuda import DEVICE, EagerGraphs, PretendCuda
from tiny_models import ATTENTION, MLP, make_adapter, make_model
from variants import INVOCATION, VOCAB, make_variant

from loraserve.compat import StrEnum

PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
KV_OF_A_TOKEN = 3 * 2 * 2 * 16 * 4  # bytes, of the tiny model
COUNTED = ("ahead", "wasted", "retractions", "evictions", "aborts", "stops", "cached")


class Place(StrEnum):
    """Where the engine computes."""

    CPU = "cpu"  # where overlapping is asked for
    CUDA = "cuda"  # pretended, with captured decode steps


@dataclass
class Ask:
    """One request of a mix."""

    prompt: list[int]
    lora: Any
    settings: dict[str, Any]
    at_step: int
    abort_after: int | None = None  # tokens


@dataclass
class World:
    """A model, its adapters, and answers of the serial engine."""

    root: Path
    model: Path
    adapters: dict[str, Path] = field(default_factory=dict)

    def driver(self, place: Place, *, overlap: bool, small: bool) -> Driver:
        config = engine_config(
            self.model,
            kernels="reference",
            cache={"page_size": 4, "kv_memory": (100 if small else 8000) * KV_OF_A_TOKEN},
            lora={"lora_memory": 220 * 1024 if small else 16 * 2**20, "lora_page_rows": 4},
            scheduler={"max_running": 6, "prefill_chunk": 7, "overlap_schedule": overlap},
        )
        graphs = EagerGraphs() if place is Place.CUDA and overlap else None
        driver = Driver(config, DEVICE if place is Place.CUDA else None, graphs)
        for name, folder in self.adapters.items():
            driver.load(name, folder)
        return driver


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("overlap")
    model = make_model(root / "model", family="llama", seed=11, tie_word_embeddings=False)
    world = World(root, model)
    everything = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP}
    for seed, name in enumerate(("a", "b", "c")):
        world.adapters[name] = make_adapter(model, root / name, seed, **everything)
    world.adapters["later"] = make_variant(model, root / "later", 4, alora_invocation_tokens=INVOCATION, **everything)
    # It generates tokens beyond the base's vocabulary, and its embeddings are looked up on the host.
    both = {"modules_to_save": ["embed_tokens", "lm_head"]}
    world.adapters["wider"] = make_variant(model, root / "wider", 5, new_tokens=5, **PLAIN, **both)
    return world


def random_mix(seed: int, count: int) -> list[Ask]:
    """Requests of all kinds, some with a common beginning, that come one by one."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(21)]
    asks, step = [], 0
    for i in range(count):
        prompt = shared[: rng.choice((0, 0, 9, 21))] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 14))]
        lora = rng.choice([None, "a", "a", "b", "c", "later", "wider", [("a", 0.5), ("b", -0.5)]])
        if lora == "later":
            prompt += [*INVOCATION, 9]
        settings: dict[str, Any] = {"max_tokens": rng.choice((0, 1, 2, 9, 24, 60)), "ignore_eos": rng.random() < 0.5}
        if rng.random() < 0.5:
            settings |= {"temperature": 1.3, "top_k": 60, "seed": seed * 100 + i}
        settings["stop_token_ids"] = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 8, 60))))
        if rng.random() < 0.3:
            settings["logprobs"] = rng.choice((0, 2))
        if rng.random() < 0.15:
            settings["prompt_logprobs"] = 1
        asks.append(Ask(prompt, lora, settings, step, rng.choice((0, 3)) if rng.random() < 0.15 else None))
        step += rng.choice((0, 0, 1, 3))
    return asks


def run(driver: Driver, asks: list[Ask], counts: Counter[str]) -> list[str]:
    """Let the requests come and go; checks pools and leases on the way, and that nothing is left."""
    waiting, ids, aborting = list(asks), [], dict[str, int]()
    for step in range(3000):
        while waiting and waiting[0].at_step <= step:
            ask = waiting.pop(0)
            ids.append(driver.add(ask.prompt, ask.lora, **ask.settings))
            if ask.abort_after is not None:
                aborting[ids[-1]] = ask.abort_after
        worked = driver.step()
        flying = driver.loop._flying
        if flying is not None:
            counts["ahead"] += flying.batch.is_ahead
            counts["wasted"] += sum(entry.request.is_finished for entry in flying.batch.entries)
        for name in [name for name, count in aborting.items() if len(driver.answers[name].tokens) >= count]:
            del aborting[name]
            counts["aborts"] += driver.loop.abort(name)
        if step % 5 == 0:
            driver.loop.check()
        if not worked and not waiting and all(driver.answers[name].finished for name in ids):
            break
    driver.assert_idle()
    counts["stops"] += sum(driver.answers[name].last.finish_reason == "stop" for name in ids)
    counts["cached"] += sum(driver.answers[name].last.cached_tokens > 0 for name in ids)
    return ids


def logprobs_of(driver: Driver, name: str) -> tuple[list[int], list[float]]:
    """Tokens and all values of prompt and answer; the alternatives' ids are left out, for near ties may turn."""
    found = [v for out in driver.answers[name].outputs for v in (*(out.prompt_logprobs or []), *(out.logprobs or []))]
    values = [value for value in found if value is not None]
    return [v.token for v in values], [x for v in values for x in (v.logprob, *(logprob for _, logprob in v.top))]


@pytest.mark.parametrize("place", Place)
def test_any_mix_answers_as_one_step_at_a_time(world: World, place: Place) -> None:
    seeds, count = (range(8), 20) if place is Place.CPU else (range(1), 10)
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        if place is Place.CUDA:
            stack.enter_context(PretendCuda())
        plain = stack.enter_context(world.driver(place, overlap=False, small=False))
        ahead = stack.enter_context(world.driver(place, overlap=True, small=True))
        for seed in seeds:
            asks = random_mix(seed, count)
            ids = run(ahead, asks, counts)
            alone = run(plain, [Ask(ask.prompt, ask.lora, ask.settings, 0) for ask in asks], Counter())
            for ask, name, reference in zip(asks, ids, alone, strict=True):
                answer, expected = ahead.answers[name], plain.answers[reference]
                if answer.last.finish_reason == "abort":
                    assert ask.abort_after is not None
                    assert answer.tokens == expected.tokens[: len(answer.tokens)]
                    continue
                assert answer.tokens == expected.tokens, (seed, ask)
                assert answer.last.finish_reason == expected.last.finish_reason, (seed, ask)
                (tokens, values), (same, close) = logprobs_of(ahead, name), logprobs_of(plain, reference)
                assert tokens == same
                assert values == pytest.approx(close, abs=1e-3), (seed, ask)
        assert plain.loop._flying is None
        stats = ahead.stats
        counts["retractions"], counts["evictions"] = stats.retractions_total, stats.adapter_evictions_total
    missing = [name for name in COUNTED if counts[name] <= 2]
    assert not missing or place is Place.CUDA, f"the mixes were meant to have {missing}: {counts}"
    assert counts["ahead"] > 20
