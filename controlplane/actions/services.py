"""Proposes actions and drives them from facts: what agents answered and what readings say.

Start here, then reconcile.py (one step per state), undo.py and orders.py (what persons do). All are
idempotent: whatever statement a kill fell between, the next pass finds it out from the rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction

from controlplane.accounts.models import Tenant
from controlplane.actions.conflict import Conflict, make_way, trials_full, values_after
from controlplane.actions.grant import Granted, Waits, choose
from controlplane.actions.knob import knobs
from controlplane.actions.ledger import begin
from controlplane.actions.models import UNDER_WAY, Action, Mode, Priority
from controlplane.actions.policy import (
    Rules,
    node_stop,
    rules_of,
    undo_failed,
    waits_for_person,
)
from controlplane.actions.reconcile import DISPATCH_WITHIN, TTL_TIMES_MAX, reconcile
from controlplane.actions.release import release_due
from controlplane.actions.selectors import action_in_flight, actions_in_flight
from controlplane.actions.standing import overridden_note
from controlplane.diagnosis.cause import UNKNOWN
from controlplane.diagnosis.explaining import diagnosis_note
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engine_state
from slo.models import Reading
from tracing.types import Reader, Signal

__all__ = ["action_propose", "actions_reconcile"]

log = logging.getLogger(__name__)

READING_WINDOWS_MAX = 4  # a reading older than this many windows is no ground to act on


def action_propose(
    *, incident: Incident, diagnosis: Diagnosis, engine: Engine | None, now: datetime
) -> Action | None:
    """An action for the diagnosis' first wish that may be granted; None with the reason noted.

    The reason is written to the diagnosis (`no_action`), so that the page says why nothing is
    done. The same diagnosis gives the same action, however often it is asked.
    """
    action = _proposal(incident, diagnosis, engine, now)
    if isinstance(action, str):
        until = action.until if isinstance(action, Waits) else None
        diagnosis_note(diagnosis=diagnosis, no_action=action, next_try_at=until)
        return None
    try:
        with transaction.atomic():
            make_way(action, now=now)
            begin(action, reason=action.why)
    except Conflict as conflict:
        diagnosis_note(diagnosis=diagnosis, no_action=str(conflict))
        return None
    except IntegrityError:
        # Either this very action exists already, or another one won the engine meanwhile.
        return Action.objects.filter(idempotency_key=action.idempotency_key).first()
    diagnosis_note(diagnosis=diagnosis, no_action="")
    return action


def actions_reconcile(*, tenant: Tenant, reader: Reader, now: datetime) -> list[Action]:
    """Drives every action in flight as far as the facts carry it; returns those that moved.

    Proposes first what nobody else would ask for: to serve again what was shed. What was kept and
    set to something else since is noted.
    """
    overridden_note(tenant, now)
    moved = release_due(tenant=tenant, now=now)
    for action in actions_in_flight(tenant):
        try:
            if reconcile(action, reader=reader, now=now):
                moved.append(action)
        except Exception:  # one action in trouble does not stop the others
            log.exception("action %s: could not be driven", action.pk)
    return moved


def _proposal(
    incident: Incident, diagnosis: Diagnosis, engine: Engine | None, now: datetime
) -> Action | str:
    """The action to propose, not stored yet, or why there is none."""
    refusal = _refusal(incident, diagnosis, engine, now)
    if refusal is not None:
        return refusal
    assert engine is not None
    assert engine.config_version is not None
    rules = rules_of(engine)
    if forbidden := _forbidden(engine, rules, now):
        return forbidden
    busy = action_in_flight(engine)
    sheds = any(k.sheds for wish in diagnosis.remedy if (k := knobs().get(wish["knob"])))
    if busy is not None and busy.rank >= (Priority.SAFETY if sheds else Priority.REPAIR):
        return str(Conflict(busy))
    # While another repair is tried only shedding may come between; other wishes are for later.
    only_shedding = busy is not None and busy.rank >= Priority.REPAIR
    if full := trials_full(engine, now, but=busy):
        return full
    granted = choose(diagnosis, engine, rules, now, shedding=only_shedding)
    if isinstance(granted, str):
        return granted
    if busy is not None and values_after(engine)[granted.knob.slug] == granted.value:
        return f"{Conflict(busy)}; undoing it is all that is wished for"
    action = _action(incident, diagnosis, engine, granted, now)
    waits = waits_for_person(action, rules, now)
    if busy is not None and busy.state in UNDER_WAY and waits:
        # What a person has to decide must not take a running trial's place by itself.
        return f"{Conflict(busy)}; {waits}"
    return action


def _refusal(
    incident: Incident, diagnosis: Diagnosis, engine: Engine | None, now: datetime
) -> str | None:
    """Why nothing may be done now, whatever the wish and the policy; None when something may."""
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
    return None


def _forbidden(engine: Engine, rules: Rules, now: datetime) -> str:
    if rules.mode == Mode.OBSERVE:
        return f"{rules.origin['mode']} says observe: nothing is proposed"
    return rules.frozen(now) or node_stop(engine) or undo_failed(engine)


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


def _action(
    incident: Incident, diagnosis: Diagnosis, engine: Engine, granted: Granted, now: datetime
) -> Action:
    slug = granted.knob.slug
    changes = {slug: {"from": values_after(engine)[slug], "to": granted.value}}
    assert engine.config_version is not None
    return Action(
        tenant_id=incident.tenant_id,
        engine=engine,
        incident=incident,
        cause=granted.cause,
        why=granted.why,
        changes=changes,
        predicted=granted.predicted,
        priority=Priority.SAFETY if granted.knob.sheds else Priority.REPAIR,
        expected_config_version=engine.config_version,
        idempotency_key=_key(engine, changes, diagnosis),
        ttl_s=_ttl_s(diagnosis),
        deadline=now + DISPATCH_WITHIN,
        created_at=now,
    )


def _ttl_s(diagnosis: Diagnosis) -> float:
    """The default, and the time the queue of now takes to drain: until then nothing is to be seen.

    At most TTL_TIMES_MAX times the default.
    """
    drain_s = float(diagnosis.facts.get("drain_s") or 0.0)
    default_s = settings.TRIMTAB_ACTION_TTL_S
    return float(min(default_s + max(0.0, drain_s), TTL_TIMES_MAX * default_s))


def _key(engine: Engine, changes: Mapping[str, Any], diagnosis: Diagnosis) -> str:
    parts = [str(engine.pk), engine.config_version, changes, str(diagnosis.pk)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
