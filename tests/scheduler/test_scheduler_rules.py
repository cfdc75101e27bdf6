"""One test for each rule of the step: budgets, finishing, aborting, retraction, reuse."""

from __future__ import annotations

import pytest
from scheduler_fakes import EOS
from scheduler_simulation import World

from loraserve.config import CacheConfig, SchedulerConfig
from loraserve.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    LoraserveError,
    Overloaded,
    RequestAborted,
    RequestTimedOut,
)
from loraserve.scheduler.admission import GrowthReserve
from loraserve.scheduler.request import FinishReason, Request, RequestState
from loraserve.scheduler.stats import Refusal


def small(**fields: object) -> SchedulerConfig:
    return SchedulerConfig(**{"max_running": 4, "max_step_tokens": 16, "prefill_chunk": 8, **fields})  # type: ignore[arg-type]


def reasons(world: World) -> dict[str, Refusal]:
    return {why.request_id: why.reason for why in world.scheduler.explain_waiting()}


# -- intake -----------------------------------------------------------------------------------------------------------


def test_what_can_never_run_is_refused_with_numbers() -> None:
    world = World(num_locations=32, max_context=64)
    with pytest.raises(ContextLengthExceeded, match="64 tokens; the context holds 64"):
        world.add("r", [1] * 64, max_tokens=1)
    with pytest.raises(ContextLengthExceeded, match=r"20 tokens and max_tokens is 14.* 33 tokens of KV cache.* 32"):
        world.add("r", [1] * 20, max_tokens=14)
    world.add("fits", [1] * 20, max_tokens=13)  # the last token needs no KV
    world.add("whole", [1] * 32, max_tokens=0)
    with pytest.raises(ContextLengthExceeded):
        world.add("r", [1] * 33, max_tokens=0)
    with pytest.raises(InvalidRequest, match="no tokens"):
        world.add("r", [])
    world.run()


def test_ids_are_unique_among_the_unfinished() -> None:
    world = World()
    request = world.add("r", [1])
    with pytest.raises(InvalidRequest, match="added before"):
        world.scheduler.add(world.request("r", [2]))
    world.run()
    with pytest.raises(InvalidRequest, match="added before"):
        world.scheduler.add(request)
    world.scheduler.add(world.request("r", [2]))
    assert world.scheduler.has_work()


def test_a_full_queue_refuses() -> None:
    world = World(scheduler=small(max_waiting=2))
    world.add("a", [1])
    world.add("b", [1])
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        world.add("c", [1])
    world.step()
    world.add("c", [1])
    world.run()


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_step_takes_all_decode_rows_and_fills_up_with_chunks() -> None:
    world = World(scheduler=small())
    world.add("a", [1, 2], max_tokens=20)
    world.add("b", [3, 4], max_tokens=20)
    world.step()
    world.add("c", list(range(30)), max_tokens=4)
    world.add("d", list(range(30, 60)), max_tokens=4)
    shapes = []
    for _ in range(4):
        batch = world.step()
        assert batch is not None
        shapes.append([(e.request.id, e.num_new) for e in batch.entries])
    decode = [("a", 1), ("b", 1)]
    assert shapes == [
        [*decode, ("c", 8), ("d", 6)],
        [*decode, ("c", 8), ("d", 6)],
        [*decode, ("c", 8), ("d", 6)],
        [*decode, ("c", 6), ("d", 8)],
    ]
    world.run()


def test_rows_and_step_tokens_are_reasons() -> None:
    world = World(scheduler=small(max_running=2))
    for name in "abc":
        world.add(name, [1, 2, 3])
    world.step()
    assert reasons(world) == {"c": Refusal.REQUEST_ROWS}
    world.add("d", [1])
    assert reasons(world) == {"c": Refusal.REQUEST_ROWS, "d": Refusal.QUEUED}
    stats = world.scheduler.stats()
    assert (stats.waiting, stats.running) == (2, 2)
    assert {(str(reason), times) for reason, times in stats.waiting_reasons} == {("request_rows", 1), ("queued", 1)}
    world.run()
    world = World(scheduler=small())
    for name in "abc":
        world.add(name, list(range(40)))
    world.step()
    assert reasons(world) == {"c": Refusal.STEP_TOKENS}
    world.run()


def test_never_more_rows_than_tokens_in_a_step() -> None:
    world = World(scheduler=small(max_running=64, max_step_tokens=3), num_locations=512)
    for i in range(10):
        world.add(f"r{i}", [i, i], max_tokens=6)
    world.run()
    assert max(len(batch.entries) for batch in world.batches) == 3


def test_kv_blocks_strictly_in_order() -> None:
    world = World(num_locations=64, scheduler=small())
    world.add("a", [1] * 30, max_tokens=20)
    world.step()
    world.add("big", [2] * 40, max_tokens=4)
    world.add("tiny", [3], max_tokens=1)
    world.step()
    assert reasons(world) == {"big": Refusal.KV_PAGES, "tiny": Refusal.QUEUED}
    world.run()
    ends = [request.id for batch in world.batches for request in [e.request for e in batch.entries if not e.is_decode]]
    assert ends.index("big") < ends.index("tiny")


def test_admission_gets_the_pages_of_the_whole_prefill_at_once() -> None:
    world = World(num_locations=128, scheduler=small(prefill_chunk=4))
    a = world.add("a", list(range(40)), max_tokens=2)
    world.step()
    assert a.num_computed == 4
    assert world.cache.free_pages == 32 - 10
    world.run()


def test_growth_of_running_requests_is_held_back() -> None:
    world = World(num_locations=48, scheduler=small(), growth=GrowthReserve(16, 16))
    world.add("a", [1, 2, 3, 4], max_tokens=30)
    world.step()
    world.add("b", [5] * 24, max_tokens=2)
    world.step()
    assert reasons(world) == {"b": Refusal.KV_PAGES}, "its 6 pages would fit now, but soon both need more"
    assert world.cache.free_pages > 6
    world.run()
    assert world.scheduler.stats().retractions_total == 0


# -- finishing --------------------------------------------------------------------------------------------------------


def run_one(**fields: object) -> Request:
    world = World(max_context=40)
    request = world.add("r", [1, 2, 3], **fields)
    world.run()
    return request


def test_finish_by_length_stop_and_context() -> None:
    plain = run_one(max_tokens=30)
    assert (plain.finish_reason, len(plain.output)) == (FinishReason.LENGTH, 30)
    assert run_one(max_tokens=500).num_tokens == 40, "the context ends it"
    assert EOS in plain.output, "the test needs an answer with an EOS in it"
    stopped = run_one(max_tokens=30, ignore_eos=False)
    assert stopped.output == plain.output[: plain.output.index(EOS) + 1]
    assert (stopped.finish_reason, stopped.stop_token) == (FinishReason.STOP, EOS)
    third = plain.output[2]
    by_id = run_one(max_tokens=30, stop_token_ids=(third,))
    assert by_id.output == plain.output[: plain.output.index(third) + 1]
    assert (by_id.finish_reason, by_id.stop_token) == (FinishReason.STOP, third)
    last = run_one(max_tokens=3, stop_token_ids=(third,))
    assert last.finish_reason == FinishReason.STOP, "a stop token on the last place is still a stop"


def test_no_tokens_asked_ends_after_the_prefill() -> None:
    world = World(scheduler=small())
    request = world.add("r", list(range(20)), max_tokens=0, prompt_logprobs=0)
    world.run()
    assert (request.finish_reason, request.output) == (FinishReason.LENGTH, [])
    assert not any(entry.samples for batch in world.batches for entry in batch.entries)
    assert world.cache.evictable_pages == 5


def test_deadlines_end_waiting_and_running_requests() -> None:
    world = World(scheduler=small(max_running=1, request_timeout_s=5.0))
    running = world.add("a", [1], max_tokens=90, deadline=world.clock.now + 0.055)
    waiting = world.add("b", [1], deadline=world.clock.now + 0.035)
    late = world.add("c", [1], max_tokens=2)
    assert late.deadline == late.arrival + 5.0
    world.run()
    for request in (running, waiting):
        assert request.finish_reason == FinishReason.TIMEOUT
        assert isinstance(request.error, RequestTimedOut)
    assert (len(running.output), len(waiting.output), len(late.output)) == (5, 0, 2)


def test_aborts_in_every_state() -> None:
    world = World(scheduler=small(max_running=2))
    decoding, prefilling, waiting = (world.add(name, [7] * n) for name, n in (("d", 2), ("p", 20), ("w", 2)))
    world.step()
    states = [(r.state, r.is_prefilling) for r in (decoding, prefilling, waiting)]
    assert states == [(RequestState.RUNNING, False), (RequestState.RUNNING, True), (RequestState.WAITING, True)]
    for request in (decoding, prefilling, waiting):
        assert world.scheduler.abort(request.id, FinishReason.ABORT)
        assert request.is_finished
        assert not world.scheduler.abort(request.id, FinishReason.ABORT)
    assert not world.scheduler.abort("nobody", FinishReason.ABORT)
    assert world.cache.free_rows == 2
    world.run()


def test_an_abort_in_flight_keeps_its_pages_until_the_commit() -> None:
    world = World()
    request = world.add("r", [1, 2, 3, 4, 5])
    other = world.add("s", [9, 9, 9])
    batch = world.begin()
    assert batch is not None
    error = RequestAborted("stop it")
    assert world.scheduler.abort("r", FinishReason.ABORT, error)
    assert not world.scheduler.abort("r", FinishReason.ABORT), "once is enough"
    assert (request.finish_reason, request.error, request.output) == (FinishReason.ABORT, error, [])
    assert request.row is not None
    world.scheduler.check()
    world.finish(batch)
    assert request.row is None
    world.listen()
    assert len(other.output) == 1
    world.run()


def test_batches_are_committed_in_their_order() -> None:
    world = World()
    assert world.scheduler.get_next_batch() is None
    request = world.add("r", [1, 2])
    batch = world.begin()
    assert batch is not None
    world.flying = world.launch(batch)
    ahead = world.begin()
    assert ahead is not None
    assert (ahead.is_ahead, ahead.entries[0].start) == (True, 2)
    with pytest.raises(RuntimeError, match="in flight"):
        world.scheduler.get_next_batch()
    with pytest.raises(ValueError, match="oldest"):
        world.scheduler.commit(ahead, [1])
    for tokens in ([], [None], [1, 2]):
        with pytest.raises(ValueError, match="token"):
            world.scheduler.commit(batch, tokens)
    assert (request.num_computed, request.num_scheduled) == (0, 3)
    world.fly(ahead)
    for other in (batch, ahead):
        with pytest.raises(ValueError, match="not in flight"):
            world.scheduler.commit(other, [1])
        with pytest.raises(ValueError, match="not in flight"):
            world.scheduler.fail(other, LoraserveError("late"))
    assert request.num_computed == request.num_scheduled == 3
    world.listen()
    world.run()


@pytest.mark.parametrize("way", ["fail", "abort"])
def test_a_broken_step_ends_its_requests_and_poisons_nothing(way: str) -> None:
    world = World(scheduler=small(max_running=2))
    broken = [world.add(name, [*range(9), i]) for i, name in enumerate("ab")]
    later = world.add("c", [*range(9), 5])
    world.step()
    batch = world.begin()
    assert batch is not None
    error = LoraserveError("the forward broke")
    if way == "fail":
        world.finish(batch, broken=True)
    else:
        world.model.forward(batch, world.cache.table, broken=True)
        for entry in batch.entries:
            world.scheduler.abort(entry.request.id, FinishReason.ERROR, error)
        world.scheduler.commit(batch, [None] * len(batch.entries))
    assert all(r.finish_reason == FinishReason.ERROR and r.error is not None for r in broken)
    assert world.cache.evictable_pages == 0, "KV that may be garbage must not be reused"
    world.listen()
    world.run()
    assert later.finish_reason == FinishReason.LENGTH


# -- reuse ------------------------------------------------------------------------------------------------------------


def test_prefixes_are_shared_as_soon_as_the_prefill_is_done() -> None:
    world = World(scheduler=small(max_step_tokens=64, prefill_chunk=64))
    first = world.add("a", list(range(20)), max_tokens=10)
    world.step()
    second = world.add("b", [*range(18), 77, 78], max_tokens=10)
    same = world.add("c", list(range(20)), max_tokens=10)
    other = world.add("d", list(range(20)), max_tokens=10, salt="tenant")
    world.step()
    assert not first.is_finished
    assert [r.num_cached for r in (first, second, same, other)] == [0, 16, 16, 0]
    assert same.num_computed == 20
    world.run()
    stats = world.scheduler.stats()
    assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (80, 32)


def test_concurrent_equal_prompts_end_with_one_copy() -> None:
    world = World(scheduler=small(max_step_tokens=64, prefill_chunk=64), num_locations=96)
    for name in "abc":
        world.add(name, list(range(16)), max_tokens=4)
    world.step()
    assert world.cache.num_pages - world.cache.free_pages == 4
    world.run()


def test_without_the_prefix_cache_nothing_stays() -> None:
    world = World(cache=CacheConfig(page_size=4, prefix_cache=False))
    for name in "ab":
        world.add(name, list(range(16)))
        world.run()
    assert world.cache.free_pages == world.cache.num_pages
    assert world.scheduler.stats().cached_tokens_total == 0


def test_prompt_logprobs_see_every_prompt_position_once() -> None:
    world = World(scheduler=small(max_running=2), num_locations=64, growth=GrowthReserve(1, 1))
    prompt = list(range(24))
    world.add("warm", prompt, max_tokens=1)
    world.run()
    assert world.cache.lookup("|", world.request("x", prompt).prompt_ids) == 24
    old = world.add("old", [50] * 8, max_tokens=32)
    request = world.add("r", prompt, prompt_logprobs=1, max_tokens=24)
    world.run()
    assert request.num_retractions > 0, "the test needs a retraction"
    assert old.num_retractions == 0
    assert request.num_cached == 0
    assert world.logprob_positions["r"] == list(range(24))


def test_a_prefill_retracted_half_way_reports_each_position_once() -> None:
    world = World(scheduler=small(max_running=2, prefill_chunk=4), num_locations=48, growth=GrowthReserve(0, 0))
    world.add("old", [50] * 7, max_tokens=40)
    request = world.add("r", list(range(36)), prompt_logprobs=1, max_tokens=2)
    world.until(lambda: request.num_retractions)
    assert 0 < request.prompt_logprobs_done < 36
    world.run()
    assert world.logprob_positions["r"] == list(range(36))
