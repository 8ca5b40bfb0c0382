"""Serves again what was shed, once it may be served: on trial, undone if a promise breaks.

Shedding that helped is kept, and nothing bad is measured from then on: no incident would ever ask
for its end. So it is asked for here, a cool-down after the incident is over, and after each try
that came to nothing twice as long later: under load that stays, that is seldom.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.db import IntegrityError, transaction

from controlplane.accounts.models import Tenant
from controlplane.actions.conflict import Conflict, make_way, trials_full
from controlplane.actions.ledger import begin
from controlplane.actions.models import IN_FLIGHT, Action, Mode, Priority, State
from controlplane.actions.policy import node_stop, rules_of
from controlplane.actions.reconcile import DISPATCH_WITHIN
from controlplane.actions.selectors import action_in_flight
from controlplane.diagnosis.models import Incident
from controlplane.fleet.selectors import engine_state

log = logging.getLogger(__name__)

KEPT_PER_PASS_MAX = 100
WAIT_MAX = timedelta(days=1)


def release_due(*, tenant: Tenant, now: datetime) -> list[Action]:
    """Proposes to take back what was shed and is due; returns the new actions."""
    kept = (
        Action.objects.filter(tenant=tenant, priority=Priority.SAFETY, state=State.VERIFIED)
        .exclude(undone_by__state__in=[*IN_FLIGHT, State.VERIFIED])
        .select_related("engine__node", "engine__tenant", "incident", "tenant")
        .order_by("-ended_at")[:KEPT_PER_PASS_MAX]
    )
    made = []
    for action in kept:
        try:
            if _is_due(action, now) and (release := _propose(action, now)):
                made.append(release)
        except Exception:  # one action in trouble does not stop the others
            log.exception("action %s: its end could not be proposed", action.pk)
    return made


def _is_due(kept: Action, now: datetime) -> bool:
    engine, rules = kept.engine, rules_of(kept.engine)
    if any(engine.values.get(knob) != change["to"] for knob, change in kept.changes.items()):
        return False  # someone else has moved it since, and knows why
    if rules.mode == Mode.OBSERVE or rules.frozen(now) or node_stop(engine):
        return False
    if engine_state(engine, now) != "ok" or action_in_flight(engine) or trials_full(engine, now):
        return False
    burning = Incident.objects.filter(
        tenant=kept.tenant_id,
        objective__service=engine.service,
        scope__in=(engine.name, ""),
        state=Incident.State.OPEN,
    )
    return not burning.exists() and now >= _due_at(kept, rules.cool_down_harmful_s)


def _due_at(kept: Action, cool_down_s: float) -> datetime:
    """A cool-down after the incident's end, and twice as long after each try that failed."""
    assert kept.ended_at is not None
    tried = list(kept.undone_by.exclude(ended_at=None).order_by("ended_at"))
    over_at = kept.incident.closed_at if kept.incident else None
    since = [kept.ended_at, *filter(None, [over_at]), *(t.ended_at for t in tried if t.ended_at)]
    wait_s = min(cool_down_s * 2.0 ** len(tried), WAIT_MAX.total_seconds())
    return max(since) + timedelta(seconds=wait_s)


def _propose(kept: Action, now: datetime) -> Action | None:
    engine, tries = kept.engine, kept.undone_by.count()
    if engine.config_version is None:
        return None
    action = Action(
        tenant_id=kept.tenant_id,
        engine=engine,
        cause=kept.cause,
        why="what was shed is served again, on trial: the incident is over",
        changes={knob: {"from": c["to"], "to": c["from"]} for knob, c in kept.changes.items()},
        predicted={"sentence": "no promise breaks, as the load is expected to have gone down"},
        priority=Priority.TUNING,
        undoes=kept,
        expected_config_version=engine.config_version,
        idempotency_key=hashlib.sha256(f"{kept.pk} {tries}".encode()).hexdigest(),
        ttl_s=settings.TRIMTAB_ACTION_TTL_S,
        deadline=now + DISPATCH_WITHIN,
        created_at=now,
    )
    try:
        with transaction.atomic():
            make_way(action, now=now)
            begin(action, reason=action.why)
    except (Conflict, IntegrityError):
        return None  # another one was quicker
    return action
