"""What one decode step costs, in counts that no machine's speed changes: a guard against slow code coming in unseen."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from engine_driver import Driver, engine_config
from tiny_models import ATTENTION, MLP, make_adapter, make_model
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS = 3
ADAPTERS = 4
VIEWS = {"detach", "lift_fresh", "view", "slice", "select", "alias"}  # nothing is computed or allocated


class Operators(TorchDispatchMode):
    """Counts the operators of torch that run, each of which allocates at most its result."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def python_calls() -> Iterator[Counter[str]]:
    """Counts calls of functions written in Python, by file."""
    counts: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counts[Path(frame.f_code.co_filename).name] += 1

    sys.setprofile(watch)
    try:
        yield counts
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    root = tmp_path_factory.mktemp("costs")
    model = make_model(root / "model", num_hidden_layers=LAYERS)
    for index in range(ADAPTERS):
        make_adapter(model, root / f"a{index}", seed=index, r=3 + index, lora_alpha=8, target_modules=ATTENTION + MLP)
    config = engine_config(model, kernels="cpu", scheduler={"max_running": 32})
    with Driver(config) as driver:
        for index in range(ADAPTERS):
            driver.load(f"a{index}", root / f"a{index}")
        driver.loop._runner._watch = None  # it copies every row of logits for tests
        yield driver


def decoding(driver: Driver, rows: int, adapters: int) -> list[str]:
    """Requests that all decode from the next step on."""
    ids = [
        driver.add([5 + row, 9, 31, 70 + row], f"a{row % adapters}" if adapters else None, max_tokens=40)
        for row in range(rows)
    ]
    driver.run_until(lambda: all(len(driver.answers[request].tokens) >= 2 for request in ids))
    return ids


def one_step(driver: Driver, rows: int, adapters: int) -> tuple[Counter[str], Counter[str]]:
    """Operators of torch and Python calls of one decode step."""
    ids = decoding(driver, rows, adapters)
    before = [len(driver.answers[request].tokens) for request in ids]
    with Operators() as operators:
        driver.loop.step()
    driver.loop.take_outputs()
    with python_calls() as calls:
        driver.loop.step()
    driver.loop.take_outputs()
    for request in ids:
        driver.loop.abort(request)
    driver.run_until(lambda: driver.stats.running == 0)
    assert all(len(driver.answers[request].tokens) == count for request, count in zip(ids, before, strict=True))
    return operators.counts, calls


@pytest.mark.parametrize("adapters", [0, ADAPTERS])
def test_one_product_for_each_fused_weight(driver: Driver, adapters: int) -> None:
    operators, calls = one_step(driver, 8, adapters)
    # The linear and its kernel: qkv, o, gate_up, down of every layer; the head.
    assert calls["cpu_linear.py"] == 2 * (4 * LAYERS + 1)
    assert not [name for name in operators if "linear" in name or name in ("mm", "addmm", "bmm")]


def test_adapters_cost_no_operators_of_torch(driver: Driver) -> None:
    base, mixed = one_step(driver, 8, 0)[0], one_step(driver, 8, ADAPTERS)[0]
    assert (mixed - base).total() <= 2, mixed - base


@pytest.mark.parametrize("adapters", [0, ADAPTERS])
def test_no_operator_of_torch_is_run_row_by_row(driver: Driver, adapters: int) -> None:
    few, many = one_step(driver, 4, adapters)[0], one_step(driver, 24, adapters)[0]
    assert few == many
    assert few.total() <= 9 * LAYERS + 16, few


@pytest.mark.parametrize("adapters", [0, ADAPTERS])
def test_python_calls_for_a_row_are_few(driver: Driver, adapters: int) -> None:
    few, many = one_step(driver, 4, adapters)[1], one_step(driver, 24, adapters)[1]
    assert (many.total() - few.total()) / 20 <= 45, (many - few).most_common(8)
    # Kernels take whole steps: nothing in these rooms is called more often for more rows.
    for file in ("decoder.py", "layers.py", "cpu_backend.py", "cpu_linear.py", "cpu_attention_plan.py"):
        assert many[file] == few[file], file


def test_only_the_last_token_of_a_prompt_goes_through_the_head(driver: Driver) -> None:
    rows: list[int] = []
    head = driver.loop._runner._decoder.weights.lm_head

    class Watched:
        in_features, out_features = head.in_features, head.out_features

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            rows.append(len(x))
            return head(x)

    weights = driver.loop._runner._decoder.weights
    object.__setattr__(weights, "lm_head", Watched())
    try:
        driver.ask(list(range(5, 45)), max_tokens=1)
    finally:
        object.__setattr__(weights, "lm_head", head)
    assert rows == [1]


@pytest.mark.parametrize("rank", [3, 6])
def test_memory_follows_the_rank(driver: Driver, rank: int) -> None:
    """Bytes on the device are the rank rows of A and B alone, rounded up to pages of eight rows."""
    driver.ask([5, 6], f"a{rank - 3}", max_tokens=1)
    version = driver.versions[f"a{rank - 3}"]
    status = next(each for each in driver.loop.adapter_statuses() if each.version == version)
    assert status.residency == "device"
    shape = driver.loop._runner._decoder.shape
    exact = sum(
        4 * rank * (target.in_features + target.out_features) * target.num_layers
        for target in shape.lora_targets()
        if str(target.kind) not in ("embed", "lm_head")
    )
    pages = exact * 8 / rank
    assert status.device_bytes <= 1.05 * pages
