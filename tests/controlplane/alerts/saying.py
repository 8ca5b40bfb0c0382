"""What passes say of an incident, and what happens to it and to its messages between them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from controlplane.alerts.models import Delivery, Silence
from controlplane.alerts.services import silence_create
from controlplane.alerts.telling import incident_tell
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import Story
from slo.models import Objective
from tests.controlplane.alerts.receiver import NOW
from tests.controlplane.diagnosis.scenes import TTFT

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
State = Delivery.State
WHAT = "184 of 412 requests missed “TTFT”"


def say(incident: Incident, now: datetime, **more: Any) -> list[str]:
    """What a pass says: events, in the order of channels; a second pass has nothing to add."""
    words = {"story": Story(what=WHAT, because="the cap is small"), **more}
    made = incident_tell(incident=incident, now=now, **words)
    assert incident_tell(incident=incident, now=now, **words) == []
    return [row.event if row.state == State.PENDING else f"({row.event})" for row in made]


def taken() -> None:
    """The receivers take what waits for them."""
    Delivery.objects.filter(state=State.PENDING).update(state=State.SENT)


def close(incident: Incident, now: datetime, **columns: Any) -> None:
    Incident.objects.filter(pk=incident.pk).update(state="closed", closed_at=now, **columns)
    incident.refresh_from_db()


def reopen(incident: Incident) -> None:
    incident.state, incident.closed_at = Incident.State.OPEN, None
    incident.reopened += 1
    incident.save()


def newest() -> dict[str, Any]:
    row = Delivery.objects.order_by("created_at", "number").last()
    assert row is not None
    message: dict[str, Any] = row.message
    return message


def silence(incident: Incident, now: datetime, until: datetime, **scope: Any) -> Silence:
    spec = {"engine": "engine-0", **scope, "reason": "we know", "until": until}
    return silence_create(tenant=incident.tenant, spec=spec, by="ada", now=now)


def another(incident: Incident, slug: str, **columns: Any) -> Incident:
    objective = Objective.objects.create(
        tenant=incident.tenant, slug=slug, name=slug.upper(), service="chat",
        indicator="latency", spec=TTFT.spec, target=0.95,
    )  # fmt: skip
    return Incident.objects.create(
        tenant=incident.tenant, objective=objective, scope="engine-0", trigger="fast burn",
        bad_since=NOW, opened_at=NOW + MINUTE, **columns,
    )  # fmt: skip
