"""Tenants, who belongs to them, and the tokens machines carry."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _


class Tenant(models.Model):
    """An owner of telemetry, objectives and engines. Every row of every room belongs to one."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    slug = models.SlugField(unique=True, max_length=50)
    name = models.CharField(max_length=100)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.slug


class Membership(models.Model):
    """A person's place in a tenant."""

    class Role(models.TextChoices):
        VIEWER = "viewer", _("viewer")
        OPERATOR = "operator", _("operator")
        OWNER = "owner", _("owner")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships"
    )
    role = models.CharField(max_length=10, choices=Role.choices, default=Role.VIEWER)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "user"], name="member_once")]

    def __str__(self) -> str:
        return f"{self.user} in {self.tenant} ({self.role})"


class Token(models.Model):
    """A bearer token of a machine. Only its SHA-256 is kept: the secret has 256 random bits."""

    class Kind(models.TextChoices):
        INGEST = "ingest", _("ingest: send telemetry")
        AGENT = "agent", _("agent: fetch commands for a node")
        API = "api", _("API: read and write objectives")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="tokens")
    kind = models.CharField(max_length=10, choices=Kind.choices)
    name = models.CharField(max_length=100)
    prefix = models.CharField(max_length=16)
    digest = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.prefix}… ({self.kind})"
