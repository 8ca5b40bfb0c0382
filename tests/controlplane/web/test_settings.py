"""Settings: channels, deliveries, silences, tokens, members, audit; who may change them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.accounts import audit, throttle
from controlplane.accounts.models import AuditEntry, Membership, Tenant, Token
from controlplane.accounts.selectors import token_find
from controlplane.alerts.models import Channel, Delivery, Silence
from controlplane.web.forms import TRIES_PER_MIN
from controlplane.web.pages import settings_audit
from tests.controlplane.alerts.conftest import receiver  # noqa: F401 -- a fixture
from tests.controlplane.alerts.receiver import Receiver
from tests.controlplane.web.answers import text
from tests.controlplane.web.furnished import furnish, reach
from tests.controlplane.web.world import PASSWORD, World, world

PAGES = ("channels", "deliveries", "silences", "tokens", "members", "audit")
PATH = "T0KEN-in-the-path"


@pytest.fixture
def owner(ada: Any, full: World) -> Client:
    client: Client = ada(full)
    Membership.objects.update(role=Membership.Role.OWNER)
    return client


def channel(url: str, **more: str) -> dict[str, str]:
    return {
        "name": "oncall", "kind": "webhook", "url": url, "secret": "", "severity_min": "ticket",
        "remind_minutes": "60", **more,
    }  # fmt: skip


# --- who may --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_pages_stand_before_there_is_anything(ada: Any, empty: World, page: str) -> None:
    assert "<h1>Settings</h1>" in text(ada(empty).get(f"/settings/{page}/"))


def test_the_noun_leads_to_the_first_page(owner: Client) -> None:
    assert owner.get("/settings/")["Location"] == "/settings/channels/"


@pytest.mark.parametrize("page", PAGES)
def test_a_viewer_sees_everything_and_no_form(ada: Any, full: World, page: str) -> None:
    furnish(full)
    client = ada(full)
    Membership.objects.filter(user__username="ada").update(role=Membership.Role.VIEWER)
    main = text(client.get(f"/settings/{page}/")).partition("<main")[2].partition("</main")[0]
    assert 'method="post"' not in main
    if page not in ("deliveries", "audit"):
        assert client.post(f"/settings/{page}/", {}).status_code == 403


@pytest.mark.parametrize("page", ["tokens", "members"])
def test_who_may_come_in_is_the_owners_to_say(ada: Any, full: World, page: str) -> None:
    furnish(full)
    client = ada(full)  # an operator
    main = text(client.get(f"/settings/{page}/")).partition("<main")[2].partition("</main")[0]
    assert 'method="post"' not in main
    token, member = Token.objects.filter(revoked_at=None).first(), Membership.objects.first()
    assert token is not None
    assert member is not None
    for address in (
        "tokens/", f"tokens/{token.pk}/revoke/", f"members/{member.pk}/role/",
        f"members/{member.pk}/remove/", "members/", f"members/{member.pk}/link/",
        f"members/{member.pk}/deactivate/", f"members/{member.pk}/activate/",
    ):  # fmt: skip
        assert client.post(f"/settings/{address}", {"role": "owner"}).status_code == 403
    assert Token.objects.filter(revoked_at=None).count() == 2


def test_another_tenants_things_do_not_exist(ada: Any, full: World) -> None:
    furnish(full)
    theirs = {
        "channels": Channel.objects.first(), "silences": Silence.objects.first(),
        "tokens": Token.objects.first(), "members": Membership.objects.first(),
    }  # fmt: skip
    client = ada(world("other"), "eve")
    Membership.objects.filter(user__username="eve").update(role=Membership.Role.OWNER)
    verbs = {"channels": ("test", "remove"), "silences": ("end",), "tokens": ("revoke",),
             "members": ("role", "remove", "link", "activate", "deactivate")}  # fmt: skip
    for noun, thing in theirs.items():
        assert thing is not None
        for verb in verbs[noun]:
            answer = client.post(f"/settings/{noun}/{thing.pk}/{verb}/", {"role": "viewer"})
            assert answer.status_code == 404, (noun, verb)
    assert client.get(f"/settings/channels/{theirs['channels'].pk}/").status_code == 404  # type: ignore[union-attr]
    for page in PAGES:
        said = text(client.get(f"/settings/{page}/"))
        for word in (">relay<", "moving racks", "collector", "grace", "chat-oncall"):
            assert word not in said, (page, word)


# --- channels -------------------------------------------------------------------------------------


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


# --- tokens, members ------------------------------------------------------------------------------


def test_a_token_is_shown_once_and_revoked(owner: Client) -> None:
    form = {"name": "ci", "kind": "api", "scopes": ["read", "act"]}
    said = text(owner.post("/settings/tokens/", form), 201)
    secret = re.search(r"tt_api_[A-Za-z0-9_-]{43}", said)
    assert secret is not None
    made = token_find(secret[0], kinds={"api"})
    assert made is not None
    assert made.scopes == ["read", "act"]
    assert AuditEntry.objects.get(noun="token").actor == "ada"
    assert secret[0] not in text(owner.get("/settings/tokens/"))
    assert owner.post(f"/settings/tokens/{made.pk}/revoke/").status_code == 302
    assert token_find(secret[0], kinds={"api"}) is None
    assert "revoked" in text(owner.get("/settings/tokens/"))


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"name": "", "kind": "api", "scopes": ["read"]}, "name"),
        ({"name": "x", "kind": "api"}, "scopes"),
        ({"name": "x", "kind": "ingest", "scopes": ["read"]}, "scopes"),
        ({"name": "x", "kind": "api", "scopes": ["rule"]}, "scopes"),
        ({"name": "x", "kind": "spare"}, "kind"),
    ],
)
def test_a_token_that_cannot_be_says_why(owner: Client, form: dict[str, Any], field: str) -> None:
    answer = owner.post("/settings/tokens/", form)
    assert list(answer.context["form"].errors) == [field], text(answer, 400)
    assert not Token.objects.exists()


def test_a_member_gets_another_role_and_is_taken_out(owner: Client, full: World) -> None:
    furnish(full)
    grace = Membership.objects.get(user__username="grace")
    owner.post(f"/settings/members/{grace.pk}/role/", {"role": "operator"})
    grace.refresh_from_db()
    assert grace.role == "operator"
    assert owner.post(f"/settings/members/{grace.pk}/remove/").status_code == 302
    assert "grace" not in text(owner.get("/settings/members/"))
    assert owner.post(f"/settings/members/{grace.pk}/remove/").status_code == 404


@pytest.mark.parametrize(("verb", "form"), [("role", {"role": "viewer"}), ("remove", {})])
def test_the_last_owner_stays(owner: Client, verb: str, form: dict[str, str]) -> None:
    ada = Membership.objects.get()
    said = text(owner.post(f"/settings/members/{ada.pk}/{verb}/", form), 409)
    assert "A tenant needs an owner" in said
    assert Membership.objects.get().role == "owner"
    bad = owner.post(f"/settings/members/{ada.pk}/role/", {"role": "queen"})
    assert "queen" in text(bad, 400)


def test_somebody_is_let_in_by_a_link_shown_once(owner: Client) -> None:
    said = text(owner.post("/settings/members/", {"name": "grace", "role": "operator"}), 201)
    link = re.search(r"https?://[^<]+/welcome/[^<]+/", said)
    assert link is not None
    assert "it is shown this once" in said
    for page in ("members", "audit"):
        assert "/welcome/" not in text(owner.get(f"/settings/{page}/"))
    path = "/" + link[0].split("/", 3)[3]
    browser = Client()
    opened = browser.get(path, follow=True)
    assert "Welcome, grace" in text(opened)
    form = {"new_password1": "tide-and-time-1", "new_password2": "tide-and-time-2"}
    inside = opened.redirect_chain[-1][0]
    assert list(browser.post(inside, form).context["form"].errors) == ["new_password2"]
    form["new_password2"] = form["new_password1"]
    assert browser.post(inside, form)["Location"] == "/"
    assert 'class="who"' in text(browser.get("/"))
    assert "This link has ended." in text(Client().get(path), 410)


@pytest.mark.parametrize(
    ("form", "field"),
    [({"name": "ada", "role": "viewer"}, "name"), ({"name": "a b", "role": "viewer"}, "name"),
     ({"name": "", "role": "viewer"}, "name"), ({"name": "eve", "role": "queen"}, "role")],
)  # fmt: skip
def test_who_cannot_be_let_in_is_said_beside_the_field(
    owner: Client, form: dict[str, str], field: str
) -> None:
    answer = owner.post("/settings/members/", form)
    assert list(answer.context["form"].errors) == [field], text(answer, 400)
    assert Membership.objects.count() == 1


def test_a_member_is_deactivated_and_activated(owner: Client, full: World) -> None:
    furnish(full)
    grace = Membership.objects.get(user__username="grace")
    address = f"/settings/members/{grace.pk}"
    assert owner.post(f"{address}/deactivate/").status_code == 302
    assert ">deactivated<" in text(owner.get("/settings/members/"))
    assert "grace is deactivated" in text(owner.post(f"{address}/link/"), 409)
    assert owner.post(f"{address}/activate/").status_code == 302
    assert "/welcome/" in text(owner.post(f"{address}/link/"))


def test_tries_at_the_own_password_are_slowed(
    ada: Any, full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may sit at a page that was left open."""
    now = 5_000.0
    monkeypatch.setattr(throttle.time, "monotonic", lambda: now)
    client = ada(full)
    form = {"old_password": "a guess", "new_password1": "a-new-tide-9"}
    form["new_password2"] = form["new_password1"]

    def told() -> str:
        return text(client.post("/settings/password/", form), 400)

    tries = [told() for _ in range(TRIES_PER_MIN + 1)]
    assert ["Too many tries" in page for page in tries] == [False] * TRIES_PER_MIN + [True]
    form["old_password"] = PASSWORD
    assert "Too many tries" in told(), "also at the right one"
    now += 60 / TRIES_PER_MIN
    assert client.post("/settings/password/", form).status_code == 302


def test_a_person_changes_the_own_password(client: Client, ada: Any, full: World) -> None:
    ada(full)
    Membership.objects.update(role=Membership.Role.VIEWER)
    elsewhere = Client()
    assert elsewhere.login(username="ada", password=PASSWORD)
    form = {"old_password": "wrong", "new_password1": "short", "new_password2": "short"}
    answer = client.post("/settings/password/", form)
    assert set(answer.context["form"].errors) == {"old_password", "new_password2"}
    assert answer.status_code == 400
    form = {"old_password": PASSWORD, "new_password1": "a-new-tide-9"}
    form["new_password2"] = form["new_password1"]
    answer = client.post("/settings/password/", form)
    assert "Your password is changed." in text(client.get(answer["Location"]))
    assert elsewhere.get("/").status_code == 302
    assert Client().login(username="ada", password="a-new-tide-9")
    told = AuditEntry.objects.get(noun="password")
    assert (told.actor, told.verb, told.subject) == ("ada", "changed", "ada")
    assert "tide" not in str(told.detail)


# --- audit ----------------------------------------------------------------------------------------


def test_the_audit_log_says_whether_its_chain_holds(owner: Client, full: World) -> None:
    furnish(full)
    said = text(owner.get("/settings/audit/"))
    assert "The chain holds." in said
    assert audit.verify(full.tenant).head in said
    narrowed = text(owner.get("/settings/audit/?noun=token&actor=ada"))
    assert narrowed.count("<tr data-row") == AuditEntry.objects.filter(noun="token").count() == 4
    assert "No entry fits." in text(owner.get("/settings/audit/?subject=nobody"))
    assert "allowed:" in text(owner.get("/settings/audit/?after=1"), 400)
    super(type(AuditEntry.objects.all()), AuditEntry.objects.filter(number=2)).update(actor="eve")
    said = text(owner.get("/settings/audit/"))
    assert "The chain is broken." in said
    assert "entry 2 was changed" in said


def test_the_audit_log_calls_an_action_by_its_change(owner: Client, full: World) -> None:
    action = full.tenant.actions.first()
    assert action is not None
    audit.record(
        tenant=full.tenant, actor="ada", verb="used", noun="link", subject=str(action.pk),
        detail={"what": str(action), "link": "approve"},
    )  # fmt: skip
    said = text(owner.get(f"/settings/audit/?subject={action.pk}"))
    assert f"used link <code>{action}</code>" in said
    assert f"<dt>id</dt><dd>{action.pk}</dd><dt>link</dt><dd>approve</dd>" in said
    assert f"<code>{action.pk}" not in said


def test_the_audit_log_calls_a_step_as_the_actions_own_page_does(
    owner: Client, full: World
) -> None:
    action = full.tenant.actions.first()
    assert action is not None
    for verb in ("verified", "rolled_back", "cleared"):
        audit.record(
            tenant=full.tenant, actor="agent", verb=verb, noun="action", subject=str(action.pk),
            detail={"what": str(action)},
        )  # fmt: skip
    said = text(owner.get("/settings/audit/?noun=action&actor=agent"))
    for words in ("kept", "rolled back", "cleared"):
        assert f">{words} action <code>{action}</code>" in said


def test_a_long_chain_is_checked_when_asked_to(
    owner: Client, full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(full)
    monkeypatch.setattr(settings_audit, "CHECKED_AT_ONCE_MAX", 3)
    assert "Check the whole chain" in text(owner.get("/settings/audit/"))
    assert "The chain holds." in text(owner.get("/settings/audit/?check=1"))


def test_a_long_chain_is_not_read_again_and_again(
    owner: Client, full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(full)
    monkeypatch.setattr(settings_audit, "CHECKED_AT_ONCE_MAX", 3)
    read: list[Tenant] = []
    real = audit.verify

    def counted(tenant: Tenant, **options: str) -> audit.Check:
        read.append(tenant)
        return real(tenant, **options)

    monkeypatch.setattr(audit, "verify", counted)
    for _ in range(3):
        assert "Checked <time" in text(owner.get("/settings/audit/?check=1"))
    assert read == [full.tenant]
    later = timezone.now() + audit.CHECK_EVERY
    assert audit.verify_seldom(full.tenant, later)
    assert len(read) == 2
    # While one reads, another is told to come back.
    audit._checking.add(full.tenant.pk)
    try:
        assert audit.verify_seldom(full.tenant, later + audit.CHECK_EVERY) is None
        monkeypatch.setattr(audit, "_checks", {})
        assert "checked for somebody else" in text(owner.get("/settings/audit/?check=1"))
    finally:
        audit._checking.clear()
    assert len(read) == 2
