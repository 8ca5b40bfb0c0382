"""How long tests and silences are kept; what was said of an incident goes with the incident."""

from __future__ import annotations

from datetime import datetime

from controlplane.alerts.models import Delivery, Silence

ROWS_PER_PRUNE_MAX = 1_000


def prune(before: datetime) -> int:
    """Deletes tests made and silences over before then, at most 1,000 each; returns how many."""
    tests = Delivery.objects.filter(incident=None, created_at__lt=before)
    over = Silence.objects.filter(until__lt=before)
    deleted = 0
    for rows in (tests, over):
        chosen = list(rows.values_list("pk", flat=True)[:ROWS_PER_PRUNE_MAX])
        rows.model._default_manager.filter(pk__in=chosen).delete()
        deleted += len(chosen)
    return deleted
