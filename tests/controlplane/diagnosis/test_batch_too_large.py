"""Steps too long for the prompt tokens in them: smaller ones, where one action makes them short."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

from controlplane.actions.grant import grant
from controlplane.actions.knob import knobs
from controlplane.actions.policy import Rules
from controlplane.diagnosis.cause import Finding, Wish, causes
from controlplane.fleet.models import Engine
from tests.controlplane.diagnosis.scenes import GAP, plant, scene, trouble
from tests.controlplane.plant import GAPS, Plant

SPOKEN = replace(GAP, name="token gap within 25 ms", threshold_ms=25, target=0.99)
BATCH = causes()["batch_too_large"]
CHUNK, BUDGET = "prefill_chunk_tokens", "max_num_batched_tokens"


def asked_long(*, dear: float = 1.0, rate: float = 5.0, prompt: int = 1200, **knobs: int) -> Plant:
    """Prompts of 1,200 tokens: the first 512 take 27 ms, the next 38, times `dear`."""
    costs = {"a": 0.001, "b": 0.00004, "c": 0.0002, "k": 4e-8, "eager_s": 0.0005}
    engine = plant(rate=10.0, output=26, **{name: cost * dear for name, cost in costs.items()})
    engine.values |= knobs
    return trouble(engine, prompt=prompt, rate=rate)


def examine(engine: Plant) -> Finding:
    return BATCH.examine(scene(engine, SPOKEN))


def late_share(engine: Plant, **knobs: int) -> float:
    """Of the gaps in the four minutes after those that a scene shows, with other knobs."""
    engine.values |= knobs
    row = engine.histograms["vllm:inter_token_latency_seconds", ""]
    before, over = list(row), GAPS.index(0.025) + 1
    engine.run_until(engine.t + 240)
    counts = [now - then for now, then in zip(row[:-1], before, strict=False)]
    return sum(counts[over:]) / sum(counts)


def granted(found: Finding, engine: Plant) -> dict[str, Any]:
    """By knob the value that actions would set, or why it would not."""
    row = Engine(name="engine-0", values=engine.values, knobs=engine.knobs())
    return {w.knob: grant(knobs()[w.knob], asdict(w), row, Rules()) for w in found.remedy}


def test_what_only_makes_more_long_steps_is_not_granted() -> None:
    """A budget of 512 is as far as one action goes, and a step of 512 tokens still is too long."""
    engine = asked_long()
    found = examine(engine)
    assert found.score >= 0.9
    budget, chunk = granted(found, engine).items()
    assert budget[0] == BUDGET
    assert re.fullmatch(
        r"max_num_batched_tokens is 2048, and 512 is as far as one change goes within \d+ to 8192; "
        r"it takes \d+, and part of the way would do harm",
        budget[1],
    )
    assert chunk == (CHUNK, 128)
    now = late_share(asked_long())
    assert late_share(asked_long(), **{BUDGET: 512}) > 1.5 * now
    assert late_share(asked_long(), **{CHUNK: 128}) < 0.5 * now


def test_a_budget_that_ends_short_comes_first_as_no_crowd_exceeds_it() -> None:
    engine = asked_long(**{BUDGET: 1024})
    budget, chunk = examine(engine).remedy
    assert (budget.knob, chunk.knob) == (BUDGET, CHUNK)
    assert 256 <= budget.to < 512
    assert 128 <= chunk.to < 256
    with_chunk = late_share(asked_long(**{BUDGET: 1024}), **{CHUNK: 128})
    assert late_share(engine, **{BUDGET: 256}) < with_chunk


def test_a_budget_that_full_steps_show_to_be_too_large_is_never_raised() -> None:
    """A long prompt's last tokens take longer than the mean of all, by which more would fit."""
    found = examine(asked_long(dear=1.1, **{BUDGET: 256}))
    assert found.score >= 0.9
    budget, chunk = found.remedy
    assert (budget.knob, chunk.knob) == (BUDGET, CHUNK)
    assert 128 <= budget.to < 256
    assert 128 <= chunk.to < 256


def test_where_no_action_goes_far_enough_it_says_how_far_it_would_have_to_go() -> None:
    engine = asked_long(dear=1.5)
    found = examine(engine)
    assert found.score >= 0.9
    assert [wish.knob for wish in found.remedy] == [BUDGET, CHUNK]
    for refused in granted(found, engine).values():
        assert re.search(r"it takes \d+, and part of the way would do harm", str(refused))
    now = late_share(asked_long(dear=1.5))
    for as_far in ({BUDGET: 512}, {CHUNK: 128}):
        assert late_share(asked_long(dear=1.5), **as_far) > now


def test_how_far_an_action_goes_is_asked_of_the_ladder() -> None:
    """Somebody set 2,000: two rungs below are 512, not a quarter of it."""
    engine = asked_long(**{BUDGET: 2000})
    wish = Wish(BUDGET, 505.0, "", whole=True)
    assert not isinstance(granted(replace(examine(engine), remedy=(wish,)), engine)[BUDGET], int)


def test_a_chunk_larger_than_the_prompts_is_not_what_makes_steps_long() -> None:
    """Several of 80 tokens share a step: with a chunk of 128 they would as well."""
    found = examine(asked_short())
    assert found.score >= 0.9
    assert "for prompt tokens" in found.because
    assert not [value for value in granted(found, asked_short()).values() if isinstance(value, int)]
    now = late_share(asked_short())
    assert late_share(asked_short(), **{CHUNK: 128}) > 0.8 * now


def asked_short() -> Plant:
    return asked_long(dear=2.0, prompt=80, rate=34.0)


def test_an_engine_without_the_knobs_is_told_apart_from_one_without_room() -> None:
    shown = scene(asked_long(), SPOKEN)
    found = BATCH.examine(replace(shown, engine=replace(shown.engine, values={})))
    assert found.remedy == ()
    assert found.no_remedy == "the engine has no knob for the prompt tokens of a step"
