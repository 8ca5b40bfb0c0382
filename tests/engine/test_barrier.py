"""Barrier knobs under running requests: blocks of another size, graphs on and off, taken back."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.config import BLOCK_SIZES, EngineConfig
from engine.core import Core
from engine.exec.capture import Graphs
from engine.exec.reblock import blocks_needed, reblock
from engine.exec.rows import Rows
from engine.knobs import NotPossible, RuntimeConfig
from engine.kv.allocator import PagedAllocator
from engine.kv.pool import KVPool
from engine.kv.prefix import PrefixCache
from engine.models.llama import Llama
from engine.pause import Pause
from engine.sched.request import Finish, Request
from engine.sched.scheduler import Outcome
from tests.engine.conftest import bench, request

WAIT_S = 30


def prompts(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, 262, rng.integers(1, 150)) for _ in range(count)]


class Served:
    """A core that runs, and the tokens it hands out."""

    def __init__(self, config: EngineConfig) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Finish | None] = {}
        self.came = threading.Condition()
        self.stand_at = math.inf  # tokens handed out, and not one step more
        self.core = Core(config, self.deliver)
        self.core.start()

    def deliver(self, outcome: Outcome) -> None:
        with self.came:
            for one, token in zip(outcome.requests, outcome.tokens, strict=True):
                self.tokens.setdefault(one.id, []).append(token)
            for one in outcome.finished:
                self.ended[one.id] = one.finish
            if sum(map(len, self.tokens.values())) >= self.stand_at:
                self.core.pause(Pause.KEEP)
            self.came.notify_all()

    def submit(self, asked: list[Request]) -> None:
        for one in asked:
            self.core.submit(one)

    def expect_otherwise(self) -> None:
        """From now on no proof holds."""
        known = self.core.barrier.canary.known
        known |= {kept: each._replace(logits=each.logits + 1) for kept, each in known.items()}

    def wait(self, tokens: int = 0, ended: int = 0) -> None:
        with self.came:
            assert self.came.wait_for(
                lambda: sum(map(len, self.tokens.values())) >= tokens and len(self.ended) >= ended,
                WAIT_S,
            )

    def change(self, **values: object) -> int:
        runtime = self.core.runtime
        return runtime.change(values, runtime.running.config_version, "test").config_version


@pytest.fixture
def served() -> Iterator[Served]:
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=256))
    yield subject
    subject.core.stop()


def test_blocks_change_under_running_requests_and_no_token_with_them(
    model: Llama, served: Served
) -> None:
    asked = [request(str(i), p, 80) for i, p in enumerate(prompts(12))]
    expected, _ = bench(model).generate(
        [request(str(i), p, 80) for i, p in enumerate(prompts(12))], RuntimeConfig()
    )
    served.submit(asked)
    for i, size in enumerate((64, 8, 128, 32, 16, 8)):
        served.wait(tokens=60 * (i + 1))
        served.change(kv_block_size=size, graph_capture="off" if i % 3 == 1 else "on")
        assert served.core.runner.pool.block_size == served.core.rows.block_size == size
        assert served.core.allocator.blocks == 256 * 16 // size
    served.wait(ended=12)
    assert served.tokens == expected
    assert set(served.ended.values()) == {Finish.LENGTH}
    assert served.core.allocator.allocated_blocks == 0
    assert served.core.runner.steps["graph"] > 0
    assert served.core.barrier.rollbacks == 0


def test_what_would_not_fit_is_refused_and_everything_runs_on(served: Served) -> None:
    """30 short sequences take 30 blocks of 128 tokens; the pool has 32, half of them taken away."""
    served.core.faults.inject({"fault": "kv_pool_halved"})
    assert served.core.allocator.blocks == 128
    asked = [request(str(i), [66] * 3, 400) for i in range(30)]
    # They stand still while each is in its first block: later some are sent back, and the rest fit.
    served.stand_at = 60
    served.submit(asked)
    served.wait(tokens=60)
    with pytest.raises(NotPossible, match=r"blocks of 128 tokens would be needed.*has 16"):
        served.change(kv_block_size=128)
    assert served.core.runtime.running.config.kv_block_size == 16
    assert served.core.runtime.running.config_version == 1
    for one in asked:
        served.core.cancel(one)
    served.wait(ended=30)
    assert served.change(kv_block_size=128) == 2
    assert served.core.allocator.blocks == 16
    served.core.faults.inject({"fault": "none"})
    assert served.core.allocator.blocks == 32


def test_half_the_pool_is_gone_and_comes_back_and_no_token_changes(model: Llama) -> None:
    expected, _ = bench(model).generate(
        [request(str(i), [66 + i] * 150, 60) for i in range(6)], RuntimeConfig()
    )
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=80))
    try:
        subject.submit([request(str(i), [66 + i] * 150, 60) for i in range(6)])
        subject.wait(tokens=12)
        assert subject.core.faults.inject({"fault": "kv_pool_halved"}) == ["kv_pool_halved"]
        assert subject.core.reading().kv_blocks == 40
        assert subject.core.reading().kv_usage_ratio <= 1
        assert subject.core.scheduler.preemptions > 0
        subject.wait(ended=6)
        subject.core.faults.inject({"fault": "none"})
        assert subject.core.reading().kv_blocks == 80
    finally:
        subject.core.stop()
    assert subject.tokens == expected


def test_a_pool_whose_half_holds_no_whole_sequence_is_not_halved() -> None:
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=62))
    try:
        with pytest.raises(NotPossible, match="half of 62 blocks would not hold one sequence"):
            subject.core.faults.inject({"fault": "kv_pool_halved"})
        assert subject.core.faults.active == set()
        assert subject.core.allocator.blocks == 62
    finally:
        subject.core.stop()


def test_a_pool_whose_last_block_would_be_cut_off_is_refused() -> None:
    """33 blocks of 16 tokens hold a sequence of 520; 4 of 128 do not."""
    subject = Served(EngineConfig(model_len_max=520, kv_pool_blocks=33))
    try:
        with pytest.raises(NotPossible, match="one sequence of 520 tokens needs 5") as caught:
            subject.change(kv_block_size=128)
        assert caught.value.knob == "kv_block_size"
        assert subject.change(kv_block_size=8) == 2
    finally:
        subject.core.stop()


def test_a_failed_proof_puts_everything_back(model: Llama, served: Served) -> None:
    expected, _ = bench(model).generate([request("a", [70] * 30, 120)], RuntimeConfig())
    served.submit([request("a", [70] * 30, 120)])
    served.wait(tokens=10)
    graphs, pool = served.core.runner.captured, served.core.runner.pool
    served.expect_otherwise()
    with pytest.raises(NotPossible, match="taken back, its proof failed"):
        served.change(kv_block_size=64, max_num_seqs=7)
    assert served.core.runner.pool is pool
    assert served.core.runner.captured is graphs
    assert served.core.rows.block_size == 16
    assert served.core.runtime.running.config == RuntimeConfig()
    assert served.core.runtime.current.config_version == 1
    assert served.core.barrier.rollbacks == 1
    served.wait(ended=1)
    assert served.tokens == expected


def test_pins_and_what_is_cached_outlive_a_failed_change_and_pins_every_other(
    model: Llama,
) -> None:
    config = EngineConfig(model_len_max=512, kv_pool_blocks=256, prefix_cache="on")
    subject = Served(config)
    core, hot = subject.core, np.full(96, 66)
    try:
        core.scheduler.prefixes.pin(hot, "")

        def ask(name: str) -> int:
            one = request(name, [66] * 96 + [1], 1)
            subject.submit([one])
            subject.wait(ended=len(subject.ended) + 1)
            return one.cached_tokens

        assert (ask("first"), ask("again"), len(core.allocator.pinned)) == (0, 96, 6)
        known = dict(core.barrier.canary.known)
        subject.expect_otherwise()
        for values in ({"prefix_cache": "off"}, {"kv_block_size": 64}):
            with pytest.raises(NotPossible, match="taken back, its proof failed"):
                subject.change(**values)
            assert (ask(f"after {values}"), len(core.allocator.pinned)) == (96, 6)
        core.barrier.canary.known |= known
        for i, size in enumerate((8, 16)):
            subject.change(kv_block_size=size)
            assert len(core.allocator.pinned) == 0
            assert (ask(f"recut {i}"), len(core.allocator.pinned)) == (0, 96 // size)
        assert core.reset_prefix_cache() > 0
        assert (ask("flushed"), len(core.allocator.pinned)) == (0, 6)
    finally:
        core.stop()


def test_a_lost_graph_is_not_built_again_until_it_is_mended(served: Served) -> None:
    runner, faults = served.core.runner, served.core.faults
    assert isinstance(runner.captured, Graphs)
    assert faults.inject({"fault": "capture_lost"}) == ["capture_lost"]
    assert runner.captured is None
    served.change(kv_block_size=32)
    assert runner.captured is None
    served.change(graph_capture="off")
    with pytest.raises(NotPossible, match="graph_capture: the device does not take a graph now"):
        served.change(graph_capture="on")
    served.submit([request("a", [70] * 30, 10)])
    served.wait(ended=1)
    assert runner.steps["graph"] == 0
    assert faults.inject({"fault": "none"}) == []
    assert runner.captured is None  # it was turned off meanwhile
    served.change(graph_capture="on")
    assert isinstance(runner.captured, Graphs)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_reblocking_keeps_every_token_of_every_sequence(size: int) -> None:
    rng = np.random.default_rng(size)
    rows = Rows(rows=8, model_len_max=300, block_size=16)
    old = KVPool(layers=2, kv_heads=2, head_dim=4, blocks=100, block_size=16)
    for tensor in (*old.keys, *old.values):
        tensor.normal_()
    allocator = PagedAllocator(100)
    for length in (1, 16, 17, 300, 128):
        row = rows.open(np.zeros(length, np.int64), 300, ignore_eos=True, has_stop=False,
                        begun=False)  # fmt: skip
        blocks = allocator.allocate(-(-length // 16))
        assert blocks is not None
        rng.shuffle(blocks)
        rows.append_blocks(row, blocks)
        rows.computed[row] = length
    new = KVPool(layers=2, kv_heads=2, head_dim=4, blocks=100, block_size=size)
    layout = reblock(rows, old, new, PrefixCache(PagedAllocator(100), size))
    assert layout is not None
    assert layout.prefixes.allocator.allocated_blocks == blocks_needed(rows, size)
    before = dense(old, rows)
    rows.use(layout.tables)
    after = dense(new, rows)
    assert all(torch.equal(before[row], after[row]) for row in before)
    assert reblock(rows, new, old, PrefixCache(PagedAllocator(3), 16)) is None


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_what_sequences_share_they_share_in_blocks_of_another_size(size: int) -> None:
    """Four blocks of 16 are shared by three, of which one has computed nothing else."""
    rows = Rows(rows=8, model_len_max=300, block_size=16)
    old = KVPool(layers=1, kv_heads=2, head_dim=4, blocks=100, block_size=16)
    for tensor in (*old.keys, *old.values):
        tensor.normal_()
    allocator = PagedAllocator(100)
    shared = allocator.allocate(4)
    assert shared is not None
    for length in (150, 64, 70):
        row = rows.open(np.zeros(length, np.int64), 300, ignore_eos=True, has_stop=False,
                        begun=False)  # fmt: skip
        own = allocator.allocate(-(-length // 16) - 4)
        assert own is not None
        rows.append_blocks(row, [*shared, *own])
        rows.computed[row] = length
    new = KVPool(layers=1, kv_heads=2, head_dim=4, blocks=100, block_size=size)
    layout = reblock(rows, old, new, PrefixCache(PagedAllocator(100), size))
    assert layout is not None
    assert layout.prefixes.allocator.allocated_blocks == blocks_needed(rows, size)
    alone = sum(-(-length // size) for length in (150, 64, 70))
    assert blocks_needed(rows, size) == alone - 2 * (64 // size)
    before = dense(old, rows)
    rows.use(layout.tables)
    after = dense(new, rows)
    assert all(torch.equal(before[row], after[row]) for row in before)


def test_the_cache_is_turned_on_and_off_and_recut_and_no_token_changes(model: Llama) -> None:
    begin = prompts(3)[0]
    asked = [request(str(i), [*begin, *begin, i], 60) for i in range(12)]
    expected, _ = bench(model).generate(
        [request(str(i), [*begin, *begin, i], 60) for i in range(12)], RuntimeConfig()
    )
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=256, prefix_cache="on"))
    try:
        for i, (size, caching) in enumerate(((64, "on"), (8, "on"), (8, "off"), (32, "on"))):
            subject.submit(asked[3 * i : 3 * i + 3])
            subject.wait(tokens=180 * i + 30)
            subject.change(kv_block_size=size, prefix_cache=caching)
            assert subject.core.scheduler.prefixes.on is (caching == "on")
            assert subject.core.scheduler.prefixes.block_size == size
        subject.wait(ended=12)
        assert subject.core.allocator.allocated_blocks == 0
        assert subject.core.scheduler.prefix_hits > 0
        assert subject.core.barrier.rollbacks == 0
    finally:
        subject.core.stop()
    assert subject.tokens == expected


def dense(pool: KVPool, rows: Rows) -> dict[int, torch.Tensor]:
    """KV of each sequence as (layers · 2, heads, tokens, head_dim), whatever the blocks."""
    found = {}
    for row in np.flatnonzero(rows.owned).tolist():
        position = np.arange(rows.computed[row])
        slot = rows.tables[row, position // pool.block_size] * pool.block_size
        slot = torch.from_numpy(slot + position % pool.block_size)
        parts = [pool.read(layer, slot) for layer in range(len(pool.keys))]
        found[row] = torch.stack([part for layer in parts for part in layer])
    return found
