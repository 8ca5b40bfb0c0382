"""Settings: tokens, members, and the own password."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from controlplane.accounts import throttle
from controlplane.accounts.models import AuditEntry, Membership, Token
from controlplane.accounts.selectors import token_find
from controlplane.web.forms import TRIES_PER_MIN
from tests.controlplane.web.answers import text
from tests.controlplane.web.furnished import furnish
from tests.controlplane.web.world import PASSWORD, World


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
