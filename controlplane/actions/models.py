"""Actions: a change of knobs with its undo, and every step it went through."""

from __future__ import annotations

import uuid

from django.db import models
from django.utils.translation import gettext_lazy as _

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Engine


class State(models.TextChoices):
    PROPOSED = "proposed", _("proposed")
    APPROVED = "approved", _("approved")
    DISPATCHED = "dispatched", _("dispatched")
    ACKNOWLEDGED = "acknowledged", _("acknowledged")
    APPLIED = "applied", _("applied")
    VERIFYING = "verifying", _("verifying")
    VERIFIED = "verified", _("verified")
    REJECTED = "rejected", _("rejected")
    EXPIRED = "expired", _("expired")
    FAILED = "failed", _("failed")
    ROLLING_BACK = "rolling_back", _("rolling back")
    ROLLED_BACK = "rolled_back", _("rolled back")
    ROLLBACK_FAILED = "rollback_failed", _("rollback failed")


# Which state may follow which (NORMS, Action and commands).
NEXT: dict[str, frozenset[str]] = {
    State.PROPOSED: frozenset({State.APPROVED, State.REJECTED, State.EXPIRED}),
    State.APPROVED: frozenset({State.DISPATCHED, State.REJECTED, State.EXPIRED}),
    State.DISPATCHED: frozenset(
        {State.ACKNOWLEDGED, State.APPLIED, State.FAILED, State.EXPIRED, State.ROLLING_BACK}
    ),
    State.ACKNOWLEDGED: frozenset({State.APPLIED, State.FAILED, State.EXPIRED, State.ROLLING_BACK}),
    State.APPLIED: frozenset({State.VERIFYING, State.ROLLING_BACK}),
    State.VERIFYING: frozenset({State.VERIFIED, State.ROLLING_BACK}),
    State.ROLLING_BACK: frozenset({State.ROLLED_BACK, State.ROLLBACK_FAILED}),
}
IN_FLIGHT = frozenset(NEXT)
ENDED = frozenset(State.values) - IN_FLIGHT


class Verdict(models.TextChoices):
    BETTER = "better", _("better")
    WORSE = "worse", _("worse")
    INCONCLUSIVE = "inconclusive", _("inconclusive")
    INFEASIBLE = "infeasible", _("infeasible")
    EXPIRED = "expired", _("expired")


class Action(models.Model):
    """A change of knobs on one engine. All columns but state, version and outcome are fixed.

    `changes` maps knob → {"from", "to"}; `outcome` holds the verification's counts:
    {"before": {"good", "total"}, "after": {…}, "p_value", "looks", "sentence"}.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="actions")
    engine = models.ForeignKey(Engine, on_delete=models.CASCADE, related_name="actions")
    incident = models.ForeignKey(
        Incident, on_delete=models.SET_NULL, null=True, blank=True, related_name="actions"
    )
    cause = models.SlugField(max_length=60, blank=True)
    why = models.TextField(blank=True)
    changes = models.JSONField(default=dict)
    expected_config_version = models.BigIntegerField()
    idempotency_key = models.CharField(max_length=64, unique=True)
    actor = models.CharField(max_length=100, default="autopilot")
    ttl_s = models.FloatField(default=90)
    deadline = models.DateTimeField()
    state = models.CharField(max_length=16, choices=State.choices, default=State.PROPOSED)
    version = models.PositiveIntegerField(default=0)
    verdict = models.CharField(max_length=16, choices=Verdict.choices, blank=True)
    outcome = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField()
    applied_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["engine"],
                condition=models.Q(state__in=sorted(IN_FLIGHT)),
                name="one_action_in_flight_per_engine",
            )
        ]

    def __str__(self) -> str:
        steps = ", ".join(f"{k} {c['from']} → {c['to']}" for k, c in self.changes.items())
        return f"{steps} on {self.engine}"


class Transition(models.Model):
    """One step of an action; the ledger of who, when and why."""

    action = models.ForeignKey(Action, on_delete=models.CASCADE, related_name="transitions")
    from_state = models.CharField(max_length=16, blank=True)
    to_state = models.CharField(max_length=16, choices=State.choices)
    at = models.DateTimeField()
    actor = models.CharField(max_length=100)
    reason = models.TextField(blank=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.from_state or '∅'} → {self.to_state}"
