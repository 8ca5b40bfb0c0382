"""What is due to whom, told by the rows alone: every question is asked twice."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from controlplane.alerts.message import duration, sentences
from controlplane.alerts.models import Channel, Delivery, Silence
from controlplane.alerts.services import silence_create, silence_end
from controlplane.alerts.telling import incident_tell, incidents_to_tell
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import Blind, Hit, Story
from slo.models import Objective
from tests.controlplane.alerts.receiver import NOW
from tests.controlplane.diagnosis.scenes import TTFT
from tracing.types import Signal

pytestmark = pytest.mark.django_db
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
State = Delivery.State
WHAT = "184 of 412 requests missed “TTFT”"


@pytest.fixture(autouse=True)
def chat(incident: Incident) -> Channel:
    return Channel.objects.create(tenant=incident.tenant, name="chat", url="http://127.0.0.1:1/")


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


def test_over_counts_from_the_episodes_own_start_and_leaves_out_what_nobody_watched(
    incident: Incident,
) -> None:
    """It burned from noon, and again from 12:05; from 12:06 to 12:25 nobody watched."""
    again = NOW + 5 * MINUTE
    assert say(incident, NOW) == ["opened"]
    taken()
    hole = [(again + MINUTE).isoformat(), (again + 20 * MINUTE).isoformat()]
    close(incident, again + 22 * MINUTE, bad_again_since=again, reopened=1, unmeasured=[hole])
    assert say(incident, again + 22 * MINUTE, earlier=["before, 7 of 90 missed it"]) == ["resolved"]
    told = newest()
    assert told["title"].startswith("Over after 3 minutes, and 19 minutes not measured: ")
    assert (told["lasted_s"], told["unmeasured_s"]) == (22 * 60, 19 * 60)
    assert told["bad_since"] == again.isoformat()
    assert told["text"].endswith("It ended without a change of ours. Before, 7 of 90 missed it.")


# --- the way of an incident -----------------------------------------------------------------------


def test_it_is_opened_reminded_of_and_resolved(incident: Incident) -> None:
    assert say(incident, NOW) == ["opened"]
    taken()
    assert say(incident, NOW + 59 * MINUTE) == []
    assert say(incident, NOW + 60 * MINUTE) == ["reminded"]
    assert newest()["title"] == f"Still burning after 60 minutes: {WHAT}"
    taken()
    assert say(incident, NOW + 119 * MINUTE) == []
    assert say(incident, NOW + 120 * MINUTE) == ["reminded"]
    taken()
    close(incident, NOW + 130 * MINUTE)
    done = "Kept max_num_seqs at 32 (was 8) on engine-0"
    assert say(incident, NOW + 131 * MINUTE, doing=done) == ["resolved"]
    told = newest()
    assert told["title"] == "Over after 2 h 10 min: “TTFT within 500 ms” on engine-0"
    assert told["text"] == f"{WHAT}. The cap is small. Kept max_num_seqs at 32 (was 8) on engine-0."
    assert told["lasted_s"] == 130 * 60
    assert say(incident, NOW + 200 * MINUTE) == []


def test_what_nobody_measures_is_not_said_to_burn(incident: Incident) -> None:
    blind = Blind(NOW + MINUTE, Signal.STALE)
    unmeasured = Story(what=WHAT, because="the cap is small", blind=blind)
    say(incident, NOW)
    taken()
    assert say(incident, NOW + 60 * MINUTE, story=unmeasured) == ["reminded"]
    assert newest()["title"] == f"Still open after 60 minutes: {WHAT}"
    taken()
    undone = NOW + 61 * MINUTE
    assert say(incident, undone, story=unmeasured, undone_at=undone) == ["undone"]
    assert newest()["title"] == f"Change undone, still open after 61 minutes: {WHAT}"


def test_an_end_without_a_change_of_ours_says_so(incident: Incident) -> None:
    say(incident, NOW)
    close(incident, NOW + MINUTE)
    assert say(incident, NOW + MINUTE) == ["resolved"]
    assert newest()["text"] == f"{WHAT}. The cap is small. It ended without a change of ours."


def test_an_end_nobody_saw_is_not_called_over(incident: Incident) -> None:
    say(incident, NOW)
    close(incident, NOW + HOUR, lapsed="and for an hour nothing was measured there")
    say(incident, NOW + HOUR)
    assert newest()["title"].startswith("Closed, its end unseen, after 60 minutes: ")


def test_who_was_never_told_hears_of_no_end(incident: Incident) -> None:
    close(incident, NOW)
    assert say(incident, NOW) == []


def test_a_reminder_can_be_off_or_often(incident: Incident, chat: Channel) -> None:
    Channel.objects.filter(pk=chat.pk).update(remind_minutes=0)
    often = Channel.objects.create(
        tenant=incident.tenant, name="often", url="http://127.0.0.1:1/", remind_minutes=5
    )
    say(incident, NOW)
    taken()
    assert say(incident, NOW + 10 * MINUTE) == ["reminded"]
    assert Delivery.objects.get(event="reminded").channel == often


def test_what_is_not_delivered_yet_is_not_reminded_of(incident: Incident) -> None:
    say(incident, NOW)
    assert say(incident, NOW + 3 * HOUR) == []
    Delivery.objects.update(state=State.FAILED)
    assert say(incident, NOW + 3 * HOUR) == ["reminded"], "a failed one is tried in new words"


def test_a_channel_made_late_hears_of_what_burns(incident: Incident) -> None:
    say(incident, NOW)
    Channel.objects.create(tenant=incident.tenant, name="late", url="http://127.0.0.1:1/")
    assert say(incident, NOW + MINUTE) == ["opened"]


def test_what_burns_again_is_opened_again(incident: Incident) -> None:
    say(incident, NOW)
    taken()
    close(incident, NOW + MINUTE)
    assert say(incident, NOW + MINUTE) == ["resolved"]
    taken()
    reopen(incident)
    assert say(incident, NOW + 3 * MINUTE) == ["opened"]
    assert newest()["title"].startswith("Burning again: ")


def test_one_that_flaps_is_called_over_once_it_stays_over(incident: Incident) -> None:
    """Two messages a minute for hours is what makes people switch a channel off."""
    said, now = [], NOW
    for _ in range(6):
        said += say(incident, now)
        taken()
        close(incident, now + MINUTE)
        said += say(incident, now + 2 * MINUTE)
        reopen(incident)
        now += 4 * MINUTE
    assert said == ["opened", "resolved", "opened", "resolved", "opened"]
    close(incident, now)
    assert say(incident, now + 9 * MINUTE) == []
    assert incidents_to_tell(incident.tenant) == [incident]
    assert say(incident, now + 11 * MINUTE) == ["resolved"]


def test_only_what_is_over_and_untold_is_left_to_tell(incident: Incident) -> None:
    tenant = incident.tenant
    assert incidents_to_tell(tenant) == [incident]
    say(incident, NOW)
    close(incident, NOW + MINUTE)
    assert incidents_to_tell(tenant) == [incident]
    say(incident, NOW + MINUTE)
    assert incidents_to_tell(tenant) == []


# --- a yes is wanted ------------------------------------------------------------------------------

LINKS = {"approve": "http://t/a/1/", "reject": "http://t/a/2/"}


def test_that_a_change_was_undone_is_told_at_once_and_once(incident: Incident) -> None:
    say(incident, NOW, doing="Changed 8 to 32")
    taken()
    undone = {"doing": "Undid 8 to 32: no better", "undone_at": NOW + 2 * MINUTE}
    assert say(incident, NOW + 2 * MINUTE, **undone) == ["undone"]
    assert newest()["title"] == f"Change undone, still burning after 2 minutes: {WHAT}"
    assert newest()["text"].endswith("Undid 8 to 32: no better.")
    assert say(incident, NOW + 3 * MINUTE, **undone) == []
    undone["undone_at"] = NOW + 9 * MINUTE
    assert say(incident, NOW + 9 * MINUTE, **undone) == ["undone"]


def test_who_hears_of_it_first_after_the_undo_hears_of_both_at_once(incident: Incident) -> None:
    undone = {"doing": "Undid 8 to 32", "undone_at": NOW - MINUTE}
    assert say(incident, NOW, **undone) == ["opened"]
    assert say(incident, NOW + MINUTE, **undone) == []


def test_an_undo_under_a_silence_is_told_when_that_ends(incident: Incident) -> None:
    say(incident, NOW)
    taken()
    held = silence(incident, NOW, NOW + HOUR)
    undone = {"doing": "Undid 8 to 32", "undone_at": NOW + MINUTE}
    assert say(incident, NOW + MINUTE, **undone) == ["(undone)"]
    silence_end(silence=held, by="ada", now=NOW + 2 * MINUTE)
    assert say(incident, NOW + 2 * MINUTE, **undone) == ["reminded"]
    assert newest()["action"] == "Undid 8 to 32"


def test_a_kept_change_that_was_not_enough_is_told_once(incident: Incident) -> None:
    say(incident, NOW, doing="Changed 8 to 32")
    taken()
    stuck = {"doing": "Kept 32; 25% missed it all the same", "stuck_since": NOW + MINUTE}
    assert say(incident, NOW + 3 * MINUTE, **stuck) == ["stuck"]
    assert newest()["title"] == f"Change kept, not enough after 3 minutes: {WHAT}"
    assert newest()["stuck_since"] == stuck["stuck_since"].isoformat()
    taken()
    assert say(incident, NOW + 4 * MINUTE, **stuck) == []
    assert say(incident, NOW + 5 * MINUTE) == [], "a look that found more"
    assert say(incident, NOW + 63 * MINUTE, **stuck) == ["reminded"]
    taken()
    stuck["stuck_since"] = NOW + 65 * MINUTE
    assert say(incident, NOW + 67 * MINUTE, **stuck) == ["stuck"], "another change"


def test_a_channel_made_late_hears_at_once_that_a_kept_change_was_not_enough(
    incident: Incident,
) -> None:
    stuck = {"doing": "Kept 32; 25% missed it all the same", "stuck_since": NOW - MINUTE}
    assert say(incident, NOW, **stuck) == ["opened"]


def test_a_yes_is_asked_for_at_once_and_once(incident: Incident) -> None:
    say(incident, NOW)
    taken()
    ask = {"doing": "Proposes 8 to 32", "links": LINKS}
    assert say(incident, NOW + MINUTE, **ask) == ["asked"]
    assert newest()["actions"] == LINKS
    assert newest()["title"].startswith("Approval wanted: ")
    taken()
    later = {"doing": "Proposes 8 to 32", "links": {**LINKS, "approve": "http://t/a/3/"}}
    assert say(incident, NOW + 2 * MINUTE, **later) == [], "the same question, signed anew"
    assert say(incident, NOW + 2 * MINUTE, **{**ask, "doing": "Proposes 32 to 64"}) == ["asked"]


def test_a_question_may_come_with_the_news(incident: Incident) -> None:
    ask = {"doing": "Proposes 8 to 32", "links": LINKS}
    assert say(incident, NOW, **ask) == ["opened"]
    assert newest()["actions"] == LINKS
    assert say(incident, NOW + MINUTE, **ask) == []


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


# --- silences -------------------------------------------------------------------------------------


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


# --- groups ---------------------------------------------------------------------------------------


def another(incident: Incident, slug: str, **columns: Any) -> Incident:
    objective = Objective.objects.create(
        tenant=incident.tenant, slug=slug, name=slug.upper(), service="chat",
        indicator="latency", spec=TTFT.spec, target=0.95,
    )  # fmt: skip
    return Incident.objects.create(
        tenant=incident.tenant, objective=objective, scope="engine-0", trigger="fast burn",
        bad_since=NOW, opened_at=NOW + MINUTE, **columns,
    )  # fmt: skip


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


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 seconds"), (1, "1 second"), (89, "89 seconds"), (90, "2 minutes"),
        (720, "12 minutes"), (5_400, "1 h 30 min"), (172_800, "2 d 0 h"), (277_200, "3 d 5 h"),
    ],
)  # fmt: skip
def test_a_duration_is_told_in_two_units_at_most(seconds: int, words: str) -> None:
    assert duration(timedelta(seconds=seconds)) == words


def test_sentences_begin_large_and_end_with_one_stop() -> None:
    assert sentences("a b.", "", "c…", "负载高。", "负载高", "d") == "A b. C… 负载高。 负载高。 D."
