"""Serves again what was shed, once it may be served: on trial, undone if a promise breaks.

Shedding that helped is kept, and nothing bad is measured from then on: no incident would ever ask
for its end. So it is asked for here, a cool-down after the incident is over, and after each try
that did not last twice as long later: under load that stays, that is seldom. What the engine runs
decides, not how its shedding ended: one that could not be undone turns people away all the same.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime, timedelta

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Q

from controlplane.accounts.models import Tenant
from controlplane.actions.conflict import Conflict, make_way, trials_full
from controlplane.actions.knob import knobs
from controlplane.actions.ledger import begin
from controlplane.actions.models import Action, Mode, Priority, State
from controlplane.actions.policy import FAILED_STATES, NO_FAULT, node_stop, rules_of, undo_failed
from controlplane.actions.reconcile import DISPATCH_WITHIN
from controlplane.actions.selectors import action_in_flight
from controlplane.diagnosis.cause import SHED_BY_PRIORITY
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engine_state, engines_of

log = logging.getLogger(__name__)

WAIT_MAX = timedelta(days=1)
DOUBLINGS_MAX = 20
# Ways in which shedding may have come to stand: kept, or never undone.
STANDS = (State.VERIFIED, State.ROLLBACK_FAILED)
CAME_TO_NOTHING = (*FAILED_STATES, State.EXPIRED)


def release_due(*, tenant: Tenant, now: datetime) -> list[Action]:
    """Proposes to take back what was shed and is due; returns the new actions."""
    made = []
    for engine in engines_of(tenant):
        try:
            shed = standing(engine)
            if shed and _is_due(shed, now) and (release := _propose(shed, now)):
                made.append(release)
        except Exception:  # one engine in trouble does not stop the others
            log.exception("engine %s: the end of its shedding could not be proposed", engine.pk)
    return made


def standing(engine: Engine) -> Action | None:
    """The newest action of ours by which the engine turns requests away now; None when it turns
    nobody away, or someone else made it."""
    for slug, knob in knobs().items():
        value = engine.values.get(slug)
        if not knob.sheds or not isinstance(value, int) or value <= knob.minimum:
            continue
        rows = Action.objects.filter(
            engine=engine, priority=Priority.SAFETY, state__in=STANDS,
            **{f"changes__{slug}__to": value},
        ).exclude(undone_by__state=State.VERIFIED)  # fmt: skip
        shed = rows.select_related("incident").order_by("-ended_at").first()
        if shed is not None and not _moved_by_hand(engine, slug, shed):
            shed.engine = engine
            return shed
    return None


def _moved_by_hand(engine: Engine, slug: str, shed: Action) -> bool:
    """Whether someone set the value since, and so knows why it is what it is."""
    noted = engine.set_by.get(slug, {})
    by = str(noted.get("by", ""))
    if not by or by.startswith("trimtab"):
        return False
    return datetime.fromisoformat(noted["at"]) > (shed.applied_at or shed.created_at)


def _is_due(shed: Action, now: datetime) -> bool:
    engine, rules = shed.engine, rules_of(shed.engine)
    if rules.mode == Mode.OBSERVE or rules.frozen(now) or node_stop(engine):
        return False
    if undo_failed(engine):
        return False
    if engine_state(engine, now) != "ok" or action_in_flight(engine) or trials_full(engine, now):
        return False
    return not _burning(engine) and now >= _due_at(shed, rules.cool_down_harmful_s)


def _burning(engine: Engine) -> bool:
    """Whether a promise is broken there, and not for the shedding itself, which would never end."""
    open_ones = Incident.objects.filter(
        tenant=engine.tenant_id,
        objective__service=engine.service,
        scope__in=(engine.name, ""),
        state=Incident.State.OPEN,
    )
    newest = (incident.diagnoses.first() for incident in open_ones)
    return any(each is None or each.causes != {SHED_BY_PRIORITY} for each in newest)


def _due_at(shed: Action, cool_down_s: float) -> datetime:
    """A cool-down after the incident's end and the knob's last move, and twice as long after each
    try that came to nothing, or was kept and had to be shed again within a day."""
    assert shed.ended_at is not None
    tries = list(
        Action.objects.filter(
            Q(undoes=shed)
            | Q(state=State.VERIFIED, priority=Priority.TUNING, undoes__isnull=False)
            & Q(ended_at__gt=shed.ended_at - WAIT_MAX),
            engine=shed.engine_id,
        ).exclude(ended_at=None)
    )
    over_at = shed.incident.closed_at if shed.incident else None
    since = [shed.ended_at, *filter(None, [over_at]), *(t.ended_at for t in tries if t.ended_at)]
    doublings = min(sum(_did_not_last(t, shed) for t in tries), DOUBLINGS_MAX)
    wait_s = min(cool_down_s * 2.0**doublings, WAIT_MAX.total_seconds())
    return max(since) + timedelta(seconds=wait_s)


def _did_not_last(tried: Action, shed: Action) -> bool:
    """One that was superseded or frozen, or never begun, says nothing about the load."""
    withdrawn = tried.outcome.get("withdrawn")
    if tried.state == State.VERIFIED:
        # One kept later than this was shed is a step on the way down, and lasts.
        return bool(tried.ended_at and shed.ended_at and tried.ended_at < shed.ended_at)
    if withdrawn == "person":
        return True
    return tried.state in CAME_TO_NOTHING and withdrawn not in NO_FAULT


def _propose(shed: Action, now: datetime) -> Action | None:
    engine = shed.engine
    if engine.config_version is None:
        return None
    newest = shed.undone_by.order_by("-created_at").values_list("pk", flat=True).first()
    action = Action(
        tenant_id=shed.tenant_id,
        engine=engine,
        cause=shed.cause,
        why="what was shed is served again, on trial: the incident is over",
        changes={knob: {"from": c["to"], "to": c["from"]} for knob, c in shed.changes.items()},
        predicted={"sentence": "no promise breaks, as the load is expected to have gone down"},
        priority=Priority.TUNING,
        undoes=shed,
        expected_config_version=engine.config_version,
        # Which try it is says the one before it; their number falls as old ones are pruned.
        idempotency_key=hashlib.sha256(f"{shed.pk} {newest}".encode()).hexdigest(),
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
