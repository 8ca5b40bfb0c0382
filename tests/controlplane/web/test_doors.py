"""Who may see a page: who has signed in, as whom, and for which tenant."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from controlplane.accounts import throttle
from controlplane.diagnosis.models import Incident
from controlplane.web.forms import TRIES_PER_MIN
from tests.controlplane.web.answers import text
from tests.controlplane.web.world import TRACE_ID, World, member, world


@pytest.mark.parametrize(
    "address",
    [
        "/",
        "/objectives/",
        "/objectives/ttft/",
        "/incidents/",
        f"/traces/{TRACE_ID}/",
        "/series/ttft/",
    ],
)
def test_anonymous_signs_in_first(client: Client, empty: World, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 302
    assert answer["Location"].startswith("/login/?next=")


def test_a_stranger_in_no_tenant_is_told_whom_to_ask(client: Client, empty: World) -> None:
    user = member(empty.tenant)
    user.memberships.all().delete()
    client.force_login(user)
    answer = client.get("/")
    assert answer.status_code == 403
    assert "You belong to no tenant yet" in answer.content.decode()


def test_another_tenants_things_are_not_found(ada: Any, full: World) -> None:
    found = Incident.objects.get()
    other = world("other")
    other.objectives["ttft"].delete()
    client = ada(other)
    for address in (
        f"/incidents/{found.pk}/", "/objectives/ttft/", "/series/ttft/", f"/traces/{TRACE_ID}/",
    ):  # fmt: skip
        assert client.get(address).status_code == 404, address
    assert "184 of 412" not in text(client.get("/"))
    assert "184 of 412" not in text(client.get("/incidents/"))


def test_a_password_is_not_guessed_at_speed(
    client: Client, empty: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(throttle.time, "monotonic", lambda: now)
    member(empty.tenant, "guessed")
    wrong = {"username": "guessed", "password": "wrong"}
    tries = [text(client.post("/login/", wrong)) for _ in range(TRIES_PER_MIN + 1)]
    assert ["Too many tries" in page for page in tries] == [False] * TRIES_PER_MIN + [True]
    for way_round in ({"username": "ｇuessed"}, {"password": ""}, {}):
        page = text(client.post("/login/", wrong | way_round))
        assert "Too many tries" in page, way_round
    right = {"username": "guessed", "password": "a long enough password"}
    assert "Too many tries" in text(client.post("/login/", right))
    elsewhere = client.post("/login/", right, REMOTE_ADDR="192.0.2.7")
    assert elsewhere["Location"] == "/"
    now += 60 / TRIES_PER_MIN
    assert Client().post("/login/", right)["Location"] == "/"


def test_sign_in_and_out(client: Client, empty: World) -> None:
    member(empty.tenant)
    assert "do not match" in text(client.post("/login/", {"username": "ada", "password": "wrong"}))
    answer = client.post("/login/", {"username": "ada", "password": "a long enough password"})
    assert answer["Location"] == "/"
    assert "Sign out" in text(client.get("/"))
    assert client.post("/logout/")["Location"] == "/login/"
    assert client.get("/").status_code == 302


def test_an_expired_form_says_what_to_do(empty: World) -> None:
    answer = Client(enforce_csrf_checks=True).post("/login/", {"username": "a", "password": "b"})
    assert answer.status_code == 403
    assert "This form has expired." in answer.content.decode()


def test_pages_cannot_be_written_to(ada: Any, empty: World) -> None:
    assert ada(empty).post("/").status_code == 405
