"""Writes of the accounts room: tenants and the tokens machines carry."""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime

from django.contrib.sessions.models import Session
from django.utils import timezone

from controlplane.accounts.models import Tenant, Token

SECRET_BYTES = 32
PREFIX_SECRET_CHARS = 4


def tenant_create(*, slug: str, name: str) -> Tenant:
    """Raises ValidationError when the slug or the name does not fit, or the slug is taken."""
    tenant = Tenant(slug=slug, name=name)
    tenant.full_clean()
    tenant.save()
    return tenant


def token_create(*, tenant: Tenant, kind: str, name: str) -> tuple[Token, str]:
    """The token and its secret, `tt_<kind>_<43 url-safe characters>`, which is kept nowhere.

    Raises ValidationError when the kind is unknown or the name does not fit.
    """
    secret = f"tt_{kind}_{secrets.token_urlsafe(SECRET_BYTES)}"
    token = Token(
        tenant=tenant,
        kind=kind,
        name=name,
        prefix=secret[: len(f"tt_{kind}_") + PREFIX_SECRET_CHARS],
        digest=token_digest(secret),
    )
    token.full_clean()
    token.save()
    return token, secret


def token_revoke(*, token: Token) -> None:
    """Ends the token; the ingest door may honour it for 30 s more. Again: changes nothing."""
    Token.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=timezone.now())
    token.refresh_from_db(fields=["revoked_at"])


def prune(now: datetime) -> int:
    """Deletes sessions that have ended; returns how many."""
    return Session.objects.filter(expire_date__lt=now).delete()[0]


def token_digest(secret: str) -> str:
    """SHA-256: enough for a secret of 256 random bits, and cheap enough for every request."""
    return hashlib.sha256(secret.encode()).hexdigest()
