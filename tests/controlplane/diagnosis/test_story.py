"""What is told of an incident: the newest explanation, and what a kept change has cured."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.diagnosis.explaining import diagnosis_confirm
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.diagnosis.selectors import diagnosis_due, incidents_open
from controlplane.diagnosis.selectors import story as tell
from tests.controlplane.diagnosis.judged import START, WINDOW_S, opened

pytestmark = pytest.mark.django_db
WINDOW = timedelta(seconds=WINDOW_S)
REST = "what goes on since is not explained, so nothing more is changed"


def explained(incident: Incident, cause: str, at: datetime) -> None:
    Diagnosis.objects.create(
        incident=incident, cause=cause, score=0.0, because=f"of {cause}", made_at=at,
        window_start=at, window_end=at,
    )  # fmt: skip


def test_the_story_is_told_without_its_evidence_until_that_is_asked_for() -> None:
    story, incident = opened()
    for age in range(3):
        found = incident.diagnoses.create(
            cause="slow_host",
            score=0.9,
            because="the host is slow",
            made_at=story.now() - age * WINDOW,
            window_start=START,
            window_end=story.now(),
        )
        found.evidence.create(cause="slow_host", supports=True, sentence=f"look {age}")
    with CaptureQueriesContext(connection) as asked:
        (one,) = incidents_open(story.tenant)
        told = tell(one)
        assert told.because == "the host is slow"
    assert not any("diagnosis_evidence" in query["sql"] for query in asked)
    with CaptureQueriesContext(connection) as asked:
        assert [fact.sentence for fact in told.evidence_for] == ["look 0"]
        assert told.evidence_against == []
    assert len(asked) == 1


def test_an_unknown_rest_takes_nothing_back_from_what_a_kept_change_cured() -> None:
    ttft, incident = opened()
    explained(incident, "running_cap_too_small", ttft.now())
    explained(incident, "unknown", ttft.now(4))
    assert tell(incident).cause == "unknown"
    for _ in range(2):
        diagnosis_confirm(incident=incident, cause="running_cap_too_small", acted_at=ttft.now(3))
    for good_windows in (0, 1):
        incident.good_windows = good_windows
        assert tell(incident).cause == "running_cap_too_small"
        assert tell(incident).because == "of running_cap_too_small"
        assert tell(incident).no_action == REST
    explained(incident, "slow_host", ttft.now(8))
    assert tell(incident).because == "of slow_host"


def test_what_is_left_after_a_cure_is_looked_at_while_it_goes_on() -> None:
    ttft, incident = opened()
    explained(incident, "running_cap_too_small", ttft.now())
    diagnosis_confirm(incident=incident, cause="running_cap_too_small", acted_at=ttft.now(1))
    assert tell(incident).because == "of running_cap_too_small"
    late = ttft.now(1000)
    assert diagnosis_due(incident, now=late)
    incident.good_windows = 1
    assert not diagnosis_due(incident, now=late), "nothing goes on"


def test_the_cure_of_a_second_fault_cures_the_explanation_that_named_it() -> None:
    ttft, incident = opened()
    explained(incident, "slow_host", ttft.now())
    also = [{"cause": "running_cap_too_small", "score": 0.7, "because": "31 wait"}]
    Diagnosis.objects.update(also=also)
    diagnosis_confirm(incident=incident, cause="running_cap_too_small", acted_at=ttft.now(3))
    assert Diagnosis.objects.get().cured


def test_what_was_cured_before_an_incident_came_back_does_not_explain_why() -> None:
    ttft, incident = opened()
    explained(incident, "slow_host", ttft.now())
    diagnosis_confirm(incident=incident, cause="slow_host", acted_at=ttft.now())
    incident.bad_again_since, incident.opened_again_at = ttft.now(10), ttft.now(11)
    incident.save()
    explained(incident, "unknown", ttft.now(12))
    assert tell(incident).cause == "unknown"
