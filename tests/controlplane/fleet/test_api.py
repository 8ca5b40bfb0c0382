from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from rest_framework.test import APIClient

from controlplane.accounts.models import Tenant
from controlplane.fleet.limits import SYNC_BYTES_MAX
from gpu_agent.protocol import CommandState, SyncReply
from tests.controlplane.fleet.agent_side import an_apply, an_engine, heartbeat, report, result
from tests.rest import client_of

pytestmark = [pytest.mark.django_db, pytest.mark.urls("controlplane.fleet.api")]


def agent(tenant: Tenant) -> APIClient:
    return client_of(tenant, kind="agent")


def post(api: APIClient, **changes: Any) -> Any:
    body = heartbeat(datetime.now(UTC), **changes).to_json()
    return api.post("/agent/sync", body, format="json")


def test_sync_answers_with_a_reply_the_agent_can_read(tenant: Tenant) -> None:
    command = an_apply(an_engine(tenant))
    answer = post(agent(tenant), results=[result(command, CommandState.RECEIVED)])
    assert answer.status_code == 200
    reply = SyncReply.from_json(answer.json())
    assert [c.command_id for c in reply.commands] == [str(command.pk)]


@pytest.mark.parametrize("kind", ["api", "ingest"])
def test_only_agents_sync(tenant: Tenant, kind: str) -> None:
    answer = post(client_of(tenant, kind=kind))
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "authentication_failed")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "SyncRequest.agent_id", "missing"),
        ([], "SyncRequest", "got list, want an object"),
        ({**heartbeat().to_json(), "node": 5}, "SyncRequest.node", "got 5, want str"),
        (
            {**heartbeat().to_json(), "results": [{"command_id": "x"}]},
            "CommandResult.kind",
            "missing",
        ),
    ],
)
def test_a_message_that_does_not_fit_names_the_field(
    tenant: Tenant, body: object, param: str, words: str
) -> None:
    answer = agent(tenant).post("/agent/sync", body, format="json")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid", param)
    assert words in error["message"]


def test_a_command_id_that_is_none_names_itself(tenant: Tenant) -> None:
    words = {
        "command_id": "x", "kind": "apply", "state": "applied", "at": "2026-03-01T00:00:00Z",
    }  # fmt: skip
    body = {**heartbeat(datetime.now(UTC)).to_json(), "results": [words]}
    answer = agent(tenant).post("/agent/sync", body, format="json")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "CommandResult.command_id"


def test_two_claims_on_one_identity_are_a_conflict(tenant: Tenant) -> None:
    api = agent(tenant)
    assert post(api).status_code == 200
    clone = post(api, node="node-1")
    assert (clone.status_code, clone.json()["error"]["code"]) == (409, "agent_conflict")
    rival = post(api, agent_id="a-2", node="node-1")
    assert (rival.status_code, rival.json()["error"]["code"]) == (409, "engine_conflict")


def test_a_sync_over_its_size_is_refused_unread(tenant: Tenant) -> None:
    body = json.dumps({**heartbeat().to_json(), "padding": "x" * SYNC_BYTES_MAX})
    answer = agent(tenant).post("/agent/sync", body, content_type="application/json")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_nodes_and_engines_are_listed_read_only(tenant: Tenant) -> None:
    post(agent(tenant), engines=[report(), report("engine-1", service="embed")])
    api = client_of(tenant, kind="api")
    (node,) = api.get("/nodes/").json()["nodes"]
    assert (node["name"], node["state"]) == ("node-0", "ok")
    engines = api.get("/engines/").json()["engines"]
    assert [(e["name"], e["node"], e["state"]) for e in engines] == [
        ("engine-0", "node-0", "ok"),
        ("engine-1", "node-0", "ok"),
    ]
    assert [e["name"] for e in api.get("/engines/?service=embed").json()["engines"]] == ["engine-1"]
    refused = api.post("/engines/", {}, format="json")
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (rb'{"gpus": [{"name": "\ud800"}]}', "not Unicode"),
        (json.dumps({**heartbeat().to_json(), "node": "a\0b"}).encode(), "no control characters"),
        (json.dumps({**heartbeat().to_json(), "cpu_seconds_total": 10**400}).encode(), "no float"),
    ],
)
def test_a_sync_no_page_could_show_is_refused(tenant: Tenant, body: bytes, words: str) -> None:
    answer = agent(tenant).post("/agent/sync", body, content_type="application/json")
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
