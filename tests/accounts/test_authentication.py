from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from controlplane.accounts.models import Membership, Tenant
from controlplane.accounts.services import tenant_create
from tests.rest import client_of

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.accounts.views")]


def signed_in(user: User) -> APIClient:
    client = APIClient()
    client.force_login(user)
    return client


def test_a_token_speaks_for_its_tenant(tenant: Tenant) -> None:
    tenant_create(slug="other", name="Other")
    answer = client_of(tenant, kind="api").get("/who/")
    assert (answer.status_code, answer.json()) == (200, {"tenant": "acme"})


def test_a_view_says_which_tokens_it_takes(tenant: Tenant) -> None:
    assert client_of(tenant, kind="agent").get("/agents/").status_code == 200
    answer = client_of(tenant, kind="agent").get("/who/")
    assert answer.status_code == 401
    assert answer.json() == {
        "error": {
            "code": "authentication_failed",
            "message": "The bearer token is unknown, revoked or of another kind; wanted: api.",
            "param": None,
        }
    }


@pytest.mark.parametrize("header", ["", "Basic abc", "Bearer", "Bearer a b", "Bearer \xff"])
def test_nobody_gets_in_without_a_good_token(tenant: Tenant, header: str) -> None:
    answer = APIClient(headers={"Authorization": header} if header else {}).get("/who/")
    assert answer.status_code == 401
    assert answer["WWW-Authenticate"] == 'Bearer realm="trimtab"'
    assert set(answer.json()["error"]) == {"code", "message", "param"}


def test_members_read_and_operators_write(tenant: Tenant) -> None:
    viewer, operator = User.objects.create(username="v"), User.objects.create(username="o")
    Membership.objects.create(tenant=tenant, user=viewer, role="viewer")
    Membership.objects.create(tenant=tenant, user=operator, role="operator")
    assert signed_in(viewer).get("/who/").json() == {"tenant": "acme"}
    assert signed_in(viewer).post("/who/").status_code == 403
    assert signed_in(operator).post("/who/").status_code == 200


def test_a_person_without_a_tenant_is_a_stranger(tenant: Tenant) -> None:
    answer = signed_in(User.objects.create(username="x")).get("/who/")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "permission_denied"


def test_a_session_cannot_be_written_with_from_another_site(tenant: Tenant) -> None:
    user = User.objects.create(username="o")
    Membership.objects.create(tenant=tenant, user=user, role="owner")
    client = APIClient(enforce_csrf_checks=True)
    client.force_login(user)
    assert client.post("/who/").status_code == 403


@pytest.mark.parametrize(
    ("how", "status", "code", "message", "param"),
    [
        ("missing", 404, "not_found", "No such thing.", None),
        ("conflict", 409, "taken", "That is taken.", "slug"),
        ("fields", 400, "invalid", "Too low.", "target"),
        ("list", 400, "invalid", "Wrong.", None),
    ],
)
def test_every_error_has_one_shape(
    tenant: Tenant, how: str, status: int, code: str, message: str, param: str | None
) -> None:
    answer = client_of(tenant, kind="api").get(f"/fails/{how}/")
    assert answer.status_code == status
    assert answer.json() == {"error": {"code": code, "message": message, "param": param}}
