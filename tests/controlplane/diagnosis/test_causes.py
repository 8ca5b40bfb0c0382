"""Each cause against a queueing model: named when it is true, refuted when it is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from controlplane.diagnosis.cause import SCORE_MIN, Finding, causes
from controlplane.diagnosis.scene import ObjectiveFacts
from tests.controlplane.diagnosis.scenes import (
    ANSWERED,
    BAD_S,
    GAP,
    QUIET_S,
    TTFT,
    contiguous,
    plant,
    scene,
    trouble,
    trouble_by,
)
from tests.controlplane.plant import Plant


def examine(slug: str, engine: Plant, objective: ObjectiveFacts, **more: float) -> Finding:
    return causes()[slug].examine(scene(engine, objective, **more))


def refuted_by(finding: Finding) -> str:
    return " | ".join(f.sentence for f in finding.evidence if f.required and not f.supports)


@pytest.mark.parametrize("seed", range(3))
def test_a_cap_below_the_arrivals_is_named_with_its_numbers(seed: int) -> None:
    engine = trouble(Plant(seed=seed), rate=45.0)
    found = examine("running_cap_too_small", engine, TTFT)
    assert found.score >= 0.9, refuted_by(found)
    assert re.match(
        r"TTFT p99 was [\d.]+ m?s from 00:\d\d:\d\d to 00:\d\d:\d\d because "
        r"\d+ requests waited behind a cap of 8 running$",
        found.because,
    )
    (wish,) = found.remedy
    assert wish.knob == "max_num_seqs"
    assert wish.to > 16
    assert "there is to be room for 25% more" in wish.why
    assert examine("batch_too_large", engine, TTFT).score < SCORE_MIN


def test_short_windows_and_scrapes_tell_the_same() -> None:
    engine = trouble(Plant(scrape_s=1.0), rate=45.0)
    found = examine("running_cap_too_small", engine, TTFT, window_s=5.0)
    assert found.score >= 0.9, refuted_by(found)


def test_a_cap_is_not_to_blame_when_nobody_waits_for_it() -> None:
    engine = trouble(Plant(), slow=1.0)
    found = examine("running_cap_too_small", engine, TTFT)
    assert found.score < SCORE_MIN
    refuted = refuted_by(found)
    assert "No request was waiting in any of the 12 measurements (one every 5 s)" in refuted
    assert found.evidence, "a refuted cause still says what speaks against it"


def test_a_queue_of_a_quarter_of_the_time_is_the_caps_as_well() -> None:
    engine = Plant()
    engine.run_until(QUIET_S)
    for second in range(int(BAD_S) + 1):
        engine.rate = 90.0 if second % 4 == 0 else 4.0
        engine.run_until(QUIET_S + second + 1)
    found = examine("running_cap_too_small", engine, TTFT)
    assert found.score >= SCORE_MIN, refuted_by(found)
    (wish,) = found.remedy
    running, waiting = found.facts["running"], found.facts["waiting"]
    assert wish.to > 2 * (running + waiting), "the crowd is what has to be held, not the mean"


def test_a_cap_is_not_to_blame_when_memory_is_the_limit() -> None:
    engine = Plant(rate=15.0, kv_tokens=1100)
    engine.values["max_num_seqs"] = 10
    trouble(engine, rate=60.0)
    found = examine("running_cap_too_small", engine, TTFT)
    assert found.score < SCORE_MIN
    assert "memory is the limit" in refuted_by(found)


def test_a_remedy_never_asks_for_more_than_the_kv_cache_could_hold() -> None:
    engine = trouble(Plant(kv_tokens=1800), rate=60.0)
    found = examine("running_cap_too_small", engine, TTFT)
    (wish,) = found.remedy
    assert wish.limit is not None
    assert wish.limit < 16


def test_a_token_objective_is_none_of_the_caps_business() -> None:
    engine = trouble(Plant(), rate=45.0)
    assert examine("running_cap_too_small", engine, GAP).score < SCORE_MIN


def test_an_unread_engine_is_not_judged_by_guess() -> None:
    engine = trouble(Plant(), rate=45.0)
    engine.values.clear()
    engine.knobs = dict  # type: ignore[method-assign]
    found = examine("running_cap_too_small", engine, TTFT)
    assert found.score < SCORE_MIN
    assert "no agent reads" in refuted_by(found)


def test_an_engine_that_says_nothing_scores_nothing() -> None:
    engine = Plant(silent=True)
    trouble(engine, rate=45.0)
    for cause in causes().values():
        for objective in (TTFT, GAP):
            assert cause.examine(scene(engine, objective)).score < SCORE_MIN


def test_long_prompts_in_a_step_are_named_and_the_chunk_is_cut() -> None:
    engine = Plant(rate=4.0, output=60)
    engine.values["max_num_seqs"] = 32
    trouble(engine, prompt=2000, rate=6.0)
    found = examine("batch_too_large", engine, GAP)
    assert found.score >= 0.9, refuted_by(found)
    assert "for prompt tokens" in found.because
    assert found.remedy[0].knob in ("prefill_chunk_tokens", "max_num_batched_tokens")
    assert all(w.to < engine.values[w.knob] for w in found.remedy)


def test_a_large_decode_batch_is_named_and_the_cap_is_lowered() -> None:
    engine = Plant(rate=8.0, prompt=10, output=100, c=0.0006)
    engine.values["max_num_seqs"] = 256
    trouble(engine, rate=15.0)
    found = examine("batch_too_large", engine, GAP)
    assert found.score >= 0.9, refuted_by(found)
    assert "running requests" in found.because
    (wish,) = found.remedy
    assert wish.knob == "max_num_seqs"
    assert wish.to < 32


def test_a_slowed_engine_is_not_blamed_on_its_batch() -> None:
    """The same tokens per step take three times as long: a neighbour, a clock, a throttle."""
    engine = Plant(rate=6.0)
    engine.values["max_num_seqs"] = 32
    trouble(engine, slow=6.0)
    found = examine("batch_too_large", engine, GAP)
    assert found.score < SCORE_MIN, [f.sentence for f in found.evidence]


def crowded(cap: int, **mechanics: Any) -> Plant:
    """Answers have become longer than the pool holds those of."""
    engine = plant(cap=cap, rate=6.0, output=60, kv_tokens=4000, **mechanics)
    return trouble(engine, output=400)


def served_per_s(engine: Plant) -> float:
    """In the four minutes after those that a scene shows."""
    before, at = engine.counters["vllm:request_success_total"], engine.t
    engine.run_until(at + 240)
    return (engine.counters["vllm:request_success_total"] - before) / 240


def test_fewer_run_where_what_is_sent_back_costs_more_than_the_places_given_up() -> None:
    engine = crowded(64, b=0.0002)
    found = examine("kv_pool_exhausted", engine, TTFT)
    assert found.score >= 0.9, refuted_by(found)
    assert "running requests a second were sent back" in found.because
    assert found.facts["again"] > 0.1
    (wish,) = found.remedy
    assert wish.knob == "max_num_seqs"
    assert wish.limit is not None
    assert wish.limit <= wish.to <= wish.limit / (1 - found.facts["again"])
    served = served_per_s(engine)
    for cap in (round(wish.to), round(wish.limit)):
        assert served_per_s(crowded(cap, b=0.0002)) > 1.05 * served
    assert served_per_s(crowded(8, b=0.0002)) < served, "the rung below, which the limit forbids"


def test_nobody_is_kept_out_where_computing_again_costs_next_to_nothing() -> None:
    """The pool lets in no more than it holds, whatever the cap; a lower one leaves it unused."""
    engine = crowded(64)
    found = examine("kv_pool_exhausted", engine, TTFT)
    assert found.score >= 0.9, refuted_by(found)
    assert found.remedy == ()
    assert "fewer at once would serve fewer" in found.no_remedy
    assert "only a larger pool or shorter requests help" in found.no_remedy
    assert served_per_s(crowded(8)) < served_per_s(engine)


def test_smaller_blocks_come_first_when_the_pool_is_mostly_their_empty_ends() -> None:
    engine = plant(cap=64, rate=4.0, prompt=10, output=80, kv_tokens=1280)
    engine.values["kv_block_size"] = 128
    trouble(engine, rate=20.0)
    found = examine("kv_pool_exhausted", engine, TTFT)
    assert found.score >= SCORE_MIN, refuted_by(found)
    block = found.remedy[0]
    assert block.knob == "kv_block_size"
    assert block.to < 16
    assert "more is kept free for what the running requests need next" in found.evidence[1].sentence
    assert "empty end" in block.why


def test_a_graph_that_is_turned_off_is_turned_on_again() -> None:
    engine = plant(rate=20.0, eager_s=0.015)
    trouble_by(engine, lambda p: p.apply({"graph_capture": "off"}, by="trimtab-agent apply"))
    found = examine("graph_capture_lost", engine, GAP)
    assert found.score >= 0.9, refuted_by(found)
    (wish,) = found.remedy
    assert (wish.knob, wish.to) == ("graph_capture", "on")


def test_a_graph_that_cannot_be_captured_wants_a_person() -> None:
    engine = trouble(plant(rate=20.0, eager_s=0.015), captured=False)
    found = examine("graph_capture_lost", engine, GAP)
    assert found.remedy == ()
    assert "on already and the engine runs eagerly all the same" in found.no_remedy


def test_a_batch_above_the_graph_ceiling_is_brought_below_it() -> None:
    """It serves less the more of it runs eagerly, so it does not come back by itself."""
    engine = plant(cap=64, rate=10.0, prompt=20, output=60, eager_s=0.006, graph_seqs_max=16)
    trouble(engine, rate=27.0)
    found = examine("graph_capture_lost", engine, GAP)
    assert found.score >= SCORE_MIN, refuted_by(found)
    (wish,) = found.remedy
    assert (wish.knob, wish.to) == ("max_num_seqs", 16)


def test_a_cap_is_not_raised_above_the_graph_ceiling() -> None:
    engine = trouble(plant(cap=8, rate=15.0, graph_seqs_max=12), rate=45.0)
    found = examine("running_cap_too_small", engine, TTFT)
    assert found.score >= SCORE_MIN, refuted_by(found)
    (wish,) = found.remedy
    assert wish.limit == 12
    assert "graphs are captured for 12" in wish.why


def test_a_load_beyond_capacity_turns_the_low_tiers_away_and_says_how_many_engines() -> None:
    engine = plant(rate=25.0, priorities={0: 0.5, 1: 0.3, 2: 0.2})
    trouble(engine, rate=100.0)
    found = examine("load_beyond_capacity", engine, TTFT)
    assert found.score >= 0.9, refuted_by(found)
    assert found.verdict == "infeasible"
    (wish,) = found.remedy
    assert (wish.knob, wish.to) == ("shed_below_priority", 1)
    assert "priority below 1" in wish.why
    assert found.facts["engines_more"] == 1
    spare = found.facts["capacity_per_s"] - 0.5 * found.facts["arrivals_per_s"]
    assert found.facts["drain_s"] == pytest.approx(len(engine.waiting) / spare, rel=0.2)
    assert "1 engine serves chat, and it needs 1 more like engine-0" in found.because


def test_a_load_within_capacity_asks_for_no_engines() -> None:
    found = examine("load_beyond_capacity", trouble(Plant(), rate=45.0), TTFT)
    assert found.score < SCORE_MIN
    assert re.search(r"arrived a second, and the engine could serve \d+", found.because)
    assert "0 more" not in found.because + found.no_remedy


def test_two_crowds_in_a_bad_window_are_no_load_beyond_capacity() -> None:
    def crowds(p: Plant) -> None:
        for at in (QUIET_S, QUIET_S + 6):
            for rate, until in ((240.0, at + 1.25), (10.0, at + 6)):
                p.rate = rate
                p.run_until(until)

    shown = scene(trouble_by(Plant(scrape_s=1.25), crowds), TTFT, window_s=3.75, bad_s=7.5)
    too_much = causes()["load_beyond_capacity"].examine(shown)
    facts = too_much.facts
    assert facts["arrivals_per_s"] > 1.1 * facts["capacity_per_s"]  # of these seconds: 58 is usual
    assert too_much.score < SCORE_MIN
    assert re.search(r"they come in crowds, and [\d.]+ of them may be chance", refuted_by(too_much))
    cap = causes()["running_cap_too_small"].examine(shown)
    assert cap.score >= SCORE_MIN, refuted_by(cap)


def test_steps_that_became_faster_are_said_as_people_would() -> None:
    engine = trouble(plant(rate=35.0), slow=0.5)
    host, graph = examine("slow_host", engine, TTFT), examine("graph_capture_lost", engine, TTFT)
    said = [found.because for found in (host, graph)]
    said += [fact.sentence for found in (host, graph) for fact in found.evidence]
    assert not [text for text in said if "-" in text.replace("token-", "")]
    assert "Steps take no longer than before for as many tokens" in said
    assert ", no longer than the " in host.because


def test_high_priorities_are_never_turned_away() -> None:
    engine = plant(rate=25.0, priorities={2: 0.5, 3: 0.5})
    found = examine("load_beyond_capacity", trouble(engine, rate=140.0), TTFT)
    assert found.remedy == ()
    assert "no requests of a lower priority arrive" in found.no_remedy


def test_a_load_that_the_tiers_left_can_carry_is_not_beyond_capacity() -> None:
    engine = plant(rate=25.0, priorities={0: 0.6, 1: 0.4})
    engine.run_until(QUIET_S)
    engine.values["shed_below_priority"] = 1
    trouble(engine, rate=100.0)
    assert examine("load_beyond_capacity", engine, TTFT).score < SCORE_MIN


def turned_away(**mechanics: Any) -> Plant:
    """Twice what it serves, of which Trimtab turns the low half away."""
    engine = plant(rate=25.0, priorities={0: 0.5, 1: 0.3, 2: 0.2}, **mechanics)
    engine.run_until(QUIET_S)
    engine.apply({"shed_below_priority": 1})
    return trouble(engine, rate=100.0)


def test_who_is_turned_away_by_priority_is_why_not_all_are_answered() -> None:
    found = examine("shed_by_priority", turned_away(), ANSWERED)
    assert found.score == 1, [fact.sentence for fact in found.evidence if not fact.supports]
    shed, received = found.facts["shed_per_s"], found.facts["received_per_s"]
    assert shed / received == pytest.approx(0.5, abs=0.05)
    said = f"{shed:.3g} of {received:.3g} requests a second were turned away by their priority"
    assert found.because.startswith(f"{said} (below 1), from 00:03:00 to ")
    knob = next(fact.sentence for fact in found.evidence if fact.metric == "engine:knob")
    assert knob == "shed_below_priority is 1; Trimtab changed it from 0 to 1 at 00:03:05 UTC"
    assert found.remedy == ()
    assert "it serves again, on trial, once no other promise is broken" in found.no_remedy


def test_turning_away_explains_nothing_that_does_not_count_it() -> None:
    found = examine("shed_by_priority", turned_away(), TTFT)
    assert found.score < SCORE_MIN
    assert "does not count requests that are turned away as missed" in refuted_by(found)


def test_what_a_full_queue_turns_away_is_not_turned_away_by_priority() -> None:
    engine = plant(rate=25.0, priorities={0: 0.1, 1: 0.9}, queue_max=20)
    engine.run_until(QUIET_S)
    engine.apply({"shed_below_priority": 1})
    found = examine("shed_by_priority", trouble(engine, rate=180.0), ANSWERED)
    assert found.score < SCORE_MIN
    assert re.search(r"\d+ of the \d+ missed requests were turned away", refuted_by(found))


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("engine:requests_shed_total", "turned away by their priority was not measured"),
        ("vllm:admission_rejections_total", "No request was counted as missed"),
    ],
)
def test_what_was_not_measured_is_not_said_to_be_turned_away(metric: str, says: str) -> None:
    engine = turned_away()
    del engine.store.samples[metric]
    found = examine("shed_by_priority", engine, ANSWERED)
    assert found.score < SCORE_MIN
    assert says in refuted_by(found)


def test_turning_away_is_not_named_where_no_agent_reads_the_threshold() -> None:
    engine = turned_away()
    engine.values.clear()
    engine.knobs = dict  # type: ignore[method-assign]
    found = examine("shed_by_priority", engine, ANSWERED)
    assert found.score < SCORE_MIN
    assert "no agent reads it" in refuted_by(found)


@pytest.mark.parametrize("cause", ["load_beyond_capacity", "kv_pool_exhausted"])
def test_nobody_is_turned_away_for_a_promise_that_counts_it_as_missed(cause: str) -> None:
    tiers = {0: 0.5, 1: 0.3, 2: 0.2}
    engine = plant(cap=64, rate=12.0, output=60, kv_tokens=4000, queue_max=50, priorities=tiers)
    trouble(engine, output=240, prompt=160, rate=140.0)
    shed = [w.knob for w in examine(cause, engine, TTFT).remedy if w.knob == "shed_below_priority"]
    assert shed
    found = examine(cause, engine, ANSWERED)
    assert "shed_below_priority" not in [wish.knob for wish in found.remedy]
    if not found.remedy and cause == "load_beyond_capacity":
        assert (
            "“Requests answered” counts requests that are turned away as missed; "
            in found.no_remedy
        )


def test_a_hand_edit_is_named_with_who_and_put_back_to_the_very_value() -> None:
    engine = plant(cap=20, rate=35.0)
    trouble_by(engine, lambda p: p.apply({"max_num_seqs": 4}, by="alice on call"))
    found = examine("config_changed_by_hand", engine, TTFT)
    assert found.score >= 0.9, refuted_by(found)
    assert "alice changed max_num_seqs from 20 to 4 at 00:03:05 UTC" in found.because
    assert re.search(
        r"time in the queue went from [\d.]+ ms to [\d.]+ s|waiting went", found.because
    )
    (wish,) = found.remedy
    assert (wish.knob, wish.to, wish.exact) == ("max_num_seqs", 20, True)


@pytest.mark.parametrize("knob", ["backpressure", "tenant_quotas"])
def test_a_door_that_somebody_closed_is_named(knob: str) -> None:
    def closed(engine: Plant) -> None:
        engine.apply({knob: "on"}, by="alice")
        engine.queue_max = 1

    found = examine("config_changed_by_hand", trouble_by(plant(rate=25.0), closed), ANSWERED)
    assert found.score >= 0.9, refuted_by(found)
    assert f"alice changed {knob} from off to on" in found.because
    assert "requests turned away a second went from 0 to" in found.because
    (wish,) = found.remedy
    assert (wish.knob, wish.to) == (knob, "off")


def test_a_door_that_somebody_closed_makes_nobody_late() -> None:
    def closed(engine: Plant) -> None:
        engine.apply({"backpressure": "on"}, by="alice")
        engine.queue_max, engine.slow = 1, 4.0

    found = examine("config_changed_by_hand", trouble_by(plant(rate=15.0), closed), TTFT)
    assert found.score < SCORE_MIN
    assert "No effect of backpressure" in refuted_by(found)


def test_a_moment_without_a_free_run_blames_no_hand() -> None:
    def edited(engine: Plant) -> None:
        engine.apply({"kv_compaction": "off"}, by="alice")
        engine.counters["engine:kv_alloc_stall_seconds_total"] += 0.005
        engine.slow = 4.0

    engine = trouble_by(contiguous(compacted=True, kv_tokens=200_000), edited)
    found = examine("config_changed_by_hand", engine, TTFT)
    assert found.score < SCORE_MIN, found.because


def test_what_trimtab_changed_is_not_by_hand() -> None:
    engine = plant(rate=35.0)
    trouble_by(engine, lambda p: p.apply({"max_num_seqs": 4}, by="trimtab-agent apply 1"))
    found = examine("config_changed_by_hand", engine, TTFT)
    assert found.score < SCORE_MIN
    assert "Nobody but Trimtab" in refuted_by(found)


def test_an_edit_without_its_effect_is_a_coincidence() -> None:
    def edit_and_slow(engine: Plant) -> None:
        engine.apply({"prefill_chunk_tokens": 1024}, by="alice")
        engine.slow = 4.0

    engine = trouble_by(plant(rate=15.0), edit_and_slow)
    found = examine("config_changed_by_hand", engine, GAP)
    assert found.score < SCORE_MIN, [f.sentence for f in found.evidence]
    assert "No effect of prefill_chunk_tokens at 1024 instead of 512" in refuted_by(found)


def test_an_edit_that_was_put_back_is_not_to_blame() -> None:
    engine = plant(rate=35.0)
    trouble_by(engine, lambda p: p.apply({"max_num_seqs": 4}, by="alice"))
    shown = scene(engine, TTFT)
    shown.engine.values["max_num_seqs"] = 32  # type: ignore[index]
    found = causes()["config_changed_by_hand"].examine(shown)
    assert "max_num_seqs is 32 now" in refuted_by(found)


def test_a_slow_host_says_which_and_that_no_knob_helps() -> None:
    engine = trouble(plant(rate=15.0), slow=4.0)
    found = examine("slow_host", engine, GAP)
    assert found.remedy == ()
    assert found.verdict == "infeasible"
    assert "no knob makes a slow host fast" in found.no_remedy
    sentences = [fact.sentence for fact in found.evidence if fact.supports]
    assert any("of a CPU while it runs" in sentence for sentence in sentences)


def test_every_cause_has_a_label_a_docstring_and_a_runbook() -> None:
    for slug, cause in causes().items():
        assert cause.label
        assert type(cause).__module__.endswith(slug)
        runbook = Path(__file__).parents[3] / "docs" / "causes" / f"{slug}.md"
        text = runbook.read_text()
        for heading in ("What it means", "How it is recognised", "Rivals", "What Trimtab does",
                        "What a person can do"):  # fmt: skip
            assert f"## {heading}" in text, f"{runbook.name}: no heading {heading!r}"
