"""Each cause against a queueing model: named when it is true, refuted when it is not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from controlplane.diagnosis.cause import SCORE_MIN, Finding, Scene, causes
from controlplane.diagnosis.scene import EngineFacts, ObjectiveFacts
from tests.controlplane.plant import START, Plant
from tracing.types import Grid

TTFT = ObjectiveFacts(
    "ttft",
    "TTFT within 500 ms",
    "latency",
    {"source": "metric", "metric": "vllm:time_to_first_token_seconds", "threshold_ms": 500},
    0.95,
    500,
)
GAP = ObjectiveFacts(
    "itl",
    "token gap within 20 ms",
    "latency",
    {"source": "metric", "metric": "vllm:inter_token_latency_seconds", "threshold_ms": 20},
    0.95,
    20,
)
QUIET_S, BAD_S = 240.0, 60.0


def scene(plant: Plant, objective: ObjectiveFacts, *, window_s: float = 15.0) -> Scene:
    """Four quiet minutes and one of trouble, up to now."""
    bad_since = START + timedelta(seconds=QUIET_S)
    return Scene(
        reader=plant.store,
        now=plant.now,
        engine=EngineFacts(
            plant.name, plant.service, dict(plant.values), plant.knobs(), plant.config_version
        ),
        objective=objective,
        bad_since=bad_since,
        incident=Grid(bad_since, bad_since + timedelta(seconds=BAD_S), window_s),
        reference=Grid(START, bad_since - timedelta(seconds=window_s), window_s),
    )


def trouble(plant: Plant, **changes: float) -> Plant:
    plant.run_until(QUIET_S)
    for name, value in changes.items():
        setattr(plant, name, value)
    plant.run_until(QUIET_S + BAD_S + 1)
    return plant


def examine(slug: str, plant: Plant, objective: ObjectiveFacts, **more: float) -> Finding:
    return causes()[slug].examine(scene(plant, objective, **more))


def refuted_by(finding: Finding) -> str:
    return " | ".join(f.sentence for f in finding.evidence if f.required and not f.supports)


@pytest.mark.parametrize("seed", range(3))
def test_a_cap_below_the_arrivals_is_named_with_its_numbers(seed: int) -> None:
    plant = trouble(Plant(seed=seed), rate=45.0)
    found = examine("running_cap_too_small", plant, TTFT)
    assert found.score >= 0.9, refuted_by(found)
    assert "TTFT p99 is" in found.because
    assert "wait behind a cap of 8 running" in found.because
    (wish,) = found.remedy
    assert wish.knob == "max_num_seqs"
    assert wish.to > 16
    assert examine("batch_too_large", plant, TTFT).score < SCORE_MIN


def test_short_windows_and_scrapes_tell_the_same() -> None:
    plant = trouble(Plant(scrape_s=1.0), rate=45.0)
    found = examine("running_cap_too_small", plant, TTFT, window_s=5.0)
    assert found.score >= 0.9, refuted_by(found)


def test_a_cap_is_not_to_blame_when_nobody_waits_for_it() -> None:
    plant = trouble(Plant(), slow=1.0)
    found = examine("running_cap_too_small", plant, TTFT)
    assert found.score < SCORE_MIN
    refuted = refuted_by(found)
    assert "Nobody was seen to wait" in refuted or "of the 8 allowed to run did" in refuted
    assert found.evidence, "a refuted cause still says what speaks against it"


def test_a_queue_of_a_quarter_of_the_time_is_the_caps_as_well() -> None:
    plant = Plant()
    plant.run_until(QUIET_S)
    for second in range(int(BAD_S) + 1):
        plant.rate = 90.0 if second % 4 == 0 else 4.0
        plant.run_until(QUIET_S + second + 1)
    found = examine("running_cap_too_small", plant, TTFT)
    assert found.score >= SCORE_MIN, refuted_by(found)


def test_a_cap_is_not_to_blame_when_memory_is_the_limit() -> None:
    plant = Plant(rate=15.0, kv_tokens=1500)
    plant.values["max_num_seqs"] = 10
    trouble(plant, rate=60.0)
    found = examine("running_cap_too_small", plant, TTFT)
    assert found.score < SCORE_MIN
    assert "memory is the limit" in refuted_by(found)


def test_a_remedy_never_asks_for_more_than_the_kv_cache_could_hold() -> None:
    plant = trouble(Plant(kv_tokens=2200), rate=60.0)
    found = examine("running_cap_too_small", plant, TTFT)
    (wish,) = found.remedy
    assert wish.limit is not None
    assert wish.limit < 16


def test_a_token_objective_is_none_of_the_caps_business() -> None:
    plant = trouble(Plant(), rate=45.0)
    assert examine("running_cap_too_small", plant, GAP).score < SCORE_MIN


def test_an_unread_engine_is_not_judged_by_guess() -> None:
    plant = trouble(Plant(), rate=45.0)
    plant.values.clear()
    plant.knobs = dict  # type: ignore[method-assign]
    found = examine("running_cap_too_small", plant, TTFT)
    assert found.score < SCORE_MIN
    assert "no agent reads" in refuted_by(found)


def test_an_engine_that_says_nothing_scores_nothing() -> None:
    plant = Plant(silent=True)
    trouble(plant, rate=45.0)
    for cause in causes().values():
        for objective in (TTFT, GAP):
            assert cause.examine(scene(plant, objective)).score < SCORE_MIN


def test_long_prompts_in_a_step_are_named_and_the_chunk_is_cut() -> None:
    plant = Plant(rate=4.0, output=60)
    plant.values["max_num_seqs"] = 32
    trouble(plant, prompt=2000, rate=6.0)
    found = examine("batch_too_large", plant, GAP)
    assert found.score >= 0.9, refuted_by(found)
    assert "for prompt tokens" in found.because
    assert found.remedy[0].knob in ("prefill_chunk_tokens", "max_num_batched_tokens")
    assert all(w.to < plant.values[w.knob] for w in found.remedy)


def test_a_large_decode_batch_is_named_and_the_cap_is_lowered() -> None:
    plant = Plant(rate=8.0, prompt=10, output=100, c=0.0006)
    plant.values["max_num_seqs"] = 256
    trouble(plant, rate=15.0)
    found = examine("batch_too_large", plant, GAP)
    assert found.score >= 0.9, refuted_by(found)
    assert "running requests" in found.because
    (wish,) = found.remedy
    assert wish.knob == "max_num_seqs"
    assert wish.to < 32


def test_a_slowed_engine_is_not_blamed_on_its_batch() -> None:
    """The same tokens per step take three times as long: a neighbour, a clock, a throttle."""
    plant = Plant(rate=6.0)
    plant.values["max_num_seqs"] = 32
    trouble(plant, slow=6.0)
    found = examine("batch_too_large", plant, GAP)
    assert found.score < SCORE_MIN, [f.sentence for f in found.evidence]


def test_every_cause_has_a_label_a_docstring_and_a_runbook() -> None:
    for slug, cause in causes().items():
        assert cause.label
        assert type(cause).__module__.endswith(slug)
        runbook = Path(__file__).parents[3] / "docs" / "causes" / f"{slug}.md"
        text = runbook.read_text()
        for heading in ("What it means", "How it is recognised", "Rivals", "What Trimtab does",
                        "What a person can do"):  # fmt: skip
            assert f"## {heading}" in text, f"{runbook.name}: no heading {heading!r}"
