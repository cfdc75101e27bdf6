"""The next step is launched before the outcome of this one is asked for; what goes wrong then stays where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver, engine_config
from pretend_cuda import DEVICE, PretendCuda
from safetensors.torch import load_file, save_file
from tiny_models import ATTENTION, MLP, Oracle, make_adapter, make_model

from loraserve.engine.in_flight import LaunchedStep, NextTokens, StepOutput
from loraserve.engine.static_step import StaticStep
from loraserve.kernels.transfer import to_device
from loraserve.scheduler.batch import ModelWorkerBatch, pending_id

PROMPT = [5, 9, 33, 120, 77, 201, 14]
OTHER = [8, 8, 30, 2]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("overlap")
    make_model(root / "model", seed=3)
    make_adapter(root / "model", root / "a", 1, r=4, lora_alpha=8, target_modules=ATTENTION + MLP)
    # Finite weights whose product overflows: the load is fine, the answer is not.
    huge = make_adapter(root / "model", root / "huge", 1, r=4, lora_alpha=8, target_modules=["o_proj"])
    file = huge / "adapter_model.safetensors"
    save_file({name: tensor * 1e25 for name, tensor in load_file(file).items()}, file)
    return root


@pytest.fixture(scope="module")
def oracle(root: Path) -> Oracle:
    return Oracle(root / "model")


@pytest.fixture
def driver(root: Path) -> Iterator[Driver]:
    config = engine_config(root / "model", kernels="reference", scheduler={"overlap_schedule": True})
    with Driver(config) as driver:
        driver.load("a", root / "a")
        yield driver
        driver.assert_idle()


class SlowDevice:
    """Stands before the runner; its steps are done when the loop waits for them, and it writes down when that is."""

    def __init__(self, driver: Driver) -> None:
        self._runner = driver.loop._runner
        self.events: list[str] = []
        self.launch_error: Exception | None = None
        self.wait_error: Exception | None = None
        scheduler = driver.loop._scheduler
        get_next_batch = scheduler.get_next_batch

        def scheduled() -> Any:
            batch = get_next_batch()
            self.events += [] if batch is None else ["schedule"]
            return batch

        scheduler.get_next_batch = scheduled  # type: ignore[method-assign]
        driver.loop._runner = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: ModelWorkerBatch) -> LaunchedStep:
        self.events.append("launch")
        if self.launch_error is not None:
            error, self.launch_error = self.launch_error, None
            raise error
        return SlowStep(self, self._runner.launch(batch))


class SlowStep:
    def __init__(self, device: SlowDevice, step: LaunchedStep) -> None:
        self._device, self._step, self.may_wait = device, step, step.may_wait

    def wait(self) -> StepOutput:
        self._device.events.append("wait")
        if self._device.wait_error is not None:
            error, self._device.wait_error = self._device.wait_error, None
            raise error
        return self._step.wait()


def test_the_next_step_is_launched_before_this_one_is_waited_for(driver: Driver, oracle: Oracle) -> None:
    device = SlowDevice(driver)
    assert driver.ask(PROMPT, max_tokens=4) == oracle.greedy(None, PROMPT, 4)
    first, then = ["schedule", "launch"], ["schedule", "launch", "wait"]
    # Four tokens are four steps: how many there will be is known in advance, so none is launched in vain.
    assert device.events == [*first, *then, *then, *then, "wait"]


def test_a_cpu_computes_one_step_at_a_time_unless_asked(root: Path) -> None:
    with Driver(engine_config(root / "model", kernels="reference")) as driver:
        device = SlowDevice(driver)
        driver.ask(PROMPT, max_tokens=3)
        assert device.events == ["schedule", "launch", "wait"] * 3


def test_a_gpu_overlaps_unless_told_not_to(root: Path) -> None:
    for told, events in ((None, ["launch", "launch", "wait", "wait"]), (False, ["launch", "wait"] * 2)):
        config = engine_config(root / "model", kernels="reference", scheduler={"overlap_schedule": told})
        with PretendCuda(), Driver(config, DEVICE) as driver:
            device = SlowDevice(driver)
            driver.ask(PROMPT, max_tokens=2)
            assert [event for event in device.events if event != "schedule"] == events


def test_a_decode_step_never_makes_the_host_wait_for_an_element(root: Path) -> None:
    config = engine_config(root / "model", kernels="reference", scheduler={"max_running": 4})
    with PretendCuda(), Driver(config, DEVICE) as driver:
        driver.load("a", root / "a")
        driver.loop._runner._watch = None
        ids = [driver.add(PROMPT, "a", max_tokens=8, temperature=1.0, top_p=0.9, seed=1), driver.add(OTHER, logprobs=2)]
        driver.run_until(lambda: all(driver.answers[name].tokens for name in ids))
        runner, batch = driver.loop._runner, driver.loop._scheduler.get_next_batch()
        assert batch is not None
        assert batch.is_ahead
        worker = batch.to_worker_batch()
        assert (worker.input_ids < 0).all()
        logits = torch.randn(2, 320).to(DEVICE)  # of the model itself: the reference kernels do read elements
        runner._logits = lambda *_: logits  # type: ignore[method-assign]
        before = PretendCuda.num_waits
        step = runner.launch(worker)
        assert PretendCuda.num_waits == before
        assert step.may_wait
        output = step.wait()
        assert PretendCuda.num_waits == before, "the output comes in one copy, not element by element"
        assert all(token is not None for token in output.tokens)
        assert [value is not None for value in output.logprobs] == [False, True]


# -- ends that nobody could foresee -----------------------------------------------------------------------------------


def start(driver: Driver, *names: str | None, **settings: Any) -> list[str]:
    """Requests that have at least two tokens and are in a step in flight."""
    ids = [driver.add(PROMPT, name, max_tokens=30, **settings) for name in names]
    driver.run_until(lambda: all(len(driver.answers[name].tokens) >= 2 for name in ids))
    flying = driver.loop._flying
    assert flying is not None
    assert {entry.request.id for entry in flying.batch.entries} >= set(ids)
    return ids


def test_a_stop_leaves_no_further_token_and_no_page(driver: Driver, oracle: Oracle) -> None:
    expected = oracle.greedy(None, PROMPT, 12)
    stop = next(token for i, token in enumerate(expected) if i > 2 and token not in expected[:i])
    at = expected.index(stop)
    request, other = driver.add(PROMPT, stop_token_ids=(stop,), max_tokens=30), driver.add(OTHER, "a", max_tokens=20)
    driver.finish(request)
    answer = driver.answers[request]
    assert (answer.tokens, answer.last.finish_reason) == (expected[: at + 1], "stop")
    flying = driver.loop._flying
    assert flying is not None
    late = [entry.request for entry in flying.batch.entries if entry.request.id == request]
    assert len(late) == 1
    assert late[0].row is not None, "its pages belong to it until the step in flight is over"
    driver.loop.check()
    driver.step()
    assert late[0].row is None
    driver.loop.check()
    # Nothing of the row that was computed in vain is taken for its continuation.
    again = driver.ask([*PROMPT, *expected[: at + 1]], max_tokens=6)
    assert again == oracle.greedy(None, [*PROMPT, *expected[: at + 1]], 6)
    driver.finish(other)


def test_an_adapter_stays_until_the_last_step_that_uses_it(driver: Driver) -> None:
    (request,) = start(driver, "a")
    version, answers = driver.versions["a"], list[Any]()
    driver.loop.drop_adapter(version, True, answers.append)
    leases = {status.version: status.leases for status in driver.loop.adapter_statuses()}
    assert leases == {version: 1}
    driver.run_until(lambda: bool(answers))
    assert driver.answers[request].last.finish_reason == "abort"
    assert driver.stats.lora_bytes_used == 0


def test_an_abort_in_flight_ends_at_once_and_alone(root: Path, driver: Driver, oracle: Oracle) -> None:
    aborted, other = start(driver, None, "a")
    count = len(driver.answers[aborted].tokens)
    assert driver.loop.abort(aborted)
    assert not driver.loop.abort(aborted)
    driver.step()
    assert driver.answers[aborted].last.finish_reason == "abort"
    assert len(driver.answers[aborted].tokens) == count
    assert driver.finish(other) == [oracle.greedy(root / "a", PROMPT, 30)]


def test_logits_that_are_not_finite_end_their_request_only(root: Path, driver: Driver, oracle: Oracle) -> None:
    driver.load("huge", root / "huge")
    good, bad, late = driver.add(PROMPT, "a"), driver.add(PROMPT, "huge", logprobs=1), driver.add(OTHER)
    driver.finish(good, bad, late)
    assert driver.answers[bad].last.error.code == "non_finite_logits"  # type: ignore[union-attr]
    assert driver.answers[bad].tokens == []
    assert driver.answers[good].tokens == oracle.greedy(root / "a", PROMPT, 12)
    assert driver.answers[late].tokens == oracle.greedy(None, OTHER, 12)


@pytest.mark.parametrize("overlap", [False, True])
def test_log_probabilities_of_a_prompt_that_are_no_numbers_end_their_request(root: Path, overlap: bool) -> None:
    """What scores a prompt samples nothing (or not yet), so that no step shows it otherwise."""
    config = engine_config(
        root / "model", kernels="reference", scheduler={"overlap_schedule": overlap, "prefill_chunk": 3}
    )
    with Driver(config) as driver:
        driver.load("huge", root / "huge")
        ids = [driver.add(PROMPT, "huge", max_tokens=count, prompt_logprobs=1) for count in (0, 5)]
        good = driver.add(PROMPT, max_tokens=0, prompt_logprobs=1)
        driver.finish(*ids, good)
        for name in ids:
            answer = driver.answers[name]
            assert answer.last.error is not None
            assert answer.last.error.code == "non_finite_logits"
            assert answer.tokens == []
            assert all(output.prompt_logprobs is None for output in answer.outputs)
        assert driver.answers[good].last.finish_reason == "length"
        assert len(driver.answers[good].last.prompt_logprobs or []) == len(PROMPT)
        driver.assert_idle()


def fail_launch(device: SlowDevice) -> None:
    device.launch_error = RuntimeError("the device fell over")


def fail_wait(device: SlowDevice) -> None:
    device.wait_error = RuntimeError("the device fell over")


@pytest.mark.parametrize("fail", [fail_launch, fail_wait])
def test_a_failed_step_ends_its_requests_and_nobody_else(
    driver: Driver, oracle: Oracle, fail: Callable[[SlowDevice], None]
) -> None:
    device = SlowDevice(driver)
    broken = start(driver, None, "a")
    fail(device)
    late = driver.add(OTHER)
    late_fails = fail is fail_launch  # it is in the step that is not launched, or else in the one behind what fails
    driver.finish(*broken, late)
    for name in broken:
        error = driver.answers[name].last.error
        assert error is not None
        assert error.code == "internal_error"
    assert (driver.answers[late].last.error is not None) == late_fails
    assert late_fails or driver.answers[late].tokens == oracle.greedy(None, OTHER, 12)
    # Nothing that the broken step may have written is reused.
    assert driver.ask(PROMPT, max_tokens=5) == oracle.greedy(None, PROMPT, 5)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_ids_are_filled_in_from_the_rows_and_broken_ones_stay_in_the_table() -> None:
    device = torch.device("cpu")
    tokens = NextTokens(4, device)
    tokens.put(torch.tensor([2, 0, 3]).numpy(), torch.tensor([70, -1, 71]))
    ids = torch.tensor([5, pending_id(3), pending_id(0), 9, pending_id(2)])
    view = ids[:4]
    tokens.fill_in(view)
    assert ids.tolist() == [5, 71, 0, 9, pending_id(2)]


def test_two_steps_can_be_on_their_way_to_the_static_arrays() -> None:
    locations = torch.zeros(3, 8, dtype=torch.int32)
    step = StaticStep(2, 1, locations, 2, 7, 8)
    batch = ModelWorkerBatch(
        **{name: torch.tensor([4]).numpy() for name in ("input_ids", "positions", "context_lens")},
        **{name: torch.tensor([1], dtype=torch.int32).numpy() for name in ("out_loc", "req_rows", "seq_lens")},
        q_indptr=torch.tensor([0, 1], dtype=torch.int32).numpy(),
        num_decode=1,
        adapters=[()],
        sample=torch.tensor([True]).numpy(),
        requests=[None],  # type: ignore[list-item]
    )
    sources = []
    for _ in range(3):
        step.fill(batch, 1, None)
        sources.append(step._staging[0].memory.data_ptr())
    assert sources[0] != sources[1]
    assert sources[0] == sources[2]
    assert step.input_ids(2).tolist() == [4, 0]


def test_arrays_for_a_cpu_are_not_copied() -> None:
    array = torch.arange(3).numpy()
    assert to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data
