"""When an incident opens, closes and opens again (NORMS, Time)."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.diagnosis.episodes import earlier_words
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import diagnosis_due, explanation_of
from controlplane.diagnosis.selectors import story as tell
from controlplane.diagnosis.services import incidents_lapse, window_is_good
from controlplane.diagnosis.staging import scene_of
from slo.budget import Counts
from slo.models import Objective
from tests.controlplane.diagnosis.judged import START, WINDOW_S, Story, opened
from tests.memory_reader import MemoryReader
from tracing.types import Signal

pytestmark = pytest.mark.django_db


def test_two_bad_windows_in_a_row_open_one_incident_since_the_first() -> None:
    story = Story()
    assert story.judge(0) is None
    assert story.judge(60) is None
    incident = story.judge(80)
    assert incident is not None
    assert incident.bad_since == START + timedelta(seconds=WINDOW_S)
    assert incident.opened_at == story.now()
    assert (incident.bad_events, incident.total_events) == (140, 200)
    again = story.judge(70)
    assert again is not None
    assert again.pk == incident.pk
    assert again.bad_events == 210


def test_one_bad_window_opens_nothing() -> None:
    story = Story()
    for bad in (0, 90, 0, 90, 0):
        assert story.judge(bad) is None


def test_a_calm_window_reads_no_others() -> None:
    story = Story()
    story.judge(80)
    with CaptureQueriesContext(connection) as asked:
        story.judge(1)
    assert not any("LIMIT 40" in query["sql"] for query in asked)
    with CaptureQueriesContext(connection) as asked:
        story.judge(80)
    assert any("LIMIT 40" in query["sql"] for query in asked)


def test_few_events_open_nothing() -> None:
    story = Story()
    for _ in range(6):
        assert story.judge(15, 15) is None


@pytest.mark.parametrize("signal", [Signal.MISSING, Signal.STALE, Signal.NO_TRAFFIC])
def test_a_window_without_signal_neither_opens_nor_closes(signal: Signal) -> None:
    story = Story()
    story.judge(80)
    assert story.judge(80, 100, signal=signal) is None
    assert story.judge(80) is None, "a hole in the row: not two in a row"
    incident = story.judge(80)
    assert incident is not None
    for _ in range(8):
        incident = story.judge(0, 0, signal=signal)
        assert incident is not None
        assert incident.state == Incident.State.OPEN


def test_a_hole_in_time_is_no_row() -> None:
    story = Story()
    story.judge(80)
    story.window += 3
    assert story.judge(80) is None


def test_four_good_windows_close_and_a_bad_one_starts_the_count_again() -> None:
    story, _incident = opened()
    for bad in (1, 0, 2, 50, 1, 1, 0):
        incident = story.judge(bad)
        assert incident is not None
        assert incident.state == Incident.State.OPEN
    incident = story.judge(2)
    assert incident is not None
    assert incident.state == Incident.State.CLOSED
    assert incident.closed_at == story.now()


def test_between_good_and_bad_an_incident_stays_open() -> None:
    story, _incident = opened()
    for _ in range(10):
        incident = story.judge(20)  # the bar to open is 30 %, the promise 5 %
        assert incident is not None
        assert incident.state == Incident.State.OPEN
        assert incident.good_windows == 0


def _closed() -> tuple[Story, Incident]:
    story, _incident = opened()
    for _ in range(4):
        incident = story.judge(0)
    assert incident is not None
    assert incident.state == Incident.State.CLOSED
    return story, incident


def test_the_same_within_ten_minutes_reopens_it() -> None:
    story, incident = _closed()
    story.judge(80)
    again = story.judge(80)
    assert again is not None
    assert again.pk == incident.pk
    assert again.state == Incident.State.OPEN
    assert again.reopened == 1
    assert again.closed_at is None


def test_each_episode_keeps_its_own_times_and_numbers() -> None:
    """Eight good windows between two runs are of neither."""
    story, incident = _closed()
    over_at, counted = incident.closed_at, (incident.bad_events, incident.total_events)
    assert counted == (160, 600)
    story.judge(0)
    for bad in (70, 90):
        again = story.judge(bad)
    assert again is not None
    first, newest = again.runs
    assert (first.opened_at, first.closed_at) == (incident.opened_at, over_at)
    assert (first.bad_events, first.total_events) == counted
    assert newest.bad_since == START + 7 * timedelta(seconds=WINDOW_S)
    assert (newest.opened_at, newest.closed_at) == (story.now(), None)
    assert (newest.bad_events, newest.total_events) == (160, 200)
    assert tell(again).what.startswith("160 of 200 requests missed “TTFT within 500 ms”")
    assert tell(again).what.endswith("since 00:01:45")
    assert earlier_words(again) == (
        "before, 160 of 600 requests missed it from 00:00:00 to 00:01:36"
    )


def test_what_is_over_is_told_from_when_to_when() -> None:
    _story, incident = _closed()
    assert tell(incident).what.endswith(" on engine-0 from 00:00:00 to 00:01:36")


def test_a_stretch_nobody_watched_is_named_and_left_out_of_how_long_it_lasted() -> None:
    """The control plane was off for 76 windows, 19 minutes, while it was open."""
    story, _incident = opened()
    story.window += 76
    for _ in range(4):
        last = story.judge(0)
    assert last is not None
    assert last.state == Incident.State.CLOSED
    assert tell(last).what.endswith("from 00:00:00 to 00:20:36 (not measured 00:00:30–00:19:30)")
    assert last.run.unwatched == timedelta(minutes=19)
    assert last.run.lasted(story.now()) == timedelta(seconds=96.5)


def test_a_scrape_or_two_that_failed_is_no_stretch_nobody_watched() -> None:
    story, _incident = opened()
    story.judge(0, 0, signal=Signal.MISSING)
    story.window += 1
    story.judge(0, 0, signal=Signal.STALE)
    last = story.judge(80)
    assert last is not None
    assert last.unmeasured == []


def test_what_explained_the_episode_before_explains_nothing_that_came_since() -> None:
    story, incident = _closed()
    incident.diagnoses.create(
        made_at=incident.opened_at, cause="slow_host", score=0.9, because="the host is slow",
        window_start=START, window_end=START,
    )  # fmt: skip
    story.judge(80)
    again = story.judge(80)
    assert again is not None
    assert tell(again).because == ""
    assert diagnosis_due(again, now=story.now())
    first, _newest = again.runs
    told = explanation_of(again, first)
    assert told is not None
    assert told.because == "the host is slow"


def test_the_same_after_ten_minutes_is_a_new_one() -> None:
    story, incident = _closed()
    story.window += 41
    story.judge(80)
    again = story.judge(80)
    assert again is not None
    assert again.pk != incident.pk


def test_a_killed_pass_is_made_good_by_the_next_window() -> None:
    """The window was judged and stored, and the process died before the incident was opened."""
    story = Story()
    story.judge(80)
    story.judge(80, killed=True)
    assert not Incident.objects.exists()
    assert story.judge(80) is not None
    assert Incident.objects.get().bad_since == START


def test_the_service_is_covered_by_its_engines_incident_and_the_reverse() -> None:
    story = Story()
    for _ in range(2):
        story.judge(80)
        assert story.judge(80, scope="", same_window=True) is None
    assert Incident.objects.count() == 1
    Incident.objects.all().delete()
    story.window += 5
    story.judge(80, scope="")
    assert story.judge(80, scope="") is not None
    story.judge(80)
    assert story.judge(80) is None


def test_a_reopened_incident_is_followed_from_its_newest_window() -> None:
    """Late events amend a good window of before; the newest still misses the promise."""
    story, incident = _closed()
    story.judge(80)
    story.judge(80)
    newest = story.window
    story.window = 6  # the last of the four good ones
    again = story.judge(0, 102, same_window=True, now=story.now(newest))
    assert again is not None
    assert again.pk == incident.pk
    assert (again.state, again.good_windows) == (Incident.State.OPEN, 0)
    story.window = newest
    again = story.judge(20)
    assert again is not None
    assert again.state == Incident.State.OPEN
    assert again.bad_again_since == START + timedelta(seconds=6 * WINDOW_S)
    assert again.run_since > again.bad_since


@pytest.mark.parametrize(
    "first", [[(Signal.STALE, 0)] * 4, [(Signal.NO_TRAFFIC, 0)] * 3, [(Signal.OK, 15)] * 2]
)
def test_a_window_that_comes_late_opens_as_in_time(first: list[tuple[Signal, float]]) -> None:
    """They were judged before all was there, so too little to judge by, and then again."""
    story = Story()
    for signal, total in first:
        story.judge(total, total, signal=signal)
    incident = None
    for window in (1, 2):
        story.window = window
        incident = story.judge(80, same_window=True, now=story.now(len(first)))
    assert incident is not None
    assert incident.state == Incident.State.OPEN


def test_windows_of_an_hour_ago_open_nothing() -> None:
    """A spool brings them when they are history: the budget counts them, nobody is woken."""
    story = Story()
    for _ in range(3):
        assert story.judge(80, now=story.now(240)) is None


def test_what_is_over_is_not_opened_by_windows_from_before_its_end() -> None:
    """All of an outage arrives at once, after it: one incident, over, and not again and again."""
    story = Story()
    told = [80.0] * 6 + [0.0] * 5
    for bad in told:
        story.judge(bad, killed=True)
    now = story.now()
    for window, bad in enumerate(told, start=1):
        story.window = window
        story.judge(bad, same_window=True, now=now)
    incident = Incident.objects.get()
    assert (incident.state, incident.reopened) == (Incident.State.CLOSED, 0)
    assert incident.bad_events == 480


def test_an_incident_nobody_measures_any_more_lapses_and_says_so() -> None:
    story, incident = opened()
    hour = timedelta(hours=1)
    assert incidents_lapse(tenant=story.tenant, now=story.now() + hour - timedelta(minutes=1)) == []
    assert incidents_lapse(tenant=story.tenant, now=story.now() + hour) == [incident]
    incident.refresh_from_db()
    assert incident.state == Incident.State.CLOSED
    assert tell(incident).what.endswith("00:00:00, and for an hour nothing was measured there")


def test_an_incident_of_an_objective_that_was_switched_off_lapses() -> None:
    story, incident = opened()
    Objective.objects.update(enabled=False)
    assert incidents_lapse(tenant=story.tenant, now=story.now()) == [incident]
    assert "until the objective was switched off" in tell(Incident.objects.get()).what


def test_an_engine_nobody_hears_does_not_cover_for_the_service() -> None:
    story, _incident = opened()
    for _ in range(3):
        story.judge(0, 0, signal=Signal.STALE)
        assert story.judge(80, scope="", same_window=True) is None, "it was heard a moment ago"
    for _ in range(3):
        story.judge(0, 0, signal=Signal.STALE)
        incident = story.judge(80, scope="", same_window=True)
    assert incident is not None
    assert incident.scope == ""


def test_an_incident_of_weeks_is_still_explained() -> None:
    story, incident = opened()
    story.window += 110_000
    story.judge(80)
    scene = scene_of(incident=incident, reader=MemoryReader(), now=story.now())
    assert scene is not None
    assert scene.incident.count == 20


def test_a_burn_pair_opens_only_while_windows_are_not_good() -> None:
    story = Story()
    story.judge(1, scope="")
    assert story.judge(1, scope="", firing=True) is None, "it has been put right already"
    story.judge(20, scope="")
    incident = story.judge(20, scope="", firing=True)
    assert incident is not None
    assert incident.trigger == "burn 1h/5m"


def ticket() -> tuple[Story, Incident]:
    """An incident that a slow burn opens."""
    story = Story()
    story.judge(20, scope="", firing=True, pair="1d/2h")
    incident = story.judge(20, scope="", firing=True, pair="1d/2h")
    assert incident is not None
    assert (incident.trigger, incident.severity) == ("burn 1d/2h", "ticket")
    return story, incident


def test_a_ticket_becomes_a_page_when_it_burns_fast_and_stays_one() -> None:
    story, incident = ticket()
    story.judge(80, scope="")
    assert Incident.objects.get().severity == "ticket", "one bad window may be chance"
    story.judge(80, scope="")
    story.judge(20, scope="", firing=True, pair="1d/2h")
    incident.refresh_from_db()
    assert (incident.trigger, incident.severity) == ("burn 1d/2h", "page")


def test_what_opens_again_has_the_rule_that_opened_it_now() -> None:
    story, incident = ticket()
    for _ in range(4):
        story.judge(0, scope="")
    for _ in range(2):
        story.judge(80, scope="")
    incident.refresh_from_db()
    assert (incident.reopened, incident.trigger, incident.severity) == (1, "fast burn", "page")


@pytest.mark.parametrize(
    ("bad", "total", "good"),
    [(0, 1, True), (1, 1, False), (5, 100, True), (8, 100, True), (9, 100, False), (0, 0, False)],
)
def test_good_is_what_a_kept_promise_would_show(bad: int, total: int, good: bool) -> None:
    assert window_is_good(Counts(total - bad, total), 0.95) is good
