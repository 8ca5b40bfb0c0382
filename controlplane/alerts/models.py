"""Channels people hear through, silences, and the outbox of what was said."""

from __future__ import annotations

import uuid

from django.db import models
from django.utils.translation import gettext_lazy as _

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.models import Incident, Severity


class Channel(models.Model):
    """Where messages go. `kind` is the slug of a module in alerts/channels.

    `url` and `secret` are kept as given, because they are sent with, and are never shown again:
    pages, API and logs have `masked(url)`. `remind_minutes` 0: say it once.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="channels")
    name = models.CharField(max_length=100)
    kind = models.SlugField(max_length=40, default="webhook")
    url = models.URLField(max_length=1000)
    secret = models.CharField(max_length=200, blank=True)
    severity_min = models.CharField(
        max_length=10, choices=Severity.choices, default=Severity.TICKET
    )
    remind_minutes = models.PositiveIntegerField(default=60)
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="channel_name")]

    def __str__(self) -> str:
        return self.name


class Silence(models.Model):
    """Who does not want to hear of what, until when, and why. An empty field fits everything.

    `objective` is a slug and `engine` a name, so a silence outlives either. `ended_at` is set when
    it was ended before `until`.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="silences")
    service = models.CharField(max_length=100, blank=True)
    objective = models.CharField(max_length=80, blank=True)
    engine = models.CharField(max_length=100, blank=True)
    reason = models.CharField(max_length=300)
    by = models.CharField(max_length=150)
    created_at = models.DateTimeField()
    until = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["tenant", "until"], name="silence_until")]

    def __str__(self) -> str:
        scope = " ".join(filter(None, (self.service, self.objective, self.engine)))
        return f"{scope} until {self.until:%Y-%m-%d %H:%M}"


class Delivery(models.Model):
    """One message to one channel: the outbox row and the log in one.

    What is due is worked out from the rows at every pass, so a kill forgets nothing; the receiver
    may see a message twice after a kill and can tell by `id` (sent as a header).
    `incident` is the first of its group, none for a test and for a stop of the autopilot, which is
    `about` an action (plain: actions stand beside alerts). `number` counts the channel's messages
    of one event about it, so that two passes at once write one row.
    `permanent` says whether the last error was for good; None where there was none.
    """

    class Event(models.TextChoices):
        OPENED = "opened", _("opened")
        ASKED = "asked", _("asked")
        UNDONE = "undone", _("undone")
        STUCK = "stuck", _("stuck")
        REMINDED = "reminded", _("reminded")
        RESOLVED = "resolved", _("resolved")
        STOPPED = "stopped", _("autopilot stopped")
        TEST = "test", _("test")

    class State(models.TextChoices):
        PENDING = "pending", _("pending")
        SENT = "sent", _("sent")
        FAILED = "failed", _("failed")
        SILENCED = "silenced", _("silenced")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="deliveries")
    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="deliveries")
    incident = models.ForeignKey(
        Incident, on_delete=models.CASCADE, null=True, blank=True, related_name="deliveries"
    )
    about = models.UUIDField(null=True, blank=True)
    event = models.CharField(max_length=10, choices=Event.choices, default=Event.OPENED)
    number = models.PositiveIntegerField(default=0)
    message = models.JSONField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)
    silence = models.ForeignKey(
        Silence, on_delete=models.SET_NULL, null=True, blank=True, related_name="deliveries"
    )
    attempts = models.PositiveSmallIntegerField(default=0)
    next_try_at = models.DateTimeField()
    last_status = models.PositiveSmallIntegerField(null=True, blank=True)
    last_error = models.CharField(max_length=300, blank=True)
    permanent = models.BooleanField(null=True, blank=True)
    created_at = models.DateTimeField()
    sent_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["channel", "incident", "event", "number"],
                name="one_message_per_event",
            ),
            models.UniqueConstraint(
                fields=["channel", "about", "number"], name="one_message_per_stop"
            ),
        ]
        indexes = [
            models.Index(fields=["state", "next_try_at"], name="delivery_due"),
            models.Index(fields=["tenant", "created_at"], name="delivery_log"),
        ]

    def __str__(self) -> str:
        return f"{self.event} to {self.channel}, {self.state}"
