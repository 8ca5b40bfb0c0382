"""Whose turn it is: senders at once, senders that were killed, receivers that hold others up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from controlplane.accounts.models import Tenant
from controlplane.alerts import outbox
from controlplane.alerts.channel import SendError, Sent
from controlplane.alerts.channels import webhook
from controlplane.alerts.models import Channel, Delivery
from controlplane.diagnosis.models import Incident
from tests.controlplane.alerts.receiver import NOW, Receiver
from tests.controlplane.alerts.sending import channel, deliver_due, tell, told

pytestmark = pytest.mark.django_db


def test_rows_sent_late_are_leased_late_and_one_call_sends_at_a_time(
    incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve slow posts: nothing comes due again meanwhile, for this process or another."""
    for n in range(12):
        channel(incident, "http://127.0.0.1:1/", f"c{n}")
    tell(incident)
    seconds, posts = 0.0, []

    class Slow:
        def send(self, *, delivery_id: str, **_: Any) -> Sent:
            nonlocal seconds
            posts.append(delivery_id)
            seconds += 4.9
            at = NOW + timedelta(seconds=seconds)
            assert outbox.deliver_due(at) == 0, "another beat, another thread"
            row = Delivery.objects.get(pk=delivery_id)
            assert not row.next_try_at <= at, "another process would take it"
            return Sent(200)

    monkeypatch.setattr(outbox, "channels", lambda: {"webhook": Slow()})
    passes = [
        outbox.deliver_due(NOW + timedelta(seconds=seconds), lambda: seconds) for _ in range(3)
    ]
    assert passes == [5, 5, 2], "20 s of one tenant at a time"
    assert len(set(posts)) == len(posts) == 12


def test_two_senders_at_once_send_it_once(incident: Incident, receiver: Receiver) -> None:
    delivery = told(incident, receiver.url)
    mine, other = (Delivery.objects.get(pk=delivery.pk) for _ in range(2))
    assert outbox._lease(mine, NOW)
    assert not outbox._lease(other, NOW)
    assert deliver_due(NOW) == 0, "leased by a sender that may be at it right now"


def test_what_a_killed_sender_held_comes_due_again(incident: Incident, receiver: Receiver) -> None:
    delivery = told(incident, receiver.url)
    assert outbox._lease(Delivery.objects.get(pk=delivery.pk), NOW)
    assert deliver_due(NOW + timedelta(seconds=29)) == 0
    assert deliver_due(NOW + timedelta(seconds=31)) == 1


def test_waiting_doubles_with_jitter_and_has_a_limit() -> None:
    for attempts in range(1, 11):
        whole = min(600, 2 * 2 ** (attempts - 1))
        assert whole / 2 <= outbox.backoff_s(attempts, None) <= whole
    assert outbox.backoff_s(1, 86_400) == 3600


def test_receivers_that_hang_hold_up_neither_other_tenants_nor_other_channels(
    incident: Incident, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tenant acme has six channels that take 9 s to fail; another tenant's message waits too."""
    for number in range(6):
        channel(incident, f"http://hangs.example/{number}", f"c{number}")
    rows = tell(incident)
    later = NOW + timedelta(seconds=0.5)
    for number in range(60):  # more than a batch, all due before the other tenant's
        Delivery.objects.create(
            tenant=incident.tenant, channel=rows[0].channel, message=rows[0].message,
            incident=incident, number=number + 1, next_try_at=later, created_at=NOW,
        )  # fmt: skip
    other = Tenant.objects.create(slug="other", name="Other")
    theirs = Delivery.objects.create(
        tenant=other, channel=Channel.objects.create(tenant=other, name="n", url=receiver.url),
        message=rows[0].message, next_try_at=NOW + timedelta(seconds=1), created_at=NOW,
    )  # fmt: skip
    elapsed = 0.0
    tried: list[str] = []
    real = webhook.Webhook.send

    def hang(self: webhook.Webhook, *, url: str, **message: Any) -> Sent:
        nonlocal elapsed
        if "hangs" not in url:
            return real(self, url=url, **message)
        elapsed += 9
        tried.append(url)
        raise SendError("no answer within 5 s", permanent=False)

    monkeypatch.setattr(webhook.Webhook, "send", hang)
    assert outbox.deliver_due(NOW + timedelta(seconds=2), lambda: elapsed) == 1
    theirs.refresh_from_db()
    assert theirs.state == Delivery.State.SENT
    assert len(tried) == len(set(tried)) == 3, "each channel once, and no more than 20 s in all"
