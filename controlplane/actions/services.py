"""Proposes actions and drives them from facts: what agents answered and what readings say.

Start here, then reconcile.py (one step per state). Both are idempotent: whatever statement a kill
fell between, the next pass finds it out from the rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError

from controlplane.accounts.models import Tenant
from controlplane.actions.knob import Knob, knobs
from controlplane.actions.ledger import begin, transition
from controlplane.actions.models import IN_FLIGHT, Action, State
from controlplane.actions.reconcile import reconcile
from controlplane.actions.selectors import action_in_flight, actions_in_flight
from controlplane.diagnosis.cause import UNKNOWN
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.diagnosis.services import diagnosis_note
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engine_state, engines_of
from slo.models import Reading
from tracing.types import Reader, Signal

__all__ = ["action_propose", "actions_reconcile", "transition"]

log = logging.getLogger(__name__)

COOL_DOWN = timedelta(minutes=10)
DISPATCH_WITHIN = timedelta(seconds=30)
TRIAL_SHARE_MAX = 0.2  # of a service's engines, at least one (LOOP 3.4, invariant 5)
READING_WINDOWS_MAX = 4  # a reading older than this many windows is no ground to act on


def action_propose(
    *, incident: Incident, diagnosis: Diagnosis, engine: Engine | None, now: datetime
) -> Action | None:
    """An action for the diagnosis' first wish that may be granted; None with the reason noted.

    The reason is written to the diagnosis (`no_action`), so that the page says why nothing is
    done. The same diagnosis gives the same action, however often it is asked.
    """
    refusal = _refusal(incident, diagnosis, engine, now)
    if refusal is not None:
        diagnosis_note(diagnosis=diagnosis, no_action=refusal)
        return None
    assert engine is not None
    assert engine.config_version is not None
    choice = _choose(diagnosis, engine, now)
    if isinstance(choice, str):
        diagnosis_note(diagnosis=diagnosis, no_action=choice)
        return None
    knob, target, why = choice
    changes = {knob.slug: {"from": engine.values[knob.slug], "to": target}}
    action = Action(
        tenant_id=incident.tenant_id,
        engine=engine,
        incident=incident,
        cause=diagnosis.cause,
        why=why,
        changes=changes,
        expected_config_version=engine.config_version,
        idempotency_key=_key(engine, changes, diagnosis),
        ttl_s=_ttl_s(diagnosis),
        deadline=now + DISPATCH_WITHIN,
        created_at=now,
    )
    try:
        begin(action, reason=why)
    except IntegrityError:
        # Either this very action exists already, or another one won the engine meanwhile.
        return Action.objects.filter(idempotency_key=action.idempotency_key).first()
    diagnosis_note(diagnosis=diagnosis, no_action="")
    return action


def actions_reconcile(*, tenant: Tenant, reader: Reader, now: datetime) -> list[Action]:
    """Drives every action in flight as far as the facts carry it; returns those that moved."""
    moved = []
    for action in actions_in_flight(tenant):
        try:
            if reconcile(action, reader=reader, now=now):
                moved.append(action)
        except Exception:  # one action in trouble does not stop the others
            log.exception("action %s: could not be driven", action.pk)
    return moved


def _refusal(
    incident: Incident, diagnosis: Diagnosis, engine: Engine | None, now: datetime
) -> str | None:
    """Why nothing may be done now, whatever the wish; None when something may."""
    if diagnosis.cause == UNKNOWN:
        return "the cause is not known, so nothing is changed"
    if not diagnosis.remedy:
        return str(diagnosis.facts.get("no_action") or "the cause has no remedy to try")
    if engine is None:
        return "no agent reads this engine, so nothing can be changed"
    state = engine_state(engine, now)
    if state != "ok" or engine.config_version is None:
        return f"engine {engine.name} is {state}: nothing is changed on a guess"
    if incident.good_windows or not _reading_is_fresh(incident, now):
        return "the newest windows are not bad, or nothing was measured: nothing is changed"
    busy = action_in_flight(engine)
    if busy is not None:
        return f"another action is in flight on {engine.name}: {busy}"
    return _trials_full(engine, now)


def _trials_full(engine: Engine, now: datetime) -> str | None:
    """Why no further engine of the service may be in trial; only engines that serve are peers."""
    peers = [e for e in engines_of(engine.tenant, engine.service) if engine_state(e, now) == "ok"]
    trials = (
        Action.objects.filter(
            tenant=engine.tenant_id, engine__service=engine.service, state__in=IN_FLIGHT
        )
        .exclude(state=State.PROPOSED, deadline__lt=now)  # it only stands, for a person to take
        .count()
    )
    if trials < max(1, int(TRIAL_SHARE_MAX * len(peers))):
        return None
    return f"engines of {engine.service} in trial already: {trials} of {len(peers)}"


def _reading_is_fresh(incident: Incident, now: datetime) -> bool:
    """Whether what was measured last is recent and has events. Data may come a window late."""
    newest = (
        Reading.objects.filter(
            objective=incident.objective,
            scope=incident.scope,
            signal__in=(Signal.OK, Signal.NO_TRAFFIC),
        )
        .order_by("-window_end")
        .first()
    )
    if newest is None or newest.signal != Signal.OK:
        return False
    return now - newest.window_end <= timedelta(seconds=READING_WINDOWS_MAX * newest.window_s)


def _choose(diagnosis: Diagnosis, engine: Engine, now: datetime) -> tuple[Knob, int, str] | str:
    """The first wish that can be granted, or why none can."""
    reasons = []
    recent = list(Action.objects.filter(engine=engine, ended_at__gte=now - COOL_DOWN))
    for wish in diagnosis.remedy:
        knob = knobs().get(wish["knob"])
        granted = _grant(knob, wish, engine, recent) if knob else f"no knob {wish['knob']!r}"
        if isinstance(granted, str):
            reasons.append(granted)
            continue
        assert knob is not None
        return knob, granted, wish["why"]
    return "; ".join(reasons)


def _grant(
    knob: Knob, wish: Mapping[str, Any], engine: Engine, recent: Sequence[Action]
) -> int | str:
    """The value to set, or why the wish is refused."""
    current, reported = engine.values.get(knob.slug), engine.knobs.get(knob.slug)
    if not isinstance(current, int | float) or reported is None:
        return f"{engine.name} has no {knob.slug}"
    if reported.get("apply_class", knob.apply_class) != "hot":
        return f"{knob.slug} cannot be changed while {engine.name} serves"
    low, high = knob.bounds(reported)
    up = wish["to"] > current
    if wish.get("limit") is not None:
        low, high = (low, min(high, wish["limit"])) if up else (max(low, wish["limit"]), high)
    target = knob.step(current, wish["to"], bounds=(low, high))
    if target is None:
        way = "above" if up else "below"
        return f"{knob.slug} is {current}, and there is no step {way} it within {low:g} to {high:g}"
    for action in recent:
        change = action.changes.get(knob.slug)
        if change is None:
            continue
        same_way = (change["to"] > change["from"]) == up
        if same_way and action.state in (State.ROLLED_BACK, State.ROLLBACK_FAILED, State.FAILED):
            return f"{knob.slug} was just tried this way and not kept; waiting {_minutes()} min"
        if not same_way and action.state == State.VERIFIED:
            return f"{knob.slug} was just moved the other way; not turned back for {_minutes()} min"
    return target


def _ttl_s(diagnosis: Diagnosis) -> float:
    """The default, and the time the queue of now takes to drain: until then nothing is to be seen.

    At most twice the default.
    """
    drain_s = float(diagnosis.facts.get("drain_s") or 0.0)
    default_s = settings.TRIMTAB_ACTION_TTL_S
    return float(default_s + min(max(0.0, drain_s), default_s))


def _minutes() -> int:
    return int(COOL_DOWN.total_seconds() // 60)


def _key(engine: Engine, changes: Mapping[str, Any], diagnosis: Diagnosis) -> str:
    parts = [str(engine.pk), engine.config_version, changes, str(diagnosis.pk)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
