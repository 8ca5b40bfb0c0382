"""What may be done to an engine, and when: the policies of its scopes, put together.

Column by column the narrowest scope that says something wins: engine, service, tenant, then the
defaults below. Two things are not up to the narrower scope: a freeze of any of them holds, and
TRIMTAB_AUTOPILOT=0 lets no scope go beyond `propose`. docs/policies.md argues the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext_noop as _

from controlplane.accounts.models import Tenant
from controlplane.actions.knob import STEPS_MAX, Knob
from controlplane.actions.models import Action, Mode, Policy, Priority, State
from controlplane.actions.words import Words
from controlplane.fleet.models import Engine

MODES: tuple[str, ...] = (Mode.OBSERVE, Mode.PROPOSE, Mode.APPROVE, Mode.AUTO)
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
FAILURES_WITHIN = timedelta(hours=1)
FAILED_STATES = (State.FAILED, State.ROLLED_BACK, State.ROLLBACK_FAILED)
# Ended for a reason that says nothing about the change itself.
NO_FAULT = ("superseded", "frozen")
COLUMNS = (
    "mode",
    "cool_down_harmful_s",
    "cool_down_unproven_s",
    "steps_max",
    "barrier",
    "failures_per_hour_max",
    "quiet_hours",
)


@dataclass(frozen=True)
class Rules:
    """The policy in force for one engine. `origin` names the scope each column came from."""

    mode: str = Mode.AUTO
    cool_down_harmful_s: float = 600
    cool_down_unproven_s: float = 180
    steps_max: int = STEPS_MAX
    barrier: bool = True
    failures_per_hour_max: int = 3
    quiet_hours: Mapping[str, Any] | None = None
    bounds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    freezes: tuple[Policy, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)

    def frozen(self, now: datetime) -> str:
        """Why nothing may be changed now, whoever asks; "" when it may."""
        return next((words for f in self.freezes if (words := freeze_words(f, now))), "")

    def quiet(self, now: datetime) -> str:
        """Until when the autopilot keeps its hands off; "" outside quiet hours."""
        if not self.quiet_hours:
            return ""
        zone = ZoneInfo(self.quiet_hours["time_zone"])
        here = now.astimezone(zone)
        begin, end = (time.fromisoformat(self.quiet_hours[k]) for k in ("from", "until"))
        days = self.quiet_hours.get("days") or DAYS
        for began in (here.date(), here.date() - timedelta(days=1)):
            last = began if begin < end else began + timedelta(days=1)
            start = datetime.combine(began, begin, zone)
            if DAYS[began.weekday()] in days and start <= here < datetime.combine(last, end, zone):
                told = _("quiet hours until %(end)s %(zone)s")
                return Words(told, end=f"{end:%H:%M}", zone=zone.key)
        return ""

    def knob_bounds(self, knob: Knob, reported: Mapping[str, Any]) -> tuple[float, float]:
        """The narrowest of the knob's, the engine's and the policy's."""
        low, high = knob.bounds(reported)
        own = self.bounds.get(knob.slug, {})
        return max(low, own.get("minimum", low)), min(high, own.get("maximum", high))

    def cool_down(self, ended: Action) -> timedelta:
        """How long the same change is not tried again after this one came to nothing.

        A change that did harm, failed, or was stopped by a person is a worse sign than one whose
        effect could not be seen in time.
        """
        seconds = self.cool_down_unproven_s if unproven(ended) else self.cool_down_harmful_s
        return timedelta(seconds=seconds)


def unproven(ended: Action) -> bool:
    """Undone for want of proof: it did no harm, and no person stopped it."""
    stopped = ended.outcome.get("withdrawn") == "person"
    return ended.state == State.ROLLED_BACK and ended.verdict != "worse" and not stopped


def rules_of(engine: Engine) -> Rules:
    """One query."""
    return rules_of_each([engine])[engine.pk]


def rules_of_each(engines: Sequence[Engine]) -> dict[UUID, Rules]:
    """By the engine's id; one query for all, which belong to one tenant."""
    rows = Policy.objects.filter(tenant__in={engine.tenant_id for engine in engines})
    widest_first = sorted(rows, key=lambda row: (bool(row.engine), bool(row.service)))
    return {
        engine.pk: _put_together([row for row in widest_first if _concerns(row, engine)])
        for engine in engines
    }


def _concerns(policy: Policy, engine: Engine) -> bool:
    scope = (policy.service, policy.engine)
    return scope in (("", ""), (engine.service, ""), ("", engine.name))


def freezes_of(tenant: Tenant, now: datetime) -> list[Policy]:
    """The tenant's policies with a freeze in force, widest scope first."""
    rows = Policy.objects.filter(tenant=tenant).exclude(frozen_at=None)
    return [row for row in rows.order_by("engine", "service") if freeze_words(row, now)]


def _put_together(widest_first: list[Policy]) -> Rules:
    chosen: dict[str, Any] = {}
    origin: dict[str, str] = {}
    bounds: dict[str, Mapping[str, Any]] = {}
    for row in widest_first:
        for column in COLUMNS:
            value = getattr(row, column)
            if value is not None and value != "":
                chosen[column], origin[column] = value, scope_words(row)
        for knob, bound in row.bounds.items():
            bounds[knob], origin[f"bounds.{knob}"] = bound, scope_words(row)
    freezes = tuple(row for row in widest_first if row.frozen_at is not None)
    rules = Rules(**chosen, bounds=bounds, freezes=freezes, origin=origin)
    if settings.TRIMTAB_AUTOPILOT or MODES.index(rules.mode) <= MODES.index(Mode.PROPOSE):
        return rules
    origin["mode"] = "TRIMTAB_AUTOPILOT=0"
    return Rules(**(chosen | {"mode": Mode.PROPOSE}), bounds=bounds, freezes=freezes, origin=origin)


def freeze_words(policy: Policy, now: datetime) -> str:
    """ "" when the policy's freeze is not, or no longer, in force."""
    if policy.frozen_at is None or (policy.freeze_until and now >= policy.freeze_until):
        return ""
    facts = {"scope": scope_words(policy), "by": policy.frozen_by, "reason": policy.freeze_reason}
    if policy.freeze_until is None:
        return Words(_("%(scope)s is frozen until it is lifted, by %(by)s: %(reason)s"), **facts)
    facts["until"] = f"{timezone.localtime(policy.freeze_until):%Y-%m-%d %H:%M %Z}"
    return Words(_("%(scope)s is frozen until %(until)s, by %(by)s: %(reason)s"), **facts)


def scope_words(policy: Policy) -> Words:
    """What the policy is about, as its `str`."""
    if policy.engine:
        return Words(_("engine %(name)s"), name=policy.engine)
    if policy.service:
        return Words(_("service %(name)s"), name=policy.service)
    return Words(_("the tenant"))


def node_stop(engine: Engine) -> str:
    """Why the engine's node lets nothing be changed; "" when it does."""
    if not engine.node.kill_switch:
        return ""
    told = _("the kill switch of node %(node)s is on: its stop file exists")
    return Words(told, node=engine.node.name)


def undo_failed(engine: Engine) -> str:
    """Why the autopilot leaves the engine alone: an undo failed there, so that it may run what
    nobody proved; "" once a person has looked."""
    return undo_failed_each([engine]).get(engine.pk, "")


def undo_failed_each(engines: Sequence[Engine]) -> dict[UUID, Words]:
    """By the id of those engines it is so of; one query for all."""
    rows = Action.objects.filter(engine__in=engines, state=State.ROLLBACK_FAILED, cleared_at=None)
    failed = rows.select_related("engine").order_by("ended_at")
    return {action.engine_id: undo_failed_words(action) for action in failed}


def undo_failed_words(action: Action) -> Words:
    """What holds the autopilot off the action's engine."""
    told = _("%(steps)s on %(engine)s could not be undone: the autopilot waits until a person has "
             "looked")  # fmt: skip
    return Words(told, steps=action.steps, engine=action.engine.name)


def waits_for_person(action: Action, rules: Rules, now: datetime) -> str:
    """Why the autopilot may not start this action by itself; "" when it may."""
    if rules.mode != Mode.AUTO:
        origin = rules.origin.get("mode", "the default")
        return f"{origin} says {rules.mode}: a person decides"
    if quiet := rules.quiet(now):
        return f"{quiet}: a person decides"
    if not rules.barrier and (held := _barrier_knobs(action)):
        return f"{', '.join(held)} holds up the engine while it is swapped: a person decides"
    failures = _failures(action.engine_id, now)
    if failures >= rules.failures_per_hour_max:
        return f"{failures} actions on this engine failed or were undone within an hour"
    return ""


def _failures(engine_id: UUID, now: datetime) -> int:
    """How many changes came to nothing within the hour. The end of shedding is no such change: it
    is tried for as long as the load stays, each time after twice the wait."""
    failed = Action.objects.filter(
        engine=engine_id, state__in=FAILED_STATES, ended_at__gte=now - FAILURES_WITHIN
    ).exclude(undoes__isnull=False, priority=Priority.TUNING)
    outcomes = failed.values_list("outcome", flat=True)
    return sum(outcome.get("withdrawn") not in NO_FAULT for outcome in outcomes)


def _barrier_knobs(action: Action) -> list[str]:
    reported = action.engine.knobs
    return [
        slug for slug in action.changes if reported.get(slug, {}).get("apply_class") == "barrier"
    ]
