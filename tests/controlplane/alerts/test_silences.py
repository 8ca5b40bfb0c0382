"""What a silence holds back, and what is told all the same."""

from __future__ import annotations

import pytest

from controlplane.alerts.models import Delivery
from controlplane.alerts.services import silence_create, silence_end
from controlplane.alerts.telling import incidents_to_tell
from controlplane.diagnosis.models import Incident
from slo.models import Objective
from tests.controlplane.alerts.receiver import NOW
from tests.controlplane.alerts.saying import (
    HOUR,
    MINUTE,
    State,
    another,
    close,
    say,
    silence,
    taken,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("chat")]


def test_a_silenced_message_is_kept_and_what_outlasts_it_is_told(incident: Incident) -> None:
    quiet = silence(incident, NOW, NOW + HOUR)
    assert say(incident, NOW) == ["(opened)"]
    row = Delivery.objects.get()
    assert (row.state, row.silence) == (State.SILENCED, quiet)
    assert say(incident, NOW + 59 * MINUTE) == []
    assert say(incident, NOW + 60 * MINUTE) == ["opened"], "it still burns"
    taken()
    assert say(incident, NOW + 61 * MINUTE) == []


def test_a_silence_can_be_ended_early(incident: Incident) -> None:
    quiet = silence(incident, NOW, NOW + HOUR)
    say(incident, NOW)
    silence_end(silence=quiet, by="ada", now=NOW + MINUTE)
    assert quiet.ended_at == NOW + MINUTE
    assert say(incident, NOW + 2 * MINUTE) == ["opened"]
    silence_end(silence=quiet, by="ada", now=NOW + 5 * MINUTE)
    quiet.refresh_from_db()
    assert quiet.ended_at == NOW + MINUTE


def test_reminders_are_silenced_and_the_end_is_told_to_who_knew(incident: Incident) -> None:
    say(incident, NOW)
    taken()
    silence(incident, NOW + MINUTE, NOW + 5 * HOUR)
    assert say(incident, NOW + HOUR) == ["(reminded)"]
    assert say(incident, NOW + 90 * MINUTE) == []
    close(incident, NOW + 100 * MINUTE)
    assert say(incident, NOW + 100 * MINUTE) == ["resolved"], "a page left open helps nobody"


def test_what_began_and_ended_in_silence_stays_there(incident: Incident) -> None:
    silence(incident, NOW, NOW + HOUR)
    say(incident, NOW)
    close(incident, NOW + MINUTE)
    assert say(incident, NOW + MINUTE) == []
    assert incidents_to_tell(incident.tenant) == []


@pytest.mark.parametrize(
    ("scope", "fits"),
    [
        ({"engine": "engine-0"}, True),
        ({"engine": "", "service": "chat"}, True),
        ({"engine": "", "objective": "ttft"}, True),
        ({"engine": "engine-0", "service": "chat", "objective": "ttft"}, True),
        ({"engine": "engine-1"}, False),
        ({"engine": "engine-0", "service": "code"}, False),
        ({"engine": "", "objective": "tpot"}, False),
    ],
)
def test_a_silence_fits_what_it_names(
    scope: dict[str, str], fits: bool, incident: Incident
) -> None:
    elsewhere = another(incident, "tpot")
    elsewhere.scope = "engine-1"
    elsewhere.save()
    Objective.objects.filter(slug="tpot").update(service="code")
    silence(incident, NOW, NOW + HOUR, **scope)
    assert say(incident, NOW) == (["(opened)"] if fits else ["opened"])


def test_another_tenants_silence_is_nobodys(incident: Incident) -> None:
    other = Incident.objects.get(pk=incident.pk).tenant
    other.pk, other.slug = None, "other"
    other.save(force_insert=True)
    Objective.objects.create(tenant=other, slug="ttft", service="chat", target=0.9)
    spec = {"objective": "ttft", "reason": "r", "until": NOW + HOUR}
    silence_create(tenant=other, spec=spec, by="eve", now=NOW)
    assert say(incident, NOW) == ["opened"]
