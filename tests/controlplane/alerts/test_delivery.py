"""The outbox against a real HTTP server that answers as it is told."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from controlplane.accounts.models import AuditEntry, Tenant
from controlplane.alerts import outbox, post
from controlplane.alerts.channel import ChannelError, SendError, Sent
from controlplane.alerts.channels import webhook
from controlplane.alerts.message import compose
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.services import channel_remove, channel_test, channel_update
from controlplane.alerts.telling import incident_tell
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import Story
from tests.controlplane.alerts.receiver import NOW, Receiver

pytestmark = pytest.mark.django_db


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


def told(incident: Incident, receiver: Receiver) -> Delivery:
    channel(incident, receiver.url)
    (delivery,) = tell(incident)
    return delivery


def test_one_message_per_channel_and_incident(incident: Incident, receiver: Receiver) -> None:
    channel(incident, receiver.url)
    channel(incident, receiver.url + "2", "pager")
    channel(incident, receiver.url, "off", enabled=False)
    assert len(tell(incident)) == 2
    assert tell(incident) == []
    for seconds in range(10):
        deliver_due(NOW + timedelta(seconds=seconds))
    assert sorted(path for path, _, _ in receiver.got) == ["/hook", "/hook2"]
    assert not Delivery.objects.exclude(state=Delivery.State.SENT).exists()


def test_the_message_has_the_story_and_its_links(incident: Incident, receiver: Receiver) -> None:
    delivery = told(incident, receiver)
    assert deliver_due(NOW) == 1
    ((_, headers, message),) = receiver.got
    assert headers["Trimtab-Delivery-Id"] == str(delivery.pk)
    assert headers["Content-Type"].startswith("application/json")
    assert message == {
        "event": "incident.opened",
        "severity": "page",
        "title": "TTFT is bad",
        "what": "TTFT is bad.",
        "text": "TTFT is bad. TTFT p99 is 1.24 s because … Raises it.",
        "incident": str(incident.pk),
        "incident_url": f"http://127.0.0.1:8000/incidents/{incident.pk}/",
        "trace_url": f"http://127.0.0.1:8000/traces/{'ab' * 16}/",
        "members": [],
        "objective": "TTFT within 500 ms",
        "service": "chat",
        "engine": "engine-0",
        "cause": "running cap too small",
        "action": "raises it",
        "actions": {},
        "bad_since": "2026-03-01T12:00:00+00:00",
        "lasted_s": 0,
        "at": "2026-03-01T12:00:00+00:00",
    }
    delivery.refresh_from_db()
    assert (delivery.state, delivery.last_status) == (Delivery.State.SENT, 200)
    assert (delivery.sent_at, delivery.attempts) == (NOW, 1)


def test_a_broken_receiver_is_tried_again_until_it_takes_it(
    incident: Incident, receiver: Receiver
) -> None:
    delivery = told(incident, receiver)
    receiver.answer(500, "try later")
    assert deliver_due(NOW) == 0
    delivery.refresh_from_db()
    assert (delivery.state, delivery.last_status) == (Delivery.State.PENDING, 500)
    assert delivery.last_error == "HTTP 500: try later"
    assert NOW < delivery.next_try_at <= NOW + timedelta(seconds=2)
    assert deliver_due(NOW + timedelta(seconds=2)) == 1
    delivery.refresh_from_db()
    assert (delivery.state, delivery.attempts) == (Delivery.State.SENT, 2)
    assert delivery.last_error == ""


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_receiver_says_when_to_come_back(
    form: str, incident: Incident, receiver: Receiver
) -> None:
    delivery = told(incident, receiver)
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=120), usegmt=True)
    receiver.answer(429, Retry_After="120" if form == "seconds" else date)
    deliver_due(NOW)
    delivery.refresh_from_db()
    wait = (delivery.next_try_at - NOW).total_seconds()
    assert 115 <= wait <= 120
    assert deliver_due(NOW + timedelta(seconds=110)) == 0
    assert deliver_due(NOW + timedelta(seconds=121)) == 1
    assert len(receiver.got) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 410, 413])
def test_a_no_for_good_is_not_asked_again(
    status: int, incident: Incident, receiver: Receiver
) -> None:
    delivery = told(incident, receiver)
    receiver.always(status, "no")
    for hours in range(3):
        deliver_due(NOW + timedelta(hours=hours))
    delivery.refresh_from_db()
    assert (delivery.state, delivery.last_status) == (Delivery.State.FAILED, status)
    assert len(receiver.got) == 1


def test_a_redirect_is_not_followed(incident: Incident, receiver: Receiver) -> None:
    delivery = told(incident, receiver)
    receiver.always(302, Location="http://127.0.0.1:1/elsewhere")
    deliver_due(NOW)
    delivery.refresh_from_db()
    assert delivery.state == Delivery.State.FAILED
    assert delivery.last_error == "redirected to http://127.0.0.1:1/elsewhere, not followed"


def test_a_silent_receiver_is_tried_again(
    incident: Incident, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post, "TIMEOUT_S", 0.1)
    delivery = told(incident, receiver)
    receiver.answer(200, delay_s=0.4)
    deliver_due(NOW)
    delivery.refresh_from_db()
    assert delivery.state == Delivery.State.PENDING
    assert delivery.last_error == "no answer within 0.1 s"


def test_an_answer_that_drips_is_no_answer(
    incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read is quick, the whole is not."""
    monkeypatch.setattr(post, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_drip, args=(server,), daemon=True).start()
        channel(incident, f"http://127.0.0.1:{server.getsockname()[1]}/")
        (delivery,) = tell(incident)
        began = time.monotonic()
        assert deliver_due(NOW) == 0
        assert time.monotonic() - began < 3, "20 bytes at 0.2 s each are 4 s"
    delivery.refresh_from_db()
    assert delivery.last_error == "no answer within 0.3 s"


def _drip(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection, contextlib.suppress(OSError):
        for byte in b"HTTP/1.1 200 OK\r\nX: ":
            connection.sendall(bytes([byte]))
            time.sleep(0.2)


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


@pytest.mark.parametrize("header", ["²", "soon", "-1", "Mon, 01 Jan 99999 00:00:00 GMT"])
def test_a_strange_retry_after_is_no_retry_after(header: str) -> None:
    assert post.retry_after_s(header) is None


def test_a_receiver_that_is_not_there_gives_up_after_ten_tries(incident: Incident) -> None:
    server = Receiver()
    url = server.url
    server.server_close()
    channel(incident, url)
    (delivery,) = tell(incident)
    now = NOW
    for _ in range(15):
        deliver_due(now)
        now += timedelta(hours=1)
    delivery.refresh_from_db()
    assert (delivery.state, delivery.attempts) == (Delivery.State.FAILED, 10)
    assert "ConnectError" in delivery.last_error


def test_two_senders_at_once_send_it_once(incident: Incident, receiver: Receiver) -> None:
    delivery = told(incident, receiver)
    mine, other = (Delivery.objects.get(pk=delivery.pk) for _ in range(2))
    assert outbox._lease(mine, NOW)
    assert not outbox._lease(other, NOW)
    assert deliver_due(NOW) == 0, "leased by a sender that may be at it right now"


def test_what_a_killed_sender_held_comes_due_again(incident: Incident, receiver: Receiver) -> None:
    delivery = told(incident, receiver)
    assert outbox._lease(Delivery.objects.get(pk=delivery.pk), NOW)
    assert deliver_due(NOW + timedelta(seconds=29)) == 0
    assert deliver_due(NOW + timedelta(seconds=31)) == 1


def test_an_unknown_kind_of_channel_says_which_there_are(incident: Incident) -> None:
    channel(incident, "http://127.0.0.1:1/", kind="pigeon")
    (delivery,) = tell(incident)
    deliver_due(NOW)
    delivery.refresh_from_db()
    assert delivery.state == Delivery.State.FAILED
    assert (
        delivery.last_error
        == "no channel of kind 'pigeon'; known: dingtalk, feishu, slack, teams, webhook, wecom"
    )


def test_waiting_doubles_with_jitter_and_has_a_limit() -> None:
    for attempts in range(1, 11):
        whole = min(600, 2 * 2 ** (attempts - 1))
        assert whole / 2 <= outbox.backoff_s(attempts, None) <= whole
    assert outbox.backoff_s(1, 86_400) == 3600


def test_a_message_too_large_is_refused(receiver: Receiver) -> None:
    with pytest.raises(SendError, match="allowed: 65536") as caught:
        webhook.CHANNEL.send(
            url=receiver.url, secret="", message={"text": "x" * 70_000}, delivery_id="1"
        )
    assert caught.value.permanent
    assert not receiver.got


def test_a_wrong_address_is_permanent() -> None:
    with pytest.raises(SendError) as caught:
        webhook.CHANNEL.send(url="ftp://example.org/", secret="", message={}, delivery_id="1")
    assert caught.value.permanent


def test_a_name_that_is_looked_up_slowly_does_not_hold_the_sender_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resolver's thread cannot be stopped, only left behind."""
    found, over = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> list[Any]:
        over.wait(20)
        found.set()
        raise socket.gaierror("nobody")

    monkeypatch.setattr(post, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        with pytest.raises(SendError, match=r"no answer within 0\.2 s") as error:
            post.post("http://relay.example/hook", body=b"{}", headers={})
        assert not found.is_set()
        assert not error.value.permanent
    finally:
        over.set()
    assert found.wait(10)


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
    made = channel(incident, receiver.url)
    (delivery,) = tell(incident)
    receiver.always(503)
    real = webhook.Webhook.send

    def switch_off(self: webhook.Webhook, **message: Any) -> Sent:
        channel_update(channel=made, spec={"enabled": False}, by="ada", now=NOW)
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
    made = channel(incident, receiver.url)
    (delivery,) = tell(incident)
    Channel.objects.filter(pk=made.pk).update(enabled=False)
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


def test_a_message_about_very_many_incidents_still_fits(incident: Incident) -> None:
    message = compose(
        Delivery.Event.OPENED, incident=incident, members=[incident] * 1000, story=STORY,
        doing="", engine="engine-0", links={}, now=NOW,
    )  # fmt: skip
    assert "and 995 more" in message["text"]
    assert len(json.dumps(message)) < post.MESSAGE_BYTES_MAX / 2


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
