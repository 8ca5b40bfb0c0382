"""How long actions are kept, with the ledger of their transitions."""

from __future__ import annotations

from datetime import datetime

from controlplane.actions.models import Action, Priority, State
from controlplane.actions.release import standing
from controlplane.fleet.models import Engine

ACTIONS_PER_PRUNE_MAX = 1_000


def prune(before: datetime) -> int:
    """Deletes actions that ended before then, at most 1,000 a call; returns how many.

    One by which an engine still turns requests away stays: without it nobody would end that. So
    does a failed undo nobody has looked at: without it the autopilot would go on.
    """
    old_shedding = {"actions__priority": Priority.SAFETY, "actions__ended_at__lt": before}
    engines = Engine.objects.filter(**old_shedding).distinct()
    kept = [shed.pk for engine in engines.iterator() if (shed := standing(engine))]
    unlooked = {"state": State.ROLLBACK_FAILED, "cleared_at": None}
    ended = Action.objects.filter(ended_at__lt=before).exclude(pk__in=kept).exclude(**unlooked)
    chosen = list(ended.order_by("ended_at").values_list("pk", flat=True)[:ACTIONS_PER_PRUNE_MAX])
    Action.objects.filter(pk__in=chosen).delete()
    return len(chosen)
