"""The arrays that a worker gets, against a plain loop over sequences."""

import numpy as np
from scheduler_fakes import FakeAdapter
from scheduler_simulation import World

from loraserve.config import CacheConfig, SchedulerConfig


def test_arrays_of_a_mixed_step() -> None:
    world = World(
        cache=CacheConfig(page_size=4),
        scheduler=SchedulerConfig(max_running=4, max_step_tokens=16, prefill_chunk=6),
        room=9,
        adapters={"a": FakeAdapter(1, 0.0), "b": FakeAdapter(1, 0.0)},
    )
    world.add("base", [1, 2, 3])
    world.add("long", list(range(10, 30)), "a", "b")
    for _ in range(4):
        world.step()
    world.add("late", [40, 41], "b")
    for _ in range(2):
        batch = world.step()
    assert batch is None or batch.num_decode
    world.add("last", list(range(20)))
    batch = world.begin()
    assert batch is not None
    worker = batch.to_worker_batch()
    row = 0
    for i, entry in enumerate(batch.entries):
        request = entry.request
        tokens = request.prompt + request.output
        assert worker.q_indptr[i] == row
        assert worker.req_rows[i] == request.row
        assert worker.seq_lens[i] == entry.start + entry.num_new
        assert worker.adapters[i] == request.adapters
        assert worker.requests[i] is request
        assert worker.sample[i] == entry.samples
        for position in range(entry.start, entry.start + entry.num_new):
            assert worker.positions[row] == position
            assert worker.input_ids[row] == tokens[position]
            assert worker.out_loc[row] == world.cache.table[request.row, position]
            assert worker.context_lens[row] == max(len(request.prompt), position + 1)
            row += 1
    assert worker.q_indptr[-1] == row == batch.num_tokens == len(worker.out_loc)
    assert worker.num_decode == batch.num_decode == 3
    dtypes = [a.dtype for a in (worker.input_ids, worker.positions, worker.context_lens)]
    assert dtypes == [np.int64] * 3
    dtypes = [a.dtype for a in (worker.out_loc, worker.req_rows, worker.q_indptr, worker.seq_lens)]
    assert dtypes == [np.int32] * 4
    assert worker.sample.dtype == np.bool_
    assert batch.rows == (1, 1, 0, 2), "base prefill, base decode, adapter prefill, adapter decode"
    assert batch.num_adapters == 2


def test_only_the_last_chunk_is_sampled() -> None:
    world = World(scheduler=SchedulerConfig(max_running=2, max_step_tokens=8, prefill_chunk=5))
    world.add("r", list(range(12)), max_tokens=2)
    seen = []
    world.run()
    for batch in world.batches:
        seen += [(e.start, e.num_new, e.is_decode, e.samples) for e in batch.entries]
    assert seen == [(0, 5, False, False), (5, 5, False, False), (10, 2, False, True), (12, 1, True, True)]
