"""The figures and the map of a KV pool are what one finds by looking at every block."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import memory as subject
from engine.exec.rows import Rows
from engine.knobs import RuntimeConfig
from engine.kv.contiguous import ALLOCATORS
from engine.kv.pool import KVPool
from engine.kv.prefix import PrefixCache
from engine.kv.stats import entropy_bits, stranded
from engine.memory import Blocks, blocks, described, memory
from engine.sched.request import Finish
from engine.sched.scheduler import Scheduler
from tests.engine.conftest import request


@pytest.mark.parametrize(
    ("runs", "bits", "size", "lost"),
    [
        pytest.param([], None, 4, 0, id="nothing free: no entropy, not 0"),
        pytest.param([64], 0.0, 16, 0, id="one run"),
        pytest.param([16] * 4, 2.0, 16, 0, id="four that serve"),
        pytest.param([1] * 4, 2.0, 16, 4, id="four that do not, of the same entropy"),
        pytest.param([4] * 8, 3.0, 4, 0, id="more is free, and the entropy is higher"),
        pytest.param([2, 1, 1], 1.5, 2, 2, id="unequal"),
        pytest.param([7, 9], 0.98869940828849, 4, 4, id="what is left of each"),
    ],
)
def test_entropy_and_what_is_stranded(
    runs: list[int], bits: float | None, size: int, lost: int
) -> None:
    lengths = np.array(runs, np.int64)
    assert entropy_bits(lengths) == (bits if bits is None else pytest.approx(bits))
    assert stranded(lengths, size) == lost


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(1, 250))
def test_entropy_and_stranding_keep_their_bounds(runs: list[int], size: int) -> None:
    lengths = np.array(runs, np.int64)
    bits = entropy_bits(lengths)
    assert bits is not None
    assert 0 <= bits <= math.log2(len(runs)) + 1e-9
    served = sum(length // size for length in runs)
    assert stranded(lengths, size) == sum(runs) - served * size
    assert stranded(lengths, 1) == 0


def scheduler(kind: str, *, total: int = 64, caching: bool = False) -> Scheduler:
    rows = Rows(rows=64, model_len_max=512, block_size=16)
    return Scheduler(rows, PrefixCache(ALLOCATORS[kind](total), 16, on=caching))


def step(tried: Scheduler) -> None:
    plan = tried.plan(RuntimeConfig(), 1.0)
    assert plan is not None
    tried.commit(plan, np.full(len(plan.sampled), 65, np.int64), 1.0, 1.0)


def test_the_figures_of_a_contiguous_pool_with_holes() -> None:
    tried = scheduler("contiguous", total=32)
    for i in range(8):
        tried.add(request(str(i), [66] * 33, 32))
    step(tried)
    for one in list(tried.running)[::2]:
        tried.abandon(one, Finish.ABORT, 1.0)
    tried.add(request("waits", [66] * 100, 29))
    seen = memory(tried)
    assert seen.runs.tolist() == [4] * 4
    assert (seen.longest, seen.entropy_bits) == (4, 2.0)
    assert sorted(seen.asked) == [4, 4, 4, 4, 8]
    assert seen.stranded_tokens() == {"median": 0, "largest": 16 * 16}
    assert seen.waste_tokens == 4 * (64 - 34)
    assert seen.run_counts() == [
        ("1", 0), ("2", 0), ("4", 4), ("8", 4), ("16", 4), ("32", 4), ("+Inf", 4),
    ]  # fmt: skip


def test_a_paged_pool_strands_nothing_and_has_no_entropy() -> None:
    tried = scheduler("paged", total=32, caching=True)
    for i in range(4):
        tried.add(request(str(i), [i] * 33, 3 if i % 2 else 9))
    for _ in range(4):
        step(tried)
    seen = memory(tried)
    assert tried.allocator.cached_blocks == 4
    assert int(seen.runs.sum()) == tried.allocator.available_blocks == 32 - 6
    assert len(seen.runs) > 1
    assert seen.entropy_bits is None
    assert seen.stranded_tokens() == {"median": 0, "largest": 0}
    assert seen.waste_tokens == 2 * (48 - 37)
    assert memory(scheduler("paged")).stranded_tokens() == {}


def told(pool: Blocks) -> list[dict[str, Any]]:
    """All runs, page by page."""
    runs: list[dict[str, Any]] = []
    start: int | None = 0
    while start is not None:
        page = described(pool, start)
        assert len(page["runs"]) <= subject.MAP_RUNS_MAX
        runs += page["runs"]
        start = page["next"]
    return runs


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["paged", "cached", "contiguous"]),
    lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=12),
    steps=st.integers(1, 20),
    page=st.sampled_from([1, 3, 2048]),
)
def test_the_map_tells_of_every_block_what_the_tables_say(
    kind: str, lengths: list[tuple[int, int]], steps: int, page: int
) -> None:
    tried = scheduler("contiguous" if kind == "contiguous" else "paged", caching=kind == "cached")
    for i, (prompt, answer) in enumerate(lengths):
        tried.add(request(f"r{i}", [66 + i % 2] * prompt, answer))
    for _ in range(steps):
        if tried.running or tried.waiting:
            step(tried)
    tried.allocator.withhold(4)
    pool = KVPool(layers=1, kv_heads=1, head_dim=4, blocks=64, block_size=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "MAP_RUNS_MAX", page)
        runs = told(blocks(tried, pool))
    states: list[str] = []
    held: Counter[str] = Counter()
    rows = tried.rows
    for run in runs:
        assert list(run) == ["start", "blocks", "state", "tokens", "request", "references"]
        assert run["start"] == len(states)
        assert run["blocks"] > 0
        states += [run["state"]] * run["blocks"]
        if run["state"] != "allocated":
            assert (run["request"], run["references"]) == (None, 0)
            assert run["tokens"] == (16 * run["blocks"] if run["state"] == "cached" else 0)
            continue
        for block in range(run["start"], run["start"] + run["blocks"]):
            owners = [
                one for one in tried.running
                if block in rows.tables[one.row, : rows.owned[one.row]]
            ]  # fmt: skip
            assert run["request"] == owners[0].id
            assert run["references"] == len(owners)
        held[run["request"]] += run["tokens"]
    allocator, count = tried.allocator, Counter(states)
    assert len(states) == pool.blocks
    assert states[0] == "scratch"
    assert states[65:] == ["canary"] * len(pool.canary)
    assert count["free"] == allocator.free_blocks
    assert count["cached"] == allocator.cached_blocks
    assert count["allocated"] == allocator.allocated_blocks
    assert count["withheld"] == allocator.withheld_blocks
    if kind != "cached":
        assert held == Counter({one.id: int(rows.computed[one.row]) for one in tried.running})


def test_neighbours_in_one_state_are_told_apart_by_whose_they_are() -> None:
    tried = scheduler("contiguous")
    for name in ("a", "b" * 300):
        tried.add(request(name, [66] * 20, 45))
    step(tried)
    pool = KVPool(layers=1, kv_heads=1, head_dim=4, blocks=64, block_size=16)
    page = described(blocks(tried, pool), 3)
    assert page["next"] is None
    assert page["counts"] == {
        "free": 56, "cached": 0, "allocated": 8, "withheld": 0, "scratch": 1, "canary": 2,
    }  # fmt: skip
    assert (page["block_size"], page["blocks"]) == (16, 67)
    rest = [(run["start"], run["blocks"], run["request"], run["tokens"]) for run in page["runs"]]
    assert rest == [
        (3, 2, "a", 0), (5, 4, "b" * 128, 20), (9, 56, None, 0), (65, 2, None, 0),
    ]  # fmt: skip
