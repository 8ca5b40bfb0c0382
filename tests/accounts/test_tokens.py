from __future__ import annotations

import re
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ValidationError
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from controlplane.accounts import selectors
from controlplane.accounts.models import Tenant, Token
from controlplane.accounts.selectors import ingest_tenant, token_find
from controlplane.accounts.services import tenant_create, token_create, token_revoke

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    selectors._ingest_tenants.clear()


def test_the_secret_is_shown_once_and_only_its_digest_is_kept(tenant: Tenant) -> None:
    token, secret = token_create(tenant=tenant, kind="ingest", name="collector")
    assert re.fullmatch(r"tt_ingest_[A-Za-z0-9_-]{43}", secret)
    assert token.prefix == secret[:14]
    assert not any(secret[14:] in str(value) for value in vars(token).values())


def test_a_token_opens_only_the_doors_of_its_kind(tenant: Tenant) -> None:
    token, secret = token_create(tenant=tenant, kind="agent", name="node-1")
    assert token_find(secret, kinds={"agent", "api"}) == token
    assert token_find(secret, kinds={"ingest"}) is None


@pytest.mark.parametrize("secret", ["", "tt_agent_short", "tt_agent_" + "x" * 43, "é" * 51])
def test_what_is_no_token_opens_nothing(tenant: Tenant, secret: str) -> None:
    token_create(tenant=tenant, kind="agent", name="node-1")
    assert token_find(secret, kinds={"agent"}) is None


def test_a_revoked_token_is_dead_and_stays_dead(tenant: Tenant) -> None:
    token, secret = token_create(tenant=tenant, kind="api", name="ci")
    token_revoke(token=token)
    revoked_at = token.revoked_at
    assert revoked_at is not None
    assert token_find(secret, kinds={"api"}) is None
    token_revoke(token=token)
    assert token.revoked_at == revoked_at


def test_use_is_noted_at_most_once_a_minute(
    tenant: Tenant, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    token, secret = token_create(tenant=tenant, kind="api", name="ci")
    assert token_find(secret, kinds={"api"})
    with django_assert_num_queries(1):
        assert token_find(secret, kinds={"api"})
    Token.objects.update(last_used_at=timezone.now() - timedelta(seconds=61))
    assert token_find(secret, kinds={"api"})
    token.refresh_from_db()
    assert token.last_used_at is not None
    assert timezone.now() - token.last_used_at < timedelta(seconds=60)


def test_the_ingest_door_asks_the_database_once_in_half_a_minute(
    tenant: Tenant,
    django_assert_num_queries: DjangoAssertNumQueries,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, secret = token_create(tenant=tenant, kind="ingest", name="collector")
    find = async_to_sync(ingest_tenant)
    assert find(secret) == str(tenant.pk)
    with django_assert_num_queries(0):
        assert find(secret) == str(tenant.pk)
    monkeypatch.setattr(selectors, "INGEST_CACHE_S", 0.0)
    selectors._ingest_tenants.clear()
    assert find(secret) == str(tenant.pk)
    with django_assert_num_queries(1):
        assert find(secret) == str(tenant.pk)


def test_the_ingest_door_keeps_no_more_than_its_limit_and_no_strangers(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "INGEST_CACHE_TOKENS_MAX", 2)
    find = async_to_sync(ingest_tenant)
    for index in range(4):
        _, secret = token_create(tenant=tenant, kind="ingest", name=f"c{index}")
        assert find(secret) == str(tenant.pk)
    assert find("tt_ingest_" + "x" * 43) is None
    _, agent_secret = token_create(tenant=tenant, kind="agent", name="node")
    assert find(agent_secret) is None
    assert len(selectors._ingest_tenants) == 2


def test_an_unknown_kind_and_a_taken_slug_are_refused(tenant: Tenant) -> None:
    with pytest.raises(ValidationError, match="kind"):
        token_create(tenant=tenant, kind="root", name="x")
    with pytest.raises(ValidationError, match="slug"):
        tenant_create(slug="acme", name="Again")


def test_a_name_has_no_control_characters(tenant: Tenant) -> None:
    with pytest.raises(ValidationError, match="No control characters"):
        token_create(tenant=tenant, kind="api", name="ci\naudit default 99. ada: kept action")
