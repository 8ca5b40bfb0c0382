"""Incidents, the explanation given for each, and the evidence under it."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta

from django.db import models
from django.utils.translation import gettext_lazy as _

from controlplane.accounts.models import Tenant
from slo.burn import PAGE, TICKET
from slo.models import Objective


class Severity(models.TextChoices):
    """How soon a person is wanted: now, or within the day."""

    PAGE = PAGE, _("page")
    TICKET = TICKET, _("ticket")


class Incident(models.Model):
    """One thing going wrong for one objective in one scope (an engine's name, or "" for all).

    `bad_since` is the start of the first bad control window, `opened_at` when it was seen;
    `bad_again_since` and `opened_again_at` are the same of the newest reopening. The events and
    `unmeasured` ([from, to] of each longer stretch without a reading) are of the run of windows
    that began last; those before it are its `episodes`. `lapsed` says why an incident was closed
    without having been seen to end; empty otherwise. `part_of` is the incident of the same engine,
    time and cause whose story tells of this one too.
    """

    class State(models.TextChoices):
        OPEN = "open", _("open")
        CLOSED = "closed", _("closed")

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="incidents")
    objective = models.ForeignKey(Objective, on_delete=models.CASCADE, related_name="incidents")
    scope = models.CharField(max_length=100, blank=True, default="")
    part_of = models.ForeignKey(
        "self", on_delete=models.SET_NULL, null=True, blank=True, related_name="parts"
    )
    state = models.CharField(max_length=10, choices=State.choices, default=State.OPEN)
    trigger = models.CharField(max_length=60)
    severity = models.CharField(max_length=10, choices=Severity.choices, default=Severity.PAGE)
    bad_since = models.DateTimeField()
    bad_again_since = models.DateTimeField(null=True, blank=True)
    opened_at = models.DateTimeField()
    opened_again_at = models.DateTimeField(null=True, blank=True)
    closed_at = models.DateTimeField(null=True, blank=True)
    lapsed = models.CharField(max_length=100, blank=True)
    reopened = models.PositiveIntegerField(default=0)
    good_windows = models.PositiveSmallIntegerField(default=0)
    bad_events = models.FloatField(default=0)
    total_events = models.FloatField(default=0)
    unmeasured = models.JSONField(default=list, blank=True)
    example_trace_id = models.CharField(max_length=32, blank=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["objective", "scope"],
                condition=models.Q(state="open"),
                name="one_open_incident",
            )
        ]

    def __str__(self) -> str:
        return f"{self.objective} on {self.scope or self.objective.service}"

    @property
    def run_since(self) -> datetime:
        """When the newest run of bad windows began."""
        return self.bad_again_since or self.bad_since

    @property
    def run(self) -> Episode:
        """The newest episode: what goes on, or the last that did."""
        return Episode(
            incident=self,
            bad_since=self.run_since,
            opened_at=self.opened_again_at or self.opened_at,
            closed_at=self.closed_at,
            bad_events=self.bad_events,
            total_events=self.total_events,
            unmeasured=self.unmeasured,
        )

    @property
    def runs(self) -> list[Episode]:
        """Every episode, oldest first."""
        return [*self.episodes.all(), self.run]


class Episode(models.Model):
    """One run of an incident, from its first bad window until it was over.

    A row is written when the incident opens again; the newest is in the incident's own columns.
    """

    incident = models.ForeignKey(Incident, on_delete=models.CASCADE, related_name="episodes")
    bad_since = models.DateTimeField()
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True, blank=True)
    bad_events = models.FloatField(default=0)
    total_events = models.FloatField(default=0)
    unmeasured = models.JSONField(default=list, blank=True)

    class Meta:
        ordering = ["opened_at"]

    def __str__(self) -> str:
        return f"{self.incident} since {self.bad_since:%Y-%m-%d %H:%M:%S}"

    @property
    def holes(self) -> list[tuple[datetime, datetime]]:
        """The stretches of it that nobody watched."""
        return [
            (datetime.fromisoformat(start), datetime.fromisoformat(end))
            for start, end in self.unmeasured
        ]

    @property
    def unwatched(self) -> timedelta:
        return sum((end - start for start, end in self.holes), timedelta())

    def lasted(self, now: datetime) -> timedelta:
        """How long it was seen to go on, until it was over or `now`."""
        return (self.closed_at or now) - self.bad_since - self.unwatched


class Diagnosis(models.Model):
    """What explains an incident. The newest is the current one; older ones are kept.

    `cause` is a slug of diagnosis/causes or "unknown". `rivals` lists the other causes examined,
    best first: [{"cause", "score", "because", "no_remedy"}]; `also`, in the same form, a second
    fault that the first does not explain, of which `because` tells as well. `remedy` is the ordered
    wish list of both: [{"cause", "knob", "to", "why", "limit", "exact", "whole"}]; `cured` once a
    change made for one of them was kept. `verdict` is empty, or "infeasible": no knob cures it, and
    what is wished for only limits the harm. `facts` holds the numbers of the sentence.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    incident = models.ForeignKey(Incident, on_delete=models.CASCADE, related_name="diagnoses")
    made_at = models.DateTimeField()
    cause = models.SlugField(max_length=60)
    score = models.FloatField()
    because = models.TextField()
    facts = models.JSONField(default=dict, blank=True)
    verdict = models.CharField(max_length=16, blank=True)
    also = models.JSONField(default=list, blank=True)
    rivals = models.JSONField(default=list, blank=True)
    remedy = models.JSONField(default=list, blank=True)
    cured = models.BooleanField(default=False)
    window_start = models.DateTimeField()
    window_end = models.DateTimeField()

    class Meta:
        ordering = ["-made_at"]

    def __str__(self) -> str:
        return f"{self.cause} ({self.score:.2f})"

    @property
    def next_try_at(self) -> datetime | None:
        """Until when what it wishes for has to wait; None when nothing is known to wait."""
        at = self.facts.get("next_try_at")
        return datetime.fromisoformat(at) if at else None

    @property
    def causes(self) -> set[str]:
        """Every one it names."""
        return {self.cause, *(also["cause"] for also in self.also)}


class Evidence(models.Model):
    """One measured fact for or against one cause. Every sentence on the page is such a row."""

    diagnosis = models.ForeignKey(Diagnosis, on_delete=models.CASCADE, related_name="evidence")
    cause = models.SlugField(max_length=60)
    supports = models.BooleanField()
    sentence = models.TextField()
    metric = models.CharField(max_length=120, blank=True)
    unit = models.CharField(max_length=40, blank=True)
    before = models.FloatField(null=True, blank=True)
    value = models.FloatField(null=True, blank=True)
    threshold = models.FloatField(null=True, blank=True)
    points = models.JSONField(default=list, blank=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return self.sentence

    @property
    def query(self) -> str:
        """The series it was read from, as a PromQL selector; empty where it is of no metric.

        Reads self.diagnosis.incident.objective.
        """
        if not self.metric:
            return ""
        incident = self.diagnosis.incident
        where = {"service": incident.objective.service, "instance": incident.scope}
        if self.metric.startswith("gpu:"):  # of the node, whichever engine runs there
            where = {}
        labels = ",".join(f'{name}="{value}"' for name, value in where.items() if value)
        return f"{self.metric}{{{labels}}}" if labels else self.metric
