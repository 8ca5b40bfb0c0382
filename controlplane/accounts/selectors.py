"""Reads of the accounts room: whose token is this, and where does this person belong."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Collection
from datetime import timedelta
from uuid import UUID

from asgiref.sync import sync_to_async
from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY, get_user_model
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.contrib.sessions.models import Session
from django.db import close_old_connections
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.crypto import constant_time_compare

from controlplane.accounts.models import Membership, Tenant, Token
from controlplane.accounts.services import token_digest

LAST_USED_EVERY_S = 60
INGEST_CACHE_S = 30.0
INGEST_CACHE_TOKENS_MAX = 1_024

_SECRET = re.compile(r"tt_(ingest|agent|api)_[A-Za-z0-9_-]{43}")
# digest → (tenant id, monotonic time until which it may be believed)
_ingest_tenants: dict[str, tuple[str, float]] = {}


def token_find(secret: str, *, kinds: Collection[str]) -> Token | None:
    """The live token of one of `kinds` with this secret, its tenant loaded; None otherwise.

    The look-up is by digest, so its time says nothing about the secret. Notes the use, at most
    once a minute.
    """
    if not _SECRET.fullmatch(secret):
        return None
    digest = token_digest(secret)
    token = (
        Token.objects.select_related("tenant")
        .filter(digest=digest, kind__in=kinds, revoked_at=None)
        .first()
    )
    if token is None or not hmac.compare_digest(token.digest, digest):
        return None
    now = timezone.now()
    worth_noting = now - timedelta(seconds=LAST_USED_EVERY_S)
    if token.last_used_at is None or token.last_used_at < worth_noting:
        unnoted = Q(last_used_at=None) | Q(last_used_at__lt=worth_noting)
        Token.objects.filter(unnoted, pk=token.pk).update(last_used_at=now)
        token.last_used_at = now
    return token


async def ingest_tenant(secret: str) -> str | None:
    """The tenant id an ingest token writes for, or None when the token is not good.

    A good answer is kept for 30 s in this process, so a revoked token may write that much longer;
    a bad one is never kept.
    """
    digest = token_digest(secret)
    kept = _ingest_tenants.get(digest)
    if kept and kept[1] > time.monotonic():
        return kept[0]
    tenant_id = await sync_to_async(_ingest_tenant_look_up)(secret)
    _ingest_tenants.pop(digest, None)
    if tenant_id is not None:
        while len(_ingest_tenants) >= INGEST_CACHE_TOKENS_MAX:
            del _ingest_tenants[next(iter(_ingest_tenants))]
        _ingest_tenants[digest] = (tenant_id, time.monotonic() + INGEST_CACHE_S)
    return tenant_id


def _ingest_tenant_look_up(secret: str) -> str | None:
    # The receivers stand outside Django's request cycle, which would have closed a dead connection.
    close_old_connections()
    token = token_find(secret, kinds={Token.Kind.INGEST})
    return str(token.tenant_id) if token else None


def membership_of(user: AbstractBaseUser | AnonymousUser | None) -> Membership | None:
    """The person's first place in a tenant that is not deactivated, the tenant loaded; None for
    strangers."""
    if user is None or not user.is_authenticated:
        return None
    members = Membership.objects.select_related("tenant").filter(user=user.pk, deactivated_at=None)
    return members.order_by("id").first()


def tenants_of_sessions(session_keys: Collection[str]) -> dict[str, UUID]:
    """Session key → the tenant it opens, by the rules of a request: left out are sessions that are
    over, whose person changed the password elsewhere or may not sign in, and strangers'.

    Three queries.
    """
    live = Session.objects.filter(session_key__in=session_keys, expire_date__gt=timezone.now())
    opened = {row.session_key: row.get_decoded() for row in live}
    persons = get_user_model().objects.filter(
        pk__in={said[SESSION_KEY] for said in opened.values() if SESSION_KEY in said},
        is_active=True,
    )
    users = {str(user.pk): user for user in persons}
    members = Membership.objects.filter(user__in=persons, deactivated_at=None)
    first = dict(members.order_by("-id").values_list("user_id", "tenant_id"))
    return {
        key: first[user.pk]
        for key, said in opened.items()
        if (user := users.get(said.get(SESSION_KEY, "")))
        and user.pk in first
        and constant_time_compare(said.get(HASH_SESSION_KEY, ""), user.get_session_auth_hash())
    }


def tokens_of(tenant: Tenant) -> QuerySet[Token]:
    """Newest first, revoked or not."""
    return Token.objects.filter(tenant=tenant).order_by("-created_at", "id")


def members_of(tenant: Tenant) -> QuerySet[Membership]:
    """In the order they joined, each with its user and tenant."""
    rows = Membership.objects.filter(tenant=tenant).select_related("user", "tenant")
    return rows.order_by("id")
