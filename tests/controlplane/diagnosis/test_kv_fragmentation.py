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


def knobs(finding: Finding) -> list[tuple[str, object]]:
    return [(wish.knob, wish.to) for wish in finding.remedy]


@SEEDS
def test_free_blocks_that_lie_apart_are_named_with_their_numbers(seed: int) -> None:
    finding = found(trouble(contiguous(seed), **MIXED))
    assert finding.score >= 0.8, refuted_by(finding)
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
def test_the_same_lengths_do_no_harm_once_cured(seed: int) -> None:
    harmed = late(trouble(contiguous(seed), **MIXED))
    for cured in (contiguous(seed, compacted=True), plant(seed, **TOLD_MUCH)):
        assert late(trouble(cured, **MIXED)) < 0.4 * harmed


def test_moving_together_is_wished_for_first_and_a_paged_pool_where_that_is_on() -> None:
    finding = found(trouble(contiguous(), **MIXED))
    assert knobs(finding) == [("kv_compaction", "on"), ("kv_allocator", "paged")]
    assert "moved together, what is free is one run of" in finding.remedy[0].why
    finding = found(trouble(contiguous(compacted=True), **MIXED))
    assert knobs(finding) == [("kv_allocator", "paged")]


def test_a_paged_pool_comes_first_where_what_is_reserved_would_still_be_too_much() -> None:
    engine = trouble(contiguous(rate=13.0), **MIXED)
    finding = found(engine)
    assert finding.score >= SCORE_MIN, refuted_by(finding)
    assert knobs(finding) == [("kv_allocator", "paged"), ("kv_compaction", "on")]
    assert "would not serve what arrives" in finding.remedy[0].why
    assert late(trouble(contiguous(compacted=True, rate=13.0), **MIXED)) > 0.4


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
    """A few large runs, all alike: what is left of the pool is too little for one more."""
    engine = contiguous(seed, prompt=900, output=100, rate=3.0, kv_tokens=4400, b=0.0)
    ranking = examined(trouble(engine, rate=40.0), TTFT)
    assert [finding.cause for finding in ranking.named] == ["kv_pool_exhausted"], ranking.because
    assert "of the time that any waited" in refuted_by(found(engine))


def test_what_a_full_contiguous_pool_reserves_is_wished_back() -> None:
    engine = contiguous(prompt=100, output=900, rate=1.0, kv_tokens=4400)
    trouble(engine, rate=12.0)
    finding = causes()["kv_pool_exhausted"].examine(scene(engine, TTFT))
    assert finding.score >= SCORE_MIN, refuted_by(finding)
    assert knobs(finding)[0] == ("kv_allocator", "paged")
    share = re.match(r"(\d+)% of what requests hold is reserved for", finding.remedy[0].why)
    assert share is not None
    assert 30 < int(share[1]) < 60  # they are half-way through their answers, on average


def test_a_slow_host_that_fragments_a_pool_is_a_slow_host() -> None:
    engine = contiguous(rate=6.0, output=200)
    ranking = examined(trouble(engine, slow=3.0), TTFT)
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
