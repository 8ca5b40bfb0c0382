"""Policies on pages: what each scope says, what holds for an engine, and how it is changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.accounts.models import AuditEntry, Membership
from controlplane.actions.models import Policy
from controlplane.actions.policies import freeze, policy_set, policy_values
from tests.controlplane.web.answers import text
from tests.controlplane.web.world import World, world

EDIT = "/policies/edit/"


def said(page: str) -> str:
    """The words of a page's main part."""
    main = page.partition("<main")[2].partition("</main")[0]
    return " ".join(re.sub(r"<[^>]+>", " ", main).replace("\u00a0", " ").split())


def saves_to(answer: Any) -> str:
    """Where the policy's own form is sent, whichever address answered with it."""
    found = r'<form method="post" action="([^"]*)" class="form policy"'
    form = re.search(found, answer.content.decode())
    assert form is not None
    return form[1]


def write(world: World, values: dict[str, Any], **scope: str) -> Policy:
    return policy_set(tenant=world.tenant, actor="ada", now=timezone.now(), values=values, **scope)


FILLED = {
    "mode": "approve", "cool_down_harmful_s": "1200", "cool_down_unproven_s": "", "steps_max": "1",
    "failures_per_hour_max": "2", "barrier": "false", "quiet_from": "22:00",
    "quiet_until": "07:00", "quiet_days": ["fri", "sat"], "quiet_zone": "Europe/Berlin",
    "minimum_max_num_seqs": "8", "maximum_max_num_seqs": "64", "maximum_max_wait_ms": "10",
    "choices_graph_capture": ["on"],
}  # fmt: skip
KEPT = {
    "mode": "approve", "cool_down_harmful_s": 1200, "cool_down_unproven_s": None, "steps_max": 1,
    "barrier": False, "failures_per_hour_max": 2,
    "quiet_hours": {"from": "22:00", "until": "07:00", "days": ["fri", "sat"],
                    "time_zone": "Europe/Berlin"},
    "bounds": {"max_num_seqs": {"minimum": 8, "maximum": 64}, "max_wait_ms": {"maximum": 10},
               "graph_capture": {"choices": ["on"]}},
}  # fmt: skip


@pytest.mark.parametrize("scope", ["", "?service=chat", "?engine=engine-0"])
def test_what_is_filled_in_is_what_the_scope_says(ada: Any, full: World, scope: str) -> None:
    client = ada(full)
    assert client.post(EDIT + scope, FILLED)["Location"] == "/policies/"
    policy = Policy.objects.get()
    assert (policy.service, policy.engine) == (
        "chat" if "service" in scope else "", "engine-0" if "engine" in scope else "",
    )  # fmt: skip
    assert policy_values(policy) == KEPT
    assert AuditEntry.objects.get(noun="policy").actor == "ada"
    form = client.get(EDIT + scope).context["form"]
    again = {name: form[name].value() for name in form.fields}
    assert client.post(EDIT + scope, {k: v for k, v in again.items() if v}).status_code == 302
    assert policy_values(Policy.objects.get()) == KEPT, "sent as it was shown, nothing changes"
    listed = said(text(client.get("/policies/")))
    for words in ("Mode approve", "Cool-down, harmful 20 min", "max_num_seqs 8 to 64",
                  "max_wait_ms at most 10", "22:00–07:00 Europe/Berlin Fri, Sat"):  # fmt: skip
        assert words in listed


def test_what_is_left_open_says_nothing(ada: Any, full: World) -> None:
    write(full, {"mode": "observe"})
    assert ada(full).post(EDIT, {"mode": "", "quiet_zone": "UTC"}).status_code == 302
    assert not any(policy_values(Policy.objects.get()).values())


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"mode": "happy"}, "mode"), ({"cool_down_harmful_s": "-1"}, "cool_down_harmful_s"),
        ({"cool_down_unproven_s": "soon"}, "cool_down_unproven_s"),
        ({"steps_max": "3"}, "steps_max"),
        ({"failures_per_hour_max": "0"}, "failures_per_hour_max"), ({"barrier": "x"}, "barrier"),
        ({"quiet_from": "25:00"}, "quiet_from"), ({"quiet_until": ""}, "quiet_until"),
        ({"quiet_until": "22:00"}, "quiet_until"), ({"quiet_days": ["someday"]}, "quiet_days"),
        ({"quiet_zone": "Mars/Base"}, "quiet_zone"),
        ({"maximum_max_num_seqs": "9999"}, "maximum_max_num_seqs"),
        ({"minimum_max_num_seqs": "65"}, "minimum_max_num_seqs"),
        ({"minimum_max_wait_ms": "x"}, "minimum_max_wait_ms"),
        ({"choices_graph_capture": ["half"]}, "choices_graph_capture"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_beside_its_field(
    ada: Any, full: World, wrong: dict[str, Any], field: str
) -> None:
    answer = ada(full).post(EDIT, FILLED | wrong)
    page = text(answer, 400)
    assert list(answer.context["form"].errors) == [field]
    assert f'id="id_{field}_error"' in page
    assert not Policy.objects.exists()


def test_everything_wrong_is_said_at_once(ada: Any, full: World) -> None:
    answer = ada(full).post(EDIT, {"cool_down_harmful_s": "x", "maximum_max_num_seqs": "0"})
    assert set(answer.context["form"].errors) == {"cool_down_harmful_s", "maximum_max_num_seqs"}


def test_the_page_of_an_engine_says_what_holds_and_which_scope_says_so(
    ada: Any, full: World
) -> None:
    write(full, {"mode": "approve"})
    write(full, {"cool_down_harmful_s": 60, "bounds": {"max_num_seqs": {"maximum": 64}}},
          service="chat")  # fmt: skip
    write(full, {"steps_max": 1}, engine="engine-0")
    page = said(text(ada(full).get(f"{EDIT}?engine=engine-0")))
    for words in (
        "Mode approve the tenant", "Cool-down, harmful 1 min service chat",
        "Cool-down, unproven 3 min the default", "Largest step 1 ladder step engine engine-0",
        "max_num_seqs 1 to 64 service chat",
    ):  # fmt: skip
        assert words in page


def test_a_scope_is_frozen_and_thawed(ada: Any, full: World) -> None:
    client = ada(full)
    wrong = client.post("/policies/freeze/?service=chat", {"reason": "", "minutes": "30"})
    assert "Policy of service chat" in text(wrong, 400)
    assert list(wrong.context["freeze"].errors) == ["reason"]
    assert saves_to(wrong) == f"{EDIT}?service=chat"
    answer = client.post("/policies/freeze/?service=chat", {"reason": "sale", "minutes": "30"})
    assert answer.status_code == 302
    policy = Policy.objects.get()
    assert (policy.service, policy.frozen_by, policy.freeze_reason) == ("chat", "ada", "sale")
    page = text(client.get(f"{EDIT}?service=chat"))
    assert "is frozen until" in page
    assert "Lift the freeze" in page
    refused = client.post("/policies/delete/?service=chat")
    assert "after the freeze is lifted" in text(refused, 409)
    assert saves_to(refused) == f"{EDIT}?service=chat", "and nothing is deleted by it"
    client.post(f"/policies/{policy.pk}/unfreeze/")
    assert client.post("/policies/delete/?service=chat").status_code == 302
    assert not Policy.objects.exists()
    assert client.post("/policies/delete/?service=chat").status_code == 404


def test_a_freeze_stays_when_the_terms_are_changed(ada: Any, full: World) -> None:
    freeze(tenant=full.tenant, actor="ada", now=timezone.now(), reason="sale", service="chat")
    ada(full).post(f"{EDIT}?service=chat", FILLED)
    assert Policy.objects.get().freeze_reason == "sale"


@pytest.mark.parametrize(
    "scope", ["?engine=engine-9", "?service=x", "?service=chat&engine=engine-0"]
)
def test_there_is_no_page_for_a_scope_there_is_not(ada: Any, full: World, scope: str) -> None:
    client = ada(full)
    stop = {"reason": "x", "minutes": "0"}
    assert client.get(EDIT + scope).status_code == 404
    assert client.post(EDIT + scope, FILLED).status_code == 404
    assert client.post(f"/policies/freeze/{scope}", stop).status_code == 404
    assert not Policy.objects.exists()


def test_a_viewer_reads_and_writes_nothing(ada: Any, full: World) -> None:
    write(full, {"mode": "observe"}, engine="engine-0")
    client: Client = ada(full)
    Membership.objects.update(role=Membership.Role.VIEWER)
    for address in ("/policies/", f"{EDIT}?engine=engine-0"):
        page = text(client.get(address))
        assert "observe" in page
        assert 'method="post"' not in page.partition("<main")[2].partition("</main")[0]
    for address in (EDIT, "/policies/delete/?engine=engine-0"):
        assert client.post(address, FILLED).status_code == 403


def test_another_tenants_scopes_do_not_exist(ada: Any, full: World) -> None:
    write(full, {"mode": "observe"}, service="secret-service")
    client = ada(world("other"), "eve")
    assert "secret-service" not in text(client.get("/policies/"))
    assert client.get(f"{EDIT}?service=secret-service").status_code == 404
    client.post(EDIT, FILLED)
    assert Policy.objects.get(tenant=full.tenant).mode == "observe"
