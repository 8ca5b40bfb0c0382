from __future__ import annotations

import pytest
from rest_framework.test import APIClient

from controlplane.accounts.models import Tenant
from controlplane.accounts.parsers import NESTING_MAX, StrictJson
from tests.rest import client_of

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.accounts.views")]


@pytest.fixture
def api(tenant: Tenant) -> APIClient:
    return client_of(tenant)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "Expecting property name"),
        (rb'{"name": "\ud800"}', "not Unicode"),
        (rb'{"\udfff": 1}', "not Unicode"),
        (b'{"name": "\xff"}', "not Unicode"),
        (b'{"x": NaN}', "Out of range float values"),
        (b'{"x": 1e999}', "Out of range float values"),
        (b"9" * 5_000, "digits"),
        (nested(NESTING_MAX + 1), "nested too deep"),
        (nested(200_000), "nested too deep"),
    ],
)
def test_what_could_not_be_shown_again_is_not_let_in(
    api: APIClient, body: bytes, words: str
) -> None:
    answer = api.post("/who/", body, content_type="application/json")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_json", None)
    assert words in error["message"]


def test_any_text_and_reasonable_nesting_come_in_as_they_are(api: APIClient) -> None:
    body = rb'{"name": "\ud83d\ude00 \u2264", "deep": ' + nested(NESTING_MAX - 1) + b"}"
    answer = api.post("/who/", body, content_type="application/json")
    assert answer.status_code == 200
    assert answer.json()["said"]["name"] == "😀 ≤"


def test_a_body_over_the_limit_names_the_limit(
    api: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StrictJson, "bytes_max", 100)
    answer = api.post("/who/", b" " * 101, content_type="application/json")
    assert answer.status_code == 413
    assert "100 bytes" in answer.json()["error"]["message"]
