"""A message for a channel, and a pass that sends what is due."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from controlplane.alerts import outbox
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.telling import incident_tell
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import Story
from tests.controlplane.alerts.receiver import NOW

STORY = Story(
    what="TTFT is bad", because="TTFT p99 is 1.24 s because …", cause_label="running cap too small"
)


def tell(incident: Incident, now: datetime = NOW) -> list[Delivery]:
    return incident_tell(
        incident=incident, story=STORY, doing="raises it", engine="engine-0", now=now
    )


def deliver_due(now: datetime) -> int:
    """In a time that stands still while it is sent."""
    return outbox.deliver_due(now, lambda: 0.0)


def channel(incident: Incident, url: str, name: str = "chat", **more: Any) -> Channel:
    return Channel.objects.create(tenant=incident.tenant, name=name, url=url, **more)


def told(incident: Incident, url: str, **more: Any) -> Delivery:
    """The one message of the one channel."""
    channel(incident, url, **more)
    (delivery,) = tell(incident)
    return delivery
