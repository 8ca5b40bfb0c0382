"""A message against a real HTTP server that answers as it is told."""

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

from controlplane.alerts import post
from controlplane.alerts.channel import SendError
from controlplane.alerts.channels import webhook
from controlplane.alerts.message import compose
from controlplane.alerts.models import Delivery
from controlplane.diagnosis.models import Incident
from tests.controlplane.alerts.receiver import NOW, Receiver
from tests.controlplane.alerts.sending import STORY, channel, deliver_due, tell, told

pytestmark = pytest.mark.django_db


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
    delivery = told(incident, receiver.url)
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
        "stuck_since": "",
        "bad_since": "2026-03-01T12:00:00+00:00",
        "lasted_s": 0,
        "unmeasured_s": 0,
        "at": "2026-03-01T12:00:00+00:00",
    }
    delivery.refresh_from_db()
    assert (delivery.state, delivery.last_status) == (Delivery.State.SENT, 200)
    assert (delivery.sent_at, delivery.attempts) == (NOW, 1)


def test_a_broken_receiver_is_tried_again_until_it_takes_it(
    incident: Incident, receiver: Receiver
) -> None:
    delivery = told(incident, receiver.url)
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
    delivery = told(incident, receiver.url)
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
    delivery = told(incident, receiver.url)
    receiver.always(status, "no")
    for hours in range(3):
        deliver_due(NOW + timedelta(hours=hours))
    delivery.refresh_from_db()
    assert (delivery.state, delivery.last_status) == (Delivery.State.FAILED, status)
    assert len(receiver.got) == 1


def test_a_redirect_is_not_followed(incident: Incident, receiver: Receiver) -> None:
    delivery = told(incident, receiver.url)
    receiver.always(302, Location="http://127.0.0.1:1/elsewhere")
    deliver_due(NOW)
    delivery.refresh_from_db()
    assert delivery.state == Delivery.State.FAILED
    assert delivery.last_error == "redirected to http://127.0.0.1:1/elsewhere, not followed"


def test_a_silent_receiver_is_tried_again(
    incident: Incident, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post, "TIMEOUT_S", 0.1)
    delivery = told(incident, receiver.url)
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
        delivery = told(incident, f"http://127.0.0.1:{server.getsockname()[1]}/")
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


@pytest.mark.parametrize("header", ["²", "soon", "-1", "Mon, 01 Jan 99999 00:00:00 GMT"])
def test_a_strange_retry_after_is_no_retry_after(header: str) -> None:
    assert post.retry_after_s(header) is None


def test_a_receiver_that_is_not_there_gives_up_after_ten_tries(incident: Incident) -> None:
    server = Receiver()
    url = server.url
    server.server_close()
    delivery = told(incident, url)
    now = NOW
    for _ in range(15):
        deliver_due(now)
        now += timedelta(hours=1)
    delivery.refresh_from_db()
    assert (delivery.state, delivery.attempts) == (Delivery.State.FAILED, 10)
    assert "ConnectError" in delivery.last_error


def test_an_unknown_kind_of_channel_says_which_there_are(incident: Incident) -> None:
    delivery = told(incident, "http://127.0.0.1:1/", kind="pigeon")
    deliver_due(NOW)
    delivery.refresh_from_db()
    assert delivery.state == Delivery.State.FAILED
    assert (
        delivery.last_error
        == "no channel of kind 'pigeon'; known: dingtalk, feishu, slack, teams, webhook, wecom"
    )


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


def test_a_message_about_very_many_incidents_still_fits(incident: Incident) -> None:
    message = compose(
        Delivery.Event.OPENED, incident=incident, members=[incident] * 1000, story=STORY,
        doing="", earlier=(), engine="engine-0", links={}, stuck_since=None, now=NOW,
    )  # fmt: skip
    assert "and 995 more" in message["text"]
    assert len(json.dumps(message)) < post.MESSAGE_BYTES_MAX / 2
