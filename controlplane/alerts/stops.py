"""Pages people where the autopilot has stopped until one of them looks.

It belongs to no incident's thread: the engine may run what nobody proved long after the incident.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from controlplane.alerts.message import compose_stop
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.selectors import silence_of_engine
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Engine


def stop_tell(
    *,
    about: UUID,
    engine: Engine,
    incident: Incident | None,
    doing: str,
    links: Mapping[str, str],
    now: datetime,
) -> list[Delivery]:
    """Tells every channel once of the stop that the action `about` has made; returns the new rows.

    Under a silence of the engine or its service it is written as silenced, and told when that ends.
    """
    silence = silence_of_engine(engine, now)
    state = Delivery.State.SILENCED if silence else Delivery.State.PENDING
    made = []
    for channel in Channel.objects.filter(tenant=engine.tenant_id, enabled=True):
        before = Delivery.objects.filter(channel=channel, about=about)
        if before.exists() if silence else before.exclude(state=Delivery.State.SILENCED).exists():
            continue
        delivery, new = Delivery.objects.get_or_create(
            channel=channel,
            about=about,
            number=before.count(),
            defaults={
                "tenant_id": engine.tenant_id,
                "event": Delivery.Event.STOPPED,
                "message": compose_stop(
                    engine=engine, incident=incident, doing=doing, links=links, now=now
                ),
                "state": state,
                "silence": silence,
                "next_try_at": now,
                "created_at": now,
            },
        )
        if new:
            made.append(delivery)
    return made
