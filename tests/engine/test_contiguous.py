"""A contiguous pool against a plain model, what it strands, and the two ways out of that.

python -m tests.engine.test_contiguous 1000000      the long run of the model
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.exec.capture import Graphs
from engine.exec.compact import compact
from engine.exec.reblock import reblock
from engine.exec.rows import Rows
from engine.knobs import NotPossible, RuntimeConfig
from engine.kv.allocator import SCRATCH_BLOCK, Allocator, PagedAllocator
from engine.kv.contiguous import ALLOCATORS, ContiguousAllocator
from engine.kv.pool import KVPool
from engine.kv.prefix import PrefixCache
from engine.models.llama import Llama
from engine.sched.request import Finish, Request
from engine.sched.scheduler import Scheduler
from tests.engine.conftest import CONFIGS, as_dense, bench, conserved, request
from tests.engine.test_barrier import Served, dense, prompts

OPERATIONS = 15_000
CONFIG = RuntimeConfig()


class Model:
    """What the allocator should hold, block by block. `step` does one thing to both and compares.

    `owner`: of each block, by number; 0 for a free one, -1 for one withheld.
    """

    def __init__(self, seed: int, blocks: int = 60) -> None:
        self.rng = random.Random(seed)
        self.allocator = ContiguousAllocator(blocks)
        self.owner = [0] * (1 + blocks)
        self.owner[SCRATCH_BLOCK] = -1
        self.held: dict[int, list[int]] = {}
        self.last = 0
        self.stranded = 0
        self.moved = 0

    def step(self) -> None:
        ways = (self.open, self.close, self.move, self.withhold)
        self.rng.choices(ways, (50, 45, 5, 1))[0]()
        allocator, states = self.allocator, self.allocator.states()
        assert allocator.free_runs().tolist() == self.runs()
        assert allocator.allocated_blocks == sum(map(len, self.held.values()))
        assert allocator.withheld_blocks == self.owner.count(-1) - 1
        assert allocator.blocks + allocator.withheld_blocks == allocator.total
        names = {0: "free", -1: "withheld"}
        expected = ["scratch", *(names.get(owner, "allocated") for owner in self.owner[1:])]
        assert states.tolist() == expected
        assert allocator.longest_run == max((length for _, length in self.runs()), default=0)

    def runs(self) -> list[list[int]]:
        found: list[list[int]] = []
        for block, owner in enumerate(self.owner):
            if owner:
                continue
            if found and sum(found[-1]) == block:
                found[-1][1] += 1
            else:
                found.append([block, 1])
        return found

    def open(self) -> None:
        count = self.rng.choice((1, 2, 3, 5, 8, 13))
        fitting = [run for run in self.runs() if run[1] >= count]
        blocks = self.allocator.allocate(count)
        if not fitting:
            assert blocks is None
            assert not self.allocator.fits(count)
            self.stranded += self.allocator.free_blocks >= count
            return
        best = min(fitting, key=lambda run: run[1])  # the first of the shortest
        assert blocks == list(range(best[0], best[0] + count))
        self.last += 1
        self.held[self.last] = blocks
        self.write(blocks, self.last)

    def close(self) -> None:
        if self.held:
            blocks = self.held.pop(self.rng.choice(list(self.held)))
            self.allocator.release(reversed(blocks))
            self.write(blocks, 0)

    def move(self) -> None:
        """One sequence down to the end of what stands before it."""
        ends = {sum(run): run[0] for run in self.runs()}
        behind = [(name, held) for name, held in self.held.items() if held[0] in ends]
        if not behind:
            return
        name, blocks = self.rng.choice(behind)
        to = ends[blocks[0]]
        self.allocator.move(blocks[0], to, len(blocks))
        self.write(blocks, 0)
        self.held[name] = list(range(to, to + len(blocks)))
        self.write(self.held[name], name)
        self.moved += 1

    def withhold(self) -> None:
        allocator = self.allocator
        if allocator.withheld_blocks:
            allocator.give_back()
            self.owner = [0 if block and owner < 0 else owner
                          for block, owner in enumerate(self.owner)]  # fmt: skip
            return
        count = self.rng.randrange(allocator.total)
        last = range(1 + allocator.total - count, 1 + allocator.total)
        free = all(self.owner[block] == 0 for block in last)
        assert allocator.withhold(count) is free
        if free:
            self.write(list(last), -1)

    def write(self, blocks: list[int], owner: int) -> None:
        for block in blocks:
            self.owner[block] = owner


@pytest.mark.parametrize("seed", range(2))
def test_random_operations_do_what_a_plain_model_does(seed: int) -> None:
    subject = Model(seed)
    for _ in range(OPERATIONS):
        subject.step()
    assert subject.stranded > OPERATIONS / 100
    assert subject.moved > OPERATIONS / 100


def scheduler(blocks: int) -> Scheduler:
    rows = Rows(rows=64, model_len_max=512, block_size=16)
    return Scheduler(rows, PrefixCache(ContiguousAllocator(blocks), 16))


def tiny(blocks: int) -> KVPool:
    return KVPool(layers=1, kv_heads=1, head_dim=4, blocks=blocks, block_size=16)


def step(subject: Scheduler, now: float = 1.0) -> bool:
    plan = subject.plan(CONFIG, now)
    if plan is None:
        return False
    conserved(subject)
    for row in np.flatnonzero(subject.rows.owned).tolist() if subject.allocator.contiguous else ():
        assert (np.diff(subject.rows.tables[row, : subject.rows.owned[row]]) == 1).all()
    subject.commit(plan, np.full(len(plan.sampled), 65, np.int64), now, now)
    return True


def with_holes() -> tuple[Scheduler, Request]:
    """32 blocks, 16 of them free in runs of 4, and one who needs 8."""
    subject = scheduler(32)
    for i in range(8):
        subject.add(request(str(i), [66] * 33, 32))
    step(subject)
    for one in list(subject.running)[::2]:
        subject.abandon(one, Finish.ABORT, 1.0)
    assert subject.allocator.free_runs()[:, 1].tolist() == [4, 4, 4, 4]
    waits = request("waits", [67] * 100, 29)
    subject.add(waits)
    return subject, waits


def test_a_sequence_gets_one_run_for_all_it_may_become_and_gives_all_of_it_back() -> None:
    subject = scheduler(40)
    subject.add(request("exact", [66] * 60, 5))  # the KV of 64 tokens is read, not of the 65th
    subject.add(request("more", [66] * 60, 6))
    step(subject)
    assert subject.rows.owned[[one.row for one in subject.running]].tolist() == [4, 5]
    while step(subject):
        assert subject.allocator.allocated_blocks in (9, 5, 0)
    assert subject.preemptions == 0
    assert subject.allocator.free_runs().tolist() == [[1, 40]]


def test_free_blocks_that_lie_apart_stall_an_admission_and_the_time_is_counted() -> None:
    subject, waits = with_holes()
    stalls = subject.stalls
    for now in (2.0, 2.5, 4.0):
        step(subject, now)
        assert stalls.stalled is waits
    assert (stalls.count, stalls.seconds) == (1, 2.0)
    subject.abandon(subject.running[0], Finish.ABORT, 4.0)  # its 4 blocks join two holes
    step(subject, 4.5)
    assert waits.row >= 0
    assert stalls.stalled is None
    assert (stalls.count, stalls.seconds) == (1, 2.5)


def test_a_full_pool_is_no_stall() -> None:
    subject = scheduler(32)
    for i in range(9):
        subject.add(request(str(i), [66] * 33, 32))
    step(subject)
    assert len(subject.waiting) == 1
    assert subject.stalls.count == 0


def test_compaction_ends_a_stall_and_moves_only_who_must() -> None:
    subject, waits = with_holes()
    step(subject)
    pool, allocator = tiny(32), subject.allocator
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    assert isinstance(allocator, ContiguousAllocator)
    before = dense(pool, subject.rows)
    held = {one.id: int(subject.rows.computed[one.row]) for one in subject.running}
    assert compact(subject.rows, pool, allocator) == sum(held.values())
    assert allocator.free_runs().tolist() == [[17, 16]]
    after = dense(pool, subject.rows)
    assert all(torch.equal(before[row], after[row]) for row in before)
    assert compact(subject.rows, pool, allocator) == 0
    step(subject)
    assert waits.row >= 0


def test_the_switch_to_paged_ends_a_stall() -> None:
    subject, waits = with_holes()
    step(subject)
    assert subject.stalls.stalled is waits
    layout = reblock(subject.rows, tiny(32), tiny(32), PrefixCache(PagedAllocator(32), 16))
    assert layout is not None
    subject.rows.use(layout.tables)
    subject.prefixes = layout.prefixes
    plan = subject.plan(CONFIG, 2.0)
    assert plan is not None
    assert waits.row >= 0
    assert subject.stalls.stalled is None


class FirstFit(ContiguousAllocator):
    """What best fit is compared with."""

    def _take(self, count: int) -> list[int]:
        start = min(start for start, length in self._lengths.items() if length >= count)
        return self._cut(start, start, count)


class Churned(NamedTuple):
    """What serving took, and of that: steps with somebody stalled, and how many were."""

    steps: int
    stalled_steps: int
    stalls: int


def churn(kind: type[Allocator], *, compacting: bool = False, seed: int = 5) -> Churned:
    """400 requests of mixed lengths, always 40 at the door, in a pool of 128 blocks."""
    rng = random.Random(seed)
    rows = Rows(rows=64, model_len_max=512, block_size=16)
    subject, pool = Scheduler(rows, PrefixCache(kind(128), 16)), tiny(128)
    asked = [
        request(str(i), [66] * rng.choice((20, 60, 250)), rng.choice((4, 30, 200)))
        for i in range(400)
    ]
    steps = stalled = 0
    while asked or subject.running or subject.waiting:
        while asked and len(subject.waiting) < 40:
            subject.add(asked.pop())
        allocator = subject.allocator
        if compacting and subject.stalls.stalled and isinstance(allocator, ContiguousAllocator):
            compact(subject.rows, pool, allocator)
        step(subject)
        steps += 1
        stalled += subject.stalls.stalled is not None
    assert subject.allocator.free_blocks == 128
    return Churned(steps, stalled, subject.stalls.count)


def test_churn_strands_memory_that_compaction_or_paging_puts_to_use() -> None:
    plain, paged = churn(ContiguousAllocator), churn(PagedAllocator)
    compacted = churn(ContiguousAllocator, compacting=True)
    assert plain.stalled_steps > plain.stalls > 0
    assert compacted.stalled_steps == compacted.stalls > 0, "each is over at the next step"
    assert paged.stalls == paged.stalled_steps == 0
    assert plain.steps > compacted.steps > paged.steps


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 16),
    config=CONFIGS,
    blocks=st.sampled_from([32, 48, 512]),
    captured=st.booleans(),
)
def test_in_one_run_tokens_and_logits_are_the_references_compacted_or_not(
    model: Llama, graphs: Graphs, seed: int, count: int, config: RuntimeConfig, blocks: int,
    captured: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    asked = [
        request(str(i), rng.integers(0, 262, rng.integers(1, 150)), int(rng.integers(1, 60)))
        for i in range(count)
    ]
    subject = bench(
        model, blocks=blocks, allocator="contiguous", graphs=graphs if captured else None
    )
    allocator, rows = subject.scheduler.allocator, subject.scheduler.rows
    assert isinstance(allocator, ContiguousAllocator)
    tokens, logits = subject.generate(
        asked, config, between=lambda: compact(rows, subject.runner.pool, allocator)
    )
    for one in asked:
        as_dense(model, one, tokens[one.id], logits[one.id])
    assert subject.scheduler.preemptions == 0


@pytest.fixture
def served() -> Iterator[Served]:
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=256))
    yield subject
    subject.core.stop()


def test_the_allocator_changes_under_running_requests_and_no_token_with_it(
    model: Llama, served: Served
) -> None:
    asked, again = ([request(str(i), p, 80) for i, p in enumerate(prompts(12))] for _ in "ab")
    expected, _ = bench(model).generate(again, RuntimeConfig())
    served.submit(asked)
    for i, (kind, size) in enumerate(
        (("contiguous", 16), ("paged", 16), ("contiguous", 64), ("contiguous", 8), ("paged", 32))
    ):
        served.wait(tokens=60 * (i + 1))
        served.change(kv_allocator=kind, kv_block_size=size, kv_compaction="on")
        assert type(served.core.allocator) is ALLOCATORS[kind]
        assert served.core.allocator.total == 256 * 16 // size
    served.wait(ended=12)
    assert served.tokens == expected
    assert set(served.ended.values()) == {Finish.LENGTH}
    assert served.core.barrier.rollbacks == 0
    assert served.core.scheduler.preemptions == 0


def test_what_may_grow_too_long_for_the_pool_is_not_made_contiguous(served: Served) -> None:
    """12 of up to 403 tokens each: 26 blocks a run, 312 in all; the pool has 256."""
    served.submit([request(str(i), [66] * 3, 400) for i in range(12)])
    served.wait(tokens=24)
    with pytest.raises(NotPossible, match=r"kv_allocator: 312 blocks of 16.*has 256") as caught:
        served.change(kv_allocator="contiguous")
    assert (caught.value.code, caught.value.knob) == ("does_not_fit", "kv_allocator")
    assert isinstance(served.core.allocator, PagedAllocator)
    served.wait(ended=12)
    assert set(served.ended.values()) == {Finish.LENGTH}


def test_a_failed_proof_leaves_the_pool_paged(model: Llama, served: Served) -> None:
    expected, _ = bench(model).generate([request("a", [70] * 30, 120)], RuntimeConfig())
    served.submit([request("a", [70] * 30, 120)])
    served.wait(tokens=10)
    pool, allocator = served.core.runner.pool, served.core.allocator
    served.expect_otherwise()
    with pytest.raises(NotPossible, match="taken back, its proof failed"):
        served.change(kv_allocator="contiguous")
    assert served.core.runner.pool is pool
    assert served.core.allocator is allocator
    assert served.core.runtime.running.config == RuntimeConfig()
    assert served.core.barrier.rollbacks == 1
    served.wait(ended=1)
    assert served.tokens == expected


def test_contiguous_runs_and_the_prefix_cache_exclude_each_other(
    served: Served, tmp_path: Path
) -> None:
    served.change(prefix_cache="on")
    with pytest.raises(NotPossible, match="exclude each other") as caught:
        served.change(kv_allocator="contiguous")
    assert caught.value.knob == "kv_allocator"
    served.change(kv_allocator="contiguous", prefix_cache="off")
    with pytest.raises(NotPossible, match="exclude each other") as caught:
        served.change(prefix_cache="on")
    assert caught.value.knob == "prefix_cache"
    values = {"kv_allocator": "contiguous", "prefix_cache": "on"}
    stored = {"config_version": 3, "values": values, "changed_by": "hand", "changed_at": ""}
    (tmp_path / "runtime_config.json").write_text(json.dumps(stored))
    with pytest.raises(NotPossible, match="exclude each other"):
        Served(EngineConfig(state=tmp_path))


def test_half_a_contiguous_pool_is_its_end_and_comes_back(model: Llama) -> None:
    def asked() -> list[Request]:
        return [request(str(i), [66 + i] * 150, 60) for i in range(6)]

    expected, _ = bench(model).generate(asked(), RuntimeConfig())
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=80))
    core = subject.core
    try:
        subject.change(kv_allocator="contiguous")
        subject.submit(asked())
        subject.wait(tokens=12)
        core.faults.inject({"fault": "kv_pool_halved"})
        assert core.allocator.blocks == 40
        assert core.scheduler.preemptions > 0
        subject.change(kv_allocator="paged")
        assert core.allocator.blocks == 40
        subject.wait(ended=6)
        subject.change(kv_allocator="contiguous")
        assert core.allocator.free_runs().tolist() == [[1, 40]]
        core.faults.inject({"fault": "none"})
        assert core.allocator.free_runs().tolist() == [[1, 80]]
    finally:
        core.stop()
    assert subject.tokens == expected


def test_compaction_turned_on_ends_a_stall_at_the_next_step(model: Llama) -> None:
    """8 take the 32 blocks, 4 each; every second ends soon, and then one asks for 8 blocks."""

    def asked() -> list[Request]:
        lengths = [(20, 45), (60, 5)] * 4 + [(100, 29)]
        return [request(str(i), [66 + i] * p, n) for i, (p, n) in enumerate(lengths)]

    expected, _ = bench(model).generate(asked(), CONFIG)
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=32))
    core = subject.core
    try:
        subject.change(kv_allocator="contiguous", kv_compaction="on")
        core.pause(True)
        requests = asked()
        subject.submit(requests)
        core.pause(False)
        subject.wait(ended=9)
        assert core.scheduler.stalls.count == core.compactions == 1
        assert core.compaction_s > 0
        assert requests[8].scheduled < requests[0].finished
    finally:
        core.stop()
    assert subject.tokens == expected


if __name__ == "__main__":
    began, total = time.monotonic(), int(sys.argv[1])
    long = Model(seed=7)
    for _ in range(total):
        long.step()
    print(
        f"{total} operations as the model says, in {time.monotonic() - began:.0f} s: "
        f"{long.last} runs given, {long.stranded} refused with blocks enough, {long.moved} moved"
    )
    for name, kind, compacting in (
        ("best fit", ContiguousAllocator, False),
        ("first fit", FirstFit, False),
        ("best fit, compacted", ContiguousAllocator, True),
        ("paged", PagedAllocator, False),
    ):
        sums = np.sum([churn(kind, compacting=compacting, seed=i) for i in range(8)], axis=0)
        print(f"{name}: {sums[0]} steps, {sums[1]} of them stalled, {sums[2]} requests stalled")
