from __future__ import annotations

from datetime import timedelta

import pytest
from django.conf import settings
from django.contrib.sessions.models import Session
from django.utils import timezone

from controlplane import tasks
from controlplane.actions.models import Action, Transition
from controlplane.alerts.models import Delivery
from controlplane.diagnosis.models import Diagnosis, Evidence, Incident
from controlplane.fleet.models import Engine, Node
from tests.controlplane.web.story import incident
from tests.controlplane.web.world import world

pytestmark = pytest.mark.django_db
TABLES = (Incident, Diagnosis, Evidence, Action, Transition, Delivery)


def counts() -> list[int]:
    return [model.objects.count() for model in TABLES]


def test_a_closed_incident_goes_with_all_that_hangs_on_it_once_the_retention_is_over() -> None:
    made = world()
    incident(made)
    full, now = counts(), timezone.now()
    assert all(full)
    tasks.prune()
    assert counts() == full
    old = now - timedelta(days=settings.TRIMTAB_RETENTION_DAYS, seconds=1)
    Incident.objects.update(opened_at=old)
    Action.objects.update(created_at=old)
    tasks.prune()
    assert counts() == full, "an open incident is never too old"
    Incident.objects.update(state=Incident.State.CLOSED, closed_at=old)
    Action.objects.update(ended_at=old)
    Node.objects.update(last_seen_at=old)
    Session.objects.create(session_key="gone", session_data="", expire_date=now)
    tasks.prune()
    assert counts() == [0] * len(TABLES)
    assert not Node.objects.exists()
    assert not Engine.objects.exists()
    assert not Session.objects.exists()
