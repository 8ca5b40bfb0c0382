"""Buttons and links: who may press them, what they do, and what is said when they may not."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import AuditEntry, Membership
from controlplane.actions.links import LIFE, link_path
from controlplane.actions.models import Action, Policy, State, Transition
from controlplane.actions.policies import freeze
from controlplane.diagnosis.models import Incident
from controlplane.web import urls
from tests.catalogues import compile_all
from tests.controlplane.web.world import World, member, world

NAMES = {
    "approve": "Approve", "reject": "Reject", "rollback": "Roll back", "clear": "I have looked",
}  # fmt: skip


@pytest.fixture
def action(full: World) -> Action:
    """A proposal of now, on an engine heard of now."""
    Action.objects.all().delete()
    now = timezone.now()
    made = Action.objects.create(
        tenant=full.tenant, engine=full.engine, incident=Incident.objects.get(),
        why="39 requests run or wait", changes={"max_num_seqs": {"from": 32, "to": 64}},
        predicted={"sentence": "64 covers them all", "bad_share_max": 0.01},
        expected_config_version=7, idempotency_key="k", deadline=now, created_at=now,
    )  # fmt: skip
    Transition.objects.create(action=made, to_state=State.PROPOSED, at=now, actor="autopilot")
    return made


def test_the_incidents_page_has_a_button_for_what_can_be_done(
    ada: Any, full: World, action: Action
) -> None:
    page = ada(full).get(f"/incidents/{action.incident_id}/").content.decode()
    for verb in ("approve", "reject"):
        assert f'action="/actions/{action.pk}/{verb}/"' in page
    assert "Roll back" not in page
    assert "64 covers them all" in page
    assert "csrfmiddlewaretoken" in page


def test_a_viewer_sees_no_button_and_may_not_press_one(
    ada: Any, full: World, action: Action
) -> None:
    client = ada(full)
    Membership.objects.update(role=Membership.Role.VIEWER)
    page = client.get(f"/incidents/{action.incident_id}/").content.decode()
    assert "/approve/" not in page
    assert client.post(f"/actions/{action.pk}/approve/").status_code == 403
    assert client.post("/policies/freeze/", {"reason": "x", "minutes": "0"}).status_code == 403
    action.refresh_from_db()
    assert action.state == State.PROPOSED


def test_the_button_does_it_in_the_name_of_who_pressed_it(
    ada: Any, full: World, action: Action
) -> None:
    answer = ada(full).post(f"/actions/{action.pk}/approve/")
    assert (answer.status_code, answer.url) == (302, f"/incidents/{action.incident_id}/")
    action.refresh_from_db()
    assert action.state == State.APPROVED
    assert AuditEntry.objects.get(verb="approved").actor == "ada"


def test_where_an_undo_failed_every_page_says_so_until_a_person_has_looked(
    ada: Any, full: World, action: Action
) -> None:
    Action.objects.update(state=State.ROLLBACK_FAILED, ended_at=timezone.now())
    client = ada(full)
    pages = ("/", "/policies/", "/policies/edit/?engine=engine-0")
    waits = "until a person has looked"

    def told() -> list[bool]:
        return [waits in client.get(page).content.decode() for page in pages]

    assert told() == [True, True, True]
    home = client.get("/").content.decode()
    assert "on engine-0 could not be undone: the autopilot waits until a person has looked." in home
    Action.objects.update(outcome={"sentence": "the agent did not answer for 5 min"})
    home = client.get("/").content.decode()
    assert home.count("the agent did not answer for 5 min") == 1, "its story says it"
    for page in ("/", "/actions/", f"/incidents/{action.incident_id}/"):
        assert f'action="/actions/{action.pk}/clear/"' in client.get(page).content.decode()
    assert 'data-page-state="bad"' in client.get("/").content.decode()
    answer = client.post(f"/actions/{action.pk}/clear/", {"next": "/"})
    assert (answer.status_code, answer["Location"]) == (302, "/")
    assert told() == [False, False, False]
    assert "ada has looked" in client.get("/actions/").content.decode()


def test_a_button_needs_its_page(full: World, action: Action) -> None:
    """Another site's form is turned away: it has no token."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(member(full.tenant))
    assert client.post(f"/actions/{action.pk}/approve/").status_code == 403
    assert Client().post(f"/actions/{action.pk}/approve/").status_code == 302  # to the login


def test_an_orders_address_leads_to_the_page_above_it(
    ada: Any, full: World, action: Action
) -> None:
    """Who signs in again, or chooses a language, where an order was refused comes there by GET."""
    client, there = ada(full), f"/actions/{action.pk}/approve/"
    refused = client.post("/policies/freeze/", {"reason": "", "minutes": "0"})
    assert refused.status_code == 400
    assert 'name="next" value="/policies/freeze/"' in refused.content.decode()
    for name, address in orders(full, there).items():
        sent = client.get(address)
        assert (sent.status_code, client.get(sent.url).status_code) == (302, 200), name
        assert address.startswith(sent.url)
        assert client.put(address).status_code == 405
    assert client.get(there).url == "/actions/"
    assert client.get("/settings/members/1/role/").url == "/settings/members/"
    assert client.get("/").status_code == 200  # and still signed in
    action.refresh_from_db()
    assert action.state == State.PROPOSED


ORDERS = r"(un)?freeze|logout|.*-(delete|test|remove|end|revoke|role|link|activate|deactivate)"


def orders(full: World, of_an_action: str) -> dict[str, str]:
    """The address of everything that only a POST does, by name."""
    ids = {
        "channel_id": full.tenant.channels.get().pk, "member_id": 1,
        "policy_id": uuid4(), "silence_id": uuid4(), "token_id": uuid4(),
    }  # fmt: skip
    found = {"action-order": of_an_action}
    for each in [*urls.urlpatterns, *urls.SETTINGS]:
        name = getattr(each, "name", None) or ""
        if re.fullmatch(ORDERS, name) and name != "action-link":
            wanted = each.pattern.converters.keys()
            found[name] = reverse(name, kwargs={key: ids[key] for key in wanted})
    assert len(found) == 14
    return found


def test_what_cannot_be_done_now_says_why(ada: Any, full: World, action: Action) -> None:
    Action.objects.update(state=State.EXPIRED)
    answer = ada(full).post(f"/actions/{action.pk}/approve/")
    assert answer.status_code == 409
    assert "does not wait for a person: it is expired" in answer.content.decode()


def test_another_tenants_action_does_not_exist(ada: Any, full: World, action: Action) -> None:
    client = ada(world("other"), "eve")
    assert client.post(f"/actions/{action.pk}/approve/").status_code == 404
    assert client.post(f"/actions/{action.pk}/dance/").status_code == 404
    action.refresh_from_db()
    assert action.state == State.PROPOSED


# -- links ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["approve", "reject"])
def test_a_link_asks_and_only_a_post_acts(verb: str, full: World, action: Action) -> None:
    client, path = Client(), link_path(action, verb, timezone.now())
    for _ in range(2):
        page = client.get(path)
        assert page.status_code == 200
        assert NAMES[verb] in page.content.decode()
        assert "no-store" in page.headers["Cache-Control"]
    action.refresh_from_db()
    assert action.state == State.PROPOSED
    done = client.post(path, {"actor": "Ada"})
    assert done.status_code == 200
    assert "Done" in done.content.decode()
    action.refresh_from_db()
    assert action.state == (State.APPROVED if verb == "approve" else State.REJECTED)
    used = AuditEntry.objects.get(noun="link")
    assert used.actor == "Ada, not signed in, by link"
    assert used.detail["address"] == "127.0.0.1"
    again = client.post(path, {"actor": "Ada"})
    assert again.status_code == 410
    assert "by Ada, not signed in, by link" in again.content.decode()


def test_a_link_wants_a_name(full: World, action: Action) -> None:
    answer = Client().post(link_path(action, "approve", timezone.now()), {"actor": " \u0000"})
    assert answer.status_code == 400
    assert "Say who you are" in answer.content.decode()


def test_a_link_needs_its_own_page(full: World, action: Action) -> None:
    client = Client(enforce_csrf_checks=True)
    path = link_path(action, "approve", timezone.now())
    assert client.post(path, {"actor": "Ada"}).status_code == 403


def test_who_is_signed_in_is_known_by_that(ada: Any, full: World, action: Action) -> None:
    client = ada(full)
    path = link_path(action, "approve", timezone.now())
    assert "Your name" not in client.get(path).content.decode()
    assert client.post(path).status_code == 200
    assert AuditEntry.objects.get(noun="link").actor == "ada, signed in, by link"


def test_a_member_of_another_tenant_may_not_use_it(ada: Any, full: World, action: Action) -> None:
    client = ada(world("other"), "eve")
    path = link_path(action, "approve", timezone.now())
    for answer in (client.get(path), client.post(path)):
        assert answer.status_code == 404
        assert "a tenant you may not write to" in answer.content.decode()


def test_a_link_that_has_ended_or_was_made_up_says_so(full: World, action: Action) -> None:
    old = link_path(action, "approve", timezone.now() - LIFE - timedelta(seconds=1))
    ended = Client().get(old)
    assert ended.status_code == 410
    assert "This link has ended." in ended.content.decode()
    made_up = Client().get("/a/approve.123:abc/")
    assert made_up.status_code == 404
    assert "not one of ours" in made_up.content.decode()


# -- policies -----------------------------------------------------------------------------------


def test_the_policies_page_shows_what_holds_and_why(ada: Any, full: World) -> None:
    page = ada(full).get("/policies/").content.decode()
    assert "engine-0" in page
    assert "the default" in page
    assert "Freeze now" in page


def test_a_freeze_from_the_page_is_seen_everywhere_and_lifted(
    ada: Any, full: World, action: Action
) -> None:
    client = ada(full)
    answer = client.post("/policies/freeze/", {"reason": "sale", "minutes": "30"})
    assert (answer.status_code, answer.url) == (302, "/policies/")
    action.refresh_from_db()
    assert action.state == State.REJECTED
    for path in ("/policies/", "/"):
        assert "by ada: sale" in client.get(path).content.decode()
    (frozen,) = full.tenant.policies.all()
    assert client.post(f"/policies/{frozen.pk}/unfreeze/").status_code == 302
    assert "by ada: sale" not in client.get("/policies/").content.decode()


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({}, "reason"),
        ({"reason": "", "minutes": "0"}, "reason"),
        ({"reason": "a\u0000", "minutes": "0"}, "reason"),
        ({"reason": "x", "minutes": "9"}, "minutes"),
    ],
)
def test_a_freeze_that_cannot_be_says_why_beside_the_field(
    form: dict[str, str], field: str, ada: Any, full: World
) -> None:
    answer = ada(full).post("/policies/freeze/", form)
    assert answer.status_code == 400
    said = answer.content.decode()
    assert f'id="id_{field}_error"' in said
    assert 'aria-invalid="true"' in said
    assert 'hx-get="/policies/?part=all"' in said, "the list goes on living"
    assert Policy.objects.count() == 0


def test_another_tenants_freeze_is_not_lifted(ada: Any, empty: World) -> None:
    policy = freeze(tenant=empty.tenant, actor="ada", now=timezone.now(), reason="sale")
    client = ada(world("other"), "eve")
    assert client.post(f"/policies/{policy.pk}/unfreeze/").status_code == 404
    policy.refresh_from_db()
    assert policy.frozen_at is not None


def test_a_refusal_is_said_in_the_readers_language_and_written_down_in_english(
    ada: Any, full: World, action: Action
) -> None:
    compile_all()
    client = ada(full)
    Action.objects.update(state=State.ROLLED_BACK)
    page = client.post(f"/actions/{action.pk}/reject/", HTTP_ACCEPT_LANGUAGE="zh-CN")
    said = page.content.decode()
    assert page.status_code == 409
    assert "cannot be rejected" not in said
    assert "无法拒绝" in said
    assert "已撤销" in said or "已回滚" in said
    answer = client.post(
        f"/api/v1/actions/{action.pk}/reject/", {}, content_type="application/json",
        HTTP_ACCEPT_LANGUAGE="zh-CN",
    )  # fmt: skip
    assert answer.json()["error"]["message"].endswith("cannot be rejected: it is rolled back")


def test_a_freeze_set_from_a_chinese_page_is_written_down_in_english(
    ada: Any, full: World, action: Action
) -> None:
    compile_all()
    client = ada(full)
    chinese = {"HTTP_ACCEPT_LANGUAGE": "zh-CN"}
    client.post("/policies/freeze/", {"reason": "sale", "minutes": "0"}, **chinese)
    action.refresh_from_db()
    assert action.outcome["sentence"] == ("the tenant is frozen until it is lifted, by ada: sale")
    said = client.get("/policies/", **chinese).content.decode()
    assert "is frozen" not in said
    assert "冻结" in said
    refused = client.post("/policies/freeze/", {"reason": " ", "minutes": "0"}, **chinese)
    assert refused.status_code == 400
