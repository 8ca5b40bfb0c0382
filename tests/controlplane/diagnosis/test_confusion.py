"""Every cause in every other's scene: the right one comes first, alone, and two at once are both.

Other seeds: `python -m pytest tests/controlplane/diagnosis/test_confusion.py` with SEEDS below.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from controlplane.diagnosis.cause import GPU_CLOCK, INFEASIBLE, SCORE_MIN, causes
from controlplane.diagnosis.ranking import Ranking
from controlplane.diagnosis.staging import METRICS
from tests.controlplane.diagnosis.scenes import (
    ANSWERED,
    FAULTS,
    GAP,
    PAIRS,
    TTFT,
    Fault,
    examined,
    plant,
    trouble,
    trouble_by,
)
from tests.controlplane.plant import Plant
from tests.memory_reader import MemoryReader

SEEDS = range(2)
by_name = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])


@cache
def run(fault: Fault, seed: int) -> tuple[Plant, Ranking]:
    plant = fault.run(seed)
    return plant, examined(plant, fault.objective)


def told(ranking: Ranking) -> str:
    """For the message of a failed test."""
    carry = [f for f in (*ranking.named, *ranking.rivals) if f.score >= SCORE_MIN]
    rows = [f"{f.cause} {f.score}: {e.supports} {e.sentence}" for f in carry for e in f.evidence]
    return "\n".join([ranking.best.because, *rows])


@pytest.mark.parametrize("seed", SEEDS)
@by_name
def test_the_right_cause_is_named_and_no_other(fault: Fault, seed: int) -> None:
    _, ranking = run(fault, seed)
    assert [finding.cause for finding in ranking.named] == [fault.cause], told(ranking)
    infeasible = fault.cause in ("slow_host", "load_beyond_capacity")
    assert (ranking.best.verdict == INFEASIBLE) is infeasible or fault.cause == "kv_pool_exhausted"


# How the house speaks: a look, a step's tokens that let something expect, an error of an estimate.
JARGON = re.compile(r"\blooks?\b|\berror\b|let expect|at the same tokens|at last\b|preempt", re.I)


@by_name
def test_evidence_is_said_in_words_a_person_on_call_knows(fault: Fault) -> None:
    _, ranking = run(fault, SEEDS[0])
    said = [fact.sentence for found in (*ranking.named, *ranking.rivals) for fact in found.evidence]
    assert [sentence for sentence in said if JARGON.search(sentence)] == []
    (waited,) = (text for text in said if re.search("(were|was) waiting in", text))
    assert re.search(r"the \d+ measurements \(one every 5 s\)", waited)


@by_name
def test_two_windows_are_enough(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.controlplane.diagnosis.scenes.BAD_S", 30.0)
    ranking = examined(fault.run(5), fault.objective)
    assert ranking.best.cause == fault.cause, told(ranking)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pair", PAIRS, ids=[" and ".join(sorted(pair[0])) for pair in PAIRS])
def test_two_faults_at_once_are_both_named(pair: tuple, seed: int) -> None:  # type: ignore[type-arg]
    expected, objective, make, happens = pair
    ranking = examined(trouble_by(make(seed), happens), objective)
    assert {finding.cause for finding in ranking.named} == expected, told(ranking)
    first, second = ranking.named
    assert ranking.because.startswith(f"{first.because}; besides, ")
    assert second.because.endswith(ranking.because.partition("; besides, ")[2])
    assert ranking.because.count(" p99 was ") == 1


@pytest.mark.parametrize("objective", [TTFT, GAP, ANSWERED], ids=lambda objective: objective.slug)
@pytest.mark.parametrize("load", [1.0, 1.3])
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_named_while_nothing_is_wrong(seed: int, load: float, objective) -> None:  # type: ignore[no-untyped-def]
    """A third more load within what the engine carries is no fault, nor is a steady one."""
    quiet = trouble(plant(seed, rate=15.0), rate=15.0 * load)
    ranking = examined(quiet, objective)
    assert ranking.named == (), told(ranking)


@by_name
def test_every_fact_has_its_number_its_bar_and_its_metric(fault: Fault) -> None:
    _, ranking = run(fault, SEEDS[0])
    for finding in (*ranking.named, *ranking.rivals):
        for fact in finding.evidence:
            about_the_promise = fact.sentence.startswith("“")
            assert fact.metric or about_the_promise, (finding.cause, fact.sentence)
            if finding in ranking.named and not about_the_promise:
                assert fact.threshold is not None, (finding.cause, fact.sentence)


@by_name
def test_a_paged_pool_is_never_called_fragmented(fault: Fault) -> None:
    engine, ranking = run(fault, SEEDS[0])
    if engine.contiguous:  # the same lengths, where they do no harm
        engine = fault.make(SEEDS[0])
        engine.apply({"kv_allocator": "paged"}, by="set-up")
        ranking = examined(trouble_by(engine, fault.happens), fault.objective)
    for finding in (*ranking.named, *ranking.rivals):
        words = [finding.because, finding.no_remedy, *(f.sentence for f in finding.evidence)]
        words += [wish.why for wish in finding.remedy]
        assert not any("fragment" in text.lower() for text in words), finding.cause


@by_name
def test_all_that_causes_read_of_an_engine_is_read_at_once(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()

    def recorded(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(reader: MemoryReader, metric: str, *rest: Any, **more: Any) -> Any:
            asked.add(metric)
            return read(reader, metric, *rest, **more)

        return reading

    for read in ("increase", "gauge", "histogram"):
        monkeypatch.setattr(MemoryReader, read, recorded(getattr(MemoryReader, read)))
    examined(run(fault, SEEDS[0])[0], fault.objective)
    assert asked - {GPU_CLOCK} <= set(METRICS)


def test_all_causes_are_in_the_matrix() -> None:
    assert {fault.cause for fault in FAULTS} == set(causes())
