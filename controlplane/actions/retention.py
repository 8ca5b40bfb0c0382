"""How long actions are kept, with the ledger of their transitions."""

from __future__ import annotations

from datetime import datetime

from controlplane.actions.models import Action

ACTIONS_PER_PRUNE_MAX = 1_000


def prune(before: datetime) -> int:
    """Deletes actions that ended before then, at most 1,000 a call; returns how many."""
    ended = Action.objects.filter(ended_at__lt=before).order_by("ended_at")
    chosen = list(ended.values_list("pk", flat=True)[:ACTIONS_PER_PRUNE_MAX])
    Action.objects.filter(pk__in=chosen).delete()
    return len(chosen)
