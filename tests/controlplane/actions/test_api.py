"""REST of actions, policies and freezes: what it does, for whom, and the error shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.accounts.models import AuditEntry, Tenant
from controlplane.accounts.services import token_create
from controlplane.actions.models import Action, State
from controlplane.fleet.models import Engine, Node
from tests.controlplane.actions.test_interleavings import World
from tests.controlplane.actions.test_propose import propose

pytestmark = pytest.mark.django_db

Call = Callable[..., Any]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Heard of just now, by the clock the API goes by."""
    made = World(tmp_path, 3)
    now = timezone.now()
    Node.objects.update(last_seen_at=now)
    Engine.objects.update(last_seen_at=now)
    return made


def caller(tenant: Tenant, *scopes: str) -> Call:
    _, secret = token_create(tenant=tenant, kind="api", name="ci", scopes=scopes or None)

    def call(method: str, path: str, body: Any = None) -> Any:
        return getattr(Client(), method)(
            f"/api/v1/{path}",
            **({} if body is None else {"data": body, "content_type": "application/json"}),
            headers={"Authorization": f"Bearer {secret}"},
        )

    return call


@pytest.fixture
def call(world: World) -> Call:
    return caller(world.tenant)


@pytest.fixture
def stranger() -> Call:
    return caller(Tenant.objects.create(slug="other", name="Other"))


ORDER = {"engine": "engine-0", "values": {"max_num_seqs": 16}, "how": "at_once"}


def test_a_change_is_ordered_and_found(call: Call) -> None:
    answer = call("post", "actions/", ORDER | {"why": "ticket 7"})
    assert answer.status_code == 201, answer.content
    made = answer.json()
    assert made["changes"] == {"max_num_seqs": {"from": 8, "to": 16}}
    assert (made["actor"], made["priority"], made["how"]) == ("token ci", "person", "at_once")
    assert call("get", f"actions/{made['id']}/").json()["id"] == made["id"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "engine"),
        ([], 400, None),
        (ORDER | {"engine": "nope"}, 404, "engine"),
        (ORDER | {"how": "maybe"}, 400, "how"),
        (ORDER | {"values": {"max_num_seqs": 0}}, 400, "values.max_num_seqs"),
        (ORDER | {"values": {"max_num_seqs": [1]}}, 400, "values.max_num_seqs"),
        (ORDER | {"expected_config_version": 9}, 409, "expected_config_version"),
        (ORDER | {"why": "x" * 201}, 400, "why"),
    ],
)
def test_an_order_that_cannot_be_taken_names_what_is_wrong(
    body: Any, status: int, param: str | None, call: Call
) -> None:
    answer = call("post", "actions/", body)
    assert answer.status_code == status, answer.content
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "param"}
    if param:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("verb", "state"),
    [("approve", State.APPROVED), ("reject", State.REJECTED), ("rollback", State.REJECTED)],
)
def test_a_proposal_is_decided_upon(
    verb: str, state: str, world: World, call: Call, settings: Any
) -> None:
    settings.TRIMTAB_AUTOPILOT = False
    action, _ = propose_now(world)
    answer = call("post", f"actions/{action.pk}/{verb}/", {"reason": "because"})
    assert answer.status_code == 200, answer.content
    assert answer.json()["state"] == state
    assert call("post", f"actions/{action.pk}/reject/", {}).status_code == (
        200 if state == State.APPROVED else 409
    )


def test_who_has_looked_lets_the_autopilot_go_on(world: World, call: Call) -> None:
    action = call("post", "actions/", ORDER).json()["id"]
    assert call("post", f"actions/{action}/clear/", {}).json()["error"]["code"] == "conflict"
    Action.objects.update(state=State.ROLLBACK_FAILED, ended_at=timezone.now())
    policy = "engines/engine-0/policy/"
    assert "could not be undone" in call("get", policy).json()["undo_failed"]
    answer = call("post", f"actions/{action}/clear/", {"reason": "it runs 16, which is fine"})
    assert answer.status_code == 200, answer.content
    assert answer.json()["cleared_at"]
    assert call("get", policy).json()["undo_failed"] == ""


def propose_now(world: World) -> tuple[Action, str]:
    Engine.objects.update(last_seen_at=world.now)
    Node.objects.update(last_seen_at=world.now)
    action, said = propose(world)
    assert action is not None, said
    Engine.objects.update(last_seen_at=timezone.now())
    Node.objects.update(last_seen_at=timezone.now())
    return action, said


def test_acting_takes_the_scope_to_act(world: World, call: Call) -> None:
    action = call("post", "actions/", ORDER).json()["id"]
    writer = caller(world.tenant, "read", "write")
    for method, path, body in (
        ("post", "actions/", ORDER),
        ("post", f"actions/{action}/rollback/", {}),
        ("post", f"actions/{action}/clear/", {}),
        ("post", "freezes/", {"reason": "r"}),
        ("delete", f"freezes/{action}/", None),
    ):
        assert writer(method, path, body).status_code == 403, path
    assert writer("put", "policies/", {"mode": "auto"}).status_code == 200
    assert caller(world.tenant, "act")("get", "actions/").status_code == 403


def test_the_ledger_is_narrowed_and_paged(world: World, call: Call) -> None:
    mine = call("post", "actions/", ORDER).json()["id"]
    call("post", f"actions/{mine}/reject/", {})
    newer = call("post", "actions/", ORDER).json()["id"]
    first = call("get", "actions/?limit=1").json()
    assert [a["id"] for a in first["actions"]] == [newer]
    second = call("get", f"actions/?limit=1&cursor={first['next']}").json()
    assert [a["id"] for a in second["actions"]] == [mine]
    assert second["next"] is None
    narrowed = call("get", "actions/?state=rejected&engine=engine-0").json()["actions"]
    assert [a["id"] for a in narrowed] == [mine]
    assert call("get", "actions/?state=nope").json()["error"]["param"] == "state"
    assert call("get", "actions/?engine=other").json()["actions"] == []


def test_another_tenants_action_policy_and_engine_do_not_exist(
    world: World, call: Call, stranger: Call
) -> None:
    action = call("post", "actions/", ORDER).json()["id"]
    policy = call("put", "policies/", {"mode": "approve"}).json()["id"]
    for method, path in (
        ("get", f"actions/{action}/"),
        ("post", f"actions/{action}/rollback/"),
        ("post", f"actions/{action}/clear/"),
        ("get", f"policies/{policy}/"),
        ("delete", f"policies/{policy}/"),
        ("delete", f"freezes/{policy}/"),
        ("get", "engines/engine-0/policy/"),
    ):
        assert stranger(method, path).status_code == 404, path
    assert stranger("post", "actions/", ORDER).status_code == 404
    assert stranger("get", "policies/").json()["policies"] == []
    assert Action.objects.get().state == State.PROPOSED


def test_a_policy_is_put_read_and_deleted(call: Call) -> None:
    put = call("put", "policies/", {"service": "chat", "mode": "approve", "steps_max": 1})
    assert put.status_code == 200, put.content
    again = call("put", "policies/", {"service": "chat", "mode": "propose"}).json()
    assert again["id"] == put.json()["id"]
    assert again["steps_max"] is None
    held = call("get", "engines/engine-0/policy/").json()
    assert (held["mode"], held["origin"]["mode"]) == ("propose", "service chat")
    assert held["cool_down_unproven_s"] == 180
    assert call("delete", f"policies/{again['id']}/").status_code == 204
    assert call("get", "engines/engine-0/policy/").json()["mode"] == "auto"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({"service": 7}, "service"),
        ({"mode": "yolo"}, "mode"),
        ({"bounds": {"warp": 1}}, "bounds.warp"),
        ({"service": "chat", "engine": "engine-0"}, "service"),
        ({"quiet_hours": 9}, "quiet_hours"),
        ({"quiet_hours": {"from": "22:00", "until": "07:00", "days": [[]]}}, "quiet_hours.days"),
        ({"service": "\u0000"}, "service"),
    ],
)
def test_a_policy_that_cannot_be_names_the_column(body: Any, param: str | None, call: Call) -> None:
    answer = call("put", "policies/", body)
    assert answer.status_code == 400, answer.content
    assert answer.json()["error"]["param"] == param


def test_the_stop_button_freezes_the_tenant_at_once(call: Call) -> None:
    action = call("post", "actions/", ORDER).json()["id"]
    frozen = call("post", "freezes/", {"reason": "smoke"})
    assert frozen.status_code == 201, frozen.content
    assert call("get", f"actions/{action}/").json()["state"] == "rejected"
    refused = call("post", "actions/", ORDER)
    assert refused.status_code == 403
    assert "by token ci: smoke" in refused.json()["error"]["message"]
    (held,) = call("get", "freezes/").json()["freezes"]
    assert call("delete", f"freezes/{held['id']}/").status_code == 204
    assert call("get", "freezes/").json()["freezes"] == []
    assert call("post", "actions/", ORDER).status_code == 201
    assert AuditEntry.objects.filter(noun="policy", verb="unfrozen", actor="token ci").exists()
