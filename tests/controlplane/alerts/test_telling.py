"""What is due to whom, told by the rows alone: every question is asked twice."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.alerts.message import duration, sentences
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.services import silence_end
from controlplane.alerts.telling import incidents_to_tell
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import Blind, Story
from tests.controlplane.alerts.receiver import NOW
from tests.controlplane.alerts.saying import (
    HOUR,
    MINUTE,
    WHAT,
    State,
    close,
    newest,
    reopen,
    say,
    silence,
    taken,
)
from tracing.types import Signal

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("chat")]


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
