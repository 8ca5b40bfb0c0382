"""Settings: channels, what was delivered through them, and silences."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from controlplane.alerts.models import Channel, Delivery, Silence
from tests.controlplane.alerts.conftest import receiver  # noqa: F401 -- a fixture
from tests.controlplane.alerts.receiver import Receiver
from tests.controlplane.web.answers import text
from tests.controlplane.web.furnished import reach
from tests.controlplane.web.world import World

PATH = "T0KEN-in-the-path"


def channel(url: str, **more: str) -> dict[str, str]:
    return {
        "name": "oncall", "kind": "webhook", "url": url, "secret": "", "severity_min": "ticket",
        "remind_minutes": "60", **more,
    }  # fmt: skip


def test_a_channel_is_made_and_its_secret_shown_once(owner: Client) -> None:
    said = text(owner.post("/settings/channels/", channel(f"https://relay.example/{PATH}")))
    secret = re.search(r"whsec_[A-Za-z0-9+/=]+", said)
    assert secret is not None
    assert "it is shown this once" in said
    made = Channel.objects.get(name="oncall")
    for address in ("/settings/channels/", f"/settings/channels/{made.pk}/", "/settings/audit/"):
        said = text(owner.get(address))
        assert secret[0] not in said
        assert PATH not in said
    assert "https://relay.example/…" in text(owner.get("/settings/channels/"))


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"url": "ftp://x"}, "url"), ({"name": "chat-oncall"}, "name"), ({"name": ""}, "name"),
        ({"kind": "pigeon"}, "kind"), ({"secret": "short"}, "secret"),
        ({"remind_minutes": "-1"}, "remind_minutes"), ({"remind_minutes": "x"}, "remind_minutes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_beside_its_field(
    owner: Client, more: dict[str, str], field: str
) -> None:
    answer = owner.post("/settings/channels/", channel("https://relay.example/x") | more)
    said = text(answer, 400)
    assert list(answer.context["form"].errors) == [field]
    assert f'id="id_{field}_error"' in said
    assert 'value="short"' not in said
    assert Channel.objects.count() == 1


def test_a_channel_is_changed_and_keeps_what_was_left_empty(owner: Client) -> None:
    owner.post("/settings/channels/", channel(f"https://relay.example/{PATH}"))
    made = Channel.objects.get(name="oncall")
    address = f"/settings/channels/{made.pk}/"
    form = {"name": "night", "url": "", "secret": "", "severity_min": "page", "remind_minutes": "0"}
    assert owner.post(address, form)["Location"] == address
    changed = Channel.objects.get(pk=made.pk)
    assert (changed.name, changed.enabled, changed.remind_minutes) == ("night", False, 0)
    assert (changed.url, changed.secret) == (made.url, made.secret)
    owner.post(address, {**form, "enabled": "on"})
    assert Channel.objects.get(pk=made.pk).enabled
    taken = owner.post(address, {**form, "name": "chat-oncall"})
    assert "is taken" in text(taken, 400)
    assert PATH not in taken.content.decode()


def test_a_secret_is_replaced_and_taken_away(owner: Client) -> None:
    owner.post("/settings/channels/", channel("https://relay.example/x"))
    made = Channel.objects.get(name="oncall")
    address = f"/settings/channels/{made.pk}/"
    form = {"name": "oncall", "severity_min": "page", "remind_minutes": "0", "enabled": "on"}
    said = text(owner.post(address, {**form, "signing": "new"}))
    shown = re.search(r"whsec_[A-Za-z0-9+/=]+", said)
    assert shown is not None
    assert Channel.objects.get(pk=made.pk).secret == shown[0] != made.secret
    assert shown[0] not in text(owner.get(address))
    typed = "whsec_" + "A" * 40
    both = owner.post(address, {**form, "signing": "new", "secret": typed})
    assert list(both.context["form"].errors) == ["secret"], text(both, 400)
    assert owner.post(address, {**form, "secret": typed}).status_code == 302
    assert Channel.objects.get(pk=made.pk).secret == typed
    assert owner.post(address, {**form, "signing": "none"}).status_code == 302
    assert Channel.objects.get(pk=made.pk).secret == ""
    assert "signed</" not in text(owner.get(address))
    assert "not signed any more" not in text(owner.get(address))


def test_a_kind_that_does_not_sign_is_not_asked_for_a_secret(owner: Client) -> None:
    url = "https://hooks.slack.com/services/T0000/B0000/xxxxxxxxxxxxxxxxxxxxxxxx"
    owner.post("/settings/channels/", channel(url, kind="slack"))
    made = Channel.objects.get(name="oncall")
    form = owner.get(f"/settings/channels/{made.pk}/").context["form"]
    assert not {"secret", "signing"} & set(form.fields)


def test_a_test_shows_what_came_of_it(owner: Client, receiver: Receiver) -> None:  # noqa: F811
    owner.post("/settings/channels/", channel(receiver.url))
    made = Channel.objects.get(name="oncall")
    for status, words in ((200, "The test arrived."), (404, "Sending it again will not help."),
                          (503, "It may pass: send another.")):  # fmt: skip
        receiver.always(status)
        answer = owner.post(f"/settings/channels/{made.pk}/test/")
        assert words in text(owner.get(answer["Location"]))
    assert Delivery.objects.filter(event="test").count() == len(receiver.got) == 3
    assert "The test" not in text(owner.get(f"/settings/channels/{made.pk}/?tested=nonsense"))


def test_a_channel_is_removed_with_its_log(owner: Client) -> None:
    made = Channel.objects.get(name="chat-oncall")
    assert owner.post(f"/settings/channels/{made.pk}/remove/").status_code == 302
    assert not Delivery.objects.exists()
    assert "Nobody hears of an incident yet." in text(owner.get("/settings/channels/"))


# --- deliveries, silences -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "count"),
    [("", 3), ("state=failed", 1), ("event=reminded", 1), ("channel=relay", 1),
     ("channel=relay&state=sent", 0)],
)  # fmt: skip
def test_deliveries_are_narrowed(owner: Client, full: World, query: str, count: int) -> None:
    reach(full)
    said = text(owner.get(f"/settings/deliveries/?{query}"))
    assert said.count("<tr data-row") == count
    assert "very-secret-path" not in said


@pytest.mark.parametrize("query", ["state=x", "event=x", "after=x", "channel=%00"])
def test_a_filter_of_deliveries_nobody_can_follow_is_named(owner: Client, query: str) -> None:
    assert "allowed:" in text(owner.get(f"/settings/deliveries/?{query}"), 400)


def test_a_silence_is_made_and_ended(owner: Client) -> None:
    form = {"service": "chat", "objective": "", "engine": "", "lasts": "30d", "reason": "racks"}
    assert owner.post("/settings/silences/", form)["Location"] == "/settings/silences/"
    made = Silence.objects.get()
    assert (made.service, made.by, made.reason) == ("chat", "ada", "racks")
    assert "holds" in text(owner.get("/settings/silences/"))
    assert owner.post(f"/settings/silences/{made.pk}/end/").status_code == 302
    assert "ended early" in text(owner.get("/settings/silences/"))


@pytest.mark.parametrize(
    ("more", "field"),
    [({"service": ""}, "service"), ({"reason": ""}, "reason"), ({"lasts": "1y"}, "lasts"),
     ({"engine": "engine-9"}, "engine")],
)  # fmt: skip
def test_a_silence_that_cannot_be_says_why(owner: Client, more: dict[str, str], field: str) -> None:
    form = {"service": "chat", "lasts": "1h", "reason": "racks"} | more
    answer = owner.post("/settings/silences/", form)
    assert list(answer.context["form"].errors) == [field], text(answer, 400)
    assert not Silence.objects.exists()
