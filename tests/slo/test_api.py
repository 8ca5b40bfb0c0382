from __future__ import annotations

from typing import Any

import pytest
from rest_framework.test import APIClient

from controlplane.accounts.models import Tenant
from tests.rest import client_of
from tests.slo.fleet_of_samples import a_tenant, an_objective

pytestmark = [pytest.mark.django_db, pytest.mark.urls("slo.api")]
BODY: dict[str, Any] = {
    "service": "chat",
    "indicator": "latency",
    "spec": {"threshold_ms": 500},
    "target": 0.99,
}


@pytest.fixture
def api(tenant: Tenant) -> APIClient:
    return client_of(tenant)


def test_put_creates_then_updates_by_slug(api: APIClient) -> None:
    created = api.put("/objectives/chat-ttft/", BODY, format="json")
    assert created.status_code == 201
    assert created.json()["good_event"] == "time to first token ≤ 500 ms"
    assert created.json()["standing"]["state"] == "no_data"
    again = api.put("/objectives/chat-ttft/", {**BODY, "target": 0.9}, format="json")
    assert (again.status_code, again.json()["target"]) == (200, 0.9)
    listed = api.get("/objectives/").json()["objectives"]
    assert [o["slug"] for o in listed] == ["chat-ttft"]
    assert api.get("/objectives/chat-ttft/").json()["target"] == 0.9


def test_a_wrong_field_comes_back_in_the_error_shape(api: APIClient) -> None:
    answer = api.put("/objectives/x/", {**BODY, "target": 1}, format="json")
    assert answer.status_code == 400
    assert answer.json() == {
        "error": {
            "code": "invalid",
            "message": "target=1: allowed: 0.5 to 0.99999",
            "param": "target",
        }
    }


def test_the_slug_is_the_one_in_the_address(api: APIClient) -> None:
    answer = api.put("/objectives/x/", {**BODY, "slug": "y"}, format="json")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "slug")


def test_another_tenants_objective_does_not_exist(api: APIClient) -> None:
    an_objective(a_tenant("other"), slug="theirs")
    answer = api.get("/objectives/theirs/")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "code": "not_found",
        "message": "No objective has the slug theirs.",
        "param": None,
    }
    assert api.get("/objectives/").json() == {"objectives": [], "next": None}


@pytest.mark.parametrize("body", ["[]", "{", '{"target": NaN}'])
def test_a_body_that_is_no_object_is_refused(api: APIClient, body: str) -> None:
    answer = api.put("/objectives/x/", body, content_type="application/json")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
