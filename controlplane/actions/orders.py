"""What persons order: approve, reject, roll back, clear, and changes of their own.

A person's word goes the same way as the autopilot's: through the ledger, the agent's journal and
its revert timer. It outranks every other (conflict.py), but not a freeze, the engine's bounds or a
node's stop file.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils.translation import gettext_noop as _

from controlplane.accounts import audit
from controlplane.actions.conflict import Conflict, make_way, trials_full, values_after
from controlplane.actions.grant import value_refusal
from controlplane.actions.knob import knobs
from controlplane.actions.ledger import begin, begin_lost, note, transition
from controlplane.actions.models import UNDER_WAY, Action, Priority, State
from controlplane.actions.policy import node_stop, rules_of
from controlplane.actions.reconcile import (
    DISPATCH_WITHIN,
    TTL_TIMES_MAX,
    out_of_bounds,
    overtaken_by,
)
from controlplane.actions.undo import CannotUndo, withdraw
from controlplane.actions.words import Words
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engine_state

MOVED_ON = _("someone was quicker: %(action)s has moved on meanwhile")
KNOBS_PER_ORDER_MAX = 8
REASON_CHARS_MAX = 200


class OrderError(Exception):
    """Why an order cannot be carried out, in English; `words` may be shown in other languages.

    `code`: invalid, conflict or forbidden; `param` names the field at fault, if it is one's.
    """

    def __init__(self, code: str, words: str, param: str | None = None) -> None:
        super().__init__(str(words))
        self.code, self.words, self.param = code, words, param


# What a person may do with an action, by its state.
VERBS_OPEN: dict[str, tuple[str, ...]] = {
    State.PROPOSED: ("approve", "reject"),
    State.APPROVED: ("reject",),
    State.DISPATCHED: ("rollback",),
    State.ACKNOWLEDGED: ("rollback",),
    State.APPLIED: ("rollback",),
    State.VERIFYING: ("rollback",),
    State.VERIFIED: ("rollback",),
    State.ROLLBACK_FAILED: ("clear",),
}


def verbs_open(action: Action) -> tuple[str, ...]:
    """What a person may do with the action now; it may still be refused for a reason of then."""
    verbs = VERBS_OPEN.get(action.state, ())
    if action.overridden:  # there is nothing left to take back
        return ()
    if action.state == State.ROLLBACK_FAILED and not action.holds:
        return ()
    if action.priority == Priority.PERSON:  # it waits for an undo, not for a word
        return tuple(verb for verb in verbs if verb != "approve")
    return verbs


def action_approve(*, action: Action, actor: str, now: datetime) -> Action:
    """Starts what was proposed. Raises OrderError when it is not, or no longer, to be started.

    How long the queue has grown while it waited for a word nobody knows: it gets the longest time.
    """
    if action.state != State.PROPOSED or action.priority == Priority.PERSON:
        told = _("%(action)s does not wait for a person: it is %(state)s")
        raise OrderError("conflict", _about(action, told))
    engine = action.engine
    if overtaken := overtaken_by(action) or out_of_bounds(action):
        raise OrderError("conflict", overtaken)
    _may_change(engine, now)
    running = Action.objects.filter(engine=engine, state__in=UNDER_WAY).first()
    if running is not None:
        raise OrderError("conflict", Conflict(running).words)
    if full := trials_full(engine, now, but=action):
        raise OrderError("conflict", full)
    columns = {"deadline": now + DISPATCH_WITHIN, "ttl_s": _ttl_s_max()}
    reason = f"approved by {actor}"
    if not transition(action, State.APPROVED, actor=actor, reason=reason, at=now, **columns):
        raise OrderError("conflict", _about(action, MOVED_ON))
    return action


def action_reject(*, action: Action, actor: str, now: datetime, reason: str = "") -> Action:
    """Turns down what has not begun. It is not proposed again for the longer cool-down.

    Raises OrderError when it has begun; then it can be rolled back.
    """
    if action.state not in (State.PROPOSED, State.APPROVED):
        told = _("%(action)s cannot be rejected: it is %(state)s")
        raise OrderError("conflict", _about(action, told))
    _withdraw(action, _because(f"rejected by {actor}", reason), actor, now)
    return action


def action_rollback(*, action: Action, actor: str, now: datetime, reason: str = "") -> Action:
    """Takes a change back; returns the action that does: itself, or a new one for a kept change.

    Rejected if it has not begun, undone if it is on trial. Raises OrderError when there is nothing
    to take back, or the engine runs something else by now.
    """
    why = _because(f"rolled back by {actor}", reason)
    if action.overridden:
        told = _("%(action)s stands no more: %(knob)s was set to %(value)s since")
        raise OrderError("conflict", Words(told, action=str(action), **action.overridden))
    if action.state == State.VERIFIED:
        return _take_back(action, actor, why, now)
    _withdraw(action, why, actor, now)
    return action


def action_clear(*, action: Action, actor: str, now: datetime, reason: str = "") -> Action:
    """A person has looked at what could not be undone: the autopilot may go on there.

    Again: changes nothing. Raises OrderError when there is nothing to look at.
    """
    if action.state != State.ROLLBACK_FAILED:
        told = _("%(action)s holds nobody up: it is %(state)s")
        raise OrderError("conflict", _about(action, told))
    if not action.holds:
        return action
    with transaction.atomic():
        if not note(action, cleared_at=now, cleared_by=actor):
            raise OrderError("conflict", _about(action, MOVED_ON))
        audit.record(
            tenant=action.tenant, actor=actor, verb="cleared", noun="action",
            subject=str(action.pk), detail={"what": str(action), "reason": reason}, at=now,
        )  # fmt: skip
    return action


def action_ask(
    *,
    engine: Engine,
    values: Mapping[str, Any],
    actor: str,
    now: datetime,
    trial: bool,
    why: str = "",
    expected_config_version: int | None = None,
    key: str = "",
) -> Action:
    """A person's change of knobs: on trial, or kept at once.

    What is in flight on the engine steps aside: a proposal is rejected, a trial undone first. On
    trial, the change is judged like any other when the engine has an open incident (kept if
    better), else kept unless an objective gets worse. The same `key` gives the same action. Raises
    OrderError; one that lost to another person's action is in the ledger as rejected.
    """
    digest = hashlib.sha256(f"{engine.tenant_id}/{key or uuid.uuid4()}".encode()).hexdigest()
    if key and (known := Action.objects.filter(idempotency_key=digest).first()):
        return known
    _may_change(engine, now)
    if frozen := rules_of(engine).frozen(now):
        raise OrderError("forbidden", frozen)
    version = engine.config_version
    if expected_config_version is not None and expected_config_version != version:
        words = Words(
            _("%(engine)s is at configuration %(version)s, not %(wanted)s"),
            engine=engine.name, version=version, wanted=expected_config_version,
        )  # fmt: skip
        raise OrderError("conflict", words, "expected_config_version")
    changes = _changes(engine, values)
    if trial and (full := trials_full(engine, now, but=_running(engine))):
        raise OrderError("conflict", full)
    action = _order(engine, changes, actor, why or f"asked for by {actor}", now, trial=trial)
    action.idempotency_key = digest
    action.incident = _open_incident(engine) if trial else None
    if action.incident is not None:
        action.ttl_s = _ttl_s_max()
    return _begin(action, now)


def _take_back(kept: Action, actor: str, why: str, now: datetime) -> Action:
    engine = kept.engine
    engine.refresh_from_db()
    _may_change(engine, now)
    values = values_after(engine)
    for knob, change in kept.changes.items():
        if values.get(knob) != change["to"]:
            words = Words(
                _(
                    "%(action)s cannot be taken back: %(knob)s is %(value)s on %(engine)s by now, "
                    "not %(wanted)s"
                ),
                action=str(kept), knob=knob, value=values.get(knob), engine=engine.name,
                wanted=change["to"],
            )  # fmt: skip
            raise OrderError("conflict", words)
    changes = {knob: {"from": c["to"], "to": c["from"]} for knob, c in kept.changes.items()}
    action = _order(engine, changes, actor, why, now, trial=False)
    action.incident, action.undoes = kept.incident, kept
    return _begin(action, now)


def _order(
    engine: Engine, changes: dict[str, Any], actor: str, why: str, now: datetime, *, trial: bool
) -> Action:
    assert engine.config_version is not None
    return Action(
        tenant_id=engine.tenant_id,
        engine=engine,
        why=why,
        changes=changes,
        priority=Priority.PERSON,
        trial=trial,
        actor=actor,
        expected_config_version=engine.config_version,
        idempotency_key=hashlib.sha256(uuid.uuid4().bytes).hexdigest(),
        ttl_s=settings.TRIMTAB_ACTION_TTL_S,
        deadline=now + DISPATCH_WITHIN,
        created_at=now,
    )


def _begin(action: Action, now: datetime) -> Action:
    try:
        with transaction.atomic():
            make_way(action, now=now)
            begin(action, reason=action.why)
    except Conflict as conflict:
        if conflict.other.idempotency_key == action.idempotency_key:
            return conflict.other  # sent twice at once
        # The key stays free: asked again later, the order is not the one that lost.
        action.idempotency_key = hashlib.sha256(uuid.uuid4().bytes).hexdigest()
        begin_lost(action, reason=str(conflict))
        raise OrderError("conflict", conflict.words) from None
    except IntegrityError:
        words = Words(_("someone was quicker on %(engine)s"), engine=action.engine.name)
        raise OrderError("conflict", words) from None
    return action


def _changes(engine: Engine, values: Mapping[str, Any]) -> dict[str, Any]:
    if not 0 < len(values) <= KNOBS_PER_ORDER_MAX:
        told = _("values: got %(count)d knobs, allowed: 1 to %(most)d")
        words = Words(told, count=len(values), most=KNOBS_PER_ORDER_MAX)
        raise OrderError("invalid", words, "values")
    rules, running = rules_of(engine), values_after(engine)
    for slug, value in values.items():
        if refusal := value_refusal(knobs().get(slug), slug, value, engine, rules):
            raise OrderError("invalid", refusal, f"values.{slug}")
    changed = {k: {"from": running[k], "to": v} for k, v in values.items() if running[k] != v}
    if not changed:
        words = Words(_("%(engine)s runs these values already"), engine=engine.name)
        raise OrderError("invalid", words, "values")
    return changed


def _may_change(engine: Engine, now: datetime) -> None:
    state = engine_state(engine, now)
    if state != "ok" or engine.config_version is None:
        told = _("engine %(engine)s is %(state)s: no change would arrive")
        raise OrderError("conflict", Words(told, engine=engine.name, state=state))
    if stopped := node_stop(engine):
        raise OrderError("forbidden", stopped)


def _ttl_s_max() -> float:
    return float(TTL_TIMES_MAX * settings.TRIMTAB_ACTION_TTL_S)


def _withdraw(action: Action, why: str, actor: str, now: datetime) -> None:
    try:
        moved = withdraw(action, why, by="person", actor=actor, now=now)
    except CannotUndo as error:
        raise OrderError("conflict", error.words) from None
    if not moved:
        raise OrderError("conflict", _about(action, MOVED_ON))


def _running(engine: Engine) -> Action | None:
    return Action.objects.filter(engine=engine, state__in=UNDER_WAY).first()


def _open_incident(engine: Engine) -> Incident | None:
    return (
        Incident.objects.filter(
            tenant=engine.tenant_id,
            objective__service=engine.service,
            scope__in=(engine.name, ""),
            state=Incident.State.OPEN,
        )
        .order_by("opened_at")
        .first()
    )


def _because(what: str, reason: str) -> str:
    return f"{what}: {reason[:REASON_CHARS_MAX]}" if reason else what


def _about(action: Action, told: str) -> Words:
    return Words(told, action=str(action), state=State(action.state).label)
