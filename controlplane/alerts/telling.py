"""Decides what is to be said about an incident, to whom, and writes it into the outbox.

Nothing is remembered but the rows themselves: what was said to a channel tells what is due now.
So a pass that was killed is made good by the next, and the same pass twice says nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from django.db.models import Exists, OuterRef

from controlplane.accounts.models import Tenant
from controlplane.alerts.groups import Group, group_of
from controlplane.alerts.message import compose, severity_of, stamp
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.selectors import silence_of
from controlplane.diagnosis.models import Incident, Severity
from controlplane.diagnosis.selectors import Story, incident_get, incidents_open
from controlplane.diagnosis.services import REOPEN_WITHIN

# From so many reopenings on, an end is told once it can be no more than an end.
FLAPS_MIN = 2
UNRESOLVED_PER_PASS_MAX = 100
Event: TypeAlias = Delivery.Event
State: TypeAlias = Delivery.State


def incidents_to_tell(tenant: Tenant) -> list[Incident]:
    """Open incidents, then those that are over and not everybody who was told knows it yet."""
    told = Delivery.objects.filter(
        incident=OuterRef("pk"), event=Event.OPENED, channel__enabled=True
    ).exclude(state=State.SILENCED)
    resolved = Delivery.objects.filter(
        incident=OuterRef("incident"),
        channel=OuterRef("channel"),
        event=Event.RESOLVED,
        created_at__gte=OuterRef("created_at"),
    )
    closed = Incident.objects.filter(tenant=tenant, state=Incident.State.CLOSED)
    unresolved = closed.filter(Exists(told.filter(~Exists(resolved)))).order_by("closed_at")
    keys = unresolved.values_list("pk", flat=True)[:UNRESOLVED_PER_PASS_MAX]
    return [*incidents_open(tenant), *(incident_get(tenant, key) for key in keys)]


def incident_tell(
    *,
    incident: Incident,
    story: Story,
    now: datetime,
    doing: str = "",
    earlier: Sequence[str] = (),
    engine: str = "",
    links: Mapping[str, str] | None = None,
    undone_at: datetime | None = None,
    stuck_since: datetime | None = None,
) -> list[Delivery]:
    """Puts what is due into the outbox, once per channel; returns the new rows.

    `doing` says what is done about it, at the end what was done and what came of it; `earlier` what
    it had come to before it opened again, in sentences; `links` are
    for what a person may do now, verb → address; `undone_at` is when a change was taken back,
    `stuck_since` when one was kept after which it goes on and nothing more is tried.

    Due are: *opened* first, and again after a reopening; *asked* when an action waits for a yes
    (`links` has "approve") that was not asked for yet; *undone* when nothing was said since a
    change was taken back; *stuck* once per kept change, where no message has told so yet;
    *reminded* every `remind_minutes` of a channel while it burns; *resolved* when it is over, where
    it was told before. An incident that does not speak for its group says nothing. Under a silence
    all but *resolved* is written as silenced, and what still burns is told when the silence ends.
    """
    group = group_of(incident)
    if incident != group.speaker:
        if not group.over:
            return []
        group = Group(incident, ())  # told by itself before it was found to be part of another
    channels = Channel.objects.filter(tenant=incident.tenant_id, enabled=True)
    if severity_of(group.all) == Severity.TICKET:
        channels = channels.filter(severity_min=Severity.TICKET)
    silence = silence_of(group, now)
    ask = doing if "approve" in (links or {}) else ""
    made: list[Delivery] = []
    for channel in channels:
        thread = Thread.of(channel, group)
        event = thread.due(
            ask=ask, undone_at=undone_at, stuck_since=stuck_since,
            silenced=silence is not None, now=now,
        )  # fmt: skip
        if event is None:
            continue
        silenced = silence is not None and event != Event.RESOLVED
        delivery, new = Delivery.objects.get_or_create(
            channel=channel,
            incident=group.head,
            event=event,
            number=Delivery.objects.filter(
                channel=channel, incident=group.head, event=event
            ).count(),
            defaults={
                "tenant_id": incident.tenant_id,
                "message": compose(
                    event, incident=group.head, members=group.members, story=story, doing=doing,
                    earlier=earlier, engine=engine, links=links or {}, stuck_since=stuck_since,
                    now=now,
                ),
                "state": State.SILENCED if silenced else State.PENDING,
                "silence": silence if silenced else None,
                "next_try_at": now,
                "created_at": now,
            },
        )  # fmt: skip
        if new:
            made.append(delivery)
    return made


@dataclass(frozen=True)
class Thread:
    """What one channel was told, or spared, of a group since it last heard that it was over."""

    channel: Channel
    group: Group
    rows: Sequence[Delivery]  # oldest first

    @classmethod
    def of(cls, channel: Channel, group: Group) -> Thread:
        rows = Delivery.objects.filter(channel=channel, incident=group.head)
        over = rows.filter(event=Event.RESOLVED).order_by("-created_at").first()
        if over is not None:
            rows = rows.filter(created_at__gte=over.created_at).exclude(event=Event.RESOLVED)
        return cls(channel, group, list(rows.defer("message").order_by("created_at", "number")))

    def due(
        self,
        *,
        ask: str,
        undone_at: datetime | None,
        stuck_since: datetime | None,
        silenced: bool,
        now: datetime,
    ) -> Event | None:
        told = any(row.state != State.SILENCED for row in self.rows)
        if self.group.over:
            return Event.RESOLVED if told and not self._may_flap(now) else None
        if not self.rows:
            return Event.OPENED
        if ask and not self._said(message__action=ask, message__actions__has_key="approve"):
            return Event.ASKED if told else Event.OPENED
        if undone_at is not None and self.rows[-1].created_at < undone_at:
            return Event.UNDONE if told else Event.OPENED
        if stuck_since is not None and not self._said(message__stuck_since=stamp(stuck_since)):
            return Event.STUCK if told else Event.OPENED
        if not self._again(silenced, now):
            return None
        return Event.REMINDED if told else Event.OPENED

    def _may_flap(self, now: datetime) -> bool:
        """Whether to wait with the good news: it was told before and did not last."""
        head = self.group.head
        over_at = max((i.closed_at for i in self.group.all if i.closed_at), default=now)
        return head.reopened >= FLAPS_MIN and now < over_at + REOPEN_WITHIN

    def _said(self, **message: Any) -> bool:
        keys = [row.pk for row in self.rows]
        return Delivery.objects.filter(pk__in=keys, **message).exists()

    def _again(self, silenced: bool, now: datetime) -> bool:
        """Whether it is time to say that it still burns."""
        last = self.rows[-1]
        if last.state == State.SILENCED and not silenced:
            return True
        if last.state == State.PENDING or not self.channel.remind_minutes:
            return False
        return now >= last.created_at + timedelta(minutes=self.channel.remind_minutes)
