"""REST of channels, silences and deliveries."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.accounts.models import AuditEntry, Tenant
from controlplane.alerts.models import Channel, Delivery, Silence
from controlplane.alerts.services import CHANNELS_PER_TENANT_MAX
from controlplane.alerts.telling import incident_tell
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import Story
from tests.controlplane.alerts.receiver import NOW, Receiver
from tests.rest import client_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def api(incident: Incident) -> APIClient:
    return client_of(incident.tenant)


def make(api: APIClient, **spec: Any) -> Any:
    body = {"name": "relay", "url": "http://127.0.0.1:1/hook/s3cr3ts3cr3t", **spec}
    return api.post("/api/v1/channels/", body, format="json")


def test_a_channel_is_made_and_its_secret_told_once(api: APIClient) -> None:
    made = make(api, remind_minutes=5, severity_min="page")
    assert made.status_code == 201
    assert made.json()["secret"].startswith("whsec_")
    (listed,) = api.get("/api/v1/channels/").json()["channels"]
    assert listed == {key: value for key, value in made.json().items() if key != "secret"}
    assert listed["url"] == "http://127.0.0.1:1/…"
    assert (listed["signed"], listed["remind_minutes"], listed["severity_min"]) == (True, 5, "page")
    entry = AuditEntry.objects.get(noun="channel")
    assert (entry.actor, entry.verb, entry.noun, entry.subject) == (
        "token ci", "created", "channel", "relay",
    )  # fmt: skip


def test_a_channel_is_changed_in_part_and_removed(api: APIClient) -> None:
    url = f"/api/v1/channels/{make(api).json()['id']}/"
    changed = api.patch(url, {"name": "pager", "enabled": False}, format="json")
    assert changed.status_code == 200
    assert (changed.json()["name"], changed.json()["enabled"]) == ("pager", False)
    assert Channel.objects.get().url == "http://127.0.0.1:1/hook/s3cr3ts3cr3t"
    assert api.patch(url, {"kind": "slack"}, format="json").status_code == 400
    assert api.delete(url).status_code == 204
    assert api.get(url).status_code == 404
    assert [e.verb for e in AuditEntry.objects.filter(noun="channel")] == [
        "created", "changed", "removed",
    ]  # fmt: skip


def test_switched_off_it_keeps_nothing_to_send_later(api: APIClient, incident: Incident) -> None:
    url = f"/api/v1/channels/{make(api).json()['id']}/"
    incident_tell(incident=incident, story=Story(what="T"), now=NOW)
    api.patch(url, {"enabled": False}, format="json")
    delivery = Delivery.objects.get()
    assert (delivery.state, delivery.last_error) == ("failed", "the channel was switched off")


@pytest.mark.parametrize(
    ("spec", "param", "words"),
    [
        ({"name": ""}, "name", "a text of 1 to 100"),
        ({"name": "a\u0000b"}, "name", "no control characters"),
        ({"name": 7}, "name", "a text of 1 to 100"),
        ({"url": "ftp://x/"}, "url", "an http or https address"),
        ({"url": None}, "url", "a text of 1 to 1000"),
        ({"kind": "pigeon"}, "kind", "dingtalk, feishu, slack, teams, webhook, wecom"),
        ({"kind": ["slack"]}, "kind", "dingtalk"),
        ({"kind": "slack"}, "url", "https://hooks.slack.com/services/"),
        ({"secret": "x"}, "secret", "base64"),
        ({"secret": 5}, "secret", "a text of at most"),
        ({"severity_min": "loud"}, "severity_min", "page, ticket"),
        ({"severity_min": []}, "severity_min", "page, ticket"),
        ({"remind_minutes": -1}, "remind_minutes", "0 (say it once) to 10080"),
        ({"remind_minutes": True}, "remind_minutes", "0 (say it once)"),
        ({"remind_minutes": "5"}, "remind_minutes", "0 (say it once)"),
        ({"enabled": "yes"}, "enabled", "true, false"),
        ({"colour": "red"}, "colour", "no such field"),
    ],
)
def test_what_could_never_work_is_refused_with_its_field(
    spec: dict[str, Any], param: str, words: str, api: APIClient
) -> None:
    answer = make(api, **spec)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid", param)
    assert words in error["message"]
    assert "s3cr3t" not in error["message"]
    assert not Channel.objects.exists()


def test_names_are_given_once_and_channels_have_a_limit(api: APIClient, incident: Incident) -> None:
    assert make(api).status_code == 201
    again = make(api)
    assert again.status_code == 400
    assert "is taken, for http://127.0.0.1:1/…" in again.json()["error"]["message"]
    for n in range(CHANNELS_PER_TENANT_MAX - 1):
        Channel.objects.create(tenant=incident.tenant, name=f"c{n}", url="http://x/")
    assert "allowed: 50 channels" in make(api, name="more").json()["error"]["message"]


def test_a_test_is_sent_now_and_its_fate_told(api: APIClient, receiver: Receiver) -> None:
    url = f"/api/v1/channels/{make(api, url=receiver.url).json()['id']}/test/"
    receiver.answer(500, "not now")
    sent = api.post(url)
    assert sent.status_code == 200
    assert (sent.json()["state"], sent.json()["error"]) == ("failed", "HTTP 500: not now")
    assert (sent.json()["permanent"], sent.json()["next_try_at"]) == (False, None)
    assert api.post(url).json()["state"] == "sent"
    assert [body["event"] for _, _, body in receiver.got] == ["channel.test"] * 2
    assert receiver.got[1][2]["title"] == "A test from Trimtab"


def test_every_kind_is_listed_with_what_it_wants(api: APIClient) -> None:
    kinds = {row["kind"]: row for row in api.get("/api/v1/channel-kinds/").json()["kinds"]}
    assert set(kinds) == {"dingtalk", "feishu", "slack", "teams", "webhook", "wecom"}
    assert [kind for kind, row in kinds.items() if row["signs"]] == [
        "dingtalk", "feishu", "webhook",
    ]  # fmt: skip


def test_a_silence_is_made_listed_and_ended(api: APIClient) -> None:
    until = timezone.now() + timedelta(hours=2)
    body = {"service": "chat", "reason": "planned", "until": until.isoformat()}
    made = api.post("/api/v1/silences/", body, format="json")
    assert made.status_code == 201, made.content
    assert made.json()["by"] == "token ci"
    url = f"/api/v1/silences/{made.json()['id']}/"
    assert [s["id"] for s in api.get("/api/v1/silences/?active=true").json()["silences"]] == [
        made.json()["id"]
    ]
    assert api.delete(url).json()["ended_at"]
    assert api.get("/api/v1/silences/?active=true").json()["silences"] == []
    assert api.get("/api/v1/silences/?active=false").json()["silences"] == [api.get(url).json()]
    assert [e.verb for e in AuditEntry.objects.filter(noun="silence")] == ["created", "ended"]


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        ({"service": ""}, "service"),
        ({"until": "soon"}, "until"),
        ({"until": None}, "until"),
        ({"until": "2020-01-01T00:00:00Z"}, "until"),
        ({"until": "2200-01-01T00:00:00Z"}, "until"),
        ({"reason": ""}, "reason"),
        ({"reason": None}, "reason"),
        ({"engine": 5}, "engine"),
        ({"engine": "engine-9"}, "engine"),
        ({"objective": "latecy"}, "objective"),
        ({"service": "chats"}, "service"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_silence_wants_a_scope_a_reason_and_an_end(
    spec: dict[str, Any], param: str, api: APIClient
) -> None:
    until = (timezone.now() + timedelta(hours=2)).isoformat()
    body = {"service": "chat", "reason": "planned", "until": until, **spec}
    answer = api.post("/api/v1/silences/", body, format="json")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not Silence.objects.exists()


def test_the_log_is_filtered_and_paged(api: APIClient, incident: Incident) -> None:
    for name in ("a", "b", "c"):
        make(api, name=name)
    incident_tell(
        incident=incident, story=Story(what="T"), now=NOW, links={"approve": "http://t/a/secret/"}
    )
    Delivery.objects.filter(channel__name="b").update(
        state="failed", attempts=1, last_status=404, last_error="HTTP 404", permanent=True
    )
    page = api.get("/api/v1/deliveries/?limit=2").json()
    rest = api.get("/api/v1/deliveries/", {"cursor": page["next"]}).json()
    assert (len(page["deliveries"]), len(rest["deliveries"]), rest["next"]) == (2, 1, None)
    (failed,) = api.get("/api/v1/deliveries/?state=failed&channel=b").json()["deliveries"]
    assert (failed["status"], failed["permanent"], failed["title"]) == (404, True, "T")
    assert "a/secret" not in str(page) + str(rest), "a link to approve is for the channel alone"
    found = api.get(f"/api/v1/deliveries/?incident={incident.pk}&event=opened").json()
    assert len(found["deliveries"]) == 3
    assert api.get("/api/v1/deliveries/?state=lost").status_code == 400
    assert api.get("/api/v1/deliveries/?incident=x").status_code == 400


def test_a_token_that_reads_changes_nothing(api: APIClient, incident: Incident) -> None:
    reader = client_of(incident.tenant, "read")
    url = f"/api/v1/channels/{make(api).json()['id']}/"
    assert reader.get(url).status_code == 200
    assert make(reader, name="mine").status_code == 403
    assert reader.post(f"{url}test/").status_code == 403
    assert reader.delete(url).status_code == 403
    assert reader.post("/api/v1/silences/", {}, format="json").status_code == 403


def test_another_tenant_sees_and_changes_nothing(api: APIClient, incident: Incident) -> None:
    channel = f"/api/v1/channels/{make(api).json()['id']}/"
    until = (timezone.now() + timedelta(hours=2)).isoformat()
    body = {"service": "chat", "reason": "r", "until": until}
    silence = f"/api/v1/silences/{api.post('/api/v1/silences/', body, format='json').json()['id']}/"
    incident_tell(incident=incident, story=Story(what="T"), now=NOW)
    other = client_of(Tenant.objects.create(slug="other", name="Other"))
    for url in (channel, silence):
        assert other.get(url).status_code == 404
        assert other.delete(url).status_code == 404
    assert other.patch(channel, {"enabled": False}, format="json").status_code == 404
    assert other.post(f"{channel}test/").status_code == 404
    for noun in ("channels", "silences", "deliveries"):
        assert other.get(f"/api/v1/{noun}/").json()[noun] == []
    assert other.get(f"/api/v1/deliveries/?incident={incident.pk}").json()["deliveries"] == []
    assert Silence.objects.get().ended_at is None
