"""The table of scenarios: what arrives, and what is said of it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.demo.scenarios import (
    ASKED_TOKENS,
    LABEL_TOKENS,
    LONG_PROMPT_TOKENS,
    SCENARIOS,
    TOLD_TOKENS,
    Scenario,
)
from controlplane.diagnosis.cause import causes
from engine.load import OUTPUT_TOKENS_MAX, PROMPT_TOKENS_MAX, Request
from engine.replay import Replayer

ROOT = Path(__file__).parents[3]
EACH = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)


@EACH
def test_a_scenario_says_what_happens_and_what_to_watch_for(scenario: Scenario) -> None:
    assert scenario.about.endswith(".")
    assert scenario.watch_for.endswith(".")
    assert scenario.cause in {"", *causes()}
    times = [event.after_windows for event in scenario.events]
    assert times == sorted(times)
    assert all(at < scenario.windows for at in times)


def test_every_cause_has_a_scenario() -> None:
    named = {scenario.cause for scenario in SCENARIOS.values()} - {""}
    # What the overload's remedy does to the promise that all are answered.
    assert named | {"shed_by_priority"} == set(causes())


def test_the_docs_list_every_scenario() -> None:
    told = re.findall(r"^\| `([a-z][a-z-]+)` \|", (ROOT / "docs/scenarios.md").read_text(), re.M)
    assert told == list(SCENARIOS)


@EACH
def test_the_quiet_is_plain_traffic_and_the_load_shifts_after_it(scenario: Scenario) -> None:
    requests = scenario.requests(1, 50.0, 60.0, 60.0)
    assert requests == scenario.requests(1, 50.0, 60.0, 60.0)
    quiet = [r for r in requests if r.at_s < 60]
    shifted = requests[len(quiet) :]
    for seen, share in ((quiet, scenario.calm), (shifted, scenario.load)):
        expected = 3000 * share
        assert len(seen) == pytest.approx(expected, abs=max(0.1 * expected, 3 * expected**0.5))
    assert max(r.prompt_tokens for r in quiet) <= PROMPT_TOKENS_MAX
    long = sum(r.prompt_tokens == LONG_PROMPT_TOKENS for r in shifted)
    assert long / len(shifted) == pytest.approx(scenario.long_prompts, abs=0.07)


def test_crowds_ask_for_longer_answers_and_the_quiet_before_them_does_not() -> None:
    scenario = SCENARIOS["burst"]
    longer = scenario.requests(1, 50.0, 60.0, 60.0)
    usual = replace(scenario, answers=1).requests(1, 50.0, 60.0, 60.0)
    for changed, before in zip(longer, usual, strict=True):
        times = scenario.answers if before.at_s >= 60 else 1
        assert changed.output_tokens == min(times * before.output_tokens, OUTPUT_TOKENS_MAX)
        assert replace(changed, output_tokens=before.output_tokens) == before
    crowd = [each.output_tokens for each in longer if each.at_s >= 60]
    assert sum(crowd) / len(crowd) == pytest.approx(94, rel=0.05)  # as docs and comments say


def test_a_load_bound_by_decode_asks_little_and_is_told_much() -> None:
    asked = SCENARIOS["capture-lost"].requests(1, 50.0, 60.0, 60.0)
    assert {(r.prompt_tokens, r.output_tokens) for r in asked} == {(ASKED_TOKENS, TOLD_TOKENS)}


def test_lengths_are_alike_until_some_ask_long_and_are_told_little() -> None:
    requests = SCENARIOS["kv-fragmented"].requests(1, 50.0, 60.0, 60.0)
    lengths = {(r.at_s < 60, r.prompt_tokens, r.output_tokens) for r in requests}
    usual, long = (ASKED_TOKENS, TOLD_TOKENS), (LONG_PROMPT_TOKENS, LABEL_TOKENS)
    assert lengths == {(True, *usual), (False, *usual), (False, *long)}


def test_an_overload_comes_in_tiers() -> None:
    overload = SCENARIOS["overload"]
    sent = Counter(r.priority for r in overload.requests(1, 50.0, 60.0, 60.0))
    for tier, share in overload.tiers.items():
        assert sent[tier] / sent.total() == pytest.approx(share, abs=0.03)


def test_a_priority_is_sent_as_a_header_and_a_long_prompt_whole() -> None:
    replayer = Replayer("http://127.0.0.1:1")
    message = replayer.message(Request(0.0, LONG_PROMPT_TOKENS, 8, "a", priority="low")).decode()
    assert "\r\nX-Priority: low\r\n" in message
    prompt = re.search(r'"prompt": "([^"]*)"', message)
    assert prompt is not None
    assert len(prompt[1]) == LONG_PROMPT_TOKENS - 1
    assert "X-Priority" not in replayer.message(Request(0.0, 8, 8, "a")).decode()
