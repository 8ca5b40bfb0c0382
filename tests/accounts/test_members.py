"""Who belongs to a tenant: let in by a link, paused, taken out; never without an owner."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.test import Client
from rest_framework.test import APIClient

from controlplane.accounts import members
from controlplane.accounts.audit import verify
from controlplane.accounts.models import AuditEntry, Membership, Tenant
from controlplane.accounts.selectors import membership_of
from controlplane.accounts.services import tenant_create, token_create

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 29, tzinfo=UTC)
CHOSEN = "keeps-the-tide-out-7"


@pytest.fixture
def owner(tenant: Tenant) -> Membership:
    return members.member_add(tenant=tenant, name="ada", role="owner", actor="trimtab")


def grace(tenant: Tenant) -> Membership:
    return members.member_add(tenant=tenant, name="grace", role="viewer", actor="ada")


def chooses(member: Membership) -> None:
    member.user.set_password(CHOSEN)
    member.user.save()


def follow(url: str, password: str = CHOSEN) -> tuple[Client, int]:
    """Opens the link as its owner would and chooses; the browser, and the last status."""
    browser = Client()
    opened = browser.get(urlsplit(url).path, follow=True)
    if opened.status_code != 200:
        return browser, opened.status_code
    form = {"new_password1": password, "new_password2": password}
    return browser, browser.post(opened.redirect_chain[-1][0], form).status_code


# -- coming in ----------------------------------------------------------------------------------


def test_who_is_let_in_chooses_the_password_and_is_signed_in(
    tenant: Tenant, owner: Membership
) -> None:
    member = grace(tenant)
    assert not member.user.has_usable_password()
    url = members.password_link(member=member, actor="ada")
    browser, status = follow(url)
    assert status == 302
    assert browser.get("/settings/members/").status_code == 200
    assert Client().login(username="grace", password=CHOSEN)
    assert follow(url)[1] == 410
    told = AuditEntry.objects.filter(tenant=tenant).values_list("actor", "verb", "noun")
    assert list(told)[1:] == [
        ("ada", "added", "member"), ("ada", "gave a password link to", "member"),
        ("grace", "changed", "password"),
    ]  # fmt: skip
    assert verify(tenant).holds
    token = url.rstrip("/").rpartition("/")[2]
    assert token not in str(AuditEntry.objects.values_list("detail", "subject"))


def test_a_weak_password_is_not_taken_and_the_link_stays_good(
    tenant: Tenant, owner: Membership
) -> None:
    url = members.password_link(member=grace(tenant), actor="ada")
    assert follow(url, "password")[1] == 400
    assert follow(url)[1] == 302


@pytest.mark.parametrize(
    ("name", "role", "param"),
    [("", "viewer", "name"), ("a b", "viewer", "name"), ("x" * 151, "viewer", "name"),
     ("ADA", "viewer", "name"), ("ＡＤＡ", "viewer", "name"), ("grace", "queen", "role")],
)  # fmt: skip
def test_who_cannot_be_let_in_is_named(
    tenant: Tenant, owner: Membership, name: str, role: str, param: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        members.member_add(tenant=tenant, name=name, role=role, actor="ada")
    assert list(refused.value.message_dict) == [param]
    assert Membership.objects.count() == 1


def test_an_account_is_not_taken_from_another_tenant(tenant: Tenant, owner: Membership) -> None:
    other = tenant_create(slug="other", name="Other")
    with pytest.raises(ValidationError, match="taken"):
        members.member_add(tenant=other, name="ada", role="owner", actor="eve")


def test_an_account_that_belongs_nowhere_is_taken_up_anew(
    tenant: Tenant, owner: Membership
) -> None:
    member = grace(tenant)
    User.objects.filter(username="grace").update(is_staff=True)
    chooses(member)
    members.member_remove(member=member, actor="ada")
    again = grace(tenant)
    assert again.user_id == member.user_id
    assert not again.user.is_staff
    assert not Client().login(username="grace", password=CHOSEN)


def test_there_is_a_most(
    tenant: Tenant, owner: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MEMBERS_PER_TENANT_MAX", 1)
    with pytest.raises(ValidationError, match="1 members are the most"):
        grace(tenant)


# -- a pause ------------------------------------------------------------------------------------


def test_who_is_deactivated_sees_nothing_until_activated(tenant: Tenant, owner: Membership) -> None:
    member = grace(tenant)
    link = members.password_link(member=member, actor="ada")
    browser = Client()
    browser.force_login(member.user)
    assert browser.get("/").status_code == 200
    for _twice in range(2):
        members.member_deactivate(member=member, actor="ada", now=NOW)
    assert member.deactivated_at == NOW
    assert membership_of(member.user) is None
    for address in ("/", "/api/v1/members/", "/events/"):
        assert browser.get(address).status_code == 403, address
    assert follow(link)[1] == 410
    with pytest.raises(members.MemberError, match="grace is deactivated"):
        members.password_link(member=member, actor="ada")
    for _twice in range(2):
        members.member_activate(member=member, actor="ada")
    assert browser.get("/").status_code == 200
    verbs = AuditEntry.objects.filter(subject="grace").values_list("verb", flat=True)
    assert list(verbs)[2:] == ["deactivated", "activated"]


def test_the_last_active_owner_stays(tenant: Tenant, owner: Membership) -> None:
    second = members.member_add(tenant=tenant, name="joan", role="owner", actor="ada")
    for each in (owner, second):
        chooses(each)
    members.member_deactivate(member=second, actor="ada", now=NOW)
    for leave in (
        lambda: members.member_deactivate(member=owner, actor="ada", now=NOW),
        lambda: members.member_change(member=owner, role="viewer", actor="ada"),
        lambda: members.member_remove(member=owner, actor="ada"),
    ):
        with pytest.raises(members.LastOwner):
            leave()
    members.member_activate(member=second, actor="ada")
    members.member_deactivate(member=owner, actor="joan", now=NOW)
    assert membership_of(owner.user) is None


def test_who_never_chose_a_password_is_no_owner_to_leave_a_tenant_to(
    tenant: Tenant, owner: Membership
) -> None:
    second = members.member_add(tenant=tenant, name="joan", role="owner", actor="ada")
    with pytest.raises(members.LastOwner, match="with a password"):
        members.member_remove(member=owner, actor="ada")
    follow(members.password_link(member=second, actor="ada"))
    members.member_remove(member=owner, actor="ada")
    assert [m.user.username for m in Membership.objects.all()] == ["joan"]


def test_who_is_no_owner_goes_whatever_owners_there_are(tenant: Tenant, owner: Membership) -> None:
    member = grace(tenant)
    Membership.objects.filter(pk=owner.pk).update(deactivated_at=NOW)
    members.member_deactivate(member=member, actor="trimtab", now=NOW)
    members.member_remove(member=member, actor="trimtab")
    assert Membership.objects.get() == owner


def test_a_link_is_not_given_to_an_account_others_share(tenant: Tenant, owner: Membership) -> None:
    other = tenant_create(slug="other", name="Other")
    shared = Membership.objects.create(tenant=other, user=owner.user, role="viewer")
    with pytest.raises(members.MemberError, match="another tenant"):
        members.password_link(member=shared, actor="eve")


# -- REST ---------------------------------------------------------------------------------------


@pytest.fixture
def rest(owner: Membership) -> APIClient:
    client = APIClient()
    client.force_login(owner.user)
    return client


def test_rest_lets_in_pauses_and_links(tenant: Tenant, rest: APIClient) -> None:
    made = rest.post("/api/v1/members/", {"name": "grace", "role": "viewer"}, format="json")
    assert made.status_code == 201, made.content
    assert follow(made.json()["password_url"])[1] == 302
    address = "/api/v1/members/grace/"
    assert "password_url" not in rest.get(address).json()
    paused = rest.put(address, {"role": "operator", "active": False}, format="json").json()
    assert paused["role"] == "operator"
    assert paused["deactivated_at"]
    assert rest.post(f"{address}password-link/").json()["error"]["code"] == "conflict"
    assert rest.put(address, {"active": True}, format="json").json()["deactivated_at"] is None
    linked = rest.post(f"{address}password-link/")
    assert linked.status_code == 201
    assert follow(linked.json()["password_url"], "another-tide-8")[1] == 302
    taken = rest.post("/api/v1/members/", {"name": "grace", "role": "viewer"}, format="json")
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "name")


def test_all_or_nothing_of_a_change_is_made(tenant: Tenant, rest: APIClient) -> None:
    body = {"role": "owner", "active": False}
    assert rest.put("/api/v1/members/ada/", body, format="json").status_code == 409
    assert Membership.objects.get().deactivated_at is None


def test_no_token_and_no_operator_lets_anybody_in(tenant: Tenant, owner: Membership) -> None:
    _, secret = token_create(tenant=tenant, kind="api", name="ci")
    by_token = APIClient(headers={"Authorization": f"Bearer {secret}"})
    operator = APIClient()
    joan = members.member_add(tenant=tenant, name="joan", role="operator", actor="ada")
    operator.force_login(joan.user)
    for client in (by_token, operator):
        for address, body in (
            ("/api/v1/members/", {"name": "eve", "role": "owner"}),
            ("/api/v1/members/ada/password-link/", {}),
        ):
            assert client.post(address, body, format="json").status_code == 403
    assert not User.objects.filter(username="eve").exists()
