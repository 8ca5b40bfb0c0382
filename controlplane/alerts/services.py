"""Tells people: one message per channel and incident, through an outbox that survives a kill.

`incident_tell` writes rows; `deliver_due` sends them. A row is leased by moving its next try, in
one conditional UPDATE, before it is sent: of two senders one gets it, and one that is killed while
sending leaves a row that comes due again. So a message arrives at least once, and its delivery id
tells a receiver that it has seen it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db.models import F

from controlplane.alerts.channel import SEND_WITHIN_S, SendError, channels
from controlplane.alerts.models import Channel, Delivery
from controlplane.diagnosis.models import Incident

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 10
BATCH_MAX = 50
# Above twice what a send may take, so that no row comes due while it is being sent.
LEASE = timedelta(seconds=3 * SEND_WITHIN_S)
BACKOFF_BASE_S = 2.0
BACKOFF_CAP_S = 600.0
RETRY_AFTER_MAX_S = 3600.0
ERROR_CHARS_MAX = 300

_one_sender_at_a_time = threading.Lock()


def incident_tell(
    *,
    incident: Incident,
    title: str,
    text: str,
    now: datetime,
    engine: str = "",
    cause: str = "",
    action: str = "",
) -> list[Delivery]:
    """Puts the incident's message into the outbox, once per enabled channel; returns new rows.

    Asking again writes nothing: what was said first stays said.
    """
    told = Delivery.objects.filter(incident=incident).values("channel_id")
    waiting = Channel.objects.filter(tenant=incident.tenant_id, enabled=True).exclude(id__in=told)
    made = []
    for channel in waiting:
        delivery, new = Delivery.objects.get_or_create(
            channel=channel,
            incident=incident,
            defaults={
                "tenant_id": incident.tenant_id,
                "message": {
                    "event": "incident.opened",
                    "title": title,
                    "text": text,
                    "incident_url": f"{settings.TRIMTAB_PUBLIC_URL}/incidents/{incident.pk}/",
                    "trace_url": _trace_url(incident),
                    "objective": incident.objective.name,
                    "engine": engine,
                    "cause": cause,
                    "action": action,
                    "at": now.astimezone(UTC).isoformat(),
                },
                "next_try_at": now,
                "created_at": now,
            },
        )
        if new:
            made.append(delivery)
    return made


def deliver_due(now: datetime, elapsed_s: Callable[[], float] = time.monotonic) -> int:
    """Sends what is due, oldest first, at most BATCH_MAX; returns how many were taken.

    Does nothing while another call of this process sends: slow receivers hold one thread, not all.
    Later rows are leased later than `now`, by what `elapsed_s` has moved on.
    """
    if not _one_sender_at_a_time.acquire(blocking=False):
        return 0
    try:
        began = elapsed_s()

        def clock() -> datetime:
            return now + timedelta(seconds=elapsed_s() - began)

        due = Delivery.objects.filter(state=Delivery.State.PENDING, next_try_at__lte=now)
        rows = due.select_related("channel").order_by("next_try_at")[:BATCH_MAX]
        return sum(_deliver(row, clock) for row in rows if _lease(row, clock()))
    finally:
        _one_sender_at_a_time.release()


def backoff_s(attempts: int, retry_after_s: float | None) -> float:
    """Seconds until the next try: what the receiver asked for, else exponential with jitter.

    Half fixed, half random, so that many rows for one receiver do not come back together.
    """
    if retry_after_s is not None:
        return min(retry_after_s, RETRY_AFTER_MAX_S)
    wait = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** max(0, attempts - 1))
    return wait / 2 + random.uniform(0, wait / 2)


def _lease(delivery: Delivery, now: datetime) -> bool:
    rows = Delivery.objects.filter(
        pk=delivery.pk, state=Delivery.State.PENDING, next_try_at=delivery.next_try_at
    )
    taken = rows.update(next_try_at=now + LEASE, attempts=F("attempts") + 1) == 1
    delivery.attempts += taken
    return taken


def _deliver(delivery: Delivery, clock: Callable[[], datetime]) -> bool:
    """Sends one leased row and writes down what came of it; whether it was taken."""
    try:
        kind = channels().get(delivery.channel.kind)
        if kind is None:
            known = ", ".join(sorted(channels()))
            raise SendError(
                f"no channel of kind {delivery.channel.kind!r}; known: {known}", permanent=True
            )
        sent = kind.send(
            url=delivery.channel.url, message=delivery.message, delivery_id=str(delivery.pk)
        )
    except SendError as error:
        _failed(delivery, error, clock())
        return False
    except Exception as error:  # a channel's own mistake must not stop the others
        log.exception("delivery %s: channel %s broke", delivery.pk, delivery.channel)
        _failed(delivery, SendError(f"{type(error).__name__}: {error}", permanent=False), clock())
        return False
    delivery.state, delivery.sent_at = Delivery.State.SENT, clock()
    delivery.last_status, delivery.last_error = sent.status, ""
    _save(delivery)
    log.info("delivery %s: taken by %s", delivery.pk, delivery.channel)
    return True


def _failed(delivery: Delivery, error: SendError, now: datetime) -> None:
    delivery.last_status, delivery.last_error = error.status, error.message[:ERROR_CHARS_MAX]
    if error.permanent or delivery.attempts >= ATTEMPTS_MAX:
        delivery.state = Delivery.State.FAILED
    else:
        wait = backoff_s(delivery.attempts, error.retry_after_s)
        delivery.next_try_at = now + timedelta(seconds=wait)
    _save(delivery)
    log.warning(
        "delivery %s to %s, try %d: %s",
        delivery.pk,
        delivery.channel,
        delivery.attempts,
        delivery.last_error,
    )


def _save(delivery: Delivery) -> None:
    fields = ["state", "sent_at", "last_status", "last_error"]
    if delivery.state == Delivery.State.PENDING:
        fields.append("next_try_at")
    delivery.save(update_fields=fields)


def _trace_url(incident: Incident) -> str:
    if not incident.example_trace_id:
        return ""
    return f"{settings.TRIMTAB_PUBLIC_URL}/traces/{incident.example_trace_id}/"
