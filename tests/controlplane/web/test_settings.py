"""Settings: every page stands, and who may change what."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from controlplane.accounts.models import Membership, Token
from controlplane.alerts.models import Channel, Silence
from tests.controlplane.web.answers import text
from tests.controlplane.web.furnished import furnish
from tests.controlplane.web.world import World, world

PAGES = ("channels", "deliveries", "silences", "tokens", "members", "audit")


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
