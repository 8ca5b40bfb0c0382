"""Channels people hear through, and the outbox of what was said."""

from __future__ import annotations

import uuid

from django.db import models
from django.utils.translation import gettext_lazy as _

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.models import Incident


class Channel(models.Model):
    """Where messages go. `kind` is the slug of a module in alerts/channels."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="channels")
    name = models.CharField(max_length=100)
    kind = models.SlugField(max_length=40, default="webhook")
    url = models.URLField(max_length=500)
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="channel_name")]

    def __str__(self) -> str:
        return self.name


class Delivery(models.Model):
    """One message to one channel about one incident: the outbox row and the log in one.

    A row is written in the same transaction as the fact it tells, so a kill forgets nothing; the
    receiver may see a message twice after a kill and can tell by `id` (sent as a header).
    """

    class State(models.TextChoices):
        PENDING = "pending", _("pending")
        SENT = "sent", _("sent")
        FAILED = "failed", _("failed")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="deliveries")
    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="deliveries")
    incident = models.ForeignKey(Incident, on_delete=models.CASCADE, related_name="deliveries")
    message = models.JSONField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)
    attempts = models.PositiveSmallIntegerField(default=0)
    next_try_at = models.DateTimeField()
    last_status = models.PositiveSmallIntegerField(null=True, blank=True)
    last_error = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField()
    sent_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["channel", "incident"], name="one_message_per_incident")
        ]
        indexes = [models.Index(fields=["state", "next_try_at"], name="delivery_due")]

    def __str__(self) -> str:
        return f"{self.channel} {self.state}"
