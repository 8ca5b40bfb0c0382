from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.accounts import throttle
from controlplane.actions.models import Action, State
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.diagnosis.services import diagnosis_confirm, diagnosis_note
from controlplane.fleet.models import Node
from controlplane.fleet.services import sync
from controlplane.web.forms import TRIES_PER_MIN
from controlplane.web.story import lines_of
from tests.controlplane.web.world import (
    BECAUSE,
    TRACE_ID,
    World,
    act,
    end,
    explain,
    heartbeat,
    incident,
    member,
    world,
)

PAGES = ("/", "/objectives/", "/objectives/ttft/", "/incidents/")
# A standing costs about a dozen look-ups; what all objectives share comes on top.
QUERIES_PER_OBJECTIVE_MAX = 30
QUERIES_MAX = 30


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer.content
    return str(answer.content.decode())


# --- what a page says -----------------------------------------------------------------------------


@pytest.mark.parametrize("address", [*PAGES, "/objectives/code-e2e/"])
def test_pages_stand_before_anything_was_measured(ada: Any, empty: World, address: str) -> None:
    said = text(ada(empty).get(address))
    assert "100 %" not in said
    assert "Traceback" not in said


def test_first_run_shows_what_to_type(ada: Any, db: None) -> None:
    made = world()
    made.engine.delete()
    said = text(ada(made).get("/"))
    assert "Not everything is connected yet." in said
    assert "trimtab agent --node node-a" in said
    assert "http://127.0.0.1:4318" in said
    assert "<code>127.0.0.1:4317</code> (gRPC)" in said


def test_first_run_names_no_door_that_is_shut(ada: Any, settings: Any, db: None) -> None:
    settings.TRIMTAB_OTLP_GRPC_PORT = 0
    made = world()
    made.engine.delete()
    assert "(gRPC)" not in text(ada(made).get("/"))


def test_first_run_steps_turn_green_by_themselves(ada: Any, db: None) -> None:
    made = world()
    made.engine.delete()
    client = ada(made)
    before = text(client.get("/?part=first"))
    sync(tenant=made.tenant, request=heartbeat(made.now), now=made.now + timedelta(seconds=1))
    assert before.count(">done<") == 1  # an objective is there already
    assert 'class="first"' not in text(client.get("/?part=first"))


def test_overview_tells_the_story(ada: Any, full: World) -> None:
    said = text(ada(full).get("/"))
    assert "184 of 412 requests missed “First token within 500 ms” on engine-0" in said
    assert "because" in said
    assert "31 requests wait behind a cap of 8 running" in said
    assert "Changed max_num_seqs from 8 to 32 on engine-0, now checking." in said
    assert (
        said.index("detected") < said.index("explained") < said.index("told") < said.index("acted")
    )
    assert '<span class="chip act">verifying</span>' in said
    assert 'data-page-state="act"' in said


def test_overview_sorts_the_worst_budget_first(ada: Any, full: World) -> None:
    said = text(ada(full).get("/?part=objectives"))
    names = ("First token", "Each token", "Requests answered", "Whole answer")
    places = [said.index(name) for name in names]
    assert places == sorted(places)
    assert "of the error budget left" in said
    assert "nothing measured yet" in said


def test_overview_is_one_quiet_sentence_when_all_is_well(ada: Any, full: World) -> None:
    Incident.objects.all().delete()
    said = text(ada(full).get("/?part=story"))
    assert "No incident is open." in said  # TTFT's budget is still overdrawn
    full.objectives["ttft"].delete()
    said = text(another(full).get("/?part=story"))
    assert "All is well." in said
    assert "The smallest error budget has" in said


def another(full: World) -> Client:
    client = Client()
    client.force_login(member(full.tenant, "bob"))
    return client


def test_fleet_cells_say_their_state_in_words(ada: Any, full: World) -> None:
    client = ada(full)
    assert '<span class="chip act">acting</span>' in text(client.get("/?part=fleet"))
    full.engine.reachable, full.engine.error = False, "connection refused"
    full.engine.save()
    said = text(client.get("/?part=fleet"))
    assert '<span class="chip bad">unreachable</span>' in said
    assert "connection refused" in said


def test_a_fleet_cell_says_when_the_nodes_clock_is_off(ada: Any, full: World) -> None:
    client = ada(full)
    assert "behind" not in text(client.get("/?part=fleet"))
    Node.objects.update(clock_skew_s=-25.4)
    said = text(client.get("/?part=fleet"))
    assert "clock 25 s behind" in said
    assert "-25.4 s" in said


def test_objective_shows_four_facts_burn_rows_and_its_specification(ada: Any, full: World) -> None:
    said = text(ada(full).get("/objectives/ttft/"))
    for words in (
        "Attained",
        "Error budget left",
        "Burn, last hour",
        "time to first token ≤ 500 ms",
    ):
        assert words in said
    assert said.count("of the long window has history; the time before counts as quiet, so") == 3
    assert "&quot;threshold_ms&quot;: 500" in said
    assert "two windows in a row with more than 14.4\u00a0% missed" in said


def test_objective_says_why_its_data_cannot_answer(ada: Any, full: World) -> None:
    objective = full.objectives["ttft"]
    objective.problem = "threshold_ms=500: allowed: 250, 1000"
    objective.save()
    assert "threshold_ms=500: allowed: 250, 1000" in text(ada(full).get("/objectives/ttft/"))


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
    assert "what goes on since is not explained" in said
    assert "The cause is not known, so nothing is changed." in said
    assert "look again" not in said, "it has looked"
    end(second, State.VERIFIED, at + timedelta(seconds=150))
    assert "The cause is not known, so nothing is changed." in text(client.get("/?part=story"))
    Diagnosis.objects.filter(pk=newest.pk).update(cause=first.cause)
    until = at + timedelta(seconds=330)
    diagnosis_note(diagnosis=newest, no_action="just tried this way", next_try_at=until)
    assert "next try from <time" in text(client.get("/?part=story"))


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
    assert "Counted from the first of the control windows in a row that missed by far." in said
    missed = re.search(r"In the hour before, (\d+) of ([\d\u202f]+) missed as well", said)
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
                "44.7 % of requests missed the objective before",
                "verified",
                "such a fall by chance: under 0.01\u00a0%",
            ),
        ),
        (State.ROLLED_BACK, ("39 % of requests still missed", "rolled back", "inconclusive")),
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


def test_trace_says_where_the_time_went_and_names_the_gap(ada: Any, full: World) -> None:
    said = text(ada(full).get(f"/traces/{TRACE_ID}/"))
    assert "waiting in the queue" in said
    assert "911\u00a0ms" in said
    assert "nothing recorded" in said
    assert "The first token came after 1.24\u00a0s." in said


def test_trace_says_what_it_missed_and_what_went_on(ada: Any, full: World) -> None:
    client, found = ada(full), Incident.objects.get()
    said = text(client.get(f"/traces/{TRACE_ID}/"))
    assert "answered late" in said
    assert "First token within 500 ms</a>: 1.24\u00a0s, 500\u00a0ms allowed" in said
    assert "Each token within 50 ms" not in said
    assert reverse("incident", args=[found.pk]) in said
    Incident.objects.update(scope="engine-9")
    full.objectives["ttft"].delete()
    said = text(client.get(f"/traces/{TRACE_ID}/"))
    assert "answered late" not in said
    assert reverse("incident", args=[found.pk]) not in said


def test_series_has_a_point_per_window_and_keeps_gaps(ada: Any, full: World) -> None:
    client = ada(full)
    answer = client.get("/series/ttft/?minutes=60")
    drawn = json.loads(text(answer))
    assert len(drawn["x"]) == 240
    for chart in drawn["charts"].values():
        for line in chart["lines"]:
            assert len(line["values"]) == 240
    waiting = drawn["charts"]["load"]["lines"][1]["values"]
    assert any(value is None for value in waiting)
    assert max(value for value in waiting if value is not None) > 25
    p99 = drawn["charts"]["latency"]["lines"][0]["values"]
    assert max(value for value in p99 if value is not None) > 1
    assert drawn["charts"]["latency"]["bound"] == 0.5
    assert [mark["kind"] for mark in drawn["marks"]] == ["incident", "action"]
    end(Action.objects.get(), State.ROLLED_BACK, full.now)
    marks = json.loads(text(client.get("/series/ttft/?minutes=60")))["marks"]
    assert [mark["kind"] for mark in marks] == ["incident", "action", "undo"]
    assert marks[-1]["label"] == "undone: max_num_seqs 8 → 32 on engine-0"


def test_series_sums_windows_for_wider_ranges(ada: Any, full: World) -> None:
    drawn = json.loads(text(ada(full).get("/series/ttft/?minutes=1440")))
    assert drawn["step_s"] == 300
    assert len(drawn["x"]) == 288


# --- who may see it -------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [*PAGES, f"/traces/{TRACE_ID}/", "/series/ttft/"])
def test_anonymous_signs_in_first(client: Client, empty: World, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 302
    assert answer["Location"].startswith("/login/?next=")


def test_a_stranger_in_no_tenant_is_told_whom_to_ask(client: Client, empty: World) -> None:
    user = member(empty.tenant)
    user.memberships.all().delete()
    client.force_login(user)
    answer = client.get("/")
    assert answer.status_code == 403
    assert "You belong to no tenant yet" in answer.content.decode()


def test_another_tenants_things_are_not_found(ada: Any, full: World) -> None:
    found = Incident.objects.get()
    other = world("other")
    other.objectives["ttft"].delete()
    client = ada(other)
    for address in (
        f"/incidents/{found.pk}/", "/objectives/ttft/", "/series/ttft/", f"/traces/{TRACE_ID}/",
    ):  # fmt: skip
        assert client.get(address).status_code == 404, address
    assert "184 of 412" not in text(client.get("/"))
    assert "184 of 412" not in text(client.get("/incidents/"))


def test_a_password_is_not_guessed_at_speed(
    client: Client, empty: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(throttle.time, "monotonic", lambda: now)
    member(empty.tenant, "guessed")
    wrong = {"username": "guessed", "password": "wrong"}
    tries = [text(client.post("/login/", wrong)) for _ in range(TRIES_PER_MIN + 1)]
    assert ["Too many tries" in page for page in tries] == [False] * TRIES_PER_MIN + [True]
    for way_round in ({"username": "ｇuessed"}, {"password": ""}, {}):
        page = text(client.post("/login/", wrong | way_round))
        assert "Too many tries" in page, way_round
    right = {"username": "guessed", "password": "a long enough password"}
    assert "Too many tries" in text(client.post("/login/", right))
    elsewhere = client.post("/login/", right, REMOTE_ADDR="192.0.2.7")
    assert elsewhere["Location"] == "/"
    now += 60 / TRIES_PER_MIN
    assert Client().post("/login/", right)["Location"] == "/"


def test_sign_in_and_out(client: Client, empty: World) -> None:
    member(empty.tenant)
    assert "do not match" in text(client.post("/login/", {"username": "ada", "password": "wrong"}))
    answer = client.post("/login/", {"username": "ada", "password": "a long enough password"})
    assert answer["Location"] == "/"
    assert "Sign out" in text(client.get("/"))
    assert client.post("/logout/")["Location"] == "/login/"
    assert client.get("/").status_code == 302


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["/", "/objectives/"])
def test_queries_grow_with_objectives_only(ada: Any, full: World, address: str) -> None:
    client = ada(full)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        text(client.get(address))
    assert len(queries) <= QUERIES_MAX + QUERIES_PER_OBJECTIVE_MAX * len(full.objectives)


def test_queries_do_not_grow_with_incidents(ada: Any, full: World) -> None:
    client = ada(full)

    def cost() -> int:
        with CaptureQueriesContext(connection) as queries:
            text(client.get("/incidents/"))
            text(client.get("/?part=story"))
        return len(queries)

    once = cost()
    for i in range(12):
        at = full.now - timedelta(minutes=20, seconds=i)
        more = Incident.objects.create(
            tenant=full.tenant, objective=full.objectives["tpot"], scope=f"engine-{i}",
            trigger="two windows", bad_since=at, opened_at=at, state="closed", closed_at=full.now,
        )  # fmt: skip
        explain(full, more, at)
        Action.objects.filter(incident__scope="engine-0").update(state=State.VERIFIED)
        end(act(full, more, at, State.VERIFYING), State.VERIFIED, at)
    assert cost() == once


# --- errors ---------------------------------------------------------------------------------------


def test_unknown_addresses_say_so_in_the_same_look(ada: Any, empty: World) -> None:
    answer = ada(empty).get("/nothing/")
    assert answer.status_code == 404
    assert "There is nothing at this address." in answer.content.decode()
    assert ada(empty, "bob").get("/api/v1/nothing/").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("address", ["/?part=none", "/?minutes=7", "/series/ttft/?minutes=x"])
def test_unknown_parts_and_ranges_are_not_found(ada: Any, empty: World, address: str) -> None:
    assert ada(empty).get(address).status_code == 404


def test_an_expired_form_says_what_to_do(empty: World) -> None:
    answer = Client(enforce_csrf_checks=True).post("/login/", {"username": "a", "password": "b"})
    assert answer.status_code == 403
    assert "This form has expired." in answer.content.decode()


def test_pages_cannot_be_written_to(ada: Any, empty: World) -> None:
    assert ada(empty).post("/").status_code == 405


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_machines_get_a_wrong_method_in_the_error_shape(path: str) -> None:
    answer = Client().post(path)
    assert (answer.status_code, answer["Allow"]) == (405, "GET, HEAD")
    assert answer.json()["error"]["code"] == "method_not_allowed"
