"""Memory enough is free, but apart: named with its numbers, told from a full pool, and cured."""

from __future__ import annotations

import math
import re

import pytest

from controlplane.diagnosis.cause import SCORE_MIN, Finding, causes
from tests.controlplane.diagnosis.scenes import (
    GAP,
    MIXED,
    TOLD_MUCH,
    TTFT,
    contiguous,
    examined,
    plant,
    scene,
    trouble,
)
from tests.controlplane.plant import Plant

SEEDS = pytest.mark.parametrize("seed", range(3))


def found(engine: Plant) -> Finding:
    return causes()["kv_fragmentation"].examine(scene(engine, TTFT))


def refuted_by(finding: Finding) -> str:
    return " | ".join(f.sentence for f in finding.evidence if f.required and not f.supports)


def late(engine: Plant) -> float:
    """The share of the bad minute's requests."""
    shown = scene(engine, TTFT)
    times = shown.histogram("vllm:time_to_first_token_seconds")
    assert times is not None
    return (shown.late() or 0.0) / times.count


def stalled(engine: Plant) -> float:
    return engine.counters["engine:kv_alloc_stall_seconds_total"]


def knobs(finding: Finding) -> list[tuple[str, object]]:
    return [(wish.knob, wish.to) for wish in finding.remedy]


@SEEDS
def test_free_blocks_that_lie_apart_are_named_with_their_numbers(seed: int) -> None:
    finding = found(trouble(contiguous(seed), **MIXED))
    assert finding.score >= SCORE_MIN, refuted_by(finding)
    assert re.search(
        r"because for \d+% of the time a request found no run of free blocks long enough: it asked "
        r"for [\d.]+ in one, [\d.]+ were free and [\d.]+ the longest run$",
        finding.because,
    )
    free, longest, asked = (
        finding.facts[f"{name}_blocks"] for name in ("free", "longest_free_run", "asked")
    )
    assert longest < asked <= free
    said = next(f.sentence for f in finding.evidence if "with an entropy of" in f.sentence)
    runs, bits, most = map(float, re.findall(r"([\d.]+) (?:free runs|bits|if all)", said))
    assert most == pytest.approx(math.log2(runs), abs=0.1)
    assert 0 < bits <= most


@SEEDS
def test_either_knob_ends_the_stalls_and_the_harm(seed: int) -> None:
    engine = trouble(contiguous(seed), **MIXED)
    paged = trouble(plant(seed, **TOLD_MUCH), **MIXED)
    moved = trouble(contiguous(seed, compacted=True), **MIXED)
    assert max(late(paged), late(moved)) < 0.4 * late(engine)
    assert stalled(paged) == 0
    assert stalled(moved) < 0.1 * stalled(engine)


def test_moving_together_is_wished_for_first_and_a_paged_pool_where_that_is_on() -> None:
    finding = found(trouble(contiguous(), **MIXED))
    assert knobs(finding) == [("kv_compaction", "on"), ("kv_allocator", "paged")]
    assert "moved together, what is free is one run of" in finding.remedy[0].why
    finding = found(trouble(contiguous(compacted=True), **MIXED))
    assert knobs(finding) == [("kv_allocator", "paged")]


def test_an_engine_that_can_turn_neither_wants_a_person() -> None:
    shown = scene(trouble(contiguous(), **MIXED), TTFT)
    for knob in ("kv_compaction", "kv_allocator"):
        shown.engine.knobs[knob]["supported"] = False  # type: ignore[index]
    finding = causes()["kv_fragmentation"].examine(shown)
    assert finding.remedy == ()
    assert "can neither move its sequences together nor page its pool" in finding.no_remedy


@pytest.mark.parametrize("values", [{"kv_allocator": "paged"}, {}])
def test_where_no_run_is_needed_nothing_is_claimed(values: dict[str, str]) -> None:
    engine = trouble(contiguous(), **MIXED)
    del engine.values["kv_allocator"]
    engine.values |= values
    engine.knobs = dict  # type: ignore[method-assign]
    finding = found(engine)
    assert finding.score < SCORE_MIN
    assert not finding.applies
    assert (finding.remedy, len(finding.evidence)) == ((), 2)


@SEEDS
def test_a_pool_that_is_truly_full_is_told_apart_by_what_is_free_in_total(seed: int) -> None:
    """All ask for as much: whoever ends leaves a run for the next, and there is none to spare."""
    engine = trouble(contiguous(seed, spread=0.0), rate=10.0)
    ranking = examined(engine, TTFT)
    assert [finding.cause for finding in ranking.named] == ["kv_pool_exhausted"], ranking.because
    assert ": 0% of the time that any waited" in refuted_by(found(engine))
    assert ranking.best.remedy == ()
    assert "reserved for all that requests may become: a paged pool" in ranking.best.no_remedy
    assert late(trouble(plant(seed, **TOLD_MUCH, spread=0.0), rate=10.0)) < 0.5 * late(engine)


def test_a_slow_host_that_fragments_a_pool_is_a_slow_host() -> None:
    ranking = examined(trouble(contiguous(), slow=3.0), TTFT)
    assert [finding.cause for finding in ranking.named] == ["slow_host"], ranking.because


def test_stalls_nobody_measured_are_not_guessed_from_how_the_free_blocks_lie() -> None:
    engine = trouble(contiguous(), **MIXED)
    del engine.store.samples["engine:kv_alloc_stall_seconds_total"]
    finding = found(engine)
    assert finding.score < SCORE_MIN
    assert "lie apart was not measured" in refuted_by(finding)


def test_a_gap_between_tokens_begins_after_the_wait() -> None:
    shown = scene(trouble(contiguous(), **MIXED), GAP)
    assert causes()["kv_fragmentation"].examine(shown).score < SCORE_MIN
