"""What an engine is said to serve against what the queueing model does serve."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.diagnosis.capacity import capacity_per_s, working
from controlplane.diagnosis.scene import Histogram
from tests.controlplane.diagnosis.scenes import BAD_S, QUIET_S, TTFT, plant, scene, trouble
from tests.controlplane.plant import Plant

FINISHED = "vllm:request_success_total"
MECHANICS: tuple[dict[str, Any], ...] = (
    {},
    {"a": 0.001, "between": 0.003},
    {"a": 0.001, "b": 0.00004, "k": 8e-8, "prompt": 1000},
)


def saturated(cap: int, **mechanics: Any) -> Plant:
    return trouble(plant(cap=cap, **{"rate": 5.0, **mechanics}), rate=120.0)


def served_per_s(engine: Plant) -> float:
    found = scene(engine, TTFT).rate(FINISHED).value
    assert found is not None
    return found


@pytest.mark.parametrize("mechanics", MECHANICS, ids=str)
def test_under_a_queue_the_capacity_at_the_cap_is_what_is_served(mechanics: dict[str, Any]) -> None:
    engine = saturated(16, **mechanics)
    assert capacity_per_s(scene(engine, TTFT), 16) == pytest.approx(served_per_s(engine), rel=0.08)


@pytest.mark.parametrize("mechanics", MECHANICS, ids=str)
def test_what_a_larger_cap_serves_is_within_what_it_is_said_to(mechanics: dict[str, Any]) -> None:
    shown = scene(saturated(8, **mechanics), TTFT)
    said, most = capacity_per_s(shown, 64), capacity_per_s(shown, 64, at_most=True)
    assert said is not None
    assert most is not None
    assert 0.9 * said <= served_per_s(saturated(64, **mechanics)) <= 1.1 * most


def test_what_lies_between_the_steps_of_an_engine_with_a_queue_is_no_idleness() -> None:
    found = working(scene(saturated(32, a=0.001, between=0.003), TTFT))
    assert found is not None
    assert found.share == pytest.approx(0.81, abs=0.05)


def test_without_a_lasting_queue_it_is_not_known_how_busy_it_could_be() -> None:
    engine = plant(rate=15.0)
    engine.run_until(QUIET_S + BAD_S + 1)
    found = working(scene(engine, TTFT))
    assert found is not None
    assert found.share is None


def test_of_a_histogram_events_above_a_value_and_the_bucket_of_a_quantile() -> None:
    found = Histogram((1.0, 2.0, 4.0), (10.0, 10.0, 20.0, 10.0), 0.0)
    assert [found.above(v) for v in (0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 9.0)] == [
        *(50, 40, 35, 30, 20, 10, 10)
    ]
    assert [found.bound(q) for q in (0.01, 0.2, 0.21, 0.8, 0.81)] == [1, 1, 2, 4, None]
