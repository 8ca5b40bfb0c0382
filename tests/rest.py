"""REST as a program with a token calls it."""

from __future__ import annotations

from rest_framework.test import APIClient

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import token_create


def client_of(tenant: Tenant, *scopes: str, kind: str = "api") -> APIClient:
    """Without scopes named the token has all that its kind may have."""
    _, secret = token_create(tenant=tenant, kind=kind, name="ci", scopes=scopes or None)
    return APIClient(headers={"Authorization": f"Bearer {secret}"})
