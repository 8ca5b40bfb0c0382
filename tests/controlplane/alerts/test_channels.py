"""Channels that are changed, switched off or removed meanwhile, and the tests sent to them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from controlplane.accounts.models import AuditEntry
from controlplane.alerts import outbox
from controlplane.alerts.channel import ChannelError, Sent
from controlplane.alerts.channels import webhook
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.services import channel_remove, channel_test, channel_update
from controlplane.diagnosis.models import Incident
from tests.controlplane.alerts.receiver import NOW, Receiver
from tests.controlplane.alerts.sending import channel, deliver_due, tell, told

pytestmark = pytest.mark.django_db


def test_a_channel_removed_while_it_is_sent_to_stops_nobody_else(
    incident: Incident, receiver: Receiver
) -> None:
    gone = channel(incident, receiver.url, "gone")
    channel(incident, receiver.url, "stays")
    first, second = sorted(tell(incident), key=lambda row: row.channel.name)
    Delivery.objects.filter(pk=second.pk).update(next_try_at=NOW + timedelta(seconds=1))
    real = webhook.Webhook.send

    def remove(self: webhook.Webhook, **message: Any) -> Sent:
        Channel.objects.filter(pk=gone.pk).delete()
        return real(self, **message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(webhook.Webhook, "send", remove)
        assert deliver_due(NOW + timedelta(seconds=2)) == 2
    assert not Delivery.objects.filter(pk=first.pk).exists()
    second.refresh_from_db()
    assert second.state == Delivery.State.SENT


def test_what_is_switched_off_while_it_is_sent_is_not_tried_again(
    incident: Incident, receiver: Receiver
) -> None:
    delivery = told(incident, receiver.url)
    receiver.always(503)
    real = webhook.Webhook.send

    def switch_off(self: webhook.Webhook, **message: Any) -> Sent:
        channel_update(channel=delivery.channel, spec={"enabled": False}, by="ada", now=NOW)
        return real(self, **message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(webhook.Webhook, "send", switch_off)
        deliver_due(NOW)
    delivery.refresh_from_db()
    assert (delivery.state, delivery.last_error) == (
        Delivery.State.FAILED,
        "the channel was switched off",
    )


def test_a_message_written_as_its_channel_is_switched_off_is_not_sent(
    incident: Incident, receiver: Receiver
) -> None:
    delivery = told(incident, receiver.url)
    Channel.objects.filter(pk=delivery.channel_id).update(enabled=False)
    deliver_due(NOW)
    delivery.refresh_from_db()
    assert (delivery.state, receiver.got) == (Delivery.State.FAILED, [])


def test_a_change_keeps_what_another_changed_since_it_was_read(
    incident: Incident, receiver: Receiver
) -> None:
    mine = channel(incident, receiver.url)
    theirs = Channel.objects.get()
    channel_update(channel=theirs, spec={"url": receiver.url + "2"}, by="bob", now=NOW)
    changed = channel_update(channel=mine, spec={"remind_minutes": 5}, by="ada", now=NOW)
    assert (changed.url, changed.remind_minutes) == (receiver.url + "2", 5)
    stored = Channel.objects.get()
    assert (stored.url, stored.remind_minutes) == (receiver.url + "2", 5)


def test_a_channel_that_was_removed_is_not_brought_back(
    incident: Incident, receiver: Receiver
) -> None:
    mine = channel(incident, receiver.url)
    for _ in range(2):
        channel_remove(channel=Channel(pk=mine.pk, tenant=mine.tenant), by="bob", now=NOW)
    with pytest.raises(ChannelError, match="removed meanwhile"):
        channel_update(channel=mine, spec={"enabled": False}, by="ada", now=NOW)
    assert not Channel.objects.exists()
    assert AuditEntry.objects.filter(verb="removed").count() == 1


@pytest.mark.parametrize("status", [200, 500])
def test_the_words_of_a_test_are_true_whether_it_arrives_or_not(
    incident: Incident, receiver: Receiver, status: int
) -> None:
    made = channel(incident, receiver.url)
    receiver.always(status)
    delivery = channel_test(channel=made, by="ada", now=NOW)
    assert delivery.state == ("sent" if status == 200 else "failed")
    assert delivery.message["text"] == (
        "ada sends “chat” a test. There is no incident, and nothing to do."
    )


def test_one_test_of_a_tenant_at_a_time(incident: Incident, receiver: Receiver) -> None:
    first = channel(incident, receiver.url)
    other = channel(incident, receiver.url, "pager")
    Delivery.objects.create(
        tenant=incident.tenant, channel=first, event=Delivery.Event.TEST, message={},
        next_try_at=NOW + outbox.LEASE, created_at=NOW,
    )  # fmt: skip
    with pytest.raises(ChannelError, match="another test is on its way"):
        channel_test(channel=other, by="ada", now=NOW)
    assert channel_test(channel=other, by="ada", now=NOW + outbox.LEASE).state == "sent"
