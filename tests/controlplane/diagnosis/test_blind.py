"""What nobody measures explains nothing, and takes back nothing that was found before."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from controlplane.diagnosis.demand import arrivals
from controlplane.diagnosis.explaining import incident_explain
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.diagnosis.scene import evenly
from controlplane.diagnosis.selectors import diagnosis_due
from controlplane.diagnosis.selectors import story as tell
from tests.controlplane.diagnosis.judged import START, Story, opened
from tests.controlplane.diagnosis.scenes import QUIET_S, TTFT, examined, plant, scene
from tests.memory_reader import MemoryReader
from tracing.types import Signal

NAN = math.nan
WHERE = {"service": "chat", "instance": "engine-0"}


def explained() -> tuple[Story, Incident]:
    story, incident = opened()
    incident.diagnoses.create(
        cause="running_cap_too_small", score=0.9, because="59 requests waited", made_at=story.now(),
        window_start=START, window_end=story.now(),
    )  # fmt: skip
    return story, incident


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("signal", "says"),
    [
        (Signal.STALE, "; nothing was measured there since 00:00:30"),
        (Signal.MISSING, "; nothing was measured there since 00:00:30"),
        (Signal.NO_TRAFFIC, "; no requests came there since 00:00:30"),
    ],
)
def test_no_look_is_taken_at_windows_that_show_nothing(signal: Signal, says: str) -> None:
    story, incident = explained()
    for _ in range(8):
        story.judge(0, 0, signal=signal)
    assert not diagnosis_due(incident, now=story.now())
    assert tell(incident).because == "59 requests waited"
    assert tell(incident).what.endswith(says)
    story.judge(80)
    assert diagnosis_due(incident, now=story.now())
    assert "since 00:00:30" not in tell(incident).what


@pytest.mark.django_db
def test_an_incident_that_is_over_is_not_called_unmeasured() -> None:
    story, incident = explained()
    for _ in range(4):
        incident = story.judge(0) or incident
    story.judge(0, 0, signal=Signal.STALE)
    incident.refresh_from_db()
    assert incident.state == Incident.State.CLOSED
    assert tell(incident).blind is None


@pytest.mark.django_db
def test_requests_heard_of_by_their_spans_explain_nothing_without_the_engines_metrics() -> None:
    story, incident = explained()
    reader: Any = MemoryReader()
    for scrape in range(1, 13):  # the agent falls silent a minute after the start
        reader.add("vllm:num_requests_running", START + timedelta(seconds=5 * scrape), 8.0, WHERE)
    for _ in range(5):
        story.judge(80)
    assert incident_explain(incident=incident, reader=reader, now=story.now()) is None
    (found,) = Diagnosis.objects.all()
    assert found.facts["no_action"] == (
        "nothing was measured of engine-0 since 00:01:00 UTC, so nothing is changed"
    )
    for scrape in range(13, 22):
        reader.add("vllm:num_requests_running", START + timedelta(seconds=5 * scrape), 8.0, WHERE)
    assert incident_explain(incident=incident, reader=reader, now=story.now()) is not None


@pytest.mark.parametrize(
    ("growth", "spread"),
    [
        ([], []),
        ([3.0, 4.0], [3.0, 4.0]),
        ([3.0, NAN, NAN, 12.0, 5.0], [3.0, 4.0, 4.0, 4.0, 5.0]),
        ([NAN, 90.0, 5.0, NAN], [NAN, NAN, 5.0, NAN]),
    ],
)
def test_what_grew_over_a_gap_grew_evenly(growth: list[float], spread: list[float]) -> None:
    assert evenly(growth) == pytest.approx(spread, nan_ok=True)


def test_what_came_while_nobody_measured_did_not_come_all_at_once() -> None:
    """An agent cut off for a minute: its counters have grown by that when it is heard again."""
    engine = plant(rate=30.0)
    engine.run_until(QUIET_S + 5)
    engine.silent = True
    engine.run_until(QUIET_S + 32)
    engine.silent = False
    engine.run_until(QUIET_S + 61)
    load = arrivals(scene(engine, TTFT))
    assert load.value == pytest.approx(30, rel=0.25)
    assert examined(engine, TTFT).named == ()
