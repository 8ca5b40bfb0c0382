"""The prefix cache against a plain model, and what it must never change: tokens and logits.

python -m tests.engine.test_prefix 1000000      the long run of the model
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.exec.capture import Graphs
from engine.exec.rows import Rows
from engine.knobs import RuntimeConfig
from engine.kv.allocator import PagedAllocator
from engine.kv.prefix import Chain, PrefixCache
from engine.models.llama import Llama
from engine.sched.request import Finish, Request
from engine.sched.scheduler import Scheduler
from tests.engine.conftest import CONFIGS, as_dense, bench, conserved, request

OPERATIONS = 15_000
SIZE = 4
Key = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class Sequence:
    """One that runs: its tokens are `computed` so far, `kept` blocks of them handed in."""

    salt: str
    tokens: np.ndarray
    chain: Chain | None
    blocks: list[int]
    computed: int

    def keys(self) -> list[Key]:
        """What each of its full blocks holds."""
        ends = range(SIZE, len(self.tokens) + 1, SIZE)
        return [(self.salt, tuple(self.tokens[:end].tolist())) for end in ends]


class Model:
    """What allocator and cache should hold, in plain lists. `step` does one thing to all, compares.

    `memory`: what was last written into each block. `known`: where the cache should find a key.
    `idle`: blocks it may evict, in that order; `idle_pinned`: in which order they will be idle once
    they are pinned no more. `hot`: keys to be pinned whenever they are known.
    """

    def __init__(self, seed: int, blocks: int = 40) -> None:
        self.rng = random.Random(seed)
        self.allocator = PagedAllocator(blocks)
        self.cache = PrefixCache(self.allocator, SIZE, on=True)
        self.running: list[Sequence] = []
        self.memory: dict[int, Key] = {}
        self.known: dict[Key, int] = {}
        self.idle: list[int] = []
        self.pinned: set[int] = set()
        self.idle_pinned: list[int] = []
        self.hot: set[Key] = set()
        self.found = 0

    def step(self) -> None:
        ways = (self.open, self.compute, self.close, self.pin, self.withhold, self.flush)
        self.rng.choices(ways, (30, 50, 20, 0.5, 0.2, 0.1))[0]()
        counts = Counter(block for one in self.running for block in one.blocks)
        allocator, cached = self.allocator, set(self.idle) | (self.pinned - set(counts))
        assert allocator.allocated_blocks == len(counts)
        assert allocator.cached_blocks == len(cached)
        assert allocator.free_blocks == allocator.blocks - len(counts) - len(cached)
        assert not cached & set(counts)

    def open(self) -> None:
        rng = self.rng
        shared = np.repeat([rng.randrange(3) for _ in range(rng.randrange(6))], SIZE)
        tokens = np.array([*shared, *([7] * rng.randrange(1, SIZE + 1))], np.int64)
        one = Sequence(rng.choice("ab"), tokens, None, [], 0)
        one.chain = self.cache.chain(None, tokens, one.salt)
        one.blocks = self.cache.find(one.chain)
        assert one.blocks == self.longest(one)
        assert [self.memory[block] for block in one.blocks] == one.keys()[: len(one.blocks)]
        if self.cache.awaited(one.chain, len(one.blocks)):
            awaited = one.keys()[len(one.blocks)]
            assert any(awaited in s.keys()[s.computed // SIZE :] for s in self.running)
        self.found += len(one.blocks)
        self.cache.take(one.chain, one.blocks)
        self.idle = [block for block in self.idle if block not in one.blocks]
        self.idle_pinned = [block for block in self.idle_pinned if block not in one.blocks]
        one.computed = len(one.blocks) * SIZE
        self.running.append(one)
        needed = -(-len(tokens) // SIZE) - len(one.blocks)
        if not self.allocate(one, needed):
            self.close(one)

    def allocate(self, one: Sequence, count: int) -> bool:
        free = self.allocator.free_blocks
        blocks = self.allocator.allocate(count)
        if blocks is None:
            assert count > free + len(self.idle)
            return False
        self.evict(count - free)
        one.blocks = one.blocks + blocks
        return True

    def longest(self, one: Sequence) -> list[int]:
        found = []
        for key in one.keys()[: (len(one.tokens) - 1) // SIZE]:
            if key not in self.known:
                break
            found.append(self.known[key])
        return found

    def evict(self, count: int) -> None:
        gone, self.idle = self.idle[: max(count, 0)], self.idle[max(count, 0) :]
        self.known = {key: block for key, block in self.known.items() if block not in gone}

    def compute(self) -> None:
        if not self.running:
            return
        one = self.rng.choice(self.running)
        before = one.computed // SIZE
        one.computed = min(len(one.tokens), one.computed + self.rng.randrange(1, 2 * SIZE))
        for key, block in list(zip(one.keys(), one.blocks, strict=False))[
            before : one.computed // SIZE
        ]:
            assert self.allocator.references(block) == 1, "it writes where others read"
            self.memory[block] = key
            if one.chain is not None and one.chain.index is self.cache._index:
                if key not in self.known and key in self.hot:
                    self.pinned.add(block)
                self.known.setdefault(key, block)
        table = np.array(one.blocks, np.int64)
        self.cache.keep(one.chain, one.tokens, table, one.computed)

    def close(self, one: Sequence | None = None) -> None:
        if not self.running:
            return
        one = one or self.rng.choice(self.running)
        self.running.remove(one)
        self.cache.release(one.chain, one.blocks)
        held = {block for other in self.running for block in other.blocks}
        rest = [b for b in reversed(one.blocks) if b in self.known.values() and b not in held]
        self.idle += [block for block in rest if block not in self.pinned]
        self.idle_pinned += [block for block in rest if block in self.pinned]

    def pin(self) -> None:
        if self.rng.random() < 0.4 and self.running:
            one = self.rng.choice(self.running)
            self.cache.pin(one.tokens, one.salt)
            self.hot.update(one.keys())
            for block in [self.known[key] for key in reversed(one.keys()) if key in self.known]:
                self.pinned.add(block)
                if block in self.idle:
                    self.idle.remove(block)
                    self.idle_pinned.append(block)
        else:
            self.cache.unpin()
            self.idle += self.idle_pinned
            self.pinned, self.idle_pinned, self.hot = set(), [], set()

    def withhold(self) -> None:
        free, count = self.allocator.free_blocks, self.allocator.blocks // 2
        if self.allocator.withheld_blocks:
            self.allocator.give_back()
        elif self.allocator.withhold(count):
            self.evict(count - free)
        else:
            assert count > free + len(self.idle)

    def flush(self) -> None:
        assert self.cache.flush() == len(self.known)
        self.known, self.idle, self.pinned, self.idle_pinned = {}, [], set(), []


@pytest.mark.parametrize("seed", range(2))
def test_random_operations_do_what_a_plain_model_does(seed: int) -> None:
    subject = Model(seed)
    for _ in range(OPERATIONS):
        subject.step()
    assert subject.found > OPERATIONS / 10
    assert subject.allocator.evictions > OPERATIONS / 10


def test_no_salt_nor_order_nor_cut_of_tokens_shares_a_hash() -> None:
    cache = PrefixCache(PagedAllocator(8), 2, on=True)
    hashes: list[bytes] = []
    for salt, tokens in (("", [1, 2, 3, 4, 0]), ("", [3, 4, 1, 2, 0]), ("x", [1, 2, 3, 4, 0])):
        chain = cache.chain(None, np.array(tokens, np.int64), salt)
        assert chain is not None
        hashes += [chain.root, *chain.hashes]
    assert len(set(hashes)) == 2 + 3 * 2


def family(seed: int, count: int, longest: int = 150) -> list[np.ndarray]:
    """Prompts that begin as one of two do, for some length, and go on by themselves."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 262, (2, longest))
    return [
        np.concatenate([
            begin[rng.integers(2), : rng.integers(0, longest + 1)],
            rng.integers(0, 262, rng.integers(1, 40)),
        ])
        for _ in range(count)
    ]  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 12),
    config=CONFIGS,
    blocks=st.sampled_from([32, 64, 512]),
    block_size=st.sampled_from([8, 16, 64]),
    captured=st.booleans(),
)
def test_cached_prefixes_change_no_token_and_no_logit(
    model: Llama,
    graphs: Graphs,
    seed: int,
    count: int,
    config: RuntimeConfig,
    blocks: int,
    block_size: int,
    captured: bool,
) -> None:
    prompts = family(seed, count)
    subject = bench(
        model,
        blocks=max(blocks, 512 // block_size),
        block_size=block_size,
        graphs=graphs if captured and block_size == 16 else None,
        caching=True,
    )
    for again in range(2):
        asked = [request(f"{again} {i}", p, 1 + i % 40) for i, p in enumerate(prompts)]
        tokens, logits = subject.generate(asked, config)
        for one in asked:
            as_dense(model, one, tokens[one.id], logits[one.id])


@pytest.mark.parametrize(
    ("way", "blocks", "config"),
    [
        ("batched", 512, RuntimeConfig()),
        ("chunked", 512, RuntimeConfig(max_num_batched_tokens=64, prefill_chunk_tokens=32)),
        ("preempted", 32, RuntimeConfig()),
    ],
)
def test_with_the_cache_the_tokens_are_those_without(
    model: Llama, way: str, blocks: int, config: RuntimeConfig
) -> None:
    def asked() -> list[Request]:
        return [request(str(i), p, 50) for i, p in enumerate(family(3, 12))]

    plain, cached = bench(model, blocks=blocks), bench(model, blocks=blocks, caching=True)
    expected, _ = plain.generate(asked(), config)
    for _ in range(2):
        assert cached.generate(asked(), config)[0] == expected
    scheduler = cached.scheduler
    assert scheduler.prefix_hits > 0
    assert scheduler.allocator.cached_blocks > 0
    assert (scheduler.preemptions > 0) is (way == "preempted")
    assert (scheduler.allocator.evictions > 0) is (way == "preempted")


def scheduler(blocks: int = 512) -> Scheduler:
    rows = Rows(rows=64, model_len_max=512, block_size=16)
    return Scheduler(rows, PrefixCache(PagedAllocator(blocks), 16, on=True))


def step(subject: Scheduler, config: RuntimeConfig | None = None) -> dict[str, int]:
    """Prompt tokens of each request that this step computed."""
    plan = subject.plan(config or RuntimeConfig(), 1.0)
    assert plan is not None
    conserved(subject)
    subject.commit(plan, np.full(len(plan.sampled), 65, np.int64), 1.0, 1.01)
    return {chunk.request.id: chunk.count for chunk in plan.chunks}


def test_a_second_request_computes_only_what_differs_and_never_nothing() -> None:
    subject = scheduler()
    subject.add(request("first", [66] * 64, 1))
    assert step(subject) == {"first": 64}
    again, longer = request("again", [66] * 64, 1), request("longer", [66] * 64 + [67] * 30, 1)
    subject.add(again)
    subject.add(longer)
    # Of the same 64 tokens, the last block is computed again: the last token must be.
    assert step(subject) == {"again": 16, "longer": 30}
    assert (again.cached_tokens, longer.cached_tokens) == (48, 64)
    assert (subject.prefix_queries, subject.prefix_hits) == (64 + 64 + 94, 48 + 64)


def test_an_answer_is_cached_for_the_next_turn_of_the_talk() -> None:
    subject = scheduler()
    subject.add(request("turn 1", [66] * 20, 40))
    while subject.waiting or subject.running:
        step(subject)
    subject.add(request("turn 2", [66] * 20 + [65] * 40 + [67] * 10, 1))
    # Of the 60 tokens 59 have KV: the last one was sampled and never read.
    assert step(subject) == {"turn 2": 70 - 48}


def test_another_salt_shares_nothing() -> None:
    subject = scheduler()
    for salt in ("", "a", "b", "a"):
        one = request(f"of {salt}", [66] * 64, 1)
        one.salt = salt
        subject.add(one)
        step(subject)
        assert one.cached_tokens == (48 if salt == "a" and subject.prefix_hits else 0)
    assert subject.prefix_hits == 48


def test_one_computes_what_many_begin_with_and_others_pass_meanwhile() -> None:
    subject = scheduler()
    config = RuntimeConfig(prefill_chunk_tokens=64)
    for i in range(4):
        subject.add(request(f"same {i}", [66] * 128 + [i] * 20, 1))
    subject.add(request("other", [67] * 30, 1))
    assert step(subject, config) == {"same 0": 64, "other": 30}
    assert step(subject, config) == {"same 0": 64}
    assert step(subject, config) == {"same 0": 20, "same 1": 20, "same 2": 20, "same 3": 20}
    assert not subject.waiting


@pytest.mark.parametrize("end", ["cancelled", "preempted"])
def test_those_that_wait_for_one_go_on_when_it_does_not(end: str) -> None:
    subject = scheduler(blocks=64)
    config = RuntimeConfig(prefill_chunk_tokens=32)
    first = request("first", [66] * 200, 1)
    subject.add(first)
    subject.add(request("waits", [66] * 200, 1))
    assert step(subject, config) == {"first": 32}
    assert [one.id for one in subject.waiting] == ["waits"]
    if end == "cancelled":
        subject.abandon(first, Finish.ABORT, 1.0)
        assert step(subject, config) == {"waits": 32}
        assert subject.prefix_hits == 32
    else:
        subject.halve_pool()
        subject._preempt(first)
        assert step(subject, config) == {"first": 32}
    while subject.waiting or subject.running:
        step(subject, config)
    assert subject.allocator.allocated_blocks == 0


class Counted(PrefixCache):
    """How often it searched."""

    searches = 0

    def find(self, chain: Chain | None) -> list[int]:
        self.searches += 1
        return super().find(chain)


def test_who_waits_for_a_prefix_is_searched_for_twice_however_long_that_takes() -> None:
    rows = Rows(rows=64, model_len_max=512, block_size=16)
    cache = Counted(PagedAllocator(512), 16, on=True)
    subject = Scheduler(rows, cache)
    config = RuntimeConfig(prefill_chunk_tokens=32)
    for i in range(4):
        subject.add(request(f"same {i}", [66] * 480 + [i], 1))
    while subject.waiting:
        step(subject, config)
    assert cache.searches == 1 + 2 * 3
    assert subject.prefix_hits == 3 * 480


def test_less_than_two_blocks_are_computed_twice_rather_than_waited_for() -> None:
    subject = scheduler()
    subject.add(request("a", [66] * 16 + [1] * 40, 1))
    subject.add(request("b", [66] * 16 + [2] * 40, 1))
    assert step(subject) == {"a": 56, "b": 56}


def test_the_tail_of_what_was_used_longest_ago_goes_first() -> None:
    subject = scheduler(blocks=40)
    for name, token in (("old", 66), ("new", 67)):
        subject.add(request(name, [token] * 160, 1))
        step(subject)
    subject.add(request("large", [68] * 400, 1))  # 25 blocks: 20 are free, 5 are taken
    step(subject)
    for token, blocks in ((66, 5), (67, 9)):
        chain = subject.prefixes.chain(None, np.full(160, token), "")
        assert len(subject.prefixes.find(chain)) == blocks


def test_what_was_not_used_for_its_ttl_is_not_used_again() -> None:
    now = [100.0]
    rows = Rows(rows=64, model_len_max=512, block_size=16)
    cache = PrefixCache(PagedAllocator(64), 16, on=True, ttl_s=10, clock=lambda: now[0])
    subject = Scheduler(rows, cache)
    found = []
    for wait in (0, 8.9, 8.9, 11.1, 8.9):
        now[0] += wait
        one = request("one", [66] * 64, 1)
        subject.add(one)
        step(subject)
        found.append(one.cached_tokens)
    assert found == [0, 48, 48, 0, 48]


def test_half_the_pool_is_taken_from_what_is_only_cached_or_pinned() -> None:
    subject = scheduler(blocks=64)
    subject.add(request("ended", [66] * 480, 1))
    step(subject)
    subject.add(request("runs", [67] * 160, 9))
    step(subject)
    subject.prefixes.pin(np.full(480, 66), "")
    subject.halve_pool()
    conserved(subject)
    assert (subject.allocator.blocks, subject.preemptions) == (32, 0)
    assert subject.allocator.cached_blocks == 32 - 10


def test_pinned_blocks_are_neither_evicted_nor_expire() -> None:
    now = [0.0]
    rows = Rows(rows=64, model_len_max=512, block_size=16)
    cache = PrefixCache(PagedAllocator(40), 16, on=True, ttl_s=10, clock=lambda: now[0])
    subject = Scheduler(rows, cache)
    hot = request("hot", [66] * 96, 1)
    subject.add(hot)
    step(subject)
    cache.pin(hot.tokens, "")
    now[0] = 100.0
    for i in range(3):
        subject.add(request(f"large {i}", [67 + i] * 500, 1))
        step(subject)
    assert subject.allocator.evictions > 0
    one = request("again", [66] * 96 + [1], 1)
    subject.add(one)
    step(subject)
    assert one.cached_tokens == 96


def test_who_begins_with_pinned_blocks_needs_only_the_others() -> None:
    subject = scheduler(blocks=64)
    hot = request("hot", [66] * 480, 1)
    subject.add(hot)
    step(subject)
    subject.prefixes.pin(hot.tokens, "")
    subject.add(request("runs", [67] * 160, 9))
    step(subject)
    # 10 blocks in use, 30 pinned, 24 to be had: what it needs of them is one.
    subject.add(request("again", [66] * 480 + [1], 1))
    assert step(subject) == {"again": 1}


def test_flushed_nothing_is_found_and_what_runs_adds_nothing_from_before() -> None:
    subject = scheduler()
    config = RuntimeConfig(prefill_chunk_tokens=64)
    subject.add(request("runs", [66] * 128, 4))
    step(subject, config)
    assert subject.prefixes.flush() == 4
    while subject.running:
        step(subject, config)
    assert subject.allocator.cached_blocks == 0
    one = request("again", [66] * 128, 1)
    subject.add(one)
    step(subject)
    assert one.cached_tokens == 0


def test_what_was_pinned_is_pinned_again_when_it_is_computed_after_a_flush() -> None:
    subject = scheduler(blocks=40)
    hot = request("hot", [66] * 96, 1)
    subject.prefixes.pin(hot.tokens, "")
    for flush in range(2):
        subject.prefixes.flush()
        assert len(subject.allocator.pinned) == 0
        subject.add(request(f"hot {flush}", [66] * 96, 1))
        step(subject)
        assert len(subject.allocator.pinned) == subject.prefixes.hot_blocks == 6
    other = request("of another salt", [66] * 96, 1)
    other.salt = "x"
    subject.add(other)
    step(subject)
    assert len(subject.allocator.pinned) == 6


def test_of_a_chain_that_is_pinned_no_more_the_tail_is_evicted_first() -> None:
    subject = scheduler(blocks=40)
    subject.prefixes.pin(np.full(160, 66), "")
    subject.add(request("hot", [66] * 160, 1))
    step(subject)
    subject.prefixes.unpin()
    subject.add(request("large", [68] * 500, 1))  # 32 blocks: 30 are free, 2 are taken
    step(subject)
    chain = subject.prefixes.chain(None, np.full(161, 66), "")
    assert len(subject.prefixes.find(chain)) == 8


if __name__ == "__main__":
    began, total = time.monotonic(), int(sys.argv[1])
    long = Model(seed=7)
    for _ in range(total):
        long.step()
    print(
        f"{total} operations as the model says, in {time.monotonic() - began:.0f} s: "
        f"{long.found} blocks found, {long.allocator.evictions} evicted"
    )
