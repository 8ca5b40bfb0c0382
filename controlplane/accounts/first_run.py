"""What a fresh house needs so that a person can sign in: a tenant, an owner, a password file."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from django.contrib.auth import get_user_model
from django.db import transaction

from controlplane.accounts.models import Membership, Tenant, Token
from controlplane.accounts.selectors import token_find
from controlplane.accounts.services import tenant_create, token_create

TENANT_SLUG = "default"
OWNER_NAME = "owner"


@dataclass(frozen=True)
class Login:
    """The owner's name and the file (mode 600) that holds the password made at the first start."""

    tenant: Tenant
    name: str
    path: Path


def first_owner(home: Path) -> Login:
    """The default tenant and its owner, made at the first start and left alone ever after."""
    path = home / "password"
    with transaction.atomic():
        tenant = Tenant.objects.filter(slug=TENANT_SLUG).first()
        if tenant is None:
            tenant = tenant_create(slug=TENANT_SLUG, name="Default")
        user, made = get_user_model().objects.get_or_create(
            username=OWNER_NAME, defaults={"is_staff": True}
        )
        if made:
            password = secrets.token_urlsafe(12)
            keep_secret(path, password)
            user.set_password(password)
            user.save()
            Membership.objects.create(tenant=tenant, user=user, role=Membership.Role.OWNER)
    return Login(tenant, OWNER_NAME, path)


def token_for_cli(home: Path) -> str:
    """An API token for commands typed on this machine, kept beside the database (mode 600)."""
    path = home / "cli_token"
    kept = path.read_text().strip() if path.exists() else ""
    if token_find(kept, kinds={Token.Kind.API}):
        return kept
    tenant = first_owner(home).tenant
    _, secret = token_create(tenant=tenant, kind=Token.Kind.API, name="trimtab on this machine")
    keep_secret(path, secret)
    return secret


def keep_secret(path: Path, secret: str) -> None:
    """Writes a file only its owner may read, also when one with other rights was there."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secret + "\n")
