"""The prompts of a step are of like length, and nobody waits for ever for their like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.knobs import LENGTH_WINDOW_ADAPTIVE, RuntimeConfig
from engine.kv.allocator import PagedAllocator
from engine.sched.length_fit import LogNormal, Weibull, fit
from engine.sched.length_window import (
    FIT_DISTANCE_MAX,
    LENGTHS_MIN,
    SLICE_TOKENS_MIN,
    adaptive_window,
    slice_tokens,
)
from engine.sched.request import Finish, Request
from engine.sched.scheduler import Plan
from tests.engine.conftest import conserved, request
from tests.engine.test_scheduler import scheduler, step

SHARES = np.arange(1, 2001) / 2001
ADAPTIVE = RuntimeConfig(length_window_tokens=LENGTH_WINDOW_ADAPTIVE)


def spread(plan: Plan) -> int:
    lengths = [part.request.to_compute for part in plan.chunks]
    return max(lengths) - min(lengths) if lengths else 0


def admitted(plan: Plan) -> list[Request]:
    """Who begins in this step (nothing is cached here)."""
    return [part.request for part in plan.chunks if part.start == 0]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), max_size=40),
    window=st.integers(1, 200),
    budget=st.integers(64, 600),
    chunk=st.integers(32, 400),
    seqs=st.integers(1, 40),
    blocks=st.sampled_from([32, 48, 512]),
)
def test_a_step_that_takes_prompts_in_keeps_them_alike_and_begins_with_the_first_in_the_queue(
    lengths: list[tuple[int, int]], window: int, budget: int, chunk: int, seqs: int, blocks: int
) -> None:
    subject = scheduler(blocks)
    config = RuntimeConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        prefill_chunk_tokens=chunk,
        length_window_tokens=window,
    )
    asked = [request(str(i), [66] * p, n) for i, (p, n) in enumerate(lengths)]
    for one in asked:
        subject.add(one)
    first = subject.waiting[0] if asked else None
    while (done := step(subject, config)) is not None:
        plan, _ = done
        conserved(subject)
        assert spread(plan) <= window
        if new := admitted(plan):
            assert new[0] is first
        first = subject.waiting[0] if subject.waiting else None
    assert all(one.finish is Finish.LENGTH for one in asked)
    assert all(one.generated == one.max_tokens for one in asked)
    assert subject.allocator.allocated_blocks == 0


def test_a_long_prompt_comes_to_its_turn_though_short_ones_never_cease() -> None:
    subject = scheduler()
    config = RuntimeConfig(length_window_tokens=64, max_num_batched_tokens=128)
    turns = {}
    for turn in range(40):
        subject.add(request(f"short {turn}", [66] * 100, 2))
        if turn == 3:
            subject.add(request("long", [66] * 400, 2))
        done = step(subject, config)
        assert done is not None
        for one in admitted(done[0]):
            turns[one.id] = turn
    assert turns["long"] <= 8
    assert turns["short 30"] > turns["long"]


def test_those_behind_pass_who_does_not_fit_and_he_is_first_in_the_next_step() -> None:
    subject = scheduler()
    config = RuntimeConfig(length_window_tokens=64)
    for name, length in (("a", 20), ("long", 300), ("b", 84), ("c", 85)):
        subject.add(request(name, [66] * length, 9))
    seen = []
    for _ in range(3):
        done = step(subject, config)
        assert done is not None
        seen.append([one.id for one in admitted(done[0])])
    assert seen == [["a", "b"], ["long"], ["c"]]


def test_what_a_prompt_has_left_to_compute_counts_not_what_the_cache_holds() -> None:
    subject = scheduler(caching=True)
    config = RuntimeConfig(length_window_tokens=8)
    subject.add(request("before", [66] * 320, 1))
    step(subject, config)
    for name, length in (("cached", 330), ("short", 12)):
        subject.add(request(name, [66] * length, 4))
    done = step(subject, config)
    assert done is not None
    assert {part.request.id: part.count for part in done[0].chunks} == {"cached": 10, "short": 12}


def test_a_window_that_gets_smaller_lets_what_was_begun_go_on() -> None:
    subject = scheduler()
    for name, length in (("a", 300), ("b", 40)):
        subject.add(request(name, [66] * length, 2))
    step(subject, RuntimeConfig(prefill_chunk_tokens=32))
    subject.add(request("c", [66] * 40, 2))
    narrow = RuntimeConfig(prefill_chunk_tokens=32, length_window_tokens=16)
    order = []
    while (done := step(subject, narrow)) is not None:
        order += [part.request.id for part in done[0].chunks]
    assert order.count("a") > 5
    assert order.index("c") > len(order) - 3, "it waits for the long one, and then runs"


@pytest.mark.parametrize(
    ("free", "tokens"), [(0.0, 64), (0.05, 64), (0.1, 102), (0.5, 512), (1.0, 1024)]
)
def test_the_adaptive_window_is_as_wide_as_the_pool_is_free(free: float, tokens: int) -> None:
    assert adaptive_window(free) == tokens


def test_the_adaptive_window_narrows_as_the_pool_fills() -> None:
    subject = scheduler(blocks=64)
    seen = []
    for i in range(4):
        subject.add(request(str(i), [66] * 200, 20))
        step(subject, ADAPTIVE)
        seen.append(subject.lengths.window)
    assert seen == [1024, 816, 608, 400]


@pytest.mark.parametrize("truth", [Weibull(1.82, 142.6), Weibull(0.8, 500.0), LogNormal(100, 0.9)])
def test_a_fit_finds_the_distribution_and_says_that_it_fits(truth: Weibull | LogNormal) -> None:
    found = fit(np.array([truth.quantile(share) for share in SHARES]))
    assert found is not None
    assert type(found.best) is type(truth)
    assert found.distance < 0.01
    assert found.best.quantile(0.5) == pytest.approx(truth.quantile(0.5), rel=0.02)
    assert found.best.quantile(0.95) == pytest.approx(truth.quantile(0.95), rel=0.03)
    assert max(found.distances.values()) > 3 * found.distance


def test_a_published_fit_is_told_from_its_own_table() -> None:
    """Weibull(1.82, 142.6) was said of a P50 of 87 and a P99 of 426; it has 117 and 330."""
    published = Weibull(1.82, 142.6)
    assert published.quantile(0.5) == pytest.approx(117, abs=1)
    assert published.quantile(0.99) == pytest.approx(330, abs=1)
    assert Weibull(1.19, 118).quantile(0.5) == pytest.approx(87, abs=1)
    assert Weibull(1.19, 118).quantile(0.99) == pytest.approx(426, abs=2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8192), min_size=1, max_size=200))
def test_any_lengths_are_fitted_or_refused_and_the_distance_is_one(lengths: list[int]) -> None:
    found = fit(np.array(lengths))
    assert (found is None) == (len(set(lengths)) == 1)
    if found is not None:
        assert all(0 < distance <= 1 for distance in found.distances.values())
        assert found.distance == min(found.distances.values())
        assert 32 <= slice_tokens(512, found) <= 512


def test_the_distance_is_kolmogorovs() -> None:
    """By hand: lengths 1, 2, 2, 4; the greatest step between what was seen and what is given."""
    found = fit(np.array([1, 2, 2, 4]))
    assert found is not None
    given = found.best.share_below(np.array([1.0, 2.0, 4.0]))
    seen = [(0, 0.25), (0.25, 0.75), (0.75, 1)]
    steps = [abs(g - s) for g, pair in zip(given, seen, strict=True) for s in pair]
    assert found.distance == pytest.approx(max(steps))


def test_slices_are_the_smaller_the_shorter_prompts_are() -> None:
    slices = []
    for scale in (50, 100, 500, 5000):
        lengths = np.array([Weibull(1.0, scale).quantile(share) for share in SHARES])
        slices.append(slice_tokens(512, fit(lengths)))
    # 512 ÷ (1 + 0.5 · 512 ÷ scale), as the prompts of a scale decay
    assert slices == pytest.approx([84, 144, 339, 487], abs=3)
    assert slice_tokens(512, None) == 512
    assert slice_tokens(SLICE_TOKENS_MIN, fit(np.array([1, 2, 3]))) == SLICE_TOKENS_MIN


def test_a_fit_too_far_off_is_not_believed() -> None:
    found = fit(np.array([8] * 500 + [8000] * 12))
    assert found is not None
    assert found.distance > FIT_DISTANCE_MAX
    assert slice_tokens(512, found) == 512


def test_adaptive_it_learns_from_the_prompts_that_come_and_off_it_cuts_nothing() -> None:
    subject = scheduler()
    long = [66] * 480
    for i in range(LENGTHS_MIN):
        subject.add(request(str(i), [66] * (4 + i % 40), 1))
    while step(subject, ADAPTIVE) is not None:
        pass
    assert subject.lengths.fit is not None
    for config, most in ((ADAPTIVE, 60), (RuntimeConfig(), 480)):
        subject.add(request("long", long, 1))
        parts = []
        while (done := step(subject, config)) is not None:
            parts += [part.count for part in done[0].chunks]
        assert max(parts) <= most
        assert sum(parts) == len(long)
        assert max(parts) == subject.lengths.slice or most == 480


def test_a_window_of_an_empty_pool_needs_no_fit() -> None:
    subject = scheduler()
    assert subject.lengths.group(ADAPTIVE, PagedAllocator(8), []) is not None
    assert subject.lengths.window == 1024
    assert subject.lengths.chunk_tokens(ADAPTIVE) == ADAPTIVE.prefill_chunk_tokens
