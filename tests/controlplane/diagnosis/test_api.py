"""REST of incidents and actions: what they show, to whom, and the error shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.test import Client

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import token_create
from controlplane.actions.services import action_propose
from tests.controlplane.actions.test_interleavings import World

pytestmark = pytest.mark.django_db


def headers(tenant: Tenant) -> dict[str, str]:
    _, secret = token_create(tenant=tenant, kind="api", name="test")
    return {"Authorization": f"Bearer {secret}"}


def test_incidents_and_actions_are_listed_with_their_story(client: Client, tmp_path: Path) -> None:
    world = World(tmp_path, 5)
    diagnosis = world.diagnosis()
    action_propose(incident=world.incident, diagnosis=diagnosis, engine=world.engine, now=world.now)
    auth = headers(world.tenant)
    (listed,) = client.get("/api/v1/incidents/", headers=auth).json()["incidents"]
    assert listed["id"] == str(world.incident.pk)
    assert (listed["objective"], listed["objective_name"]) == ("ttft", world.objective.name)
    assert listed["cause"] == "running_cap_too_small"
    one = client.get(f"/api/v1/incidents/{world.incident.pk}/", headers=auth).json()
    assert one["because"] == "31 requests wait"
    assert one["evidence_for"] == []
    assert one["remedy"][0]["knob"] == "max_num_seqs"
    assert (one["verdict"], one["also"], one["part_of"]) == ("", [], None)
    assert [hit["objective"] for hit in one["hits"]] == ["ttft"]
    (action,) = client.get("/api/v1/actions/", headers=auth).json()["actions"]
    assert action["sentence"] == "Proposes max_num_seqs from 8 to 32 on engine-0"
    assert [step["to"] for step in action["transitions"]] == ["proposed"]


def test_another_tenants_incident_does_not_exist(client: Client, tmp_path: Path) -> None:
    world = World(tmp_path, 6)
    auth = headers(Tenant.objects.create(slug="other", name="Other"))
    answer = client.get(f"/api/v1/incidents/{world.incident.pk}/", headers=auth)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"No incident has the id {world.incident.pk}."
    assert client.get("/api/v1/incidents/", headers=auth).json() == {"incidents": [], "next": None}


def test_nobody_is_shown_nothing(client: Client) -> None:
    for path in ("/api/v1/incidents/", "/api/v1/actions/"):
        answer = client.get(path)
        assert answer.status_code in (401, 403)
        assert set(answer.json()["error"]) == {"code", "message", "param"}


def test_evidence_names_the_series_it_was_read_from(client: Client, tmp_path: Path) -> None:
    world = World(tmp_path, 7)
    diagnosis = world.diagnosis()
    diagnosis.evidence.create(
        cause=diagnosis.cause, supports=True, sentence="31 wait", metric="vllm:num_requests_waiting"
    )
    url = f"/api/v1/incidents/{world.incident.pk}/"
    (fact,) = client.get(url, headers=headers(world.tenant)).json()["evidence_for"]
    assert fact["query"] == 'vllm:num_requests_waiting{service="chat",instance="engine-0"}'
