"""Sends what is to be said: an outbox that survives a kill.

A row is leased by moving its next try, in one conditional UPDATE, before it is sent: of two senders
one gets it, and one that is killed while sending leaves a row that comes due again. So a message
arrives at least once, and its delivery id tells a receiver that it has seen it. What a channel is
told of one incident arrives in order: a message waits for the one before it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Exists, F, Min, OuterRef, QuerySet

from controlplane.alerts.channel import SEND_WITHIN_S, SendError, channels
from controlplane.alerts.models import Delivery
from controlplane.alerts.secrecy import scrubbed

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 10
BATCH_MAX = 50  # tries of one tenant in one pass
ROWS_LOOKED_AT_MAX = 1_000
# What one tenant's receivers may cost a pass; then the others' turn comes.
TENANT_S_MAX = 2 * SEND_WITHIN_S
# Above twice what a send may take, so that no row comes due while it is being sent.
LEASE = timedelta(seconds=3 * SEND_WITHIN_S)
BACKOFF_BASE_S = 2.0
BACKOFF_CAP_S = 600.0
RETRY_AFTER_MAX_S = 3600.0
ERROR_CHARS_MAX = 300

_one_sender_at_a_time = threading.Lock()


def deliver_due(now: datetime, elapsed_s: Callable[[], float] = time.monotonic) -> int:
    """Sends what is due, oldest first; returns how many were taken.

    Does nothing while another call of this process sends: slow receivers hold one thread, not all.
    Nor do they hold up everybody else: of each tenant a pass makes at most BATCH_MAX tries in
    TENANT_S_MAX, and of a channel no more once it failed. Later rows are leased later than
    `now`, by what `elapsed_s` has moved on.
    """
    if not _one_sender_at_a_time.acquire(blocking=False):
        return 0
    try:
        began = elapsed_s()

        def clock() -> datetime:
            return now + timedelta(seconds=elapsed_s() - began)

        waiting = Delivery.objects.filter(state=Delivery.State.PENDING)
        before = waiting.filter(
            channel=OuterRef("channel"),
            incident=OuterRef("incident"),
            created_at__lt=OuterRef("created_at"),
        )
        due = waiting.filter(~Exists(before), next_try_at__lte=now)
        tenants = due.values_list("tenant").annotate(first=Min("next_try_at")).order_by("first")
        return sum(_deliver_of(due.filter(tenant=key), clock) for key, _ in list(tenants))
    finally:
        _one_sender_at_a_time.release()


def _deliver_of(due: QuerySet[Delivery], clock: Callable[[], datetime]) -> int:
    """Sends one tenant's rows; returns how many were taken."""
    until = clock() + timedelta(seconds=TENANT_S_MAX)
    failed: set[UUID] = set()
    tried = taken = 0
    for row in list(due.order_by("next_try_at").defer("message")[:ROWS_LOOKED_AT_MAX]):
        if tried >= BATCH_MAX or clock() >= until:
            break
        if row.channel_id in failed or not (leased := _lease(row, clock())):
            continue
        tried += 1
        if _deliver(leased, clock):
            taken += 1
        else:
            failed.add(row.channel_id)
    return taken


def deliver_once(delivery: Delivery, now: datetime) -> None:
    """Sends a row that was made leased, at once and never again, whatever comes of it."""
    if not _deliver(delivery, lambda: now):
        delivery.state = Delivery.State.FAILED
        _save(delivery)


def backoff_s(attempts: int, retry_after_s: float | None) -> float:
    """Seconds until the next try: what the receiver asked for, else exponential with jitter.

    Half fixed, half random, so that many rows for one receiver do not come back together.
    """
    if retry_after_s is not None:
        return min(retry_after_s, RETRY_AFTER_MAX_S)
    wait = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** max(0, attempts - 1))
    return wait / 2 + random.uniform(0, wait / 2)


def _lease(delivery: Delivery, now: datetime) -> Delivery | None:
    """The row and its channel as they are now, where it is this sender's to send."""
    rows = Delivery.objects.filter(
        pk=delivery.pk, state=Delivery.State.PENDING, next_try_at=delivery.next_try_at
    )
    if not rows.update(next_try_at=now + LEASE, attempts=F("attempts") + 1):
        return None
    return Delivery.objects.select_related("channel").filter(pk=delivery.pk).first()


def _deliver(delivery: Delivery, clock: Callable[[], datetime]) -> bool:
    """Sends one leased row and writes down what came of it; whether it was taken."""
    try:
        if not delivery.channel.enabled and delivery.event != Delivery.Event.TEST:
            raise SendError("the channel was switched off", permanent=True)
        kind = channels().get(delivery.channel.kind)
        if kind is None:
            known = ", ".join(sorted(channels()))
            raise SendError(
                f"no channel of kind {delivery.channel.kind!r}; known: {known}", permanent=True
            )
        sent = kind.send(
            url=delivery.channel.url,
            secret=delivery.channel.secret,
            message=delivery.message,
            delivery_id=str(delivery.pk),
        )
    except SendError as error:
        _failed(delivery, error, clock())
        return False
    except Exception as error:  # noqa: BLE001 -- a channel's own mistake must not stop the others
        # The error's own words may quote the address; where it broke does not.
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("delivery %s: channel %s broke\n%s", delivery.pk, delivery.channel, where)
        _failed(delivery, SendError(f"{type(error).__name__}: {error}", permanent=False), clock())
        return False
    delivery.state, delivery.sent_at = Delivery.State.SENT, clock()
    delivery.last_status, delivery.last_error, delivery.permanent = sent.status, "", None
    _save(delivery)
    log.info("delivery %s: taken by %s", delivery.pk, delivery.channel)
    return True


def _failed(delivery: Delivery, error: SendError, now: datetime) -> None:
    said = scrubbed(error.message, url=delivery.channel.url, secret=delivery.channel.secret)
    delivery.last_status, delivery.last_error = error.status, said[:ERROR_CHARS_MAX]
    delivery.permanent = error.permanent
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
    """Of a row that is gone, with its channel, nothing is written; nor is one tried again that was
    given up while it was being sent."""
    fields = ["state", "sent_at", "last_status", "last_error", "permanent"]
    rows = Delivery.objects.filter(pk=delivery.pk)
    if delivery.state == Delivery.State.PENDING:
        fields.append("next_try_at")
        rows = rows.filter(state=Delivery.State.PENDING)
    rows.update(**{field: getattr(delivery, field) for field in fields})
