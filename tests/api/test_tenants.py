"""Two tenants, every address there is: what is one's is never shown to, nor moved by, the other.

The addresses come from the URL conf, so a new page or endpoint is tried here by itself; one with a
new name in its address fails until conftest says which thing of a tenant that names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps
from django.db import models
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from controlplane.accounts.models import Tenant
from tests.api.conftest import Household, household

pytestmark = pytest.mark.django_db

MARK = "-xacmex"
METHODS = ("get", "post", "put", "patch", "delete")
ROOMS = ("accounts", "slo", "fleet", "diagnosis", "actions", "alerts")
# Words of a row that are shown, not looked up by.
SHOWN = {
    "name", "provider", "consumer", "because", "sentence", "why", "reason", "error", "gpu_status",
    "last_error", "actor",
}  # fmt: skip
# Times that pass by themselves.
MOVES = {"last_used_at", "updated_at", "last_seen_at"}


def addresses() -> Iterator[tuple[str, list[str]]]:
    """Every route of the URL conf with its names: "api/v1/objectives/<slug:slug>/", ["slug"]."""

    def walk(patterns: list[Any], prefix: str) -> Iterator[tuple[str, list[str]]]:
        for pattern in patterns:
            route = f"{prefix}{pattern.pattern}"
            if isinstance(pattern, URLResolver):
                yield from walk(pattern.url_patterns, route)
            elif isinstance(pattern, URLPattern):
                yield route, re.findall(r"<(?:\w+:)?(\w+)>", route)

    yield from walk(get_resolver().url_patterns, "")


def filled(route: str, house: Household, names: list[str]) -> str:
    things = house.path_parameters(route, names)
    return "/" + re.sub(r"<(?:\w+:)?(\w+)>", lambda match: things[match[1]], route)


def of_tenant(tenant: Tenant) -> Iterator[models.QuerySet[Any]]:
    """The tenant's rows of every model of ours, as far as two steps away."""
    for model in apps.get_models():
        if model._meta.app_label not in ROOMS or model is Tenant:
            continue
        path = tenant_path(model)
        if path:
            yield model._default_manager.filter(**{path: tenant})


def tenant_path(model: type[models.Model], steps: int = 2) -> str:
    for column in model._meta.get_fields():
        if isinstance(column, models.ForeignKey):
            if column.related_model is Tenant:
                return column.name
            further = steps and tenant_path(column.related_model, steps - 1)
            if further:
                return f"{column.name}__{further}"
    return ""


def marked(house: Household) -> None:
    """Puts the mark into every word of theirs."""
    for rows in of_tenant(house.tenant):
        if rows.model._meta.model_name == "auditentry":
            continue  # says what was done, in marked words already
        for row in rows:
            columns = [
                column.name
                for column in rows.model._meta.fields
                if column.name in SHOWN
                and isinstance(column, models.CharField | models.TextField)
                and not getattr(row, column.name).endswith(MARK)
            ]
            for name in columns:
                setattr(row, name, f"{getattr(row, name)}{MARK}")
            if columns:
                rows.model._default_manager.filter(pk=row.pk).update(
                    **{name: getattr(row, name) for name in columns}
                )


def snapshot(tenant: Tenant) -> dict[str, list[dict[str, Any]]]:
    return {
        rows.model._meta.label: [
            {name: value for name, value in row.items() if name not in MOVES}
            for row in rows.order_by("pk").values()
        ]
        for rows in of_tenant(tenant)
    }


@pytest.fixture
def acme(settings: Any) -> Household:
    settings.TRIMTAB_API_REQUESTS_PER_MIN = 1_000_000
    made = household("acme", mark=MARK)
    marked(made)
    return made


@pytest.fixture
def other() -> Household:
    return household("other", telemetry=False)


def callers(house: Household) -> dict[str, Client]:
    signed_in = Client(raise_request_exception=False)
    signed_in.force_login(house.owner)
    return {
        "session": signed_in,
        "token": Client(
            headers={"Authorization": f"Bearer {house.api}"}, raise_request_exception=False
        ),
        "agent": Client(
            headers={"Authorization": f"Bearer {house.agent}"}, raise_request_exception=False
        ),
        "stranger": Client(raise_request_exception=False),
    }


BODIES: list[Any] = [
    {},
    {
        "service": "chat", "indicator": "latency", "spec": {"threshold_ms": 250}, "target": 0.9,
        "provider": "P", "consumer": "C", "objectives": ["ttft"], "kind": "api", "name": "engine-0",
        "role": "owner", "terms": {"basis": "hour", "percent": 1}, "reason": "why not",
    },
]  # fmt: skip


def said(answer: Any) -> str:
    """What the caller is told; a stream is its own test's matter (web/test_live.py)."""
    if answer.streaming:
        answer.close()
        return ""
    return answer.content.decode()


def calls(route: str) -> Iterator[tuple[str, str, Any]]:
    """(caller, method, body): REST in every way, pages as a browser can."""
    if not route.startswith("api/"):
        yield from (("session", "get", None), ("session", "post", {}), ("stranger", "get", None))
        return
    for who in ("token", "session"):
        for method in METHODS:
            for body in BODIES if method in ("post", "put", "patch") else (None,):
                yield who, method, body
    for who in ("agent", "stranger"):
        yield from ((who, "get", None), (who, "post", BODIES[1]))


def test_no_address_shows_or_moves_what_is_anothers(acme: Household, other: Household) -> None:
    before = snapshot(acme.tenant)
    assert MARK in str(before)
    tried = 0
    for route, names in sorted(addresses()):
        address, clients = filled(route, acme, names), callers(other)
        echoes = [address, *acme.path_parameters(route, names).values()]
        for who, method, body in calls(route):
            options = {} if body is None else {"content_type": "application/json"}
            answer = getattr(clients[who], method)(address, body, **options)
            where = f"{method.upper()} {address} by {who}: {answer.status_code}"
            assert answer.status_code < 500, where
            text = said(answer)
            for echo in echoes:
                text = text.replace(echo, "")
            assert MARK not in text, f"{where} {text[:500]}"
            tried += 1
    assert tried > 400
    assert snapshot(acme.tenant) == before


def test_the_owner_of_it_all_is_shown_it(acme: Household, other: Household) -> None:
    """So that the silence above means something."""
    told = {}
    clients = callers(acme)
    for route, names in addresses():
        client = clients["token" if route.startswith("api/") else "session"]
        answer = client.get(filled(route, acme, names))
        assert answer.status_code < 500, route
        told[route] = MARK in said(answer)
    assert {route for route, shown in told.items() if shown} >= {
        "", "objectives/", "objectives/<slug:slug>/", "incidents/",
        "incidents/<uuid:incident_id>/", "actions/", "contracts/", "contracts/<slug:slug>/",
        "policies/", "settings/channels/", "settings/channels/<uuid:channel_id>/",
        "settings/deliveries/", "settings/silences/", "settings/tokens/", "settings/members/",
        "settings/audit/", "api/v1/objectives/", "api/v1/objectives/<slug:slug>/",
        "api/v1/contracts/", "api/v1/contracts/<slug:slug>/", "api/v1/incidents/",
        "api/v1/incidents/<uuid:incident_id>/", "api/v1/actions/", "api/v1/nodes/",
        "api/v1/engines/", "api/v1/engines/<str:name>/", "api/v1/tokens/",
        "api/v1/tokens/<uuid:token_id>/", "api/v1/members/", "api/v1/members/<str:name>/",
        "api/v1/incidents/<uuid:incident_id>/diagnoses/", "api/v1/channels/",
        "api/v1/channels/<uuid:channel_id>/", "api/v1/silences/",
        "api/v1/silences/<uuid:silence_id>/", "api/v1/deliveries/",
        "api/v1/policies/", "api/v1/freezes/", "fleet/",
    }  # fmt: skip


def test_telemetry_is_the_tenants_own(acme: Household, other: Household) -> None:
    for house, there in ((acme, True), (other, False)):
        client = callers(house)["token"]
        listed = client.get("/api/v1/traces/").json()["traces"]
        assert bool(listed) == there
        address = f"/api/v1/traces/{acme.things['trace_id']}/"
        assert client.get(address).status_code == (200 if there else 404)
        series = client.get("/api/v1/series/?metric=vllm:num_requests_running").json()["series"]
        assert bool(series) == there
