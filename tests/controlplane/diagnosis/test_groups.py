"""Incidents of one engine, one time and one cause are one story."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.cause import UNKNOWN
from controlplane.diagnosis.explaining import incident_join
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.diagnosis.scene import ObjectiveFacts
from controlplane.diagnosis.selectors import incident_get, leads, story, story_due
from controlplane.fleet.models import Engine, Node
from slo.models import Objective, Reading
from tests.controlplane.diagnosis.scenes import ANSWERED, GAP
from tracing.types import Signal

pytestmark = pytest.mark.django_db
QUEUE, HOST = "running_cap_too_small", "slow_host"
START = datetime(2026, 3, 1, tzinfo=UTC)


class House:
    def __init__(self) -> None:
        self.tenant = Tenant.objects.create(slug="acme", name="Acme")
        node = Node.objects.create(tenant=self.tenant, agent_id="a", name="node-0")
        for name in ("engine-0", "engine-1"):
            Engine.objects.create(tenant=self.tenant, node=node, name=name, service="chat")

    def incident(
        self, slug: str, at_s: float, scope: str = "engine-0", of: ObjectiveFacts = ANSWERED
    ) -> Incident:
        objective = Objective.objects.create(
            tenant=self.tenant, slug=slug, name=slug, service="chat", indicator=of.indicator,
            spec=of.spec, target=0.99,
        )  # fmt: skip
        at = START + timedelta(seconds=at_s)
        Reading.objects.create(
            objective=objective, scope=scope, window_end=at + timedelta(seconds=30),
            window_s=15, good=10, total=40, signal=Signal.OK,
        )  # fmt: skip
        return Incident.objects.create(
            tenant=self.tenant, objective=objective, scope=scope, trigger="fast burn",
            bad_since=at, opened_at=at + timedelta(seconds=30), bad_events=30, total_events=40,
        )  # fmt: skip

    def explain(
        self, incident: Incident, cause: str, also: str = "", remedy: Sequence[Any] = ()
    ) -> bool:
        """Explains it, and whether it is a story of its own then."""
        incident.refresh_from_db()
        now = incident.opened_at + timedelta(seconds=1)
        diagnosis = Diagnosis.objects.create(
            incident=incident, made_at=now, cause=cause, score=0.9, because=f"of {cause}",
            also=[{"cause": also, "score": 0.8, "because": ""}] if also else [],
            window_start=incident.bad_since, window_end=now, remedy=list(remedy),
        )  # fmt: skip
        incident_join(incident=incident, diagnosis=diagnosis)
        return leads(incident, now=now)


@pytest.fixture
def house() -> House:
    return House()


def test_the_same_cause_on_the_same_engine_is_one_story_told_once(house: House) -> None:
    first, second = house.incident("ttft", 0), house.incident("answered", 60)
    assert house.explain(first, QUEUE)
    assert not house.explain(second, QUEUE)
    second.refresh_from_db()
    assert second.part_of == first
    now = second.opened_at
    assert story_due(first, now=now)
    assert not story_due(second, now=now)
    told = story(incident_get(house.tenant, first.pk))
    assert told.what.endswith("; 30 of 40 requests missed “answered”")
    assert [hit.objective for hit in told.hits] == ["ttft", "answered"]


def test_each_promise_is_told_of_in_what_it_counts(house: House) -> None:
    first, second = house.incident("gaps", 0, of=GAP), house.incident("answered", 60)
    house.explain(first, QUEUE)
    house.explain(second, QUEUE)
    what = story(incident_get(house.tenant, first.pk)).what
    assert what.startswith("30 of 40 gaps between tokens missed “gaps” on engine-0 since ")
    assert what.endswith("; 30 of 40 requests missed “answered”")
    Incident.objects.filter(pk=first.pk).update(bad_events=1, total_events=1)
    assert story(incident_get(house.tenant, first.pk)).what.startswith("1 of 1 gap between tokens")


def test_another_cause_another_engine_or_another_time_is_another_story(house: House) -> None:
    first = house.incident("ttft", 0)
    house.explain(first, QUEUE)
    cases = [
        (house.incident("other cause", 60), HOST),
        (house.incident("other engine", 60, "engine-1"), QUEUE),
        (house.incident("long after", 3600), QUEUE),
        (house.incident("unknown", 60), UNKNOWN),
    ]
    for incident, cause in cases:
        assert house.explain(incident, cause), incident
        incident.refresh_from_db()
        assert incident.part_of is None, incident


def test_the_second_fault_of_a_story_counts_as_its_cause(house: House) -> None:
    first, second = house.incident("ttft", 0), house.incident("answered", 60)
    house.explain(first, QUEUE, also=HOST)
    assert not house.explain(second, HOST)


def test_one_with_a_remedy_is_no_part_of_one_that_has_none(house: House) -> None:
    """What is part of another story is not acted on."""
    first, second, third = (house.incident(f"at {at} s", at) for at in (0, 9, 60))
    house.explain(first, QUEUE)
    assert house.explain(second, QUEUE, remedy=[{"knob": "max_num_seqs"}])
    assert not house.explain(third, QUEUE)


def test_one_that_was_over_before_is_another_story(house: House) -> None:
    first = house.incident("ttft", 0)
    house.explain(first, QUEUE)
    Incident.objects.update(state=Incident.State.CLOSED, closed_at=START + timedelta(seconds=50))
    second = house.incident("answered", 60)
    assert house.explain(second, QUEUE)


def test_a_part_that_turns_out_to_have_its_own_cause_leaves(house: House) -> None:
    first, second = house.incident("ttft", 0), house.incident("answered", 60)
    house.explain(first, QUEUE)
    house.explain(second, QUEUE)
    assert not house.explain(second, UNKNOWN), "what is unknown says nothing"
    assert house.explain(second, HOST)
    second.refresh_from_db()
    assert second.part_of is None


def test_a_part_that_goes_on_without_its_story_is_told_by_itself(house: House) -> None:
    first, second = house.incident("ttft", 0), house.incident("answered", 60)
    house.explain(first, QUEUE)
    house.explain(second, QUEUE)
    closed = START + timedelta(minutes=5)
    Incident.objects.filter(pk=first.pk).update(state=Incident.State.CLOSED, closed_at=closed)
    second = incident_get(house.tenant, second.pk)
    assert not leads(second, now=closed + timedelta(seconds=30))
    assert leads(second, now=closed + timedelta(seconds=90))
