"""The only way an action moves: one conditional UPDATE, and its line in ledger and audit log.

All three in one transaction: there is no step nobody can find out about.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from controlplane.accounts import audit
from controlplane.actions.models import ENDED, NEXT, Action, State, Transition

log = logging.getLogger(__name__)


def transition(
    action: Action, to: str, *, actor: str, reason: str, at: datetime, **columns: Any
) -> bool:
    """Moves `action` to state `to` and writes the row; False when someone else moved it first.

    `columns` are set in the same UPDATE. Ending sets `ended_at`. The instance follows.
    """
    assert to in NEXT.get(action.state, frozenset()), f"{action.state} → {to} is not a transition"
    before = action.state
    if to in ENDED:
        columns["ended_at"] = at
    with transaction.atomic():
        if not _update(action, state=to, **columns):
            return False
        _write_down(action, before, to, actor=actor, reason=reason, at=at)
    # In one line: whoever gives a reason must not write lines of the log.
    log.info("action %s: %s → %s: %s", action.pk, before, to, " ".join(reason.split()))
    return True


def note(action: Action, **columns: Any) -> bool:
    """Writes columns without moving the action; False when someone else moved it first."""
    return _update(action, **columns)


def _update(action: Action, **columns: Any) -> bool:
    rows = Action.objects.filter(pk=action.pk, state=action.state, version=action.version)
    if not rows.update(version=F("version") + 1, updated_at=timezone.now(), **columns):
        return False
    action.version += 1
    for name, value in columns.items():
        setattr(action, name, value)
    return True


def begin(action: Action, *, reason: str) -> None:
    """Stores a new action with the first line of its ledger. Raises IntegrityError as `save`."""
    assert action.state == State.PROPOSED
    with transaction.atomic():
        action.save(force_insert=True)
        at = action.created_at
        _write_down(action, "", State.PROPOSED, actor=action.actor, reason=reason, at=at)


def begin_lost(action: Action, *, reason: str) -> None:
    """Stores an action that lost to another before it began: rejected, and both lines written."""
    at, actor = action.created_at, action.actor
    action.state, action.ended_at = State.REJECTED, at
    action.outcome = {"sentence": reason}
    with transaction.atomic():
        action.save(force_insert=True)
        _write_down(action, "", State.PROPOSED, actor=actor, reason=action.why, at=at)
        _write_down(action, State.PROPOSED, State.REJECTED, actor=actor, reason=reason, at=at)


def _write_down(
    action: Action, before: str, to: str, *, actor: str, reason: str, at: datetime
) -> None:
    Transition.objects.create(
        action=action, from_state=before, to_state=to, at=at, actor=actor, reason=reason
    )
    audit.record(
        tenant=action.tenant,
        actor=actor,
        verb=to,
        noun="action",
        subject=str(action.pk),
        detail={"what": str(action), "from": before, "reason": reason},
        at=at,
    )
