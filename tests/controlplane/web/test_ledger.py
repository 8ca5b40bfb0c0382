"""The ledger of actions: what it says, how it is narrowed, and a person's own change."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from controlplane.accounts.models import Membership
from controlplane.actions.models import Action, Priority, State
from controlplane.actions.policies import freeze
from controlplane.fleet.models import Engine
from controlplane.web.pages import ledger
from tests.controlplane.web.answers import text
from tests.controlplane.web.furnished import ledger as lived
from tests.controlplane.web.furnished import past
from tests.controlplane.web.world import World, world


def test_an_action_says_what_was_expected_and_what_came_of_it(ada: Any, full: World) -> None:
    lived(full)
    said = text(ada(full).get("/actions/")).replace("\u00a0", " ")
    for words in (
        "<code>max_num_seqs</code> 16 → 32",
        "≤ 1 %",
        "44.7 % → 0.583 %",
        "missed, 343 requests",
        '<span class="chip ok">kept</span>',
        '<span class="chip warn">rolled back</span>',
        "better, such a fall by chance: under 0.01 %",
        "without a trial",
        "asked for by edsger",
    ):
        assert words in said, words
    assert said.index("verifying") < said.index(">kept<") < said.index("edsger")


def test_nothing_changed_so_far_says_how_one_begins(ada: Any, empty: World) -> None:
    said = text(ada(empty).get("/actions/"))
    assert "Nothing has been changed so far." in said
    assert "/policies/" in said


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("state=verified", 1), ("state=verifying", 1), ("engine=engine-0", 4), ("service=chat", 4),
        ("engine=engine-1", 0), ("service=chat&state=rejected", 1), ("state=approved", 0),
    ],
)  # fmt: skip
def test_filters_stand_in_the_address(ada: Any, full: World, query: str, count: int) -> None:
    lived(full)
    said = text(ada(full).get(f"/actions/?{query}"))
    assert said.count("<tr data-row") == count
    assert ("No action fits." in said) == (not count)
    assert "Clear" in said


@pytest.mark.parametrize("query", ["state=happy", "engine=%07", "after=nonsense"])
def test_a_filter_nobody_can_follow_is_named(ada: Any, full: World, query: str) -> None:
    said = text(ada(full).get(f"/actions/?{query}"), 400)
    assert f"{query.split('=')[0]}=" in said
    assert "allowed:" in said
    assert "<tr data-row" not in said


def test_pages_go_by_key_and_miss_none(
    ada: Any, full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lived(full)
    monkeypatch.setattr(ledger, "ROWS", 3)
    client, address, seen = ada(full), "/actions/", []
    while address:
        answer = client.get(address)
        seen += [row.action.pk for row in answer.context["rows"]]
        address = f"/actions/?after={answer.context['next']}" if answer.context["next"] else ""
    assert len(seen) == len(set(seen)) == Action.objects.count()


def test_a_button_of_the_ledger_leads_back_to_it(ada: Any, full: World) -> None:
    Action.objects.all().delete()
    action = past(full, 1, State.PROPOSED)
    client, here = ada(full), "/actions/?state=proposed"
    said = text(client.get(here))
    assert f'name="next" value="{here}"' in said
    answer = client.post(f"/actions/{action.pk}/reject/", {"next": here})
    assert answer["Location"] == here
    away = client.post(f"/actions/{action.pk}/reject/", {"next": "https://evil.example/"})
    assert away.status_code == 409


def test_a_viewer_sees_the_ledger_without_buttons(ada: Any, full: World) -> None:
    client = ada(full)
    Membership.objects.update(role=Membership.Role.VIEWER)
    said = text(client.get("/actions/"))
    assert "Roll back" not in said
    assert "/actions/new/" not in said
    assert "Only operators and owners" in text(client.get("/actions/new/"))
    assert client.post("/actions/new/", change()).status_code == 403


# --- a person's own change ------------------------------------------------------------------------


def change(**more: str) -> dict[str, str]:
    return {
        "knob": "max_num_seqs", "value": "64", "how": "trial", "why": "ticket 7",
        "expected_config_version": "7", "key": "k-1", **more,
    }  # fmt: skip


def heard(full: World) -> None:
    Engine.objects.update(last_seen_at=timezone.now())
    Action.objects.all().delete()


@pytest.mark.parametrize(("how", "trial"), [("trial", True), ("at_once", False)])
def test_a_persons_change_goes_into_the_ledger(
    ada: Any, full: World, how: str, trial: bool
) -> None:
    heard(full)
    client = ada(full)
    shown = text(client.get("/actions/new/?engine=engine-0"))
    assert 'name="expected_config_version" value="7"' in shown
    assert "graph_capture" not in shown.partition("<select")[2].partition("</select")[0]
    for _ in range(2):  # sent twice, it is one
        answer = client.post("/actions/new/?engine=engine-0", change(how=how))
        assert (answer.status_code, answer["Location"]) == (302, "/actions/")
    made = Action.objects.get()
    assert made.changes == {"max_num_seqs": {"from": 32, "to": 64}}
    assert (made.actor, made.why, made.trial) == ("ada", "ticket 7", trial)
    assert made.priority == Priority.PERSON


@pytest.mark.parametrize(
    ("more", "status", "field", "words"),
    [
        ({"value": "9000"}, 400, "value", "allowed: a whole number from 1 to 256"),
        ({"value": "many"}, 400, "value", "allowed: a whole number from 1 to 256"),
        ({"value": "32"}, 400, "value", "runs these values already"),
        ({"value": ""}, 400, "value", "required"),
        ({"knob": "graph_capture"}, 400, "knob", "graph_capture"),
        ({"how": "perhaps"}, 400, "how", "perhaps"),
        ({"expected_config_version": "6"}, 409, "expected_config_version", "not 6"),
    ],
)
def test_what_cannot_be_changed_says_why_beside_the_field(
    ada: Any, full: World, more: dict[str, str], status: int, field: str, words: str
) -> None:
    heard(full)
    answer = ada(full).post("/actions/new/", change(**more))
    said = text(answer, status)
    assert words in said
    assert list(answer.context["form"].errors) == [field]
    assert not Action.objects.exists()


def test_a_freeze_holds_for_persons_too(ada: Any, full: World) -> None:
    heard(full)
    freeze(tenant=full.tenant, actor="grace", now=timezone.now(), reason="sale")
    client = ada(full)
    assert "Nothing may be changed now." in text(client.get("/actions/new/"))
    assert "by grace: sale" in text(client.post("/actions/new/", change()), 403)


def test_another_tenants_engine_does_not_exist(ada: Any, full: World) -> None:
    other = world("other")
    Engine.objects.filter(tenant=other.tenant).delete()
    client = ada(other, "eve")
    assert client.get("/actions/new/?engine=engine-0").status_code == 404
    assert client.post("/actions/new/?engine=engine-0", change()).status_code == 404
    assert "<tr data-row" not in text(client.get("/actions/"))
