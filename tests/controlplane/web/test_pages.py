"""What the overview, an objective, a trace and a chart say, what they cost, and their errors."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.actions.models import Action, State
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Node
from controlplane.fleet.services import sync
from controlplane.web.pages.objectives import budget_ticks
from tests.controlplane.web.answers import text
from tests.controlplane.web.story import act, end, explain
from tests.controlplane.web.world import TRACE_ID, World, heartbeat, member, world

# A standing costs about a dozen look-ups; what all objectives share comes on top.
QUERIES_PER_OBJECTIVE_MAX = 30
QUERIES_MAX = 30


@pytest.mark.parametrize(
    "address", ["/", "/objectives/", "/objectives/ttft/", "/incidents/", "/objectives/code-e2e/"]
)
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


def test_an_objective_is_asked_about_in_what_it_counts(ada: Any, full: World) -> None:
    client = ada(full)
    said = text(client.get("/objectives/tpot/"))
    assert "What share of gaps between tokens missed this objective?" in said
    assert "What share of gaps between tokens kept: inter token latency ≤ 50 ms?" in said
    assert re.search(r"\d missed of [\d\u202f]+ gaps between tokens<", said)
    told = said[said.index("<h1>") : said.index("Specification")]
    assert "request" not in told.replace("How many requests run, and how many wait?", "")
    assert "What share of requests missed this objective?" in text(client.get("/objectives/ttft/"))


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


def test_no_page_shows_an_id_where_there_is_a_name(ada: Any, full: World) -> None:
    Node.objects.filter(tenant=full.tenant).update(agent_id=str(uuid4()))
    client, found = ada(full), Incident.objects.get()
    for address in (
        "/", f"/incidents/{found.pk}/", "/objectives/ttft/", "/actions/", "/fleet/",
        "/fleet/node-a/", "/contracts/", "/policies/", "/settings/deliveries/",
    ):  # fmt: skip
        said = re.sub(r"<[^>]*>", " ", text(client.get(address)))
        assert re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", said) == [], address
    assert "Fleet</a> / node-a</p>" in text(client.get("/fleet/node-a/"))


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
    assert said.count("so far; the rest of the window counts as quiet") == 3
    assert "when both windows of a rule burn faster than its factor." in said
    assert "&quot;threshold_ms&quot;: 500" in said
    assert "two windows in a row with more than 14.4\u00a0% missed" in said


def test_objective_shows_the_rule_that_opened_an_incident(ada: Any, full: World) -> None:
    client, found = ada(full), Incident.objects.get()
    Incident.objects.update(trigger="fast burn")
    said = text(client.get("/objectives/ttft/?part=burn"))
    fast, *pairs = said.split("<tr>")[2:]
    assert '<span class="chip bad">open</span>' in fast
    assert "15\u00a0s</span>" in fast
    assert "30\u00a0s</span>" in fast
    assert re.search(r"opened the incident at <time [^>]*>" + f"{found.opened_at:%H:%M:%S}", fast)
    assert len(pairs) == 4
    Incident.objects.update(state="closed", closed_at=full.now, trigger="burn 1h/5m")
    fast, *pairs = text(client.get("/objectives/ttft/?part=burn")).split("<tr>")[2:]
    assert "opened" not in fast
    assert "over at <time" in pairs[0]


def test_the_budget_over_time_has_times_and_what_happened(ada: Any, full: World) -> None:
    said = text(ada(full).get("/objectives/ttft/?part=state"))
    ticks = re.findall(r'<g class="tick">.*?x1="([\d.]+)%".*?<text [^>]*>([^<]*)</text>', said)
    assert len(ticks) >= 3
    assert all(re.fullmatch(r"\d\d:\d[05]|\d\d-\d\d", words) for _x, words in ticks)
    for kind, sign in (("incident", "■"), ("action", "◆")):
        mark = said.partition(f'<g class="mark {kind}">')[2].partition("</g>")[0]
        assert sign in mark
        x = re.search(r'x1="([\d.]+)%"', mark)
        assert x is not None
        assert 90 < float(x[1]) < 100, "minutes ago, of an hour"


MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
EVENING = datetime(2026, 1, 1, 22, 2, 11, tzinfo=UTC)


@pytest.mark.parametrize(
    ("span", "said"),
    [
        (20 * timedelta(seconds=1), []),
        (4 * MINUTE, ["22:03", "22:04", "22:05"]),
        (705 * timedelta(seconds=1), ["22:04", "22:06", "22:08", "22:10", "22:12"]),
        (6 * 60 * MINUTE, ["23:00", "01-02", "01:00", "02:00", "03:00"]),
        (DAY, ["01-02", "06:00", "12:00", "18:00"]),
        (30 * DAY, ["01-02", "01-07", "01-12", "01-17", "01-22", "01-27"]),
    ],
)
def test_the_times_below_the_budget_are_whole_and_where_they_were(
    span: timedelta, said: list[str]
) -> None:
    ticks = budget_ticks(EVENING, EVENING + span)
    assert [tick.words for tick in ticks] == said
    for tick in ticks:
        assert abs(EVENING + span * (tick.x / 100) - tick.at) < timedelta(seconds=1)
        assert tick.at.second == 0
    assert budget_ticks(EVENING, EVENING) == []


def test_every_page_says_once_of_what_zone_its_times_are(ada: Any, full: World) -> None:
    client = ada(full)
    for address in ("/", "/incidents/", "/objectives/ttft/", "/settings/password/"):
        rail = text(client.get(address)).partition('<nav class="rail"')[2].partition("</nav>")[0]
        before, _menu, below = rail.partition('id="menu"')
        assert before.count("</span> UTC</p>") == 1, "above what a narrow screen folds away"
        assert "UTC" not in below


def test_overview_tells_burning_now_from_a_spent_budget(ada: Any, full: World) -> None:
    Incident.objects.all().delete()
    said = text(ada(full).get("/"))
    assert "no incident now, 1 budget is spent</span>" in said
    assert "no incident now; the budget of its 30 days is spent" in said
    assert "The budget of “First token within 500 ms” is spent: " in said


def test_objective_says_why_its_data_cannot_answer(ada: Any, full: World) -> None:
    objective = full.objectives["ttft"]
    objective.problem = "threshold_ms=500: allowed: 250, 1000"
    objective.save()
    assert "threshold_ms=500: allowed: 250, 1000" in text(ada(full).get("/objectives/ttft/"))


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
    # A knob changes in steps; what is measured goes from one value to the next.
    lines = [line for chart in drawn["charts"].values() for line in chart["lines"]]
    assert [line["label"] for line in lines if line["stepped"]] == ["cap"]
    assert [mark["kind"] for mark in drawn["marks"]] == ["incident", "action"]
    end(Action.objects.get(), State.ROLLED_BACK, full.now)
    marks = json.loads(text(client.get("/series/ttft/?minutes=60")))["marks"]
    assert [mark["kind"] for mark in marks] == ["incident", "action", "undo"]
    assert marks[-1]["label"] == "undone: max_num_seqs 8 → 32 on engine-0"


def test_series_sums_windows_for_wider_ranges(ada: Any, full: World) -> None:
    drawn = json.loads(text(ada(full).get("/series/ttft/?minutes=1440")))
    assert drawn["step_s"] == 300
    assert len(drawn["x"]) == 288


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
    assert cost() <= once + 2, "on either page one for what all kept changes left"


# --- errors ---------------------------------------------------------------------------------------


def test_unknown_addresses_say_so_in_the_same_look(ada: Any, empty: World) -> None:
    answer = ada(empty).get("/nothing/")
    assert answer.status_code == 404
    assert "There is nothing at this address." in answer.content.decode()
    assert ada(empty, "bob").get("/api/v1/nothing/").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("address", ["/?part=none", "/?minutes=7", "/series/ttft/?minutes=x"])
def test_unknown_parts_and_ranges_are_not_found(ada: Any, empty: World, address: str) -> None:
    assert ada(empty).get(address).status_code == 404


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_machines_get_a_wrong_method_in_the_error_shape(path: str) -> None:
    answer = Client().post(path)
    assert (answer.status_code, answer["Allow"]) == (405, "GET, HEAD")
    assert answer.json()["error"]["code"] == "method_not_allowed"
