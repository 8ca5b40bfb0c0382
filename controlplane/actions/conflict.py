"""Who goes first on an engine: person, then rollback, safety, repair, tuning.

The one with the lower rank is rejected with the other's id, or undone first if it runs already.
Nobody waits in a queue: what waits is at most one, for the undo of what it supersedes, and its
deadline ends that.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.utils.translation import gettext_noop as _

from controlplane.actions.models import IN_FLIGHT, UNDER_WAY, Action, Priority, State
from controlplane.actions.undo import CannotUndo, withdraw
from controlplane.actions.words import Words
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engine_state, engines_of

TRIAL_SHARE_MAX = 0.2  # of a service's engines, at least one (LOOP 3.4, invariant 5)
# An undo takes a sync, a change and a read back; one that takes longer has met trouble.
UNDO_WITHIN = timedelta(seconds=60)


class Conflict(Exception):
    """Another action has the engine and ranks no lower; `other` is that action, `words` say so."""

    def __init__(self, other: Action, more: str = "") -> None:
        words = Words(
            _("another action is in flight on %(engine)s: %(other)s (conflict=%(key)s)"),
            engine=other.engine.name, other=str(other), key=other.pk,
        )  # fmt: skip
        if more:
            words = Words(_("%(words)s; %(more)s"), words=words, more=more)
        super().__init__(str(words))
        self.other, self.words = other, words


def make_way(newcomer: Action, *, now: datetime) -> None:
    """Rejects or undoes what is in flight on the engine and ranks lower than `newcomer`.

    What runs already is undone first, and `newcomer` then `supersedes` it. Raises Conflict when one
    in flight ranks the same or higher, or can no longer be undone. To be called in a transaction.
    """
    in_flight = Action.objects.filter(engine=newcomer.engine_id, state__in=IN_FLIGHT)
    for other in in_flight.select_related("engine", "tenant"):
        if other.rank >= newcomer.priority:
            raise Conflict(other)
        if other.state != State.ROLLING_BACK:
            _step_aside(other, newcomer, now)
        if other.state == State.ROLLING_BACK:
            newcomer.supersedes = other
            newcomer.deadline = now + UNDO_WITHIN


def _step_aside(other: Action, newcomer: Action, now: datetime) -> None:
    why = Words(
        _("conflict=%(key)s: %(priority)s goes first: %(newcomer)s"),
        key=newcomer.pk, priority=Priority(newcomer.priority).label, newcomer=str(newcomer),
    )  # fmt: skip
    try:
        moved = withdraw(other, why, by="superseded", actor=newcomer.actor, now=now)
    except CannotUndo as error:
        raise Conflict(other, error.words) from None
    if not moved:
        raise Conflict(other, Words(_("it has just moved on; ask again")))


def values_after(engine: Engine) -> dict[str, Any]:
    """What the engine will run once a trial under way on it has been undone."""
    values = dict(engine.values)
    for action in Action.objects.filter(engine=engine, state__in=UNDER_WAY):
        values |= {knob: change["from"] for knob, change in action.changes.items()}
    return values


def trials_full(engine: Engine, now: datetime, *, but: Action | None = None) -> str:
    """Why no further engine of the service may be in trial; only engines that serve are peers.

    A proposal that only stands, for a person to take, is no trial, nor is what a person keeps
    without one, nor `but`.
    """
    peers = [e for e in engines_of(engine.tenant, engine.service) if engine_state(e, now) == "ok"]
    rows = Action.objects.filter(
        tenant=engine.tenant_id, engine__service=engine.service, state__in=IN_FLIGHT, trial=True
    ).exclude(state=State.PROPOSED, deadline__lt=now)
    trials = (rows.exclude(pk=but.pk) if but else rows).count()
    if trials < max(1, int(TRIAL_SHARE_MAX * len(peers))):
        return ""
    return Words(
        _("engines of %(service)s in trial already: %(trials)d of %(engines)d"),
        service=engine.service, trials=trials, engines=len(peers),
    )  # fmt: skip
