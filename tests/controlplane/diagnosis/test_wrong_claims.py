"""What looks like another cause than the one that was planted is not named for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from controlplane.diagnosis.cause import pool_grew
from controlplane.diagnosis.ranking import Ranking
from controlplane.diagnosis.scene import ObjectiveFacts
from tests.controlplane.diagnosis.scenes import (
    ANSWERED,
    BAD_S,
    GAP,
    QUIET_S,
    TTFT,
    examined,
    plant,
    scene,
    trouble_by,
)
from tests.controlplane.plant import Plant

Happens = Callable[[Plant], object]
SEEDS = pytest.mark.parametrize("seed", range(2))


def with_edit(values: dict[str, Any], **mechanics: Any) -> Happens:
    """Something happens to the engine, and somebody's hand is on a knob at that moment."""

    def happens(p: Plant) -> None:
        p.apply(values, by="alice")
        p.__dict__.update(mechanics)

    return happens


def becomes(**mechanics: Any) -> Happens:
    return lambda p: p.__dict__.update(mechanics)


def told(ranking: Ranking) -> str:
    rows = [
        f"{f.cause} {f.score}: {e.supports} {'!' * e.required} {e.sentence}"
        for f in (*ranking.named, *ranking.rivals)
        for e in f.evidence
    ]
    return "\n".join([ranking.best.because, *rows])


Harmless = tuple[str, dict[str, Any], ObjectiveFacts, Callable[[int], Plant], dict[str, Any]]
HARMLESS: dict[str, Harmless] = {
    "a short wait for others beside a load beyond capacity": (
        "load_beyond_capacity", {"max_wait_ms": 5}, TTFT,
        lambda seed: plant(seed, rate=25.0), {"rate": 140.0},
    ),
    "a short wait for others beside a cap too small": (
        "running_cap_too_small", {"max_wait_ms": 2}, TTFT,
        lambda seed: plant(seed, cap=8), {"rate": 45.0},
    ),
    "a cap lowered to what would do beside a load beyond any": (
        "load_beyond_capacity", {"max_num_seqs": 48}, TTFT,
        lambda seed: plant(seed, cap=64, rate=25.0), {"rate": 140.0},
    ),
    "a cap lowered to what would do beside a slow host": (
        "slow_host", {"max_num_seqs": 48}, TTFT,
        lambda seed: plant(seed, cap=64, rate=30.0), {"slow": 4.0},
    ),
    "a cap raised that was never reached beside a slow host": (
        "slow_host", {"max_num_seqs": 64}, GAP,
        lambda seed: plant(seed, cap=32, rate=25.0), {"slow": 1.8},
    ),
    "somewhat larger blocks beside half of the pool": (
        "kv_pool_exhausted", {"kv_block_size": 32}, TTFT,
        lambda seed: plant(seed, cap=64, rate=28.0, output=80, kv_tokens=6400),
        {"kv_tokens": 2400},
    ),
    "a smaller chunk beside a load beyond capacity": (
        "load_beyond_capacity", {"prefill_chunk_tokens": 256}, TTFT,
        lambda seed: plant(seed, rate=15.0, prompt=300), {"rate": 90.0},
    ),
    "nobody turned away by a threshold beside a full queue": (
        "load_beyond_capacity", {"shed_below_priority": 1}, ANSWERED,
        lambda seed: plant(seed, rate=25.0, queue_max=50), {"rate": 140.0},
    ),
}  # fmt: skip


@SEEDS
@pytest.mark.parametrize("case", HARMLESS)
def test_a_hand_on_a_harmless_knob_is_not_to_blame(case: str, seed: int) -> None:
    cause, values, objective, make, mechanics = HARMLESS[case]
    ranking = examined(trouble_by(make(seed), with_edit(values, **mechanics)), objective)
    assert [found.cause for found in ranking.named] == [cause], told(ranking)


@SEEDS
def test_a_cap_lowered_below_the_crowds_is_to_blame_though_it_would_do_for_the_mean(
    seed: int,
) -> None:
    engine = plant(seed, cap=64, rate=14.0)

    def crowds(until: float) -> None:
        while engine.t < until:
            engine.rate = 60.0 if int(engine.t) % 8 < 2 else 4.0
            engine.run_until(engine.t + 1)

    crowds(QUIET_S)
    engine.apply({"max_num_seqs": 8}, by="alice")
    crowds(QUIET_S + BAD_S + 1)
    ranking = examined(engine, TTFT)
    assert ranking.best.cause == "config_changed_by_hand", told(ranking)


@SEEDS
def test_of_two_hands_the_one_that_did_it_is_named(seed: int) -> None:
    def two(p: Plant) -> None:
        p.apply({"max_wait_ms": 2}, by="bob")
        p.run_until(QUIET_S + 5)
        p.apply({"max_num_seqs": 4}, by="alice")

    ranking = examined(trouble_by(plant(seed, rate=35.0), two), TTFT)
    assert ranking.best.cause == "config_changed_by_hand", told(ranking)
    assert ranking.best.facts["by"] == "alice"


@SEEDS
def test_a_slow_host_under_a_load_its_cap_would_carry_is_not_the_caps_fault(seed: int) -> None:
    engine = trouble_by(plant(seed, cap=32, rate=25.0), becomes(slow=4.0, rate=32.0))
    ranking = examined(engine, TTFT)
    assert [found.cause for found in ranking.named] == ["slow_host"], told(ranking)


@SEEDS
def test_a_slow_host_under_a_load_its_cap_would_not_carry_is_one_of_two(seed: int) -> None:
    engine = trouble_by(plant(seed, cap=8, rate=15.0), becomes(slow=2.5, rate=45.0))
    ranking = examined(engine, TTFT)
    named = {found.cause for found in ranking.named}
    assert named == {"slow_host", "running_cap_too_small"}, told(ranking)


@SEEDS
def test_a_slow_host_with_more_to_do_comes_before_the_size_of_its_batch(seed: int) -> None:
    engine = trouble_by(plant(seed, rate=15.0), becomes(slow=4.0, rate=19.0))
    ranking = examined(engine, GAP)
    assert ranking.best.cause == "slow_host", told(ranking)


@SEEDS
def test_long_answers_that_have_not_ended_do_not_make_a_host_slow(seed: int) -> None:
    """Each token attends to all before it, so a step of long answers takes longer."""
    engine = plant(seed, rate=25.0, h=2e-6, kv_tokens=200_000)
    ranking = examined(trouble_by(engine, becomes(output=4000, rate=0.2)), GAP)
    assert "slow_host" not in [found.cause for found in ranking.named], told(ranking)


@SEEDS
def test_a_lost_graph_with_more_to_do_is_no_large_batch(seed: int) -> None:
    engine = trouble_by(plant(seed, rate=12.0, eager_s=0.022), becomes(captured=False, rate=15.0))
    ranking = examined(engine, GAP)
    assert [found.cause for found in ranking.named] == ["graph_capture_lost"], told(ranking)


@SEEDS
def test_a_crowd_that_outgrows_the_graphs_is_a_crowd(seed: int) -> None:
    engine = plant(seed, cap=64, rate=15.0, graph_seqs_max=32)
    ranking = examined(trouble_by(engine, becomes(rate=140.0)), TTFT)
    assert [found.cause for found in ranking.named] == ["load_beyond_capacity"], told(ranking)


@SEEDS
def test_after_a_crowd_nobody_is_turned_away(seed: int) -> None:
    engine = plant(seed, rate=25.0, priorities={0: 0.5, 1: 0.5})
    engine.run_until(QUIET_S)
    engine.rate = 300.0
    engine.run_until(QUIET_S + 20)
    engine.rate = 25.0
    engine.run_until(QUIET_S + BAD_S + 1)
    ranking = examined(engine, TTFT)
    assert [wish for found in ranking.named for wish in found.remedy] == [], told(ranking)


@SEEDS
def test_a_few_sent_back_and_some_who_wait_do_not_make_long_gaps_between_tokens(seed: int) -> None:
    engine = plant(seed, cap=256, rate=8.0, prompt=10, output=100, c=0.0006, kv_tokens=4600)
    ranking = examined(trouble_by(engine, becomes(rate=15.0)), GAP)
    assert [found.cause for found in ranking.named] == ["batch_too_large"], told(ranking)


def test_a_pool_of_larger_blocks_has_not_become_smaller() -> None:
    engine = trouble_by(plant(), with_edit({"kv_block_size": 32}))
    assert pool_grew(scene(engine, TTFT)) == pytest.approx(1, abs=0.01)


@SEEDS
def test_a_slow_host_that_fills_the_pool_is_a_slow_host(seed: int) -> None:
    engine = plant(seed, cap=64, rate=18.0, output=80, kv_tokens=4000)
    ranking = examined(trouble_by(engine, becomes(slow=3.0)), TTFT)
    assert [found.cause for found in ranking.named] == ["slow_host"], told(ranking)


@SEEDS
def test_memory_taken_away_beside_steps_that_may_be_a_little_slower_is_all(seed: int) -> None:
    engine = plant(seed, cap=64, rate=28.0, output=80, kv_tokens=6400)
    ranking = examined(trouble_by(engine, becomes(kv_tokens=2400, slow=1.24)), TTFT)
    assert [found.cause for found in ranking.named] == ["kv_pool_exhausted"], told(ranking)
