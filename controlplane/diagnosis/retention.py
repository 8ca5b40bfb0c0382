"""How long incidents are kept, with the explanations, evidence and messages that hang on them."""

from __future__ import annotations

from datetime import datetime

from controlplane.diagnosis.models import Incident

INCIDENTS_PER_PRUNE_MAX = 1_000


def prune(before: datetime) -> int:
    """Deletes incidents closed before then, at most 1,000 a call; returns how many."""
    closed = Incident.objects.filter(state=Incident.State.CLOSED, closed_at__lt=before)
    oldest = closed.order_by("closed_at").values_list("pk", flat=True)
    chosen = list(oldest[:INCIDENTS_PER_PRUNE_MAX])
    Incident.objects.filter(pk__in=chosen).delete()
    return len(chosen)
