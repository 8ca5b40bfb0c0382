"""Signatures that others can verify, and secrets nobody is shown."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import time

import pytest
from django.test import Client

from controlplane.accounts.models import AuditEntry, Tenant
from controlplane.accounts.services import token_create
from controlplane.alerts.channel import ChannelError
from controlplane.alerts.channels.webhook import CHANNEL, signature
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.outbox import deliver_due
from controlplane.alerts.secrecy import masked, scrubbed
from controlplane.alerts.services import channel_create, channel_test
from controlplane.alerts.telling import incident_tell
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import Story
from tests.controlplane.alerts.receiver import NOW, Receiver

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
SLACK = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7"


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The specification's own example."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    given = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert given == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.django_db
def test_a_receiver_can_verify_what_it_got(incident: Incident, receiver: Receiver) -> None:
    channel, secret = channel_create(
        tenant=incident.tenant, spec={"name": "relay", "url": receiver.url}, by="ada", now=NOW
    )
    delivery = channel_test(channel=channel, by="ada", now=NOW)
    ((_, headers, body),) = receiver.got
    raw = json.dumps(body, ensure_ascii=False)
    signed = f"{delivery.pk}.{headers['webhook-timestamp']}.{raw}".encode()
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"
    assert headers["webhook-id"] == headers["Trimtab-Delivery-Id"] == str(delivery.pk)
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60


@pytest.mark.django_db
def test_a_webhook_may_go_unsigned(incident: Incident, receiver: Receiver) -> None:
    spec = {"name": "relay", "url": receiver.url, "secret": ""}
    channel, secret = channel_create(tenant=incident.tenant, spec=spec, by="ada", now=NOW)
    assert secret == ""
    channel_test(channel=channel, by="ada", now=NOW)
    assert "webhook-signature" not in receiver.got[0][1]


@pytest.mark.parametrize("secret", ["s3cret", "whsec_", "whsec_a2V5", "whsec_ä", "whsec_%%%"])
def test_a_weak_secret_is_refused(secret: str) -> None:
    with pytest.raises(ChannelError, match="base64 of 24 to 64 random bytes") as caught:
        CHANNEL.check(url="http://relay/", secret=secret)
    assert caught.value.param == "secret"
    assert secret == "whsec_" or secret not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (SLACK, "https://hooks.slack.com/…"),
        ("http://127.0.0.1:8300/", "http://127.0.0.1:8300/"),
        ("https://u:p@relay.example/", "https://relay.example/…"),
        ("https://oapi.dingtalk.com/robot/send?access_token=x", "https://oapi.dingtalk.com/…"),
        ("https://[::1/", "…"),
    ],
)
def test_an_address_is_shown_without_what_opens_it(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_what_a_receiver_says_back_is_scrubbed() -> None:
    said = f"no route {SLACK}; token TIiajkdnlazkcOXrIdevi7 of T1JJ3T3L2 with {SECRET}"
    assert scrubbed(said, url=SLACK, secret=SECRET) == (
        "no route https://hooks.slack.com/…; token … of … with …"
    )


@pytest.mark.django_db
def test_no_secret_reaches_the_log_the_rows_or_the_api(
    incident: Incident, everywhere: Receiver, caplog: pytest.LogCaptureFixture, client: Client
) -> None:
    """Even from a receiver that quotes the address, and with every logger as loud as it gets."""
    caplog.set_level(logging.DEBUG)
    for name in ("apprise", "httpx", "httpcore"):
        assert not logging.getLogger(name).isEnabledFor(logging.INFO), name
    tenant: Tenant = incident.tenant
    specs = [
        {"name": "slack", "kind": "slack", "url": SLACK},
        {"name": "relay", "url": "https://relay.example/0123456789abcdef", "secret": SECRET},
    ]
    for spec in specs:
        channel_create(tenant=tenant, spec=spec, by="ada", now=NOW)
        path = spec["url"].removeprefix("https://")
        everywhere.always(403, f"no: {spec['url']} {path} {spec.get('secret', '')}")
        incident_tell(incident=incident, story=Story(what="T"), now=NOW)
        assert deliver_due(NOW, lambda: 0.0) == 0
    assert set(Delivery.objects.values_list("state", flat=True)) == {"failed"}
    _, token = token_create(tenant=tenant, kind="api", name="t")
    auth = {"Authorization": f"Bearer {token}"}
    answers = [
        client.get(f"/api/v1/{noun}/", headers=auth).content.decode()
        for noun in ("channels", "deliveries")
    ]
    seen = " ".join(
        [
            caplog.text,
            *answers,
            *Delivery.objects.values_list("last_error", flat=True),
            *(str(entry.detail) for entry in AuditEntry.objects.all()),
            *(str(channel) for channel in Channel.objects.all()),
        ]
    )
    for secret in ("TIiajkdnlazkcOXrIdevi7", "0123456789abcdef", SECRET.removeprefix("whsec_")):
        assert secret not in seen
