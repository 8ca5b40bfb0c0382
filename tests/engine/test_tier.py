"""Preemption by swap: the KV that comes back is the KV that went, and nothing is computed twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.exec.capture import Graphs
from engine.knobs import RuntimeConfig
from engine.kv.tier import BLOCK_TOKENS
from engine.models.llama import SHAPES, Llama
from engine.sched.request import Finish, Request
from tests.engine.conftest import Bench, as_dense, bench, request
from tests.engine.test_barrier import Served

SWAP = RuntimeConfig(preemption="swap")
SHAPE = SHAPES["1.3m"]
BLOCK_BYTES = SHAPE.layers * 2 * SHAPE.kv_heads * BLOCK_TOKENS * SHAPE.head_dim * 4
PLENTY = 400 * BLOCK_BYTES


def asked(seed: int, count: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        request(str(i), rng.integers(0, 262, rng.integers(1, 150)), int(rng.integers(1, 120)))
        for i in range(count)
    ]


def long() -> list[Request]:
    return [request(str(i), [66 + i] * 100, 150) for i in range(8)]


def computed(subject: Bench, requests: list[Request], config: RuntimeConfig) -> int:
    """Prompt tokens that serving them took, those computed again among them."""
    subject.generate(requests, config)
    return sum(count for one in requests for _, _, count in one.chunks)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(2, 12),
    chunk=st.integers(32, 256),
    tier_blocks=st.sampled_from([0, 3, 12, 400]),
    caching=st.booleans(),
    captured=st.booleans(),
    depth=st.sampled_from([0, 16, 512]),
)
def test_tokens_and_logits_are_the_references_whatever_of_it_was_swapped(
    model: Llama, graphs: Graphs, seed: int, count: int, chunk: int, tier_blocks: int,
    caching: bool, captured: bool, depth: int,
) -> None:  # fmt: skip
    requests = asked(seed, count)
    subject = bench(
        model, blocks=32, graphs=graphs if captured else None, caching=caching,
        tier_bytes=tier_blocks * BLOCK_BYTES,
    )  # fmt: skip
    config = RuntimeConfig(
        preemption="swap", prefill_chunk_tokens=chunk, prefetch_depth_tokens=depth
    )
    tokens, logits = subject.generate(requests, config)
    for one in requests:
        as_dense(model, one, tokens[one.id], logits[one.id])
    tier = subject.scheduler.tier
    assert tier is not None
    assert tier.allocator.total == (tier_blocks if subject.scheduler.preemptions else 0)
    assert tier.allocator.allocated_blocks == 0
    assert tier.hits + tier.misses <= subject.scheduler.preemptions


def test_what_was_swapped_before_a_flush_begins_nobody_else(model: Llama) -> None:
    subject = bench(model, blocks=32, caching=True, tier_bytes=PLENTY)
    scheduler, requests = subject.scheduler, long()
    tier = scheduler.tier
    assert tier is not None
    flushed: list[Request] = []

    def flush_once() -> None:
        if not flushed and (swapped := [one for one in requests if tier.tokens(one)]):
            scheduler.prefixes.flush()
            flushed.extend(swapped)

    subject.generate(requests, SWAP, between=flush_once)
    assert flushed
    again = sum(count for _, _, count in flushed[0].chunks)
    assert again >= 2 * flushed[0].prompt_tokens  # computed anew, not copied back


def test_what_was_swapped_is_not_computed_again_but_its_last_token(model: Llama) -> None:
    again, swapped = (bench(model, blocks=32, tier_bytes=PLENTY) for _ in range(2))
    recomputed = computed(again, long(), RuntimeConfig())
    kept = computed(swapped, long(), SWAP)
    prompts = sum(one.prompt_tokens for one in long())
    tier = swapped.scheduler.tier
    assert tier is not None
    assert tier.hits == swapped.scheduler.preemptions == again.scheduler.preemptions > 0
    assert tier.misses == 0
    assert kept == prompts + tier.hits
    assert recomputed > kept


def test_where_the_tier_is_full_it_is_computed_again_and_counted(model: Llama) -> None:
    none, small = bench(model, blocks=32), bench(model, blocks=32, tier_bytes=2 * BLOCK_BYTES)
    recomputed = computed(none, long(), SWAP)
    assert recomputed == computed(small, long(), SWAP)
    for subject in (none, small):
        tier = subject.scheduler.tier
        assert tier is not None
        assert (tier.hits, tier.misses) == (0, subject.scheduler.preemptions)
        assert tier.misses > 0


def test_one_who_is_cancelled_while_swapped_leaves_nothing_behind(model: Llama) -> None:
    subject = bench(model, blocks=32, tier_bytes=PLENTY)
    scheduler, tier = subject.scheduler, subject.scheduler.tier
    assert tier is not None
    for i in range(3):
        scheduler.add(request(str(i), [66 + i] * 100, 200))
    while not scheduler.preemptions:
        plan = scheduler.plan(SWAP, 1.0)
        assert plan is not None
        sampled, _ = subject.runner.forward(plan)
        scheduler.commit(plan, sampled, 1.0, 2.0)
    victim = scheduler.waiting[0]
    kept = tier.tokens(victim)
    assert kept > 100
    assert tier.allocator.allocated_blocks == -(-kept // BLOCK_TOKENS)
    scheduler.abandon(victim, Finish.ABORT, 2.0)
    assert tier.tokens(victim) == tier.allocator.allocated_blocks == 0


def test_a_machine_without_memory_for_the_tier_computes_again(
    model: Llama, caplog: pytest.LogCaptureFixture
) -> None:
    subject = bench(model, blocks=32, tier_bytes=2**60)
    recomputed = computed(subject, long(), SWAP)
    assert recomputed == computed(bench(model, blocks=32), long(), RuntimeConfig())
    tier = subject.scheduler.tier
    assert tier is not None
    assert tier.misses == subject.scheduler.preemptions
    assert caplog.text.count("does not fit into") == 1


def test_swapped_kv_comes_back_into_blocks_of_another_size(model: Llama) -> None:
    expected, _ = bench(model).generate(long(), RuntimeConfig())
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=16, block_size=64))
    core = subject.core
    try:
        subject.change(preemption="swap")
        subject.submit(long())
        for i, size in enumerate((16, 8)):
            subject.wait(tokens=400 * (i + 1))
            subject.change(kv_block_size=size)
        subject.wait(ended=8)
        assert core.tier.hits > 0
        assert core.tier.allocator.allocated_blocks == 0
    finally:
        core.stop()
    assert subject.tokens == expected
    assert set(subject.ended.values()) == {Finish.LENGTH}


def test_a_tier_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="host_tier_bytes: got -1, allowed: 0 or more"):
        EngineConfig(host_tier_bytes=-1)
