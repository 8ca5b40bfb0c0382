from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase
from pytest_django import Settings
from rest_framework.test import APIClient

from controlplane.accounts import throttle
from controlplane.accounts.models import Membership, Tenant, Token
from controlplane.accounts.rest import LIMIT_MAX, ListQuery, page_of
from controlplane.accounts.services import tenant_create, token_create
from tests.rest import client_of

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.accounts.views")]


# --- pages ----------------------------------------------------------------------------------------


class PagesAreTheList(TestCase):
    """Whatever the names and the limit: the pages, joined, are the list in its order."""

    numbers = count()

    @settings(deadline=None, max_examples=40)
    @given(names=st.lists(st.sampled_from("abc"), max_size=12), limit=st.integers(1, 5))
    def test_joined_they_are_the_whole_list_once(self, names: list[str], limit: int) -> None:
        made = tenant_create(slug=f"t{next(self.numbers)}", name="T")
        for name in names:
            token_create(tenant=made, kind="ingest", name=name)
        rows = Token.objects.filter(tenant=made)
        for by in (("-name", "id"), ("name", "-created_at", "id")):
            asked: dict[str, Any] = {"limit": limit}
            seen, pages = [], 0
            while True:
                page = page_of(rows, asked, by=by)
                seen += list(page.rows)
                pages += 1
                if page.next is None:
                    break
                asked["cursor"] = page.next
            assert seen == list(rows.order_by(*by))
            assert pages == max(1, math.ceil(len(names) / limit))


def test_rows_that_come_meanwhile_shift_nothing(tenant: Tenant) -> None:
    api = client_of(tenant)
    for name in ("d", "b"):
        token_create(tenant=tenant, kind="ingest", name=name)
    first = api.get("/tokens/?limit=2").json()
    assert [t["name"] for t in first["tokens"]] == ["d", "ci"]
    for name in ("e", "a"):
        token_create(tenant=tenant, kind="ingest", name=name)
    rest = api.get("/tokens/", {"limit": 2, "cursor": first["next"]}).json()
    assert [t["name"] for t in rest["tokens"]] == ["b", "a"]
    assert rest["next"] is None


def test_a_cursor_that_is_not_this_lists_is_refused(tenant: Tenant) -> None:
    api = client_of(tenant)
    token_create(tenant=tenant, kind="ingest", name="x")
    good = api.get("/tokens/?limit=1").json()["next"]
    for path, cursor in (
        ("/tokens/", "x"), ("/tokens/", good[:-1]), ("/tokens/", "a" * 1_001), ("/tenants/", good),
    ):  # fmt: skip
        answer = api.get(path, {"cursor": cursor})
        assert answer.status_code == 400, (path, cursor)
        assert answer.json()["error"]["param"] == "cursor"


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ("limit=0", "limit", "limit='0': Ensure this value is greater than or equal to 1."),
        (f"limit={LIMIT_MAX + 1}", "limit", "less than or equal to 200"),
        ("limit=many", "limit", "A valid integer is required."),
        ("kind=root", "kind", "kind='root': allowed: ingest, agent, api"),
        ("since=yesterday", "since", "since='yesterday': "),
        ("since=0001-01-01T00:00:00%2B14:00", "since", "since="),
        ("name=%00", "name", "Null characters are not allowed."),
        ("name=a&name=b", "name", "name=['a', 'b']: to be given once"),
        ("colour=red", "colour", "no such parameter, only cursor, kind, limit, name, since"),
    ],
)
def test_a_query_that_does_not_fit_names_itself(
    tenant: Tenant, asked: str, param: str, words: str
) -> None:
    answer = client_of(tenant).get(f"/tokens/?{asked}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid", param)
    assert words in error["message"]


def test_a_list_takes_its_defaults() -> None:
    query = ListQuery(data={})
    assert query.is_valid()
    assert query.validated_data == {"limit": 50}


# --- scopes ---------------------------------------------------------------------------------------


def test_a_token_without_scopes_named_has_all_and_other_kinds_have_none(tenant: Tenant) -> None:
    assert token_create(tenant=tenant, kind="api", name="a")[0].scopes == ["read", "write", "act"]
    assert token_create(tenant=tenant, kind="agent", name="b")[0].scopes == []
    some = token_create(tenant=tenant, kind="api", name="c", scopes=["act", "read"])[0]
    assert some.scopes == ["read", "act"]


@pytest.mark.parametrize(
    ("kind", "scopes", "words"),
    [
        ("api", ["root"], "allowed for a token of kind api: read, write, act"),
        ("api", [], "allowed for a token of kind api: read, write, act"),
        ("agent", ["read"], "allowed for a token of kind agent: none"),
    ],
)
def test_a_scope_that_does_not_fit_names_the_allowed(
    tenant: Tenant, kind: str, scopes: list[str], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        token_create(tenant=tenant, kind=kind, name="x", scopes=scopes)


@pytest.mark.parametrize(
    ("scope", "opens"), [("read", "GET /who/"), ("write", "POST /who/"), ("act", "POST /acts/")]
)
def test_a_scope_opens_its_own_doors_alone(tenant: Tenant, scope: str, opens: str) -> None:
    api = client_of(tenant, scope)
    for call in ("GET /who/", "POST /who/", "GET /acts/", "POST /acts/"):
        method, path = call.split()
        answer = getattr(api, method.lower())(path, {}, **({} if method == "GET" else JSON))
        may = call == opens or (scope == "read" and method == "GET")
        assert answer.status_code == (200 if may else 403), call
    refused = api.get("/who/") if scope != "read" else api.post("/who/", {}, **JSON)
    wanted = "read" if scope != "read" else "write"
    assert refused.json()["error"] == {
        "code": "permission_denied",
        "message": f"The token's scopes are {scope}; wanted: {wanted}.",
        "param": None,
    }


JSON: dict[str, Any] = {"format": "json"}


# --- the one error shape, and the limit -----------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "code"),
    [
        ("patch", "/who/", JSON, 405, "method_not_allowed"),
        ("options", "/who/", {}, 405, "method_not_allowed"),
        ("post", "/who/", {"content_type": "text/plain", "data": "x"}, 415,
         "unsupported_media_type"),
        ("get", "/who/", {"headers": {"Accept": "image/png"}}, 406, "not_acceptable"),
        ("get", "/fails/missing/", {}, 404, "not_found"),
    ],
)  # fmt: skip
def test_what_the_framework_refuses_has_the_same_shape(
    tenant: Tenant, method: str, path: str, options: dict[str, Any], status: int, code: str
) -> None:
    answer = getattr(client_of(tenant), method)(path, **options)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert set(answer.json()["error"]) == {"code", "message", "param"}


def test_a_caller_over_its_rate_is_told_when_to_come_back(
    tenant: Tenant, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.TRIMTAB_API_REQUESTS_PER_MIN = 3
    now = 1_000.0
    monkeypatch.setattr(throttle.time, "monotonic", lambda: now)
    api, other = client_of(tenant), client_of(tenant)
    assert [api.get("/who/").status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = api.get("/who/")
    assert refused.json()["error"]["code"] == "throttled"
    assert refused["Retry-After"] == "20"
    assert other.get("/who/").status_code == 200
    now += 20
    assert [api.get("/who/").status_code for _ in range(2)] == [200, 429]


def test_no_more_callers_are_remembered_than_the_limit(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "CALLERS_MAX", 2)
    for _ in range(3):
        client_of(tenant).get("/who/")
    assert len(throttle.RequestsPerMinute._buckets) == 2


def test_a_view_may_be_for_owners_alone(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.accounts.views import WhoAmI

    monkeypatch.setattr(WhoAmI, "roles_to_write", frozenset({"owner"}), raising=False)
    for role, status in (("operator", 403), ("owner", 200)):
        user = User.objects.create(username=role)
        Membership.objects.create(tenant=tenant, user=user, role=role)
        api = APIClient()
        api.force_login(user)
        answer = api.post("/who/", {}, format="json")
        assert answer.status_code == status
    assert "wanted" not in str(answer.json())
