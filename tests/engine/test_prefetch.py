"""KV copied ahead of its turn: seen by nobody before it is used, and given up at any time."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from threading import Event

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.knobs import RuntimeConfig
from engine.kv.allocator import PagedAllocator
from engine.kv.pool import KVPool
from engine.kv.prefetch import SLACK_S, Prefetch
from engine.kv.tier import BLOCK_TOKENS, HostTier
from engine.models.llama import Llama
from engine.pause import Pause
from engine.sched.request import Finish, Request
from engine.sched.scheduler import Plan
from tests.engine.conftest import Bench, bench, conserved, request
from tests.engine.test_barrier import Served
from tests.engine.test_tier import PLENTY, asked, long

AHEAD = RuntimeConfig(preemption="swap", prefetch_depth_tokens=512)
OPERATIONS = 3_000
POOL_TOKENS = 96
SIZES = (4, 8, 12)
KEPT_MAX = 6
LONG_STEP_S = 1e6


@contextmanager
def held_up(ahead: Prefetch) -> Iterator[None]:
    """Its thread: no copy begins meanwhile."""
    go_on = Event()
    ahead._thread.submit(go_on.wait)
    try:
        yield
    finally:
        go_on.set()


class Model:
    """Sequences that wait, others that take blocks and fill them, and what each must find again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.cut(8)
        self.tier = HostTier(
            lambda: self.pool, 20 * BLOCK_TOKENS * 48, layers=3, kv_heads=1, head_dim=2,
            dtype=torch.float32,
        )  # fmt: skip
        self.tier.ahead.timed(LONG_STEP_S)
        self.kept: dict[str, torch.Tensor] = {}  # (layers, keys and values, tokens, head_dim)
        self.first: dict[str, int] = {}
        self.number = 0
        self.found = 0

    def cut(self, size: int) -> None:
        blocks = POOL_TOKENS // size
        self.pool = KVPool(layers=3, kv_heads=1, head_dim=2, blocks=blocks, block_size=size)
        self.allocator = PagedAllocator(blocks)
        self.others: list[list[int]] = []

    def step(self) -> None:
        ways: dict[Callable[[], None], float] = {
            self.put: 12, self.begin: 30, self.allocate: 15, self.release: 15, self.take: 12,
            self.cancel: 2, self.withhold: 1, self.recut: 1, self.roll_back: 1,
        }  # fmt: skip
        self.rng.choices([*ways], [*ways.values()])[0]()
        allocator, ahead, size = self.allocator, self.tier.ahead, self.pool.block_size
        assert allocator.allocated_blocks == sum(map(len, self.others))
        assert allocator.cached_blocks == len(ahead.blocks)
        assert allocator.available_blocks == allocator.blocks - allocator.allocated_blocks
        assert ahead.begun == ahead.used + ahead.rolled_back + ahead.tokens
        kept = sum(-(-each.size(2) // BLOCK_TOKENS) for each in self.kept.values())
        assert self.tier.allocator.allocated_blocks == kept
        if ahead.blocks:
            assert isinstance(ahead.who, str)
            assert 0 < ahead.tokens <= len(ahead.blocks) * size
            there = self.read(self.slots(ahead.blocks, ahead.tokens))
            whole = self.kept[ahead.who]
            assert torch.equal(there, whole[:, :, ahead.first : ahead.first + ahead.tokens])

    def slots(self, blocks: list[int], tokens: int) -> torch.Tensor:
        size, position = self.pool.block_size, np.arange(tokens)
        return torch.from_numpy(
            np.array(blocks, np.int64)[position // size] * size + position % size
        )

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.cat(self.pool.read(layer, slots)) for layer in range(3)])

    def fill(self, blocks: list[int], tokens: int) -> torch.Tensor:
        """Random KV in the first slots of these: what is there now."""
        slots = self.slots(blocks, tokens)
        size = self.pool.block_size
        for layer in range(3):
            key, value = torch.randn(2, tokens, 1, 2, generator=self.torch)
            self.pool.store(layer, slots // size, slots % size, key, value)
        return self.read(slots)

    def put(self) -> None:
        tokens = self.rng.randrange(1, 60)
        blocks = self.allocator.allocate(-(-tokens // self.pool.block_size))
        if len(self.kept) >= KEPT_MAX or blocks is None:
            self.allocator.release(blocks or [])
            return
        who, self.number = f"sequence {self.number}", self.number + 1
        content = self.fill(blocks, tokens)
        if self.tier.put(who, self.slots(blocks, tokens).numpy()):
            self.kept[who] = content
            self.first[who] = 0
        self.allocator.release(blocks)

    def begin(self) -> None:
        """A step: what is copied meanwhile comes in time, or is late: as the seed says."""
        if not self.kept:
            return
        ahead = self.tier.ahead
        who = str(ahead.who) if ahead.blocks else self.rng.choice([*self.kept])
        if self.rng.random() < 0.1:  # others have cached more of what it begins with, or less
            full = self.kept[who].size(2) // self.pool.block_size
            self.first[who] = self.rng.randrange(full + 1) * self.pool.block_size
        late = self.rng.random() < 0.3
        with held_up(ahead) if late else nullcontext():
            ahead.begin(
                who, self.first[who], self.allocator, depth=self.rng.choice((8, 24, 100)),
                spare=self.rng.randrange(self.allocator.free_blocks + 1),
            )  # fmt: skip
            if ahead.piece is not None and late:
                ahead.piece.stop.set()
        if ahead.piece is not None:
            wait([ahead.piece.copying])
        ahead.end()

    def allocate(self) -> None:
        count = self.rng.randrange(6)
        if (blocks := self.allocator.allocate(count)) is None:
            assert count > self.allocator.available_blocks
            return
        self.others.append(blocks)
        self.fill(blocks, count * self.pool.block_size)

    def release(self) -> None:
        if self.others:
            self.allocator.release(self.others.pop(self.rng.randrange(len(self.others))))

    def take(self) -> None:
        if not self.kept:
            return
        ahead = self.tier.ahead
        who = str(ahead.who) if ahead.blocks and self.rng.random() < 0.5 else self.some()
        first, whole = self.first[who], self.kept[who]
        if self.rng.random() < 0.1:
            first = 0
        tokens, size = whole.size(2) - first, self.pool.block_size
        needed = -(-tokens // size)
        if not self.allocator.fits(needed):
            return
        used = ahead.used
        blocks = ahead.take(who, first)
        there = min(len(blocks) * size, tokens)
        assert there == ahead.used - used
        self.found += there
        blocks = blocks + (self.allocator.allocate(needed - len(blocks)) or [])
        slots = self.slots(blocks, tokens)
        self.tier.take(who, first + there, slots[there:].numpy())
        assert torch.equal(self.read(slots), whole[:, :, first:])
        self.others.append(blocks)
        self.forget(who)

    def some(self) -> str:
        return self.rng.choice([*self.kept])

    def forget(self, who: str) -> None:
        del self.kept[who], self.first[who]

    def cancel(self) -> None:
        if self.kept:
            who = self.some()
            self.tier.drop(who)
            self.forget(who)

    def withhold(self) -> None:
        if self.allocator.withheld_blocks:
            self.allocator.give_back()
        else:
            self.allocator.withhold(self.allocator.blocks // 2)

    def recut(self) -> None:
        self.tier.ahead.roll_back()
        self.cut(self.rng.choice(SIZES))
        self.first = dict.fromkeys(self.first, 0)

    def roll_back(self) -> None:
        self.tier.ahead.roll_back()


@pytest.mark.parametrize("seed", range(2))
def test_random_operations_do_what_a_plain_model_does(seed: int) -> None:
    subject = Model(seed)
    for _ in range(OPERATIONS):
        subject.step()
    ahead = subject.tier.ahead
    assert subject.found > OPERATIONS / 10
    assert ahead.rolled_back > OPERATIONS / 10
    assert ahead.late > OPERATIONS / 1000


def held(tier: HostTier, pool: KVPool, tokens: int) -> np.ndarray:
    """A sequence in the first blocks of the pool, that the tier keeps."""
    slots = np.arange(tokens) + pool.block_size
    assert tier.put("one", slots)
    return slots


def test_a_piece_leaves_of_a_step_what_the_rule_says_or_is_not_begun() -> None:
    pool = KVPool(layers=1, kv_heads=1, head_dim=2, blocks=32, block_size=16)
    tier = HostTier(lambda: pool, 2**20, layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)
    allocator, ahead = PagedAllocator(32), tier.ahead

    def begun(token_s: float, step_s: float, depth: int = 512, spare: int = 32) -> int:
        """How many of 200 tokens are begun, where copying one takes so long."""
        tier.measured(1e12, 1e12 * token_s)  # beside which what was measured before is nothing
        ahead.step_s = step_s
        before = ahead.begun
        ahead.begin("one", 0, allocator, depth=depth, spare=spare)
        ahead.roll_back()
        return ahead.begun - before

    held(tier, pool, 200)
    assert begun(1e-5, SLACK_S + 65e-5) == 64
    assert begun(1e-5, SLACK_S + 17e-5) == 16
    assert begun(1e-5, SLACK_S + 15e-5) == 0
    assert begun(1e-5, SLACK_S / 2) == begun(1e-5, 0.0) == 0
    assert begun(1e-5, 1.0) == 200
    assert begun(1e-5, 1.0, depth=70) == 64
    assert begun(1e-5, 1.0, spare=3) == 48
    assert begun(1e-5, 1.0, spare=-2) == 0
    assert (allocator.free_blocks, ahead.used, ahead.begun) == (32, 0, ahead.rolled_back)


def test_what_is_late_goes_back_to_the_last_snapshot_and_the_next_is_thought_slower() -> None:
    pool = KVPool(layers=3, kv_heads=1, head_dim=2, blocks=32, block_size=16)
    tier = HostTier(lambda: pool, 2**20, layers=3, kv_heads=1, head_dim=2, dtype=torch.float32)
    allocator, ahead = PagedAllocator(32), tier.ahead
    held(tier, pool, 200)
    ahead.timed(LONG_STEP_S)
    ahead.begin("one", 0, allocator, depth=64, spare=32)
    assert ahead.piece is not None
    wait([ahead.piece.copying])
    ahead.end()
    assert (ahead.tokens, allocator.free_blocks, allocator.cached_blocks) == (64, 28, 4)
    speed = tier.bytes_per_s
    with held_up(ahead):
        ahead.begin("one", 0, allocator, depth=512, spare=32)
        ahead.piece.stop.set()  # as the end of the step does, which then waits for the thread
    ahead.end()
    assert (ahead.tokens, allocator.free_blocks, allocator.cached_blocks) == (64, 28, 4)
    assert (ahead.begun, ahead.rolled_back, ahead.late) == (200, 136, 1)
    assert tier.tokens("one") == 200
    assert tier.bytes_per_s < speed


class Broken(HostTier):
    """Copies nothing back."""

    def copy_back(
        self, who: Hashable, first: int, slots: np.ndarray, stop: Callable[[], bool] = bool
    ) -> float:
        raise OSError("the host's memory is gone")


def test_a_copy_that_fails_is_as_one_that_is_late(caplog: pytest.LogCaptureFixture) -> None:
    pool = KVPool(layers=1, kv_heads=1, head_dim=2, blocks=32, block_size=16)
    tier = Broken(lambda: pool, 2**20, layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)
    allocator, ahead = PagedAllocator(32), tier.ahead
    held(tier, pool, 200)
    ahead.timed(LONG_STEP_S)
    ahead.begin("one", 0, allocator, depth=64, spare=32)
    with caplog.at_level(logging.ERROR, "engine"):
        ahead.end()
    assert "the host's memory is gone" in caplog.text
    assert (ahead.begun, ahead.rolled_back, ahead.late) == (64, 64, 1)
    assert (allocator.free_blocks, allocator.cached_blocks) == (32, 0)
    assert tier.tokens("one") == 200


def test_where_no_thread_can_copy_nothing_is_begun() -> None:
    pool = KVPool(layers=1, kv_heads=1, head_dim=2, blocks=32, block_size=16)
    tier = HostTier(lambda: pool, 2**20, layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)
    allocator, ahead = PagedAllocator(32), tier.ahead
    held(tier, pool, 200)
    ahead.timed(LONG_STEP_S)
    ahead._thread.shutdown()
    ahead.begin("one", 0, allocator, depth=64, spare=32)
    assert ahead.piece is None
    assert (ahead.begun, allocator.free_blocks, allocator.cached_blocks) == (0, 32, 0)


class Watched:
    """Steps a scheduler by hand; what is copied ahead comes in time.

    Without `computing` tokens are all the same, and the KV is whatever the pool holds.
    """

    def __init__(self, subject: Bench, *, computing: bool = True) -> None:
        self.subject = subject
        self.computing = computing
        self.scheduler = subject.scheduler
        assert self.scheduler.tier is not None
        self.tier = self.scheduler.tier
        self.ahead = self.tier.ahead
        self.plans: list[str] = []
        self.tokens: dict[str, list[int]] = {}

    def step(self, config: RuntimeConfig) -> bool:
        plan = self.scheduler.plan(config, 1.0)
        if plan is None:
            return False
        if self.ahead.piece is not None:
            wait([self.ahead.piece.copying])
        self.plans.append(told(plan))
        conserved(self.scheduler)
        sampled = np.full(len(plan.sampled), 65)
        if self.computing:
            sampled, _ = self.subject.runner.forward(plan)
        outcome = self.scheduler.commit(plan, sampled, 1.0, 2.0)
        for one, token in zip(outcome.requests, outcome.tokens, strict=True):
            self.tokens.setdefault(one.id, []).append(token)
        conserved(self.scheduler)
        return True

    def serve(self, requests: list[Request], config: RuntimeConfig) -> None:
        for one in requests:
            self.scheduler.add(one)
        while self.step(config):
            pass


def told(plan: Plan) -> str:
    decodes = [one.id for one in plan.decodes]
    return f"{decodes} {[(c.request.id, c.start, c.count, c.last) for c in plan.chunks]}"


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("weights", ["off", "on"])
def test_no_plan_is_another_than_without(model: Llama, caching: bool, weights: str) -> None:
    without, ahead = (
        Watched(bench(model, blocks=40, caching=caching, tier_bytes=PLENTY), computing=False)
        for _ in range(2)
    )
    for subject, depth in ((without, 0), (ahead, 512)):
        requests = asked(3, 60)
        for i, one in enumerate(requests):
            one.priority = i % 4
        config = RuntimeConfig(
            preemption="swap", prefetch_depth_tokens=depth, priority_weights=weights,
            prefill_chunk_tokens=64,
        )  # fmt: skip
        subject.serve(requests, config)
    assert ahead.plans == without.plans
    assert without.ahead.begun == 0
    assert without.tier.hits == ahead.tier.hits
    assert ahead.ahead.begun == ahead.ahead.used + ahead.ahead.rolled_back
    if not caching:  # where everything is cached hardly a block is free
        assert ahead.ahead.used > 0
        assert ahead.ahead.rolled_back > 0


def cancelled(subject: Watched) -> RuntimeConfig:
    one = subject.ahead.who
    assert isinstance(one, Request)
    assert subject.scheduler.abandon(one, Finish.ABORT, 2.0)
    return AHEAD


def turned_off(subject: Watched) -> RuntimeConfig:
    return RuntimeConfig(preemption="swap")


def halved(subject: Watched) -> RuntimeConfig:
    subject.scheduler.halve_pool()
    return turned_off(subject)


def paused(subject: Watched) -> RuntimeConfig:
    subject.scheduler.paused = Pause.KEEP
    assert not subject.step(AHEAD)
    subject.scheduler.paused = Pause.NOT
    return turned_off(subject)


def flushed(subject: Watched) -> RuntimeConfig:
    subject.scheduler.prefixes.turn(True)
    return AHEAD


@pytest.mark.parametrize("end", [cancelled, turned_off, halved, paused, flushed])
def test_whatever_ends_it_leaves_blocks_free_and_the_tier_with_all_of_it(
    model: Llama, end: Callable[[Watched], RuntimeConfig]
) -> None:
    expected, _ = bench(model).generate(long(), RuntimeConfig())
    subject = Watched(bench(model, blocks=64, tier_bytes=PLENTY))
    ahead, scheduler = subject.ahead, subject.scheduler
    requests = long()
    for one in requests:
        scheduler.add(one)
    while not ahead.tokens:
        assert subject.step(AHEAD)
    who, used = ahead.who, ahead.used
    kept = subject.tier.tokens(who)
    assert scheduler.allocator.cached_blocks == len(ahead.blocks) > 0
    config = end(subject)
    scheduler.plan(config, 1.0)
    subject.ahead.end()
    if end is not flushed:
        assert subject.tier.tokens(who) == (0 if end is cancelled else kept)
    assert ahead.who is not who or not ahead.tokens
    assert ahead.used == used
    assert ahead.begun == ahead.used + ahead.rolled_back + ahead.tokens
    conserved(scheduler)
    while subject.step(config):
        pass
    for one in requests:
        if one.finish is not Finish.ABORT:
            assert subject.tokens[one.id] == expected[one.id]
    assert (ahead.tokens, scheduler.allocator.allocated_blocks) == (0, 0)


def test_the_pool_is_halved_after_a_step_that_failed(model: Llama) -> None:
    subject = Watched(bench(model, blocks=64, tier_bytes=PLENTY))
    scheduler, ahead = subject.scheduler, subject.ahead
    for one in long():
        scheduler.add(one)
    while (plan := scheduler.plan(AHEAD, 1.0)) and ahead.piece is None:
        scheduler.commit(plan, np.full(len(plan.sampled), 65), 1.0, 2.0)
    assert ahead.piece is not None  # and the step it is beside fails
    scheduler.halve_pool()
    assert (scheduler.allocator.withheld_blocks, ahead.piece, ahead.tokens) == (32, None, 0)
    assert ahead.begun == ahead.rolled_back > 0
    conserved(scheduler)


def test_the_pool_is_recut_while_some_of_it_is_ahead(model: Llama) -> None:
    expected, _ = bench(model).generate(long(), RuntimeConfig())
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=64))
    core = subject.core
    core.tier.ahead.timed(LONG_STEP_S)
    try:
        subject.change(preemption="swap", prefetch_depth_tokens=512)
        subject.submit(long())
        for i, values in enumerate(({"kv_block_size": 8}, {"kv_layout": "interleaved"})):
            subject.wait(tokens=400 * (i + 1))
            subject.change(**values)
        subject.wait(ended=8)
        ahead = core.tier.ahead
        assert ahead.begun == ahead.used + ahead.rolled_back > 0
        assert core.tier.allocator.allocated_blocks == core.allocator.cached_blocks == 0
        assert core.reading().tier_prefetched == ahead.told()
        assert core.reading().tier_bytes_per_s > 0
    finally:
        core.stop()
    assert subject.tokens == expected


def test_a_contiguous_pool_copies_nothing_ahead(model: Llama) -> None:
    subject = Watched(bench(model, blocks=64, allocator="contiguous", tier_bytes=PLENTY))
    subject.scheduler.add(request("0", [66] * 100, 100))
    while subject.step(AHEAD):
        pass
    assert subject.ahead.begun == 0


if __name__ == "__main__":
    subject = Model(0)
    for _ in range(int(sys.argv[1])):
        subject.step()
    ahead = subject.tier.ahead
    print(f"{ahead.begun} tokens begun, {ahead.used} used, {ahead.late} pieces late")
