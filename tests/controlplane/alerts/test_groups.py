"""How urgent a message is, and incidents that are told as one."""

from __future__ import annotations

import pytest

from controlplane.alerts.models import Channel
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import Hit, Story
from tests.controlplane.alerts.receiver import NOW
from tests.controlplane.alerts.saying import (
    HOUR,
    MINUTE,
    WHAT,
    another,
    close,
    newest,
    say,
    silence,
    taken,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("chat")]


# --- severity -------------------------------------------------------------------------------------


def test_a_channel_for_pages_hears_of_no_ticket(incident: Incident, chat: Channel) -> None:
    Channel.objects.filter(pk=chat.pk).update(severity_min="page")
    incident.severity = "ticket"
    incident.save()
    assert say(incident, NOW) == []
    incident.severity = "page"
    incident.save()
    assert say(incident, NOW) == ["opened"]


def test_a_group_is_as_severe_as_its_most_urgent_part(incident: Incident, chat: Channel) -> None:
    Channel.objects.filter(pk=chat.pk).update(severity_min="page")
    incident.severity = "ticket"
    incident.save()
    another(incident, "tpot", part_of=incident, severity="page")
    assert say(incident, NOW) == ["opened"]
    assert newest()["severity"] == "page"


# --- groups ---------------------------------------------------------------------------------------


def test_a_group_is_told_as_one(incident: Incident) -> None:
    part = another(incident, "tpot", part_of=incident)
    assert say(incident, NOW) == ["opened"]
    assert say(part, NOW) == []
    assert newest()["text"] == f"{WHAT}. The cap is small. With it: “TPOT” on engine-0."
    assert [m["incident"] for m in newest()["members"]] == [str(part.pk)]
    taken()
    close(incident, NOW + MINUTE)
    assert say(incident, NOW + MINUTE) == [], "a part of it still burns"
    assert say(part, NOW + HOUR) == ["reminded"]
    taken()
    close(part, NOW + 2 * HOUR)
    assert say(part, NOW + 2 * HOUR) == []
    assert say(incident, NOW + 2 * HOUR) == ["resolved"]
    assert newest()["lasted_s"] == 2 * 3600


def test_what_a_story_has_told_of_a_part_is_not_said_again(incident: Incident) -> None:
    part = another(incident, "tpot", part_of=incident)
    hits = [Hit(incident, "TTFT", 184, 412), Hit(part, "TPOT", 3, 412)]
    say(incident, NOW, story=Story(what=f"{WHAT}; 3 of 412 missed “TPOT”", hits=hits))
    assert newest()["text"] == f"{WHAT}; 3 of 412 missed “TPOT”."


def test_one_told_by_itself_before_it_joined_is_ended_by_itself(incident: Incident) -> None:
    part = another(incident, "tpot")
    say(incident, NOW)
    say(part, NOW)
    taken()
    Incident.objects.filter(pk=part.pk).update(part_of=incident)
    close(part, NOW + MINUTE)
    assert say(part, NOW + MINUTE) == [], "the group still burns"
    close(incident, NOW + 2 * MINUTE)
    assert say(incident, NOW + 2 * MINUTE) == ["resolved"]
    part.refresh_from_db()
    assert say(part, NOW + 2 * MINUTE) == ["resolved"]


def test_a_group_is_silenced_when_all_of_it_is(incident: Incident) -> None:
    part = another(incident, "tpot", part_of=incident)
    silence(incident, NOW, NOW + HOUR, objective="ttft")
    assert say(incident, NOW) == ["opened"], "TPOT is nobody's secret"
    assert part.state == "open"
