"""Captured decode steps, with a stand-in for the GPU: a "graph" runs its computation again on the same arrays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver, engine_config
from pretend_cuda import DEVICE, EagerGraphs, PretendCuda
from tiny_models import ATTENTION, MLP, Oracle, make_adapter, make_model
from torch import Tensor

from loraserve.engine.graphs import DecodeGraphs, Flavour, _tables_of, ladder_of
from loraserve.kernels.metadata import Kind, LoraTables

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP},
    "wide": {"r": 33, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
    "ends": {"r": 3, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "dora": {"r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": ["v_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("graphs")
    make_model(root / "model", seed=3, tie_word_embeddings=False)
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        make_adapter(root / "model", root / name, seed, **settings)
    return root


def test_the_ladder_holds_every_size() -> None:
    for most in (1, 2, 3, 64, 65, 256, 300):
        ladder = ladder_of(most)
        assert ladder[-1] == most
        assert list(ladder) == sorted(set(ladder))
        assert ladder[0] == 1
    assert ladder_of(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def test_one_set_of_graphs_serves_every_mix(root: Path) -> None:
    oracle, device = Oracle(root / "model"), EagerGraphs()
    rng = random.Random(2)
    wanted = []
    for _ in range(3):
        names = [None, "all", "wide", "ends", "dora", "all", None]
        rng.shuffle(names)
        wanted.append([(name, [rng.randrange(3, 300) for _ in range(rng.randrange(1, 12))]) for name in names])
    expected = [[oracle.greedy(root / n if n else None, prompt, 8) for n, prompt in group] for group in wanted]
    config = engine_config(root / "model", kernels="reference", scheduler={"max_running": 5})
    with PretendCuda(), Driver(config, DEVICE, device) as driver:
        captured = len(ladder_of(5)) * len(Flavour)
        assert device.num_captures == captured
        for group, tokens in zip(wanted, expected, strict=True):
            for name in ADAPTERS:
                driver.load(name, root / name)
            ids = [driver.add(prompt, name, max_tokens=8) for name, prompt in group]
            driver.step()
            blend = driver.add(group[0][1], [("all", 0.5), ("dora", 0.5), ("ends", -1.0)], max_tokens=6)
            before = device.num_replays
            assert driver.finish(*ids) == tokens
            assert device.num_replays > before + 6
            mixed = driver.finish(blend)[0]
            for name in ADAPTERS:
                driver.drop(name)
            driver.assert_idle()
        assert device.num_captures == captured, "loading adapters must not make a graph invalid"
    with Driver(config) as plain:
        for name in ADAPTERS:
            plain.load(name, root / name)
        alone = plain.ask(wanted[-1][0][1], [("all", 0.5), ("dora", 0.5), ("ends", -1.0)], max_tokens=6)
    assert mixed == alone


def test_what_a_graph_cannot_hold_runs_without(root: Path) -> None:
    device = EagerGraphs()
    config = engine_config(root / "model", kernels="reference", scheduler={"max_running": 1})
    with PretendCuda(), Driver(config, DEVICE, device) as driver:
        for name in ADAPTERS:
            driver.load(name, root / name)
        copies = []
        for i in range(2):
            make_adapter(root / "model", root / f"more{i}", 9 + i, r=2, target_modules=["q_proj"])
            copies.append((f"more{i}", 1.0))
            driver.load(f"more{i}", root / f"more{i}")
        before = device.num_replays
        # Five adapters on one token are more than a captured step has room for.
        tokens = driver.ask([5, 6, 7], [("all", 0.5), ("wide", 0.5), ("dora", 0.1), *copies], max_tokens=4)
        assert device.num_replays == before
        assert len(tokens) == 4


class NoRoom(EagerGraphs):
    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise torch.OutOfMemoryError("no room for a graph")


def test_an_engine_that_cannot_capture_serves_all_the_same(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(root / "model", kernels="reference", scheduler={"max_running": 1})
    with PretendCuda(), Driver(config, DEVICE, NoRoom()) as driver:
        assert "run without graphs: no room" in caplog.text
        assert len(driver.ask([5, 6, 7], max_tokens=3)) == 3


def test_logprobs_come_from_the_replayed_logits(root: Path) -> None:
    config = engine_config(root / "model", kernels="reference", scheduler={"max_running": 1})
    answers = []
    for device in (EagerGraphs(), None):
        with PretendCuda(), Driver(config, DEVICE, device) as driver:
            driver.load("all", root / "all")
            request = driver.add([9, 8, 7], "all", logprobs=2, max_tokens=5)
            driver.finish(request)
            answers.append([out.logprobs[0].logprob for out in driver.answers[request].outputs if out.logprobs])
    assert len(answers[0]) == 5
    assert answers[0] == pytest.approx(answers[1], abs=1e-5)


@dataclass(slots=True)
class _NewTables(LoraTables):
    norms: dict[int, int] = field(default_factory=dict)


def test_adapters_with_unknown_tables_are_left_to_the_plain_path() -> None:
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs._tables = _NewTables()
    assert graphs._flavour([[(0, 1.0)], []]) is Flavour.LINEAR
    assert graphs._flavour([[(0, 1.0), (1, 1.0)]]) is Flavour.FULL
    assert graphs._flavour([[(i, 1.0) for i in range(5)]]) is None
    graphs._tables.affine_slots.add(3)
    assert graphs._flavour([[(3, 1.0)]]) is Flavour.FULL
    graphs._tables.norms[1] = 2
    assert graphs._flavour([[(0, 1.0)]]) is None


def test_replaced_tables_make_adapter_graphs_anew() -> None:
    device = EagerGraphs()
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs._tables, graphs._device, graphs._captured, graphs.num_captures = LoraTables(), device, {}, 0
    graphs._computation = lambda size, flavour: lambda: torch.zeros(1)  # type: ignore[method-assign]
    seen: Counter[Flavour] = Counter()
    for revision in (0, 0, 1, 1, 2):
        graphs._tables.revision = revision
        for flavour in Flavour:
            before = device.num_captures
            graphs._graph(4, flavour)
            seen[flavour] += device.num_captures - before
    assert seen == {Flavour.BASE: 1, Flavour.LINEAR: 3, Flavour.FULL: 3}


def test_a_linear_graph_sees_no_vocabulary_sized_kind() -> None:
    tables = LoraTables({Kind.Q: None, Kind.EMBED: None}, {1})  # type: ignore[dict-item]
    linear, full = _tables_of(tables, Flavour.LINEAR), _tables_of(tables, Flavour.FULL)
    assert linear is not None
    assert full is not None
    assert (set(linear.targets), linear.affine_slots) == ({Kind.Q}, set())
    assert set(full.targets) == {Kind.Q, Kind.EMBED}
    assert full.affine_slots
