"""Writes of the accounts room: tenants and the tokens machines carry."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection
from datetime import datetime

from django.contrib.sessions.models import Session
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from controlplane.accounts import audit
from controlplane.accounts.models import Tenant, Token

SECRET_BYTES = 32
PREFIX_SECRET_CHARS = 4


def tenant_create(*, slug: str, name: str) -> Tenant:
    """Raises ValidationError when the slug or the name does not fit, or the slug is taken."""
    tenant = Tenant(slug=slug, name=name)
    tenant.full_clean()
    tenant.save()
    return tenant


def token_create(
    *,
    tenant: Tenant,
    kind: str,
    name: str,
    scopes: Collection[str] | None = None,
    actor: str = "trimtab",
) -> tuple[Token, str]:
    """The token and its secret, `tt_<kind>_<43 url-safe characters>`, which is kept nowhere.

    `scopes` are for the kind *api* alone; None gives it all of them. Raises ValidationError when
    the kind or a scope is unknown or the name does not fit.
    """
    secret = f"tt_{kind}_{secrets.token_urlsafe(SECRET_BYTES)}"
    token = Token(
        tenant=tenant,
        kind=kind,
        name=name,
        scopes=_scopes(kind, scopes),
        prefix=secret[: len(f"tt_{kind}_") + PREFIX_SECRET_CHARS],
        digest=token_digest(secret),
    )
    token.full_clean()
    if not name.isprintable():  # it stands for who did something, in pages and logs
        raise ValidationError({"name": _("No control characters are allowed.")})
    with transaction.atomic():
        token.save()
        detail = {"kind": kind, "name": name, "scopes": token.scopes}
        _audit(token, actor, "created", detail)
    return token, secret


def _scopes(kind: str, scopes: Collection[str] | None) -> list[str]:
    """In the order of Token.Scope. Raises ValidationError."""
    allowed: Collection[str] = Token.Scope.values if kind == Token.Kind.API else ()
    if scopes is None:
        return list(allowed)
    wrong = [scope for scope in scopes if scope not in allowed]
    if wrong or (allowed and not scopes):
        words = _("scopes=%(given)r: allowed for a token of kind %(kind)s: %(allowed)s")
        names = {"given": list(scopes), "kind": kind, "allowed": ", ".join(allowed) or _("none")}
        raise ValidationError({"scopes": words % names})
    return [scope for scope in allowed if scope in scopes]


def token_revoke(*, token: Token, actor: str = "trimtab") -> None:
    """Ends the token; the ingest door may honour it for 30 s more. Again: changes nothing."""
    live = Token.objects.filter(pk=token.pk, revoked_at=None)
    with transaction.atomic():
        if live.update(revoked_at=timezone.now()):
            _audit(token, actor, "revoked", {"kind": token.kind, "name": token.name})
    token.refresh_from_db(fields=["revoked_at"])


def _audit(token: Token, actor: str, verb: str, detail: dict[str, object]) -> None:
    audit.record(
        tenant=token.tenant, actor=actor, verb=verb, noun="token", subject=token.prefix,
        detail=detail,
    )  # fmt: skip


def prune(now: datetime) -> int:
    """Deletes sessions that have ended; returns how many."""
    return Session.objects.filter(expire_date__lt=now).delete()[0]


def token_digest(secret: str) -> str:
    """SHA-256: enough for a secret of 256 random bits, and cheap enough for every request."""
    return hashlib.sha256(secret.encode()).hexdigest()
