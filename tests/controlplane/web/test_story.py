"""An incident's page and its story: what is told of each step, and what came of each attempt."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.urls import reverse

from controlplane.actions.models import Action, State
from controlplane.diagnosis.explaining import diagnosis_confirm, diagnosis_note
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.web.story import lines_of
from controlplane.web.templatetags.prose import prose
from tests.controlplane.web.answers import text
from tests.controlplane.web.story import BECAUSE, act, end, explain, goes_on, incident
from tests.controlplane.web.world import TRACE_ID, World


def test_incident_shows_evidence_rivals_action_and_message(ada: Any, full: World) -> None:
    found = Incident.objects.get()
    said = text(ada(full).get(f"/incidents/{found.pk}/"))
    assert said.count('class="spark"') == 6
    assert "vllm:num_requests_waiting" in said
    assert "a step takes 31 ms, as long as before" in said
    assert "within bounds, hot, one step of two" in said
    assert "chat-oncall" in said
    assert reverse("trace", args=[TRACE_ID]) in said


def test_incident_repeats_nothing_of_its_message(ada: Any, full: World) -> None:
    said = text(ada(full).get(f"/incidents/{Incident.objects.get().pk}/"))
    told = said.partition('id="told"')[2].partition("</section>")[0]
    assert told.count("184 of 412 requests missed") == 1
    assert told.count(BECAUSE) == 1


def test_a_story_says_how_soon_a_person_is_wanted(ada: Any, full: World) -> None:
    client, found = ada(full), Incident.objects.get()
    for severity, other in (("page", "ticket"), ("ticket", "page")):
        Incident.objects.update(severity=severity)
        for address in ("/", "/incidents/", f"/incidents/{found.pk}/"):
            said = text(client.get(address))
            assert f'<span class="pill {severity}"' in said, address
            assert f'<span class="pill {other}"' not in said, address
    Incident.objects.create(
        tenant=full.tenant, objective=full.objectives["tpot"], scope="engine-0", severity="page",
        trigger="fast burn", bad_since=found.bad_since, opened_at=found.opened_at, part_of=found,
    )  # fmt: skip
    (line,) = lines_of([Incident.objects.get(pk=found.pk)])
    assert line.severity == "page", "as urgent as the most urgent that it tells of"


def test_incident_tells_its_steps_in_the_order_they_had(ada: Any, full: World) -> None:
    """The agent may be quicker than the chat, and the chat quicker than the agent."""
    found, action = Incident.objects.get(), Action.objects.get()
    (delivery,) = found.deliveries.all()
    ada(full)

    def steps() -> list[str]:
        (line,) = lines_of([Incident.objects.get()])
        return [step.word for step in line.steps]

    assert action.applied_at is not None
    for later_s, words in (
        (1, ["detected", "explained", "acted", "told", "verifying"]),
        (-1, ["detected", "explained", "told", "acted", "verifying"]),
    ):
        delivery.sent_at = action.applied_at + timedelta(seconds=later_s)
        delivery.save()
        assert steps() == words
    delivery.state, delivery.sent_at = "pending", None
    delivery.save()
    assert steps() == ["detected", "explained", "acted", "tell", "verifying"]
    delivery.state = "failed"
    delivery.save()
    assert steps() == ["detected", "explained", "not told", "acted", "verifying"]


def test_incident_tells_every_attempt_and_when_the_next_may_come(ada: Any, full: World) -> None:
    found, first = Incident.objects.get(), Action.objects.get()
    at = found.opened_at
    end(first, State.ROLLED_BACK, at + timedelta(seconds=60))
    second = act(full, found, at + timedelta(seconds=70), State.VERIFYING)
    second.changes = {"max_num_seqs": {"from": 8, "to": 64}}
    end(second, State.ROLLED_BACK, at + timedelta(seconds=150))

    def steps() -> list[tuple[str, str]]:
        (line,) = lines_of([Incident.objects.get()])
        return [(step.word, step.note) for step in line.steps][3:]

    tried = [
        ("acted", "max_num_seqs=32"), ("rolled back", ""),
        ("acted", "max_num_seqs=64"), ("rolled back", ""),
    ]  # fmt: skip
    assert steps() == [*tried, ("look again", "")]
    diagnosis = explain(full, found, at + timedelta(seconds=180))
    assert steps() == tried
    until = at + timedelta(seconds=330)
    diagnosis_note(diagnosis=diagnosis, no_action="just tried this way", next_try_at=until)
    assert steps() == [*tried, ("next try from", "")]
    assert "next try from <time" in text(ada(full).get("/"))
    for seconds in (160, 165):
        end(act(full, found, at + timedelta(seconds=seconds), State.VERIFYING), State.ROLLED_BACK,
            at + timedelta(seconds=seconds + 4))  # fmt: skip
    assert ("1 attempt", "") in steps()
    last = found.actions.latest("created_at")
    found.actions.filter(pk=last.pk).update(state=State.ROLLBACK_FAILED)
    assert steps()[-2:] == [("rollback failed", ""), ("wait for a person", "")]


def test_incident_tells_what_the_newest_look_found_whatever_was_cured(
    ada: Any, full: World
) -> None:
    found, first = Incident.objects.get(), Action.objects.get()
    at = found.opened_at
    end(first, State.VERIFIED, at + timedelta(seconds=60))
    diagnosis_confirm(incident=found, cause=first.cause, acted_at=at + timedelta(seconds=60))
    second = act(full, found, at + timedelta(seconds=70), State.ROLLED_BACK)
    newest = explain(full, found, at + timedelta(seconds=180))
    Diagnosis.objects.filter(pk=newest.pk).update(cause="unknown")
    reason = "the cause is not known, so nothing is changed"
    diagnosis_note(diagnosis=newest, no_action=reason)
    client = ada(full)
    said = text(client.get("/?part=story"))
    rest = "What goes on since is not explained, so nothing more is changed."
    assert rest in said
    assert "The cause is not known, so nothing is changed." not in said, "one was, and was cured"
    assert "look again" not in said, "it has looked"
    end(second, State.VERIFIED, at + timedelta(seconds=150))
    assert rest in text(client.get("/?part=story"))
    Diagnosis.objects.filter(pk=newest.pk).update(cause=first.cause)
    until = at + timedelta(seconds=330)
    diagnosis_note(diagnosis=newest, no_action="just tried this way", next_try_at=until)
    assert "next try from <time" in text(client.get("/?part=story"))


def test_what_a_kept_change_left_is_told_in_words_that_are_true_of_it(
    ada: Any, full: World
) -> None:
    found, action = Incident.objects.get(), Action.objects.get()
    kept_at = found.opened_at + timedelta(seconds=60)
    end(action, State.VERIFIED, kept_at)
    diagnosis_confirm(incident=found, cause=action.cause, acted_at=kept_at)
    newest = goes_on(found, kept_at)
    near, ask = newest.because, newest.rivals[0]["no_remedy"]
    client = ada(full)
    story = text(client.get("/?part=story"))
    left = "25.0\u00a0% of 300 requests missed it all the same; that is not explained, so nothing"
    assert f"Since {kept_at:%H:%M:%S}, {left}" in story
    assert "The cause is not known" not in story
    said = text(client.get(f"/incidents/{found.pk}/"))
    look = said.partition('id="look"')[2].partition("</section>")[0]
    assert prose(f"{near[1:]}. If it is that, {ask}.") in look
    assert "a step 80\u00a0% of the time" in look
    assert look.index("87 served") < look.index("10\u00a0% busy"), "the nearest first"
    regions = re.findall(r'role="region" aria-label="([^"]*)"', said)
    assert len(set(regions)) == len(regions) > 2, "whoever hears the page tells them apart"
    assert "Evidence: load beyond capacity, newest look" in regions
    before = said.partition('<details class="rival" id="explained">')[2]
    assert "8 of 8 allowed requests run all the time" in before, "folded away, not said twice"
    short = "cured; the rest unexplained"
    assert short in text(client.get("/incidents/"))
    assert short in text(client.get("/objectives/"))
    Incident.objects.update(state=Incident.State.CLOSED, closed_at=full.now)
    said = text(client.get(f"/incidents/{found.pk}/"))
    assert 'id="look"' not in said
    assert 'id="explained"' not in said, "the evidence stands open again"
    assert short not in text(client.get("/incidents/"))


def test_an_incidents_charts_stand_between_its_story_and_its_reasons(ada: Any, full: World) -> None:
    client, address = ada(full), f"/incidents/{Incident.objects.get().pk}/"
    said = text(client.get(address))
    places = [said.index(part) for part in ('id="story"', 'data-chart="bad"', 'id="reasons"')]
    assert places == sorted(places)
    story, reasons = (text(client.get(f"{address}?part={part}")) for part in ("story", "reasons"))
    assert "data-page-state" in story
    assert "<table" not in story
    assert "8 of 8 allowed requests run all the time" in reasons
    assert "data-chart" not in story + reasons, "what is fetched again draws no chart anew"


def test_incident_says_when_no_window_of_a_trial_counted(ada: Any, full: World) -> None:
    action = Action.objects.get()
    end(action, State.ROLLED_BACK, full.now)
    action.outcome["after"] = {"good": 0.0, "total": 0.0}
    action.save()
    client = ada(full)
    for address in (f"/incidents/{Incident.objects.get().pk}/", "/actions/"):
        said = text(client.get(address))
        assert "no window counted" in said
        assert "0 requests" not in said


def test_incident_says_what_its_numbers_leave_out(ada: Any, full: World) -> None:
    client, found = ada(full), Incident.objects.get()
    said = text(client.get(f"/incidents/{found.pk}/"))
    assert "Counted from the start of the bad control windows in a row that opened it." in said
    missed = re.search(r"In the hour before, (\d+) of ([\d\u202f]+) requests missed as well", said)
    assert missed is not None
    assert 0 < int(missed[1]) < int(missed[2].replace("\u202f", ""))
    Incident.objects.update(trigger="burn 1h/5m", scope="engine-9")
    said = text(client.get(f"/incidents/{found.pk}/"))
    assert "when 1\u00a0h burned too fast" in said
    assert "In the hour before" not in said


def test_incident_says_once_what_a_look_and_p_are(ada: Any, full: World) -> None:
    client, found = ada(full), Incident.objects.get()
    address = f"/incidents/{found.pk}/"
    assert "A look compares" not in text(client.get(address))  # nothing was judged yet
    end(Action.objects.get(), State.ROLLED_BACK, full.now)
    end(act(full, found, full.now, State.VERIFYING), State.VERIFIED, full.now)
    said = text(client.get(address))
    assert said.count("such a fall by chance: ") == 2
    assert said.count("A look compares") == 1


def test_a_rise_is_no_fall_that_chance_may_have_made(ada: Any, full: World) -> None:
    action = Action.objects.get()
    end(action, State.ROLLED_BACK, full.now)
    action.outcome |= {"after": {"good": 133, "total": 343}, "p_value": 0.999}
    action.save()
    client = ada(full)
    for address in (f"/incidents/{Incident.objects.get().pk}/", "/actions/"):
        said = text(client.get(address))
        assert "61.2\u00a0%" in said
        assert "fall by chance:" not in said


def test_the_price_of_a_kept_change_stands_beside_its_verdict(ada: Any, full: World) -> None:
    action = Action.objects.get()
    end(action, State.VERIFIED, full.now)
    lost = {"objective": "Each token", "before": 0.0, "after": 0.0231, "budget": 0.01}
    action.outcome["price"] = [lost]
    action.save()
    client = ada(full)
    for address in (f"/incidents/{Incident.objects.get().pk}/", "/actions/"):
        said = text(client.get(address))
        worse = "“Each token” got worse: 0\u00a0% → 2.31\u00a0% missed, over its budget of 1\u00a0%"
        assert f'<p class="price">{worse}</p>' in said


def test_one_request_is_said_as_one(ada: Any, full: World) -> None:
    action = Action.objects.get()
    end(action, State.ROLLED_BACK, full.now)
    action.outcome["after"] = {"good": 0.0, "total": 1.0}
    action.save()
    client = ada(full)
    assert "of 1 request<" in text(client.get(f"/incidents/{Incident.objects.get().pk}/"))
    assert "missed, 1 request<" in text(client.get("/actions/"))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            State.VERIFIED,
            (
                "44.7\u00a0% of requests missed the objective before",
                '<span class="chip ok">kept</span>',
                "such a fall by chance: under 0.01\u00a0%",
            ),
        ),
        (State.ROLLED_BACK, ("39\u00a0% of requests still missed", "rolled back", "inconclusive")),
    ],
)
def test_incident_tells_the_outcome(
    ada: Any, full: World, state: State, words: tuple[str, ...]
) -> None:
    end(Action.objects.get(), state, full.now)
    said = text(ada(full).get(f"/incidents/{Incident.objects.get().pk}/"))
    for word in words:
        assert word in said


def test_incident_says_what_comes_after_a_change_that_did_not_help(ada: Any, full: World) -> None:
    end(Action.objects.get(), State.ROLLED_BACK, full.now)
    found = Incident.objects.get()
    diagnosis = found.diagnoses.get()
    diagnosis.facts["no_action"] = "max_num_seqs was just tried this way; waiting 3 min"
    diagnosis.save()
    assert "max_num_seqs was just tried this way; waiting 3 min." in text(
        ada(full).get(f"/incidents/{found.pk}/")
    )


def test_incident_without_a_cause_says_so(ada: Any, empty: World) -> None:
    found = incident(empty)
    found.diagnoses.update(cause="unknown", score=0.3, because="no cause has enough evidence")
    found.actions.all().delete()
    said = text(ada(empty).get(f"/incidents/{found.pk}/"))
    assert "Nothing is changed, because the evidence carries no cause." in said
    assert "No cause has enough evidence." in said


def reopened(full: World) -> Incident:
    """It was put right by a kept change, over, and goes on again since a minute, unexplained."""
    found, action = Incident.objects.get(), Action.objects.get()
    over_at, again = full.now - timedelta(seconds=100), full.now - timedelta(seconds=60)
    end(action, State.VERIFIED, over_at - timedelta(seconds=15))
    Incident.objects.update(closed_at=over_at, state="closed")
    Incident.objects.get().run.save()
    Incident.objects.update(
        state="open", closed_at=None, reopened=1, bad_again_since=again, opened_again_at=again,
        bad_events=1102, total_events=2001,
    )  # fmt: skip
    newest = explain(full, found, again + timedelta(seconds=2))
    newest.evidence.all().delete()
    why = {"no_action": "the cause is not known, so nothing is changed"}
    because = "no cause examined explains it; the nearest, slow host, fails on: 10 % busy"
    Diagnosis.objects.filter(pk=newest.pk).update(cause="unknown", because=because, facts=why)
    return Incident.objects.get()


def test_a_reopened_incident_tells_each_episode_with_its_own_steps_and_numbers(
    ada: Any, full: World
) -> None:
    found = reopened(full)
    (line,) = lines_of([found])
    assert [step.word for step in line.steps] == [
        "detected", "explained", "told", "acted", "kept", "over",
        "again", "explained", "tell", "no action",
    ]  # fmt: skip
    said = text(ada(full).get(f"/incidents/{found.pk}/"))
    newest, before = said.split('<p class="earlier muted">')
    again = f"{found.run_since:%H:%M:%S}"
    missed = "1,102 of 2,001 requests missed “First token within 500 ms” on engine-0"
    assert prose(f"{missed} since {again}") in newest
    assert "The cause is not known, so nothing is changed." in newest
    assert "Kept max_num_seqs" not in newest.partition('<section class="story')[2]
    first = found.episodes.get()
    assert first.closed_at is not None
    when = f"from {first.bad_since:%H:%M:%S} to {first.closed_at:%H:%M:%S}"
    told = f"Before, 184 of 412 requests missed it {when}. {BECAUSE}. Kept max_num_seqs at 32"
    assert prose(told) in before


def test_what_a_change_was_made_for_stays_beside_it(ada: Any, full: World) -> None:
    client, found = ada(full), Incident.objects.get()
    address = f"/incidents/{found.pk}/"
    assert 'id="explained-' not in text(client.get(address)), "the page's evidence is its own"
    reopened(full)
    said = text(client.get(address))
    change = said.partition('<article class="action"')[2].partition("</article>")[0]
    assert f'id="explained-{found.actions.get().pk}"' in change
    assert prose(BECAUSE) in change
    assert "8 of 8 allowed requests run all the time" in change


def test_both_openings_are_marked_on_the_charts(ada: Any, full: World) -> None:
    found = reopened(full)
    drawn = ada(full).get("/series/ttft/?minutes=60").json()
    at = [mark["at"] for mark in drawn["marks"] if mark["kind"] == "incident"]
    assert at == [found.opened_at.timestamp(), found.run.opened_at.timestamp()]


def test_the_list_of_incidents_counts_only_what_was_seen(ada: Any, full: World) -> None:
    found = reopened(full)
    hole = [(full.now - timedelta(seconds=50)).isoformat(), full.now.isoformat()]
    Incident.objects.update(
        unmeasured=[hole], state="closed", closed_at=full.now + timedelta(seconds=10)
    )
    said = text(ada(full).get("/incidents/"))
    first = found.episodes.get()
    assert first.closed_at is not None
    seen = round((first.closed_at - first.bad_since).total_seconds()) + 20
    assert f"{seen // 60}\u00a0min {seen % 60}\u00a0s<small>and 50\u00a0s not measured" in said
    assert "again <time" in said


def test_a_change_that_was_set_back_says_so_wherever_it_is_told(ada: Any, full: World) -> None:
    found, action = Incident.objects.get(), Action.objects.get()
    end(action, State.VERIFIED, full.now)
    client, address = ada(full), f"/incidents/{found.pk}/"
    assert "Roll back" in text(client.get(address))
    action.overridden = {
        "knob": "max_num_seqs", "value": 8, "by": "start of the demo", "at": full.now.isoformat()
    }  # fmt: skip
    action.save()
    words = f"set back to 8 at {full.now:%H:%M:%S} by start of the demo"
    for page in ("/", address, "/actions/", "/incidents/"):
        said = text(client.get(page))
        assert words in said, page
        assert "Roll back<" not in said, page
    (line,) = lines_of([Incident.objects.get()])
    assert ("set back", "max_num_seqs=8 by start of the demo") in [
        (step.word, step.note) for step in line.steps
    ]


def test_a_prediction_that_was_missed_is_said_plainly(ada: Any, full: World) -> None:
    action = Action.objects.get()
    end(action, State.VERIFIED, full.now)
    client = ada(full)
    addresses = (f"/incidents/{Incident.objects.get().pk}/", "/actions/")
    for most, said in ((0.01, False), (0.001, True)):
        action.predicted = {"bad_share_max": most, "sentence": "the queue goes"}
        action.save()
        for address in addresses:
            assert ("not reached" in text(client.get(address))) is said
        told = "; at most 0.1\u00a0% was predicted" in text(client.get("/?part=story"))
        assert told is said
