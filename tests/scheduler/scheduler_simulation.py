"""A torch-free world for the scheduler: fakes of everything around it, random clients, and all rules checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scheduler_fakes import EOS, VOCAB, Clock, FakeAdapter, FakeGate, FakeModel, Launched, answer_alone

from loraserve.config import CacheConfig, SchedulerConfig
from loraserve.errors import ContextLengthExceeded, LoraserveError, Overloaded, RequestAborted
from loraserve.kvcache.manager import CacheManager
from loraserve.sampling import SamplingParams
from loraserve.scheduler.admission import GrowthReserve
from loraserve.scheduler.batch import ScheduleBatch
from loraserve.scheduler.interfaces import AdapterState
from loraserve.scheduler.request import AdapterUse, FinishReason, Request, RequestState, namespace_of
from loraserve.scheduler.scheduler import Scheduler


@dataclass
class Turn:
    """Who holds the turn, as seen from outside."""

    holders: list[Request] = field(default_factory=list)  # several if it may be any of them
    began: float = 0.0
    riders: int = 0  # admitted since, although the holder asked before them


@dataclass
class Seen:
    """What came out for one request."""

    tokens: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)


class World:
    """A scheduler with all that it needs, driven step by step, and everything checked on the way.

    With `overlap` every step is planned while the one before it is in flight, and the model computes a step only when
    its outcome is asked for.
    """

    def __init__(
        self,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        num_locations: int = 256,
        max_context: int = 96,
        room: int = 4,
        adapters: dict[str, FakeAdapter] | None = None,
        wait_limit_s: float = 0.5,
        step_s: float = 0.01,
        growth: GrowthReserve | None = None,
        gate_type: type[FakeGate] = FakeGate,
        overlap: bool = False,
    ) -> None:
        config = scheduler or SchedulerConfig(max_running=8, max_step_tokens=32, prefill_chunk=16)
        self.clock = Clock()
        self.cache = CacheManager(cache or CacheConfig(page_size=4), num_locations, config.max_running, max_context)
        self.gate = gate_type(room, adapters or {}, now=self.clock.now)
        self.scheduler = Scheduler(config, self.cache, self.gate, self.clock, wait_limit_s, growth)
        self.model = FakeModel(num_locations)
        self.config = config
        self.wait_limit_s = wait_limit_s
        self.step_s = step_s
        self.added: dict[str, Request] = {}
        self.seen: dict[str, Seen] = {}
        self.overlap = overlap
        self.flying: Launched | None = None
        self.batches: list[ScheduleBatch] = []
        self.turn = Turn()
        self.num_riders = 0  # of all turns
        self.most_sets = 0  # different sets of adapters that passed-over requests waited for at the same time
        self.longest_turn_s = 0.0
        self.longest_wait_s = 0.0  # from the first passing over to the admission
        self.logprob_positions: dict[str, list[int]] = {}  # prompt positions reported, for who wants prompt logprobs

    def request(self, name: str, prompt: list[int], *versions: str, max_tokens: int = 8, **more: object) -> Request:
        """A request that is not added yet. `params` fields and `Request` fields by name."""
        fields = {key: more.pop(key) for key in list(more) if key in SamplingParams.__dataclass_fields__}
        params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **fields})  # type: ignore[arg-type]
        starts = more.pop("starts", None) or [0] * len(versions)
        uses = tuple(AdapterUse(version, 1.0, start) for version, start in zip(versions, starts, strict=True))  # type: ignore[call-overload]
        salt = str(more.pop("salt", ""))
        return Request(
            name, prompt, params, uses, namespace_of(uses, salt), eos_ids=frozenset({EOS}), **more  # type: ignore[arg-type]
        )  # fmt: skip

    def add(self, *args: object, **more: object) -> Request:
        """Make a request and add it."""
        request = self.request(*args, **more)  # type: ignore[arg-type]
        self.submit(request)
        return request

    def submit(self, request: Request) -> None:
        """Add a request."""
        self.scheduler.add(request)
        self.added[request.id] = request
        self.seen[request.id] = Seen()

    def turn_holders(self) -> list[Request]:
        """Who must hold the turn now: the first passed over, by now too long ago; several if they tie."""
        late = []
        for request in self.scheduler.requests():
            if request.passed_over_at is None or self.clock.now - request.passed_over_at <= self.wait_limit_s:
                continue
            missing = [v for v in request.versions if self.gate.state(v) != AdapterState.RESIDENT]
            if missing and all(self.gate.state(v) == AdapterState.STAGED for v in missing):
                late.append(request)
        first = min((request.passed_over_at or 0.0 for request in late), default=0.0)
        return [request for request in late if request.passed_over_at == first]

    def follow_turn(self) -> Turn:
        """Whose turn it is in this step, and since when."""
        holders = self.turn_holders()
        if holders != self.turn.holders:
            self.turn = Turn(holders, self.clock.now)
        passed = (request for request in self.scheduler.requests() if request.passed_over_at is not None)
        self.most_sets = max(self.most_sets, len({frozenset(request.versions) for request in passed}))
        if holders:
            self.longest_turn_s = max(self.longest_turn_s, self.clock.now - self.turn.began)
        return self.turn

    def check_turn(self, request: Request, asked: dict[str, float], turn: Turn) -> None:
        """A request was admitted: its adapters were nobody else's turn, or it is one of the few that may ride."""
        holders = [holder for holder in turn.holders if holder.state == RequestState.WAITING]
        if not holders or not request.versions or any(
            set(request.versions) <= set(holder.versions) or asked.get(request.id, np.inf) <= asked[holder.id]
            for holder in holders
        ):  # fmt: skip
            return
        turn.riders += 1
        self.num_riders += 1
        if len(turn.holders) == 1:  # else one of them may have handed the turn to the next without being seen
            assert request.arrival < turn.began, f"{request.id} took the turn of {holders[0].id}"
            assert turn.riders <= self.config.max_running, f"too many rode in the turn of {holders[0].id}"

    def begin(self) -> ScheduleBatch | None:
        """Let time pass and get the next batch, with the rules of batches checked."""
        self.clock.now += self.step_s
        self.gate.advance(self.clock.now)
        turn = self.follow_turn()
        passed = {r.id: r.passed_over_at for r in self.scheduler.requests() if r.passed_over_at is not None}
        running = {request.id for request in self.scheduler.requests() if request.state == RequestState.RUNNING}
        asked = {r.id: r.wanted_at for r in self.scheduler.requests() if r.wanted_at is not None}
        ahead = self.flying is not None
        open_before = self.scheduler.requests()
        due = [r for r in open_before if r.row is not None and not r.has_prefill_left and not r.is_all_scheduled]
        retractions = self.scheduler.stats().retractions_total
        batch = self.scheduler.get_next_batch()
        assert not ahead or self.scheduler.stats().retractions_total == retractions, "pages taken from a step in flight"
        if batch is None:
            return None
        assert batch.is_ahead == ahead
        self.batches.append(batch)
        assert 0 < batch.num_tokens <= self.config.max_step_tokens
        assert [entry.is_decode for entry in batch.entries] == [i < batch.num_decode for i in range(len(batch.entries))]
        decoding = {r.id for r in self.scheduler.requests() if r.row is not None and not r.is_prefilling}
        if ahead:
            decoding = {r.id for r in due if not r.is_finished}
        assert {entry.request.id for entry in batch.entries[: batch.num_decode]} == decoding, "a decode row is left out"
        for entry in batch.entries:
            request = entry.request
            stop = min(entry.start + entry.num_new, request.num_prompt)
            self.logprob_positions.setdefault(request.id, []).extend(range(entry.prompt_logprobs_start, stop))
            assert entry.num_new <= self.config.prefill_chunk
            assert all(self.gate.adapters[v].leases > 0 for v in request.versions), "runs without its adapter"
            if request.id not in running:
                self.check_turn(request, asked, turn)
                wait = self.clock.now - passed.get(request.id, self.clock.now)
                self.longest_wait_s = max(self.longest_wait_s, wait)
        return batch

    def launch(self, batch: ScheduleBatch) -> Launched:
        """Send a batch to the device."""
        return self.model.launch(batch, self.cache.table)

    def finish(self, batch: ScheduleBatch | Launched, *, broken: bool = False) -> None:
        """Compute a batch and commit it."""
        launched = self.launch(batch) if isinstance(batch, ScheduleBatch) else batch
        for request in launched.worker.requests:
            adapters = [self.gate.adapters[v] for v in request.versions]
            assert all(a.leases > 0 and a.state == AdapterState.RESIDENT for a in adapters), "its adapter left early"
        tokens = self.model.run(launched, self.cache.table, broken=broken)
        if broken:
            self.scheduler.fail(launched.batch, LoraserveError("the forward broke"))
        else:
            self.scheduler.commit(launched.batch, tokens)

    def fly(self, batch: ScheduleBatch | None, *, broken: bool = False, wait: bool = False) -> None:
        """Launch a batch if there is one, then finish the one before it; this one as well if it should not `wait`."""
        earlier, self.flying = self.flying, None if batch is None else self.launch(batch)
        if earlier is not None:
            self.finish(earlier, broken=broken)
        if self.flying is not None and not wait:
            flying, self.flying = self.flying, None
            self.finish(flying, broken=broken and earlier is None)

    def step(self) -> ScheduleBatch | None:
        """One whole step."""
        batch = self.begin()
        self.fly(batch, wait=self.overlap)
        self.listen()
        return batch

    def listen(self) -> None:
        """Take events, and check that they tell the truth and in order."""
        for request, new_tokens, start, reason, error in self.scheduler.take_events():
            seen = self.seen[request.id]
            assert not seen.ends, f"{request.id} goes on after its end"
            assert start == len(seen.tokens)
            seen.tokens += new_tokens
            assert request.output[: len(seen.tokens)] == seen.tokens
            if reason is not None:
                seen.ends.append(reason)
                assert (error is not None) == (reason in (FinishReason.TIMEOUT, FinishReason.ERROR)) or error
                assert request.is_finished
                self.model.known.pop(request.id, None)

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), "requests are stuck"
        self.check_done()

    def until(self, reached: Callable[[], object], max_steps: int = 500) -> None:
        """Step until something is so."""
        for _ in range(max_steps):
            if reached():
                return
            self.step()
        raise AssertionError("it never came to that")

    def check_done(self) -> None:
        """Everything ended once, with the right answer, and nothing is held."""
        self.scheduler.check()
        assert self.gate.leases == 0
        assert not self.gate.wants
        assert self.cache.free_pages + self.cache.evictable_pages == self.cache.num_pages
        assert self.cache.free_rows == self.config.max_running
        for name, request in self.added.items():
            seen = self.seen[name]
            assert len(seen.ends) == 1, f"{name} has {len(seen.ends)} ends"
            assert seen.tokens == request.output
            alone = answer_alone(request, self.cache.max_context)
            if seen.ends[0] in (FinishReason.STOP, FinishReason.LENGTH):
                assert request.output == alone, f"{name} answers otherwise than alone"
                if request.params.prompt_logprobs is not None:
                    assert self.logprob_positions[name] == list(range(request.num_prompt))
                assert (seen.ends[0] == FinishReason.STOP) == (request.stop_token is not None)
            else:
                assert request.output == alone[: len(request.output)]


def random_request(rng: random.Random, world: World, name: str) -> Request:
    """Shared prefixes, few or many new tokens, base, one adapter or a blend of two."""
    prefixes = [[seed * 3 + i % 5 for i in range(length)] for seed, length in ((1, 24), (2, 9), (1, 40), (3, 0))]
    prompt = rng.choice(prefixes)[: rng.randint(0, 40)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
    versions = list(world.gate.adapters)
    weights = [1 / (i + 1) for i in range(len(versions))]
    chosen = rng.choices(versions, weights, k=rng.choice([0, 1, 1, 1, 2])) if versions else []
    distinct = list(dict.fromkeys(chosen))
    while sum(world.gate.adapters[v].size for v in distinct) > world.gate.room:  # refused before the scheduler sees it
        distinct.pop()
    own = random.Random(name)  # a third of the adapters begin in the middle of the prompt
    request = world.request(
        name,
        prompt,
        *distinct,
        max_tokens=rng.choice([0, 1, 3, 10, 70]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(3,) if rng.random() < 0.2 else (),
        prompt_logprobs=0 if rng.random() < 0.1 else None,
        salt=rng.choice(["", "", "", "tenant"]),
        starts=[own.choice([0, 0, own.randrange(len(prompt))]) for _ in distinct],
        tenant=rng.choice("abc"),
        priority=rng.choice([0, 0, 1, -1]),
        arrival=world.clock.now,
    )
    if rng.random() < 0.1:
        request.deadline = world.clock.now + rng.uniform(0.0, 2.0)
    return request


def simulate(world: World, seed: int, steps: int, *, load: float = 0.35, check_every: int = 25) -> None:
    """Random clients for `steps` steps, then everything that is left; `world` checks itself all the way."""
    rng = random.Random(seed)
    count = 0
    for step in range(steps):
        while rng.random() < load:
            request = random_request(rng, world, f"r{count}")
            count += 1
            try:
                world.submit(request)
            except (Overloaded, ContextLengthExceeded):
                assert request.order < 0
        batch = world.begin()
        open_ids = [r.id for r in world.scheduler.requests()]
        if open_ids and rng.random() < 0.03:
            world.scheduler.abort(rng.choice(open_ids), FinishReason.ABORT)
        if batch is not None and rng.random() < 0.03:
            victim = rng.choice(batch.entries).request
            world.scheduler.abort(victim.id, FinishReason.ABORT, RequestAborted("by the operator"))
            assert victim.row is not None, "gave its pages back while the step in flight writes them"
        if batch is not None and world.overlap and rng.random() < 0.005:
            world.scheduler.fail(batch, LoraserveError("the launch broke"))
            batch = None
        world.fly(batch, broken=rng.random() < 0.005, wait=world.overlap and rng.random() < 0.95)
        if rng.random() < 0.002 and world.gate.adapters:
            version = rng.choice(list(world.gate.adapters))
            world.scheduler.abort_version(version, RequestAborted("unloaded"))
            if not world.gate.adapters[version].leases:  # who leaves late still has cached pages of it
                world.scheduler.forget_version(version)
        for adapter in world.gate.adapters.values():  # a broken file is replaced now and then
            if adapter.state == AdapterState.FAILED and rng.random() < 0.02:
                adapter.state = AdapterState.ABSENT
        world.listen()
        if step % check_every == 0:
            world.scheduler.check()
    world.run()
    assert count > 0


def make_adapters(count: int) -> dict[str, FakeAdapter]:
    """Adapters of different sizes, some slow to fetch, one that never works."""
    return {f"v{i}": FakeAdapter(1 + i % 3, 0.3 if i % 4 == 3 else 0.02, broken=i == count - 1) for i in range(count)}
