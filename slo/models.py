"""Objectives, what was read of them (one row per control window), and contracts upon them."""

from __future__ import annotations

import uuid

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from controlplane.accounts.models import Tenant
from slo.indicator import Unit, indicators
from tracing.types import Signal


class Objective(models.Model):
    """A target over a window for one indicator of one service (SLO).

    `indicator` is the slug of a module in slo/indicators and `spec` its parameters; a new kind
    needs no migration. `target` is a share in (0, 1): 1 would leave no budget to divide by.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="objectives")
    slug = models.SlugField(max_length=80)
    name = models.CharField(max_length=120)
    service = models.CharField(max_length=100)
    indicator = models.SlugField(max_length=40)
    spec = models.JSONField(default=dict)
    target = models.FloatField(validators=[MinValueValidator(0.5), MaxValueValidator(0.99999)])
    window_days = models.PositiveSmallIntegerField(
        default=30, validators=[MinValueValidator(1), MaxValueValidator(90)]
    )
    fast_burn = models.FloatField(
        default=14.4,
        validators=[MinValueValidator(1.0)],
        help_text=_("Burn rate at which two control windows in a row open an incident."),
    )
    enabled = models.BooleanField(default=True)
    problem = models.CharField(
        max_length=300,
        blank=True,
        editable=False,
        help_text=_("Why the data cannot answer this objective, as the last judging found it."),
    )
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "slug"], name="objective_slug")]

    def __str__(self) -> str:
        return self.name

    @property
    def budget(self) -> float:
        return 1 - self.target

    @property
    def unit(self) -> Unit:
        """What its events are: requests, gaps between tokens and so on."""
        return indicators()[self.indicator].unit(self.spec)


class Reading(models.Model):
    """Good and total events of one control window, for the service (scope "") or one engine.

    `good_sum` and `total_sum` are running sums over the objective's and scope's readings, so any
    window's count is the difference of two rows.
    """

    objective = models.ForeignKey(Objective, on_delete=models.CASCADE, related_name="readings")
    scope = models.CharField(max_length=100, blank=True, default="")
    window_end = models.DateTimeField()
    window_s = models.FloatField(default=15.0)
    good = models.FloatField(default=0)
    total = models.FloatField(default=0)
    good_sum = models.FloatField(default=0)
    total_sum = models.FloatField(default=0)
    signal = models.CharField(max_length=12, choices=[(s.value, s.value) for s in Signal])

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["objective", "scope", "window_end"], name="reading_once"
            )
        ]
        indexes = [models.Index(fields=["objective", "window_end"], name="reading_time")]

    def __str__(self) -> str:
        return f"{self.window_end:%H:%M:%S} {self.good:g}/{self.total:g} {self.signal}"


class Contract(models.Model):
    """What a provider owes a consumer when objectives are missed in a calendar period (UTC).

    `terms` is the penalty clause (slo/penalty.py), in percent of `fee`, which is what the consumer
    pays per period; without a fee the penalty is known in percent only.
    """

    class Period(models.TextChoices):
        DAY = "day", _("day")
        WEEK = "week", _("week")
        MONTH = "month", _("month")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="contracts")
    slug = models.SlugField(max_length=80)
    name = models.CharField(max_length=120)
    provider = models.CharField(max_length=120)
    consumer = models.CharField(max_length=120)
    objectives = models.ManyToManyField(Objective, related_name="contracts")
    period = models.CharField(max_length=10, choices=Period.choices, default=Period.MONTH)
    fee = models.DecimalField(max_digits=14, decimal_places=2, null=True, blank=True)
    currency = models.CharField(max_length=3, blank=True)
    terms = models.JSONField(default=dict)
    starts_on = models.DateField()
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "slug"], name="contract_slug")]

    def __str__(self) -> str:
        return self.name


class Settlement(models.Model):
    """What a contract came to in a period that has ended; it stays when terms or readings go.

    `percent` is None when nothing was measured. `objectives` lists how each stood:
    [{"objective", "target", "attained", "good", "total", "hours_missed", "percent"}].
    """

    contract = models.ForeignKey(Contract, on_delete=models.CASCADE, related_name="settlements")
    period_start = models.DateTimeField()
    period_end = models.DateTimeField()
    percent = models.FloatField(null=True, blank=True)
    capped = models.BooleanField(default=False)
    amount = models.DecimalField(max_digits=14, decimal_places=2, null=True, blank=True)
    currency = models.CharField(max_length=3, blank=True)
    terms = models.JSONField(default=dict)
    objectives = models.JSONField(default=list)
    settled_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["contract", "period_start"], name="settled_once")
        ]

    def __str__(self) -> str:
        return f"{self.contract} {self.period_start:%Y-%m-%d}"
