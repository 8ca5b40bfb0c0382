"""Tenants, who belongs to them, the tokens machines carry, and the audit log."""

from __future__ import annotations

import uuid
from typing import Any

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
    """A person's place in a tenant; with `deactivated_at`, a place they may not enter for now."""

    class Role(models.TextChoices):
        VIEWER = "viewer", _("viewer")
        OPERATOR = "operator", _("operator")
        OWNER = "owner", _("owner")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships"
    )
    role = models.CharField(max_length=10, choices=Role.choices, default=Role.VIEWER)
    deactivated_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "user"], name="member_once")]

    def __str__(self) -> str:
        return f"{self.user} in {self.tenant} ({self.role})"


class Token(models.Model):
    """A bearer token of a machine. Only its SHA-256 is kept: the secret has 256 random bits.

    `scopes` says what one of kind *api* may do; the other kinds have one door each and no scopes.
    """

    class Kind(models.TextChoices):
        INGEST = "ingest", _("ingest: send telemetry")
        AGENT = "agent", _("agent: fetch commands for a node")
        API = "api", _("API: what its scopes allow")

    class Scope(models.TextChoices):
        READ = "read", _("read")
        WRITE = "write", _("write: change what is promised and set up")
        ACT = "act", _("act: allow, reject and undo actions")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="tokens")
    kind = models.CharField(max_length=10, choices=Kind.choices)
    name = models.CharField(max_length=100)
    scopes = models.JSONField(default=list, blank=True)
    prefix = models.CharField(max_length=16)
    digest = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.prefix}… ({self.kind})"


class AuditError(Exception):
    """Somebody tried to change or to delete what was written down."""


class AuditEntries(models.QuerySet["AuditEntry"]):
    """Rows that are only ever added. Raises AuditError for anything else."""

    def update(self, **columns: Any) -> int:
        raise AuditError("audit entries are never changed")

    def delete(self) -> tuple[int, dict[str, int]]:
        raise AuditError("audit entries are never deleted")


class AuditEntry(models.Model):
    """Who did what to which thing, chained: `digest` covers the row and the digest before it.

    `number` counts from 1 per tenant. Written by accounts.audit alone; see there for the chain.
    """

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="audit_entries")
    number = models.PositiveBigIntegerField()
    at = models.DateTimeField()
    actor = models.CharField(max_length=200)
    verb = models.CharField(max_length=40)
    noun = models.CharField(max_length=40)
    subject = models.CharField(max_length=200)
    detail = models.JSONField(default=dict, blank=True)
    previous = models.CharField(max_length=64)
    digest = models.CharField(max_length=64)

    objects = AuditEntries.as_manager()

    class Meta:
        ordering = ["tenant", "number"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "number"], name="audit_number_once"),
            models.UniqueConstraint(fields=["tenant", "previous"], name="audit_no_fork"),
        ]
        indexes = [models.Index(fields=["tenant", "noun", "subject"], name="audit_subject")]

    def __str__(self) -> str:
        return f"{self.number}. {self.actor}: {self.verb} {self.noun} {self.name}"

    def save(self, *args: Any, **options: Any) -> None:
        """Raises AuditError for a row that is stored already."""
        if not self._state.adding:
            raise AuditError("audit entries are never changed")
        super().save(*args, **options)

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        raise AuditError("audit entries are never deleted")

    @property
    def name(self) -> str:
        """What people call the subject, where that is an id: `what` of the detail says so."""
        return str(self.detail.get("what") or self.subject)
