"""Actions: a change of knobs with its undo, every step it went through, and who may start one."""

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
    VERIFIED = "verified", _("kept")
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
# In flight and no longer only a proposal: it has the engine to itself.
UNDER_WAY = IN_FLIGHT - {State.PROPOSED}


class Priority(models.IntegerChoices):
    """Who goes first on an engine. An undo under way ranks as ROLLBACK, whosever it is."""

    TUNING = 10, _("tuning")
    REPAIR = 20, _("repair")
    SAFETY = 30, _("safety")
    ROLLBACK = 40, _("rollback")
    PERSON = 50, _("person")


class Verdict(models.TextChoices):
    BETTER = "better", _("better")
    NO_WORSE = "no_worse", _("no worse")
    WORSE = "worse", _("worse")
    INCONCLUSIVE = "inconclusive", _("inconclusive")
    INFEASIBLE = "infeasible", _("infeasible")
    EXPIRED = "expired", _("expired")


class Action(models.Model):
    """A change of knobs on one engine. What it is to do is fixed; state and outcome move.

    `changes` maps knob → {"from", "to"}; `outcome` holds the verification's counts:
    {"before": {"good", "total"}, "after": {…}, "unit", "p_value", "looks", "sentence", "price"},
    where the unit is slo.indicator's, the price what other promises lost, [{"objective", "before",
    "after", "budget"}] in bad shares, and `withdrawn` ("person", "superseded", "frozen") when it
    was ended before it was judged.
    `predicted` is what was expected of it: {"sentence", "wanted", "covered", "bad_share_max",
    "facts"}.

    `trial` false: kept without being judged, at a person's word. `supersedes` had the engine and is
    undone first; `undoes` was kept and is taken back by this one. `overridden` says who set a knob
    of a kept change anew, {"knob", "value", "by", "at"}: it stands while that is empty.
    `cleared_at` is when a person had looked at an undo that failed.
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
    predicted = models.JSONField(default=dict, blank=True)
    priority = models.PositiveSmallIntegerField(choices=Priority.choices, default=Priority.REPAIR)
    trial = models.BooleanField(default=True)
    supersedes = models.ForeignKey(
        "self", on_delete=models.SET_NULL, null=True, blank=True, related_name="superseded_by"
    )
    undoes = models.ForeignKey(
        "self", on_delete=models.SET_NULL, null=True, blank=True, related_name="undone_by"
    )
    expected_config_version = models.BigIntegerField()
    idempotency_key = models.CharField(max_length=64, unique=True)
    actor = models.CharField(max_length=200, default="autopilot")
    ttl_s = models.FloatField(default=90)
    deadline = models.DateTimeField()
    state = models.CharField(max_length=16, choices=State.choices, default=State.PROPOSED)
    version = models.PositiveIntegerField(default=0)
    verdict = models.CharField(max_length=16, choices=Verdict.choices, blank=True)
    outcome = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField()
    applied_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    overridden = models.JSONField(default=dict, blank=True)
    cleared_at = models.DateTimeField(null=True, blank=True)
    cleared_by = models.CharField(max_length=200, blank=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["engine"],
                condition=models.Q(state__in=sorted(UNDER_WAY)),
                name="one_action_in_flight_per_engine",
            ),
            # One may wait for a person, or for the undo of what it supersedes; never a queue.
            models.UniqueConstraint(
                fields=["engine"],
                condition=models.Q(state=State.PROPOSED),
                name="one_proposal_per_engine",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.steps} on {self.engine}"

    @property
    def steps(self) -> str:
        """Each knob with what it was and what it becomes."""
        return ", ".join(f"{k} {c['from']} → {c['to']}" for k, c in self.changes.items())

    @property
    def holds(self) -> bool:
        """Whether its undo failed, and the autopilot waits for a person to look at the engine."""
        return self.state == State.ROLLBACK_FAILED and self.cleared_at is None

    @property
    def rank(self) -> int:
        """Its priority against others that want the same engine."""
        if self.state == State.ROLLING_BACK:
            return Priority.ROLLBACK
        return self.priority


class Transition(models.Model):
    """One step of an action; the ledger of who, when and why."""

    action = models.ForeignKey(Action, on_delete=models.CASCADE, related_name="transitions")
    from_state = models.CharField(max_length=16, blank=True)
    to_state = models.CharField(max_length=16, choices=State.choices)
    at = models.DateTimeField()
    actor = models.CharField(max_length=200)
    reason = models.TextField(blank=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.from_state or '∅'} → {self.to_state}"


class Mode(models.TextChoices):
    """What the autopilot may do by itself, from least to most."""

    OBSERVE = "observe", _("observe: explain and tell, propose nothing")
    PROPOSE = "propose", _("propose: write down what it would change, for a person to take up")
    APPROVE = "approve", _("approve: ask a person in the message, and act on a yes")
    AUTO = "auto", _("auto: act, prove it, undo what is not proved")


class Policy(models.Model):
    """What may be done to one scope: a tenant (both names empty), a service, or an engine.

    Empty columns say "as the wider scope has it"; actions.policy puts them together. `bounds` maps
    knob → {"minimum", "maximum"} or {"choices"}; `quiet_hours` is {"from", "until", "days",
    "time_zone"}. `frozen_at` without `freeze_until`: frozen until somebody lifts it.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="policies")
    service = models.CharField(max_length=100, blank=True)
    engine = models.CharField(max_length=100, blank=True)
    mode = models.CharField(max_length=10, choices=Mode.choices, blank=True)
    cool_down_harmful_s = models.PositiveIntegerField(null=True, blank=True)
    cool_down_unproven_s = models.PositiveIntegerField(null=True, blank=True)
    bounds = models.JSONField(default=dict, blank=True)
    steps_max = models.PositiveSmallIntegerField(null=True, blank=True)
    barrier = models.BooleanField(null=True, blank=True)
    failures_per_hour_max = models.PositiveSmallIntegerField(null=True, blank=True)
    quiet_hours = models.JSONField(null=True, blank=True)
    frozen_at = models.DateTimeField(null=True, blank=True)
    freeze_until = models.DateTimeField(null=True, blank=True)
    freeze_reason = models.CharField(max_length=200, blank=True)
    frozen_by = models.CharField(max_length=200, blank=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["service", "engine"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "service", "engine"], name="one_policy_per_scope"
            )
        ]

    def __str__(self) -> str:
        if self.engine:
            return f"engine {self.engine}"
        return f"service {self.service}" if self.service else "the tenant"


class LinkUse(models.Model):
    """A link of a chat message that was used; its digest is here once, so it works once."""

    digest = models.CharField(max_length=64, unique=True)
    action = models.ForeignKey(Action, on_delete=models.CASCADE, related_name="link_uses")
    verb = models.CharField(max_length=10)
    actor = models.CharField(max_length=200)
    at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.verb} {self.action_id} by {self.actor}"
